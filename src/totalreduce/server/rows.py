"""The parameters of a dense model as rows of a table: each part of the model is a range of keys."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.kernels.arrays import Array
from totalreduce.tensors.flats import FlatCopies
from totalreduce.tensors.streams import is_on_accelerator

__all__ = ["WIDTH", "ModelRows"]

#: The number of elements of a row. With more, a parameter wastes more of its last row; with fewer, what servers keep
#: for each row takes more memory.
WIDTH = 64


@final
class ModelRows:
    """Where the parameters are in the rows of the table: one behind the other, each from the begin of a row on.

    Attributes:
        parameters: The parameters.
        numbers: Their numbers.
        begins: The first row of each parameter, and the number of rows.
        count: The number of rows.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: np.dtype[Any]) -> None:
        """Place the parameters; ``dtype``: that of the table."""
        self.parameters, self._dtype, self._copies = list(parameters), dtype, FlatCopies()
        self.numbers = range(len(self.parameters))
        counts = [-(-parameter.numel() // WIDTH) for parameter in parameters]
        self.begins: list[int] = [0, *np.cumsum(counts).tolist()]
        self.count: int = self.begins[-1]

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether these are the parameters."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    def empty(self) -> Array:
        """Return zeros for all parameters, of shape (rows, width)."""
        return np.zeros((self.count, WIDTH), self._dtype)

    def of(self, array: Array, number: int) -> torch.Tensor:
        """Return a parameter's part of an array that ``empty`` has made, in the shape of the parameter."""
        parameter, begin = self.parameters[number], self.begins[number] * WIDTH
        part = torch.from_numpy(array.reshape(-1)[begin : begin + parameter.numel()])
        return part.view(parameter.shape)

    def read(self, array: Array) -> None:
        """Copy all parameters into an array."""
        self._read([(self.of(array, number), parameter) for number, parameter in enumerate(self.parameters)])

    @torch.no_grad()
    def write(self, array: Array, numbers: Iterable[int]) -> None:
        """Set some parameters."""
        pairs = [(self.parameters[number], self.of(array, number)) for number in numbers]
        parameters = [parameter for parameter, _ in pairs]
        if any(map(is_on_accelerator, parameters)):
            parts = np.concatenate([part.reshape(-1).numpy() for _, part in pairs])
            self._copies.write(parameters, self._copies.place(parameters, parts))
            return
        for parameter, part in pairs:
            parameter.copy_(part)

    def read_gradients(self, array: Array, numbers: Iterable[int]) -> list[bool]:
        """Copy some gradients into an array, zeros where there is none; return of which parameters there is one."""
        present = [False] * len(self.parameters)
        pairs = []
        for number in numbers:
            gradient, part = self.parameters[number].grad, self.of(array, number)
            present[number] = gradient is not None
            if gradient is None:
                part.zero_()
            else:
                pairs.append((part, gradient.to_dense() if gradient.is_sparse else gradient))
        self._read(pairs)
        return present

    @torch.no_grad()
    def _read(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors into parts of an array; from accelerators all at once."""
        sources = [source for _, source in pairs]
        if any(map(is_on_accelerator, sources)):
            values = torch.from_numpy(self._copies.copy(sources, self._dtype).values())
            sources = list(torch.split(values, [source.numel() for source in sources]))
        for (part, _), source in zip(pairs, sources, strict=True):
            part.copy_(source if source.shape == part.shape else source.view(part.shape))

    def runs(self, present: Sequence[bool]) -> list[tuple[int, int]]:
        """Return the ranges of rows of parameters that are present; ranges that touch are one."""
        return self.runs_of(number for number, is_present in enumerate(present) if is_present)

    def runs_of(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the ranges of rows of some parameters; likewise."""
        runs: list[tuple[int, int]] = []
        for number in sorted(numbers):
            begin, end = self.begins[number], self.begins[number + 1]
            if begin < end:
                touches = bool(runs) and runs[-1][1] == begin
                runs[-1:] = [(runs[-1][0], end)] if touches else [*runs[-1:], (begin, end)]
        return runs
