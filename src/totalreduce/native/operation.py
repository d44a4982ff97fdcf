"""An operation that this rank has submitted for a native library, and the line of the program that submitted it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from totalreduce.coordination.requests import Request
from totalreduce.foundation.types import OpKind
from totalreduce.runner.handle import Handle
from totalreduce.tensors import dtypes
from totalreduce.tensors.memory import Operands
from totalreduce.tensors.streams import current_stream, is_on_accelerator, record

__all__ = ["NativeOperation", "flattened", "prepare", "program_line"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_NOT_THE_PROGRAM = (_PACKAGE, str(Path(torch.__file__).resolve().parent), "<")

_IN_PLACE = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE)
_ONE_OUTPUT = (OpKind.REDUCE_SCATTER, OpKind.SCATTER)


@dataclass(slots=True, eq=False)
class NativeOperation:
    """One operation, from its submission until the library has ended."""

    request: Request  #: The description that the other ranks get.
    #: The program's tensor that ``Work.wait`` returns; ``None``: it returns ``result``.
    returned_tensor: torch.Tensor | None
    #: The contribution, in the memory that the program's tensor had when it was submitted. The result of an allreduce,
    #: of a reduce and of a broadcast is written there, too.
    tensor: torch.Tensor
    operands: Operands  #: The memory that the operation uses.
    #: Tensors that take the parts of the result, by rank; ``None``: one tensor is made, ``result``.
    outputs: Sequence[torch.Tensor] | None = None
    ready: Any = None  #: On an accelerator: an event after which ``tensor`` has its values.
    stream: Any = None  #: On an accelerator: the current stream of the thread that submitted the operation.
    handle: Handle = field(init=False)  #: Completed when the operation has ended; set when its memory is claimed.
    submitted_at: float = 0.0  #: Time of the submission on the engine's clock, in seconds.
    iteration: int = 0  #: How often the name was used before.
    result: torch.Tensor | None = None  #: The tensor that was made for the result, if there are no ``outputs``.
    #: Filled, at the end of an alltoall, with the number of rows that came from each rank.
    rows: list[int] = field(default_factory=list)
    #: The error of this operation alone, where the other operations of its batch went well.
    error: BaseException | None = None

    def begin(self) -> None:
        """Make the copies that the operation needs. Called when its memory is claimed, by the thread that submits."""
        self.operands.prepare()
        if is_on_accelerator(self.tensor):
            self.stream = current_stream(self.tensor.device)
            self.ready = record(self.stream, self.tensor.device)

    @property
    def returned(self) -> torch.Tensor | Callable[[], torch.Tensor | None]:
        """The result of ``Work.wait``: a tensor, or a function that is called when the operation has ended."""
        return self.returned_tensor if self.returned_tensor is not None else lambda: self.result


def prepare(
    request: Request,
    tensor: torch.Tensor,
    outputs: Sequence[torch.Tensor] | None = None,
    parts: Sequence[torch.Tensor] = (),
    *,
    writes: bool = False,
) -> NativeOperation:
    """Make an operation from its description and its tensors.

    Args:
        request: The description.
        tensor: The contribution of this rank.
        outputs: Tensors that take the result.
        parts: Tensors with which ``tensor`` is filled, one after the other, by ``NativeOperation.begin``.
        writes: Whether the result is written into ``tensor``.

    Raises:
        ConfigurationError: The parts do not fill ``tensor``, or have another dtype.
        UnsupportedError: An output is sparse, nested or quantised.
    """
    operands = Operands(request.name)
    operands.hold(tensor, writes=writes or bool(parts))  # ``begin`` writes the parts into it
    for output in outputs or ():
        dtypes.check_dense(output, request.name)
        operands.hold(output, writes=True)
    if parts:
        operands.fill(tensor, parts)
    # The program may give its tensors other memory while the operation is in flight; the operation keeps the old one.
    kept = None if outputs is None else [output.detach() for output in outputs]
    returned = tensor if request.kind in _IN_PLACE else None
    if outputs and request.kind in _ONE_OUTPUT:
        returned = outputs[0]
    return NativeOperation(request, returned, tensor.detach(), operands, kept)


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return a tensor as one row, and the parts that fill it (see ``prepare``) if that row is a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1), ()
    return tensor.new_empty(tensor.numel()), [tensor]


@dataclass(slots=True)
class _SourceLine:
    """A line of the program. It becomes a text only if ranks stall."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_qualname}"


def program_line() -> object:
    """Return the innermost calling line that is neither in this package nor in torch; ``""`` if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if _is_program(code.co_filename):
            return _SourceLine(code, frame.f_lineno)
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=10_000)
def _is_program(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_PROGRAM)
