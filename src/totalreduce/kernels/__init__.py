"""Arithmetic on memory, without ranks, messages or threads. Every kernel releases the GIL while it works."""

from totalreduce.kernels.reduction import combine, divide, supports

__all__ = ["combine", "divide", "supports"]
