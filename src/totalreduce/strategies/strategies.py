"""All strategies by name, for commands and benchmarks. A strategy is a file of its own and a line in ``STRATEGIES``.

Packages outside add strategies with entry points of the group ``totalreduce.strategies``, programs with
``STRATEGIES.add(name, make)``.
"""

from __future__ import annotations

from collections.abc import Callable

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.extensions import Extensions
from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
from totalreduce.strategies.easgd import EASGD
from totalreduce.strategies.gossip import Gossip
from totalreduce.strategies.outer import DiLoCo, SlowMo
from totalreduce.strategies.strategy import Strategy

__all__ = ["STRATEGIES"]

_Make = Callable[..., Strategy]


def _check(name: str, item: object) -> _Make:
    if not callable(item) or getattr(item, "name", None) != name:
        raise ConfigurationError(
            f"the strategy {name!r} is a class of settings with the attribute name={name!r}, not {item!r}"
        )
    return item


#: The class of a strategy's settings, by the strategy's name.
STRATEGIES: Extensions[_Make] = Extensions(
    "strategy",
    "totalreduce.strategies",
    {strategy.name: strategy for strategy in (LocalSGD, PostLocalSGD, SlowMo, DiLoCo, EASGD, Gossip)},
    _check,
)
