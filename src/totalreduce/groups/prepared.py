"""Operations that are prepared once and carried out again and again, as MPI's persistent operations are."""

from __future__ import annotations

from typing import Protocol, final

from totalreduce.engine.submission import Submission
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.checked import CheckedOperation
from totalreduce.runner.repeated import Repeated
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["PreparedOperation", "Starter"]


class Starter(Protocol):
    """Submits operations that were checked (``Operations``)."""

    def start(self, operation: CheckedOperation, repeated: Repeated, patience_s: float) -> Work:
        """Submit an operation; return at once."""


@final
@never_compiled
class PreparedOperation:
    """An operation on one tensor, which was checked once. Made by ``Group.prepare_allreduce``; any thread may call it.

    As long as it exists, the memory of the tensor cannot be resized.
    """

    __slots__ = ("_operation", "_patience_s", "_repeated", "_starter")

    def __init__(
        self, starter: Starter, operation: CheckedOperation, submission: Submission, patience_s: float
    ) -> None:
        self._starter, self._operation = starter, operation
        self._repeated, self._patience_s = Repeated(submission), patience_s

    def __repr__(self) -> str:
        submission = self._repeated.submission
        return f"<PreparedOperation {submission.name!r}: {submission.signature.describe()}>"

    @property
    def is_current(self) -> bool:
        """Whether the tensor still has the memory that it had when the operation was prepared."""
        operands = self._operation.operands
        return operands is None or not operands.has_moved

    def start(self) -> Work:
        """Submit the operation once more; return at once.

        The n-th start on one rank meets the n-th start, or the n-th ``allreduce`` of this name, on the others.

        Raises:
            ConfigurationError: The operation is in flight; or the tensor was given other memory.
            PeerLost: A rank is lost.
            GroupClosed: This rank has closed the group.
        """
        if not self.is_current:
            raise ConfigurationError(
                f"{self._repeated.submission.name!r}: the tensor of this prepared operation was given other memory "
                "(by .data = …, set_ or resize_): prepare the operation again"
            )
        return self._starter.start(self._operation, self._repeated, self._patience_s)
