"""What no correct rank sends: a ``ProtocolError``, never another exception, never an endless loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from negotiators_by_hand import Negotiation, Sent, ask, group, names, phase_of

from totalreduce.coordination.messages import Kind, encode, split
from totalreduce.coordination.negotiator import Negotiator
from totalreduce.coordination.requests import Disagreement, Request, Response, respond
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.types import OpKind

REQUESTS = st.builds(
    Request,
    name=st.text(max_size=5),
    kind=st.sampled_from(
        [kind for kind in OpKind if kind not in (OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER)]
    ),
    dtype=st.sampled_from(["float32", "int8"]),
    itemsize=st.sampled_from([1, 4]),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    device=st.sampled_from(["cpu", "cuda"]),
    reduction=st.sampled_from(["", "sum"]),
    root=st.integers(0, 300),
    prescale=st.floats(allow_nan=False),
    postscale=st.floats(allow_nan=False) | st.integers(-5, 5),
    splits=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    batch=st.none() | st.tuples(st.text(max_size=3), st.integers(2, 9)),
    cached=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
)


@given(REQUESTS)
def test_requests_and_responses_travel(request: Request) -> None:
    wire = json.loads(json.dumps(request.to_wire()))
    assert Request.from_wire(wire) == request
    assert Request.from_wire(wire).priority == request.priority
    error = Disagreement("a", ((0, 2), (1,)), ("x", "y"))
    for response in (Response(request, ((1,), (2,)), None, (3,)), Response(request, error=error)):
        assert Response.from_wire(json.loads(json.dumps(response.to_wire()))) == response


def test_scales_that_nearly_agree_are_told_apart() -> None:
    first, second = ask("a", prescale=1 / 3), ask("a", prescale=0.333333)
    response = respond({0: first, 1: second}, 2, ())
    assert response.error is not None
    assert len(set(response.error.values)) == 2


def recorded(world_size: int) -> list[Sent]:
    """One message of every kind, and some more, as they are really sent."""
    negotiation = Negotiation(world_size, stall_warning_s=1.0, stall_abort_s=50.0)
    negotiation.submit_all(ask("a"), ask("b"), *group("g", (1,), (2,)))
    negotiation.take()
    for rank in range(world_size):
        negotiation.submit(rank, ask("a", 5 + rank), ask("c", rank, kind=OpKind.ALLGATHER))
    negotiation.take()
    negotiation.submit(0, ask("late"))
    negotiation.settle()
    negotiation.tick(2.0)
    negotiation.run()
    if world_size > 2:
        negotiation.join(1)
        negotiation.settle()
    negotiation.tick(60.0)
    leaving = Negotiation(world_size)
    leaving.submit(0, ask("a"))
    leaving.leave(world_size - 1, "enough")
    leaving.run()
    return negotiation.sent + leaving.sent


PHASES = ("IDLE", "VOTE", "INVALID", "GATHER", "joined")


def under_attack(phase: str, world_size: int, target: int) -> Negotiation:
    """Ranks that have just come to where the target is in some phase, or idle while rank 0 has joined."""
    negotiation = Negotiation(world_size, stall_warning_s=1.0)
    negotiation.submit_all(ask("a"), ask("b"), *group("g", (1,), (2,)))
    negotiation.take()
    if phase == "joined":
        negotiation.join(0)
        negotiation.settle()
    if phase in ("IDLE", "joined"):
        return negotiation
    for rank in range(world_size):
        negotiation.submit(rank, ask("a", 5 + rank), ask("c", rank, kind=OpKind.ALLGATHER))
    while phase_of(negotiation.ranks[target]) != phase:
        for pair in negotiation.wires:
            if phase_of(negotiation.ranks[target]) != phase:
                negotiation.move(*pair)
    return negotiation


def bombard(negotiation: Negotiation, target: int, peer: int, message: bytes) -> bool:
    """Whether it is refused, at once or later; anything else than a ``ProtocolError`` is a failure.

    Then everything must come to rest.
    """
    negotiation.honest = False
    try:
        negotiation.ranks[target].receive(peer, message, negotiation.now)
        negotiation.collect(target)
        negotiation.run()
        for _ in range(20):
            negotiation.tick(negotiation.now + 100.0)
            negotiation.run()
    except ProtocolError:
        return True
    return False


MALICE = [
    b"",
    b"\0" * 10,
    encode(Kind.VOTE, 0, 200, bits=1),
    encode(Kind.VOTE, 2**64 - 1, 0, bits=1),
    *[
        encode(kind, 0, value=value)
        for kind in (Kind.REQUESTS, Kind.RESPONSES, Kind.QUESTION, Kind.ANSWER, Kind.ABORT, Kind.LEAVE)
        for value in (
            None,
            3,
            "text",
            {},
            [],
            [1],
            [[1, 2, 3]],
            [[float("inf"), [], False]],
            [[1, 5, False]],
            [[1, [5], False]],
            [[1, [[]], False]],
            [[], [float("inf")]],
            [[], [0, 0]],
            [[], [7]],
            [[None], []],
            [[[None, [], None, []]], []],
            ["stall", "a", [float("inf")], 1.0, ""],
            ["stall", "a", 5, 1.0, ""],
            ["lost", float("inf"), ""],
            ["lost", [], ""],
            [["a", float("nan"), 5]],
            [["a", 10**400, 5]],
            [["a", 10**4000, 5]],
        )
    ],
    *[encode(kind, 1, value=0)[:10] + b"[" * depth + b"]" * depth for kind in Kind for depth in (5, 900, 990, 100_000)],
    *[encode(kind, 1, value=0)[:10] + body for kind in Kind for body in (b"\xff\xfe", b"{", b"9" * 5000, b"\0" * 9)],
]


@pytest.mark.parametrize(
    "phase",
    [phase if phase in ("IDLE", "INVALID") else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES],
)
def test_malice(phase: str) -> None:
    for world_size, target in ((2, 0), (2, 1), (3, 0), (3, 1)):
        for message in MALICE:
            for peer in set(range(world_size)) - {target}:
                negotiation = under_attack(phase, world_size, target)
                number = negotiation.ranks[target].cycles.inbox.number.to_bytes(8, "little")
                current = message if len(message) < 10 or message[9] else message[:2] + number + message[10:]
                bombard(negotiation, target, peer, current)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(PHASES), st.integers(0, 2), st.integers(0, 2), st.binary(max_size=60), st.booleans())
@example("IDLE", 0, 1, b"", False)
def test_random_bytes(phase: str, target: int, peer: int, noise: bytes, headed: bool) -> None:
    message = noise
    if headed and len(noise) > 2:  # random bodies behind headers that are looked at further
        message = encode(list(Kind)[noise[0] % len(Kind)], noise[1] % 3, noise[2] % 3, bits=0)[:10] + noise[3:]
    bombard(under_attack(phase, 3, target), target, peer, message)


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_messages_cut_off_and_altered(world_size: int) -> None:
    generator = random.Random(world_size)
    real = recorded(world_size)
    assert {sent.kind for sent in real} == set(Kind)
    refused = 0
    for sent in real:
        for trial in range(12):
            body = bytearray(sent.message)
            if trial < 3:
                body = body[: generator.randrange(len(body) + 1)]
            elif trial < 6:
                place = generator.randrange(len(body))
                body[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
            elif trial < 9:  # one figure, bracket or quotation mark for another: still JSON, often
                places = [place for place in range(10, len(body)) if chr(body[place]) in '0123456789[]",']
                if places:
                    body[generator.choice(places)] = ord(generator.choice('0123456789 []",'))
            negotiation = under_attack(generator.choice(PHASES), world_size, sent.target)
            number = negotiation.ranks[sent.target].cycles.inbox.number
            if len(body) >= 10 and trial % 2:
                body[2:10] = number.to_bytes(8, "little")
            refused += bombard(negotiation, sent.target, sent.source, bytes(body))
    assert refused > 100


def test_a_vote_that_nobody_casts_does_not_begin_cycles_for_ever() -> None:
    negotiation = Negotiation(2)
    with pytest.raises(ProtocolError):
        negotiation.ranks[0].receive(1, encode(Kind.VOTE, 0, 7, bits=1), 0.0)
    alone = Negotiation(1).ranks[0]
    with pytest.raises(ProtocolError):
        alone.receive(0, encode(Kind.VOTE, 0, 0, bits=1), 0.0)


@pytest.mark.parametrize("kind", [Kind.INVALID, Kind.RESPONSES, Kind.REQUESTS])
def test_what_the_cycle_had_no_part_for(kind: Kind) -> None:
    """It must not stay behind and draw the rank into one cycle after the other."""
    negotiation = Negotiation(2)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    target = 1 if kind is Kind.RESPONSES else 0
    negotiation.submit_all(ask("a"))
    number = negotiation.ranks[target].cycles.inbox.number
    value = [[1, [], False]] if kind is Kind.REQUESTS else []
    message = encode(kind, number, bits=0) if kind is Kind.INVALID else encode(kind, number, value=value)
    negotiation.ranks[target].receive(1 - target, message, 0.0)
    with pytest.raises(ProtocolError):
        negotiation.move(1 - target, target)


@pytest.mark.parametrize("bits", [0b10, 0b100, 0b11])
def test_out_of_date_is_only_what_is_remembered(bits: int) -> None:
    negotiation = Negotiation(2)
    negotiation.submit_all(ask("a"), ask("b"))
    negotiation.take()
    for rank in range(2):
        negotiation.submit(rank, ask("b", 5 + rank))  # an error: its bit becomes free
    negotiation.take()
    assert negotiation.snapshot() == [("a", 0)]
    negotiation.submit_all(ask("a", 9))
    while phase_of(negotiation.ranks[0]) != "INVALID":
        negotiation.move(1, 0)
    with pytest.raises(ProtocolError):
        negotiation.ranks[0].receive(1, encode(Kind.INVALID, negotiation.ranks[0].cycles.inbox.number, bits=bits), 0.0)


def test_another_ranks_part() -> None:
    negotiation = Negotiation(4)
    negotiation.submit(0, ask("a"))
    negotiation.run()
    negotiation.submit(0, ask("b"))
    for peer, message in (
        (1, encode(Kind.VOTE, 1, 1, bits=7)),  # four ranks have one round
        (3, encode(Kind.REQUESTS, 1, value=[])),  # rank 3 speaks to rank 2
        (1, encode(Kind.RESPONSES, 1, value=[[], []])),
    ):
        with pytest.raises(ProtocolError):
            negotiation.ranks[0].receive(peer, message, 0.0)
    negotiation.ranks[0].receive(2, encode(Kind.VOTE, 1, 0, bits=7), 0.0)
    with pytest.raises(ProtocolError, match="twice"):
        negotiation.ranks[0].receive(2, encode(Kind.VOTE, 1, 0, bits=7), 0.0)


def test_a_vote_from_a_rank_that_has_no_part_in_the_round() -> None:
    negotiation = Negotiation(6)
    negotiation.submit(0, ask("a"))
    negotiation.run()
    negotiation.submit(0, ask("b"))
    for peer, round_ in ((1, 0), (2, 0), (3, 1)):  # the votes of 5, 4 and 3 come in round 0, that of 2 in round 1
        with pytest.raises(ProtocolError, match="which is another rank's part"):
            negotiation.ranks[0].receive(peer, encode(Kind.VOTE, 1, round_, bits=7), 0.0)
    for peer, round_ in ((5, 0), (4, 0), (3, 0), (2, 1)):
        negotiation.ranks[0].receive(peer, encode(Kind.VOTE, 1, round_, bits=7), 0.0)


def answered(negotiator: Negotiator, *responses: Response, joined: tuple[int, ...] = ()) -> Callable[[], None]:
    value = [[response.to_wire() for response in responses], joined]
    return lambda: negotiator.receive(0, encode(Kind.RESPONSES, negotiator.cycles.inbox.number, value=value), 0.0)


def test_answers_that_fit_no_question() -> None:
    def gathering() -> Negotiator:
        negotiation = Negotiation(2)
        negotiation.submit_all(ask("known"))
        negotiation.take()
        negotiation.submit_all(ask("asked"))
        negotiation.move(0, 1)
        return negotiation.ranks[1]

    for responses in (
        [Response(ask("asked")), Response(ask("asked"))],
        [Response(ask("never asked"))],
        [Response(ask("known"))],
    ):
        with pytest.raises(ProtocolError):
            answered(gathering(), *responses)()
    negotiator = gathering()
    answered(negotiator, Response(ask("asked")))()
    assert names(negotiator.cycles.pop_responses()) == ["asked"]


def test_garbage_is_not_passed_on() -> None:
    """Or who sits further down the tree would take the messenger for the culprit."""
    negotiation = Negotiation(8)
    negotiation.submit_all(ask("a"))
    for _ in range(3):
        for pair in negotiation.wires:
            negotiation.move(*pair)
            if negotiation.ranks[4].cycles._cycle is not None and negotiation.ranks[4].cycles._cycle.has_sent_requests:
                break
    four = negotiation.ranks[4]
    while not four.cycles._cycle.has_sent_requests:  # type: ignore[union-attr]
        for pair in negotiation.wires:
            wire = negotiation.wires[pair]
            if wire and (pair[0] != 0 or split(wire[0])[0] is not Kind.RESPONSES):
                negotiation.move(*pair)
    with pytest.raises(ProtocolError):
        four.receive(0, encode(Kind.RESPONSES, 0, value=[[[None]], []]), 0.0)
    assert not four.outbox
