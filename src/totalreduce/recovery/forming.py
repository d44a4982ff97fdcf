"""How the members of an epoch form their group, and come to one state."""

from __future__ import annotations

import gc
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

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
from totalreduce.groups.agreement import broadcast_json
from totalreduce.groups.encoding import decode, empty_tensors, encode
from totalreduce.groups.group import Group
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.pytorch.broadcast import broadcast_tensors
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.launcher_store import LauncherStore
from totalreduce.recovery.membership import Decision, Policy, reading
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State
from totalreduce.schedules.select import LinkModel
from totalreduce.transports.liveness import SILENT

__all__ = [
    "begin_from_disk",
    "compare_states",
    "end_too_late",
    "ended_early",
    "enter_next_epoch",
    "form_group",
    "open_assembly",
    "read_from_disk",
    "report_loss",
    "seed_generators",
    "send_state",
    "send_value",
    "share_outline",
]

_log = logging.getLogger(__name__)


#: The number of epochs after which the memory of closed groups is given back: that takes 0.1 s.
_COLLECT_EVERY = 4
#: So long after an epoch has begun, and so long after another seat. It takes 0.1 s and more, in which a rank does not
#: answer. When all ranks did it before they went on, five of them on two cores resumed 0.5 s later.
_COLLECT_AFTER_S, _COLLECT_APART_S = 1.0, 0.25
_64_BITS = (1 << 64) - 1


def open_assembly(settings: Settings, seat: int, num_seats: int, timeout_s: float) -> Assembly:
    """Connect to the launcher's store.

    Args:
        settings: What the launcher has set.
        seat: The rank that it gave this process.
        num_seats: The number of seats, which is the world size that it gave this process.
        timeout_s: How long a decision may take.

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


def form_group(assembly: Assembly, formation: Callable[..., Group]) -> Group:
    """Form the group of the current epoch with ``formation(store=…, links=…)``. Collective.

    Raises:
        PeerLost, DeadlineExceededError, RendezvousError: A member is lost; another epoch is to be decided.
    """
    decision = assembly.current
    assert decision is not None
    rank = decision.rank_of(assembly.seat, assembly.incarnation)
    assert rank is not None
    links = assembly.value("links")
    options: dict[str, Any] = {}
    if links:
        with reading(links, "description of the links") as fields:
            options["links"] = LinkModel(**fields)
    meeting = StoreRank(assembly.store_of_epoch(), rank, len(decision.members), decision.epoch, assembly.interruption)
    group = formation(store=meeting, **options)
    measured = probe.selector_of(group).links
    if not links and measured.source == "measured":
        # All epochs use the same numbers, so that they choose the same schedules, and get the same bits. Every rank
        # sets them, so that they outlive the store and all ranks but one.
        assembly.first_value("links", json.dumps(asdict(measured)))
    return group


class Shared(Protocol):
    """A state that ranks give to each other."""

    def shared(self) -> dict[str, Any]:
        """Return everything that a process needs to begin with this state. Tensors are not copied."""
        ...

    def load_shared(self, shared: Mapping[str, Any], /) -> None:
        """Begin with what ``shared`` has returned in another process."""
        ...


def share_outline(state: State, group: Group, source: int, saved: Mapping[str, Any] | None = None) -> bool:
    """Have all ranks train the same parameters as the source, before they plan gradients. Collective.

    A process whose program is another one raises an error here, alone: the comparison of plans would raise one on every
    rank.

    Args:
        state: The state of this rank.
        group: The ranks.
        source: The rank whose state all ranks will have.
        saved: On the source: the state on disk with which the job begins, if there is one.

    Returns:
        Whether this rank has trained other parameters before, or by other groups of the optimizers.

    Raises:
        ConfigurationError: The state of the source is that of another program.
    """
    has_changed = saved is not None and _adopt_saved(state, saved)
    outline = group.broadcast_object(state.outline() if group.rank == source else None, root=source)
    return state.adopt(outline) or has_changed


def send_state(state: Shared, group: Group, source: int, receivers: Sequence[int]) -> None:
    """Give the source's state to the receivers. Collective among these; the other ranks return at once."""
    if group.rank in receivers:
        state.load_shared(send_value(None, group, source, receivers))
    elif receivers and group.rank == source:
        send_value(state.shared(), group, source, receivers)


def send_value(value: Any, group: Group, source: int, receivers: Sequence[int]) -> Any:
    """Give a value of the source to the receivers, and return it. Only these ranks call it.

    Args:
        value: The value on the source, of the types that the object collectives send.
        group: The ranks.
        source: The rank that has the value.
        receivers: The ranks that get it, without the source.
    """
    if not receivers:
        return value
    some = group.control.subgroup([source, *receivers], name="recovery/state")
    document = ""
    tensors: list[torch.Tensor] = []
    if some.rank == 0:
        document, tensors = encode(value)
    document = broadcast_json(some, "document", document, root=0)
    if some.rank != 0:
        tensors = empty_tensors(document)
    broadcast_tensors(tensors, some, 0, "tensors")
    return value if some.rank == 0 else decode(document, tensors)


def compare_states(state: State, group: Group) -> None:
    """Raise ``RecoveryError`` on all ranks unless parameters and optimizer state are equal on all. Collective."""
    try:
        group.agree("recovery/state", state.digests())
    except PlanMismatchError as error:
        raise RecoveryError(
            f"version {state.version} of the state differs between ranks: {error.differences[0]}. "
            "Did the program change parameters outside of optimizer.step()?"
        ) from error


