"""``tr.ddp_hook``: every case of ``programs/ddp_hook_cases.py`` over gloo and over our own back end, and lost ranks.

The processes of a back end and a world size are started once and asked for one case after the other; a case that fails
ends them.
"""

import re
import signal
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "ddp_hook_cases.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
SOURCE = f"""
import runpy
sys.argv = [{str(PROGRAM)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OFTEN = {
    "everything_sent_is_plain_ddp",
    "what_is_applied_and_kept_back_adds_up",
    "a_nan_anywhere_spoils_the_pass_everywhere",
    "the_same_buckets_go_on_with_the_same_bits",
}
LIMIT_S = 60.0
UNTIL_LOST = f"""
import runpy
from datetime import timedelta
cases = runpy.run_path({str(PROGRAM)!r})
dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=float(os.environ["TIMEOUT_S"])))
model, state = cases["wrap"](cases["without_extra"](), tr.OkTopk(density=0.05), **eval(os.environ["OPTIONS"]))
optimizer = cases["sgd"](model)
say("ready")

def turn(step):
    optimizer.zero_grad()
    loss = cases["loss_of"](model, step)
    attempt.into = "backward"
    loss.backward()
    optimizer.step()
    attempt.into = "between"

def train():
    for step in range(int(os.environ["STEPS"])):
        turn(step)
    say("there")
    hear()
    while True:
        turn(0)

attempt("lost", train)
say("where", place=attempt.into)
"""


class Job:
    """The processes of one back end and world size."""

    def __init__(self, zygote):
        self._zygote, self._workers, self._backend = zygote, [], ""

    def workers(self, backend, size):
        if len(self._workers) != size or self._backend != backend:
            self.close()
            # More processes than cores: one that gets no turn for seconds is not dead.
            self._workers = self._zygote.start(size, SOURCE, BACKEND=backend, TOTALREDUCE_PEER_TIMEOUT_S="30")
            self._backend = backend
        return self._workers

    def close(self):
        self._zygote.end_jobs()
        self._workers = []


@pytest.fixture(scope="module")
def job(zygote):
    made = Job(zygote)
    yield made
    made.close()


def combinations():
    """All cases on both back ends at all world sizes; those outside ``make test`` are slow."""
    for backend, of_all, of_some in (("gloo", (), (3,)), ("totalreduce", (2,), (2,))):
        for size in (1, 2, 3, 4):
            for name in CASES:
                marks = [] if size in (of_some if name in OFTEN else of_all) else [pytest.mark.slow]
                yield pytest.param(backend, size, name, marks=marks)


@pytest.mark.parametrize(("backend", "size", "name"), [*combinations()])
def test_case(job, backend, size, name):
    workers = job.workers(backend, size)
    for worker in workers:
        worker.tell(name)
    try:
        failures = [worker.read("case", LIMIT_S)["failure"] for worker in workers]
    except BaseException:
        job.close()
        raise
    if any(failures):
        job.close()
        pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))


def test_all_cases_are_known():
    assert set(CASES) > OFTEN
    assert len(CASES) == len(set(CASES)) == PROGRAM.read_text().count("\n@case\n")


def lose(fleet, backend, number, timeout_s, options, steps=4):
    """Train on three ranks, send rank 1 a signal, and read what the others met: facts by rank, and the time."""
    variables = {"BACKEND": backend, "TIMEOUT_S": str(timeout_s), "OPTIONS": repr(options), "STEPS": str(steps)}
    workers = fleet.start(3, UNTIL_LOST, **variables)
    for event in ("ready", "there"):
        for worker in workers:
            worker.read(event)
    since = workers[1].send(number)
    for worker in workers:
        worker.tell()
    lost = {}
    for rank in (0, 2):
        lost[rank] = workers[rank].read("lost")
        assert workers[rank].read("where")["place"] == "backward"
        assert workers[rank].wait() == 0
        assert "Traceback" not in workers[rank].errors()
        print(f"rank {rank} knew after {lost[rank]['at'] - since:.3f} s: {lost[rank]['error']}: {lost[rank]['text']}")
    return lost, since


@pytest.mark.parametrize("backend", ["gloo", "totalreduce"])
def test_a_killed_rank_ends_backward_on_the_others(fleet, backend):
    lost, since = lose(fleet, backend, signal.SIGKILL, 30, {"gradient_as_bucket_view": backend == "gloo"})
    for facts in lost.values():
        assert "DistBackendError" in facts["kinds"], facts
        assert facts["at"] - since < 3, facts
        if backend == "totalreduce":
            assert facts["rank"] == 1, facts


def test_a_rank_that_stands_still_ends_backward_in_time(fleet):
    lost, since = lose(fleet, "gloo", signal.SIGSTOP, 4, {})
    for facts in lost.values():
        assert "DistBackendError" in facts["kinds"], facts
        assert facts["at"] - since < 9, facts


def test_a_killed_rank_is_noticed_in_the_first_pass_of_a_static_graph(fleet):
    # DDP reduces when backward has ended, and waits at once: nobody can raise before it does.
    lost, since = lose(fleet, "gloo", signal.SIGKILL, 30, {"static_graph": True}, steps=0)
    for facts in lost.values():
        assert "RuntimeError" in facts["kinds"], facts
        assert "sparse exchange" in facts["text"], facts
        assert facts["at"] - since < 3, facts


def test_an_interrupt_ends_a_process_that_waits_for_another(fleet):
    variables = {"BACKEND": "gloo", "TIMEOUT_S": "60", "OPTIONS": "{}", "STEPS": "2"}
    workers = fleet.start(2, UNTIL_LOST, **variables)
    for event in ("ready", "there"):
        for worker in workers:
            worker.read(event)
    workers[1].send(signal.SIGSTOP)
    workers[0].tell()
    time.sleep(1.0)
    workers[0].send(signal.SIGINT)
    assert workers[0].wait(10) != 0
    assert "KeyboardInterrupt" in workers[0].errors()
