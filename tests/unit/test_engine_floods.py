"""A member that sends control frames without end: what is kept of it is bounded, and then the member is refused."""

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from rack import Rack, values_of

from totalreduce.engine import early, outbox, signatures
from totalreduce.foundation.errors import MismatchError, ProtocolError
from totalreduce.foundation.header import Frame, Header

LONG = "x" * 8000


def frame(kind: Frame, operation: int, document: object = None, iteration: int = 0) -> tuple[Header, bytes]:
    body = b"" if document is None else json.dumps(document).encode()
    return Header(kind, 0, operation, iteration, body_bytes=len(body), signature=bytes(24)), body


def of_kind(kind: str, index: int) -> tuple[Header, bytes]:
    match kind:
        case "mismatch":
            return frame(Frame.MISMATCH, index, {"tensor": LONG, "ranks": [0, 1], "values": [LONG[:3000], LONG[:3000]]})
        case "describe":
            return frame(Frame.DESCRIBE, index, {"name": LONG, "is": LONG})
        case "describe again":
            return frame(Frame.DESCRIBE, 7, {"name": LONG, "is": LONG}, iteration=index)
        case "posted":
            return frame(Frame.POSTED, index)
        case "request":
            return frame(Frame.REQUEST, index)
        case "lost":
            return frame(Frame.LOST, index + 1, {"rank": 2, "reason": LONG})
        case "status":
            return frame(Frame.STATUS_REQUEST, index, {"waited_s": 1000.0, "name": LONG})
        case _:
            return frame(Frame.STATUS_REQUEST, index, {"waited_s": 0.0})


KINDS = ["mismatch", "describe", "describe again", "posted", "request", "lost", "status", "status of what is early"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_is_bounded_and_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frames about operations that nobody has submitted here, and of answers that the member never reads.

    The bounds are a sixteenth of the real ones, so that the test is short.
    """
    monkeypatch.setattr(early, "_PEER_BYTES_MAX", early._PEER_BYTES_MAX // 16)
    monkeypatch.setattr(signatures, "_TEXT_BYTES_MAX", signatures._TEXT_BYTES_MAX // 16)
    monkeypatch.setattr(outbox, "_ANSWERS_MAX", outbox._ANSWERS_MAX // 16)
    rack = Rack(3)
    engine, reports = rack.engines[1], 0
    tracemalloc.start()
    refusal = ""
    for index in range(200_000):
        try:
            rack.give(0, 1, of_kind(kind, index))
        except ProtocolError as error:
            refusal = str(error)
            break
        reports += len(engine.reports.pop())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "rank 0" in refusal, f"{kind}: not refused"
    assert taken < 3 * 2**20
    # The member is dropped, and the others are told who it was.
    engine.peer_lost(0, f"protocol violation: {refusal}", 0.0)
    assert engine.members.lost is not None
    assert engine.members.lost.rank == 0


def test_allowance_is_given_back_to_a_peer_that_does_not_read_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is due when a floating message is released, where no caller can blame the peer for an error."""
    monkeypatch.setattr(outbox, "_ANSWERS_MAX", 2)
    rack = Rack(2)
    engine = rack.engines[1]
    for key in range(2):
        engine.outbox.answer(0, Frame.POSTED, (key + 1, 0))
    engine.outbox.answer(0, Frame.CREDIT, outbox.NO_KEY)
    assert engine.outbox.num_answers(0) == 3
    with pytest.raises(ProtocolError, match="rank 0 has asked for more than 2 answers"):
        engine.outbox.answer(0, Frame.POSTED, (9, 0))


def frames_that_repeat() -> Iterator[tuple[Header, bytes]]:
    for _ in range(3000):
        yield frame(Frame.STATUS_REQUEST, 7, {"waited_s": 1000.0, "name": LONG})
        yield frame(Frame.REQUEST, 8)
        yield frame(Frame.POSTED, 8)
        yield frame(Frame.DESCRIBE, 9, {"name": "w", "is": "?"})
        yield frame(Frame.MISMATCH, 10, {"tensor": "w", "ranks": [0, 1], "values": ["a", "b"]})


def test_what_is_said_twice_is_kept_once() -> None:
    rack = Rack(2)
    engine = rack.engines[1]
    for message in frames_that_repeat():
        rack.give(0, 1, message)
    assert engine.outbox.num_answers(0) == 1
    assert len(engine.table.early.records) == 4
    assert len(engine.reports.pop()) == 1
    assert engine.table.early._spent[0] < 8192


def test_what_was_said_of_operations_is_used_up_by_submitting_them() -> None:
    """A rank may be ahead again and again: the allowance comes back."""
    rack = Rack(2, eager_bytes=64)
    for turn in range(40):
        first = [rack.submit(0, f"w{index}", [1.0] * 64) for index in range(20)]
        rack.run()
        assert rack.engines[1].table.early._spent[0] >= 20 * 1024
        second = [rack.submit(1, f"w{index}", [float(turn)] * 64) for index in range(20)]
        rack.run()
        assert [values_of(each) for each in (*first, *second)] == [[turn + 1.0] * 64] * 40
        assert rack.engines[1].table.early._spent[0] == 0
        assert not rack.engines[1].table.early.records


def test_texts_in_frames_are_cut() -> None:
    rack = Rack(2)
    rack.give(0, 1, of_kind("mismatch", 5))
    rack.give(0, 1, of_kind("describe", 6))
    failure = rack.engines[1].table.early.of((5, 0)).failure
    assert isinstance(failure, MismatchError)
    assert (len(failure.tensor), [len(value) for value in failure.values]) == (1024, [2048, 2048])
    assert len(rack.engines[1]._signatures.name_of(6)) == 1024


def test_answers_that_wait_leave_before_the_farewell() -> None:
    rack = Rack(2)
    rack.give(0, 1, frame(Frame.STATUS_REQUEST, 7, {"waited_s": 0.0}))
    rack.engines[1].close(0.0, tell=[0])
    frames = []
    while (message := rack.take(1, 0)) is not None:
        frames.append(message[0].frame)
    assert frames == [Frame.STATUS_REPLY, Frame.GOODBYE]


def test_a_status_reply_says_what_is_true_when_it_leaves() -> None:
    rack = Rack(2)
    operation = rack.submit(0, "w")
    rack.engines[0].stalls.inquire(operation, 0.0)
    rack.engines[1].tick(0.0)
    while (message := rack.take(0, 1)) is not None:
        rack.give(0, 1, message)
    rack.submit(1, "w")
    rack.run()
    assert values_of(operation) == [2.0]
