"""One rank of ``totalreduce doctor``: ``python -m totalreduce.cli.doctor_worker FILE TRANSPORT``.

Joins the job, measures its links, collects what every rank knows of its host, and has rank 0 write it down.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import totalreduce as tr
from totalreduce.foundation import environment
from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.groups import probe
from totalreduce.launch.address import choose_address, interface_of
from totalreduce.transports.shm import shm_available

__all__ = ["examine"]

_SURVEYS = 3
#: More ranks than cores leave one without a core for seconds; that is no death.
_PATIENT = TcpConfig(silence_s=30.0)


def examine(transport: str) -> dict[str, Any] | None:
    """Join, measure, and return the whole job's document on rank 0, ``None`` elsewhere. Collective.

    Raises:
        TotalReduceError: The group could not be formed, or a rank was lost.
    """
    with tr.init(transport, name="doctor", tcp=_PATIENT) as group:
        survey = probe.combined([probe.survey(group) for _ in range(_SURVEYS)])
        facts = group.gather_object({**_facts(), "way": _way(group)}, root=0)
        selector = probe.selector_of(group)
        group.barrier()
        if facts is None:
            return None
        return {
            "version": tr.__version__,
            "launcher": environment.read_world().launcher,
            "ranks": facts,
            "survey": asdict(survey),
            "links": asdict(survey.links),
            "in_use": asdict(selector.links),
            "shared_memory": selector.shared_memory,
        }


def _way(group: tr.Group) -> str:
    """How this rank's messages travel: ``shm``, ``tcp``, ``routed`` (one of them by host), ``mpi``, ``torch``."""
    return type(group._runner.transport).__name__.removesuffix("Transport").lower()


def _facts() -> dict[str, Any]:
    """What this rank knows of its host."""
    settings = environment.read_settings()
    address, reason = choose_address(environment.read_world(), settings)
    try:
        interface = interface_of(address)
    except ConfigurationError:
        interface = ""
    return {
        "name": socket.gethostname(),
        "address": address,
        "address_from": reason,
        "interface": interface,
        "mtu": int(_read(f"/sys/class/net/{interface}/mtu") or 0),
        "congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "cores": len(os.sched_getaffinity(0)),
        "no_shared_memory": shm_available() or "",
        "tls": settings.tls is not None,
        "job_key": environment.read_job_key() is not None,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # no such thing inside this container


def main(path: str, transport: str) -> None:
    """Examine; rank 0 writes the document. What prevents it is one line on standard error and exit code 2."""
    try:
        document = examine(transport)
    except TotalReduceError as error:
        print(f"rank {environment.read_world().rank}: {error}", file=sys.stderr)
        sys.exit(2)
    if document is not None:
        Path(path).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
