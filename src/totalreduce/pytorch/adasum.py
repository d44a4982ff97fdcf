"""Adasum: a sum of gradients that does not overshoot where they point the same way.

Two gradients are combined to ``(1 - g1.g2 / (2 |g1|**2)) g1 + (1 - g1.g2 / (2 |g2|**2)) g2``, tensor by tensor: the sum
of orthogonal gradients, the average of parallel ones. More gradients are combined along a binary tree. So the learning
rate need not depend on the number of ranks. Maleki et al., "Scaling distributed training with adaptive summation", 2020
(arXiv:2006.02924).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError, UnsupportedError
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.pytorch.initial import Initial, begin_alike
from totalreduce.pytorch.planning import ParameterSource
from totalreduce.pytorch.wrapper import OptimizerWrapper
from totalreduce.tensors.modes import write

__all__ = ["Adasum", "AdasumOptimizer", "adasum_"]

_PRIORITY = -1
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def adasum_(group: Group, tensors: Sequence[torch.Tensor], *, name: str, timeout_s: float | None = None) -> None:
    """Replace tensors by their Adasum over all ranks, in place. Collective; blocks.

    See ``Adasum`` for the arguments, the errors and the algorithm. Keep an ``Adasum`` for many calls.
    """
    Adasum(group, name).combine_(tensors, timeout_s=timeout_s)


@final
class Adasum:
    """Combines lists of tensors, by vector halving and distance doubling (the paper's AdasumRVH).

    At distance 1, 2, 4, ... a rank exchanges half of its piece with the rank at that distance. Then it has the same
    piece of two vectors, and its aligned block of ``2 * distance`` ranks has both vectors completely. The block sums
    its parts of the dot products in one small allreduce, and each rank combines its piece. Then the distances halve
    again, and the ranks gather the pieces. A rank sends about twice the tensors' size for any number of ranks.

    Where that number is no power of two, with p the largest one below it, rank p + i sends its tensors to rank i first,
    and gets the result from it in the end: the tree's leaves are (0, p), (1, p + 1), ..., and the ranks without a
    partner.

    Every element is computed on one rank and copied to the others, so all ranks end with the same bits.

    Args:
        group: The ranks.
        name: The name of the operations; equal on all ranks, different for lists of tensors that may be in flight at
            the same time.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._name = name
        # Messages have no names: in a subgroup they meet no messages of others.
        self._group = group.control.subgroup(range(group.world_size), name=f"{name}.adasum")
        self._power = 1 << (group.world_size.bit_length() - 1)
        self._blocks: list[Group] = []
        if group.rank < self._power:
            for level in range(1, self._power.bit_length()):
                first = group.rank >> level << level
                self._blocks.append(self._group.subgroup(range(first, first + (1 << level)), name="block"))

    def agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Return if all ranks want to combine such tensors. Collective; nothing of ``combine_`` has been sent yet.

        For tensors that were not compared before: a difference becomes an error on every rank, and the name can be used
        again.

        Raises:
            UnsupportedError: A tensor that cannot be combined; here, and a ``PlanMismatchError`` on the other ranks.
            PlanMismatchError: Numbers, dtypes or shapes of the tensors differ; on every rank.
        """

        def make() -> list[list[object]]:
            for index, tensor in enumerate(tensors):
                _refuse_unsupported(index, tensor)
            return [[_dtype_name(tensor.dtype), *tensor.shape] for tensor in tensors]

        agree_or_refuse(self._group.control, self._name, make, lambda described: {"tensors": described})

    @torch.no_grad()
    def combine_(self, tensors: Sequence[torch.Tensor], *, timeout_s: float | None = None) -> None:
        """Replace tensors by their Adasum over all ranks, in place. Collective; blocks.

        If a tensor's norm is 0 on one side, the other side is the result. Dot products are summed in float64; halves
        are combined in float32 and rounded once per level of the tree.

        Args:
            tensors: float16, bfloat16, float32 or float64, of any shapes, strides and devices; sizes and dtypes equal
                on all ranks, in the same order. Those of one dtype travel packed as one message.
            timeout_s: Seconds that each of the operations may take; ``None``: the group's time-out.

        Raises:
            UnsupportedError: A tensor of another dtype, or a sparse one; before anything is sent.
            MismatchError: The tensors of two ranks do not fit together, as far as their messages show it; on these
                ranks, while others run into their deadline. The tensors are as before.
            DeadlineExceededError: Some rank did not come in time. The tensors are as before; the name cannot be used
                again, since late messages may still come.
            PeerLost: A rank is gone. The tensors are as before.
        """
        packs = _pack(tensors)
        rank, partner = self._group.rank, self._group.rank + self._power
        if self._group.world_size == 1 or not packs:
            return
        flats = [pack.flat for pack in packs]
        if rank >= self._power:
            self._exchange(rank - self._power, flats, [], timeout_s)
            self._exchange(rank - self._power, [], flats, timeout_s)
        elif partner < self._group.world_size:
            theirs = [torch.empty_like(flat) for flat in flats]
            self._exchange(partner, [], theirs, timeout_s)
            _combine(packs, theirs, _products(packs, theirs, len(tensors)))
            self._halve_and_double(packs, len(tensors), timeout_s)
            self._exchange(partner, flats, [], timeout_s)
        else:
            self._halve_and_double(packs, len(tensors), timeout_s)
        for pack in packs:
            pack.unpack(tensors)

    def _halve_and_double(self, packs: Sequence[_Pack], num_tensors: int, timeout_s: float | None) -> None:
        """Combine over a power of two of ranks; ``flat`` is this rank's vector before and the result afterwards."""
        rank = self._group.rank
        way: list[tuple[int, list[tuple[int, int]]]] = []
        for block in self._blocks:
            distance = block.world_size // 2
            peer, is_right = rank ^ distance, bool(rank & distance)
            way.append((peer, [pack.held for pack in packs]))
            sent = [pack.halve(keep_upper=is_right) for pack in packs]
            theirs = [torch.empty_like(pack.piece) for pack in packs]
            self._exchange(peer, sent, theirs, timeout_s)
            products = _products(packs, theirs, num_tensors)
            # On the right of the tree ``theirs`` is the left vector; all ranks must add up the same columns.
            order = [0, 2, 1] if is_right else [0, 1, 2]
            columns = products[:, order]
            block.allreduce(columns, name="products", priority=_PRIORITY, timeout_s=timeout_s).wait()
            _combine(packs, theirs, columns[:, order])
        for peer, held in reversed(way):
            mine = [pack.piece for pack in packs]
            rest = [pack.grow(larger) for pack, larger in zip(packs, held, strict=True)]
            self._exchange(peer, mine, rest, timeout_s)

    def _exchange(
        self, peer: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], timeout_s: float | None
    ) -> None:
        # Both ranks know which pieces are empty.
        works = [self._group.send(each, dst=peer, timeout_s=timeout_s) for each in sent if each.numel()]
        works += [self._group.recv(each, src=peer, timeout_s=timeout_s) for each in received if each.numel()]
        for work in works:
            work.wait()


