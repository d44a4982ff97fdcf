"""The carriers of an engine (``engine.carrying``): the fast lane, and those of other packages.

Packages outside add carriers with entry points of the group ``totalreduce.carriers``, programs with
``CARRIERS.add(name, make)`` before they make a group; all ranks must have the same. The relay is no entry here, because
the transport makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from totalreduce.engine.carrying import Carrier
from totalreduce.fastlane.board import BOARD_BYTES
from totalreduce.fastlane.lane import FastLane
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.extensions import Extensions
from totalreduce.transports.base import Transport

__all__ = ["CARRIERS", "MakeCarrier", "make_carriers"]

#: Makes the carrier of one rank of a group over a transport; ``None``: it is not for such a group.
MakeCarrier = Callable[[Transport], Carrier | None]


def _fast_lane(transport: Transport) -> FastLane | None:
    boards = transport.boards
    if boards is None or boards.board_bytes < BOARD_BYTES:
        return None
    return FastLane(transport.rank, boards, transport.ranks_per_host)


def _check(name: str, item: object) -> MakeCarrier:
    if not callable(item):
        raise ConfigurationError(f"the carrier {name!r} is a function of a transport, not {item!r}")
    return cast(MakeCarrier, item)


#: What makes the carriers, by name; each operation is offered to them in this order.
CARRIERS: Extensions[MakeCarrier] = Extensions("carrier", "totalreduce.carriers", {"fast_lane": _fast_lane}, _check)


def make_carriers(transport: Transport) -> list[Carrier]:
    """Return the carriers of a rank. Raises ``ConfigurationError``."""
    carriers = []
    for name in CARRIERS:
        carrier = CARRIERS[name](transport)
        if carrier is None:
            continue
        if not isinstance(carrier, Carrier):
            raise ConfigurationError(f"the carrier {name!r} makes an engine.carrying.Carrier, not {carrier!r}")
        carriers.append(carrier)
    return carriers
