"""What all ranks begin with: parameters, buffers and the optimizer's state are compared, and made those of rank 0.

Ranks compare SHA-256 of each tensor, so where they begin alike only a few bytes are sent.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.groups.agreement import agree
from totalreduce.groups.encoding import encode
from totalreduce.groups.group import Group
from totalreduce.pytorch.broadcast import broadcast_optimizer_state, broadcast_tensors, problem_of_tensor

__all__ = ["Initial", "begin_alike", "sha256_of"]

#: What to do where ranks begin with different values.
Initial = Literal["broadcast", "check"]

_log = logging.getLogger(__name__)


def begin_alike(
    named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, group: Group, name: str, initial: Initial
) -> None:
    """Have all ranks begin with the same values. Collective.

    Args:
        named: Parameters and buffers by name. Those that cannot be compared (sparse ones, for example) are left as they
            are, with a warning.
        optimizer: The torch optimizer. Its state and hyper-parameters are left as they are if they have values that
            cannot be sent.
        group: The ranks.
        name: Prefix of the operations' names, different for each optimizer of the group.
        initial: ``"broadcast"``: values that differ become those of rank 0. ``"check"``: they are an error.

    Raises:
        PlanMismatchError: With ``"check"``: values differ. With ``"broadcast"``: names, shapes or dtypes differ, so
            that values cannot be sent. On every rank.
    """
    if group.world_size == 1:
        return
    tensors = _comparable(named)
    what = f"{name}.initial"

    def send_tensors() -> None:
        shapes = {key: f"{tensor.dtype}{list(tensor.shape)}" for key, tensor in tensors.items()}
        _agree(group, f"{what}.shapes", shapes, "initial=None leaves parameters and buffers as they are")
        broadcast_tensors(list(tensors.values()), group, 0, f"{what}.values")

    _equalise(group, what, {key: sha256_of(tensor) for key, tensor in tensors.items()}, initial, send_tensors)
    state = _digests_of_state(optimizer)
    _equalise(group, f"{what}.optimizer", state, initial, lambda: broadcast_optimizer_state(optimizer, group))


def sha256_of(tensor: torch.Tensor) -> str:
    """Return SHA-256 of a strided tensor's elements, on any device, in the order of their indices."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _comparable(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that can be compared, each once; warn of the others."""
    problems = {name: problem_of_tensor(tensor) for name, tensor in named.items()}
    odd = [f"{name!r} {problem}" for name, problem in problems.items() if problem is not None]
    if odd:
        warnings.warn(
            f"{len(odd)} tensor(s) of the model are not compared between the ranks: {odd[0]}. initial=None compares "
            "nothing",
            RuntimeWarning,
            stacklevel=5,
        )
    distinct: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        if problems[name] is None:
            distinct.setdefault(id(tensor), (name, tensor))
    return dict(distinct.values())


def _digests_of_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    try:
        document, tensors = encode(optimizer.state_dict())
    except ConfigurationError as error:
        return {"not compared": str(error)}
    return {"values": hashlib.sha256(document.encode()).hexdigest(), "tensors": [sha256_of(each) for each in tensors]}


def _equalise(group: Group, what: str, digests: Mapping[str, Any], initial: Initial, send: Callable[[], None]) -> None:
    """Compare the digests of all ranks; where they differ, send the values or raise an error."""
    if initial == "check":
        _agree(group, what, digests, "initial='broadcast' makes all values those of rank 0")
        return
    try:
        agree(group.control, what, digests)
    except PlanMismatchError as error:
        if group.rank == 0:
            names = list(dict.fromkeys(line.partition(":")[0] for line in error.differences))
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            _log.info("%s: ranks begin with different values (%s), and go on with those of rank 0", what, shown)
        send()


def _agree(group: Group, what: str, document: Mapping[str, Any], advice: str) -> None:
    try:
        agree(group.control, what, document)
    except PlanMismatchError as error:
        raise PlanMismatchError(error.tensor, (*error.differences, advice)) from None
