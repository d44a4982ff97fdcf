"""Casts to fewer bytes for the wire."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Makes a tensor smaller before an operation, and undoes it; this one leaves it as it is.

    Operations take any subclass; ``DistributedOptimizer`` takes those in ``Compression``.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor that travels, and what ``decompress`` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004  (subclasses use it)
        """What travelled, as it was."""
        return tensor


class _Cast(Compressor):
    """Floating-point tensors travel in another dtype."""

    wire_dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Cast, if it is floating-point."""
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.wire_dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Cast back."""
        return tensor if ctx is None else tensor.to(ctx)


class _Float16(_Cast):
    wire_dtype = torch.float16


class _BFloat16(_Cast):
    wire_dtype = torch.bfloat16


class Compression:
    """The compressors there are. Sums of halves are accumulated in float32 and rounded once."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
