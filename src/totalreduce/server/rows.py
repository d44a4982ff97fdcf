"""The parameters of a dense model as rows of a table: each part of the model is a range of keys."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.kernels.arrays import Array

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
        self.parameters, self._dtype = list(parameters), dtype
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

    @torch.no_grad()
    def read(self, array: Array) -> None:
        """Copy all parameters into an array."""
        for number, parameter in enumerate(self.parameters):
            self.of(array, number).copy_(parameter)

    @torch.no_grad()
    def write(self, array: Array, numbers: Iterable[int]) -> None:
        """Set some parameters."""
        for number in numbers:
            self.parameters[number].copy_(self.of(array, number))

    @torch.no_grad()
    def read_gradients(self, array: Array, numbers: Iterable[int]) -> list[bool]:
        """Copy some gradients into an array, zeros where there is none; return of which parameters there is one."""
        present = [False] * len(self.parameters)
        for number in numbers:
            gradient, part = self.parameters[number].grad, self.of(array, number)
            present[number] = gradient is not None
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return present

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
