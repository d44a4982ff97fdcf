"""A rank that only serves: ``totalreduce run --servers`` starts ``python -m totalreduce.server.serve`` for each.

It serves what the workers connect to (``tr.ps.connect``), any number of parameter servers at the same time, and ends
when the workers have closed their group. If ranks can be replaced (``--on-loss``), it serves the one of the job.
"""

from __future__ import annotations

import logging

from totalreduce.foundation import environment
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.groups.group import Group
from totalreduce.launch.bootstrap import init
from totalreduce.recovery.epochs import open_assembly
from totalreduce.server.announcements import Announcements
from totalreduce.server.connecting import VALUE, begin_in_group, begin_in_job
from totalreduce.server.connection import Connection
from totalreduce.server.setup import Setup

__all__ = ["main", "serve_group"]

_log = logging.getLogger(__name__)


def main() -> None:
    """Serve until the workers have ended.

    Raises:
        ConfigurationError: The workers' settings cannot be used here.
        PeerLost: A rank was lost, and is not replaced.
        RecoveryError: The job cannot go on.
    """
    group = init()
    if group.formation is None:
        serve_group(group)
    else:
        _serve_job(group)


def serve_group(group: Group) -> None:
    """Serve the workers of a group whose ranks cannot be replaced (``Group.workers``), until rank 0 closes it."""
    announcements = Announcements(group)
    connections: list[Connection] = []
    with group:
        while (text := announcements.wait()) is not None:
            connections = [each for each in connections if not _has_ended(each)]
            connection = begin_in_group(group, Setup.decode(text, group.world_size), group.timeout_s)
            connection.finish()
            connections.append(connection)
        for connection in connections:
            _has_ended(connection)


def _has_ended(connection: Connection) -> bool:
    """Return whether the workers have closed a connection; log an error that has ended it, and serve the others."""
    if not connection.has_ended(0.0):
        return False
    try:
        connection.close()
    except TotalReduceError as error:
        _log.warning("the connection of a server has ended: %s", error)
    return True


def _serve_job(group: Group) -> None:
    assembly = open_assembly(environment.read_settings(), group.rank, group.world_size, group.timeout_s)
    text = assembly.await_value(VALUE)
    if text:
        connection = begin_in_job(group, Setup.decode(text, group.world_size), group.timeout_s, assembly)
        connection.finish()
        connection.has_ended()
        connection.close()


if __name__ == "__main__":
    main()
