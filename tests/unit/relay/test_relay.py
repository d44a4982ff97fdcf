"""The relay over two TCP transports, driven step by step by one thread: which message is next, and who reads it."""

import contextlib
import dataclasses
import itertools
import random
from array import array
from collections import deque

import numpy as np
import pytest
import torch
from tcp_ranks import CONFIG, Message, Rank, settle, turn

from totalreduce.engine.engine import Engine
from totalreduce.engine.relay_plan import RelayPlan, Standing, Sum, plan_of
from totalreduce.engine.relaying import Order, RelayTask
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Flag, Frame, Header
from totalreduce.foundation.partition import PIECE_BYTES_MIN, exchange_window
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.kernels import combine
from totalreduce.kernels import relay as words
from totalreduce.kernels.element_types import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    MAX,
    MIN,
    PRODUCT,
    SUM,
)
from totalreduce.kernels.relay import ROW, TRACK
from totalreduce.relay.relay import Relay, RelayedOperation, RelaySettings
from totalreduce.schedules.actions import Send
from totalreduce.schedules.spec import LinkModel
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.tcp import TcpTransport, listen

SIGNATURE = bytes(range(24))
BULK_BYTES = 64


class User(Rank):
    """A rank with a relay: what is in ``waiting`` is handed over when the relay can take it."""

    def __init__(self, transport, *, is_fifo=False, starvation_limit=64):
        super().__init__(transport)
        self.waiting, self.relay_has, self.ended, self.traffic, self.moved = deque(), {}, [], [], []
        prologue = Header(Frame.DATA, 0).pack()[:8]
        settings = RelaySettings(prologue, BULK_BYTES, is_fifo, starvation_limit)
        self.relay = transport.use_relay(lambda port: Relay(port, settings, self))
        self.rival_order = Order(is_promoted=False, priority=0, sequence=0)

    @property
    def has_candidates(self):
        return bool(self.waiting)

    def hand_over(self):
        for task in list(self.waiting):
            if self.relay.prepare_to_take(task.plan):
                self.waiting.remove(task)
                self.relay_has[task.owner] = self.relay.take(task)

    def order_of_bulk(self, peer):
        return self.rival_order if self.bulk else None

    def relayed(self, peer, traffic):
        self.traffic.append(traffic)

    def relay_moved(self, task, used, reached):
        self.moved.append((task.owner, used, reached))

    def relay_ended(self, task):
        self.ended.append(task.owner)


def make_ranks(**options):
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    transports = [TcpTransport(rank, addresses, door, identity, CONFIG) for rank, door in enumerate(doors)]
    return User(transports[0], **options), Rank(transports[1])


@pytest.fixture
def pair(request):
    """A rank with a relay and one without; bulk has gone both ways."""
    made = make_ranks(**getattr(request, "param", {}))
    for rank in made:
        rank.post_bulk(Message(1, 1000))
    turn(made, lambda: all(rank.inbox == [1] for rank in made))
    settle(made)
    yield made
    for rank in made:
        if not rank.left:
            rank.transport.close(0.0)


def row(action, step, start, num_bytes, *, manner=0, into=(0, None)):
    """Return a row of the only buffer; ``into``: the buffer and the first byte of the result, if they are others."""
    return action, manner, step, 0, num_bytes, 0, start, into[0], start if into[1] is None else into[1]


#: The bytes of an element.
ITEMSIZES = {FLOAT32: 4, FLOAT64: 8, INT32: 4, INT64: 8, BFLOAT16: 2, FLOAT16: 2}


def task(
    number,
    rows,
    buffer,
    *,
    priority=0,
    promoted=False,
    kind=FLOAT32,
    reduction=SUM,
    divisor=1,
    lanes=1,
    slots=(0, 0),
    has_states=False,
):
    """Return a task with the same rows in every lane, for messages with the operation id ``number``.

    ``slots``: the number and the length of the slots; the first one is that of a sum.
    """
    sends = [each[0] == words.SEND for each in rows]
    lane_rows = [array("q", [word for each in rows for word in each]) for _ in range(lanes)]
    plan = RelayPlan(
        peers=(1,),
        near=frozenset(),
        sources=frozenset({1} if False in sends else ()),
        targets=frozenset({1} if True in sends else ()),
        rows=lane_rows,
        tracks=words.tracks_of(lane_rows, [SIGNATURE] * lanes, of_blocks=False),
        has_states=has_states,
        ahead=0,
        standing=lambda operation, waiting: None,
        kind=kind,
        itemsize=ITEMSIZES[kind],
        reduction=reduction,
        divisor=divisor,
        sums=(),
        slots=slots,
    )
    receives, leaves = (sends.index(what) if what in sends else len(rows) for what in (False, True))
    positions = [(receives, leaves)] * lanes
    order = Order(promoted, priority, number)
    standing = Standing(positions, [], [])
    return RelayTask(plan, (number, 0), order, [memoryview(buffer).cast("B")], standing, [], (), number)


def block_task(number, buffer, *, ahead, held_back=()):
    """Return a task that sends the first half of a buffer to rank 1 and receives the second, 1,000 bytes at a time."""
    half = memoryview(buffer).nbytes // 2
    rows = [
        array("q", [word for start in range(0, half, 1000) for word in row(what, 1, begin + start, 1000)])
        for what, begin in ((words.SEND, 0), (words.REPLACE, half))
    ]
    count = half // 1000
    made = task(number, [row(words.SEND, 1, 0, 1000), row(words.REPLACE, 1, 0, 1000)], buffer)
    track_words = words.tracks_of(rows, [SIGNATURE] * 2, of_blocks=True)
    plan = dataclasses.replace(made.plan, rows=rows, tracks=track_words, ahead=ahead)
    return made._replace(plan=plan, standing=Standing([(count, 0), (0, count)], [], []), held_back=held_back)


class Part(Message):
    """A message of an operation of the relay."""

    def __init__(self, number, step, body, *, lane=0, flags=0, signature=SIGNATURE):
        self.number, self.body = number, memoryview(body).cast("B")
        self.header = Header.pack_data(0, (number, 0), lane, step, flags, len(self.body), signature, 0)


def accept_all(rank):
    """Have a rank keep the headers and the bodies of what arrives."""
    arrived = []

    def delivered(box):
        arrived.append((box.number, box.header.step, bytes(box.view)))

    def accept(peer, header, lease=None):
        box = type("Box", (), {"lease": None})()
        box.number, box.header, box.view = header.operation, header, memoryview(bytearray(header.body_bytes))
        return box

    rank.delivered, rank.accept = delivered, accept
    return arrived


