"""Tensors in shared memory: where they lie, when their memory is free again, and messages out of them."""

import gc
import os
import resource

import numpy as np
import pytest
from shm_host import PIECE, Host, assert_woken_when_given_back, message

from totalreduce.transports import shm_arena, shm_memory
from totalreduce.transports.shm_memory import LOANS, Outbox, OutboxLayout

LAYOUT = OutboxLayout.choose(2, PIECE, 4 * PIECE)
PAGE = 4096


def place_of(outbox: Outbox, array: np.ndarray) -> int:
    return outbox.arena.offset_of(memoryview(array))


@pytest.fixture
def outbox():
    made = Outbox(LAYOUT)
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------------------ memory


def test_arrays_lie_behind_everything_else_page_by_page(outbox: Outbox) -> None:
    assert outbox.arena.offset_of(memoryview(bytes(10))) == 0  # nothing is in the arena yet
    arrays = [outbox.arena.allocate(num_bytes) for num_bytes in (1, PAGE, PAGE + 1, 3)]
    places = [place_of(outbox, array) for array in arrays]
    start = LAYOUT.total_bytes
    assert places == [start, start + PAGE, start + 2 * PAGE, start + 4 * PAGE]
    assert [len(array) for array in arrays] == [1, PAGE, PAGE + 1, 3]
    assert place_of(outbox, arrays[2][100:]) == start + 2 * PAGE + 100
    assert outbox.arena.offset_of(memoryview(bytearray(10))) == 0
    arrays[2][:] = 7
    assert bytes(outbox.view[places[2] : places[2] + PAGE + 1]) == bytes([7]) * (PAGE + 1)
    assert outbox.view[places[2] - 1] == outbox.view[places[3]] == 0


def test_memory_is_used_again_when_nobody_holds_it_any_more(outbox: Outbox) -> None:
    arrays = [outbox.arena.allocate(2 * PAGE) for _ in range(4)]
    places = [place_of(outbox, array) for array in arrays]
    part = arrays[1][10:20]
    del arrays[1]
    assert place_of(outbox, keep := outbox.arena.allocate(PAGE)) == places[3] + 2 * PAGE  # the part is still there
    del part
    first = outbox.arena.allocate(PAGE)
    second = outbox.arena.allocate(PAGE)
    assert [place_of(outbox, array) for array in (first, second)] == [places[1], places[1] + PAGE]
    # Neighbours that come back in any order are one hole.
    del second, arrays[0], first
    gc.collect()
    assert place_of(outbox, whole := outbox.arena.allocate(4 * PAGE)) == places[0]
    assert len(whole) == 4 * PAGE
    assert len(keep) == PAGE


def test_more_than_there_is_is_usual_memory_after_a_warning(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert outbox.arena.allocate(len(outbox.view)) is None
    assert "MiB are left): usual memory instead" in caplog.text

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert outbox.arena.allocate(3 << 20) is None
    assert "no shared memory of 3 MiB (Cannot allocate memory): usual memory instead" in caplog.text
    # Here the kernel would end the process without an error: to reserve pages counts as to take them.
    monkeypatch.setattr(shm_arena, "memory_room", lambda: 5 << 20)
    assert outbox.arena.allocate(6 << 20) is None
    assert "no shared memory of 6 MiB (the container of this process has 5 MiB left): usual memory" in caplog.text
    monkeypatch.undo()
    assert place_of(outbox, outbox.arena.allocate(1)) == LAYOUT.total_bytes


def test_all_arenas_together_are_as_large_as_the_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    for ranks in (1, 2, 64):
        layout = OutboxLayout.choose(ranks, PIECE, 4 * PIECE)
        outbox = Outbox(layout)
        arena = len(outbox.view) - layout.total_bytes
        assert total - ranks * PAGE < ranks * arena <= total
        outbox.close()


def test_where_address_space_is_limited_there_is_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 30, 8 << 30))
    outbox = Outbox(LAYOUT)
    assert len(outbox.view) == LAYOUT.total_bytes
    assert outbox.arena.allocate(1) is None
    outbox.close()


def test_a_file_that_cannot_be_that_long_has_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    truncate = os.ftruncate

    def refuse(fd: int, size: int) -> None:
        if size > LAYOUT.total_bytes:
            raise OSError(27, "File too large")
        truncate(fd, size)

    monkeypatch.setattr(shm_memory.os, "ftruncate", refuse)
    outbox = Outbox(LAYOUT)
    assert len(outbox.view) == LAYOUT.total_bytes
    outbox.close()


def test_arrays_outlive_the_outbox_and_there_are_no_new_ones() -> None:
    outbox = Outbox(LAYOUT)
    array = outbox.arena.allocate(100)
    outbox.close()
    array[:] = 5
    assert array.sum() == 500
    assert outbox.arena.allocate(100) is None


