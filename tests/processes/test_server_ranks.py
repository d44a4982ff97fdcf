"""``totalreduce run --servers``: some ranks run the program, others only serve."""

import os
import re
import signal
import sys
import threading

import pytest

from totalreduce.launch.local import run_workers
from totalreduce.launch.restarts import RecoveryOptions

TWO_SERVERS = """
import os
import torch
import totalreduce as tr

group = tr.init()
assert (group.rank, group.world_size) == (int(os.environ["RANK"]), 2) and os.environ["WORLD_SIZE"] == "2"
rule, rate = tr.ps.Sequential(), tr.ps.SGD(0.5)
out, pushed = torch.empty(1000), torch.arange(1000.0) + group.rank
with tr.ps.connect(group, num_keys=1000, optimizer=rate, consistency=rule, initial=3) as one:
    with tr.ps.connect(group, num_keys=10, width=2) as other:
        other.push([3], torch.ones(1, 2)).wait()
        one.push_range(0, 1000, pushed)
        one.clock()
        one.pull_range(0, 1000, out).wait()
        row = torch.empty(1, 2)
        group.barrier()
        other.pull([3], row).wait()
        print("other", row.tolist(), "updates", one.statistics().updates + other.statistics().updates)
    assert torch.equal(out, 3 - 0.5 * (2 * torch.arange(1000.0) + 1))
    own = one.statistics()
    print("sent", own.bytes_sent > 4000, "received", own.bytes_received > 4000)
with tr.ps.connect(group, num_keys=10, servers=[1]) as client:  # a rank that runs the program serves
    client.push([5], torch.ones(1)).wait()
    group.barrier()
    print("updates", client.statistics().updates)
bits = []
for sync in (None, tr.ParameterServer(optimizer="server"), tr.ParameterServer(optimizer="worker")):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 70), torch.nn.Tanh(), torch.nn.Linear(70, 1))
    optimizer = tr.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, group=group, sync=sync)
    torch.manual_seed(group.rank)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()
    if sync is not None:
        optimizer.strategy_steps.finish()
        assert optimizer.strategy_steps.statistics().updates == 0  # this rank serves nothing
    optimizer.close()
    bits.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes())
print("bits", len(set(bits)))
try:
    tr.ps.connect(group, num_keys=10, initial=lambda keys: keys)
except tr.ConfigurationError as error:
    print(error)
group.close()
"""

NO_SERVER = """
import torch
import totalreduce as tr

group = tr.init()
ones = torch.ones(3)
group.allreduce(ones).wait()
print(ones.tolist())
"""

UNTIL_LOST = """
import contextlib, os, time
import torch
import totalreduce as tr

group = tr.init()
with tr.ps.connect(group, num_keys=1000, replicas={replicas}) as client:
    for step in client.steps(200):
        client.push_range(0, 1000, torch.ones(1000)).wait()
        if step == 20:
            print("under way")
        time.sleep(0.02)
    client.meet()
    out = torch.empty(1000)
    client.pull_range(0, 1000, out).wait()
    print("values", out.min().item(), out.max().item())
group.close()
"""

DENSE_UNTIL_LOST = """
import time
import torch
import totalreduce as tr

group = tr.init()
model = torch.nn.Linear(8, 30, bias=False)
with torch.no_grad():
    model.weight.fill_(float(group.rank))  # those of rank 0 count
sync = tr.ParameterServer(consistency=tr.ps.{rule}, replicas=2)
inner = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, overlap="{overlap}")
for step in range(optimizer.strategy_steps.steps_taken, 150):
    optimizer.zero_grad()
    model(torch.full((1, 8), -2.0)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
optimizer.strategy_steps.finish()
print("values", *set(model.weight.flatten().tolist()))
optimizer.close()
group.close()
"""

#: In the loop of rank 0: end the process of rank 2, which has its rank in its environment.
KILL_RANK_2 = """
            job = f"TOTALREDUCE_JOB_ID={os.environ['TOTALREDUCE_JOB_ID']}".encode()
            for process in filter(str.isdecimal, os.listdir("/proc") if group.rank == 0 else ()):
                with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
                    variables = file.read().split(bytes(1))
                    if job in variables and b"RANK=2" in variables:
                        os.kill(int(process), 9)
""".strip()


