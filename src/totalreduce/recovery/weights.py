"""Parameters and states of optimizers that a program changes where that may have to be undone.

A block changes them after its vote, and a step of ``tr.attempts`` in ``optimizer.step()``, so there are no copies of
them: at most a few elements are compared (``Watch``). But a program may put other weights in for a while (an evaluation
with averages of the weights, a perturbation as in SAM), or step one optimizer before the gradients of another one are
exchanged. If a rank is lost then, the changes must be undone, which takes copies, or be noticed.

What is undone without copies: a tensor of another identity, or another memory (``.data = ...``), in the place of a
parameter; and entries of an optimizer's state that were added, replaced or removed.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from totalreduce.foundation.errors import RecoveryError
from totalreduce.groups.group import Group
from totalreduce.pytorch.wrapper import OptimizerWrapper
from totalreduce.recovery.places import Places
from totalreduce.recovery.state import State
from totalreduce.recovery.watch import Watch
from totalreduce.tensors.flats import fetch, host_like
from totalreduce.tensors.values import set_values

__all__ = ["BlockWeights", "CommitWeights", "KeptWeights"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _KeptState:
    """The state of one optimizer, without copies of its tensors."""

    optimizer: torch.optim.Optimizer
    state: dict[Any, dict[str, Any]]
    #: By parameter: the entry of the state, and what was in it.
    entries: list[tuple[Any, dict[str, Any], dict[str, Any]]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _KeptState:
        """Note the state of an optimizer."""
        return cls(optimizer, optimizer.state, [(key, entry, dict(entry)) for key, entry in optimizer.state.items()])

    def put_back(self) -> None:
        """Put all entries back that were added, replaced or removed."""
        if self.optimizer.state is not self.state:  # the program has loaded another one
            self.optimizer.state = self.state  # type: ignore[assignment]
        self.state.clear()
        for key, entry, values in self.entries:
            if len(entry) != len(values) or any(entry.get(name) is not value for name, value in values.items()):
                entry.clear()
                entry.update(values)
            self.state[key] = entry


@final
class KeptWeights:
    """The parameters of a model, and the states of optimizers, as they were when ``note`` was called."""

    def __init__(self, state: State) -> None:
        """Of the model and the optimizers of a state. Nothing is noted."""
        self._model = state.model
        self._optimizers = [
            each.wrapped if isinstance(each, OptimizerWrapper) else each for each in state.optimizers.values()
        ]
        self._places = Places(state.model, "parameters")
        self._watch: Watch | None = None
        self._states = [_KeptState.of(each) for each in self._optimizers]
        self._values: list[Any] = []  #: All values in the states of the optimizers, one after the other.
        self._tensors: list[torch.Tensor] = []  #: Those of them that are tensors,
        self._versions: list[int] = []  #: and the counts of their changes.
        #: Copies of the parameters, and of the tensors in the optimizers' states; ``None``: there are none.
        self._copies: list[torch.Tensor] | None = None
        self._state_copies: list[torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of copies of everything."""
        return sum(each.nbytes for each in [*(parameter for _, parameter in self._places.named), *self._tensors])

    @property
    def has_copies(self) -> bool:
        """Whether there are copies of everything."""
        return self._copies is not None and self._state_copies is not None

    def note(self, *, copies: bool, copies_states: bool) -> None:
        """Note what there is now."""
        if self._places.look() or self._watch is None:
            self._watch = Watch([parameter for _, parameter in self._places.named])
        else:
            self._watch.note()
        if not self._has_same_states():
            self._states = [_KeptState.of(each) for each in self._optimizers]
            self._values = [
                value for kept in self._states for _, _, values in kept.entries for value in values.values()
            ]
            self._tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        parameters = [parameter for _, parameter in self._places.named]
        self._copies = _copied(parameters, self._copies) if copies else None
        self._state_copies = _copied(self._tensors, self._state_copies) if copies_states else None

    def forget_copies(self) -> None:
        """Give the memory of the copies back."""
        self._copies = self._state_copies = None

    def changed(self) -> str:
        """Return what the program has changed since ``note``, also if it has put it back; "" if nothing."""
        assert self._watch is not None, "note comes first"
        moved = self._places.moved()
        if moved:
            return _parameter(moved)
        if self._watch.has_changed:
            return _parameter(self._places.named[self._watch.changed()[0]][0])
        return self._changed_state()

    def _changed_state(self) -> str:
        if self._has_same_states() and [tensor._version for tensor in self._tensors] == self._versions:
            return ""
        return "the state of an optimizer"

    def _has_same_states(self) -> bool:
        """Whether the states of the optimizers have the values that were noted. Tensors may have other elements."""
        now = [value for each in self._optimizers for entry in each.state.values() for value in entry.values()]
        return (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and all(kept.optimizer.state is kept.state for kept in self._states)
        )

    def differs(self) -> bool:
        """Whether a parameter has another place, memory, or other elements (of those that are compared)."""
        assert self._watch is not None, "note comes first"
        return bool(self._places.moved() or self._watch.differing())

    def restore(self, *, is_strict: bool = False) -> str:
        """Set everything to what was noted; return what cannot be, because there is no copy of it; "" if all is.

        Args:
            is_strict: Take a parameter that was changed once for one that cannot be put back, although none of the
                elements that are compared is another one.
        """
        if self._watch is None:
            return ""
        self._places.put_back()
        for kept in self._states:
            kept.put_back()
        lost = ""
        if self._copies is not None:
            for (_, parameter), copy in zip(self._places.named, self._copies, strict=True):
                set_values(parameter, copy)
        else:
            found = self._watch.differing() or (self._watch.changed_once() if is_strict else [])
            lost = _parameter(self._places.named[found[0]][0]) if found else ""
        if self._state_copies is not None:
            for tensor, copy in zip(self._tensors, self._state_copies, strict=True):
                set_values(tensor, copy)
        elif [tensor._version for tensor in self._tensors] != self._versions:
            lost = lost or "the state of an optimizer"
        return lost