def test_a_child_process_gives_nothing_back(outbox: Outbox) -> None:
    """A data loader's worker has the array too, and lets go of it when it likes."""
    array = outbox.arena.allocate(PAGE)
    first = place_of(outbox, array)
    child = os.fork()
    if child == 0:
        del array
        again = outbox.arena.allocate(PAGE)
        os._exit(0 if again is not None and place_of(outbox, again) != first else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ---------------------------------------------------------------------------------------------------------- messages


def lent(host: Host, rank: int, length: int, seed: int = 1) -> np.ndarray:
    array = host.ranks[rank].allocate(length)
    assert array is not None
    array[:] = (np.arange(length) * 31 + seed) % 251
    return array


@pytest.mark.parametrize("keeps", [False, True], ids=["copied", "leased"])
@pytest.mark.parametrize("length", [8192, 8193, PIECE, 5 * PIECE + 3])
def test_a_message_has_left_when_the_peer_has_read_it(length: int, keeps: bool) -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = keeps
        array = lent(host, 0, length)
        host.endpoints[0].put(1, message(array.data, step=3))
        host.move(only=[0])
        is_lent = length > 8192  # else it fits into its entry
        assert len(host.endpoints[0].sent) == (0 if is_lent else 1)
        assert host.ranks[0].idle() == (not is_lent)
        host.move()
        assert host.endpoints[1].received == [(0, 3, array.tobytes())]
        if keeps and is_lent:
            (lease,) = host.endpoints[1].leases
            assert lease.may_be_kept
            assert host.endpoints[0].sent == []
            array[:] = 9  # nobody has promised the receiver a copy
            assert bytes(lease.body) == bytes([9]) * length
            lease.release()
            host.move()
        assert len(host.endpoints[0].sent) == 1
        assert host.ranks[0].idle()


def test_what_cannot_be_lent_is_staged() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        array = lent(host, 0, 9000)
        host.endpoints[0].put(1, *(message(array.data, step=step) for step in range(LOANS + 2)))
        host.move(rounds=50)
        assert len(host.endpoints[1].received) == LOANS + 2
        assert len(host.endpoints[0].sent) == 2
        host.endpoints[1].leases[5].release()  # in any order
        host.move()
        assert len(host.endpoints[0].sent) == 3
        for lease in host.endpoints[1].leases[:5] + host.endpoints[1].leases[6:]:
            lease.release()
        host.move()
        assert len(host.endpoints[0].sent) == LOANS + 2
        host.endpoints[1].keeps = False
        host.endpoints[0].put(1, *(message(array.data, step=step) for step in range(3 * LOANS)))
        host.move(rounds=100)
        assert len(host.endpoints[0].sent) == 4 * LOANS + 2


def test_who_waits_for_a_loan_is_woken_when_it_is_given_back() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(1, message(lent(host, 0, PIECE).data))
        host.move()
        assert_woken_when_given_back(host, 0, host.endpoints[1].leases[0])
        assert len(host.endpoints[0].sent) == 1


def test_what_a_dead_peer_was_lent_stops_nobody() -> None:
    with Host(3) as host:
        host.endpoints[1].keeps = True
        array = lent(host, 0, PIECE)
        host.endpoints[0].put(1, message(array.data))
        host.move()
        host.close(1)
        host.move()
        assert [peer for peer, _ in host.endpoints[0].lost] == [1]
        assert host.ranks[0].idle()
        host.endpoints[0].put(2, message(array.data))
        host.move()
        assert host.endpoints[2].received == [(0, 0, array.tobytes())]


@pytest.mark.parametrize(
    ("number", "place"),
    [(0, 0), (0, LAYOUT.total_bytes - 1), (LOANS, LAYOUT.total_bytes), (0, 1 << 62)],
    ids=["in the words", "in the pool", "no such loan", "behind the end"],
)
def test_a_peers_loan_is_not_believed(number: int, place: int) -> None:
    with Host(2) as host:
        rank = host.ranks[0]
        layout, words = rank._outbox.layout, rank._outbox.words
        assert layout == LAYOUT
        entry = layout.entry(0, 1, 0)
        rank._outbox.view[entry : entry + 64] = message(bytes(9000)).header
        word = layout.entry_word(0, 1, 0)
        words[word] = 9000 | (layout.pieces + number + 1) << 32
        words[word + 2] = place
        words[layout.block(0, 1) + shm_memory.PEER.published] = 1
        host.move(only=[1])
        ((peer, reason),) = host.endpoints[1].lost
        assert peer == 0
        assert reason.startswith("protocol violation: 9000 bytes in piece")
