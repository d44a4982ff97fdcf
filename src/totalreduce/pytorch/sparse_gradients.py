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
    """The parameters of one plan whose gradients are sparse. They are exchanged in ``finish``, by three allgathers.

    No rows leave during backward. But the hooks of the parameters tell the optimizer that their gradients have changed,
    so that the next ``step()`` synchronises them.
    """

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
        #: This rank's gradients when the round was closed.
        self._local: list[torch.Tensor | None] = []
        #: What was begun in this round, by name: after a time-out, ``finish`` or ``abandon`` goes on with it.
        self._begun: dict[str, tuple[list[Work], list[torch.Tensor]]] = {}
        self._reduced: list[torch.Tensor | None] | None = None

    def begin(self, *, joined: bool = False, again: bool = False) -> None:  # noqa: ARG002
        """Open a round."""
        self._joined = joined
        self._local = []
        self._begun.clear()
        self._reduced = None

    def close(self) -> None:
        """Remember the gradients; ``finish`` sends them, and not those of a later backward pass."""
        if not self._local and not self._joined:
            # Later passes give ``parameter.grad`` other memory for its rows, which a detached tensor does not share.
            self._local = [None if each.grad is None else each.grad.detach() for each in self.parameters]

    def finish(self, active: int) -> int:
        """Gather the rows of all ranks, and add or average them.

        Raises:
            ConfigurationError: A gradient is not sparse here, or of another shape than its parameter.
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``.
        """
        if self.parameters and active and self._reduced is None:
            self._reduced = self._reduce(self._divisor(active))
        return active

    def install(self) -> None:
        """Replace the gradients by the reduced ones, unless this rank has joined."""
        if not self._joined and self._reduced is not None:
            for parameter, gradient in zip(self.parameters, self._reduced, strict=True):
                parameter.grad = gradient
        self._local, self._reduced = [], None
        self._begun.clear()

    def abandon(self) -> None:
        """End the exchange, which other ranks may have begun. Ranks that have not begun it send no rows."""
        if self.parameters and self._reduced is None:
            if not self._begun:
                self._local = []
            self._reduced = self._reduce(1)

    def _reduce(self, divisor: int) -> list[torch.Tensor | None]:
        """Return the reduced gradient of each parameter; ``None`` where no rank has one. Collective."""
        group = self._group
        own = [self._own(index) for index in range(len(self.parameters))]
        name = f"{self._name}.sparse/rows"

        def count() -> tuple[list[Work], list[torch.Tensor]]:
            numbers = [_NO_GRADIENT if grad is None else grad._nnz() for grad in own]
            counts = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            all_counts = torch.empty(group.world_size * len(own), dtype=torch.int64, device="cpu")
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
        grad = self._local[index] if self._local else None
        if grad is None:
            return None
        if not grad.is_sparse or grad.shape != parameter.shape or grad.sparse_dim() != 1:
            raise ConfigurationError(
                f"parameter {self._names[index]!r} was planned with sparse gradients (one sparse dimension), but its "
                f"gradient is {grad.layout}{list(grad.shape)}. Use sparse='dense' where modules differ."
            )
        return grad.coalesce()

    def _gathered(
        self, index: int, grad: torch.Tensor | None, parameter: torch.nn.Parameter, rows: Sequence[int]
    ) -> torch.Tensor:
        group, name = self._group, f"{self._name}.sparse/{self._names[index]}"
        width, sizes = parameter.shape[1:], list(rows)

        def gather() -> tuple[list[Work], list[torch.Tensor]]:
            indices = torch.empty(0, dtype=torch.int64, device="cpu")
            values = torch.empty((0, *width), dtype=parameter.dtype, device="cpu")
            if grad is not None:
                indices, values = grad.indices()[0].cpu().contiguous(), grad.values().cpu().contiguous()
            all_indices = torch.empty(sum(rows), dtype=torch.int64, device="cpu")
            all_values = torch.empty((sum(rows), *width), dtype=parameter.dtype, device="cpu")
            works = [
                group.allgather(list(all_indices.split_with_sizes(sizes)), indices, name=f"{name}/indices"),
                group.allgather(list(all_values.split_with_sizes(sizes)), values, name=f"{name}/values"),
            ]
            return works, [all_indices, all_values]

        all_indices, all_values = self._once(name, gather)
        size = tuple(parameter.shape)
        total = torch.sparse_coo_tensor(
            all_indices[None], all_values, size, check_invariants=True, device=all_values.device
        )
        return total.coalesce().to(parameter.device)


class SparseResults(GradientReducer):
    """Makes gradients sparse after the other reducers have reduced them as dense ones: for ``SparseAdam``."""

    hooked = False

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def begin(self, *, joined: bool = False, again: bool = False) -> None:  # noqa: ARG002
        """Make the gradients of the last step dense again, if the program has not reset them."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def finish(self, active: int) -> int:  # noqa: D102
        return active

    def install(self) -> None:
        """Make the gradients that the other reducers have installed sparse: they have the rows that are not zero."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)