def test_a_message_is_added_and_goes_on(pair):
    user, peer = pair
    arrived = accept_all(peer)
    mine, theirs = np.arange(1000, dtype=np.float32), np.full(1000, 0.5, np.float32)
    result = np.full(1000, 7, np.float32)
    rows = [
        row(words.SEND, 0, 0, 2000),
        row(words.COMBINE_LAST, 0, 2000, 2000),
        row(words.SEND, 1, 2000, 2000),
        row(words.REPLACE, 1, 0, 2000),
    ]
    buffer = mine.copy()
    user.waiting.append(task(9, rows, buffer, divisor=2))
    peer.post_bulk(Part(9, 0, theirs[:500]), Part(9, 1, result[:500]))
    turn(pair, lambda: user.ended == [9] and len(arrived) == 2)
    expected = np.concatenate([result[:500], (mine[500:] + 0.5) / np.float32(2)])
    np.testing.assert_array_equal(buffer, expected)
    assert arrived == [(9, 0, mine[:500].tobytes()), (9, 1, expected[500:].tobytes())]
    assert sum(each.messages_in for each in user.traffic) == sum(each.messages_out for each in user.traffic) == 2
    assert sum(each.bytes_out for each in user.traffic) == 2 * (64 + 2000)
    assert user.inbox == [1], "the rank itself has seen no message of it"
    assert not user.relay.is_busy()


def sums_task(number, buffer, *, lanes, handed=()):
    """Return a task whose lanes add what comes to 1,000 bytes each, not in the tensor, and send the sums."""
    made = task(number, [row(words.COMBINE, 0, 0, 1000), row(words.SEND, 1, 0, 1000)], buffer)
    rows = [
        array(
            "q",
            [
                *(words.COMBINE, 0, 0, 0, 1000, 0, 1000 * lane, words.OF_SUMS, 1024 * lane),
                *(words.SEND, words.GIVES_BACK, 1, 0, 1000, 0, 1000 * lane, words.OF_SUMS, 1024 * lane),
            ],
        )
        for lane in range(lanes)
    ]
    sums = [Sum((0, lane), 0, 1000, 0, 1) for lane in range(lanes)]
    track_words = words.tracks_of(rows, [SIGNATURE] * lanes, of_blocks=False)
    plan = dataclasses.replace(made.plan, rows=rows, tracks=track_words, sums=sums, slots=(lanes, 1024))
    positions = [(2, 1) if lane in dict(handed) else (0, 1) for lane in range(lanes)]
    standing = Standing(positions, [], [])
    return made._replace(plan=plan, standing=standing, sums=[(lane, memoryview(body)) for lane, body in handed])


@pytest.mark.parametrize("at_once", [False, True])
def test_sums_outside_the_tensor_have_memory_until_they_have_left(pair, at_once):
    """Also a sum that was handed over, here that of lane 2. The memory of one that has left is that of the next one."""
    user, peer = pair
    arrived = accept_all(peer)
    lanes, handed = 8, np.full(250, 77, np.float32)
    mine = np.arange(250 * lanes, dtype=np.float32)
    buffer = mine.copy()
    user.waiting.append(sums_task(9, buffer, lanes=lanes, handed=[(2, handed.tobytes())]))
    expected = [handed.tobytes()]
    turn(pair, lambda: [body for _, _, body in arrived] == expected)
    for lane in [lane for lane in range(lanes) if lane != 2]:
        theirs = np.full(250, 1000 * lane, np.float32)
        peer.post_bulk(Part(9, 0, theirs, lane=lane))
        expected.append((mine[250 * lane : 250 * (lane + 1)] + theirs).tobytes())
        if not at_once:
            turn(pair, lambda: len(arrived) == len(expected))
    turn(pair, lambda: user.ended == [9] and len(arrived) == lanes)
    assert [body for _, _, body in arrived] == expected
    np.testing.assert_array_equal(buffer, mine)
    used = user.relay_has[9].touched_bytes
    assert used == 1024 if not at_once else 1024 <= used <= 1024 * lanes


def blocks_of(num_rows):
    """Return a buffer for ``block_task``, the block that leaves, and the one that will come, row by row."""
    mine, theirs = np.arange(250 * num_rows, dtype=np.float32), -np.arange(250 * num_rows, dtype=np.float32)
    buffer = np.concatenate([mine, np.zeros_like(theirs)])
    return buffer, mine, np.split(theirs, num_rows)


def test_a_block_leaves_only_so_far_ahead_of_what_has_come(pair):
    user, peer = pair
    arrived = accept_all(peer)
    buffer, mine, theirs = blocks_of(6)
    user.waiting.append(block_task(9, buffer, ahead=2))
    for index, body in enumerate(theirs):
        settle(pair)
        assert len(arrived) == min(2 + index, 6)
        assert user.relay_has[9].num_received() == index
        peer.post_bulk(Part(9, 1, body, lane=index))
    turn(pair, lambda: user.ended == [9])
    np.testing.assert_array_equal(buffer, np.concatenate([mine, *theirs]))
    assert b"".join(body for _, _, body in arrived) == mine.tobytes()


def test_nothing_leaves_to_a_peer_that_has_not_submitted_the_operation(pair):
    """What the peer sends is received, and an operation without this limit is not held up."""
    user, peer = pair
    arrived = accept_all(peer)
    buffer, mine, theirs = blocks_of(3)
    user.waiting.append(block_task(9, buffer, ahead=3, held_back=(1,)))
    user.waiting.append(task(8, [row(words.SEND, 0, 0, 1000)], mine))
    peer.post_bulk(*(Part(9, 1, body, lane=index) for index, body in enumerate(theirs)))
    turn(pair, lambda: user.relay_has and user.relay_has[9].num_received() == 3)
    settle(pair)
    assert [number for number, _, _ in arrived] == user.ended == [8]
    relayed = user.relay_has[9]
    assert list(relayed.held_back) == [1]
    assert relayed.needs(1)
    assert not relayed.needs(0)
    relayed.posted(1)
    assert not relayed.held_back
    turn(pair, lambda: user.ended == [8, 9])
    turn(pair, lambda: len(arrived) == 4)
    assert b"".join(body for number, _, body in arrived if number == 9) == mine.tobytes()
    np.testing.assert_array_equal(buffer, np.concatenate([mine, *theirs]))


