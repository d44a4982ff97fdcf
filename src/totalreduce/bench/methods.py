"""Sparse methods and distributions by the names of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from totalreduce.sparse.auto import Auto
    from totalreduce.sparse.session import Method

DISTRIBUTIONS = ("normal", "student", "embedding")

DistributionOption = Annotated[
    str,
    typer.Option(
        help="Of the gradient's elements: normal, student (heavy tails, 3 degrees of freedom), or embedding (rows of "
        "64, present in a step the more seldom the further back they are)."
    ),
]


#: Methods that send no share of the elements.
_WITHOUT_DENSITY = ("dense", "powersgd", "coded")


def make_sync(name: str, density: float, /, **settings: Any) -> Method | Auto:
    """Return the argument of ``DistributedOptimizer(sync=...)``: a method, or ``Auto``."""
    from totalreduce.sparse.auto import Auto

    return Auto(**{"density": density, **settings}) if name == "auto" else make_method(name, density, **settings)


def make_method(name: str, density: float, /, **settings: Any) -> Method:
    """Return a method with its settings; those that send no share of the elements ignore the density."""
    from totalreduce.sparse.methods import METHODS

    given = {} if name in _WITHOUT_DENSITY else {"density": density}
    return METHODS[name](**{**given, **settings})
