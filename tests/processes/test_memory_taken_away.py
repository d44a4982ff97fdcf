"""Memory that the program takes away from an operation in flight, on every transport between processes.

``tests/threads/test_memory_in_flight.py`` has the details; here are the parts that threads do not have.
"""

from pathlib import Path

import pytest
from test_mpi import MPIRUN, mpirun

PROGRAM = Path(__file__).with_name("programs") / "taken_away.py"
WAYS = {"other_data": True, "other_storage": True, "grown": True, "emptied": False, "forgotten": True}


def expected(error: str) -> list[list[str]]:
    """Rank 0 took the memory away, and is told so where the result would be lost; the sums are right everywhere."""
    return [
        *(["0", way, "right", error if lost else "none"] for way, lost in WAYS.items()),
        *(["1", way, "right", "none"] for way in WAYS),
    ]


@pytest.mark.parametrize(
    ("door", "error"),
    [
        ("shm", "TotalReduceError"),
        ("tcp", "TotalReduceError"),
        ("gloo", "TotalReduceError"),
        ("torch", "TotalReduceError"),
        ("c10d", "DistBackendError"),
    ],
)
def test_five_ways(fleet, door: str, error: str) -> None:
    start = f"sys.argv = ['taken_away.py', {door!r}]"
    workers = fleet.start(2, f"import runpy\n{start}\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    said = []
    for worker in workers:
        said += [worker.read_line(timeout_s=60).split() for _ in WAYS]
        assert worker.wait() == 0, worker.errors()
    assert said == expected(error)


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
def test_five_ways_with_mpi(warm_python: None) -> None:
    code, said, errors = mpirun(2, str(PROGRAM), "mpi")
    assert code == 0, errors
    assert sorted(line.split() for line in said) == sorted(expected("TotalReduceError"))
