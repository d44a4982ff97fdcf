"""Faults of the network itself: a cable pulled under a running job, a rank stopped on another host."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from environments import worker_environments

from totalreduce.launch.emulate import EmulatedNetwork

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.alone,
    pytest.mark.skipif(
        not sys.platform.startswith("linux")
        or os.geteuid() != 0
        or not shutil.which("tc")
        or subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode != 0,
        reason="needs root, ip and tc",
    ),
]

SILENCE_S = 3.0
WORKER = """
import json, sys, time
import torch
import totalreduce as tr

def say(event, **facts):
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)

group = tr.init(timeout_s=60)
say("ready")
try:
    if sys.argv[1] == "busy":
        value, said = torch.ones(4 << 20), False
        while True:
            work = group.allreduce(value, name="big")
            if not said:
                before = group.statistics().bytes_received
                while group.statistics().bytes_received < before + (2 << 20):
                    time.sleep(0.001)
                said = True
                say("there")
            work.wait()
    say("there")
    group.allreduce(torch.ones(10), name="never on every rank" if group.rank else "other").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank, text=str(error))
try:
    group.barrier(timeout_s=10)
except tr.PeerLost as error:
    say("next", rank=error.rank)
group.close()
say("closed")
"""


class Job:
    """One worker per host, its lines in a queue."""

    def __init__(self, network, script, mode):
        environments = worker_environments(
            dict(os.environ),
            len(network.hosts),
            workers_per_host=1,
            master_address=network.hosts[0].address,
            job_id="hosts-test",
        )
        self.processes, self.lines = [], []
        for host, environment in zip(network.hosts, environments, strict=True):
            process = host.popen(
                [sys.executable, str(script), mode], stdout=subprocess.PIPE, env=environment, text=True
            )
            lines = queue.Queue()
            threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True).start()
            self.processes.append(process)
            self.lines.append(lines)

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.put(json.loads(line))
        stream.close()

    def expect(self, rank, event, timeout_s=60.0):
        facts = self.lines[rank].get(timeout=timeout_s)
        assert facts["event"] == event, (rank, facts)
        return facts

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(20)


@pytest.fixture(scope="module")
def network():
    with EmulatedNetwork(3, "1gbit") as made:
        yield made


@pytest.fixture
def start(network, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    jobs = []

    def begin(mode):
        jobs.append(Job(network, script, mode))
        for event in ("ready", "there"):
            for rank in range(len(network.hosts)):
                jobs[-1].expect(rank, event)
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def check(job, rank, victim, since):
    lost = job.expect(rank, "lost", timeout_s=10)
    print(f"rank {rank} knew after {lost['at'] - since:.3f} s: {lost['text']}")
    assert lost["rank"] == victim
    assert lost["at"] - since < SILENCE_S
    assert job.expect(rank, "next")["rank"] == victim
    job.expect(rank, "closed", timeout_s=3)
    assert job.processes[rank].wait(5) == 0


@pytest.mark.faults("F2", "F19")
@pytest.mark.parametrize("mode", ["busy", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_cut_link_is_noticed_on_both_sides_within_three_seconds(start, network, mode):
    job = start(mode)
    since = time.monotonic()
    network.cut(1)
    try:
        for rank in (0, 2):
            check(job, rank, 1, since)
        lost = job.expect(1, "lost", timeout_s=10)
        assert lost["rank"] in (0, 2)
        assert lost["at"] - since < SILENCE_S
        job.expect(1, "next")
        job.expect(1, "closed", timeout_s=3)
        assert job.processes[1].wait(5) == 0
    finally:
        network.restore(1)


@pytest.mark.slow
def test_a_cable_that_is_out_for_a_moment_costs_nothing_but_time(start, network):
    job = start("busy")
    network.cut(2)
    time.sleep(0.8)  # the fault's length, not a guess
    network.restore(2)
    with pytest.raises(queue.Empty):
        job.expect(0, "lost", timeout_s=3.0)


@pytest.mark.faults("F1")
@pytest.mark.slow
def test_a_rank_killed_on_another_host_is_named_within_a_second(start):
    job = start("busy")
    job.processes[2].kill()
    since = time.monotonic()
    for rank in (0, 1):
        lost = job.expect(rank, "lost", timeout_s=10)
        print(f"rank {rank} knew after {lost['at'] - since:.3f} s")
        assert lost["rank"] == 2
        assert lost["at"] - since < 1.0