def test_the_rank_itself_may_receive_the_next_message_of_a_block(pair):
    """One whose header was half-way in when the operation was taken. The relay goes on behind it."""
    user, peer = pair
    accept_all(peer)
    buffer, _, theirs = blocks_of(2)
    user.waiting.append(block_task(9, buffer, ahead=1))
    turn(pair, lambda: user.relay_has)
    relayed = user.relay_has[9]
    wrong = [(1, 1, 1), (1, 0, 0), (0, 0, 1), (1, 2, 1)]
    assert [relayed.accepts(*message) for message in wrong] == [False] * 4
    assert relayed.accepts(1, 0, 1)
    relayed.receive(1, 0, 1, None)
    assert relayed.accepts(1, 1, 1)
    peer.post_bulk(Part(9, 1, theirs[1], lane=1))
    turn(pair, lambda: user.ended == [9])
    np.testing.assert_array_equal(buffer[750:], theirs[1])
    assert not buffer[500:750].any(), "the body that the rank has received is not the relay's to write"


def test_a_message_of_a_block_before_its_turn_is_left_to_the_rank(pair):
    user, peer = pair
    refused, _ = accept_all(user), accept_all(peer)
    buffer, _, theirs = blocks_of(2)
    user.waiting.append(block_task(9, buffer, ahead=1))
    turn(pair, lambda: user.relay_has)
    peer.post_bulk(Part(9, 1, theirs[1], lane=1), Part(9, 1, theirs[0], lane=0), Part(9, 1, theirs[1], lane=1))
    turn(pair, lambda: user.ended == [9])
    assert refused == [(9, 1, theirs[1].tobytes())]
    np.testing.assert_array_equal(buffer[500:], np.concatenate(theirs))


@pytest.mark.parametrize(
    ("kind", "dtype", "reduction", "function"),
    [
        (FLOAT32, np.float32, PRODUCT, np.multiply),
        (FLOAT64, np.float64, SUM, np.add),
        (INT32, np.int32, MIN, np.minimum),
        (INT64, np.int64, MAX, np.maximum),
    ],
)
@pytest.mark.parametrize("count", [1, 100_001])
def test_every_reduction_of_bodies_that_come_in_pieces(pair, kind, dtype, reduction, function, count):
    user, peer = pair
    generator = np.random.default_rng(count)
    mine, theirs = ((generator.random(count) * 100 - 50).astype(dtype) for _ in range(2))
    buffer, body = mine.copy(), theirs.copy()
    rows = [row(words.COMBINE, 0, 0, buffer.nbytes)]
    user.waiting.append(task(9, rows, buffer, kind=kind, reduction=reduction))
    # By hand, so that an element is cut in two.
    turn(pair, lambda: user.relay_has)
    connection = user.relay._comes_by(1)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    stream = Part(9, 0, body).header + body.tobytes()
    sizes = random.Random(count)
    sock.setblocking(True)
    while stream:
        size = sizes.choice([1, 3, 63, 64, 65, 4097, 100_003])
        sock.sendall(stream[:size])
        stream = stream[size:]
        user.transport.wait(0.01)
        user.transport.progress()
    sock.setblocking(False)
    turn((user,), lambda: user.ended == [9])
    np.testing.assert_array_equal(buffer, function(mine, theirs))
    assert connection.incoming.is_between_messages


#: By kind: the element type of the kernels, and that of torch.
HALVES = {BFLOAT16: (DType.BFLOAT16, torch.bfloat16), FLOAT16: (DType.FLOAT16, torch.float16)}


