"""A member that sends control frames without end: what is kept of it is bounded, and then the member is refused."""

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from engines_by_hand import Cluster, values_of

from totalreduce.engine import early, outbox, signatures
from totalreduce.foundation.errors import MismatchError, ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header

LONG = "x" * 8000


def frame(
    kind: Frame, operation: int, document: object = None, iteration: int = 0, flags: int = Flag.NONE
) -> tuple[Header, bytes]:
    body = b"" if document is None else json.dumps(document).encode()
    return Header(kind, 0, operation, iteration, flags=flags, body_bytes=len(body), signature=bytes(24)), body


def of_kind(kind: str, index: int, flags: int = Flag.NONE) -> tuple[Header, bytes]:
    match kind:
        case "mismatch":
            document = {"tensor": LONG, "ranks": [0, 1], "values": [LONG[:3000], LONG[:3000]]}
            return frame(Frame.MISMATCH, index, document, flags=flags)
        case "describe":
            return frame(Frame.DESCRIBE, index, {"name": LONG, "is": LONG}, flags=flags)
        case "describe again":
            return frame(Frame.DESCRIBE, 7, {"name": LONG, "is": LONG}, iteration=index, flags=flags)
        case "posted":
            return frame(Frame.POSTED, index, flags=flags)
        case "request":
            return frame(Frame.REQUEST, index, flags=flags)
        case "lost":
            return frame(Frame.LOST, index + 1, {"rank": 2, "reason": LONG}, flags=flags)
        case "status":
            return frame(Frame.STATUS_REQUEST, index, {"waited_s": 1000.0, "name": LONG})
        case _:
            return frame(Frame.STATUS_REQUEST, index, {"waited_s": 0.0})


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are a sixteenth of the real ones, so that the tests are short."""
    monkeypatch.setattr(early, "PEER_BYTES_MAX", early.PEER_BYTES_MAX // 16)
    monkeypatch.setattr(early, "_HINTS_MAX", early._HINTS_MAX // 16)
    monkeypatch.setattr(signatures, "_TEXT_BYTES_MAX", signatures._TEXT_BYTES_MAX // 16)
    monkeypatch.setattr(outbox, "_ANSWERS_MAX", outbox._ANSWERS_MAX // 16)


KINDS = ["mismatch", "describe", "describe again", "posted", "request", "lost"]


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_of_entries_is_bounded_and_refused(kind: str) -> None:
    """Of frames about operations that nobody has submitted here, and that are said to be within the allowance."""
    cluster = Cluster(3)
    engine = cluster.engines[1]
    tracemalloc.start()
    refusal = ""
    for index in range(4000):
        try:
            cluster.give(0, 1, of_kind(kind, index, Flag.EAGER))
        except ProtocolError as error:
            refusal = str(error)
            break
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "rank 0 has spoken of too many operations" in refusal, f"{kind}: not refused"
    assert taken < 3 * 2**20
    # The member is dropped, and the others are told who it was.
    engine.peer_lost(0, f"protocol violation: {refusal}", 0.0)
    assert engine.members.lost is not None
    assert engine.members.lost.rank == 0


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("kind", [*KINDS, "status", "status of what is early"])
def test_a_flood_of_hints_is_bounded_and_forgotten(kind: str) -> None:
    """Of frames without allowance, and of questions whose answers the member never reads. A correct rank may send many
    of them, so nobody is refused."""
    cluster = Cluster(3)
    engine = cluster.engines[1]
    cluster.give(0, 1, of_kind(kind, 0))
    engine.reports.pop()
    tracemalloc.start()
    for index in range(4000):
        cluster.give(0, 1, of_kind(kind, index))
    reports = len(engine.reports.pop())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 3 * 2**20
    assert reports == (511 if kind == "status" else 0)
    assert len(engine.table.early.records) <= 512
    assert engine.members.lost is None


def test_hints_are_given_again_when_earlier_ones_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_HINTS_MAX", 2)
    frames = early.EarlyFrames()
    for operation in range(4):
        frames.note_posted(0, (operation, 0))
        frames.note_posted(0, (operation, 0))
    assert list(frames.records) == [(0, 0), (1, 0)]
    frames.note_posted(1, (0, 0))
    assert set(frames.claim((0, 0)).posted) == {0, 1}
    assert frames.note_report(0, (5, 0), 1.0)
    assert not frames.note_report(0, (6, 0), 1.0)
    assert list(frames.records) == [(1, 0), (5, 0)]


def frames_that_repeat() -> Iterator[tuple[Header, bytes]]:
    for turn in range(3000):
        flags = Flag.NONE if turn else Flag.EAGER
        yield frame(Frame.STATUS_REQUEST, 7, {"waited_s": 1000.0, "name": LONG})
        yield frame(Frame.REQUEST, 8, flags=flags)
        yield frame(Frame.POSTED, 8)
        yield frame(Frame.DESCRIBE, 9, {"name": "w", "is": "?"}, flags=flags)
        yield frame(Frame.MISMATCH, 10, {"tensor": "w", "ranks": [0, 1], "values": ["a", "b"]}, flags=flags)


def test_what_is_said_twice_is_kept_once() -> None:
    cluster = Cluster(2)
    engine = cluster.engines[1]
    for message in frames_that_repeat():
        cluster.give(0, 1, message)
    assert engine.outbox.num_answers(0) == 1
    assert len(engine.table.early.records) == 4
    assert len(engine.reports.pop()) == 1
    assert engine.table.early.allowance.used(0) < 8192


def test_what_was_said_of_operations_is_used_up_by_submitting_them() -> None:
    """A rank may be ahead again and again: the allowance comes back."""
    cluster = Cluster(2, eager_bytes=64)
    for turn in range(40):
        first = [cluster.submit(0, f"w{index}", [1.0] * 64) for index in range(20)]
        cluster.run()
        assert cluster.engines[1].table.early.allowance.used(0) >= 20 * 1024
        second = [cluster.submit(1, f"w{index}", [float(turn)] * 64) for index in range(20)]
        cluster.run()
        assert [values_of(each) for each in (*first, *second)] == [[turn + 1.0] * 64] * 40
        assert cluster.engines[1].table.early.allowance.used(0) == 0
        assert not cluster.engines[1].table.early.records


def test_texts_in_frames_are_cut() -> None:
    cluster = Cluster(2)
    cluster.give(0, 1, of_kind("mismatch", 5, Flag.EAGER))
    cluster.give(0, 1, of_kind("describe", 6, Flag.EAGER))
    failure = cluster.engines[1].table.early.of((5, 0)).failure
    assert isinstance(failure, MismatchError)
    assert (len(failure.tensor), [len(value) for value in failure.values]) == (1024, [2048, 2048])
    assert len(cluster.engines[1]._signatures.name_of(6)) == 1024


def test_answers_that_wait_leave_before_the_farewell() -> None:
    cluster = Cluster(2)
    cluster.give(0, 1, frame(Frame.STATUS_REQUEST, 7, {"waited_s": 0.0}))
    cluster.engines[1].close(0.0, tell=[0])
    frames = []
    while (message := cluster.take(1, 0)) is not None:
        frames.append(message[0].frame)
    assert frames == [Frame.STATUS_REPLY, Frame.GOODBYE]


def test_a_status_reply_says_what_is_true_when_it_leaves() -> None:
    cluster = Cluster(2)
    operation = cluster.submit(0, "w")
    cluster.engines[0].stalls.inquire(operation, 0.0)
    cluster.engines[1].tick(0.0)
    while (message := cluster.take(0, 1)) is not None:
        cluster.give(0, 1, message)
    cluster.submit(1, "w")
    cluster.run()
    assert values_of(operation) == [2.0]
