"""Casts to fewer bytes for the wire."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Encodes tensors for an operation, and decodes the results; this class leaves them unchanged.

    Operations take any subclass; ``DistributedOptimizer`` takes those in ``Compression``.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor to send, and the context for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004  (subclasses use it)
        """Decode a tensor that ``compress`` has encoded."""
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
    """All compressors. Sums of half types are accumulated in float32 and rounded once."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
