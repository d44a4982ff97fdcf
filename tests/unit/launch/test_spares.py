"""Which spare replaces whom, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping

from totalreduce.launch.spares import Spare, Spares

SEAT = {
    "RANK": "3",
    "ROLE_RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TOTALREDUCE_INCARNATION": "4",
}
WHOLE = {"TOTALREDUCE_RANK": "3", "TOTALREDUCE_LOCAL_RANK": "1", "TOTALREDUCE_LOCAL_WORLD_SIZE": "2"}


class Process:
    """A worker that was started with some variables."""

    def __init__(self, host: str, variables: Mapping[str, str]) -> None:
        self.host, self.variables, self.rank, self.told = host, dict(variables), -1, b""

    def give(self, line: bytes) -> None:
        """Note what the launcher writes to the process."""
        self.told = line


def make(host: str, *, serves: bool) -> Spare:
    return Spare(lambda variables: Process(host, variables), {"HOME": "/", **SEAT, **WHOLE}, serves=serves)


def test_a_spare_begins_without_the_variables_of_a_seat() -> None:
    program, server = make("a", serves=False), make("a", serves=True)
    assert program.worker.variables == {"HOME": "/", "TOTALREDUCE_SPARE": "program"}
    assert server.worker.variables == {"HOME": "/", "TOTALREDUCE_SPARE": "server"}


def test_a_spare_is_told_the_variables_of_its_seat() -> None:
    for whole in ({}, WHOLE):  # they exist if some ranks only serve
        spare = make("a", serves=True)
        spare.seat(3, {"HOME": "/", **SEAT, **whole})
        assert spare.worker.rank == 3
        assert json.loads(spare.worker.told) == {**SEAT, **whole}


def test_a_server_is_replaced_by_a_spare_that_serves_and_by_no_other() -> None:
    spares = Spares()
    first, second, server = make("a", serves=False), make("a", serves=False), make("b", serves=True)
    spares.waiting = [first, second, server]
    assert (spares.count(serves=False), spares.count(serves=True)) == ({"a": 2}, {"b": 1})
    assert spares.take("a", serves=True) is None
    assert spares.take("b", serves=False) is None
    assert spares.take("a", serves=False) is first
    assert spares.take("b", serves=True) is server
    assert spares.waiting == [second]
