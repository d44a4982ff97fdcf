"""``Epochs``: how a process leaves the group of one epoch, and enters the next one.

An *epoch* is the time between two changes of a job's members, and has a group of its own. (Messages call it a
*membership*, because to users an epoch is a pass over the data.) Whatever outlives the loss of ranks uses this object:
blocks (``job``), runs (``runs``: attempts and Horovod's elastic training), replay (``replayed``), and the parameter
server (``server.renewal``). They differ in what the members of an epoch do until all have one state (``level``).
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, final

from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerLost,
    PlanMismatchError,
    RecoveryError,
    RendezvousError,
)
from totalreduce.groups import probe
from totalreduce.groups.group import Group
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.launcher_store import LauncherStore
from totalreduce.recovery.membership import Decision, Policy, reading
from totalreduce.schedules.select import LinkModel
from totalreduce.transports.liveness import SILENT

__all__ = ["CLOSE_S", "JOINING", "Epochs", "ended_early", "open_assembly"]

_log = logging.getLogger(__name__)

#: How long the end of a group may take that is not needed any more, or whose members are lost.
CLOSE_S: Final = 1.0
#: Why a group ends that has lost no rank.
JOINING: Final = "other processes join"
#: The number of epochs after which the memory of closed groups is given back: that takes 0.1 s.
_COLLECT_EVERY: Final = 4
#: So long after an epoch has begun, and so long after another seat. It takes 0.1 s and more, in which a rank does not
#: answer. When all ranks did it before they went on, five of them on two cores resumed 0.5 s later.
_COLLECT_AFTER_S, _COLLECT_APART_S = 1.0, 0.25


def open_assembly(settings: Settings, seat: int, num_seats: int, timeout_s: float) -> Assembly:
    """Connect to the launcher's store.

    Raises:
        ConfigurationError: The launcher has not said where the store is.
        RecoveryError: The store cannot be reached.
    """
    if settings.keeper is None:
        raise ConfigurationError("TOTALREDUCE_ON_LOSS is set and TOTALREDUCE_KEEPER is not: use totalreduce run")
    first_seats = settings.begin_ranks or range(num_seats)
    if settings.servers and max(first_seats) >= num_seats:  # the seats of the workers alone
        raise ConfigurationError(
            f"{settings.servers} ranks of this job only serve a parameter server (--servers), so only tr.ps.connect "
            "forms its group: start without --servers, or keep what must survive on the servers"
        )
    policy = Policy(
        on_loss="shrink" if settings.on_loss == "shrink" else "replace",
        world_size=len(first_seats),
        min_ranks=settings.min_ranks,
        deadline_s=timeout_s,
        max_ranks=num_seats,
        first_seats=first_seats,
    )
    return Assembly(LauncherStore.at(settings.keeper, timeout_s), policy, seat, settings.incarnation)


def ended_early() -> RecoveryError:
    """Return the error of a rank that has not come to the end of the job when the others have."""
    return RecoveryError("the other ranks have come to the end of the job, and this rank has not")


@final
class Epochs:
    """The epochs of one process in a job whose ranks can be replaced. One thread uses it."""

    def __init__(
        self,
        assembly: Assembly,
        form: Callable[..., Group],
        level: Callable[[Group, Decision], None],
        *,
        version: Callable[[], int] = lambda: 0,
        prepare: Callable[[Decision], None] = lambda _: None,
        check_end: Callable[[], None] = lambda: None,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        """Enter nothing yet.

        Args:
            assembly: See the attribute.
            form: Forms a group with the processes that meet in ``store=`` (``Group.formation``), with ``links=`` if
                they are known. Collective.
            level: Brings the ranks of a group to one state. Collective.
            version: Returns the version of this process's state; 0 if its state has no versions.
            prepare: Is called when an epoch is decided, before its group is formed.
            check_end: Raises the error with which another process has ended the job, if one has. It is called before
                each decision, and when the job has ended.
            leave: Ends the present group, if there is one, so that the other ranks learn the reason. By default it
                closes the group that was formed last.
        """
        self.assembly = assembly  #: This process in the decisions on the members.
        self.has_state = False  #: Whether this process has the state of the job: it has entered an epoch.
        #: The time of day, in seconds, at which it has left the last group, and why; before that, of its begin.
        self.left_at, self.left_because = time.time(), "the job began"
        self._form, self._level, self._version = form, level, version
        self._prepare, self._check_end = prepare, check_end
        self._leave = leave or self._close
        self._group: Group | None = None

    @property
    def group(self) -> Group:
        """The group that was formed last. The first one is formed by ``begin``."""
        assert self._group is not None
        return self._group

    def begin(self) -> None:
        """Enter the first epoch of this process. Raises ``RecoveryError``, ``SystemExit``."""
        if self.enter():
            return
        if self.assembly.policy.on_loss == "replace":
            raise RecoveryError(f"rank {self.assembly.seat}: the job ended before this process could join it")
        _log.info("the job ended before this process could join it")
        raise SystemExit(0)

    def leave(self, reason: PeerLost | str) -> None:
        """Leave the group. The launcher is told of a rank that is silent."""
        self.left_at, self.left_because = time.time(), str(reason)
        if isinstance(reason, PeerLost):
            rank = "" if self._group is None else f"rank {self._group.rank}: "
            _log.info("%s%s; the ranks that are left form a new group", rank, reason)
            if reason.reason.startswith(SILENT):
                self.assembly.suspect(reason.rank)
        self._leave(str(reason))

    def meet(self) -> Decision | None:
        """Take part in the decision of the next epoch, and return it; ``None``: the job has ended.

        Raises:
            RecoveryError: As ``Assembly.meet``.
        """
        self._check_end()
        decision = self.assembly.meet(has_state=self.has_state, version=self._version())
        if decision is None:
            self._check_end()
        return decision

    def enter(self, decision: Decision | None = None) -> bool:
        """Enter an epoch: decide on it, form its group, and level the ranks. If that fails, enter the next one.

        A process that joins and has another plan of gradients ends with its error. The ranks that have the state decide
        on the next epoch without it.

        Args:
            decision: What ``meet`` has returned, if it was called already.

        Returns:
            Whether there is a group; ``False``: the job has ended.

        Raises:
            RecoveryError: The job cannot go on.
            PeerLost, DeadlineExceededError, RendezvousError: No epoch could be entered before the deadline of the
                policy.
            PlanMismatchError: This process joins, or no process does.
        """
        give_up_at = time.monotonic() + self.assembly.policy.deadline_s
        while (met := decision or self.meet()) is not None:
            decision = None
            try:
                self._enter(met)
            except RecoveryError:
                raise
            except (PeerLost, DeadlineExceededError, RendezvousError, PlanMismatchError) as error:
                if isinstance(error, PlanMismatchError) and not self._is_of_newcomer(met):
                    raise
                _log.info("membership %d could not be formed: %s", met.epoch, error)
                self._leave(str(error))
                if time.monotonic() >= give_up_at:
                    raise
            else:
                return True
        return False

    def _enter(self, decision: Decision) -> None:
        self._prepare(decision)
        group = self._group = self._form_group(decision)
        self._level(group, decision)
        self.has_state = True
        if decision.epoch % _COLLECT_EVERY == 0:
            _collect_soon(self.assembly.seat)
        if group.rank == 0:
            _log.info("membership %d: %d ranks, version %d", decision.epoch, group.world_size, self._version())

    def _form_group(self, decision: Decision) -> Group:
        """Form the group of an epoch. Collective.

        Raises:
            PeerLost, DeadlineExceededError, RendezvousError: A member is lost; another epoch is to be decided.
        """
        assembly = self.assembly
        rank = decision.rank_of(assembly.seat, assembly.incarnation)
        assert rank is not None
        links = assembly.value("links")
        options: dict[str, Any] = {}
        if links:
            with reading(links, "description of the links") as fields:
                options["links"] = LinkModel(**fields)
        num_members = len(decision.members)
        meeting = StoreRank(assembly.store_of_epoch(), rank, num_members, decision.epoch, assembly.interruption)
        group = self._form(store=meeting, **options)
        measured = probe.selector_of(group).links
        if not links and measured.source == "measured":
            # All epochs use the same numbers, so that they choose the same schedules, and get the same bits. Every rank
            # sets them, so that they outlive the store and all ranks but one.
            assembly.first_value("links", json.dumps(asdict(measured)))
        return group

    def _is_of_newcomer(self, decision: Decision) -> bool:
        """Whether a difference between the ranks must be that of a process that joins: this one has the state."""
        rank = decision.rank_of(self.assembly.seat, self.assembly.incarnation)
        return rank is not None and decision.members[rank].has_state and bool(decision.newcomers)

    def _close(self, reason: str) -> None:
        if self._group is not None:
            self._group.close(CLOSE_S, reason=reason)


def _collect_soon(seat: int) -> None:
    """Have Python look for the objects of closed groups, which refer to each other, and keep arenas."""
    timer = threading.Timer(_COLLECT_AFTER_S + _COLLECT_APART_S * seat, gc.collect)
    timer.name, timer.daemon = "totalreduce-collect", True
    timer.start()
