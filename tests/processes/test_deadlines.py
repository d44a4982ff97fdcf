"""Every collective call returns or raises by its deadline plus a second when a rank is stopped, and names that rank.

The last rank is stopped before the call. Each call has a group of its own, because the loss of a rank ends a group.
"""

import json
import re
import signal

import pytest

VICTIM, SURVIVORS = 2, (0, 1)
#: After a deadline, and after the silence by which a rank counts as lost.
MARGIN_S = 4.0

PROGRAM = """
import json
import os

import torch
from totalreduce.foundation.config import TcpConfig
from totalreduce.groups.plan import TensorSpec

ones = lambda count=1000: torch.ones(count)


class Parts:
    def __init__(self, group, index):
        self.group, self.model = group, torch.nn.Linear(4, 2)
        self.optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1), self.model, group=group, name=f"model {index}"
        )
        self.job = None

    def backward(self):
        self.model(torch.ones(3, 4)).sum().backward()

    def begin_job(self):
        self.job = tr.recoverable(tr.State(model=self.model, optimizer=self.optimizer))
        self.job.__enter__()

    def in_block(self, body):
        for _ in self.job.steps(1):
            with self.job.step():
                body()

    def train(self):
        self.backward()
        self.optimizer.step()

    def enter_job(self):
        state = tr.State(model=self.model, optimizer=self.optimizer)
        tr.recoverable(state).__enter__()
        self.group.barrier()  # rank 0 only sends


three = lambda: [ones() for _ in range(3)]
CALLS = {
    "allreduce": lambda p: p.group.allreduce(ones(), name="x").wait(),
    "allreduce, star": lambda p: p.group.allreduce(ones(), name="x", schedule="star").wait(),
    "prepared": lambda p: p.group.prepare_allreduce(ones(), name="x").start().wait(),
    "prepared allgather": lambda p: p.group.prepare_allgather(three(), ones(), name="x").start().wait(),
    "work with a time-out": lambda p: p.group.allreduce(ones(), name="x", timeout_s=60).wait(p.group.timeout_s),
    "reduce": lambda p: p.group.reduce(ones(), root=0, name="x").wait(),
    "broadcast": lambda p: p.group.broadcast(ones(), root=2, name="x"),
    "allgather": lambda p: p.group.allgather(three(), ones(), name="x").wait(),
    "reduce_scatter": lambda p: p.group.reduce_scatter(ones(), three(), name="x").wait(),
    "gather": lambda p: p.group.gather(three() if p.group.rank == 0 else None, ones(), root=0, name="x").wait(),
    "scatter": lambda p: p.group.scatter(ones(), None, root=2, name="x").wait(),
    "alltoall": lambda p: p.group.alltoall(three(), three(), name="x").wait(),
    "send": lambda p: p.group.send(ones(16 << 20), dst=2, tag=p.group.rank).wait(),
    "recv": lambda p: p.group.recv(ones(), src=2).wait(),
    "recv from anybody": lambda p: p.group.recv(ones(), src=None).wait(),
    "barrier": lambda p: p.group.barrier(),
    "broadcast_object": lambda p: p.group.broadcast_object(None, root=2),
    "allgather_object": lambda p: p.group.allgather_object({"rank": p.group.rank}),
    "gather_object": lambda p: p.group.gather_object([p.group.rank], root=0),
    "scatter_object": lambda p: p.group.scatter_object(None, root=2),
    "subgroup": lambda p: p.group.subgroup([2, 1, 0]).barrier(),
    "agree": lambda p: p.group.agree("x", {"a": 1}),
    "plan": lambda p: p.group.plan("x", [TensorSpec("w", (3,), torch.float32)]),
    "coordinate": lambda p: p.group.coordinate(),
    "broadcast_parameters": lambda p: tr.broadcast_parameters(p.model, p.group, root=2),
    "DistributedOptimizer": lambda p: tr.DistributedOptimizer(
        torch.optim.SGD(p.model.parameters(), lr=0.1), torch.nn.Linear(3, 3), group=p.group, name="another"
    ),
    "optimizer.step": lambda p: p.train(),
    "optimizer.synchronize": lambda p: (p.backward(), p.optimizer.synchronize()),
    "optimizer.join": lambda p: p.optimizer.join(),
    "optimizer.replan": lambda p: p.optimizer.replan(),
    "recoverable": lambda p: p.enter_job(),
    "job.step": lambda p: p.in_block(p.train),
    "job.step without the optimizer": lambda p: p.in_block(lambda: p.group.barrier()),
    "the end of the job": lambda p: (p.job.__exit__(None, None, None), p.group.barrier()),
    "group.close": lambda p: p.group.close(),
}
BEFORE = dict.fromkeys(("job.step", "job.step without the optimizer", "the end of the job"), Parts.begin_job)
tr.recoverable, tr.State  # imports what the calls need
rank = int(os.environ["RANK"])
transport, timeout_s, silence_s = json.loads(hear())
for index, name in enumerate(json.loads(hear())):
    group = tr.init(transport, name=f"group {index}", timeout_s=timeout_s, tcp=TcpConfig(silence_s=silence_s))
    parts = Parts(group, index)
    BEFORE.get(name, lambda _: None)(parts)
    group.barrier(timeout_s=30)
    say("ready")
    hear()
    if rank != 2:
        attempt(name, CALLS[name], parts)
    hear()
    group.close(0.5)
    say("closed")
"""
#: Calls that a rank may finish without the stopped one: it has only sent to another rank, or needs nobody.
MAY_RETURN = {"reduce": {1}, "gather": {1}, "gather_object": {1}, "group.close": {0, 1}}
NAMES = re.findall(r'^    "([^"]+)": lambda', PROGRAM, flags=re.MULTILINE)


