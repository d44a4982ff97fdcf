"""Starting MPI jobs beside a benchmark: find an ``mpirun``, a Python for it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError

#: By peer: how its library and its ``mpirun --version`` call themselves, and names of its launcher on PATH.
_KNOWN = {
    "openmpi": ("Open MPI", ("Open MPI", "OpenRTE", "PRRTE"), ("mpirun.openmpi", "mpirun")),
    "mpich": ("MPICH", ("HYDRA", "MPICH"), ("mpirun.mpich", "mpiexec.hydra", "mpirun")),
}
MPI_PEERS = tuple(_KNOWN)
_QUESTION_S = 30.0
#: Prints the MPI library that mpi4py uses. A Python with another library than its ``mpirun`` cannot join the job.
_LIBRARY = (
    "import mpi4py, numpy; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version().split(',')[0].splitlines()[0][:40])"
)
_END_S = 5.0
#: Launchers refuse root, and more ranks than cores, unless told otherwise. How ranks wait is left as each MPI has it:
#: who wants, for example, Open MPI's ``OMPI_MCA_mpi_yield_when_idle=1`` exports it.
_PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def signature_of(peer: str) -> str:
    """How the library's version begins."""
    return _KNOWN[peer][0]


def explain(folder: Path, peer: str) -> str | None:
    """Why the peer's ``mpirun`` has ended; ``None`` while it runs."""
    ended = folder / f"{peer}.ended"
    if not ended.exists():
        return None
    errors = (folder / f"{peer}.errors").read_text(encoding="utf-8", errors="replace").split("\n")
    tail = " / ".join(line.strip() for line in errors if line.strip("- "))[-600:]
    return f"mpirun ended with exit code {ended.read_text().strip()}: {tail}"


@contextlib.contextmanager
def mpi_jobs(peers: Sequence[str], places: Mapping[str, Path], num_ranks: int, folder: Path) -> Iterator[None]:
    """Run one MPI job per peer; they wait for the workers, which ask them for samples.

    Args:
        peers: Of ``MPI_PEERS``.
        places: ``mpirun`` by peer; the others are looked for on PATH.
        num_ranks: Size of each job.
        folder: For sockets and errors; the workers know it.
    """
    script = str(Path(__file__).with_name("mpi_peer.py"))
    with contextlib.ExitStack() as stack:
        for peer in peers:
            launcher = _launcher(peer, places.get(peer))
            python = _python(peer, launcher)
            # The shell notes the end in a file, for which the workers look.
            command = f'"$@" 2>"{folder}/{peer}.errors" >&2; echo $? >"{folder}/{peer}.ended"'
            job = subprocess.Popen(
                ["sh", "-c", command, "sh", str(launcher), "-n", str(num_ranks), python, script, str(folder), peer],
                stdin=subprocess.DEVNULL,
                env={**current(), **_PERMISSIONS},
                start_new_session=True,
            )
            stack.callback(_end, job)
        yield


def _launcher(peer: str, place: Path | None) -> Path:
    _, words, names = _KNOWN[peer]
    # First beside this Python: an MPI that pip has installed is there, whether or not that is on PATH.
    folders = (str(Path(sys.executable).parent), None)
    everywhere = [shutil.which(name, path=folder) for folder in folders for name in names]
    for path in [place] if place is not None else [Path(path) for path in everywhere if path is not None]:
        if any(word.lower() in _ask([str(path), "--version"]).lower() for word in words):
            return path
    where = f"{place} is no mpirun of it" if place is not None else f"there is no {' or '.join(names)} of it on PATH"
    raise ConfigurationError(
        f"--against {peer}: {where}. Install it, for example in a virtual environment with "
        f"`pip install {peer} mpi4py numpy`, and say --mpirun {peer}=PATH"
    )


def _python(peer: str, launcher: Path) -> str:
    paths = (launcher.parent / "python3", Path(sys.executable))
    candidates = list(dict.fromkeys(str(path) for path in paths if path.exists()))  # the two may be one file
    found = []
    for python in candidates:
        library = _ask([python, "-c", _LIBRARY]).strip()
        if library.startswith(signature_of(peer)):
            return python
        found.append(f"{python} has {f'mpi4py over {library}' if library else 'not both mpi4py and NumPy'}")
    raise ConfigurationError(
        f"--against {peer}: no Python that can run beside its mpirun: {'; '.join(found)}. Install them for it: "
        f"`{candidates[0]} -m pip install mpi4py numpy`"
    )


def _ask(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUESTION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _end(job: subprocess.Popen[bytes]) -> None:
    """The ranks leave by themselves when the workers have gone; those that stay are ended."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_END_S)
            return
