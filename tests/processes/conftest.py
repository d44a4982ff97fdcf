"""Fixtures of the tests with real processes."""

import sys

import pytest
from fleet import Fleet

from totalreduce.bench import launching
from totalreduce.launch.workers import RunResult, WorkerResult

#: Becomes the program that a benchmark would have started: a module or a file, with its arguments.
PROGRAM = """
import runpy
sys.argv = {argv!r}
if {module!r}:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def zygote():
    made = Fleet()
    yield made
    made.close()


@pytest.fixture
def fleet(zygote):
    """Starts jobs whose workers are gone when the test ends."""
    yield zygote
    zygote.end_jobs()


@pytest.fixture
def warm_workers(fleet, monkeypatch):
    """Benchmarks start their workers from the zygote: processes as real as others, without 2 s of imports each."""

    def run_workers(argv, *, num_workers, emulate, environment, output, timeout_s):
        assert emulate is None
        assert argv[0] == sys.executable
        module, arguments = (argv[2], argv[2:]) if argv[1] == "-m" else ("", argv[1:])
        workers = fleet.start(num_workers, PROGRAM.format(argv=list(arguments), module=module))
        codes = [worker.wait(timeout_s) for worker in workers]
        results = tuple(
            WorkerResult(worker.rank, worker.pid, code, None, 0.0, tuple(worker.errors().splitlines()[-10:]))
            for worker, code in zip(workers, codes, strict=True)
        )
        failure = next((result for result in results if result.exit_code), None)
        return RunResult(failure.exit_code if failure else 0, results, failure)

    monkeypatch.setattr(launching, "run_workers", run_workers)
