"""All strategies by name, for commands and benchmarks. A strategy is a file of its own and a line in ``STRATEGIES``.

Packages outside add strategies with entry points of the group ``totalreduce.strategies``, programs with
``STRATEGIES.add(name, make)``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

from totalreduce.foundation.extensions import Extensions, classes_of_settings
from totalreduce.strategies.async_gossip import AsyncGossip
from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
from totalreduce.strategies.easgd import EASGD
from totalreduce.strategies.gossip import Gossip
from totalreduce.strategies.outer import DiLoCo, SlowMo
from totalreduce.strategies.strategy import Strategy
from totalreduce.strategies.strom import Strom

__all__ = ["STRATEGIES"]

_Make = Callable[..., Strategy]
_GROUP = "totalreduce.strategies"
#: Strategies whose gradients go to servers are on the floor of the parameter server, which is above this one.
_WITH_SERVERS = {
    "async": "Async",
    "stale_synchronous": "StaleSynchronous",
    "soft_sync": "SoftSync",
    "quorum": "Quorum",
    "eager": "Eager",
}

#: The class of a strategy's settings, by the strategy's name.
STRATEGIES: Extensions[_Make] = classes_of_settings(
    *("strategy", _GROUP),
    (
        *(LocalSGD, PostLocalSGD, SlowMo, DiLoCo, EASGD, Gossip, Strom, AsyncGossip),
        *(EntryPoint(name, f"totalreduce.server.served:{kind}", _GROUP) for name, kind in _WITH_SERVERS.items()),
    ),
)
