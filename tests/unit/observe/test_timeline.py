"""The timeline: every fact at its time, spans that nest, a bounded file, ranks laid side by side."""

import json
from itertools import pairwise

import pytest

from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.foundation.types import operation_id
from totalreduce.observe import Timeline, merge_timelines, rank_path


class FakeClock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def timeline(path, rank=0, **options):
    return Timeline(rank, path, clock=FakeClock(100.0), **options)


def load(path):
    return json.loads(path.read_text())


def track_names(trace):
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def spans(trace):
    """(track, name) -> list of (begin, end) in microseconds."""
    names, found = track_names(trace), {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            key = (names[event["tid"]], event["name"])
            found.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def assert_spans_nest(trace):
    """On every track a span either contains the next one or ends before it: what viewers require."""
    tracks = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for events in tracks.values():
        assert events == sorted(events, key=lambda span: span[0])
        stack = []
        for begin, end in events:
            while stack and stack[-1] <= begin and stack[-1] < end:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


def one_operation(observer, name="w", iteration=0, at=100.0):
    observer.submitted(name, iteration, at, num_bytes=1000, priority=3)
    observer.first_byte(name, iteration, at + 0.002)
    observer.sent(name, iteration, at + 0.003, peer=1, lane=0, step=0, num_bytes=250)
    observer.received(name, iteration, at + 0.004, peer=1, lane=0, step=0, num_bytes=500)
    observer.reduced(name, iteration, at + 0.005, lane=2, step=1, seconds=0.0005)
    observer.done(name, iteration, at + 0.010, error=None)


def test_an_operation_becomes_a_span_with_queued_and_wire_inside(tmp_path):
    observer = timeline(tmp_path / "t.json")
    one_operation(observer)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert spans(trace) == {
        ("w", "w #0"): [(0, 10_000)],
        ("w", "QUEUED"): [(0, 2_000)],
        ("w", "WIRE"): [(2_000, 10_000)],
        ("computation", "REDUCE"): [(4_500, 5_000)],
    }
    (outer,) = [event for event in trace["traceEvents"] if event["name"] == "w #0"]
    assert outer["args"] == {
        "iteration": 0,
        "bytes": 1000,
        "priority": 3,
        "bytes sent": 250,
        "bytes received": 500,
        "outcome": "done",
    }
    (reduction,) = [event for event in trace["traceEvents"] if event["name"] == "REDUCE"]
    assert reduction["args"] == {"operation": "w", "iteration": 0, "lane": 2, "step": 1}
    assert trace["metadata"]["events_dropped"] == 0
    assert_spans_nest(trace)


def coordinated(observer, name, iteration=0, *, times, fused=1, error=None, kind="allreduce"):
    labels = ("submitted", "agreed", "begun", "packed", "ended", "unpacked")
    times = dict(zip(labels, times, strict=True))
    observer.coordinated(name, iteration, kind=kind, num_bytes=1000, batch=7, fused=fused, error=error, **times)


def test_a_native_operation_becomes_a_span_with_all_of_its_parts(tmp_path):
    observer = timeline(tmp_path / "t.json")
    coordinated(observer, "w", 4, times=(100.0, 100.001, 100.003, 100.004, 100.009, 100.011), fused=3)
    coordinated(observer, "alone", times=(100.0, 100.001, 100.003, 100.004, 100.009, 100.011), kind="broadcast")
    observer.close()
    trace = load(tmp_path / "t.json")
    assert spans(trace) == {
        ("w", "w #4"): [(0, 11_000)],
        ("w", "NEGOTIATE"): [(0, 1_000)],
        ("w", "QUEUE"): [(1_000, 3_000)],
        ("w", "FUSE"): [(3_000, 4_000)],
        ("w", "ALLREDUCE"): [(4_000, 9_000)],
        ("w", "COPY"): [(9_000, 11_000)],
        ("alone", "alone #0"): [(0, 11_000)],
        ("alone", "NEGOTIATE"): [(0, 1_000)],
        ("alone", "QUEUE"): [(1_000, 3_000)],
        ("alone", "COPY"): [(3_000, 4_000), (9_000, 11_000)],
        ("alone", "BROADCAST"): [(4_000, 9_000)],
    }
    (outer,) = [event for event in trace["traceEvents"] if event["name"] == "w #4"]
    assert outer["args"] == {"iteration": 4, "bytes": 1000, "batch": 7, "fused": 3, "outcome": "done"}
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"], event["args"]["bytes"]) for event in counters] == [(0, 2000), (11_000, 0)]
    assert_spans_nest(trace)


def test_parts_that_took_no_time_are_not_drawn(tmp_path):
    observer = timeline(tmp_path / "t.json")
    coordinated(observer, "plan", times=(100.0, 100.0, 100.001, 100.001, 100.002, 100.002))
    error = PeerLost(2, "killed")
    coordinated(observer, "failed", times=(100.0, 100.001, 100.0, 100.0, 100.0, 100.004), error=error)
    observer.submitted("silent", 0, 100.0, num_bytes=1, priority=0)
    observer.done("silent", 0, 100.002, error=None)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert spans(trace) == {
        ("plan", "plan #0"): [(0, 2_000)],
        ("plan", "QUEUE"): [(0, 1_000)],
        ("plan", "ALLREDUCE"): [(1_000, 2_000)],
        ("failed", "failed #0"): [(0, 4_000)],
        ("failed", "NEGOTIATE"): [(0, 1_000)],
        ("failed", "COPY"): [(1_000, 4_000)],
        ("silent", "silent #0"): [(0, 2_000)],
        ("silent", "QUEUED"): [(0, 2_000)],
    }
    outcomes = {e["name"]: e["args"]["outcome"] for e in trace["traceEvents"] if "outcome" in e.get("args", {})}
    assert outcomes["failed #0"] == "PeerLost: rank 2 is lost: killed"
    assert_spans_nest(trace)


def test_a_native_operation_counts_as_one_event(tmp_path):
    observer = timeline(tmp_path / "t.json", max_events=2)
    for iteration in range(3):
        coordinated(observer, "w", iteration, times=[100.0 + iteration + step / 8 for step in range(6)])
    assert observer.dropped == 1


def test_a_rank_is_a_process_and_a_name_is_one_track(tmp_path):
    observer = timeline(tmp_path / "t.json", rank=3)
    for iteration in range(3):
        one_operation(observer, "a", iteration, at=100.0 + iteration)
        one_operation(observer, "b", iteration, at=100.5 + iteration)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    (process,) = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process["args"] == {"name": "rank 3"}
    assert sorted(track_names(trace).values()) == ["a", "b", "computation"]
    assert spans(trace)["a", "a #2"] == [(2_000_000, 2_010_000)]


def test_overlapping_waits_get_tracks_of_their_own(tmp_path):
    observer = timeline(tmp_path / "t.json")
    observer.waited("a", 0, 100.0, 100.4)
    observer.waited("b", 0, 100.2, 100.6)
    observer.waited("c", 0, 100.4, 100.5)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert spans(trace) == {
        ("caller", "WAIT"): [(0, 400_000), (400_000, 500_000)],
        ("caller (2)", "WAIT"): [(200_000, 600_000)],
    }
    assert_spans_nest(trace)


def test_operations_numbered_by_their_names_share_a_track(tmp_path):
    observer = timeline(tmp_path / "t.json")
    for number in range(3):
        one_operation(observer, f"unnamed#{number}", number, at=100.0 + number)
        one_operation(observer, f"barrier#{number}", 0, at=100.5 + number)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert sorted(track_names(trace).values()) == ["barrier", "computation", "unnamed"]
    assert {("unnamed", "unnamed #2"), ("barrier", "barrier #2")} <= spans(trace).keys()


def test_a_new_name_for_every_call_does_not_make_a_track_for_every_call(tmp_path):
    observer = timeline(tmp_path / "t.json")
    for number in range(1500):
        one_operation(observer, f"name-{number}", 0, at=100.0 + number)
    observer.close()
    trace = load(tmp_path / "t.json")
    assert len(track_names(trace)) == 1001
    assert spans(trace)["other operations", "name-1499 #0"] == [(1_499_000_000, 1_499_010_000)]
    assert_spans_nest(trace)


def test_instants_stand_on_the_track_of_their_operation(tmp_path):
    observer = timeline(tmp_path / "t.json")
    observer.floating(f"{operation_id('w'):#018x}", 0, 100.001, peer=2, num_bytes=77)
    one_operation(observer, at=100.002)
    observer.promoted("w", 0, 100.003)
    observer.stalled({"missing": {"w": [1]}}, 100.004)
    observer.close()
    trace = load(tmp_path / "t.json")
    names = track_names(trace)
    instants = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "i"}
    assert {label: (names[event["tid"]], event["ts"]) for label, event in instants.items()} == {
        "FLOATING": ("w", 1_000),
        "PROMOTED": ("w", 3_000),
        "STALLED": ("stalls", 4_000),
    }
    assert instants["FLOATING"]["args"] == {"from rank": 2, "bytes": 77, "iteration": 0}
    assert instants["STALLED"]["args"] == {"missing": {"w": [1]}}