def ends_of_calls(fleet, names: list[str], transport: str, timeout_s: float, silence_s: float):
    """Yield the name of each call, and by rank how it ended."""
    workers = fleet.start(3, PROGRAM)
    for worker in workers:
        worker.tell(json.dumps([transport, timeout_s, silence_s]))
        worker.tell(json.dumps(names))
    for name in names:
        for worker in workers:
            worker.read("ready")
        workers[VICTIM].send(signal.SIGSTOP)
        for rank in SURVIVORS:
            workers[rank].tell()
        yield name, {rank: workers[rank].read(name, timeout_s=60.0) for rank in SURVIVORS}
        workers[VICTIM].send(signal.SIGCONT)
        workers[VICTIM].tell()
        for worker in workers:
            worker.tell()
            worker.read("closed")
    assert [worker.wait() for worker in workers] == [0, 0, 0]


def check(name: str, answers, limit_s: float, kind: str, text: str) -> None:
    for rank, answer in answers.items():
        assert answer["seconds"] < limit_s + MARGIN_S, (name, rank, answer)
        if answer["error"] is None:
            assert rank in MAY_RETURN.get(name, ()), (name, rank, answer)
        else:
            assert answer["error"] == kind, (name, rank, answer)
            assert re.search(text, answer["text"]), (name, rank, answer)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_call_ends_by_its_deadline_and_says_for_which_rank_it_has_waited(fleet, transport) -> None:
    names = NAMES if transport == "tcp" else NAMES[::8]  # all of them take a minute
    # On a busy machine the others need some tenths of a second to say that they do not wait for this rank.
    for name, answers in ends_of_calls(fleet, names, transport, 1.0, 30.0):
        check(
            name, answers, 1.0, "DeadlineExceededError", r"rank(\(s\))? [\d, and]*2|message 2 to|no rank has sent one"
        )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_call_ends_when_a_rank_is_silent_and_every_survivor_names_it(fleet, transport) -> None:
    for name, answers in ends_of_calls(fleet, NAMES, transport, 30.0, 2.0):
        check(name, answers, 2.0, "PeerLost", "silent")
        assert all(answer["error"] is None or answer["rank"] == VICTIM for answer in answers.values()), (name, answers)