FILTERED = """
import os
import signal
from pathlib import Path
import numpy as np
import totalreduce as tr

class Coin(tr.ps.Filter):
    random = np.random.default_rng(os.getpid())

    def select(self, keys, values, step):
        return self.random.random(len(keys)) < 0.5

group, keys, killed = tr.init(), np.arange(0, 3000, 3), Path(__file__).with_name("killed")
with tr.ps.connect(
    group, num_keys=3000, width=40, consistency=tr.ps.Bounded(2), replicas=2, filter=Coin()
) as client:
    for step in client.steps(20):
        for column in (2 * step, 2 * step + 1):
            values = np.zeros((1000, 40), np.float32)
            values[:, column] = (1, 1000)[group.rank]
            ticket = client.push(keys, values)
            if step == 8 and group.rank == 1 and not killed.exists():
                ticket.wait()
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    ticket.wait()
    client.push_withheld().wait()
    client.meet()
    client.pull(keys, values).wait()
first, second = values % 1000, values // 1000
print("first", (first == 1).all(), "second", second.max(), (second[:, 17:] == 1).all(), (second == 0).any())
""".strip()


def run(tmp_path, program, *, num_servers=2, **options):
    path = tmp_path / "train.py"
    path.write_text(program)
    return run_workers(
        [sys.executable, str(path)],
        num_workers=2,
        num_servers=num_servers,
        output="capture",
        timeout_s=100,
        **options,
    )


def kill_in_first_epoch(events, victim, after_s):
    """Return a function that notes the launcher's events, and kills a rank when the job has begun."""

    def on_event(event):
        events.append(event)
        if event["event"] == "epoch" and event["epoch"] == 1:
            [process] = [each["pid"] for each in events if each["event"] == "started" and each["rank"] == victim]
            threading.Timer(after_s, os.kill, (process, signal.SIGKILL)).start()

    return on_event


def ends(result):
    return [worker.exit_code for worker in result.workers]


def test_workers_push_to_servers_that_run_no_program(warm_python, tmp_path):
    result = run(tmp_path, TWO_SERVERS)
    assert (result.exit_code, ends(result)) == (0, [0, 0, 0, 0]), [each.last_errors for each in result.workers]
    for rank in (0, 1):
        first, second, third, bits, refusal = result.output[rank].splitlines()
        assert first == "other [[2.0, 2.0]] updates 0"
        assert second == "sent True received True"
        assert third == f"updates {2 * rank}"
        assert bits == "bits 1"  # those of the synchronous optimizer
        assert refusal.startswith("initial is a function, which cannot be sent to ranks that only serve (--servers)")
    assert result.output[2:] == ["", ""]


def test_servers_end_with_a_program_that_does_not_connect(warm_python, tmp_path):
    result = run(tmp_path, NO_SERVER)
    assert (result.exit_code, ends(result)) == (0, [0, 0, 0, 0])
    assert result.output == ["[2.0, 2.0, 2.0]\n"] * 2 + ["", ""]


@pytest.mark.slow
def test_servers_are_ended_after_a_program_that_makes_no_group(warm_python, tmp_path):
    result = run(tmp_path, "print('done')")
    assert result.exit_code == 0
    assert ends(result) == [0, 0, 128 + signal.SIGTERM, 128 + signal.SIGTERM]


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["shrink", "replace"])
def test_the_loss_of_a_server_loses_no_push(warm_python, tmp_path, on_loss):
    """Each worker pushes 200 times; a server that is killed meanwhile is replaced, or its replica serves."""
    events = []
    options = RecoveryOptions(on_loss=on_loss, on_event=kill_in_first_epoch(events, 3, 0.0))
    result = run(tmp_path, UNTIL_LOST.format(replicas=2), num_servers=3, recovery=options)
    assert result.exit_code == 0, [each.last_errors for each in result.workers]
    for rank in (0, 1):
        assert result.output[rank].splitlines()[-1] == "values 400.0 400.0"
    assert [each["rank"] for each in events if each["event"] == "ended" and each["exit_code"] == 137] == [3]
    assert max(each["epoch"] for each in events if each["event"] == "epoch") >= 2


