"""Ranks at their limit of open files: strangers cost neither the processor nor the log, and errors name the limit."""

import socket

import pytest

FULL = """
import resource
group = tr.init({transport!r}, timeout_s=30)
group.allreduce(torch.ones(10)).wait()
transport = group._runner.transport
address = transport._addresses[rank] if {transport!r} == "tcp" else transport._meetings._addresses[rank]
say("ready", address=address)
hear()
highest = max(int(name) for name in os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, highest + 100))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    say("full", limit=highest + 2)
hear()
begin = time.process_time()
time.sleep(1.2)
value = torch.full((10,), 1.0 + rank)
group.allreduce(value, name="meanwhile").wait()
say("meanwhile", cpu_s=time.process_time() - begin, value=value[0].item())
for descriptor in held:
    os.close(descriptor)
hear()
while group.statistics().refused_connections < 3: time.sleep(0.01)
value = torch.full((10,), 1.0 + rank)
group.allreduce(value, name="afterwards").wait()
say("afterwards", value=value[0].item(), refused=group.statistics().refused_connections)
group.close()
"""


def stranger(address):
    """Connects and says nothing that a rank would say."""
    if isinstance(address, list):
        sock = socket.create_connection(address, timeout=20)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + address.removeprefix("@"))
    sock.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))
    return sock


@pytest.mark.faults("F11")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_strangers_at_a_rank_without_descriptors_cost_a_few_lines(fleet, transport):
    workers = fleet.start(2, FULL.format(transport=transport))
    addresses = [worker.read("ready")["address"] for worker in workers]
    for worker in workers:
        worker.tell()
    limits = [worker.read("full")["limit"] for worker in workers]
    strangers = [stranger(address) for address in addresses for _ in range(3)]
    for worker in workers:
        worker.tell()
    for worker in workers:
        facts = worker.read("meanwhile")
        assert facts["value"] == 3.0
        assert facts["cpu_s"] < 0.7
    for worker in workers:
        worker.tell()
    for worker, limit in zip(workers, limits, strict=True):
        facts = worker.read("afterwards")
        assert facts["value"] == 3.0
        assert facts["refused"] == 3  # they were let in when there was room, and refused for what they said
        assert worker.wait() == 0
        lines = [line for line in worker.errors().splitlines() if "cannot accept" in line]
        assert 1 <= len(lines) <= 5, lines
        expected = f"too many open files (EMFILE): this process may have {limit} (RLIMIT_NOFILE, `ulimit -n`)"
        assert all(expected in line for line in lines)
        assert "Traceback" not in worker.errors()
    for sock in strangers:
        sock.close()


SCARCE = """
import resource
num_open = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + {left}, num_open + {left}))
group = attempt("init", tr.init, {transport!r}, timeout_s=10)
if group is not None:
    group.close()
"""


# From "not even a store" to "all but the last mapping": 21 of shared memory and 17 of TCP are enough for rank 0.
@pytest.mark.faults("F10")
@pytest.mark.parametrize(("transport", "left"), [("auto", left) for left in (0, 5, 9, 13, 17, 18)] + [("tcp", 16)])
def test_too_few_descriptors_are_named_as_the_cause_at_once(fleet, transport, left):
    workers = fleet.start(2, SCARCE.format(left=left, transport=transport))
    # A rank that does not fail by itself has heard of rank 0, or waits for it until the deadline.
    facts = workers[0].read("init")
    assert facts["seconds"] < 9
    assert facts["error"] == "ConfigurationError"
    assert facts["text"].startswith("rank 0 cannot ")
    assert "too many open files (EMFILE): this process may have " in facts["text"]
    assert "RLIMIT_NOFILE, `ulimit -n`" in facts["text"]
    assert "lays out" not in workers[0].errors() + facts["text"]