def test_bytes_in_flight_rise_and_fall(tmp_path):
    observer = timeline(tmp_path / "t.json")
    observer.submitted("a", 0, 100.0, num_bytes=10, priority=0)
    observer.submitted("b", 0, 100.001, num_bytes=5, priority=0)
    observer.done("a", 0, 100.002, error=None)
    observer.done("b", 0, 100.003, error=None)
    observer.close()
    counters = [event for event in load(tmp_path / "t.json")["traceEvents"] if event["ph"] == "C"]
    levels = [(event["ts"], event["args"]["bytes"]) for event in counters]
    assert levels == [(0, 10), (1_000, 15), (2_000, 5), (3_000, 0)]


def test_errors_and_unfinished_operations_say_so(tmp_path):
    observer = timeline(tmp_path / "t.json")
    observer.submitted("a", 0, 100.0, num_bytes=10, priority=0)
    observer.done("a", 0, 100.5, error=PeerLost(2, "killed"))
    observer.submitted("b", 4, 100.0, num_bytes=10, priority=0)
    observer._clock.now = 101.0
    observer.close()
    trace = load(tmp_path / "t.json")
    outcomes = {e["name"]: e["args"]["outcome"] for e in trace["traceEvents"] if "outcome" in e.get("args", {})}
    assert outcomes == {"a #0": "PeerLost: rank 2 is lost: killed", "b #4": "unfinished"}
    assert spans(trace)["b", "b #4"] == [(0, 1_000_000)]


