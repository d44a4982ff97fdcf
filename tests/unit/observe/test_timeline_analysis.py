"""The analysis: hand-made timelines whose late ranks, time split and hidden share are known to the microsecond."""

import json
import random

import pytest

from totalreduce.foundation.errors import PeerLost
from totalreduce.observe import Timeline, analyse, merge_timelines, merged_trace
from totalreduce.observe.analysis import LateRank, OperationReport, TensorReport

ORIGIN = 100.0
CATEGORIES = ("waiting", "coordination", "queue", "copy", "wire")


def ms(milliseconds):
    return ORIGIN + milliseconds / 1e3


def by_engine(observer, name, submitted, first_byte, done, iteration=0, num_bytes=1000, error=None):
    """An operation of the engine's; times in milliseconds."""
    observer.submitted(name, iteration, ms(submitted), num_bytes=num_bytes, priority=0)
    if first_byte is not None:
        observer.first_byte(name, iteration, ms(first_byte))
    observer.done(name, iteration, ms(done), error=error)


def native(observer, name, times, iteration=0, num_bytes=1000, fused=2):
    """An operation of a native library; milliseconds of submission, agreement, begin, start, end, done."""
    labels = ("submitted", "agreed", "begun", "packed", "ended", "unpacked")
    facts = {label: ms(at) for label, at in zip(labels, times, strict=True)}
    observer.coordinated(
        name, iteration, kind="allreduce", num_bytes=num_bytes, batch=0, fused=fused, error=None, **facts
    )


def written(folder, *recordings, ranks=None, clocks=None, **options):
    """Files of ranks, each with what its function records."""
    files = []
    for index, record in enumerate(recordings):
        rank = ranks[index] if ranks else index
        observer = Timeline(rank, folder / f"rank{rank}.json", clock=lambda: ORIGIN, **options)
        record(observer)
        observer.close()
        if clocks is not None:
            trace = json.loads(observer.path.read_text())
            trace["metadata"]["clock"] = clocks[index]
            observer.path.write_text(json.dumps(trace))
        files.append(observer.path)
    return files


def analysed(folder, *recordings, **options):
    return analyse(merged_trace(written(folder, *recordings, **options)))


def split_ms(split):
    """Milliseconds of waiting, coordination, queue, copy, wire."""
    return [round(getattr(split, f"{category}_s") * 1e3, 6) for category in CATEGORIES]


def test_the_time_of_an_operation_of_the_engine(tmp_path):
    report = analysed(
        tmp_path,
        lambda rank_0: by_engine(rank_0, "w", 0, 2, 30),
        lambda rank_1: by_engine(rank_1, "w", 10, 12, 28),
        lambda rank_2: by_engine(rank_2, "w", 4, 16, 31),
    )
    assert report.operations == (
        OperationReport(name="w", iteration=0, num_bytes=1000, late_rank=1, late_s=0.01, duration_s=0.021),
    )
    assert [split_ms(rank.split) for rank in report.ranks] == [
        [10, 0, 0, 0, 20],  # its first byte left before rank 1 was there
        [0, 0, 2, 0, 16],
        [6, 0, 6, 0, 15],
    ]
    assert split_ms(report.total) == [16, 0, 8, 0, 51]
    assert report.total.total_s == pytest.approx(0.075)


def test_the_time_of_a_native_operation(tmp_path):
    report = analysed(
        tmp_path,
        lambda rank_0: native(rank_0, "w", (0, 12, 15, 16, 26, 28)),
        lambda rank_1: native(rank_1, "w", (10, 13, 14, 16, 25, 29), fused=1),
    )
    assert [split_ms(rank.split) for rank in report.ranks] == [[10, 2, 3, 3, 10], [0, 3, 1, 6, 9]]
    assert (report.operations[0].late_rank, report.operations[0].late_s) == (1, 0.01)
    assert report.operations[0].duration_s == 0.019


def test_an_operation_of_a_plan_needs_no_coordination(tmp_path):
    # Rank 0 starts the native collective at once, which then waits for rank 1: that is waiting, not wire.
    report = analysed(
        tmp_path,
        lambda rank_0: native(rank_0, "w", (0, 0, 1, 2, 20, 21)),
        lambda rank_1: native(rank_1, "w", (10, 10, 11, 12, 20, 21)),
    )
    assert [split_ms(rank.split) for rank in report.ranks] == [[10, 0, 0, 1, 10], [0, 0, 1, 2, 8]]


def test_a_rank_may_be_done_before_the_latest_begins(tmp_path):
    report = analysed(
        tmp_path,
        lambda root: by_engine(root, "w", 0, 1, 5),
        lambda receiver: by_engine(receiver, "w", 10, 10, 17),
    )
    assert [split_ms(rank.split) for rank in report.ranks] == [[5, 0, 0, 0, 0], [0, 0, 0, 0, 7]]
    assert report.operations[0].duration_s == 0.007


def test_nobody_is_late_if_all_submit_at_once(tmp_path):
    report = analysed(tmp_path, *[lambda rank: by_engine(rank, "w", 3, 4, 5)] * 3)
    assert (report.operations[0].late_rank, report.operations[0].late_s) == (None, 0.0)
    assert report.late == ()


