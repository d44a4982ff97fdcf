"""Groups over the messages of ``torch.distributed``."""

import signal
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
BEGIN = f"""
from datetime import timedelta
sys.path.insert(0, {str(PROGRAMS)!r})
torch.set_num_threads(1)
"""


def ended(workers, event, wanted):
    answers = [worker.read(event, 90.0) for worker in workers]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
        assert "Traceback" not in worker.errors()
    assert [answer["values"] for answer in answers] == [wanted] * len(workers)


# Every rank polls gloo, so that more ranks than cores take minutes.
LARGE = [pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 7, 8)]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), *LARGE])
def test_every_case_of_the_conformance_suite(fleet, world_size):
    workers = fleet.start(
        world_size,
        BEGIN
        + """
import collectives
dist.init_process_group("gloo")
count = collectives.run_cases("gloo")
dist.destroy_process_group()
say("done", values=count >= 150)
""",
    )
    ended(workers, "done", True)


def test_the_programs_own_messages_are_not_disturbed(fleet):
    """Its sends, receives and collectives on the default group, between and beside ours."""
    workers = fleet.start(
        2,
        BEGIN
        + """
dist.init_process_group("gloo")
group = tr.init("gloo", timeout_s=20)
ours = torch.full((300_000,), rank + 1.0)
work = group.allreduce(ours, name="ours")
theirs = torch.full((1000,), rank + 5.0)
for tag in (1, 2, 3):
    got = torch.zeros(1000)
    request = dist.irecv(got, src=1 - rank, tag=tag)
    dist.send(theirs, dst=1 - rank, tag=tag)
    request.wait()
    assert got[0] == got[-1] == 6.0 - rank
dist.all_reduce(theirs)
work.wait()
group.close()
dist.barrier()
dist.destroy_process_group()
say("done", values=[ours[0].item(), ours[-1].item(), theirs[-1].item()])
""",
    )
    ended(workers, "done", [3.0, 3.0, 11.0])


def test_without_a_process_group_it_says_what_to_do(fleet):
    (worker,) = fleet.start(1, BEGIN + 'attempt("init", tr.init, "gloo")')
    answer = worker.read("init")
    assert answer["error"] == "ConfigurationError"
    assert "init_process_group first" in answer["text"]


def test_different_settings_are_an_error_on_every_rank(fleet):
    workers = fleet.start(
        3,
        BEGIN
        + """
dist.init_process_group("gloo")
attempt("init", tr.init, "gloo", timeout_s=20, engine=tr.EngineConfig(eager_bytes=1024 * (1 + (rank == 2))))
""",
    )
    for worker in workers:
        answer = worker.read("init")
        assert answer["error"] == "ConfigurationError"
        assert "eager_bytes is 1024 on rank 0 and 2048 on rank 2" in answer["text"]


LOSS = (
    BEGIN
    + """
dist.init_process_group("gloo")
group = tr.init("gloo", timeout_s=30)
say("ready")
if rank != 1:
    attempt("loss", lambda: [group.allreduce(torch.ones(400_000), name="x").wait() for step in range(100_000)])
    group.close()
    say("closed")
    os._exit(0)
elif os.environ["FAULT"] == "leave":
    group.allreduce(torch.ones(400_000), name="x").wait()
    group.close()
    say("left")
hear()
"""
)


def blamed(workers):
    """What the survivors say about rank 1."""
    reasons = []
    for worker in (workers[0], workers[2]):
        answer = worker.read("loss")
        assert answer["error"] == "PeerLost", answer
        assert answer["rank"] == 1
        worker.read("closed")
        assert worker.wait() == 0
        reasons.append(answer["text"])
    return reasons


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_freezes_is_lost_on_every_other(fleet, number):
    workers = fleet.start(3, LOSS, FAULT="signal", TOTALREDUCE_PEER_TIMEOUT_S="1")
    for worker in workers:
        worker.read("ready")
    workers[1].send(number)
    said = " ".join(blamed(workers))
    assert ("silent" in said) == (number == signal.SIGSTOP), said


def test_a_rank_that_leaves_is_named(fleet):
    workers = fleet.start(3, LOSS, FAULT="leave")
    for worker in workers:
        worker.read("ready")
    workers[1].read("left")
    assert any("closed the group" in reason for reason in blamed(workers))


def test_destroying_the_process_group_first_is_an_error_and_no_hang(fleet):
    workers = fleet.start(
        2,
        BEGIN
        + """
dist.init_process_group("gloo")
group = tr.init("gloo", timeout_s=5)
group.allreduce(torch.ones(10), name="x").wait()
dist.barrier()
dist.destroy_process_group()
attempt("late", lambda: group.allreduce(torch.ones(10), name="x").wait())
group.close()
say("closed")
os._exit(0)
""",
    )
    for worker in workers:
        assert worker.read("late")["error"] == "PeerLost"
        worker.read("closed")
