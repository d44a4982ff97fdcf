"""Addresses of ranks that cannot be reached, in a network without a route and one that drops what is sent."""

import json
import subprocess
import sys

from test_faults_hosts import pytestmark  # noqa: F401  (the same rights are needed here)

#: What is sent to the host behind the cable arrives nowhere.
NETWORK = """
ip link set lo up
ip link add cable0 type veth peer name cable1
ip address add 198.51.100.1/24 dev cable0
ip link set cable0 up
ip link set cable1 up
ip neighbour add 198.51.100.7 lladdr 02:00:00:00:00:07 dev cable0 nud permanent
ip route add unreachable 203.0.113.0/24
exec "$0" -c "$1"
"""
PROGRAM = """
import json, time
from types import SimpleNamespace
from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.header import Frame, Header
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.tcp import TcpTransport, listen

door, lost = listen("127.0.0.1"), {}
peers = ["192.0.2.7", "203.0.113.7", "198.51.100.7", "127.0.0.1"]
addresses = [door.getsockname()[:2], *((peer, 9) for peer in peers)]
transport = TcpTransport(0, addresses, door, JobIdentity(bytes(16), "test", 0), TcpConfig(connect_timeout_s=0.5))
transport.attach(SimpleNamespace(
    ready_peers=lambda bulk: () if bulk else {1, 2, 3, 4} - set(lost),
    next_message=lambda peer, bulk: None,
    may_receive=lambda: True,
    peer_lost=lost.__setitem__,
))
deadline = time.monotonic() + 20
while len(lost) < 4 and time.monotonic() < deadline:
    if not transport.progress():
        transport.wait(0.05)
print(json.dumps(lost))
"""


def test_no_route_no_answer_and_nobody_who_listens_are_told_apart():
    run = subprocess.run(
        ["unshare", "--net", "sh", "-ec", NETWORK, sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    begin = "cannot connect to rank"
    reasons = {int(peer): reason for peer, reason in json.loads(run.stdout).items()}
    assert sorted(reasons) == [1, 2, 3, 4]
    unreachable, network = "No route to host (EHOSTUNREACH)", "Network is unreachable (ENETUNREACH)"
    assert reasons[1].startswith(f"{begin} 1: there is no route from this host to 192.0.2.7 (port 9): {network}.")
    assert reasons[2].startswith(f"{begin} 2: there is no route from this host to 203.0.113.7 (port 9): {unreachable}.")
    assert reasons[3].startswith(f"{begin} 3: 198.51.100.7 does not answer at port 9. A firewall may drop")
    assert reasons[4].startswith(f"{begin} 4: nobody listens at port 9 of 127.0.0.1. It has listened there")