@dataclass(slots=True)
class _Pack:
    """All tensors of one dtype, one after the other, and the piece of them that this rank computes."""

    flat: torch.Tensor  #: The tensors, on the CPU.
    spans: list[tuple[int, int, int]]  #: The index of each tensor in the list, and its begin and end in ``flat``.
    held: tuple[int, int]  #: The begin and end of the piece.

    @property
    def piece(self) -> torch.Tensor:
        """The piece: a view of ``flat``."""
        return self.flat[slice(*self.held)]

    def halve(self, *, keep_upper: bool) -> torch.Tensor:
        """Keep one half of the piece; return the other half."""
        begin, end = self.held
        middle = (begin + end) // 2
        lower, upper = (begin, middle), (middle, end)
        self.held, other = (upper, lower) if keep_upper else (lower, upper)
        return self.flat[slice(*other)]

    def grow(self, held: tuple[int, int]) -> torch.Tensor:
        """Go back to the piece before ``halve``; return the half that this rank did not compute."""
        (begin, end), self.held = self.held, held
        return self.flat[held[0] : begin] if begin > held[0] else self.flat[end : held[1]]

    def add_products(self, products: torch.Tensor, theirs: torch.Tensor) -> None:
        """Add this piece's part of every tensor's (mine.theirs, mine.mine, theirs.theirs); shape (tensors, 3)."""
        for index, part in self._parts():
            a, b = self.piece[part].double(), theirs[part].double()
            products[index] += torch.stack([a.dot(b), a.dot(a), b.dot(b)])

    def combine(self, weights: Sequence[Sequence[float]], theirs: torch.Tensor) -> None:
        """Replace the piece by a weighted sum; per tensor, the weights of mine and theirs."""
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        for index, part in self._parts():
            own, other = weights[index]
            self.piece[part] = self.piece[part].to(dtype) * own + theirs[part].to(dtype) * other

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy ``flat`` back to the tensors."""
        for index, begin, end in self.spans:
            write(tensors[index], self.flat[begin:end].view(tensors[index].shape))

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Yield the tensors of which the piece has a part, and the slice of the piece."""
        first, last = self.held
        for index, begin, end in self.spans:
            if begin < last and end > first:
                yield index, slice(max(begin, first) - first, min(end, last) - first)