def receive_halves(pair, mine, theirs, num_results, *, action, manner, **options):
    """Return the bytes of the results of a message of half types, or of their sums, that comes in pieces.

    ``mine`` has the bytes with which it is combined, and room for the results behind them.
    """
    user, peer = pair
    buffer = np.concatenate([mine, np.zeros(num_results, np.uint8)])
    made = row(action, 0, 0, len(theirs), manner=manner, into=(0, len(mine)))
    user.waiting.append(task(9, [made], buffer, **options))
    turn(pair, lambda: user.relay_has)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    stream, sizes = Part(9, 0, theirs).header + theirs.tobytes(), random.Random(len(theirs))
    sock.setblocking(True)
    while stream:
        size = sizes.choice([1, 3, 63, 65, 4097, 100_003])
        sock.sendall(stream[:size])
        stream = stream[size:]
        user.transport.wait(0.0)
        user.transport.progress()
    sock.setblocking(False)
    turn((user,), lambda: user.ended == [9])
    np.testing.assert_array_equal(buffer[: len(mine)], mine)
    return buffer[len(mine) :]


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("wide", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize(("reduction", "divisor"), [(SUM, 3), (PRODUCT, 1)])
def test_half_types_have_the_bits_of_the_kernels(pair, kind, wide, reduction, divisor):
    """The message, what it is combined with, and the result may each be of the half type, or float32."""
    dtype, half = HALVES[kind]
    (body_wide, local_wide, result_wide), count = wide, 30_011
    manner = words.WIDE_BODY * body_wide + words.WIDE_LOCAL * local_wide + words.WIDE_RESULT * result_wide
    generator = torch.Generator().manual_seed(manner)
    theirs, mine = (
        torch.randn(count, generator=generator).to(torch.float32 if is_wide else half)
        for is_wide in (body_wide, local_wide)
    )
    types = [DType.FLOAT32 if is_wide else dtype for is_wide in wide]
    expected = np.zeros(count * types[2].itemsize, np.uint8)
    combine(
        ReduceOp.AVG if reduction is SUM else ReduceOp.PRODUCT,
        memoryview(as_bytes(mine)),
        memoryview(as_bytes(theirs)),
        memoryview(expected),
        local_dtype=types[1],
        incoming_dtype=types[0],
        destination_dtype=types[2],
        divisor=divisor,
    )
    options = {"kind": kind, "reduction": reduction, "divisor": divisor}
    result = receive_halves(
        pair, as_bytes(mine), as_bytes(theirs), len(expected), action=words.COMBINE_LAST, manner=manner, **options
    )
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", HALVES)
def test_every_half_is_widened_and_rounded_to_itself(pair, kind):
    """Multiplied by one, each of all 65,536; what is not a number stays so."""
    _, half = HALVES[kind]
    every = torch.from_numpy(np.arange(65_536, dtype=np.uint16).view(np.int16)).view(half)
    options = {"kind": kind, "reduction": PRODUCT, "action": words.COMBINE_LAST, "manner": 0}
    result = receive_halves(pair, as_bytes(torch.ones(65_536, dtype=half)), as_bytes(every), 2 * 65_536, **options)
    numbers, kept = torch.from_numpy(result).view(half), ~every.isnan()
    assert torch.equal(numbers[kept].view(torch.int16), every[kept].view(torch.int16))
    assert numbers[~kept].isnan().all()


@pytest.mark.parametrize("kind", HALVES)
def test_sums_are_rounded_to_the_nearest_half_and_the_even_one_of_two(pair, kind):
    """Every float32 that is a half, lies between two of them, or next to that, with both signs; and too large ones."""
    half = HALVES[kind][1]
    every = torch.from_numpy(np.arange(32_768, dtype=np.uint16).view(np.int16)).view(half)
    finite = every[every.isfinite()].float()
    between = (finite.double() + torch.cat([finite[1:], finite[-1:] * 2]).double()).div(2).float()
    near = [torch.nextafter(between, torch.tensor(limit)) for limit in (0.0, torch.inf)]
    extreme = torch.tensor([1e-45, 1e-40, 3e38, torch.inf, 65_519.0, 65_520.0])
    values = torch.cat([finite, between, *near, extreme])
    values = torch.cat([values, -values])
    ones = as_bytes(torch.ones(len(values), dtype=half))
    expected = values.to(half)
    options = {"kind": kind, "reduction": PRODUCT, "action": words.COMBINE_LAST, "manner": words.WIDE_BODY}
    result = receive_halves(pair, ones, as_bytes(values), 2 * len(values), **options)
    assert torch.equal(torch.from_numpy(result).view(torch.int16), expected.view(torch.int16))


def test_bodies_that_come_before_their_turn_are_added_in_the_order_of_the_rows(pair):
    """Such as messages of several sources. One that replaces bytes, and may do so at any time, waits for nothing."""
    user, peer = pair
    arrived = accept_all(peer)
    generator = np.random.default_rng(1)
    bodies = [(generator.random(250) * 10.0 ** (3 * step)).astype(np.float32) for step in range(5)]
    buffer = bodies[0].copy()
    rows = [
        *(row(words.COMBINE, step, 0, 1000) for step in (1, 2)),
        row(words.COMBINE_LAST, 3, 0, 1000),
        row(words.SEND, 5, 0, 1000),
        row(words.REPLACE, 4, 1000, 1000, manner=words.ANYTIME),
        row(words.REPLACE, 6, 2000, 1000),
    ]
    buffer = np.concatenate([bodies[0], np.zeros(500, np.float32)])
    user.waiting.append(task(9, rows, buffer, divisor=2, slots=(5, 1024), has_states=True))
    turn(pair, lambda: user.relay_has)
    relayed = user.relay_has[9]
    for count, step in enumerate((3, 4, 2), 1):
        peer.post_bulk(Part(9, step, bodies[step]))
        turn(pair, lambda count=count: relayed.num_received() == count)
    peer.post_bulk(Part(9, 6, bodies[1]))
    turn(pair, lambda: relayed.num_received() == 4)
    np.testing.assert_array_equal(buffer, np.concatenate([bodies[0], bodies[4], np.zeros(250, np.float32)]))
    assert relayed.needs(1)
    assert relayed.touched_bytes == 3 * 1024
    refused = accept_all(user)
    peer.post_bulk(Part(9, 2, bodies[0]), Part(9, 1, bodies[1]))
    turn(pair, lambda: user.ended == [9] and len(arrived) == 1)
    total = (((bodies[0] + bodies[1]) + bodies[2]) + bodies[3]) / np.float32(2)
    np.testing.assert_array_equal(buffer, np.concatenate([total, bodies[4], bodies[1]]))
    assert arrived == [(9, 5, total.tobytes())]
    assert refused == [(9, 2, bodies[0].tobytes())], "a message that came before is not read a second time"


def near_task(number, buffer):
    """Return a task that adds what rank 2 sends, then what rank 1 sends, and sends the sum to both.

    The engine exchanges the messages with rank 2.
    """
    rows = [
        (words.COMBINE, 0, 0, 1, 1000, 0, 0, 0, 0),
        (words.COMBINE_LAST, 0, 1, 0, 1000, 0, 0, 0, 0),
        (words.SEND, 0, 2, 1, 1000, 0, 0, 0, 0),
        (words.SEND, 0, 2, 0, 1000, 0, 0, 0, 0),
    ]
    made = task(number, rows, buffer, slots=(2, 1024), has_states=True)
    return made._replace(plan=dataclasses.replace(made.plan, peers=(1, 2), near=frozenset({2})))


@pytest.mark.parametrize("far_first", [False, True])
def test_messages_with_ranks_of_the_same_host_are_the_engines(pair, far_first):
    """It gives the body to the relay, which says when it has used it, and when the message to the rank may leave."""
    user, peer = pair
    arrived = accept_all(peer)
    mine, near, far = ((np.arange(250) + 1e6 * number).astype(np.float32) / 3 for number in range(3))
    buffer = mine.copy()
    user.waiting.append(near_task(9, buffer))
    turn(pair, lambda: user.relay_has)
    relayed = user.relay_has[9]
    if far_first:
        peer.post_bulk(Part(9, 1, far))
        turn(pair, lambda: relayed.num_received() == 1)
    assert [relayed.accepts(*message) for message in [(2, 0, 1), (2, 1, 0), (1, 0, 0)]] == [False] * 3
    assert relayed.accepts(2, 0, 0)
    relayed.receive(2, 0, 0, memoryview(near).cast("B"))
    assert not relayed.accepts(2, 0, 0), "it has come"
    settle(pair)
    if not far_first:
        assert user.moved == [(9, [(0, 0)], [])]
        assert relayed.needs(1)
        peer.post_bulk(Part(9, 1, far))
    turn(pair, lambda: user.ended == [9] and len(arrived) == 1)
    np.testing.assert_array_equal(buffer, (mine + near) + far)
    assert arrived == [(9, 2, buffer.tobytes())]
    assert [place for _, used, _ in user.moved for place in used] == [(0, 0)]
    assert [place for _, _, reached in user.moved for place in reached] == [(0, 2)]


def test_a_body_that_waits_for_its_turn_is_forgotten_when_the_operation_fails(pair):
    user, peer = pair
    buffer = np.zeros(250, np.float32)
    rows = [row(words.COMBINE_LAST, step, 0, 1000) for step in (1, 2)]
    user.waiting.append(task(9, rows, buffer, slots=(2, 1024), has_states=True))
    turn(pair, lambda: user.relay_has)
    peer.post_bulk(Part(9, 2, np.ones(250, np.float32)))
    turn(pair, lambda: user.relay_has[9].num_received() == 1)
    user.relay_has[9].fail()
    user.transport.progress()
    refused = accept_all(user)
    peer.post_bulk(Part(9, 1, np.ones(250, np.float32)))
    turn(pair, lambda: refused)
    assert not buffer.any()
    assert not user.relay._operations


def test_heartbeats_between_messages_and_headers_in_pieces(pair):
    user, peer = pair
    buffers = [np.zeros(4, np.float32) for _ in range(3)]
    for number, buffer in enumerate(buffers, 10):
        user.waiting.append(task(number, [row(words.REPLACE, 0, 0, 16)], buffer))
    turn(pair, lambda: len(user.relay_has) == 3)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    stream = b""
    for number in (12, 10, 11):
        part = Part(number, 0, np.full(4, number, np.float32))
        stream += b"+" * (number - 9) + part.header + part.body
    for byte in range(len(stream)):
        sock.send(stream[byte : byte + 1])
        user.transport.wait(0.0)
        user.transport.progress()
    turn((user,), lambda: len(user.ended) == 3)
    assert sorted(user.ended) == [10, 11, 12]
    for number, buffer in enumerate(buffers, 10):
        assert buffer.tolist() == [number] * 4


def test_messages_that_come_end_no_wait_for_the_rank_itself(pair):
    """The relay only receives by this connection. The kernel reports with all bytes that the socket also takes some."""
    user, peer = pair
    buffer = np.zeros(1000, np.float32)
    user.waiting.append(task(9, [row(words.REPLACE, step, 0, 4000) for step in range(30)], buffer))
    turn(pair, lambda: user.relay_has)
    settle(pair)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    for step in range(29):
        part = Part(9, step, np.ones(1000, np.float32))
        sock.send(part.header + bytes(part.body))
        user.transport.wait(0.005)
        assert not user.transport._poller.events
    assert user.relay_has[9].positions() == [(29, 30)]


def test_messages_that_no_lane_expects_are_left_to_the_rank(pair):
    """Other operations, another signature, another step and another length: none of them changes the tensor."""
    user, peer = pair
    arrived, buffer = accept_all(user), np.zeros(25, np.float32)
    user.waiting.append(task(9, [row(words.REPLACE, 3, 0, 100)], buffer))
    turn(pair, lambda: user.relay_has)
    body = np.ones(25, np.float32)
    others = [
        Message(5, 3000),
        Part(9, 3, body, signature=bytes(24)),
        Part(9, 2, body),
        Part(9, 3, body[:24]),
        Part(9, 3, body, lane=1),
        Part(9, 3, body, flags=128),
        Message(6, 0, Frame.POSTED),
    ]
    peer.post_bulk(*others, Part(9, 3, body), Message(7, 100))
    turn(pair, lambda: user.ended == [9] and len(arrived) == len(others) + 1)
    assert [number for number, _, _ in arrived] == [5, 9, 9, 9, 9, 9, 6, 7]
    assert buffer.tolist() == [1.0] * 25


@pytest.mark.parametrize("cut", [1, 20, 63, 64])
def test_the_beginning_of_a_header_after_the_last_operation_is_not_lost(pair, cut):
    """The function has read it when the operation ends. The rest comes when the relay has nothing to do."""
    user, peer = pair
    buffer = np.zeros(25, np.float32)
    user.waiting.append(task(9, [row(words.REPLACE, 0, 0, 100)], buffer))
    turn(pair, lambda: user.relay_has)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    part, other = Part(9, 0, np.ones(25, np.float32)), Message(5, 300)
    stream = other.header + bytes(other.body)
    sock.send(part.header + bytes(part.body) + stream[:cut])
    user.transport.wait(1.0)  # without a turn of ``progress``, which might look first
    turn((user,), lambda: user.ended == [9])
    assert not user.relay._operations
    sock.send(stream[cut:])
    turn((user,), lambda: user.inbox == [1, 5])
    assert not user.relay.is_busy()
    assert not user.lost


def test_a_refused_header_is_not_read_twice_by_the_function(pair):
    """A second thread may call the function before the header is given back."""
    user, peer = pair
    buffer = np.zeros(25, np.float32)
    user.waiting.append(task(9, [row(words.REPLACE, 0, 0, 100)], buffer))
    turn(pair, lambda: user.relay_has)
    arrived = accept_all(user)
    peer.post_bulk(Message(5, 300), Part(9, 0, np.ones(25, np.float32)))
    peer.transport.progress()
    for _ in range(3):
        user.transport.wait(0.1)
    turn(pair, lambda: user.ended == [9] and len(arrived) == 1)
    assert arrived[0][0] == 5
    assert not user.lost


def test_messages_with_the_flag_eager_are_counted(pair):
    user, peer = pair
    buffer = np.zeros(50, np.float32)
    user.waiting.append(task(9, [row(words.REPLACE, 0, 0, 100), row(words.REPLACE, 1, 100, 100)], buffer))
    turn(pair, lambda: user.relay_has)
    body = np.ones(25, np.float32)
    peer.post_bulk(Part(9, 0, body, flags=Flag.EAGER), Part(9, 1, body))
    turn(pair, lambda: user.ended == [9])
    assert sum(each.eager_in for each in user.traffic) == 1
    assert sum(each.eager_bytes_in for each in user.traffic) == 100


def order_of_arrival(pair, tasks, *, until):
    """Let the relay take tasks while its socket is full, and return the order in which their messages arrive."""
    user, peer = pair
    arrived = accept_all(peer)
    user.waiting.extend(tasks)
    (route,) = user.transport._peers.bulk_routes.values()
    route.outgoing.writable = False  # until all are there
    while user.waiting:
        user.hand_over()
    route.outgoing.writable = True
    turn(pair, lambda: len(arrived) == until)
    return [(number, step) for number, step, _ in arrived]


def test_the_most_urgent_message_leaves_first(pair):
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(3)], np.zeros(25, np.float32)
    tasks = [
        task(20, rows, buffer, priority=5),
        task(21, rows, buffer, priority=1),
        task(22, rows, buffer, priority=1),
        task(23, rows, buffer, priority=9, promoted=True),
    ]
    steps = range(3)
    assert order_of_arrival(pair, tasks, until=12) == [(number, step) for number in (23, 21, 22, 20) for step in steps]


