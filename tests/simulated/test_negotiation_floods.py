"""A rank that asks for operations without end: what the others keep of it is bounded, and then the rank is refused."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest
from negotiators_by_hand import Negotiation, ask, names

from totalreduce.coordination import limits
from totalreduce.coordination.messages import Kind, encode
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.types import OpKind

#: Eighths of the real bounds, so that the tests are short.
ENTRIES, NUM_BYTES = 4096, 5 * 2**20


@pytest.fixture(autouse=True)
def smaller_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (limits._PENDING_MAX, limits._PENDING_BYTES_MAX) == (8 * ENTRIES, 8 * NUM_BYTES)
    monkeypatch.setattr(limits, "_PENDING_MAX", ENTRIES)
    monkeypatch.setattr(limits, "_PENDING_BYTES_MAX", NUM_BYTES)


def unbounded(negotiation: Negotiation, rank: int) -> None:
    """Make a rank hostile: it asks whatever its own allowance says, and keeps nothing of it."""
    negotiation.ranks[rank].submissions.allowances.take = lambda *_: True


FLOODS = {
    "short names": lambda index: ask(f"{index}"),
    "long names": lambda index: ask(f"{index}" + "x" * 1000),
    "long names beyond ASCII": lambda index: ask(f"{index}" + "\N{SNOWMAN}" * 300),
    "many dimensions": lambda index: ask(f"{index}", *range(1000, 1100)),
    "many splits": lambda index: ask(f"{index}", kind=OpKind.ALLTOALL, splits=tuple(range(1000, 1200))),
    "groups": lambda index: ask(f"{index}", batch=(f"{index}" + "x" * 1000, 1000 + index)),
}


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(flood, marks=[pytest.mark.slow] if flood not in ("short names", "many splits") else [])
        for flood in FLOODS
    ],
)
def test_a_flood_of_names_is_bounded_and_refused(flood: str) -> None:
    negotiation = Negotiation(2)
    unbounded(negotiation, 1)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="rank 1 asks for more operations than may wait for the other ranks"):  # noqa: PT012
        for turn in range(100):
            negotiation.submit(1, *(FLOODS[flood](200 * turn + index) for index in range(200)))
            negotiation.run()
            for kept in (
                negotiation.ranks[1].submissions.waiting,
                negotiation.asked[1],
                negotiation.sent,
            ):  # of the hostile rank, and the test's
                kept.clear()
    gc.collect()  # the refusal's traceback holds the last message
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert turn <= ENTRIES // 200
    assert taken < NUM_BYTES + 2**20
    assert len(negotiation.ranks[0].cycles.table) <= ENTRIES


def test_a_rank_is_refused_by_the_first_that_hears_it() -> None:
    """Requests of rank 3 travel by way of rank 2, which is no culprit: rank 2 refuses rank 3."""
    negotiation = Negotiation(4)
    unbounded(negotiation, 3)
    with pytest.raises(ProtocolError, match=r"^rank 3 asks for more operations") as caught:  # noqa: PT012
        for turn in range(100):
            negotiation.submit(3, *(ask(f"{turn} {index}") for index in range(1000)))
            negotiation.run()
    assert any(entry.frame.code.name == "_read_requests" for entry in caught.traceback)
    assert (
        negotiation.ranks[0].submissions.allowances._spent[3][0]
        == negotiation.ranks[2].submissions.allowances._spent[3][0]
        <= ENTRIES
    )


def test_a_rank_that_passes_on_too_much_is_refused_itself() -> None:
    negotiation = Negotiation(4)
    unbounded(negotiation, 2)
    unbounded(negotiation, 3)
    with pytest.raises(ProtocolError, match=r"^rank 3 \(passed on by rank 2\) asks for more operations"):  # noqa: PT012
        for turn in range(100):
            negotiation.submit(3, *(ask(f"{turn} {index}") for index in range(1000)))
            negotiation.run()


def test_more_requests_in_one_cycle_than_a_rank_sends() -> None:
    negotiation = Negotiation(2)
    negotiation.submit(1, ask("a"))
    negotiation.run()
    negotiation.submit(0, ask("b"))
    number = negotiation.ranks[0].cycles.inbox.number
    message = encode(Kind.REQUESTS, number, value=[[1, [ask(f"{i}").to_wire() for i in range(1025)], False]])
    with pytest.raises(ProtocolError, match="rank 1 sends requests as no correct peer does"):
        negotiation.ranks[0].receive(1, message, 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * 2000},
        {"batch": ("x" * 2000, 2)},
        {"dtype": "x" * 100},
        {"device": "x" * 100},
        {"reduction": "x" * 100},
        {"shape": (2**63,)},
        {"root": 10**4000},
        {"itemsize": 2**64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_request_is_bounded(change: dict[str, object]) -> None:
    negotiation = Negotiation(2)
    negotiation.submit(1, ask(**({"name": "a"} | change)))
    with pytest.raises(ProtocolError, match="rank 1 sends requests as no correct peer does"):
        negotiation.run()


def test_a_correct_rank_is_told_before_it_asks_for_too_much() -> None:
    negotiation = Negotiation(2)
    negotiation.submit(1, *(ask(f"{index}") for index in range(ENTRIES)))
    negotiation.run()
    with pytest.raises(ConfigurationError, match=rf"rank 1 has {ENTRIES} operations on which .* at most {ENTRIES} op"):
        negotiation.ranks[1].submit([ask("one more")], 0.0)
    assert "one more" not in negotiation.ranks[1].submissions.waiting
    negotiation.submit(0, *(ask(f"{index}") for index in range(ENTRIES)))
    assert len(names(negotiation.take())) == ENTRIES
    negotiation.submit_all(ask("one more"))
    assert names(negotiation.take()) == ["one more"]


def test_answers_give_the_allowance_back() -> None:
    """New names in every step, and errors among them; on the ranks between as well."""
    negotiation = Negotiation(5)
    for turn in range(6):
        for rank in range(5):
            negotiation.submit(rank, *(ask(f"{turn} {index}", 1 + (index == rank)) for index in range(800)))
        negotiation.take()
    assert all(set(rank.submissions.allowances._spent.values()) <= {(0, 0)} for rank in negotiation.ranks)
    assert not any(rank.submissions.allowances._costs for rank in negotiation.ranks)


def test_an_agreement_that_has_ended_keeps_nothing() -> None:
    negotiation = Negotiation(2)
    negotiation.submit(1, *(ask(f"{index}") for index in range(1000)))
    negotiation.run()
    negotiation.ranks[0].fail(ProtocolError("over"))
    assert not len(negotiation.ranks[0].cycles.table)
    assert not negotiation.ranks[0].submissions.allowances._spent


def test_only_answers_to_what_was_asked_are_kept() -> None:
    negotiation = Negotiation(3, stall_warning_s=1.0)
    negotiation.submit(0, ask("late"))
    negotiation.run()
    negotiation.tick(1.0)
    negotiation.ranks[0].receive(1, encode(Kind.ANSWER, 0, value=["late", *map(str, range(10_000))]), 1.0)
    assert negotiation.ranks[0]._stalls._inquiry.submitted == {"late": {1}}


@pytest.mark.parametrize(("world_size", "per_cycle"), [(4, 25), (64, 1)])
def test_large_groups_ask_for_less_at_once(world_size: int, per_cycle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of all ranks travel in one message to rank 0, whose size is bounded."""
    monkeypatch.setattr(limits, "_CYCLE_BYTES_MAX", 4 * 25 * ask("w00").memory_bytes)
    negotiation = Negotiation(world_size)
    names_asked = [f"w{index:02}" for index in range(30)]
    for rank in range(world_size):
        negotiation.submit(rank, *map(ask, names_asked))
    negotiation.run()
    assert all(
        [response.name for response, _ in negotiation.answers[rank]] == names_asked for rank in range(world_size)
    )
    messages = [each.message for each in negotiation.sent if each.kind is Kind.REQUESTS and each.source == 1]
    assert next(len(json.loads(message[10:])[0][1]) for message in messages) == per_cycle