def _products(packs: Sequence[_Pack], theirs: Sequence[torch.Tensor], num_tensors: int) -> torch.Tensor:
    """Return this rank's part of (mine.theirs, mine.mine, theirs.theirs) for every tensor; shape (tensors, 3)."""
    products = torch.zeros(num_tensors, 3, dtype=torch.float64, device="cpu")
    for pack, other in zip(packs, theirs, strict=True):
        pack.add_products(products, other)
    return products


def _combine(packs: Sequence[_Pack], theirs: Sequence[torch.Tensor], products: torch.Tensor) -> None:
    dots, norms = products[:, :1], products[:, 1:]
    # A vector of norm 0 adds nothing, and takes nothing away from the other one.
    weights = torch.where(norms == 0, 1.0, 1.0 - dots / (2.0 * norms)).tolist()
    for pack, other in zip(packs, theirs, strict=True):
        pack.combine(weights, other)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_unsupported(name: object, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
        known = ", ".join(map(_dtype_name, _DTYPES))
        raise UnsupportedError(f"{name!r} is {tensor.dtype}, {tensor.layout}: Adasum combines dense tensors of {known}")


def _pack(tensors: Sequence[torch.Tensor]) -> list[_Pack]:
    """Return one pack per dtype, in the order in which the dtypes first appear."""
    members: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        _refuse_unsupported(index, tensor)
        members.setdefault(tensor.dtype, []).append(index)
    packs = []
    for dtype, indices in members.items():
        ends = list(itertools.accumulate(tensors[index].numel() for index in indices))
        spans = list(zip(indices, [0, *ends[:-1]], ends, strict=True))
        flat = torch.empty(ends[-1], dtype=dtype, device="cpu")
        for index, begin, end in spans:
            flat[begin:end].view(tensors[index].shape).copy_(tensors[index])
        packs.append(_Pack(flat, spans, (0, ends[-1])))
    return packs


class AdasumOptimizer(OptimizerWrapper):
    """Wraps a torch optimizer so that ``step()`` applies the Adasum of all ranks' updates.

    Each rank lets the torch optimizer update with its own gradients and state, then the *changes* of the parameters are
    combined and added to where they started: what Horovod does for Adasum, since combined gradients would lose
    their length in an optimizer that normalises them. Ranks start from equal parameters, and these stay equal, bit by
    bit, while the optimizer's state differs per rank. A parameter that is frozen or got no gradient on this rank counts
    as unchanged here.

    Every rank must call ``step()`` equally often. ``GradScaler`` leaves steps out where this rank's gradients overflow,
    and the others would wait: train in bfloat16 instead.

    Args:
        optimizer: Any ``torch.optim`` optimizer. It is driven by this one: do not step it yourself.
        model: The module that holds the optimizer's parameters. Model parameters that the optimizer does not hold
            stay local.
        group: The ranks.
        initial: As for ``DistributedOptimizer``: what happens if ranks begin with other values than rank 0.
        name: Prefix of the operations' names; different for each optimizer that shares a group.

    Raises:
        ConfigurationError: The optimizer is distributed already, or holds a parameter that is not in the model; or the
            model is wrapped in DistributedDataParallel.
        PlanMismatchError: The ranks' models or optimizers differ; on every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        group: Group,
        initial: Initial | None = "broadcast",
        name: str = "adasum",
    ) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise ConfigurationError("the optimizer is distributed already: pass the torch optimizer")
        super().__init__(optimizer)
        self._model, self._group, self._name = model, group, name
        source = ParameterSource(optimizer, model, None)
        source.refuse_wrapped()
        self._adasum = Adasum(group, name)
        self._parameters = self._agree()
        if initial is not None:
            begin_alike(source.tensors(), optimizer, group, name, initial)

    def _agree(self) -> list[torch.nn.Parameter]:
        def describe(named: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
            # A list, because the order of the parameters must be equal, too.
            shown = [[name, str(each.dtype), *each.shape] for name, each in named.items()]
            return {"optimizer": self.kind, "parameters": shown}

        return list(
            agree_or_refuse(self._group.control, f"{self._name}.plan", self._named_parameters, describe).values()
        )

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the optimizer's parameters, in the model's order."""
        held = {parameter for group in self._inner.param_groups for parameter in group["params"]}
        named = {name: parameter for name, parameter in self._model.named_parameters() if parameter in held}
        if len(named) != len(held):
            raise ConfigurationError(
                f"{len(held) - len(named)} parameter(s) of the optimizer are not in the model: they have no name that "
                "all ranks know. Pass the model that holds them."
            )
        for name, parameter in named.items():
            _refuse_unsupported(name, parameter)
        return named

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update on this rank, and replace the update by the Adasum of all ranks' updates. Collective.

        Args:
            closure: Evaluates the model on this rank's batch and returns the loss. It is not collective, so the torch
                optimizer may call it any number of times.

        Returns:
            The closure's loss on this rank; ``None`` without a closure.

        Raises:
            ConfigurationError: Parameters were added to the torch optimizer itself.
            DeadlineExceededError: Some rank did not come in time. The parameters have this rank's own update.
            PeerLost: A rank is gone. The parameters have this rank's own update.
        """
        if sum(len(group["params"]) for group in self._inner.param_groups) != len(self._parameters):
            raise ConfigurationError("add parameters with AdasumOptimizer.add_param_group(), on every rank")
        values = [parameter.detach() for parameter in self._parameters]
        starts = [value.clone() for value in values]
        loss = self._inner.step() if closure is None else self._inner.step(closure)
        if self._group.world_size == 1:
            return loss
        changes = [value - start for value, start in zip(values, starts, strict=True)]
        self._adasum.combine_(changes)
        for value, start, change in zip(values, starts, changes, strict=True):
            torch.add(start, change, out=value)
        return loss

    def flush(self) -> None:
        """Do nothing: no update is deferred."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does."""
        self._inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The torch optimizer's groups."""
        return self._inner.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters. Collective.

        Raises:
            ConfigurationError: A parameter is not in the model; the group is not added then.
            PlanMismatchError: The ranks added different groups; on every rank, and none is added.
        """
        self._inner.add_param_group(param_group)
        try:
            self._parameters = self._agree()
        except (ConfigurationError, PlanMismatchError):
            self._inner.param_groups.pop()
            raise

    def __repr__(self) -> str:
        return f"AdasumOptimizer({self._inner!r}, rank {self._group.rank} of {self._group.world_size})"
