"""Which operations share a native one: the same on every rank."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from negotiators_by_hand import ask, names

from totalreduce.coordination.fusion import fuse
from totalreduce.coordination.requests import Disagreement, Response
from totalreduce.foundation.types import OpKind

ALONE = (
    OpKind.BROADCAST,
    OpKind.REDUCE,
    OpKind.REDUCE_SCATTER,
    OpKind.ALLTOALL,
    OpKind.GATHER,
    OpKind.SCATTER,
    OpKind.BARRIER,
)


def tensor(name: str, num_bytes: int, **changes: object) -> Response:
    joined = changes.pop("joined", ())
    return Response(ask(name, num_bytes, itemsize=1, **changes), joined=joined)  # type: ignore[arg-type]


def fused(responses: list[Response], threshold: int) -> list[list[str]]:
    return [names(batch) for batch in fuse(responses, threshold)]


def test_the_search_looks_past_what_does_not_fit() -> None:
    mixed = [tensor(f"{dtype}{index}", 10, dtype=dtype) for index in range(3) for dtype in ("f", "h")]
    assert fused(mixed, 1000) == [["f0", "f1", "f2"], ["h0", "h1", "h2"]]


def test_the_search_ends_when_too_much_is_passed_over() -> None:
    responses = [tensor("a", 10), tensor("b", 95, dtype="h"), tensor("c", 10), tensor("d", 10)]
    assert fused(responses, 100) == [["a"], ["b"], ["c", "d"]]
    assert fused(responses, 105) == [["a", "c"], ["b"], ["d"]], "looked at while batch and skipped are within"
    assert fused(responses, 115) == [["a", "c", "d"], ["b"]]


def test_the_most_urgent_come_first() -> None:
    responses = [tensor(name, 10, priority=priority) for name, priority in (("a", 2), ("b", -1), ("c", 2), ("d", 1))]
    assert fused(responses, 0) == [["b"], ["d"], ["a"], ["c"]]
    assert fused(responses, 20) == [["b", "d"], ["a", "c"]]
    assert fused([*responses, tensor("e", 10, kind=OpKind.BROADCAST, priority=-2)], 40) == [["e"], ["b", "d", "a", "c"]]


def test_the_threshold_is_exact() -> None:
    responses = [tensor("a", 50), tensor("b", 50), tensor("c", 1)]
    assert fused(responses, 100) == [["a", "b"], ["c"]]
    assert fused(responses, 101) == [["a", "b", "c"]]
    assert fused(responses, 99) == [["a"], ["b", "c"]]
    assert fused(responses, 49) == [["a"], ["b"], ["c"]]
    assert fused(responses, 0) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "h"},
        {"device": "cuda"},
        {"reduction": "avg"},
        {"prescale": 2.0},
        {"postscale": 2.0},
        {"batch": ("g", 2)},
        {"joined": (1,)},
    ],
    ids=str,
)
def test_what_differs_is_not_fused(change: dict[str, object]) -> None:
    assert fused([tensor("a", 1), tensor("b", 1, **change)], 100) == [["a"], ["b"]]


def gathered(name: str, rows: tuple[int, ...], width: int = 1, **changes: object) -> Response:
    request = ask(name, rows[0], width, itemsize=2, kind=OpKind.ALLGATHER, **changes)
    return Response(request, tuple((count,) for count in rows))


def test_allgathers_of_one_type_are_fused_up_to_the_size_of_their_results() -> None:
    responses = [gathered("a", (1, 4)), gathered("b", (0, 5), 3), gathered("c", (0, 0), 7)]
    assert [response.fusion_bytes for response in responses] == [10, 30, 0]
    assert fused(responses, 40) == [["a", "b", "c"]]
    assert fused(responses, 39) == [["a"], ["b", "c"]]
    assert fused(responses, 9) == [["a"], ["b"], ["c"]]
    mixed = [
        gathered("a", (1, 4)),
        tensor("x", 1),
        gathered("b", (1, 1), dtype="h"),
        gathered("c", (2, 2), device="cuda"),
    ]
    assert fused([*mixed, gathered("d", (1, 1)), tensor("y", 1)], 100) == [["a", "d"], ["x", "y"], ["b"], ["c"]]


def test_only_sums_and_allgathers_are_fused() -> None:
    for kind in ALONE:
        one, other = (Response(ask(name, 1, kind=kind)) for name in "ab")
        assert fused([one, tensor("x", 1), other, tensor("y", 1)], 100) == [["a"], ["x", "y"], ["b"]]
    failed = Response(ask("e"), error=Disagreement("e", ((0,), (1,)), ("x", "y")))
    assert fused([tensor("x", 1), failed, tensor("y", 1), failed], 100) == [["x", "y"], ["e"], ["e"]]


RESPONSES = st.lists(
    st.tuples(
        st.sampled_from(["f", "h"]),
        st.sampled_from(["sum", "avg"]),
        st.integers(0, 60),
        st.none() | st.sampled_from([("g", 3), ("h", 2)]),
        st.sampled_from([OpKind.ALLREDUCE] * 4 + [OpKind.BROADCAST]),
        st.sampled_from([(), (), (1,)]),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(RESPONSES, st.integers(0, 150))
def test_fusion_is_the_same_everywhere(rows: list, threshold: int) -> None:
    def made() -> list[Response]:
        responses = []
        for index, (dtype, reduction, size, batch, kind, joined, failed) in enumerate(rows):
            request = ask(f"w{index}", size, kind=kind, dtype=dtype, reduction=reduction, itemsize=1, batch=batch)
            error = Disagreement("x", ((0,), (1,)), ("x", "y")) if failed and index % 5 == 0 else None
            responses.append(Response(request, error=error, joined=joined))
        return responses

    batches = fuse(made(), threshold)
    elsewhere = [Response.from_wire(json.loads(json.dumps(response.to_wire()))) for response in made()]
    assert fuse(elsewhere, threshold) == batches
    flat = [response for batch in batches for response in batch]
    assert sorted(names(flat)) == sorted(names(made())), "each once"
    order = {response.name: place for place, response in enumerate(made())}
    for batch in batches:
        places = [order[response.name] for response in batch]
        assert places == sorted(places)
        assert len(batch) == 1 or sum(response.request.num_bytes for response in batch) <= threshold
        if len(batch) > 1:
            assert all(response.error is None and response.request.kind is OpKind.ALLREDUCE for response in batch)
            assert len({response.request.dtype for response in batch}) == 1
            assert len({response.request.reduction for response in batch}) == 1
            assert len({response.request.batch for response in batch}) == 1, "groups are never mixed"
            assert len({response.joined for response in batch}) == 1
    firsts = [order[batch[0].name] for batch in batches]
    assert firsts == sorted(firsts), "batches begin in the agreed order"
