"""The machine and the versions that a figure was measured with."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import totalreduce


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the versions, as documents have them."""

    totalreduce: str  #: Version of this package.
    torch: str  #: Version of torch; likewise ``numpy``, ``numba``, ``llvmlite`` and ``python``.
    numpy: str
    numba: str
    llvmlite: str
    python: str
    system: str  #: The operating system.
    processor: str  #: Its model's name.
    cores: int  #: Cores that this process may use.
    threads_per_rank: int | None = None  #: Threads of torch in a worker; ``None`` where no workers were started.
    mpi: dict[str, str] = field(default_factory=dict)  #: Version of each MPI that took part, by peer.


def describe_machine(*, threads_per_rank: int | None = None, mpi: dict[str, str] | None = None) -> Machine:
    """Return the description of this machine; loads neither torch nor NumPy."""
    return Machine(
        totalreduce=totalreduce.__version__,
        torch=metadata.version("torch"),
        numpy=metadata.version("numpy"),
        numba=metadata.version("numba"),
        llvmlite=metadata.version("llvmlite"),
        python=platform.python_version(),
        system=platform.platform(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        threads_per_rank=threads_per_rank,
        mpi=mpi or {},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"