def test_lanes_advance_together(pair):
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(3)], np.zeros(25, np.float32)
    arrived = order_of_arrival(pair, [task(20, rows, buffer, lanes=2)], until=6)
    assert [step for _, step in arrived] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("pair", [{"starvation_limit": 4}], indirect=True)
def test_the_oldest_message_leaves_after_so_many_that_have_overtaken_it(pair):
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(12)], np.zeros(25, np.float32)
    tasks = [task(20, rows[:2], buffer, priority=5), task(21, rows, buffer, priority=1)]
    arrived = order_of_arrival(pair, tasks, until=14)
    assert [position for position, (number, _) in enumerate(arrived) if number == 20] == [4, 9]


@pytest.mark.parametrize("pair", [{"is_fifo": True}], indirect=True)
def test_messages_leave_by_age_if_priorities_are_ignored(pair):
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(2)], np.zeros(25, np.float32)
    tasks = [task(21, rows, buffer, priority=1, promoted=True), task(20, rows, buffer, priority=5)]
    assert order_of_arrival(pair, tasks, until=4) == [(20, 0), (20, 1), (21, 0), (21, 1)]


@pytest.mark.parametrize(("priority", "first"), [(0, 30), (9, 20)])
def test_the_ranks_own_bulk_has_its_place_among_the_relays_messages(pair, priority, first):
    user, _ = pair
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(3)], np.zeros(25, np.float32)
    user.rival_order = Order(is_promoted=False, priority=priority, sequence=40)
    user.post_bulk(Message(30, 100), Message(31, 100))
    arrived = order_of_arrival(pair, [task(20, rows, buffer, priority=5)], until=5)
    expected = [(30, 0), (31, 0), (20, 0), (20, 1), (20, 2)]
    assert arrived == (expected if first == 30 else expected[2:] + expected[:2])


