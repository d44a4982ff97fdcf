"""Emulated hosts: made, shaped, cut, and removed however the run ends."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch import emulate as emulating
from totalreduce.launch.delay import DelayLine
from totalreduce.launch.emulate import (
    EmulatedNetwork,
    EmulateOptions,
    rate_bits_per_s,
    sweep_stale_namespaces,
)
from totalreduce.launch.local import run_workers

needs_namespaces = [
    pytest.mark.hosts,
    pytest.mark.skipif(
        not sys.platform.startswith("linux")
        or os.geteuid() != 0
        or not shutil.which("tc")
        or subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode != 0,
        reason="needs root, ip and tc",
    ),
]

RECEIVE = """
import socket, sys, time
listener = socket.create_server(("", 5000))
print("ready", flush=True)
peers = [listener.accept()[0] for _ in range(int(sys.argv[1]))]
total, begin = 0, time.monotonic()
deadline = begin + float(sys.argv[2])
for peer in peers: peer.settimeout(0.05)
while time.monotonic() < deadline:
    for peer in peers:
        try: total += len(peer.recv(1 << 18))
        except TimeoutError: pass
print(total * 8 / (time.monotonic() - begin))
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=10)
try:
    while True: peer.sendall(bytes(1 << 18))
except OSError: pass
"""
CONNECT = """
import socket, sys
probe = socket.socket(); probe.settimeout(float(sys.argv[2]))
print(probe.connect_ex((sys.argv[1], 9)))
"""
REFUSED = "111"


def namespaces_of(pid):
    return [name for name in os.listdir("/run/netns") if name.startswith(f"totalreduce-{pid}-")]


def wait_until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not after {timeout_s} s"
        time.sleep(0.02)


def total_bits_per_s(network, senders, receivers, seconds):
    """What all receivers together get while every sender sends to each of them."""
    arguments = [sys.executable, "-c", RECEIVE, str(len(senders)), str(seconds)]
    listening = [network.hosts[r].popen(arguments, stdout=subprocess.PIPE, text=True) for r in receivers]
    assert [process.stdout.readline() for process in listening] == ["ready\n"] * len(receivers)
    sending = [
        network.hosts[sender].popen([sys.executable, "-c", SEND, network.hosts[receiver].address])
        for sender in senders
        for receiver in receivers
    ]
    answers = [process.communicate(timeout=30)[0] for process in listening]
    for process in sending:
        process.wait(30)
    return sum(float(answer) for answer in answers)


def connect(network, source, target, timeout_s):
    address = network.hosts[target].address
    return network.hosts[source].run([sys.executable, "-c", CONNECT, address, str(timeout_s)]).stdout.strip()


@pytest.mark.parametrize(
    ("rate", "bits_per_s"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("250mbit", 2.5e8), ("64kbit", 64e3)]
)
def test_rates(rate, bits_per_s):
    assert rate_bits_per_s(rate) == bits_per_s


@pytest.mark.parametrize(
    "rate", ["", "1", "1g", "1Gbit", "gbit", "-1gbit", "0gbit", "1 gbit", "1gbit; reboot", "1gbit\n"]
)
def test_what_is_no_rate(rate):
    with pytest.raises(ConfigurationError, match="such as 1gbit"):
        EmulateOptions(num_hosts=2, rate=rate)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(ConfigurationError, match=r"need root .* and the command `tc` \(package iproute2\)"):
        EmulatedNetwork(2)


TIME_REFUSAL = """
import socket, sys, time
times = []
for _ in range(5):
    probe, begin = socket.socket(), time.monotonic()
    probe.settimeout(10)
    assert probe.connect_ex((sys.argv[1], 9)) == 111
    times.append(time.monotonic() - begin)
