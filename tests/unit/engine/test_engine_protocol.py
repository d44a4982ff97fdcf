"""What no correct peer sends is refused before memory is taken for it; old epochs are dropped; stalls are reported."""

import json
from dataclasses import replace

import pytest
from engines_by_hand import SMALL, Cluster, allreduce, drain, values_of

from totalreduce.engine import stall
from totalreduce.engine.control import CONTROL_BYTES_MAX
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import State
from totalreduce.engine.submission import Submission
from totalreduce.foundation.errors import PeerLost, ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header


def _held(engine: Engine) -> tuple[int, int, int]:
    reception = engine.reception
    return reception.floating.total_bytes, reception.scratch.in_use, len(reception.arriving)


def refused(cluster: Cluster, header: Header, match: str) -> None:
    """Rank 1 refuses a header of rank 0 and has not taken any memory."""
    engine = cluster.engines[1]
    before = _held(engine)
    with pytest.raises(ProtocolError, match=match):
        cluster.begin_receiving(0, 1, header)
    assert _held(engine) == before


def message_to_rank_1(num_elements: int = 20) -> tuple[Cluster, Header, bytes]:
    cluster = Cluster(2)
    for rank in range(2):
        cluster.submit(rank, "w", [1.0] * num_elements)
    header, body = cluster.take_data(0, 1)
    return cluster, header, body


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"body_bytes": 2**32 - 1}, "4294967295 bytes for lane 0, step 0 of 'w'; 40 are expected"),
        ({"body_bytes": 39}, "39 bytes for lane 0"),
        ({"body_bytes": 0}, "0 bytes for lane 0"),
        ({"lane": 2}, "lane 2, step 0 of 'w', which its schedule does not have"),
        ({"lane": 2**32 - 1}, "lane 4294967295"),
        ({"step": 2}, "step 2 of 'w', which its schedule does not have"),
    ],
)
def test_wrong_slots_and_lengths(change: dict[str, int], match: str) -> None:
    cluster, header, _ = message_to_rank_1()
    refused(cluster, replace(header, **change), match)


def test_the_same_slot_twice() -> None:
    cluster, header, body = message_to_rank_1()
    cluster.begin_receiving(0, 1, header)
    refused(cluster, header, "lane 0, step 0 of 'w' twice")
    cluster, header, body = message_to_rank_1()
    cluster.give(0, 1, (header, body))
    cluster.compute(1)
    refused(cluster, header, "lane 0, step 0 of 'w' twice")


def test_an_overdrawn_allowance() -> None:
    cluster = Cluster(2, floating_bytes_max=3100)
    header = Header(Frame.DATA, 0, 7, 0, flags=Flag.EAGER, body_bytes=64)
    for lane in range(3):
        cluster.begin_receiving(0, 1, replace(header, lane=lane))
    refused(cluster, replace(header, lane=3), "rank 0 would have 4096 floating bytes here; its share is 3100")


def test_messages_that_nobody_asked_for() -> None:
    cluster = Cluster(2)
    header = Header(Frame.DATA, 0, 7, 0, body_bytes=64)
    refused(cluster, header, "rank 0 sent 64 bytes of an operation that was never posted here")
    refused(cluster, replace(header, flags=Flag.EAGER, body_bytes=257), "a floating message of 257 bytes")


def test_oversized_control_frames() -> None:
    cluster = Cluster(2)
    header = Header(Frame.DESCRIBE, 0, body_bytes=CONTROL_BYTES_MAX + 1)
    refused(cluster, header, "a control frame of 16385 bytes from rank 0")


def test_frames_that_are_the_transports_business() -> None:
    with pytest.raises(ProtocolError, match="HEARTBEAT"):
        Cluster(2).give(0, 1, (Header(Frame.HEARTBEAT, 0), b""))