@pytest.mark.slow
def test_a_worker_with_a_filter_is_run_again_and_counts_nothing_twice(warm_python, tmp_path):
    """What it had withheld is lost with it. Of later pushes, and those of the other worker, nothing is."""
    result = run(tmp_path, FILTERED, recovery=RecoveryOptions(on_loss="replace"))
    assert result.exit_code == 0, [each.last_errors for each in result.workers]
    assert [output.splitlines()[-1] for output in result.output[:2]] == ["first True second 1.0 True True"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 3], ids=["worker", "server"])
def test_a_spare_takes_the_place_of_a_worker_or_of_a_server(warm_python, tmp_path, victim):
    events = []
    options = RecoveryOptions(on_loss="replace", spares=1, on_event=kill_in_first_epoch(events, victim, 1.0))
    result = run(tmp_path, UNTIL_LOST.format(replicas=2), num_servers=3, recovery=options)
    assert result.exit_code == 0, [each.last_errors for each in result.workers]
    assert [output.splitlines()[-1] for output in result.output[:2]] == ["values 400.0 400.0"] * 2
    started = [(each["rank"], each["was_spare"]) for each in events if each["event"] == "started"]
    assert started == [*((rank, False) for rank in range(5)), (victim, True)]


@pytest.mark.parametrize(
    ("num_servers", "victim", "rule", "overlap"),
    [
        pytest.param(0, 1, "Sequential()", "backward", marks=pytest.mark.slow),
        *(
            pytest.param(3, victim, *case, marks=pytest.mark.slow)
            for victim in (1, 3)
            for case in (("Sequential()", "backward"), ("Sequential()", "iterations"), ("Bounded(2)", "iterations"))
        ),
    ],
)
def test_a_dense_model_outlives_the_loss_of_a_rank(warm_python, tmp_path, num_servers, victim, rule, overlap):
    """Two workers take 150 steps each, and each of their gradients counts once. Without servers, they are servers."""
    events = []
    options = RecoveryOptions(on_loss="shrink", on_event=kill_in_first_epoch(events, victim, 1.0))
    program = DENSE_UNTIL_LOST.format(rule=rule, overlap=overlap)
    result = run(tmp_path, program, num_servers=num_servers, recovery=options)
    assert result.exit_code == 0, [each.last_errors for each in result.workers]
    assert [output.splitlines()[-1] for output in result.output[:2]] == ["values 300.0"] * 2
    assert [each["rank"] for each in events if each["event"] == "ended" and each["exit_code"] == 137] == [victim]


FAILS = """
import numpy as np
import totalreduce as tr

group = tr.init()
client = tr.ps.connect(group, num_keys=1000, replicas=2)
for step in client.steps(3):
    client.push_range(0, 1000, np.ones(1000, np.float32)).wait()
    if step == 1 and group.rank == 0:
        raise RuntimeError("an error of the program")
"""


def test_an_error_of_the_program_ends_its_process_with_its_own_exit_code(warm_python, tmp_path):
    """The connection is not closed. Its thread, which waits in torch's store, must not abort the process."""
    result = run(tmp_path, FAILS, num_servers=0, recovery=RecoveryOptions(on_loss="replace", restarts=0))
    assert (result.first_failure.rank, result.first_failure.exit_code) == (0, 1), result.errors
    assert "RuntimeError: an error of the program" in result.errors[0]


@pytest.mark.slow
def test_the_loss_of_a_server_ends_a_job_without_recovery(warm_python, tmp_path):
    program = UNTIL_LOST.format(replicas=1).replace('print("under way")', KILL_RANK_2)
    result = run(tmp_path, program)
    assert result.exit_code == 128 + signal.SIGKILL, result.errors
    assert (result.first_failure.rank, result.first_failure.signal) == (2, "SIGKILL")
    assert re.search("PeerLost: rank 2 is lost", result.errors[0])