def test_beyond_its_bound_it_counts_and_says_so(tmp_path):
    observer = timeline(tmp_path / "t.json", max_events=10)
    for iteration in range(20):  # two events each: the span and one addition
        one_operation(observer, iteration=iteration, at=100.0 + iteration)
    assert observer.dropped == 30
    observer.close()
    trace = load(tmp_path / "t.json")
    assert trace["metadata"]["events"] == 10
    assert trace["metadata"]["events_dropped"] == 30
    assert [name for _, name in spans(trace) if name.startswith("w #")] == [f"w #{number}" for number in range(5)]
    (process,) = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process["args"] == {"name": "rank 0 (30 later events left out)"}


def test_close_twice_and_late_facts_are_harmless(tmp_path):
    observer = timeline(tmp_path / "t.json")
    one_operation(observer)
    observer.close()
    before = (tmp_path / "t.json").read_bytes()
    one_operation(observer, iteration=1, at=101.0)
    observer.close()
    assert (tmp_path / "t.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def warnings_about(caplog, path):
    """The reasons and the number of lost events of the warnings that name the file."""
    assert all(record.levelname == "WARNING" for record in caplog.records)
    texts = [record.getMessage() for record in caplog.records]
    assert all(text.startswith(f"rank 0: the timeline {path} could not be written: ") for text in texts)
    return [text.split("written: ")[1].removesuffix(". The job is not affected") for text in texts]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, caplog):
    class Unprintable:
        def __str__(self):
            raise RuntimeError("no text")

    (tmp_path / "t.json").write_text("old")
    observer = timeline(tmp_path / "t.json")
    observer.stalled({"odd": Unprintable()}, 100.0)
    observer.close()
    assert warnings_about(caplog, tmp_path / "t.json") == ["RuntimeError: no text. Events lost: 1"]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("t.json", "old")]


def test_a_full_disk_costs_the_file_and_not_the_job(tmp_path, caplog, small_disk):
    disk = small_disk(256)
    (disk / "t.json").write_text("old")
    observer = timeline(disk / "t.json", max_events=4000)
    for iteration in range(3000):
        one_operation(observer, iteration=iteration, at=100.0 + iteration)
    observer.close()
    assert warnings_about(caplog, disk / "t.json") == ["No space left on device (ENOSPC). Events lost: 6000"]
    assert [(file.name, file.read_text()) for file in disk.iterdir()] == [("t.json", "old")]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: folder.rmdir(), "No such file or directory (ENOENT)"),
        (lambda folder: (folder.rmdir(), folder.write_text("")), "Not a directory (ENOTDIR)"),
        (lambda folder: (folder / "t.json").mkdir(), "Is a directory (EISDIR)"),
    ],
)
def test_a_place_that_was_spoiled_in_between_is_a_warning(tmp_path, caplog, spoil, reason):
    folder = tmp_path / "traces"
    observer = timeline(folder / "t.json")
    one_operation(observer)
    spoil(folder)
    observer.close()
    observer.close()
    assert warnings_about(caplog, folder / "t.json") == [f"{reason}. Events lost: 2"]


