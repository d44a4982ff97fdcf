"""A rank of torch.distributed is far ahead of another one: it waits, nobody is lost, and the memory is bounded."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "c10d_ahead.py"
MIB = 2**20
LINKS = pytest.mark.parametrize("link", ["shm", "tcp"])


def run(fleet, kind, number, link, timeout_s=60.0, **variables):
    """What both ranks say at the end, the late one first."""
    source = f"import runpy\nruntime = runpy.run_path({str(PROGRAM)!r})\nruntime['main']()"
    # A rank that gets no processor time is no dead one, also where other tests run.
    variables["TOTALREDUCE_PEER_TIMEOUT_S"] = "30"
    workers = fleet.start(2, source, KIND=kind, NUMBER=str(number), LINK=link, **variables)
    facts = [worker.read("done", timeout_s) for worker in workers]
    for each in facts:
        grown, held, floating = (f"{each[field] / MIB:.1f}" for field in ("grown", "held", "floating"))
        print(
            f"{kind} over {link}: {number} in {each['seconds']:.1f} s; at most {grown} MiB more, {held} at the end; "
            f"{floating} MiB floating"
        )
    for worker in workers:
        assert worker.wait() == 0
        assert "Traceback" not in worker.errors()
    return facts


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        ("messages", "tcp"),
        ("tags", "shm"),
        ("sizes", "tcp"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("messages", "shm"), ("tags", "tcp"), ("sizes", "shm"))
        ),
    ],
)
def test_a_sender_waits_for_a_receiver_that_is_late(fleet, kind, link):
    late, _ = run(fleet, kind, 300, link, ROOM_BYTES=str(64 * 1024))
    assert late["right"] == 300
    assert late["floating"] <= 64 * 1024


#: How often, which rank checks the values, and by how much the memory of either rank may grow: that of messages that
#: float, of the tables of names and descriptions, and of the operations and tensors that the program has in flight.
AT_LENGTH = {
    "messages": (1_000_000, 0, 96 * MIB),
    "tags": (1_000_000, 0, 160 * MIB),
    "sizes": (1_000_000, 0, 128 * MIB),
    "broadcasts": (1000, 0, 560 * MIB),
    "exchanges": (15_000, 1, 640 * MIB),
    "receives": (50_000, 1, 400 * MIB),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@LINKS
@pytest.mark.parametrize("kind", AT_LENGTH)
def test_a_rank_that_is_far_ahead(fleet, kind, link):
    number, checking, grown_max = AT_LENGTH[kind]
    facts = run(fleet, kind, number, link, timeout_s=1700.0, PAUSE_S="60")
    assert facts[checking]["right"] == number
    assert max(each["grown"] for each in facts) <= grown_max
    assert max(each["floating"] for each in facts) <= 64 * MIB


@pytest.mark.slow
@pytest.mark.timeout(900)
@LINKS
def test_groups_that_were_destroyed_take_little_memory(fleet, link):
    facts = run(fleet, "groups", 10_000, link, timeout_s=800.0)
    for each in facts:
        assert each["right"] == 10_000
        assert each["held"] <= 40 * MIB
