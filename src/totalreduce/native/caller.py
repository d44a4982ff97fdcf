"""The line of the program that submitted an operation, for reports of stalls."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["caller"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_NOT_THE_PROGRAM = (_PACKAGE, str(Path(torch.__file__).resolve().parent), "<")


@dataclass(slots=True)
class _SourceLine:
    """A line of the program; made a text only where ranks stall."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_qualname}"


def caller() -> object:
    """The innermost calling line that is neither in this package nor in torch; ``""`` if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            return _SourceLine(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""
