"""A member of the job that has the key and sends without end, and reads nothing of what it is answered.

What the other ranks keep for it is bounded: their memory grows by at most 64 MiB, and the job ends on them with an
error that names the member. Either the member is refused; or its frames are forgotten, because a correct rank may send
many of them, and the job ends when the member does.
"""

from __future__ import annotations

import pytest

GROWTH_BYTES_MAX = 64 * 2**20

VICTIM = """
import gc, threading

def memory(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

group = tr.init("tcp", timeout_s=60)
coordinator = group.coordinate() if COORDINATED else None
group.allreduce(torch.ones(4), name="first").wait()
group.barrier()
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins again
before = memory("VmRSS")
say("ready")
begin = time.monotonic()
try:
    while True:
        group.allreduce(torch.ones(1000), name="next", timeout_s=60).wait()
except tr.TotalReduceError as error:
    say("ended", kind=type(error).__name__, text=str(error), rank=getattr(error, "rank", None),
        seconds=time.monotonic() - begin, grown=memory("VmHWM") - before)
attempt("closed", group.close, timeout_s=5)
"""

HOSTILE = """
import itertools, json
from totalreduce.coordination.messages import Kind, encode
from totalreduce.foundation.header import Flag, Frame, Header
from totalreduce.transports.connection import Connection

group = tr.init("tcp", timeout_s=60)
coordinator = group.coordinate() if COORDINATED else None
group.allreduce(torch.ones(4), name="first").wait()
group.barrier()
number = 0 if coordinator is None else coordinator._agreement.number
LONG = "x" * 8000

class Message:
    def __init__(self, header, body):
        self.header, self.body, self.share_key = header.pack(), memoryview(body), object()

def control(frame, operation, value=None, body=b"", **changes):
    body = json.dumps(value).encode() if value is not None else body
    return [Message(Header(frame, 0, operation, body_bytes=len(body), **changes), body)]

def channel(operation, body, last=True):
    pieces = [body[begin : begin + 16384] for begin in range(0, len(body), 16384)]
    for piece in pieces[:-1]:
        yield from control(Frame.CHANNEL, operation, body=piece, step=0)
    yield from control(Frame.CHANNEL, operation, body=pieces[-1], step=int(last))

def flood(index):
FLOOD

class Flood:
    "An endpoint that has a message for rank 0 always."

    def __init__(self, inner):
        self._inner = inner
        self._messages = itertools.chain.from_iterable(flood(index) for index in itertools.count())

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def ready_peers(self, *, bulk=False):
        return () if bulk else (0,)

    def next_message(self, peer, *, bulk=False):
        return next(self._messages, None) if peer == 0 else None

    def message_sent(self, message):
        pass

say("ready")
transport = group._runner.transport
Connection.read = lambda *_: False
transport._endpoint = Flood(transport._endpoint)
transport.wake()
time.sleep(SECONDS)
os._exit(0)
"""