@pytest.mark.parametrize(
    ("frame", "body"),
    [
        (Frame.DESCRIBE, b"not json"),
        (Frame.DESCRIBE, b"\xff\xfe\x00"),
        (Frame.DESCRIBE, b"[1, 2]"),
        (Frame.DESCRIBE, b"[" * 16_000),
        (Frame.MISMATCH, b"{}"),
        (Frame.MISMATCH, b'{"tensor": "w", "ranks": [0], "values": []}'),
        (Frame.MISMATCH, b'{"tensor": "w", "ranks": [Infinity], "values": ["a"]}'),
        (Frame.MISMATCH, b'{"tensor": "w", "ranks": null, "values": ["a"]}'),
        (Frame.LOST, b'{"rank": "1"}'),
        (Frame.LOST, b'{"rank": 2}'),
        (Frame.LOST, b'{"rank": -1}'),
        (Frame.STATUS_REQUEST, b'{"waited_s": "long"}'),
        (Frame.STATUS_REPLY, b""),
    ],
)
def test_garbage_in_control_frames(frame: Frame, body: bytes) -> None:
    cluster = Cluster(2)
    operation = cluster.submit(1, "w")
    with pytest.raises(ProtocolError):
        cluster.give(0, 1, (Header(frame, 0, *operation.key, body_bytes=len(body)), body))


def test_credit_that_was_never_spent() -> None:
    cluster = Cluster(2)
    with pytest.raises(ProtocolError, match="gave back 5000 bytes of an allowance of which 0 are used"):
        cluster.give(0, 1, (Header(Frame.CREDIT, 0, 5000), b""))


def test_a_violation_found_at_submission_is_the_peers_fault() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w", [1.0] * 20)
    header, body = cluster.take_data(0, 1)
    cluster.give(0, 1, (replace(header, lane=9), body))
    operation = cluster.submit(1, "w", [1.0] * 20)
    assert isinstance(operation.error, PeerLost)
    assert operation.error.rank == 0
    assert "protocol violation: rank 0 sent lane 9" in operation.error.reason
    assert cluster.completed[1] == [operation]
    assert cluster.engines[1].reception.floating.total_bytes == 0


def test_another_epoch_is_dropped_and_counted() -> None:
    cluster, header, body = message_to_rank_1()
    cluster.give(0, 1, (replace(header, epoch=1, flags=Flag.EAGER), body))
    lost = json.dumps({"rank": 0}).encode()
    cluster.give(0, 1, (Header(Frame.LOST, 1, body_bytes=len(lost)), lost))
    counters = cluster.engines[1].counters
    assert (counters.dropped_messages, counters.dropped_bytes) == (2, len(body) + len(lost))
    assert cluster.engines[1].members.lost is None
    answers = list(drain(cluster, 1, 0))
    assert Frame.CREDIT not in {answer.frame for answer, _ in answers}, "rank 0 has used no allowance in this epoch"
    for answer in answers:
        cluster.give(1, 0, answer)
    cluster.give(0, 1, (header, body))
    cluster.run()
    assert values_of(cluster.completed[1][0]) == [2.0] * 20


def test_another_epochs_flood_is_refused() -> None:
    cluster = Cluster(2)
    refused(cluster, Header(Frame.DATA, 1, body_bytes=257), "a message of 257 bytes from rank 0; the limit is 256")


def test_a_stall_is_reported_on_every_rank_and_names_the_missing_one() -> None:
    cluster = Cluster(3)
    cluster.submit(0, "embedding.weight", [1.0] * 8)
    cluster.submit(2, "embedding.weight", [1.0] * 8)
    cluster.run()
    cluster.tick(4.9)
    assert [engine.reports.pop() for engine in cluster.engines] == [[], [], []]
    cluster.tick(5.0)
    cluster.tick(5.1)
    reports = [engine.reports.pop() for engine in cluster.engines]
    for rank in range(3):
        assert {report.tensor for report in reports[rank]} == {"embedding.weight"}
        assert {report.missing for report in reports[rank]} == {(1,)}
    [report] = reports[0]
    assert report.waited_s == pytest.approx(5.1)
    assert "never submitted by rank(s) 1" in str(report)
    assert report.progress.keys() == {0, 2}
    assert report.as_dict()["missing"] == [1]
    assert [engine.counters.stalls for engine in cluster.engines] == [1, 2, 1]


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_a_stalled_message_names_both_ranks_and_the_call_that_is_missing(late: str) -> None:
    cluster = Cluster(3, eager_bytes=1)  # the sender, too, waits for the other rank
    cluster.send(2, 1, [1.0] * 8)
    cluster.receive(2, 1, 8)
    cluster.run()
    if late == "sender":
        cluster.receive(2, 1, 8)
        waiting, missing, call = 1, 2, "rank 2 has not called send to rank 1"
    else:
        cluster.send(2, 1, [1.0] * 8)
        waiting, missing, call = 2, 1, "rank 1 has not called recv from rank 2"
    cluster.tick(5.0)
    cluster.tick(5.1)
    for rank in (waiting, missing):
        [report] = cluster.engines[rank].reports.pop()
        assert report.missing == (missing,)
        assert report.as_dict()["message"] == {
            "source": 2,
            "target": 1,
            "size": "8 elements of float64, 64 bytes",
        }
        assert "(8 elements of float64, 64 bytes, after 1 earlier ones) has been pending for 5." in str(report)
        assert call in str(report)
        assert "never submitted" not in str(report)
    assert cluster.engines[0].reports.pop() == []