@pytest.mark.parametrize("pair", [{"starvation_limit": 4}], indirect=True)
def test_the_ranks_own_urgent_bulk_does_not_starve_the_relay(pair):
    user, _ = pair
    rows, buffer = [row(words.SEND, step, 0, 100) for step in range(2)], np.zeros(25, np.float32)
    user.rival_order = Order(is_promoted=False, priority=0, sequence=40)
    user.post_bulk(*(Message(number, 100) for number in range(30, 42)))
    arrived = order_of_arrival(pair, [task(20, rows, buffer, priority=5)], until=14)
    assert [position for position, (number, _) in enumerate(arrived) if number == 20] == [4, 9]


def test_what_is_promoted_later_overtakes(pair):
    user, peer = pair
    arrived = accept_all(peer)
    big, buffer = np.zeros(4 << 20, np.uint8), np.zeros(25, np.float32)
    rows = [row(words.SEND, step, 0, big.nbytes) for step in range(3)]
    user.waiting.append(task(20, rows, big, priority=1))
    user.waiting.append(task(21, [row(words.SEND, 0, 0, 100)], buffer, priority=5))
    peer.receives = False
    turn((user,), lambda: user.relay._line(user.relay._leaves_by(1)).is_half_way_out)
    user.relay_has[21].promote()
    peer.receives = True
    turn(pair, lambda: len(arrived) == 4)
    assert [(number, step) for number, step, _ in arrived] == [(20, 0), (21, 0), (20, 1), (20, 2)]


def test_more_urgent_bulk_of_the_rank_itself_does_not_wait_for_the_relay(pair):
    """It comes while a message of the relay fills the socket, as it does nearly always beside large operations."""
    user, peer = pair
    arrived, big = accept_all(peer), np.zeros(4 << 20, np.uint8)
    user.waiting.append(task(20, [row(words.SEND, step, 0, big.nbytes) for step in range(3)], big, priority=5))
    peer.receives = False
    turn((user,), lambda: user.relay_has and user.relay._line(user.relay._leaves_by(1)).is_half_way_out)
    user.post_bulk(Message(30, 100), Message(31, 100))
    peer.receives = True
    turn(pair, lambda: len(arrived) == 5)
    assert [number for number, _, _ in arrived] == [20, 30, 31, 20, 20]


# ---------------------------------------------------------------------------------------------------------- failure


def test_an_operation_that_fails_half_way_changes_its_tensor_no_more(pair):
    """The rest of the message that comes is forgotten, and the one that leaves goes to its end: others follow."""
    user, peer = pair
    arrived = accept_all(peer)
    big, other = np.zeros(8 << 20, np.uint8), np.zeros(25, np.float32)
    user.waiting.append(task(20, [row(words.SEND, 0, 0, big.nbytes), row(words.REPLACE, 0, 0, big.nbytes)], big))
    user.waiting.append(task(21, [row(words.SEND, 0, 0, 100), row(words.REPLACE, 0, 0, 100)], other, priority=1))
    turn(pair, lambda: len(user.relay_has) == 2)
    ones = np.ones(8 << 20, np.uint8)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    sent = sock.send(Part(20, 0, ones).header + ones[: 1 << 16].tobytes())
    turn((user,), lambda: big[0] == 1)
    user.relay_has[20].fail()
    user.transport.progress()
    changed = int(big.sum())
    assert changed < len(big)
    assert user.transport.keep_rests(lambda _: False), "the relay knows which of its operations have failed"
    big[:] = 7  # as the program may from now on
    rest = ones[sent - 64 :].tobytes()
    while rest:  # as much as the socket takes, so that nobody waits for the other
        with contextlib.suppress(BlockingIOError):
            rest = rest[sock.send(rest[: 1 << 20]) :]
        for rank in pair:
            rank.transport.progress()
    peer.post_bulk(Part(20, 1, other), Part(21, 0, np.full(25, 3, np.float32)))
    user.inbox.clear()
    accept_all(user)
    turn(pair, lambda: user.ended == [21] and len(arrived) == 2)
    assert set(big.tolist()) == {7}
    assert [(number, len(body)) for number, _, body in arrived] == [(20, len(big)), (21, 100)]
    assert 7 not in arrived[0][2], "the receiver gets the bytes as they were"
    assert other.tolist() == [3.0] * 25
    assert not user.relay.is_busy()


@pytest.mark.parametrize("in_body", [False, True])
def test_a_peer_that_ends_in_a_message_is_lost(pair, in_body):
    user, peer = pair
    buffer = np.zeros(1 << 18, np.float32)
    user.waiting.append(task(20, [row(words.COMBINE, 0, 0, buffer.nbytes)], buffer))
    turn(pair, lambda: user.relay_has)
    (sock,) = (c.sock for c in peer.transport._peers.bulk_routes.values())
    part = Part(20, 0, buffer)
    sock.send(part.header + bytes(5000) if in_body else part.header[:30])
    if in_body:
        turn((user,), lambda: user.traffic)
    for connection in peer.transport._connections.values():
        connection.sock.shutdown(2)
    turn((user,), lambda: user.lost)
    assert "its connection ended" in user.lost[0]
    assert not user.ended


def test_encrypted_connections_have_no_relay(rank_tls):
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    transports = [TcpTransport(r, addresses, d, identity, CONFIG, rank_tls[r]) for r, d in enumerate(doors)]
    made = user, peer = User(transports[0]), Rank(transports[1])
    for rank in made:
        rank.post_bulk(Message(1, 1000))
    turn(made, lambda: all(rank.inbox == [1] for rank in made))
    user.waiting.append(task(20, [row(words.SEND, 0, 0, 100)], np.zeros(25, np.float32)))
    user.post_bulk(Message(2, 100))
    turn(made, lambda: peer.inbox == [1, 2])
    assert not user.relay_has
    for rank in made:
        rank.transport.close(0.0)


