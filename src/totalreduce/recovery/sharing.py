"""How the ranks of a group come to one state: that of one of them, or the one on disk."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from totalreduce.foundation.errors import PlanMismatchError, RecoveryError
from totalreduce.groups.agreement import broadcast_json
from totalreduce.groups.encoding import decode, empty_tensors, encode
from totalreduce.groups.group import Group
from totalreduce.pytorch.broadcast import broadcast_tensors
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State

__all__ = [
    "begin_from_disk",
    "compare_states",
    "read_from_disk",
    "seed_generators",
    "send_state",
    "send_value",
    "share_outline",
]

_log = logging.getLogger(__name__)

_64_BITS = (1 << 64) - 1


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
    """Give a value of the source to the receivers, and return it. Only these ranks call it."""
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
