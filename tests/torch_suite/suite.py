"""PyTorch's own c10d suite as one process runs it: the tests are PyTorch's, the back end is ours (or gloo).

PyTorch ships the tests (``torch.testing._internal.distributed.distributed_test``) and keeps the three lines that make
them runnable, ``test/distributed/test_distributed_spawn.py``, in its repository; this module stands in for those.

Two things differ from there:

- The back end under test presents itself as gloo while the module is imported, because that is when the decorators
  ("only gloo supports time-outs", ...) decide what to skip. Whoever claims to be a drop-in for gloo is measured by what
  gloo is measured by. Afterwards the name is put right, and added to the lists of back ends whose operations must show
  up in a profile. No test is changed.
- Ranks are forked instead of spawned: torch is imported once and not once per rank and test.

Run as ``python suite.py BACKEND WORLD_SIZE OUTPUT [TEST...]``; OUTPUT receives ``{test: [status, detail]}`` as JSON.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import unittest
import unittest.mock
import warnings
from pathlib import Path

#: What a test may take; the longest of gloo's takes a quarter of it here.
_TEST_TIMEOUT_S = 120


def make_case(backend, world_size, folder):
    """The test class for one back end and world size."""
    (Path(folder) / "barrier").mkdir()
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": folder,
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_TEST_TIMEOUT_S),
    }
    warnings.simplefilter("ignore")  # PyTorch's tests use much that PyTorch calls deprecated
    import torch
    import torch.testing._internal.distributed.distributed_test as suite

    import totalreduce.c10d.backend  # noqa: F401  (registers the back end; loaded once, before the ranks are forked)

    os.environ["BACKEND"] = suite.BACKEND = backend
    for supported in (
        suite.PROFILING_SUPPORTED_BACKENDS,
        suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(backend)

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *arguments, **options):
            # The one place where a running test asks for the name, to choose between CPU and GPU.
            with unittest.mock.patch.object(suite, "BACKEND", "gloo"):
                super()._test_accumulate_gradients_no_sync(*arguments, **options)

    return Case


class Recorder(unittest.TestResult):
    """Notes how each test ended, and shows progress."""

    def __init__(self):
        super().__init__()
        self.outcomes = {}
        self._begin = 0.0

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self._begin = time.monotonic()

    def note(self, test, status, detail=""):
        name = test.id().rpartition(".")[2]
        if self.outcomes.get(name, ("passed",))[0] != "passed":
            return
        self.outcomes[name] = (status, detail)
        if status != "skipped":
            print(f"{status:7} {time.monotonic() - self._begin:6.1f} s  {name}", file=sys.__stderr__, flush=True)

    def addSuccess(self, test):  # noqa: N802
        self.note(test, "passed")

    def addError(self, test, err):  # noqa: N802
        self.note(test, "failed", self._exc_info_to_string(err, test))

    addFailure = addError  # noqa: N815

    def addSkip(self, test, reason):  # noqa: N802
        self.note(test, "skipped", reason)

    def addExpectedFailure(self, test, err):  # noqa: N802
        self.note(test, "passed")

    def addUnexpectedSuccess(self, test):  # noqa: N802
        self.note(test, "failed", "succeeded although a failure was expected")


def main(backend, world_size, output, *names):
    """Run the tests named (none: all) and write the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(backend, int(world_size), folder)
        chosen = names or unittest.TestLoader().getTestCaseNames(case)
        result = Recorder()
        with contextlib.redirect_stdout(io.StringIO()):
            unittest.TestSuite(case(name) for name in chosen).run(result)
        Path(output).write_text(json.dumps(result.outcomes, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
