"""Arithmetic on memory. No rank, no message, no thread; every kernel releases the GIL while it works."""

from totalreduce.kernels.reduction import combine, divide, supports

__all__ = ["combine", "divide", "supports"]