def test_another_working_directory_at_the_end_does_not_move_the_file(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    observer = timeline("t.json")
    one_operation(observer)
    monkeypatch.chdir(tmp_path / "elsewhere")
    observer.close()
    assert ("w", "w #0") in spans(load(tmp_path / "t.json"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("max_events", [0, -1])
def test_a_bound_that_keeps_nothing_is_refused(tmp_path, max_events):
    with pytest.raises(ConfigurationError, match=f"at least 1, not {max_events}"):
        Timeline(0, tmp_path / "t.json", max_events)


def test_an_impossible_place_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot make the folder"):
        Timeline(0, tmp_path / "file" / "t.json")
    with pytest.raises(ConfigurationError, match="is a folder"):
        Timeline(0, tmp_path)


def test_rank_path_gives_every_rank_its_own_file(tmp_path):
    assert rank_path(tmp_path / "run.json", 3) == tmp_path / "run.rank3.json"
    assert rank_path(tmp_path / "folder", 3) == tmp_path / "folder" / "rank3.json"


def written(path, rank, origin_clock_s, origin_wall_s, clock):
    """A rank's file with one span 0.5 s after its origin, as a process with these clocks leaves it."""
    observer = Timeline(rank, path, clock=FakeClock(origin_clock_s))
    one_operation(observer, at=origin_clock_s + 0.5)
    observer.close()
    trace = load(path)
    trace["metadata"] |= {"origin_wall_s": origin_wall_s, "clock": clock}
    path.write_text(json.dumps(trace))
    return path


def begins(trace):
    return {event["pid"]: event["ts"] for event in trace["traceEvents"] if event["name"] == "w #0"}


def test_ranks_of_one_host_line_up_by_their_common_clock(tmp_path):
    # The wall clock was set back by a minute between the two starts; the monotonic clock knows better.
    files = [
        written(tmp_path / "1.json", 1, 250.0, 940.0, "kernel-a"),
        written(tmp_path / "0.json", 0, 249.0, 999.0, "kernel-a"),
    ]
    merged = merge_timelines(files, tmp_path / "out" / "all.json")
    trace = load(merged)
    assert begins(trace) == {0: 500_000, 1: 1_500_000}
    assert [header["rank"] for header in trace["metadata"]["ranks"]] == [0, 1]
    assert_spans_nest(trace)


def test_hosts_line_up_by_the_wall_clock(tmp_path):
    files = [
        written(tmp_path / "0.json", 0, 5.0, 1_000.0, "kernel-a"),
        written(tmp_path / "1.json", 1, 70_000.0, 1_000.25, "kernel-b"),
    ]
    assert begins(load(merge_timelines(files, tmp_path / "all.json"))) == {0: 500_000, 1: 750_000}


def test_no_two_ranks_share_a_track(tmp_path):
    files = [written(tmp_path / f"{rank}.json", rank, 5.0, 1_000.0, "a") for rank in range(4)]
    trace = load(merge_timelines(files, tmp_path / "all.json"))
    owners = sorted({(event["tid"], event["pid"]) for event in trace["traceEvents"] if "tid" in event})
    assert all(first[0] != second[0] for first, second in pairwise(owners))
    assert {pid for _, pid in owners} == {0, 1, 2, 3}


def test_merging_refuses_what_it_cannot_merge(tmp_path):
    good = written(tmp_path / "0.json", 0, 5.0, 1_000.0, "a")
    (tmp_path / "noise").write_bytes(b"\xff\x00")
    (tmp_path / "list.json").write_text("[]")
    merged = merge_timelines([good], tmp_path / "all.json")
    for bad, message in [
        ([], "no timelines"),
        ([good, good], "two timelines of rank 0"),
        ([good, tmp_path / "absent.json"], "cannot read the timeline .*absent.json: No such file"),
        ([tmp_path / "noise"], "noise is not a timeline"),
        ([tmp_path / "list.json"], "list.json is not the timeline of one rank"),
        ([merged], "all.json is not the timeline of one rank but a merged one"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            merge_timelines(bad, tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()
