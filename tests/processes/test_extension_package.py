"""Another package adds one of each (``docs/extending.md``): ``examples/extension``, as installed."""

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extension"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that finds the package, with the entry points of its ``pyproject.toml``."""
    site = tmp_path_factory.mktemp("site")
    (site / "totalreduce_extras").symlink_to(EXAMPLE / "totalreduce_extras")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = site / "totalreduce_extras-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    groups = project["entry-points"].items()
    lines = [[f"[{group}]", *(f"{name} = {value}" for name, value in points.items())] for group, points in groups]
    (metadata / "entry_points.txt").write_text("\n".join(line for group in lines for line in group))
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(environment, *arguments, timeout_s=100):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_schedule_conforms_and_is_chosen(installed, warm_python):
    program = """
    import json
    from totalreduce.foundation.types import OpKind
    from totalreduce.schedules import algorithms_of
    from totalreduce.schedules.select import LinkModel, Selector
    from totalreduce.testing import check_simulated
    from totalreduce.testing.conformance_cases import cases_for

    asked = [c.name for case in cases_for(5) for c in case.collectives if c.schedule == "line"]
    places = (0, 1, 2), (0, 0, 0)
    apart, together = (Selector(LinkModel(), hosts).choose(OpKind.ALLREDUCE, 1 << 20, (0, 1, 2)) for hosts in places)
    compared = check_simulated(world_sizes=(1, 2, 3))
    print(json.dumps([algorithms_of(OpKind.ALLREDUCE)[-1], len(asked), compared, apart, together]))
    """
    name, num_asked, compared, apart, together = json.loads(run(installed, "-c", textwrap.dedent(program)))
    assert name == "line"
    assert num_asked > 10  # the suite asks for it by itself
    assert compared > 1000
    assert (apart, str(together) != "line") == ("line", True)


def test_a_wrong_schedule_is_refused(installed, warm_python):
    """The suite sees a mistake in a schedule of another package as it does in this one's."""
    program = """
    import dataclasses
    from totalreduce.schedules import SCHEDULES
    from totalreduce.schedules.actions import Send, compile_program
    from totalreduce.testing import ConformanceError, check_simulated
    from totalreduce_extras import line

    def forgets_to_pass_on(at):
        actions = list(line.line_allreduce(at.rank, at.world_size))
        kept = [a for a in actions if not (isinstance(a, Send) and a.step == 1 and at.rank == 1)]
        return compile_program(iter(kept), 1, partial_sums=at.world_size > 2)

    SCHEDULES.add("short", dataclasses.replace(line.SCHEDULES, name="short", make=forgets_to_pass_on))
    check_simulated(world_sizes=(2,))
    try:
        check_simulated(world_sizes=(3,))
    except ConformanceError as error:
        print(error)
    """
    assert "short" in run(installed, "-c", textwrap.dedent(program))


def test_a_carrier_carries_out_what_it_takes(installed, warm_python):
    """Its ranks are threads of one process, which it finds by the transport."""
    program = """
    import json, torch
    from totalreduce.testing import run_ranks

    def body(group):
        tensors = [torch.arange(5.0) * (group.rank + turn) for turn in (1, 2)]
        sums = [group.allreduce(tensor, name="table").wait().tolist() for tensor in tensors]
        return sums, group.statistics().messages_sent

    print(json.dumps(run_ranks(3, body)))
    """
    sums = [[0.0, 6.0, 12.0, 18.0, 24.0], [0.0, 9.0, 18.0, 27.0, 36.0]]
    assert json.loads(run(installed, "-c", textwrap.dedent(program))) == [[sums, 0]] * 3


WORKER = """
import json, torch
import totalreduce as tr
from totalreduce.sparse.methods import METHODS

for way in ("auto", "mailbox"):
    group = tr.init(way, timeout_s=30)
    rank, n = group.rank, group.world_size
    total = group.allreduce(torch.full((1000,), float(rank + 1)), name="x", schedule="line").wait()
    bits = group.allgather_object(total.tolist())
    blocks = list(torch.empty(n, 3))
    group.allgather(blocks, torch.full((3,), float(rank)), name="y").wait()
    big = group.allreduce(torch.arange(300_000.0) * (rank + 1), name="big").wait()

    torch.manual_seed(0)
    model = torch.nn.Linear(400, 50)
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=METHODS["turns"](density=0.5)
    )
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    for _ in range(2):  # two turns: every element was exchanged once
        optimizer.zero_grad()
        (model(torch.full((1, 400), float(rank + 1))).sum()).backward()
        optimizer.step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    seen = group.allgather_object(moved.tolist())
    if rank == 0:
        print(json.dumps({
            "way": type(group._runner.transport).__name__,
            "total": total.unique().tolist(),
            "equal": len(set(map(tuple, bits))),
            "blocks": [b.tolist() for b in blocks],
            "big": bool((big == torch.arange(300_000.0) * (n * (n + 1) // 2)).all()),
            "moved": sorted({round(float(m), 5) for m in moved}),
            "counts": [int((moved[:20_000] < limit).sum()) for limit in (-0.3, -0.1)],
            "replicas": len(set(map(tuple, seen))),
        }))
    group.close()
"""


def test_a_job_uses_the_schedule_the_transport_and_the_method(installed, warm_python, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**installed, "MAILBOX": str(tmp_path / "boxes")}
    output = run(environment, "-m", "totalreduce", "run", "-n", 3, script)
    groups = [json.loads(line.partition("] ")[2]) for line in output.splitlines()]
    assert [facts["way"] for facts in groups] == ["ShmTransport", "MailboxTransport"]
    for facts in groups:
        check(facts)


def check(facts):
    assert (facts["total"], facts["equal"], facts["big"]) == ([6.0], 1, True)
    assert facts["blocks"] == [[0] * 3, [1] * 3, [2] * 3]
    # The gradients of the weights are 1, 2 and 3. Half of the weights have their turn in the first step, and move by
    # the mean; the others in the second step, and the residual of the first one comes along. Biases are dense.
    assert facts["moved"] == [-0.4, -0.2]
    assert facts["counts"] == [10_000, 20_000]
    assert facts["replicas"] == 1


@pytest.mark.slow
def test_ranks_with_different_schedules_are_told_so(installed, warm_python, tmp_path):
    """A package that is installed on one host only would make the ranks choose differently."""
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        if os.environ["RANK"] == "1":
            sys.path = [path for path in sys.path if "site" not in path or "site-packages" in path]
        import totalreduce as tr
        try:
            tr.init(timeout_s=20)
        except tr.ConfigurationError as error:
            print(error, flush=True)
        """)
    )
    output = run(installed, "-m", "totalreduce", "run", "-n", 2, script)
    assert output.count("schedules of other packages") == 2, output


def test_a_command(installed):
    assert "schedules" in run(installed, "-m", "totalreduce", "--help")
    lines = run(installed, "-m", "totalreduce", "schedules", "--hosts", 3).splitlines()
    assert lines[0].split()[0] == "line"
    assert {line.split()[0] for line in lines} == {"line", "ring", "star", "tree", "halving_doubling"}