# ------------------------------------------------------------------------------------------------- what an engine needs


class Line:
    """A connection that leads to a peer."""

    def __init__(self, peer):
        self.connection, self.number, self.peer = self, peer, peer


class Taker:
    """Takes operations and moves nothing."""

    def __init__(self, *, may_take=True):
        self.taken, self.failed, self._may_take = [], deque(), may_take
        self.words = np.zeros(words.BLOCK_WORDS, np.int64).data

    def prepare_to_take(self, plan):
        return self._may_take

    def take(self, task):
        lines = {Line(peer) for peer in task.plan.targets}
        made = RelayedOperation(self.words, self.failed, task, 0, list(range(len(task.plan.rows))), (set(), lines))
        self.taken.append(made)
        for lane, positions in enumerate(task.standing.positions):
            self.put(lane, *positions)
        return made

    def arriving(self):
        return set()

    def put(self, lane, receives, sends):
        at = words.TRACKS_AT + lane * TRACK.num_words
        self.words[at + TRACK.receives], self.words[at + TRACK.sends] = receives, sends


def engine_with(relay, *, far=False):
    """Return rank 0 of three, whose links are near, so that an operation may wait until its peers have submitted it."""
    engine = Engine(0, 3, EngineConfig(bulk_bytes=16, eager_bytes=64, segment_bytes=64, segment_bytes_min=16))
    engine.outbox.bulk_peers = frozenset({1, 2})
    engine.relaying.relay = relay
    engine.planner.use_links(LinkModel(latency_s=1.0 if far else 1e-9))
    return engine


def submit(engine, kind, num_bytes, *, num_buffers=1, algorithm="ring", name="name"):
    buffers = [memoryview(bytearray(num_bytes)) for _ in range(num_buffers)]
    signature = Signature(kind, DType.FLOAT32, ReduceOp.SUM, 0, (num_buffers * num_bytes // 4,), algorithm=algorithm)
    return engine.submit(Submission(name, signature, buffers), 0.0)


def end(engine, operation):
    """End an operation as if all its messages had come and left."""
    engine.relaying.candidates.pop(operation, None)
    engine._end(operation, 0.0, None)


def frames_to(engine, peer):
    """Take the control frames that wait for a peer, and return their kinds."""
    kinds = []
    while peer in engine.outbox.control_waits:
        kinds.append(Header.unpack(engine.next_message(peer, 0.0).header).frame)
    return kinds


def exchange(engine):
    """Submit an alltoall of blocks of 512 bytes: the first three buffers leave, the other three come."""
    return submit(engine, OpKind.ALLTOALL, 512, num_buffers=6, algorithm="direct")


def test_an_operation_in_the_relay_needs_a_peer_until_its_last_message():
    """Rank 0 of a ring of three receives from rank 2 and sends to rank 1."""
    relay = Taker()
    engine = engine_with(relay)
    operation = submit(engine, OpKind.ALLREDUCE, 2400)
    engine.relaying.hand_over(0.0)
    assert not relay.taken, "rank 1 is not known to have submitted it"
    engine._rendezvous.on_posted(1, operation.key)
    engine.relaying.hand_over(0.0)
    assert operation.needs(1)
    assert operation.needs(2)
    task = relay.taken[0].task
    length = len(operation.program.actions)
    for lane, (receives, _) in enumerate(task.standing.positions):
        relay.put(lane, receives, length)
    assert not operation.needs(1)
    assert operation.needs(2)
    engine.peer_departed(1, "it has closed the group", 1.0)
    assert not operation.finished
    engine.peer_departed(2, "it has closed the group", 1.0)
    assert operation.finished
    assert list(relay.failed) == relay.taken


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.ALLTOALL])
def test_a_known_operation_is_in_the_relay_from_its_first_message_on(kind):
    """The first allreduce of a name tells the peers the signature. Nothing leaves to a peer that has not begun."""
    relay = Taker()
    engine = engine_with(relay)
    if kind is OpKind.ALLREDUCE:
        operation = submit(engine, kind, 2400)
        engine.relaying.hand_over(0.0)
        assert not relay.taken
        assert operation.queued
        end(engine, operation)
    operation = exchange(engine) if kind is OpKind.ALLTOALL else submit(engine, kind, 2400)
    engine.relaying.hand_over(0.0)
    (relayed,) = relay.taken
    assert operation.carriage is relayed
    assert not operation.queued
    targets = {1} if kind is OpKind.ALLREDUCE else {1, 2}
    assert set(relayed.task.held_back) == targets
    lengths = [len(rows) // ROW.num_words for rows in relayed.task.plan.rows]
    if kind is OpKind.ALLTOALL:
        assert relayed.task.standing.positions == [(4, 0), (4, 0), (0, 4), (0, 4)]
        assert lengths == [4] * 4
    else:
        assert {sends for _, sends in relayed.task.standing.positions} == {0}


def test_peers_that_say_nothing_are_asked_whether_they_have_submitted_an_operation():
    """One that expects fewer bytes than it is sent, and so does not say it by itself, must find the difference."""
    relay = Taker()
    engine = engine_with(relay)
    operation = exchange(engine)
    engine._rendezvous.on_posted(1, operation.key)
    engine.relaying.hand_over(0.0)

    def asked():
        return [peer for peer in (1, 2) if Frame.REQUEST in frames_to(engine, peer)]

    engine.tick(0.1)
    assert asked() == []
    engine.tick(0.3)
    assert asked() == [2]
    engine.tick(0.6)
    assert asked() == [], "it was asked once"


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.ALLTOALL])
def test_beside_others_only_blocks_are_in_the_relay_from_their_first_message_on(kind):
    """An allreduce would wait to hear of its receiver, and can be handed over later."""
    relay = Taker()
    engine = engine_with(relay)
    for _ in range(2):
        other = submit(engine, OpKind.BROADCAST, 16, algorithm="tree", name="other")
        operation = exchange(engine) if kind is OpKind.ALLTOALL else submit(engine, kind, 2400)
        engine.relaying.hand_over(0.0)
        begun = bool(operation.queued)
        end(engine, operation)
        end(engine, other)
    assert begun == (kind is OpKind.ALLREDUCE) == (not relay.taken)


