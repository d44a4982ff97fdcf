"""The response cache: what it says about a request, and which bit has which entry."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from negotiators_by_hand import CHANGES, ask, changed

from totalreduce.coordination.cache import Lookup, ResponseCache, bits_of
from totalreduce.coordination.requests import Disagreement, Request, Response, respond
from totalreduce.foundation.types import OpKind

USUAL = ask("w", 3, 4, reduction="avg", prescale=0.5)


def test_hit_and_miss() -> None:
    cache = ResponseCache(4)
    assert cache.classify(USUAL) == (Lookup.MISS, 0)
    cache.put(Response(USUAL), USUAL)
    assert cache.classify(USUAL) == (Lookup.HIT, 0)
    assert cache.classify(changed(USUAL, name="v")) == (Lookup.MISS, 0)
    assert len(cache) == cache.num_bits == cache.all_bits == 1


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_invalid(change: str) -> None:
    cache = ResponseCache(4)
    cache.put(Response(ask("other")), ask("other"))
    cache.put(Response(USUAL), USUAL)
    before = cache.snapshot()
    assert cache.classify(changed(USUAL, **CHANGES[change])) == (Lookup.INVALID, 1)
    assert cache.snapshot() == before, "looking something up must not change the order"


def test_factors_that_are_nan_are_equal() -> None:
    """As float("nan") is not: NaN is a factor like others."""
    requests = [ask("w", prescale=float("nan"), postscale=-float("nan")) for _ in range(2)]
    received = Request.from_wire(requests[1].to_wire())
    assert requests[0] == requests[1] == received
    assert respond({0: requests[0], 1: received}, 2, ()).error is None
    cache = ResponseCache(4)
    cache.put(Response(requests[0]), requests[0])
    assert cache.classify(received) == (Lookup.HIT, 0)


@pytest.mark.parametrize("change", [{"root": 1}, {"shape": (5,)}, {"dtype": "uint8"}])
def test_a_broadcast_that_has_changed(change: dict[str, object]) -> None:
    usual = ask("w", kind=OpKind.BROADCAST)
    cache = ResponseCache(4)
    cache.put(Response(usual), usual)
    assert cache.classify(usual) == (Lookup.HIT, 0)
    assert cache.classify(changed(usual, **change)) == (Lookup.INVALID, 0)


def test_ragged_kinds_are_held_to_what_this_rank_asked() -> None:
    mine, others = ask("w", 2, 3, kind=OpKind.ALLGATHER), ask("w", 7, 3, kind=OpKind.ALLGATHER)
    cache = ResponseCache(4)
    cache.put(respond({0: others, 1: mine}, 2, ()), mine)
    assert cache.classify(mine)[0] is Lookup.HIT
    assert cache.classify(others)[0] is Lookup.INVALID
    splits = ask("s", 3, kind=OpKind.ALLTOALL, splits=(1, 2))
    cache.put(respond({0: splits, 1: splits}, 2, ()), splits)
    assert cache.classify(changed(splits, splits=(2, 1)))[0] is Lookup.INVALID


def test_the_new_entry_inherits_the_bit_of_the_evicted_one() -> None:
    cache = ResponseCache(3)
    for name in "abc":
        cache.put(Response(ask(name)), ask(name))
    assert cache.snapshot() == [("a", 0), ("b", 1), ("c", 2)]
    cache.use(1 << 0)
    assert cache.snapshot() == [("b", 1), ("c", 2), ("a", 0)]
    cache.put(Response(ask("d")), ask("d"))
    assert cache.snapshot() == [("c", 2), ("a", 0), ("d", 1)]
    assert cache.classify(ask("b"))[0] is Lookup.MISS
    assert cache.classify(ask("b", 9))[0] is Lookup.MISS, "nothing of what was evicted is left"
    assert cache.num_bits == 3


def test_looking_at_an_entry_is_no_use_of_it() -> None:
    cache = ResponseCache(2)
    cache.put(Response(ask("a")), ask("a"))
    cache.put(Response(ask("b")), ask("b"))
    assert cache.peek(0).name == "a"
    assert cache.snapshot() == [("a", 0), ("b", 1)]


def test_bits_of_what_was_erased_are_used_again_lowest_first() -> None:
    cache = ResponseCache(8)
    for name in "abcde":
        cache.put(Response(ask(name)), ask(name))
    cache.erase(0b10110)
    assert cache.snapshot() == [("a", 0), ("d", 3)]
    assert (cache.num_bits, cache.all_bits) == (5, 0b01001)
    for name in "xyzw":
        cache.put(Response(ask(name)), ask(name))
    assert cache.snapshot() == [("a", 0), ("d", 3), ("x", 1), ("y", 2), ("z", 4), ("w", 5)]


def test_what_is_not_remembered() -> None:
    for capacity, response in (
        (0, Response(ask("a"))),
        (4, Response(ask("a", cached=False))),
        (4, Response(ask("a"), joined=(1,))),
        (4, Response(ask("a"), error=Disagreement("a", ((0,), (1,)), ("x", "y")))),
    ):
        cache = ResponseCache(capacity)
        cache.put(response, ask("a"))
        assert len(cache) == 0


@given(st.integers(0, 2**200))
def test_bits_of(mask: int) -> None:
    assert list(bits_of(mask)) == [bit for bit in range(201) if mask >> bit & 1]


def test_requests_are_compared_by_every_field_but_the_priority() -> None:
    """The fields are listed by hand, so that a new one must be listed, too."""
    usual = ask("w")
    others = {"name": "v", "kind": OpKind.BARRIER, "dtype": "int8", "itemsize": 1, "shape": (9,), "device": "cuda"}
    others |= {"reduction": "max", "root": 1, "prescale": 2.0, "postscale": 2.0, "splits": (1,), "batch": ("b", 1)}
    others |= {"cached": False}
    assert {field.name for field in fields(Request)} == {*others, "priority"}
    for name, value in others.items():
        assert replace(usual, **{name: value}) != usual, name
    assert replace(usual, priority=7) == usual
    assert hash(replace(usual, priority=7)) == hash(usual)