#: The body of ``flood(index)``: messages of one kind, made by the member.
FLOODS = {
    "questions that are never read": 'yield from control(Frame.STATUS_REQUEST, index, {"waited_s": 0.0})',
    "questions with long names": 'yield from control(Frame.STATUS_REQUEST, index, {"waited_s": 1e3, "name": LONG})',
    "descriptions": 'yield from control(Frame.DESCRIBE, index, {"name": LONG, "is": LONG}, flags=Flag.EAGER)',
    "mismatches": (
        'yield from control(Frame.MISMATCH, index, {"tensor": LONG, "ranks": [0, 1], "values": [LONG[:3000]] * 2}, '
        "flags=Flag.EAGER)"
    ),
    "operations that only it has submitted": "yield from control(Frame.POSTED, index)",
    "questions about operations that nobody has submitted": "yield from control(Frame.REQUEST, index)",
    "messages for channels that are not open": "yield from channel(1000 + index, bytes(1000))",
    "bodies that no message has announced": "yield from control(Frame.CHANNEL_BODY, number, body=bytes(1000))",
    "unfinished messages": "yield from channel(1000 + index, bytes(2**20), last=False)",
    "one message without end": "yield from channel(number, bytes(2**20), last=False)",
    "questions of the coordination": (
        "yield from channel(number, encode(Kind.QUESTION, 0, value=[[LONG[:1000], 1.0, LONG[:1000]]] * 64))"
    ),
    "answers of the coordination": (
        "yield from channel(number, encode(Kind.ANSWER, 0, value=[f'{index} {i}' for i in range(1000)]))"
    ),
    "one message with many small parts": (
        "yield from channel(number, encode(Kind.QUESTION, 0) + b'[' + b'[],' * (5 * 2**19) + b'[]]')"
    ),
}
#: Names for which a member asks in the coordination, in good order, while nobody else does.
NAMES = {"short names": 'f"{index}"', "long names": 'f"{index}" + "x" * 1000'}
ASKS = """
import itertools
group = tr.init("tcp", timeout_s=60)
coordinator = group.coordinate()
group.allreduce(torch.ones(4), name="first").wait()
group.barrier()
say("ready")
# Otherwise the coordinator would refuse to ask for so many operations itself.
coordinator._agreement.negotiator.submissions.allowances.take = lambda *_: True
try:
    for index in itertools.count():
        coordinator.allreduce(torch.ones(1), name=NAME)
except tr.TotalReduceError:
    time.sleep(SECONDS)
"""
COORDINATED = {
    "one message without end",
    "one message with many small parts",
    "questions of the coordination",
    "answers of the coordination",
}

#: Of two floods that the same check refuses, one is enough in ``make test``.
LIKE_ANOTHER = {
    "questions about operations that nobody has submitted",
    "questions that are never read",
    "questions with long names",
    "descriptions",
    "messages for channels that are not open",
    "bodies that no message has announced",
    "answers of the coordination",
}
#: A flood keeps two cores busy. What grows slowly, a hundred bytes for each small frame, is found by `make soak`.
SHORT_S = 2
FLOODS_BY_LENGTH = [
    pytest.param(flood, seconds, marks=[pytest.mark.slow] if seconds > SHORT_S or flood in LIKE_ANOTHER else [])
    for flood in FLOODS
    for seconds in (SHORT_S, 15)
]
lengths = pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(15, marks=pytest.mark.slow)])


def run(fleet, hostile: str, seconds: int, *, coordinated: bool):
    """Run a job of three ranks of which rank 1 is hostile, and ends after so long; returns what rank 0 saw."""
    settings = f"COORDINATED, SECONDS = {coordinated}, {seconds}"
    source = f"{settings}\nif rank == 1:\n{indented(hostile)}\nelse:\n{indented(VICTIM)}"
    # A rank that computes without a pause is no dead one, also where other tests run.
    workers = fleet.start(3, source, TOTALREDUCE_PEER_TIMEOUT_S="30")
    for worker in workers:
        worker.read("ready")
    facts = workers[0].read("ended", timeout_s=60)
    print(f"{facts['grown'] / 2**20:.0f} MiB more after {facts['seconds']:.1f} s: {facts['text']}")
    return facts


def indented(source: str) -> str:
    return "".join(f"    {line}\n" for line in source.splitlines())


@pytest.mark.parametrize(("flood", "seconds"), FLOODS_BY_LENGTH)
def test_a_flood_of_messages_is_refused_and_named(fleet, flood: str, seconds: int) -> None:
    facts = run(fleet, HOSTILE.replace("FLOOD", "    " + FLOODS[flood], 1), seconds, coordinated=flood in COORDINATED)
    assert facts["rank"] == 1
    assert facts["grown"] <= GROWTH_BYTES_MAX


@lengths
@pytest.mark.parametrize("names", ["short names", pytest.param("long names", marks=pytest.mark.slow)])
def test_a_flood_of_requests_is_refused_and_named(fleet, names: str, seconds: int) -> None:
    facts = run(fleet, ASKS.replace("NAME", NAMES[names]), seconds, coordinated=True)
    assert facts["rank"] == 1
    assert "rank 1 asks for more operations than may wait for the other ranks" in facts["text"]
    assert facts["grown"] <= GROWTH_BYTES_MAX
