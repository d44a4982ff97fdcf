"""Filters of a worker: which of the keys that a program pushes are sent now, and which wait.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 3.4 (user-defined
filters) and 5.1 (the KKT filter). What a filter withholds stays in the worker's residual, and is added to the worker's
next push of the same key. So the sum of all that was pushed is the sum of what servers got and of the residuals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels.arrays import Array

__all__ = ["KKT", "Filter", "Significant", "selected_by"]


class Filter(ABC):
    """Decides on one worker which keys of a push are sent. A plain object; no other worker needs an equal one.

    Attributes:
        watches_pulls: Whether ``pulled`` is called. Override it with ``True`` where the filter needs values.
    """

    watches_pulls: ClassVar[bool] = False

    def begin(self, num_keys: int, width: int) -> None:  # noqa: B027  (most filters have nothing to do here)
        """Note that ``tr.ps.connect`` uses this filter, for a table with so many keys and values of each key."""

    @abstractmethod
    def select(self, keys: Array, values: Array, step: int) -> Array:
        """Return which keys are sent now: bool, of shape (n,). It must not change its arguments.

        Called in ``push`` and ``push_pull``, before anything is sent. An error that it raises comes out of this call,
        and nothing has changed.

        Args:
            keys: Integers, ascending, of shape (n,).
            values: What is to be sent for them, of shape (n, width): what the program pushes, and what was withheld of
                the same keys before.
            step: The number of steps that this worker has ended.
        """

    def pulled(self, keys: Array, values: Array) -> None:  # noqa: B027
        """Note values that this worker has pulled, of shape (n, width). Called in the thread of the connection.

        An error that it raises ends the connection.
        """


@final
@dataclass
class Significant(Filter):
    """Sends a key when what is withheld of it has become large.

    Attributes:
        threshold: A key is sent if the magnitude of one of its values is larger. Not negative; with 0, only keys whose
            values are all zero are withheld.

    Raises:
        ConfigurationError: The threshold is not like that.
    """

    threshold: float

    def __post_init__(self) -> None:
        self.threshold = _not_negative("threshold", self.threshold)

    def select(self, keys: Array, values: Array, step: int) -> Array:
        """Return which keys are sent."""
        del keys, step
        is_small: Array = np.all(np.abs(values) <= self.threshold, axis=1, keepdims=True)
        return ~is_small[:, 0]  # what is not a number is sent


@final
@dataclass
class KKT(Filter):
    """Withholds gradients that probably do not move a weight of zero, in a model with an L1 penalty. A heuristic.

    At the optimum, a weight is zero if the magnitude of its gradient over all data is below ``l1`` (the condition of
    Karush, Kuhn and Tucker; Li et al., OSDI 2014, section 5.1). A key is withheld if its weights were all zero when
    this worker pulled it last, and the magnitudes of its gradients, with what was withheld before, are at most ``l1`` -
    ``slack``. A key that this worker has never pulled is sent. Use it with ``tr.ps.FTRL(l1=...)``; it takes a byte for
    each key of the table.

    FTRL goes by the sum of the gradients of all workers in all steps. Each worker may withhold up to ``l1`` - ``slack``
    of it for good, so a weight can stay zero that would not without the filter. Choose ``slack`` so that the number of
    workers times ``l1`` - ``slack`` is a small part of ``l1``, and call ``push_withheld`` at the end.

    Attributes:
        l1: The weight of the penalty.
        slack: By how much a gradient must be smaller, from 0 to ``l1``.

    Raises:
        ConfigurationError: A number is not like that.
    """

    watches_pulls: ClassVar[bool] = True

    l1: float
    slack: float = 0.0
    _is_zero: Array = field(init=False, repr=False, compare=False, default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        self.l1, self.slack = _not_negative("l1", self.l1), _not_negative("slack", self.slack)
        if self.slack > self.l1:
            raise ConfigurationError(f"slack is {self.slack}, more than l1, which is {self.l1}")

    def begin(self, num_keys: int, width: int) -> None:
        """Begin to note which weights are zero. Memory of zeros is not taken before it is used."""
        del width
        self._is_zero = np.zeros(num_keys, np.bool_)

    def select(self, keys: Array, values: Array, step: int) -> Array:
        """Return which keys are sent."""
        del step
        return ~(self._is_zero[keys] & (np.abs(values) <= self.l1 - self.slack).all(axis=1))

    def pulled(self, keys: Array, values: Array) -> None:
        """Note which weights are zero."""
        self._is_zero[keys] = ~values.any(axis=1)


def selected_by(each: Filter, keys: Array, values: Array, step: int) -> Array:
    """Return what a filter selects.

    Raises:
        ConfigurationError: This is no array of booleans, one for each key.
    """
    selected = np.asarray(each.select(keys, values, step))
    if selected.dtype != np.bool_ or selected.shape != keys.shape:
        raise ConfigurationError(
            f"{type(each).__name__}.select returns {selected.dtype} of shape {selected.shape} for {len(keys)} keys; "
            f"expected are booleans of shape ({len(keys)},)"
        )
    return selected


def _not_negative(name: str, value: float) -> float:
    number = checks.real_number(name, value)
    if not 0 <= number < np.inf:
        raise ConfigurationError(f"{name} is a number from 0 on, not {value!r}")
    return number
