"""All sparse methods by name, for commands and benchmarks. A method is a file of its own and a line in ``METHODS``.

Packages outside add methods with entry points of the group ``totalreduce.sparse_methods``, programs with
``METHODS.add(name, make)``.
"""

from __future__ import annotations

from collections.abc import Callable

from totalreduce.foundation.extensions import Extensions, classes_of_settings
from totalreduce.sparse.coded import Coded
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

_Make = Callable[..., Method]


#: The class of a method's settings, by the method's name.
METHODS: Extensions[_Make] = classes_of_settings(
    "sparse method",
    "totalreduce.sparse_methods",
    (Dense, TopkA, GTopk, TopkDSA, GaussianK, OkTopk, SharedTopk, PowerSGD, Coded),
)