def test_late_ranks_and_slow_tensors_are_ranked(tmp_path):
    def record(late_ms):
        def facts(observer):
            for iteration, late in enumerate(late_ms):
                begin = 1000 * iteration + late
                by_engine(observer, "b", begin, begin, 1000 * iteration + 100, iteration, num_bytes=10 + iteration)
            by_engine(observer, "unnamed#7", 5000, 5001, 5050, 7)
            by_engine(observer, "a", 6000, 6001, 6050)

        return facts

    report = analysed(tmp_path, record((0, 0, 30, 0)), record((10, 0, 0, 8)), record((0, 20, 0, 40)))
    assert report.late == (
        LateRank(rank=2, times_last=2, median_s=0.03, worst_s=0.04, worst_operation="b #3"),
        LateRank(rank=0, times_last=1, median_s=0.03, worst_s=0.03, worst_operation="b #2"),
        LateRank(rank=1, times_last=1, median_s=0.01, worst_s=0.01, worst_operation="b #0"),
    )
    assert report.tensors == (
        TensorReport(name="b", count=4, num_bytes=13, median_s=pytest.approx(0.075)),
        TensorReport(name="a", count=1, num_bytes=1000, median_s=0.05),
        TensorReport(name="unnamed", count=1, num_bytes=1000, median_s=0.05),
    )
    assert [(operation.name, operation.iteration) for operation in report.operations[-2:]] == [("unnamed", 7), ("a", 0)]


def test_the_hidden_share_is_one_of_unions(tmp_path):
    def record(observer):
        by_engine(observer, "a", 0, 1, 10)
        by_engine(observer, "b", 5, 6, 20)
        observer.waited("a", 0, ms(8), ms(12))
        observer.waited("b", 0, ms(10), ms(15))
        observer.waited("c", 0, ms(25), ms(30))  # nothing was in flight

    report = analysed(tmp_path, record, lambda idle: None)
    assert [rank.hidden_share for rank in report.ranks] == [13 / 20, None]
    assert report.incomplete_operations == 2


def test_what_is_not_compared_is_counted(tmp_path):
    def record(rank):
        def facts(observer):
            by_engine(observer, "whole", 0, 1, 10)
            by_engine(observer, "failed", 20, 21, 30, error=PeerLost(2, "killed") if rank == 1 else None)
            for _ in range(2 if rank == 2 else 1):
                by_engine(observer, "twice", 40 + rank, 41 + rank, 50)
            if rank == 0:
                by_engine(observer, "only here", 60, 61, 70)
            for iteration in range(2):  # numbered by its name, which comes round again
                by_engine(observer, "barrier#5", 80 + iteration, 80 + iteration, 81 + iteration, iteration)
            observer.submitted("never", 0, ms(90), num_bytes=1, priority=0)

        return facts

    report = analysed(tmp_path, record(0), record(1), record(2), ranks=(0, 1, 4))
    assert [(operation.name, operation.iteration) for operation in report.operations] == [
        ("whole", 0),
        ("barrier", 5),
        ("barrier", 5),
    ]
    assert report.incomplete_operations == 1
    assert report.failed_operations == 2
    assert report.ambiguous_operations == 1
    assert report.missing_ranks == (2, 3)


def test_dropped_events_and_clocks_are_reported(tmp_path):
    def record(observer):
        for iteration in range(5):
            by_engine(observer, "w", 10 * iteration, 10 * iteration, 10 * iteration + 5, iteration)

    assert analysed(tmp_path, record, record).clocks == ((0, 1),)
    report = analysed(tmp_path, record, record, record, clocks=("a", "b", "a"), max_events=3)
    assert report.clocks == ((0, 2), (1,))
    assert [rank.dropped_events for rank in report.ranks] == [2, 2, 2]
    assert len(report.operations) == 3


def test_the_order_of_files_changes_nothing(tmp_path):
    def record(late):
        return lambda observer: [by_engine(observer, name, late, late, 50) for name in ("c", "a", "b")]

    files = written(tmp_path, record(0), record(1), record(0))
    report = analyse(merged_trace(files))
    assert analyse(merged_trace(files[::-1])) == report
    merged = json.loads(merge_timelines(files, tmp_path / "all.json").read_text())
    assert analyse(merged) == report
    assert [operation.name for operation in report.operations] == ["a", "b", "c"]
    document = json.loads(json.dumps(report.as_dict()))
    assert document["operations"][0] == {
        "name": "a",
        "iteration": 0,
        "num_bytes": 1000,
        "late_rank": 1,
        "late_s": 0.001,
        "duration_s": 0.049,
    }


def test_operations_that_share_the_last_track_keep_their_parts(tmp_path):
    """More names than tracks, all in flight together and fused, so that many parts begin at the same time."""
    names = [f"name-{number}" for number in range(1300)]
    generator = random.Random(3)
    facts = [[], []]
    for _ in range(13):
        batches = [sorted(generator.sample(range(first, 40), 3)) for first in (10, 30)]  # shared by 100 tensors
        for _ in range(100):
            for rank, (begun, packed, ended) in enumerate(batches):
                submitted, unpacked = generator.randrange(begun), ended + generator.randrange(3)
                facts[rank].append((submitted, submitted, begun, packed, ended, unpacked))
    expected = [dict.fromkeys(CATEGORIES, 0) for _ in facts]
    for same in zip(*facts, strict=True):
        latest = max(times[0] for times in same)
        for spent, (submitted, _, begun, packed, ended, unpacked) in zip(expected, same, strict=True):
            for tick in range(submitted, unpacked):
                if tick < latest:
                    spent["waiting"] += 1
                elif tick < begun:
                    spent["queue"] += 1
                else:
                    spent["wire" if packed <= tick < ended else "copy"] += 1

    def record(rank):
        return lambda observer: [native(observer, name, times) for name, times in zip(names, facts[rank], strict=True)]

    report = analysed(tmp_path, record(0), record(1))
    assert len(report.operations) == 1300
    for rank in range(2):
        assert split_ms(report.ranks[rank].split) == [expected[rank][category] for category in CATEGORIES]