print(min(times))
"""


def test_frames_leave_in_order_when_their_time_has_come():
    line = DelayLine(0.5, frames_max=3)
    assert (line.wait_s(0.0), line.pop(9.0)) == (None, None)
    for number, now in enumerate((1.0, 1.2, 1.4, 1.45)):
        line.push(7 + number, bytes([number]), now)  # the fourth one is dropped
    assert (line.wait_s(1.25), line.pop(1.49)) == (pytest.approx(0.25), None)
    assert [line.pop(1.71), line.pop(1.71), line.pop(1.71)] == [(7, b"\0"), (8, b"\1"), None]
    assert line.pop(5.0) == (9, b"\2")
    assert line.pop(5.0) is None


def test_counts_that_make_no_sense():
    with pytest.raises(ConfigurationError, match="1 to 250, not 300"):
        EmulateOptions(num_hosts=300)
    with pytest.raises(ConfigurationError, match="2 emulated hosts with 2 ranks each make 4 workers, not 3"):
        run_workers(["true"], num_workers=3, where=EmulateOptions(num_hosts=2, ranks_per_host=2))


@pytest.mark.hosts
class TestNetwork:
    """Needs root."""

    pytestmark = needs_namespaces

    def test_links_have_the_rate_in_both_directions(self):
        with EmulatedNetwork(3, "100mbit") as network:
            up = total_bits_per_s(network, [0], [1, 2], 1.0)
            down = total_bits_per_s(network, [1, 2], [0], 1.0)
        # The bucket's burst and TCP's headers fit the bounds; an unshaped link is a hundred times faster.
        assert 60e6 < up < 115e6
        assert 60e6 < down < 115e6

    def test_the_system_outside_is_not_touched(self):
        before = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
        with EmulatedNetwork(2) as network:
            inside = network.hosts[1].run(["ip", "-brief", "link"]).stdout
            during = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
            assert "eth0" in inside
            setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
            assert network.hosts[1].run(["cat", str(setting)]).stdout == setting.read_text()
        assert during == before

    def test_a_cut_cable_is_silent_and_comes_back(self):
        with EmulatedNetwork(3) as network:
            assert connect(network, 0, 1, 5.0) == REFUSED
            network.cut(1)
            assert connect(network, 0, 1, 0.5) != REFUSED
            assert connect(network, 1, 0, 0.5) != REFUSED
            assert connect(network, 0, 2, 5.0) == REFUSED
            network.restore(1)
            wait_until(lambda: connect(network, 0, 1, 1.0) == REFUSED)

    @pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
    def test_packets_of_delayed_links_are_late(self):
        with EmulatedNetwork(2, "10mbit", delay_ms=30) as network:
            names = namespaces_of(os.getpid())
            answer = network.hosts[0].run([sys.executable, "-c", TIME_REFUSAL, network.hosts[1].address])
            assert 0.060 <= float(answer.stdout) < 0.1, answer.stderr
            assert 6e6 < total_bits_per_s(network, [0], [1], 2.0) < 10.5e6
            network.cut(1)
            assert connect(network, 0, 1, 0.3) != REFUSED
        assert len(names) == 3
        assert not set(names) & set(os.listdir("/run/netns"))

    def test_removed_after_an_error_with_what_still_runs(self):
        with contextlib.suppress(ZeroDivisionError), EmulatedNetwork(2) as network:
            assert len(namespaces_of(os.getpid())) == 3
            process = network.hosts[0].popen(["sleep", "1000"])
            raise ZeroDivisionError
        assert process.wait(10) == -signal.SIGKILL
        assert namespaces_of(os.getpid()) == []

    def test_nothing_is_left_if_it_cannot_be_made(self, monkeypatch):
        monkeypatch.setattr(emulating, "_MTU_BYTES", 1)
        with pytest.raises(ConfigurationError, match=r"cannot be made: ip -n .* -batch"), EmulatedNetwork(2):
            pass
        assert namespaces_of(os.getpid()) == []

    def test_namespaces_of_the_dead_are_swept_and_those_of_the_living_are_not(self):
        dead = subprocess.Popen(["true"])
        dead.wait()
        name = f"totalreduce-{dead.pid}-12345-abcdef-h0"
        subprocess.run(["ip", "netns", "add", name], check=True)
        with EmulatedNetwork(1):
            assert namespaces_of(dead.pid) == []
            assert sweep_stale_namespaces() == []
            assert len(namespaces_of(os.getpid())) == 2


@pytest.mark.hosts
class TestRun:
    """``totalreduce run --emulate-hosts``; needs root."""

    pytestmark = needs_namespaces

    def start(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "totalreduce", "run", "--emulate-hosts", "2", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def test_ranks_are_spread_over_hosts(self, tmp_path):
        script = tmp_path / "worker.py"
        script.write_text(
            "import json, os, subprocess\n"
            "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR']\n"
            "show = ['ip', '-4', '-brief', 'address', 'show', 'eth0']\n"
            "address = subprocess.run(show, capture_output=True, text=True).stdout.split()[2]\n"
            "print(json.dumps([*[os.environ[name] for name in names], address]))\n"
        )
        options = EmulateOptions(num_hosts=2, rate="100mbit", ranks_per_host=2)
        result = run_workers([sys.executable, script], num_workers=4, where=options, output="capture")
        assert result.exit_code == 0, result.errors
        assert [json.loads(text) for text in result.output] == [
            ["0", "4", "0", "2", "0", "10.77.0.1", "10.77.0.1/24"],
            ["1", "4", "1", "2", "0", "10.77.0.1", "10.77.0.1/24"],
            ["2", "4", "0", "2", "1", "10.77.0.1", "10.77.0.2/24"],
            ["3", "4", "1", "2", "1", "10.77.0.1", "10.77.0.2/24"],
        ]
        assert namespaces_of(os.getpid()) == []

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
    def test_nothing_is_left_after_a_signal(self, tmp_path, number, code):
        script = tmp_path / "worker.py"
        script.write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
        process = self.start(str(script))
        workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        assert len(namespaces_of(process.pid)) == 3
        descriptors = [os.pidfd_open(pid) for pid in workers]
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == code
        for descriptor in descriptors:
            with contextlib.closing(os.fdopen(descriptor)):
                assert select.select([descriptor], [], [], 10.0)[0]
        wait_until(lambda: namespaces_of(process.pid) == [])

    def test_more_hosts_than_workers_is_a_mistake(self):
        process = self.start("-n", "3", "train.py")
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, "cannot be spread evenly" in errors) == (2, True)