def test_operations_begin_with_messages_of_the_engine_where_that_is_better():
    """The links are far, or a peer would not say that it has begun, because it expects no more than the allowance."""
    for far, num_bytes in ((True, 512), (False, 64)):
        relay = Taker()
        engine = engine_with(relay, far=far)
        for _ in range(2):
            operation = submit(engine, OpKind.ALLTOALL, num_bytes, num_buffers=6, algorithm="direct")
            engine.relaying.hand_over(0.0)
            assert operation.queued
            end(engine, operation)
        assert not relay.taken


def test_an_operation_that_the_relay_cannot_take_begins_with_messages_of_the_engine():
    engine = engine_with(Taker(may_take=False))
    end(engine, exchange(engine))
    operation = exchange(engine)
    assert not operation.queued
    engine.relaying.hand_over(0.0)
    assert {peer: len(messages) for peer, messages in operation.queued.items()} == {1: 4, 2: 4}
    assert not engine.relaying.candidates


def test_a_message_that_came_before_the_hand_over_is_not_lost():
    """A peer whose relay does not work sends at once. Then messages of the engine carry the operation out here."""
    relay = Taker()
    engine = engine_with(relay)
    end(engine, exchange(engine))
    operation = exchange(engine)
    layout = operation.layout
    header = Header(
        Frame.DATA,
        0,
        *operation.key,
        step=2,
        body_bytes=128,
        flags=Flag.EAGER,
        signature=layout.expectation.signature_from(1),
    )
    delivery = engine.accept(1, header, 0.0)
    delivery.view[:] = bytes(range(128))
    engine.delivered(delivery, 0.0)
    engine.relaying.hand_over(0.0)
    assert not relay.taken
    assert operation.queued
    assert bytes(operation.buffers[4][:128]) == bytes(range(128))
    assert operation.progress() == "1 of 8 messages received"


def test_a_rank_that_leaves_fails_an_operation_that_waits_for_the_relay():
    engine = engine_with(Taker())
    end(engine, exchange(engine))
    operation = exchange(engine)
    engine.peer_departed(1, "it has closed the group", 1.0)
    assert operation.finished
    engine.relaying.hand_over(1.0)
    assert not engine.relaying.candidates
    assert operation.carriage is None


def test_what_has_come_before_its_turn_is_handed_over():
    """Rank 0 adds what rank 2 sends, then what rank 1 sends. That of rank 1 has come, and messages have left."""
    relay = Taker()
    engine = engine_with(relay)
    operation = submit(engine, OpKind.ALLREDUCE, 2400, algorithm="direct")
    assert [action.peer for action in operation.program.actions[:4]] == [1, 2, 2, 1]
    theirs, layout = bytes(range(64)), operation.layout
    region = layout.regions(1)[3]
    assert region.body_bytes == len(theirs)
    header = Header(
        Frame.DATA, 0, *operation.key, lane=1, body_bytes=64, flags=Flag.EAGER, signature=layout.expectation.packed
    )
    delivery = engine.accept(1, header, 0.0)
    delivery.view[:] = theirs
    engine.delivered(delivery, 0.0)
    left = engine.next_message(2, 0.0, bulk=True).queued
    assert (left.lane, left.action.peer) == (0, 2)
    for peer in (1, 2):
        engine._rendezvous.on_posted(peer, operation.key)
    engine.relaying.hand_over(0.0)
    standing = relay.taken[0].task.standing
    assert [(lane, index, bytes(view)) for lane, index, view in standing.early] == [(1, 3, theirs)]
    assert standing.carried_out == [(0, 1)]
    assert set(standing.positions) == {(2, 0)}
    assert not any(lane.arrivals for lane in operation.lanes)
    assert engine.reception.scratch.in_use == 0


def test_sums_of_half_types_that_are_there_are_handed_over():
    """Those that have not left: rank 0 of three has the sum of chunk 2 in one lane, and has sent that of another."""
    relay = Taker()
    engine = engine_with(relay)
    signature = Signature(OpKind.ALLREDUCE, DType.BFLOAT16, ReduceOp.SUM, 0, (600,), algorithm="ring")
    operation = engine.submit(Submission("name", signature, [memoryview(bytearray(1200))]), 0.0)
    plan = plan_of(operation.layout, frozenset({1, 2}), engine.config, 1e9)
    assert plan.slots[0] == len(plan.sums) == operation.layout.num_lanes
    assert {(each.first, each.last) for each in plan.sums} == {(1, 2)}
    positions = [(5, 4)] * plan.slots[0]
    positions[0], positions[1] = (3, 2), (1, 2)
    assert plan.needed_sums(Standing(positions, [], [])) == [0]


@pytest.mark.parametrize("mbit_per_s", [1, 200, 1000, 25_000])
def test_sender_and_receiver_cut_a_block_alike(mbit_per_s):
    """Blocks of different sizes, of which some have no more than the eager allowance."""
    sizes = {(source, target): 40_000 + 700_000 * (source + 2 * target) for source in range(3) for target in range(3)}
    cut = []
    for rank in range(3):
        engine = Engine(rank, 3, EngineConfig())
        engine.planner.use_links(LinkModel(bytes_per_s=mbit_per_s * 125_000))
        blocks = [sizes[rank, target] for target in range(3)] + [sizes[source, rank] for source in range(3)]
        buffers = [memoryview(bytearray(size)) for size in blocks]
        signature = Signature(OpKind.ALLTOALL, DType.UINT8, ReduceOp.SUM, 0, (0,), algorithm="direct")
        layout = engine.submit(Submission("cut", signature, buffers), 0.0).layout
        sent, received = {}, {}
        for index, action in enumerate(layout.program.actions):
            lengths = [
                regions[index].body_bytes for regions in map(layout.regions, range(layout.num_lanes)) if regions[index]
            ]
            (sent if isinstance(action, Send) else received)[action.peer] = lengths
        cut.append((sent, received))
    window = exchange_window(mbit_per_s * 125_000, 2)
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            lengths = cut[source][0][target]
            assert lengths == cut[target][1][source]
            assert sum(lengths) == sizes[source, target]
            if sum(lengths) > EngineConfig().eager_bytes:
                assert max(lengths) <= max(PIECE_BYTES_MIN, window // 3)


def test_a_message_to_one_rank_is_not_held_back():
    """A receiver from any rank submits the operation only when it has heard of it."""
    relay = Taker()
    engine = engine_with(relay)
    for _ in range(3):
        signature = Signature(OpKind.SEND_RECV, DType.FLOAT32, ReduceOp.SUM, 0, (600,), algorithm="direct")
        submission = Submission("to one", signature, [memoryview(bytearray(2400))], ranks=(0, 1), repeats=True)
        operation = engine.submit(submission, 0.0)
        engine.relaying.hand_over(0.0)
        assert operation.queued
    assert not relay.taken
