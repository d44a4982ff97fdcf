"""All methods by name, for commands and benchmarks. A new method is a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from totalreduce.sparse.dense import Dense
from totalreduce.sparse.gaussiank import GaussianK
from totalreduce.sparse.gtopk import GTopk
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.session import Method
from totalreduce.sparse.shared import SharedTopk
from totalreduce.sparse.topka import TopkA
from totalreduce.sparse.topkdsa import TopkDSA

__all__ = ["METHODS"]

#: What makes a method's settings, by the method's name.
METHODS: Mapping[str, Callable[..., Method]] = {
    method.name: method for method in (Dense, TopkA, GTopk, TopkDSA, GaussianK, OkTopk, SharedTopk, PowerSGD)
}
