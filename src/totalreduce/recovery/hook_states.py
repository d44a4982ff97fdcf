"""``HookStates``: what the DDP hooks of a job keep back (residuals, velocities, sparse sessions), through its attempts.

Each attempt builds a new DDP and registers a new hook. So here the residuals belong to the parameters of the state: a
hook gets them when the gradients of the parameters come for the first time. They change in ``backward()``, and count
when the attempt commits the step; until then ``Memory.go_back`` returns to those of the last commit.

Ranks of ``tr.attempts`` can differ by one step when a rank is lost. The parameters after the step come from a rank that
has taken it, but what a rank keeps back after it nobody else knows. So before an optimizer's ``step()`` the ranks send
that to the next ranks, and then vote. If the vote passes on one rank, every rank has come to it: a rank that is a step
behind goes on with the residuals after the step, and the copies of a lost rank's are of the same step. The vote is in
``step()``, and not at the end of ``backward()``, so that several passes and several hooks need one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.encoding import pack, unpack
from totalreduce.groups.group import Group
from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.hooks import HookHandles, WeakHook
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.replicas import Replicas, first_holders, hand_over
from totalreduce.recovery.state import State
from totalreduce.recovery.vote import Vote

if TYPE_CHECKING:  # programs without a hook do not load it
    from totalreduce.pytorch.ddp_bucket import Parameters
    from totalreduce.pytorch.ddp_hook import HookRecord, SparseHookState

__all__ = ["HookStates"]

_log = logging.getLogger(__name__)


@final
class HookStates:
    """What the hooks of a job keep back. It is the ``keeper`` of the default process group of each attempt."""

    def __init__(self, state: State | None, num_copies: int) -> None:
        """Note the arguments. ``state``: ``None``: nothing can be kept, and a hook makes a warning."""
        self._state = state
        self.num_copies = num_copies  #: The number of other ranks that have a copy of what each rank keeps back.
        self._kept = Memory()  #: What belongs to parameters that have no hook at present.
        self._hooks: list[SparseHookState] = []  #: Those of this attempt.
        #: What the hooks need beside residuals, at the last commit and after the step that is under way.
        self._records: list[HookRecord] = []
        self._next_records: list[HookRecord] | None = None
        self._version = 0  #: Of the last commit.
        self._replicas = Replicas(num_copies)
        self._group: Group | None = None
        self._decision: Decision | None = None  #: ``None``: ranks cannot be replaced.
        self._vote: Vote | None = None
        self._has_passed = False  #: Whether a pass has changed something since the last vote.
        self._handles = HookHandles()
        self._has_warned = False

    # ------------------------------------------------------------------------------------- called by hooks (HookKeeper)

    def meet(self, hook: SparseHookState, parameters: Parameters) -> None:
        """Give a hook what was kept of a bucket's parameters, which come for the first time."""
        if self._state is None:
            self._warn("tr.attempts(copies=...) does not keep them: for DDP there is tr.attempts(state)")
            return
        if hook.world_size < self._world_size:
            self._warn("the hook works among some of the ranks: leave process_group= out, of DDP and of tr.ddp_hook")
            return
        known = set(self._state.model.parameters())
        if any(parameter not in known for parameter in parameters):
            self._warn(
                "the model of the tr.State lacks some of its parameters. Several modules are one model: "
                "tr.State(model=torch.nn.ModuleDict({...}), ...)"
            )
        others = [each for each in self._hooks if each is not hook]
        for parameter in parameters:
            for memory in (self._kept, *(other.memory for other in others)):  # others: of a DDP that was replaced
                if parameter in memory:
                    hook.memory.give(parameter, memory.take(parameter))
        if hook not in self._hooks:
            for record in self._records:
                if any(each is parameters[0] for bucket in record.layout for each in bucket):
                    hook.resume(record)
        if not self._hooks:
            self._watch_steps()
        self._hooks = [*(each for each in others if each.memory.parameters()), hook]

    def note_pass(self) -> None:
        """Note that a backward pass has changed what a hook keeps back."""
        self._has_passed = True

    def keeps_for(self, hook: SparseHookState, model: torch.nn.Module) -> bool:
        """Whether something is kept of a model's parameters, with which the hook will begin."""
        return hook not in self._hooks and any(parameter in self._kept for parameter in model.parameters())

    def _warn(self, why: str) -> None:
        if not self._has_warned and self._decision is not None:
            self._has_warned = True
            _log.warning("the residuals of tr.ddp_hook are lost when an attempt ends: %s", why)

    @property
    def _world_size(self) -> int:
        return 0 if self._group is None else self._group.world_size

    # ------------------------------------------------------------------------------------------------- called in a step

    def _watch_steps(self) -> None:
        """Have the optimizers of the state call ``settle`` before they step."""
        assert self._state is not None
        self._handles.remove()
        for each in self._state.optimizers.values():
            self._handles.before_step(each, WeakHook(self._before_step))

    def _before_step(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Vote that every rank knows what it keeps back after the step, if a pass has changed that. Collective.

        Raises:
            PeerLost: A rank is lost. Others may take the step.
            DeadlineExceededError: A rank has not come to the vote in time. The call may be repeated.
            ConfigurationError: What this rank keeps back has more bytes than can be sent.
        """
        if not self._has_passed or not self._hooks:
            return
        assert self._state is not None
        vote = self._vote
        if vote is None or not vote.is_in_flight:
            self._next_records = [hook.record() for hook in self._hooks]
            self._send(self._state.version + 1, self._next_records)
        if vote is not None:
            vote.begin(0, 0)
            vote.end()
        self._has_passed = False

    def end_step(self) -> None:
        """Settle the step if no optimizer has done so, because a ``GradScaler`` has left it out. See ``settle``."""
        for hook in self._hooks:
            hook.end_step()
        self.settle()

    def commit(self, version: int) -> None:
        """Note that this rank has taken a step, which has brought it to a version. ``end_step`` comes before."""
        for hook in self._hooks:
            hook.memory.keep()
        self._accept(version)

    def rest(self) -> None:
        """Have the optimizers step without a vote: the attempt has ended."""
        self._handles.remove()

    def _accept(self, version: int) -> None:
        """Have the records and copies of the last vote count, as those of a version."""
        self._version = version
        if self._next_records is not None:
            self._records, self._next_records = self._next_records, None
        self._replicas.commit()
        self._replicas.carry_over(version)

    def _send(self, version: int, records: Sequence[HookRecord]) -> None:
        """Send what this rank keeps back at a version to the next ranks, and have theirs. Collective."""
        if self._decision is None or self._group is None:
            return

        def mine() -> torch.Tensor:
            try:
                return pack(self._packed(records))
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"the residuals of tr.ddp_hook cannot be sent to the next rank: {error}. With tr.attempts(state, "
                    "replicas=0) there are no copies, and the residuals of a lost rank begin at zero"
                ) from error

        self._replicas.exchange(self._group, self._decision, version, mine)

    # --------------------------------------------------------------------------------------------- between two attempts

    def enter(self, group: Group, decision: Decision | None, version: int, *, has_state: bool) -> None:
        """Have all ranks go on with what they keep back at one version, in a new group. Collective."""
        has_state = has_state and version >= self._version
        self._leave(version, has_state=has_state)
        last_seats = [] if self._decision is None else [member.seat for member in self._decision.members]
        last_size, self._group, self._decision = self._world_size, group, decision
        self._vote, self._has_passed = None, False
        if decision is None or self._state is None:
            return
        if group.world_size > 1:
            self._vote = Vote(group)
            self._vote.prepare()
        seats = [member.seat for member in decision.members]
        held = self._replicas.seats(version) if has_state else []
        words = {"is new": not has_state, "held": held, "keeps": bool(self._records), "size": last_size}
        said = group.control.allgather_object(words)
        if not any(words["keeps"] for words in said):
            return
        holders = first_holders(words["held"] for words in said)
        newcomers = [rank for rank, words in enumerate(said) if words["is new"]]
        for newcomer in newcomers:
            self._hand_over(group, seats[newcomer], holders.get(seats[newcomer]), newcomer)
        first = next(rank for rank, words in enumerate(said) if words["keeps"])
        lost = [seat for seat in last_seats if seat not in seats and seat not in holders]
        if lost and group.rank == first:
            _log.warning("nobody has the residuals of %d ranks that are lost: they are lost, too", len(lost))
        mine = [seat for seat, holder in holders.items() if holder == group.rank]
        for orphan in self._replicas.take_orphans(held, seats, mine):
            self._load(unpack(orphan), adds=True)
        has_same_size = all(words["size"] == group.world_size for words in said if not words["is new"])
        if not has_same_size or any(seats[newcomer] not in holders for newcomer in newcomers):
            # The sessions begin anew on all ranks, with the same numbers of steps.
            records = self._renamed([record.without_sessions() for record in self._records])
            self._load_records(group.control.broadcast_object(records, root=first))
        self._copy(version)

    def begin_with(self, own: Mapping[str, Any] | None, version: int) -> None:
        """Begin with what ``current`` has returned in a process of the same rank. Collective, after ``enter``."""
        if own is not None:
            self._load(own)
            self._copy(version)

    def current(self) -> dict[str, Any] | None:
        """Return what this rank keeps back after the last commit; ``None`` if there is no hook. Not copied."""
        return self._packed(self._records) if self._records else None

    def _leave(self, version: int, *, has_state: bool) -> None:
        """Take from the hooks of the last attempt what they keep back at the latest version."""
        if version < self._version:
            # The weights of its last commit were lost. What it keeps back belongs to them, and others have a copy of
            # what it kept back before.
            self._kept, self._hooks, self._records = Memory(), [], []
            self._replicas = Replicas(self.num_copies)
        # If others have taken one more step (some versions later, if the program accumulates gradients), this rank has
        # come to its vote, and knows what it keeps back after it.
        is_behind = has_state and version > self._version
        for hook in self._hooks:
            if is_behind:
                hook.memory.keep()
            else:
                hook.memory.go_back()
            for parameter in hook.memory.parameters():
                self._kept.give(parameter, hook.memory.take(parameter))
        self._hooks = []
        self.rest()
        if is_behind:
            self._accept(version)
        self._version, self._next_records = version, None
        self._replicas.undo()

    def _copy(self, version: int) -> None:
        """Have other ranks copy what this rank keeps back at the present version. Collective."""
        # Ranks that were lost had copies, too: without new ones, the next loss could be of a rank without a copy.
        self._send(version, self._records)
        self._accept(version)

    def _hand_over(self, group: Group, seat: int, source: int | None, newcomer: int) -> None:
        """Give the copy of a seat's residuals that rank ``source`` has to the rank that now has the seat."""
        if source is None:
            if group.rank == 0:
                _log.warning("nobody has the residuals of rank %d: they begin at zero", newcomer)
            return
        received = hand_over(group, source, newcomer, lambda: self._replicas.copy_of(seat))
        if received is not None:
            self._load(unpack(received))

    # ---------------------------------------------------------------------------------------------- for other processes

    def _packed(self, records: Sequence[HookRecord]) -> dict[str, Any]:
        """Return everything that this rank keeps back, by the names of parameters. Residuals are not copied."""
        names = self._names()
        flats: dict[str, dict[str, torch.Tensor]] = {}
        for memory in (self._kept, *(hook.memory for hook in self._hooks)):
            for key, by_parameter in memory.pending().items():
                named = {names[each]: flat for each, flat in by_parameter.items() if each in names}
                flats.setdefault(key, {}).update(named)
        return {**flats, "hooks": self._renamed(records)}

    def _load(self, own: Mapping[str, Any], *, adds: bool = False) -> None:
        """Begin with what ``_packed`` has returned in another process.

        Args:
            own: What it has returned.
            adds: Add residuals and velocities to those of this rank, which goes on in the place of that process, too.
        """
        self._kept.load(own, self._parameters(), adds=adds)
        if not adds:
            self._load_records(own["hooks"])

    def _renamed(self, records: Sequence[HookRecord]) -> list[dict[str, Any]]:
        names = self._names()
        return [record.renamed(names) for record in records]

    def _load_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        from totalreduce.pytorch.ddp_hook import HookRecord

        parameters = self._parameters()
        self._records = [HookRecord.named(each, parameters) for each in records]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        assert self._state is not None
        return dict(self._state.model.named_parameters())

    def _names(self) -> dict[torch.nn.Parameter, str]:
        return {parameter: name for name, parameter in self._parameters().items()}