def enter_next_epoch(
    assembly: Assembly,
    meet: Callable[[], Decision | None],
    enter: Callable[[Decision], None],
    leave: Callable[[str], None],
) -> bool:
    """Decide on epochs until one can be entered.

    Args:
        assembly: This process in the decisions.
        meet: Returns the decision of the next epoch; ``None``: the job has ended.
        enter: Forms the group of an epoch, and brings its ranks to one state. Collective.
        leave: Ends a group that could not be entered, so that the other ranks learn the reason.

    A process that joins and has another plan of gradients ends with its error. The ranks that have the state decide on
    the next epoch without it.

    Returns:
        Whether there is a group; ``False``: the job has ended.

    Raises:
        RecoveryError: The job cannot go on.
        PeerLost, DeadlineExceededError, RendezvousError: No epoch could be entered before the deadline of the policy.
        PlanMismatchError: This process joins, or no process does.
    """
    give_up_at = time.monotonic() + assembly.policy.deadline_s
    while (decision := meet()) is not None:
        try:
            enter(decision)
        except RecoveryError:
            raise
        except (PeerLost, DeadlineExceededError, RendezvousError, PlanMismatchError) as error:
            if isinstance(error, PlanMismatchError) and not _is_of_newcomer(decision, assembly):
                raise
            _log.info("membership %d could not be formed: %s", decision.epoch, error)
            leave(str(error))
            if time.monotonic() >= give_up_at:
                raise
        else:
            if decision.epoch % _COLLECT_EVERY == 0:
                _collect_soon(assembly.seat)
            return True
    return False


def _is_of_newcomer(decision: Decision, assembly: Assembly) -> bool:
    """Whether a difference between the ranks must be that of a process that joins: this one has the state."""
    rank = decision.rank_of(assembly.seat, assembly.incarnation)
    return rank is not None and decision.members[rank].has_state and bool(decision.newcomers)


def _collect_soon(seat: int) -> None:
    """Have Python look for the objects of closed groups, which refer to each other, and keep arenas."""
    timer = threading.Timer(_COLLECT_AFTER_S + _COLLECT_APART_S * seat, gc.collect)
    timer.name, timer.daemon = "totalreduce-collect", True
    timer.start()


def end_too_late(assembly: Assembly) -> NoReturn:
    """End a process that came when the others had ended the job.

    Raises:
        RecoveryError: With ``replace``: its rank is missing.
        SystemExit: With ``shrink``: there is nothing left to do.
    """
    if assembly.policy.on_loss == "replace":
        raise RecoveryError(f"rank {assembly.seat}: the job ended before this process could join it")
    _log.info("the job ended before this process could join it")
    raise SystemExit(0)


def ended_early() -> RecoveryError:
    """Return the error of a rank that has not come to the end of the job when the others have."""
    return RecoveryError("the other ranks have come to the end of the job, and this rank has not")


def report_loss(assembly: Assembly, rank: int, error: PeerLost) -> None:
    """Log a loss, and tell the launcher of a rank that is silent."""
    _log.info("rank %d: %s; the ranks that are left form a new group", rank, error)
    if error.reason.startswith(SILENT):
        assembly.suspect(error.rank)


def begin_from_disk(state: State, snapshots: Snapshots | None) -> None:
    """Begin with the last version on disk, if there is one. On one rank; the others then get the state."""
    saved = read_from_disk(snapshots)
    if saved is not None:
        _adopt_saved(state, saved)
        state.load_shared(saved)


def _adopt_saved(state: State, saved: Mapping[str, Any]) -> bool:
    """Do what ``State.adopt`` does, and say so if the program has trained other parameters."""
    has_changed = state.adopt(saved)
    if has_changed:
        _log.warning(
            "the snapshot has other trainable parameters or groups of optimizers than the program has made, and the "
            "job goes on with those of the snapshot. To train others, change them when the job has begun"
        )
    return has_changed


def read_from_disk(snapshots: Snapshots | None) -> dict[str, Any] | None:
    """Return the last version on disk, which ``State.load_shared`` takes; ``None`` if there is none."""
    version = 0 if snapshots is None else snapshots.latest()
    if snapshots is None or not version:
        return None
    shared: dict[str, Any] = snapshots.read_shared(version)
    _log.info("the job begins with version %d, from %s", version, snapshots.folder)
    return shared


def seed_generators(seed: int, version: int, rank: int) -> None:
    """Seed the generators of torch, NumPy and Python, so that a step that is repeated draws the same numbers."""
    number = _mixed(_mixed(_mixed(seed) ^ version) ^ rank)
    # torch.manual_seed looks for devices of every kind, which takes 0.1 ms.
    torch.default_generator.manual_seed(number)
    if torch.backends.cuda.is_built() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def _mixed(number: int) -> int:
    """Return 63 bits, each of which depends on all bits of a number.

    SplitMix64 (Steele, Lea, Flood 2014) in a tenth of the time of a hash of text.
    """
    number = (number + 0x9E3779B97F4A7C15) & _64_BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _64_BITS
    return (number ^ number >> 31) & (_64_BITS >> 1)
