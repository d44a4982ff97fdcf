"""Forked children: they end at once, cannot use or harm their parent's group, and do not hide its death."""

import signal

import pytest

PREPARE = {
    "shm": 'group = tr.init("shm", timeout_s=60)',
    "tcp": 'group = tr.init("tcp", timeout_s=60)',
    "gloo": 'dist.init_process_group("gloo"); group = tr.init("gloo", timeout_s=60)',
    "torch": 'dist.init_process_group("gloo"); group = tr.init("torch", timeout_s=60)',
}

FORKS = """
import json
count, patience_s = 500_000, 60.0
lived_s, right = [], True

def fork_and_end(turn):
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    return pid

def reap(pid):
    begin = time.monotonic()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() - begin > patience_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1e9
        time.sleep(0.001)
    return time.monotonic() - begin

for turn in range(FORKS):
    tensor = torch.full((count,), float(rank + turn))
    work = group.allreduce(tensor, name="w")
    pid = fork_and_end(turn)
    work.wait()
    right = right and bool((tensor == 2 * turn + 1).all())
    lived_s.append(reap(pid))
right = right and group.allreduce(torch.ones(4), name="at last").wait().tolist() == [2.0] * 4
group.close()
say("values", longest_s=max(lived_s), right=right)
"""

CALLS = """
import json, multiprocessing
tensor = torch.full((300_000,), float(rank))
if rank:
    group.barrier()
work = group.allreduce(tensor, name="w")
ours, theirs = os.pipe()
pid = os.fork()
if pid == 0:
    said = []
    for call in (
        lambda: group.allreduce(torch.ones(3), name="a child's"),
        lambda: group.broadcast(torch.ones(3)),
        lambda: group.barrier(),
        lambda: group.allgather_object("a child's"),
        lambda: group.send(torch.ones(3), dst=1 - rank),
        lambda: group.recv(torch.ones(3), src=None),
        lambda: group.subgroup([0, 1]).allreduce(torch.ones(3)),
        lambda: group.plan("p", [tr.TensorSpec("t", (3,), torch.float32)]),
        lambda: group.empty(3),
        lambda: group.statistics(),
        lambda: work.wait(1.0) if not work.done() else group.barrier(),
    ):
        try:
            call()
            said.append("nothing")
        except tr.GroupClosed as error:
            said.append(str(error))
    group.close()
    os.write(theirs, json.dumps(said).encode())
    sys.exit(0)
if rank == 0:
    group.barrier()
work.wait()
os.waitpid(pid, 0)
expected = f"the group of rank {rank} belongs to process {os.getpid()}, and this is process {pid}, forked from it."
told = [text.startswith(expected) for text in json.loads(os.read(ours, 65536))]
with multiprocessing.get_context("fork").Pool(2) as pool:
    pooled = pool.map(abs, range(-10, 0))
after = group.allreduce(torch.ones(4), name="after").wait().tolist()
say("values", told=told, pooled=pooled, after=after, right=bool((tensor == 1).all()))
"""


def run(fleet, prepare, source):
    workers = fleet.start(2, f"{prepare}\n{source}")
    facts = [worker.read("values", timeout_s=100) for worker in workers]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
        assert "Traceback" not in worker.errors(), worker.errors()
    return facts


@pytest.mark.faults("F14")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_children_that_only_end(fleet, transport: str) -> None:
    for facts in run(fleet, PREPARE[transport], FORKS.replace("FORKS", "2")):
        assert facts["right"]
        assert facts["longest_s"] < 60  # a child that hangs is killed after that; ending takes the interpreter 0.3 s


@pytest.mark.slow
@pytest.mark.parametrize("transport", PREPARE)
def test_two_hundred_children_that_only_end(fleet, transport: str) -> None:
    """Alone on two cores none of them lives for a second."""
    for facts in run(fleet, PREPARE[transport], FORKS.replace("FORKS", "200")):
        assert facts["right"]
        assert facts["longest_s"] < 1


@pytest.mark.faults("F14")
@pytest.mark.parametrize("transport", PREPARE)
def test_what_a_child_calls_is_an_error_there_and_nothing_here(fleet, transport: str) -> None:
    for facts in run(fleet, PREPARE[transport], CALLS):
        assert facts["told"] == [True] * 11
        assert facts["pooled"] == list(range(10, 0, -1))
        assert facts["after"] == [2.0] * 4
        assert facts["right"]


LIVING_CHILD = """
pid = os.fork()
if pid == 0:
    time.sleep(30)
    os._exit(0)
say("ready", child=pid)
hear()
begin = time.monotonic()
try:
    while True:
        group.allreduce(torch.ones(1000), name="w").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank)
os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.faults("F15")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_living_child_does_not_hide_the_death_of_its_parent(fleet, transport: str) -> None:
    """As when a rank is killed whose data loader's workers live on: its connections end with it."""
    workers = fleet.start(2, f"{PREPARE[transport]}\n{LIVING_CHILD}")
    children = [worker.read("ready")["child"] for worker in workers]
    for worker in workers:
        worker.tell()
    try:
        since = workers[1].send(signal.SIGKILL)
        facts = workers[0].read("lost")
    finally:
        fleet.end(children[1])
    assert facts["rank"] == 1
    assert facts["at"] - since < 5.0  # the child lives on for half a minute


def test_what_else_lives_in_a_child(fleet) -> None:
    """Timelines, sparse optimizers and torch's process groups: nothing of the parent's is written or ended."""
    source = """
    import tempfile
    from pathlib import Path
    folder = Path(tempfile.mkdtemp())
    dist.init_process_group("totalreduce")
    group = tr.init(timeout_s=60, name="second", timeline=folder)
    model = torch.nn.Linear(200, 200)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group,
                                        sync=tr.TopkA(density=0.1))
    def step():
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    pid = os.fork()
    if pid == 0:
        attempt("child's step", optimizer.step)
        attempt("child's all_reduce", dist.all_reduce, torch.ones(3))
        dist.destroy_process_group()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    step()
    total = torch.ones(3)
    dist.all_reduce(total)
    before = len(list(folder.iterdir()))
    group.close()
    say("values", total=total.tolist(), written=[before, len(list(folder.iterdir()))])
    """
    workers = fleet.start(2, source)
    for worker in workers:
        for event in ("child's step", "child's all_reduce"):
            facts = worker.read(event)
            assert "forked from it" in facts["text"]
        facts = worker.read("values")
        assert (facts["total"], facts["written"]) == ([2.0] * 3, [0, 1])
        assert worker.wait() == 0, worker.errors()
