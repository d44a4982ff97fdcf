"""The reducers of sparse gradients (embeddings with ``sparse=True``, ``SparseAdam``).

``SparseReducer`` gathers the rows of all ranks on every rank. ``coalesce`` adds rows with the same index in the order
of the ranks, so that all ranks have the same bits. A rank without a gradient, or without rows, contributes no rows.

Source: Horovod's sparse allreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.pytorch.round import GradientReducer
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["SparseReducer", "SparseResults"]

#: The number of rows of a rank without a gradient.
_NO_GRADIENT = -1


@never_compiled
class SparseReducer(GradientReducer):
    """The parameters of one plan whose gradients are sparse. They are exchanged in ``finish``, by three allgathers."""

    hooked = False

    def __init__(
        self,
        group: Group,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        divisor: Callable[[int], int],
    ) -> None:
        self._group, self._name, self.parameters, self._names = group.control, name, parameters, names
        self._divisor = divisor
        self._joined = False
        #: What was begun in this round, by name: after a time-out, ``finish`` is called again.
        self._begun: dict[str, tuple[list[Work], list[torch.Tensor]]] = {}

    def begin(self, *, joined: bool = False) -> None:
        """Open a round."""
        self._joined = joined
        self._begun.clear()

    def finish(self, active: int) -> int:
        """Gather the rows of all ranks, and install their sums or averages.

        Raises:
            ConfigurationError: A gradient is not sparse here, or of another shape than its parameter.
            PeerLost: A rank is lost.
        """
        if self.parameters and active:
            reduced = self._reduce(self._divisor(active), joined=self._joined)
            if not self._joined:
                for parameter, gradient in zip(self.parameters, reduced, strict=True):
                    parameter.grad = gradient
            self._begun.clear()
        return active

    def _reduce(self, divisor: int, *, joined: bool) -> list[torch.Tensor | None]:
        """Return the reduced gradient of each parameter; ``None`` where no rank has one. Collective."""
        group = self._group
        own = [None if joined else self._own(index) for index in range(len(self.parameters))]
        name = f"{self._name}.sparse/rows"

        def count() -> tuple[list[Work], list[torch.Tensor]]:
            counts = torch.tensor([_NO_GRADIENT if grad is None else grad._nnz() for grad in own])
            all_counts = torch.empty(group.world_size * len(own), dtype=torch.int64)
            return [group.allgather(all_counts, counts, name=name)], [all_counts]

        [all_counts] = self._once(name, count)
        by_rank = all_counts.view(group.world_size, len(own))
        results: list[torch.Tensor | None] = []
        for index, (grad, parameter) in enumerate(zip(own, self.parameters, strict=True)):
            rows = by_rank[:, index].tolist()
            if max(rows) == _NO_GRADIENT:
                results.append(None)
            else:
                total = self._gathered(index, grad, parameter, [max(0, count) for count in rows])
                results.append(total / divisor if divisor != 1 else total)
        return results

    def _once(self, name: str, begin: Callable[[], tuple[list[Work], list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Begin an exchange, unless it was begun in this round; return its tensors when it has ended."""
        if name not in self._begun:
            self._begun[name] = begin()
        works, tensors = self._begun[name]
        for work in works:
            work.wait()
        return tensors

    def _own(self, index: int) -> torch.Tensor | None:
        parameter = self.parameters[index]
        grad = parameter.grad
        if grad is None:
            return None
        if not grad.is_sparse or grad.shape != parameter.shape or grad.sparse_dim() != 1:
            raise ConfigurationError(
                f"parameter {self._names[index]!r} was planned with sparse gradients (one sparse dimension), but its "
                f"gradient is {grad.layout}{list(grad.shape)}. Use sparse='dense' where modules differ."
            )
        return grad.detach().coalesce()

    def _gathered(
        self, index: int, grad: torch.Tensor | None, parameter: torch.nn.Parameter, rows: Sequence[int]
    ) -> torch.Tensor:
        group, name = self._group, f"{self._name}.sparse/{self._names[index]}"
        width, sizes = parameter.shape[1:], list(rows)

        def gather() -> tuple[list[Work], list[torch.Tensor]]:
            indices = torch.empty(0, dtype=torch.int64)
            values = torch.empty((0, *width), dtype=parameter.dtype)
            if grad is not None:
                indices, values = grad.indices()[0].cpu().contiguous(), grad.values().cpu().contiguous()
            all_indices = torch.empty(sum(rows), dtype=torch.int64)
            all_values = torch.empty((sum(rows), *width), dtype=parameter.dtype)
            works = [
                group.allgather(list(all_indices.split_with_sizes(sizes)), indices, name=f"{name}/indices"),
                group.allgather(list(all_values.split_with_sizes(sizes)), values, name=f"{name}/values"),
            ]
            return works, [all_indices, all_values]

        all_indices, all_values = self._once(name, gather)
        size = tuple(parameter.shape)
        total = torch.sparse_coo_tensor(all_indices[None], all_values, size, check_invariants=True)
        return total.coalesce().to(parameter.device)


class SparseResults(GradientReducer):
    """Makes gradients sparse after the other reducers have reduced them as dense ones: for ``SparseAdam``."""

    hooked = False

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def begin(self, *, joined: bool = False) -> None:  # noqa: ARG002
        """Make the gradients of the last step dense again, if the program has not reset them."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def finish(self, active: int) -> int:
        """Make the reduced gradients sparse: they have the rows that are not zero."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)
        return active
