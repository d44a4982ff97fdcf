"""Allreduces over a mesh of hosts with several ranks each: gloo inside a host, the engine between hosts."""

import re
import signal
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "mesh_cases.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
SOURCE = f"""
import runpy
sys.argv = [{str(PROGRAM)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


SHAPES = [(2, 2), pytest.param((1, 3), marks=pytest.mark.slow), pytest.param((2, 3), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SHAPES, ids=["2x2", "1x3", "2x3"])
def job(zygote, request):
    hosts, per_host = request.param
    workers = zygote.start(hosts * per_host, SOURCE, RANKS_PER_HOST=str(per_host), TOTALREDUCE_PEER_TIMEOUT_S="30")
    assert all(worker.read("ready", timeout_s=100.0)["coordinated"] for worker in workers)
    return workers


@pytest.mark.parametrize("name", CASES)
def test_case(job, name):
    for worker in job:
        worker.tell(name)
    failures = [worker.read("case", timeout_s=60.0)["failure"] for worker in job]
    assert failures == [None] * len(job), "\n".join(filter(None, failures))


LOSS = """
import torch.distributed as dist
from totalreduce.launch import transports
here = transports.host_identity()
transports.host_identity = lambda: f"{here}/{rank // 2}"
torch.set_num_threads(1)
dist.init_process_group("gloo")
group = tr.init(inner="gloo", timeout_s=60)
tensor = torch.ones(400_000)

def negotiated():
    for step in range(10**6):
        group.allreduce(tensor, name="x", op=tr.ReduceOp.AVG).wait()
        began(step)

def planned():
    stream = group.planned(["x"])
    for step in range(10**6):
        stream.begin()
        stream.submit(0, tensor, op=tr.ReduceOp.AVG, priority=0).wait()
        began(step)

def began(step):
    if step == 0:
        say("ready")

attempt("loss", {"negotiated": negotiated, "planned": planned}[os.environ["KIND"]])
attempt("next", lambda: group.allreduce(tensor, name="next").wait())
group.close()
say("closed")
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["negotiated", "planned"])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_on_its_host_and_on_the_other(fleet, kind, number):
    workers = fleet.start(4, LOSS, KIND=kind, TOTALREDUCE_PEER_TIMEOUT_S="2")
    for worker in workers:
        worker.read("ready", timeout_s=60.0)
    workers[1].send(number)
    for worker in (workers[0], workers[2], workers[3]):
        answer = worker.read("loss", 60.0)
        assert (answer["error"], answer["rank"]) == ("PeerLost", 1), answer
        assert worker.read("next")["error"] == "PeerLost"
        worker.read("closed")


BEGIN = """
import torch.distributed as dist
from totalreduce.launch import transports
here = transports.host_identity()
transports.host_identity = lambda: f"{here}/{os.environ['HOSTS'][rank]}"
"""


def test_what_makes_no_mesh_is_refused_on_every_rank(fleet):
    """Without a process group, with a transport that carries out all, and with ranks that can be replaced."""
    (worker,) = fleet.start(
        1,
        BEGIN
        + """
attempt("before", tr.init, inner="gloo")
dist.init_process_group("gloo")
attempt("native", tr.init, "torch", inner="gloo")
attempt("unknown", tr.init, inner="mpi")
attempt("nccl", tr.init, inner="nccl")
os.environ["TOTALREDUCE_ON_LOSS"] = "shrink"
attempt("loss", tr.init, inner="gloo")
""",
        HOSTS="0",
    )
    for event, text in (
        ("before", "call torch.distributed.init_process_group('gloo') before tr.init()"),
        ("native", "another library is to carry out all collectives"),
        ("unknown", "inner is 'nccl' or 'gloo', not 'mpi'"),
        ("nccl", "this torch has no NCCL"),
        ("loss", "torch.distributed cannot replace a rank"),
    ):
        answer = worker.read(event)
        assert answer["error"] == "ConfigurationError"
        assert text in answer["text"]


def test_hosts_with_different_numbers_of_ranks_are_refused_on_every_rank(fleet):
    source = BEGIN + 'dist.init_process_group("gloo")\nattempt("init", tr.init, inner="gloo")'
    for worker in fleet.start(3, source, HOSTS="001"):
        answer = worker.read("init")
        assert answer["error"] == "ConfigurationError"
        assert "the hosts have [2, 1]: start as many on each" in answer["text"]


def test_ranks_that_are_alone_on_their_hosts_use_the_engine_and_say_so_once(fleet):
    source = (
        BEGIN
        + """
dist.init_process_group("gloo")
group = tr.init(timeout_s=60)
tensor = torch.full((300_000,), rank + 1.0)
group.allreduce(tensor).wait()
say("done", values=[group.coordinator is None, tensor.sum().item()])
group.close()
"""
    )
    workers = fleet.start(2, source, HOSTS="01", TOTALREDUCE_INNER="gloo")
    assert [worker.read("done")["values"] for worker in workers] == [[True, 900_000.0]] * 2
    assert [worker.errors().count("each rank is alone on its host") for worker in workers] == [1, 0]
