"""A rank that dies or stands still in the middle of a sparse exchange: the others get a typed error in time."""

import signal

import pytest

JOB = """
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.methods import METHODS

method, phase, number = os.environ["METHOD"], int(os.environ["PHASE"]), int(os.environ["NUMBER"])
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64, bias=False)
group = tr.init(timeout_s=5.0)
tr.broadcast_parameters(model, group)
settings = {} if method in ("powersgd", "dense", "coded") else {"density": 0.1}
optimizer = tr.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=METHODS[method](**settings),
    feedback=tr.ErrorFeedback(elements_min=0),
)


def train():
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


train()
weight = model.weight.detach().clone()
start = GroupDriver.start


def start_or_fall(self, action, *, step, **options):
    if step == phase:
        say("falls")
        os.kill(os.getpid(), number)
        time.sleep(600)  # the kernel may choose another thread to take SIGSTOP: until then this one would go on
    return start(self, action, step=step, **options)


if rank == 1:
    GroupDriver.start = start_or_fall
say("ready")
hear()
attempt("lost", train)
say("kept", same=torch.equal(weight, model.weight))
attempt("closed", group.close)
"""


def lose(fleet, method, phase, number):
    """What ranks 0 and 2 say about rank 1, which gets a signal when it begins its ``phase``-th action of a step."""
    workers = fleet.start(3, JOB, METHOD=method, PHASE=str(phase), NUMBER=str(int(number)))
    for worker in workers:
        worker.read("ready")
    for worker in workers:
        worker.tell()
    fallen = workers[1].read("falls")
    for rank in (0, 2):
        lost = workers[rank].read("lost")
        print(f"rank {rank} knew after {lost['at'] - fallen['at']:.2f} s: {lost['error']}: {lost['text']}")
        assert workers[rank].read("kept")["same"]  # the step was not applied, on no rank
        workers[rank].read("closed")
        assert workers[rank].wait() == 0, workers[rank].errors()
        yield lost, lost["at"] - fallen["at"]


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        *(("oktopk", phase) for phase in (1, 2)),
        *(pytest.param("oktopk", phase, marks=pytest.mark.slow) for phase in (0, 3)),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("gtopk", "topkdsa", "shared")),
        pytest.param("topka", 0, marks=pytest.mark.slow),  # its only exchange
        pytest.param("powersgd", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_in_a_phase_is_named(fleet, method, phase):
    for lost, seconds in lose(fleet, method, phase, signal.SIGKILL):
        assert (lost["error"], lost["rank"]) == ("PeerLost", 1), lost
        assert seconds < 5


def test_a_rank_that_stands_still_in_a_phase_ends_the_step_in_time(fleet):
    for lost, seconds in lose(fleet, "oktopk", 2, signal.SIGSTOP):
        assert {"PeerLost", "DeadlineExceededError"} & set(lost["kinds"]), lost
        assert seconds < 12
