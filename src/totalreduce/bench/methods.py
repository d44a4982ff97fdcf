"""Sparse methods by the names of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from totalreduce.sparse.session import Method

__all__ = ["make_method", "make_sync"]


def make_sync(name: str, density: float) -> Method:
    """What ``DistributedOptimizer(sync=...)`` takes: a method, or ``auto``.

    Raises:
        ConfigurationError: There is no such method, or no such density.
    """
    from totalreduce.sparse.auto import Auto

    return Auto(density=density) if name == "auto" else make_method(name, density)


def make_method(name: str, density: float) -> Method:
    """A method's settings; those that send no share of the elements ignore the density.

    Raises:
        ConfigurationError: There is no such method, or no such density.
    """
    from totalreduce.sparse.methods import METHODS

    settings = {} if name in ("dense", "powersgd") else {"density": density}
    return METHODS[name](**settings)
