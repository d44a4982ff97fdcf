"""Traces: reading, scaling, and how their layers become messages."""

import json
from itertools import pairwise

import pytest

from totalreduce.bench.arithmetic import wire_limit_s
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.fusion import optimizer_messages
from totalreduce.planning.traces import (
    as_document,
    find_traces,
    load_trace,
    parse_trace,
    shipped_traces,
)
from totalreduce_benchmarks.replay_worker import compute_scale, ddp_messages

ROWS = [[0.3, 0.4, 1000], [0.2, 0.5, 2000], [0.0, 0.7, 3000]]
DOCUMENT = {
    "model": "three",
    "source": "made up",
    "columns": ["ready_s", "needed_s", "elements"],
    "layers": ROWS,
}
MIB = (1 << 20) // 4  # elements of float32


def test_a_trace_knows_its_times_and_bytes():
    trace = parse_trace(DOCUMENT, "here")
    assert (trace.model, trace.compute_s, trace.num_bytes) == ("three", 0.7, 24_000)
    assert trace.forward_s == pytest.approx(0.3)
    assert parse_trace(as_document(trace), "again") == trace


def test_a_trace_may_know_the_shapes_of_parameters():
    shapes = [[[100, 10]], [[1000, 1], [10, 10, 10]], [[3000]]]
    trace = parse_trace({**DOCUMENT, "shapes": shapes}, "here")
    assert trace.layers[1].shapes == ((1000, 1), (10, 10, 10))
    assert parse_trace(json.loads(json.dumps(as_document(trace))), "again") == trace
    assert trace.scaled(time=2.0).layers[0].shapes == ((100, 10),)
    assert trace.scaled(elements=0.5).layers[0].shapes == ()


def test_scaling_times_makes_communication_as_long_as_compute():
    trace = parse_trace(DOCUMENT, "here")
    communication_s = wire_limit_s(trace.num_bytes, 4, 1e6)
    for ratio in (0.5, 1.0, 2.0):
        scaled = trace.scaled(time=compute_scale(trace, communication_s, ratio))
        assert communication_s / scaled.compute_s == pytest.approx(ratio)
        assert scaled.num_bytes == trace.num_bytes
    fewer = trace.scaled(elements=0.5)
    assert [layer.elements for layer in fewer.layers] == [500, 1000, 1500]
    assert fewer.compute_s == trace.compute_s


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"columns": ["elements"]}, "columns"),
        ({"layers": []}, "no layers"),
        ({"layers": [[0.1, 0.2]]}, "layer 0"),
        ({"layers": [[0.0, 0.2, 5], ["x", 0.2, 5]]}, "layer 1"),
        ({"layers": [[0.3, 0.2, 5]]}, "ready_s <= needed_s"),
        ({"layers": [[0.1, 0.2, 0]]}, "at least one element"),
        ({"layers": [[0.1, 0.2, 5], [0.3, 0.4, 5]]}, "before the backward pass is over"),
        ({"layers": [[0.1, float("nan"), 5]]}, "layer 0"),
        ({"shapes": [[[1000]]]}, "for each of its 3 layers"),
        ({"shapes": [[[1000]], [[2000]], [[30, 10]]]}, "layer 2: .*do not have 3000 elements"),
        ({"shapes": [[[1000]], [["x"]], [[3000]]]}, "layer 1"),
    ],
)
def test_a_broken_trace_is_refused_with_its_place(change, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        parse_trace({**DOCUMENT, **change}, "here")


def test_files_are_found_by_name_and_by_path(tmp_path):
    path = tmp_path / "three.json"
    path.write_text(json.dumps(DOCUMENT))
    assert find_traces(["three"], [tmp_path]) == [path]
    assert find_traces([str(path)], []) == [path]
    assert find_traces([], [tmp_path]) == [path]
    assert load_trace(path).model == "three"
    with pytest.raises(ConfigurationError, match=r"no trace 'four'.*three"):
        find_traces(["four"], [tmp_path])
    with pytest.raises(ConfigurationError, match=r"no \*.json"):
        find_traces([], [tmp_path / "nowhere"])


def test_a_file_that_is_no_trace_is_named(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ConfigurationError, match=r"bad\.json is not JSON"):
        load_trace(path)
    with pytest.raises(ConfigurationError, match=r"cannot read trace .*missing"):
        load_trace(tmp_path / "missing.json")


def test_the_shipped_traces_are_traces():
    known = shipped_traces()
    assert set(known) >= {"mlp", "gpt", "cnn"}
    for path in known.values():
        trace = load_trace(path)
        assert trace.num_bytes > 1_000_000
        assert all(layer.shapes for layer in trace.layers)
        assert trace.compute_s > trace.forward_s > 0


def test_a_layer_that_no_longer_fits_begins_the_next_bucket():
    messages = optimizer_messages([MIB, MIB, 3 * MIB, 9 * MIB, MIB], 4 << 20)
    assert [message.layers for message in messages] == [(4,), (3,), (1, 2), (0,)]
    assert [message.priority for message in messages] == [4, 3, 1, 0]
    assert [(message.begin, message.end) for message in messages] == [
        (0, MIB),
        (MIB, 10 * MIB),
        (10 * MIB, 14 * MIB),
        (14 * MIB, 15 * MIB),
    ]


def test_ddp_closes_a_bucket_when_it_has_reached_its_limit():
    # Readiness is from the last layer; the first bucket holds 1 MiB, the others 25 MiB.
    elements = [10 * MIB, 20 * MIB, 8 * MIB, MIB // 2, MIB // 2]
    messages = ddp_messages(elements)
    assert [message.layers for message in messages] == [(3, 4), (1, 2), (0,)]
    assert messages[-1].end == sum(elements)


def test_every_element_travels_once():
    elements = [7, 100_000, 3, MIB, 12 * MIB, 5]
    for messages in (optimizer_messages(elements, 1 << 20), ddp_messages(elements)):
        assert sorted(layer for message in messages for layer in message.layers) == list(range(6))
        assert messages[0].begin == 0
        assert messages[-1].end == sum(elements)
        assert all(left.end == right.begin for left, right in pairwise(messages))
