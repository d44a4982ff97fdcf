"""``examples/resumable.py`` under torchrun: workers and agents are killed, agents come; bits and samples."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import FOREIGN
from resumable_runs import RESUMABLE, last_version, reports, samples, steps, undisturbed, wait_for, world_sizes

from totalreduce.launch.workers import free_port

LOOPS = [
    pytest.param([], id="optimizer", marks=pytest.mark.slow),
    pytest.param(["--ddp"], id="ddp", marks=pytest.mark.slow),
]
#: Of the shorter runs.
SIZE = ["--samples", "480", "--epochs", "2"]
EPOCH, SHORT_EPOCH = list(range(960)), list(range(480))


class Agent:
    """One torchrun, which stands for a machine with two workers."""

    def __init__(self, python, log, port, *arguments, nnodes="1:2"):
        self.log = log
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
        timing = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [f"--nnodes={nnodes}", "--nproc-per-node=2", "--max-restarts=10", "--monitor-interval=0.1"]
        environment = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        # torch 2.13 lets no agent join the first one otherwise (docs/recovery-batch.md).
        environment |= {"PYTHON_EXEC": python, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, timing, str(RESUMABLE)]
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)], stdout=output, stderr=output, env=environment
            )

    @property
    def workers(self):
        """The process ids of its workers."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def kill(self):
        """Kill it with its workers, as the loss of the machine does."""
        workers = self.workers
        self.process.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def agents(zygote, tmp_path):
    """Starts agents, which are gone when the test ends."""
    started, port = [], free_port()

    def start(*arguments, **options):
        started.append(Agent(str(zygote.python), tmp_path / f"agent-{len(started)}", port, *arguments, **options))
        return started[-1]

    yield start
    for agent in started:
        if agent.process.poll() is None:
            agent.kill()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_worker_changes_no_bit(agents, zygote, tmp_path, loop):
    expected = undisturbed(zygote.python, tmp_path / "plain", 2, *loop, *SIZE)
    folder = tmp_path / "folder"
    agent = agents(folder, *loop, *SIZE, "--step-ms", "20", nnodes="1")
    wait_for(lambda: last_version(folder) > 25 and (folder / "versions").exists(), what="version 25")
    os.kill(agent.workers[-1], signal.SIGKILL)
    assert agent.process.wait(60) == 0, agent.log.read_text()
    ends = reports(agent.log.read_text())
    assert [end[:2] for end in ends] == [(0, 2), (1, 2)]
    assert [end[2:] for end in ends] == [expected] * 2
    assert samples(folder) == {0: SHORT_EPOCH, 1: SHORT_EPOCH}
    assert any(len(lines) > 2 for lines in steps(folder).values()), "no step was taken again"


@pytest.mark.slow
@pytest.mark.parametrize("loop", [[], ["--ddp"]], ids=["optimizer", "ddp"])
def test_a_killed_worker_of_two_agents_changes_no_bit(agents, zygote, tmp_path, loop):
    """The agents do not count the same restarts: one has seen a failure, the other one that a machine joins."""
    expected = undisturbed(zygote.python, tmp_path / "plain", 4, *loop, "--epochs", "2")
    folder, arguments = tmp_path / "folder", [*loop, "--epochs", "2", "--step-ms", "50"]
    both = [agents(folder, *arguments, nnodes="2"), agents(folder, *arguments, nnodes="2")]
    wait_for(lambda: last_version(folder) > 15, what="version 15")
    os.kill(both[1].workers[0], signal.SIGKILL)
    assert [agent.process.wait(90) for agent in both] == [0, 0]
    ends = sorted(end for agent in both for end in reports(agent.log.read_text()))
    assert [end[:2] for end in ends] == [(rank, 4) for rank in range(4)]
    assert [end[2:] for end in ends] == [expected] * 4
    assert samples(folder) == {0: EPOCH, 1: EPOCH}


@pytest.mark.slow
@pytest.mark.parametrize("loop", [[], ["--ddp"]], ids=["optimizer", "ddp"])
def test_agents_that_are_lost_and_come_change_the_world_size(agents, tmp_path, loop):
    epochs = 20  # long enough for agents that are slow to start
    folder, arguments = tmp_path / "folder", [*loop, "--epochs", str(epochs), "--step-ms", "60"]
    first = agents(folder, *arguments)
    wait_for(lambda: last_version(folder, 2) > 12, what="version 12 of two ranks")
    second = agents(folder, *arguments)
    wait_for(lambda: last_version(folder, 4) > last_version(folder, 2) + 12, what="12 versions of four ranks")
    alone = last_version(folder)
    second.kill()
    wait_for(lambda: last_version(folder, 2) > alone + 12, what="12 versions of two ranks again")
    third = agents(folder, *arguments)
    assert [agent.process.wait(300) for agent in (first, third)] == [0, 0], first.log.read_text()
    ends = sorted(end for agent in (first, third) for end in reports(agent.log.read_text()))
    assert [end[:2] for end in ends] == [(rank, 4) for rank in range(4)]
    assert len({end[2:] for end in ends}) == 1
    sizes = world_sizes(folder)
    assert [size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] != size] == [2, 4, 2, 4]
    assert samples(folder) == dict.fromkeys(range(epochs), EPOCH)
