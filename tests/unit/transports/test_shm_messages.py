"""Messages through shared memory, two or three ranks in one thread: nothing lost, bounded, nothing believed."""

import numpy as np
import pytest
from shm_host import PIECE, Host, message

from totalreduce.foundation.header import Frame
from totalreduce.transports.shm_memory import PEER

SLOTS = 32
LENGTHS = [0, 1, 8191, 8192, 8193, PIECE // 2, PIECE // 2 + 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7]


def body_of(length: int, seed: int = 1) -> bytes:
    place = np.arange(length)
    return (place * 31 + place // 251 + seed).astype(np.uint8).tobytes()


@pytest.mark.parametrize("keeps", [False, True], ids=["copied", "leased"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_arrives_byte_by_byte(length: int, keeps: bool) -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = keeps
        host.endpoints[0].put(1, message(body_of(length), step=3), message(b"next", step=4))
        host.move()
        assert host.endpoints[1].received == [(0, 3, body_of(length)), (0, 4, b"next")]
        assert [sent.share_key for sent in host.endpoints[0].sent] == [None, None]
        # A body in one piece is offered as a lease; one in the entry, or in parts, has been copied.
        assert len(host.endpoints[1].leases) == (1 if keeps and 8192 < length <= PIECE else 0)
        assert host.ranks[0].idle()


def test_both_directions_keep_their_order_over_many_turns_of_the_rings() -> None:
    with Host(3) as host:
        lengths = [0, 100, 9000, 40_000, PIECE + 5]
        sent = {(a, b): [] for a in range(3) for b in range(3) if a != b}
        for step in range(3 * SLOTS):
            for (a, b), bodies in sent.items():
                bodies.append(body_of(lengths[(step + a + b) % 5], seed=step + 10 * a + b))
                host.endpoints[a].put(b, message(bodies[-1], step=step))
        host.move(until=lambda: all(len(endpoint.received) == 6 * SLOTS for endpoint in host.endpoints))
        for b, endpoint in enumerate(host.endpoints):
            for a in {0, 1, 2} - {b}:
                assert [(step, body) for peer, step, body in endpoint.received if peer == a] == list(
                    enumerate(sent[a, b])
                )


@pytest.mark.parametrize("length", [100, 20_000, PIECE])
def test_the_senders_memory_is_free_as_soon_as_the_message_was_taken(length: int) -> None:
    with Host(2) as host:
        body = bytearray(body_of(length))
        host.endpoints[0].put(1, message(body))
        host.move(only=[0])
        assert len(host.endpoints[0].sent) == 1
        body[:] = bytes(length)
        host.move()
        assert host.endpoints[1].received == [(0, 0, body_of(length))]


def test_a_full_ring_takes_no_message() -> None:
    with Host(2) as host:
        host.endpoints[0].put(1, *(message(b"x", step=step) for step in range(SLOTS + 9)))
        host.move(only=[0], rounds=50)
        assert len(host.endpoints[0].sent) == SLOTS
        assert len(host.endpoints[0].outbox[1]) == 9
        host.move()
        assert [step for _, step, _ in host.endpoints[1].received] == list(range(SLOTS + 9))


def test_an_empty_pool_takes_no_message_and_half_of_it_is_never_kept() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(
            1, *(message(body_of(PIECE, step), step=step) for step in range(6)), message(b"small", step=6)
        )
        host.move(rounds=50)
        # Four large pieces: four messages are out, and what could not be staged was not taken, large or small.
        assert len(host.endpoints[0].sent) == 4
        assert [lease.may_be_kept for lease in host.endpoints[1].leases] == [True, True, False, False]
        leases, host.endpoints[1].leases = host.endpoints[1].leases, []
        leases[2].release()
        host.move(rounds=50)
        assert len(host.endpoints[0].sent) == 5
        assert not host.endpoints[1].leases[0].may_be_kept  # two that may be kept are still out
        assert bytes(leases[0].body) == body_of(PIECE, 0)  # and nobody has written to them
        for lease in (leases[0], leases[1], leases[3], host.endpoints[1].leases[0]):
            lease.release()
        host.move(rounds=50)
        assert [step for _, step, _ in host.endpoints[1].received] == list(range(7))
        assert host.endpoints[1].leases[-1].may_be_kept


def test_small_pieces_are_tried_first() -> None:
    with Host(2, max_body_bytes=4 * PIECE, pool_bytes=16 * PIECE) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(1, *(message(body_of(9000, step), step=step) for step in range(20)))
        host.move(rounds=50)
        assert len(host.endpoints[0].sent) == 20  # more than there are large pieces
        assert [bytes(lease.body) for lease in host.endpoints[1].leases] == [body_of(9000, step) for step in range(20)]


def test_one_body_for_several_peers_is_staged_once() -> None:
    with Host(3) as host:
        for endpoint in host.endpoints[1:]:
            endpoint.keeps = True
        # Other bytes under the same key: who gets the first ones was not sent a second copy.
        host.endpoints[0].put(1, message(body_of(PIECE, 1), key=("x", 0)))
        host.endpoints[0].put(2, message(body_of(PIECE, 2), key=("x", 0)))
        host.move()
        assert host.endpoints[1].received == [(0, 0, body_of(PIECE, 1))]
        assert host.endpoints[2].received == [(0, 0, body_of(PIECE, 1))]
        # One reader has given it back, the other has not: it is not written to.
        host.endpoints[1].leases.pop().release()
        host.endpoints[1].keeps = False
        host.endpoints[0].put(1, *(message(body_of(PIECE, 5 + step), step=step) for step in range(9)))
        host.move()
        assert bytes(host.endpoints[2].leases[0].body) == body_of(PIECE, 1)
        host.endpoints[2].leases.pop().release()
        # A key that is used again after its piece went to others brings its new bytes.
        host.endpoints[0].put(1, *(message(body_of(PIECE, 20 + step), step=step) for step in range(9)))
        host.move()
        host.endpoints[0].put(2, message(body_of(PIECE, 3), key=("x", 0)))
        host.move()
        assert host.endpoints[2].received[-1] == (0, 0, body_of(PIECE, 3))


def test_the_same_key_to_the_same_peer_is_two_messages() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(1, message(body_of(PIECE, 1), key="k"), message(body_of(PIECE, 2), step=1, key="k"))
        host.move()
        assert [body for _, _, body in host.endpoints[1].received] == [body_of(PIECE, 1), body_of(PIECE, 2)]


def test_data_without_memory_is_left_and_control_frames_are_not() -> None:
    with Host(2) as host:
        host.endpoints[1].open = False
        host.endpoints[0].put(1, message(b"word", frame=Frame.CREDIT), message(body_of(PIECE), step=1))
        host.move()
        assert [step for _, step, _ in host.endpoints[1].received] == [0]
        # What is left unread is no reason to stay awake; what comes after it is.
        assert host.ranks[1].fall_asleep(eager=False)
        host.ranks[1].wake_up(eager=False)
        host.endpoints[0].put(1, message(b"more", step=2))
        host.move(only=[0])
        assert not host.ranks[1].fall_asleep(eager=False)
        host.endpoints[1].open = True
        host.move()
        assert [step for _, step, _ in host.endpoints[1].received] == [0, 1, 2]


def forge(host: Host, what: str) -> None:
    """Rank 0 writes into its own memory what no correct rank writes."""
    rank = host.ranks[0]
    layout, words, view = rank._outbox.layout, rank._outbox.words, rank._outbox.view
    entry, place = layout.entry(0, 1, 0), layout.entry_word(0, 1, 0)
    large = layout.small_pieces + 1
    view[entry : entry + 64] = message(bytes(100)).header
    published = 1
    match what:
        case "count":
            published = SLOTS + 1
        case "length":
            words[place] = 99
        case "inline":
            view[entry : entry + 64] = message(bytes(9000)).header
            words[place] = 9000
        case "piece":
            words[place] = 100 | (layout.pieces + 1) << 32
        case "beyond":
            view[entry : entry + 64] = message(bytes(PIECE + 1)).header
            words[place] = PIECE + 1 | large << 32
        case "too much":
            words[place] = 101 | large << 32
        case "continues":
            words[place] = 100 | large << 32 | 1 << 63
        case "header":
            view[entry] = 0
            words[place] = 100
        case "consumed":
            words[layout.block(0, 1) + PEER.consumed] = 5
            host.endpoints[1].put(0, message(b"x"))
            published = 0
    words[layout.block(0, 1) + PEER.published] = published


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("count", "33 entries in a ring of 32"),
        ("length", "99 bytes in an entry, 100 in its header"),
        ("inline", "9000 bytes in an entry, 9000 in its header"),
        ("piece", "100 bytes in piece 36, which the pool does not have"),
        ("beyond", f"{PIECE + 1} bytes in piece 32, which the pool does not have"),
        ("too much", "101 bytes in a piece, 100 in its header"),
        ("continues", "a continuation without a message"),
        ("header", "not a totalreduce header"),
        ("consumed", "it has consumed more than was sent"),
    ],
)
def test_a_peers_memory_is_not_believed(what: str, text: str) -> None:
    with Host(3) as host:
        forge(host, what)
        host.move(only=[1])
        assert len(host.endpoints[1].lost) == 1
        peer, reason = host.endpoints[1].lost[0]
        assert peer == 0
        assert reason.startswith("protocol violation: ")
        assert text in reason
        assert set(host.ranks[1].connected_peers()) == {2}
        host.endpoints[2].put(1, message(b"still here"))
        host.move(only=[1, 2])
        assert (2, 0, b"still here") in host.endpoints[1].received


def test_a_message_within_another_one() -> None:
    with Host(2) as host:
        rank = host.ranks[0]
        layout, words, view = rank._outbox.layout, rank._outbox.words, rank._outbox.view
        for slot in range(2):
            entry = layout.entry(0, 1, slot)
            view[entry : entry + 64] = message(bytes(2 * PIECE)).header
            words[layout.entry_word(0, 1, slot)] = PIECE | (layout.small_pieces + 1) << 32
        words[layout.block(0, 1) + PEER.published] = 2
        host.move(only=[1])
        assert host.endpoints[1].lost == [(0, "protocol violation: a message within another one")]


def test_the_memory_of_a_failed_operation_is_free_although_a_part_of_its_message_has_not_left() -> None:
    length = 9 * PIECE
    with Host(2) as host:
        body = bytearray(body_of(length))
        host.endpoints[0].put(1, message(body))
        host.move(only=[0])
        assert not host.ranks[0].idle(), "the pool is too small for it"
        assert host.ranks[0].keep_rests(lambda _: True)
        body[:] = bytes(length)
        host.move()
        assert host.endpoints[1].received == [(0, 0, body_of(length))]


def test_the_memory_of_a_failed_operation_is_free_when_the_other_rank_has_read_what_was_lent() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        array = host.ranks[0].allocate(PIECE)
        assert array is not None
        host.endpoints[0].put(1, message(memoryview(array)))
        host.move()
        (lease,) = host.endpoints[1].leases
        assert not host.ranks[0].keep_rests(lambda _: True)
        lease.release()
        host.move()
        assert host.ranks[0].keep_rests(lambda _: True)