def _parameter(name: str) -> str:
    return f"the parameter {name!r}"


def _copied(tensors: Sequence[torch.Tensor], memory: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return copies in the memory of the host: in that of earlier copies, if these have the same shapes and types."""
    plain = [tensor.detach() for tensor in tensors]
    forms = [(tensor.shape, tensor.dtype) for tensor in plain]
    if memory is None or [(each.shape, each.dtype) for each in memory] != forms:
        memory = [host_like(tensor) for tensor in plain]
    fetch(memory, plain)
    return memory


@final
class BlockWeights:
    """Undoes what a block of ``tr.recoverable`` has changed of parameters and optimizers' states before its vote.

    A block of ``job.once`` has copies of the parameters, because an evaluation may put other weights in. Of the blocks
    of steps only the first one of a process has copies, and those after a block that has changed something before its
    vote. A step has several kinds of blocks, if it has parts.
    """

    def __init__(self, state: State, group: Group) -> None:
        """``state``: of the job; ``group``: its ranks, of which rank 0 logs."""
        self._state, self._group = state, group
        self._kept = KeptWeights(state)
        #: By the number of the part of a step, or by the label of ``job.once``: whether a block of this kind has
        #: changed something before its vote.
        self._observed: dict[int | str, bool] = {}
        self._kind: int | str | None = None  #: Of the block; ``None``: there is none that may have to be undone.
        self._changed: str | None = None  #: What it has changed before its vote; ``None``: before that is known.

    def begin(self, kind: int | str) -> None:
        """Note that a block begins that may have to be undone.

        Args:
            kind: The number of the part of a step, or the label of ``job.once``.
        """
        self._kind, self._changed = kind, None
        copies = self._observed.get(kind, True)
        self._kept.note(copies=copies or isinstance(kind, str), copies_states=copies)

    def compare(self) -> None:
        """Find out what the block has changed. Called when it comes to its vote, before the vote changes anything."""
        kind = self._kind
        if kind is None or self._changed is not None:
            return
        self._changed, was_observed = self._kept.changed(), self._observed.get(kind, False)
        if self._changed and not was_observed and isinstance(kind, int) and self._group.rank == 0:
            _log.info(
                "version %d: a step has changed %s before its vote. To undo such steps after a loss, each one copies "
                "parameters and states of optimizers (%d MB) to memory of the host, from the next one on",
                self._state.version,
                self._changed,
                self._kept.num_bytes // 1_000_000,
            )
        self._observed[kind] = was_observed or bool(self._changed)

    def end(self) -> None:
        """Note that the block has taken effect."""
        if self._kind is not None and (isinstance(self._kind, str) or not self._observed.get(self._kind)):
            self._kept.forget_copies()
        self._kind = None

    def undo(self, *, have_stepped: bool) -> None:
        """Undo what the block has changed before its vote. Raises ``RecoveryError``.

        Args:
            have_stepped: Whether the optimizers may have stepped after ``compare``. That was undone before.
        """
        if self._kind is None or self._changed == "":
            return
        if self._changed and have_stepped and not self._kept.has_copies:
            lost = self._changed
        else:
            lost = self._kept.restore(is_strict=True)
        if lost:
            raise RecoveryError(
                f"version {self._state.version}: a rank was lost in a step that had changed {lost} before its vote, "
                "and nothing can undo that: blocks of job.once have copies of the parameters, and steps have them from "
                "the first one on that has changed something before optimizer.step(), but not that one itself. Start "
                "the job again from its last snapshot (tr.recoverable(snapshots=...)). Weights that are put in for a "
                "while, such as averages, belong into a block of job.once"
            )


@final
class CommitWeights:
    """Tells, after a loss, whether parameters and optimizers' states are those of the last commit of ``tr.attempts``.

    If collectives come between an optimizer's step and the commit, as with several optimizers that step one after the
    other, there are copies from the next commit on. With several optimizers there are copies from the begin on, until
    all of them have stepped without a collective between.
    """

    def __init__(self, state: State) -> None:
        """``state``: of the job."""
        self._state, self._kept = state, KeptWeights(state)
        self._copies, self._is_certain = len(state.optimizers) > 1, False

    def begin(self) -> None:
        """Note the present weights: they are those to go back to."""
        self._kept.note(copies=self._copies, copies_states=self._copies)

    def commit(self, num_steps: int, *, are_interrupted: bool, logs: bool) -> None:
        """Do what ``begin`` does, in a commit.

        Args:
            num_steps: The number of steps of optimizers since the last commit.
            are_interrupted: Whether a collective has come between one of them and the commit.
            logs: Whether this rank logs that it copies from now on.
        """
        if not self._is_certain and (are_interrupted or num_steps >= len(self._state.optimizers)):
            self._copies, self._is_certain = are_interrupted, are_interrupted
            if are_interrupted and logs:
                _log.info(
                    "version %d: collectives come between optimizer.step() and attempt.commit(). To undo such steps "
                    "after a loss, each commit copies parameters and states of optimizers (%d MB) to memory of the "
                    "host, from this one on",
                    self._state.version,
                    self._kept.num_bytes // 1_000_000,
                )
        self.begin()

    def differ(self) -> bool:
        """Whether a parameter differs from what was noted last."""
        return self._kept.differs()

    def restore(self) -> str:
        """Set everything to what was noted last; return what cannot be, because there is no copy; "" if all is."""
        return self._kept.restore()