@pytest.mark.parametrize("late", [False, True])
def test_operations_without_a_name_are_called_by_title_number_and_place_on_each_rank(late: bool) -> None:
    # In a ring of four, rank 2 exchanges nothing with rank 0, and learns of the difference from the others.
    cluster, operations = Cluster(4), []
    for rank in (0, 1, 3, 2):
        data = memoryview(bytearray(8 if rank else 16))
        submission = Submission(
            None, allreduce(1 if rank else 2), [data], title=f"call_{rank}", place="of the default group"
        )
        operation = cluster.engines[rank].submit(submission, 0.0)
        assert operation.name == f"call_{rank} #0 of the default group"
        operations.append(operation)
        if late:
            cluster.run()
    cluster.run()
    for operation in operations:
        assert str(operation.error).startswith(f"{operation.name}: rank ")
    assert cluster.engines[0]._signatures.name_of(operations[0].key[0]) == "calls of the default group"


def test_reports_become_rarer_and_end() -> None:
    cluster = Cluster(2)
    cluster.submit(0, "w")
    for tenth in range(600):
        cluster.tick(tenth / 10)
    assert len(cluster.engines[0].reports.pop()) == 4  # after 5, 10, 20 and 40 seconds
    cluster.submit(1, "w")
    cluster.run()
    for second in range(60, 200):
        cluster.tick(float(second))
    assert cluster.engines[0].reports.pop() == []


def test_many_late_operations_are_asked_about_a_few_at_a_time() -> None:
    cluster = Cluster(2)
    for index in range(150):
        cluster.submit(0, f"w{index}")
    cluster.run()
    reported = []
    for tenth in range(6):
        cluster.tick(5.0 + tenth / 10)
        reported.append(len(cluster.engines[1].reports.pop()))
    assert reported == [64, 64, 22, 0, 0, 0]
    assert len({report.tensor for report in cluster.engines[0].reports.pop()}) == 150


def test_the_oldest_operations_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be ahead by a million operations; the watch must not look at all of them again and again."""
    monkeypatch.setattr(stall, "_WATCHED_MAX", 3)
    cluster = Cluster(2)
    operations = [cluster.submit(0, f"w{index}") for index in range(5)]
    cluster.tick(6.0)
    cluster.tick(8.0)
    assert [report.tensor for report in cluster.engines[0].reports.pop()] == ["w0", "w1", "w2"]
    cluster.submit(1, "w1")
    cluster.run()
    assert operations[1].finished
    cluster.tick(8.5)
    cluster.tick(10.0)
    assert [report.tensor for report in cluster.engines[0].reports.pop()] == ["w3"]


def test_a_rank_that_does_not_answer_is_named() -> None:
    cluster = Cluster(3)
    cluster.submit(0, "w")
    cluster.engines[0].tick(5.0)
    while cluster.move(0, 1) or cluster.move(1, 0):
        pass
    cluster.engines[0].tick(7.0)
    [report] = cluster.engines[0].reports.pop()
    assert report.missing == (1,)
    assert report.silent == (2,)
    assert "no answer from rank(s) 2" in str(report)


def test_the_explanation_for_a_deadline_names_the_missing_rank() -> None:
    cluster = Cluster(2, stall_warning_s=0.0)
    operation = cluster.submit(0, "w")
    assert "no answer from the other ranks yet" in cluster.engines[0].stalls.explain(operation, 1.0)
    cluster.engines[0].stalls.inquire(operation, 1.0)
    cluster.run()
    assert "never submitted by rank(s) 1" in cluster.engines[0].stalls.explain(operation, 1.0)
    assert cluster.engines[1].reports.pop() == []  # the watch is off there


def test_validate_finds_what_is_broken() -> None:
    cluster = Cluster(2)
    operation = cluster.submit(0, "w")
    operation.state = State.DONE
    with pytest.raises(AssertionError):
        cluster.validate()


def test_an_engine_needs_no_configuration_beyond_its_own() -> None:
    assert Engine(0, 2, SMALL).config is SMALL
