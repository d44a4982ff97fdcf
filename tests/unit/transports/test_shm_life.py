"""Meeting, sleeping, dying: ranks of one host in one thread."""

import fcntl
import itertools
import os
import socket
from types import SimpleNamespace

import pytest
from descriptors import open_files
from shm_host import IDENTITY, PIECE, Host, asleep, assert_woken_when_given_back, message, readable

import totalreduce.transports.shm as shm_module
from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.transports import shm_memory
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.shm import listen, shm_available
from totalreduce.transports.shm_memory import OWNER, PEER, Mapping, Outbox, OutboxLayout
from totalreduce.transports.shm_pool import StagingPool
from totalreduce.transports.shm_rings import _Loans
from totalreduce.transports.shm_waiting import ASLEEP, WANTS_ROOM

SMALL = OutboxLayout.choose(2, PIECE, 4 * PIECE)
#: For tests in which a clock that is set by hand says who is silent.
TWO_SECONDS = TcpConfig(heartbeat_s=0.25, silence_s=2.0)


def stranger(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + name.removeprefix("@"))
    return sock


# ------------------------------------------------------------------------------------------------------------ memory


def test_the_parts_of_an_outbox_do_not_overlap() -> None:
    for local_ranks in (1, 2, 3, 8, 64):
        layout = OutboxLayout.choose(local_ranks, 1 << 20, 16 << 20)
        used: list[tuple[int, int]] = [
            (8 * word, 8) for word in (OWNER.sleep, shm_memory.OWNER.beat, shm_memory.OWNER.processor)
        ]
        peers = [peer for peer in range(local_ranks) if peer != 0]
        for peer in peers:
            first = 8 * layout.block(0, peer)
            used.append((first, 8 * (shm_memory.PEER.given_back + layout.pieces + shm_memory.LOANS)))
            for slot in range(layout.slots):
                entry = layout.entry(0, peer, slot)
                assert entry < 8 * layout.entry_word(0, peer, slot) < layout.entry_body(0, peer, slot)
                assert layout.entry_body(0, peer, slot) + layout.inline_bytes == entry + layout.entry_bytes
                used.append((entry, layout.entry_bytes))
        used += [layout.piece(number) for number in range(layout.pieces)]
        used.sort()
        for (start, length), (following, _) in itertools.pairwise(used):
            assert start + length <= following
        assert used[-1][0] + used[-1][1] == layout.total_bytes
        assert layout.inline_bytes >= 1024
        assert layout.total_bytes < 24 << 20


@pytest.mark.parametrize(("body", "pool"), [(1, 1), (PIECE, 1 << 20), (64 << 20, 16 << 20)])
def test_any_sizes_give_at_least_four_large_pieces(body: int, pool: int) -> None:
    layout = OutboxLayout.choose(2, body, pool)
    assert layout.large_pieces >= 4
    assert layout.large_bytes <= max(4096, pool // 4)


def test_a_memory_file_cannot_be_shrunk_by_its_owner() -> None:
    outbox = Outbox(SMALL)
    with pytest.raises(PermissionError):
        os.ftruncate(outbox.fd, 4096)
    mapping = Mapping(outbox.fd, SMALL)
    outbox.words[5] = 77
    assert mapping.words[5] == 77
    assert mapping.view.readonly
    outbox.close()


def test_a_memory_file_that_is_not_sealed_or_too_short_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALL.total_bytes)
    with pytest.raises(ProtocolError, match="sealed"):
        Mapping(fd, SMALL)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    Mapping(fd, SMALL)
    with pytest.raises(ProtocolError, match="bytes with seals"):
        Mapping(fd, OutboxLayout.choose(3, PIECE, 4 * PIECE))
    os.close(fd)
    read, write = os.pipe()
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        Mapping(read, SMALL)
    os.close(read)
    os.close(write)


def test_the_reason_why_there_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm_available() is None

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        assert "No space left on device" in str(shm_available())
        assert 'transport="tcp"' in str(shm_available())
    with monkeypatch.context() as patch:
        patch.setattr(shm_memory, "memory_room", lambda: 100 << 20)
        assert shm_available(50 << 20, 2) is None
        assert "no shared memory of 3 x 50 MiB: the container of this process has 100 MiB left" in str(
            shm_available(50 << 20, 3)
        )
        patch.setattr(shm_memory, "memory_room", lambda: 0)
        with pytest.raises(ConfigurationError, match="the container of this process has 0 MiB left"):
            Outbox(SMALL)
    with monkeypatch.context() as patch:
        limits = shm_memory.resource.getrlimit(shm_memory.resource.RLIMIT_FSIZE)
        patch.setattr(shm_memory.resource, "getrlimit", lambda _: (40 << 20, limits[1]))
        assert shm_available(40 << 20) is None
        assert "files of at most 41943040 bytes (`ulimit -f`)" in str(shm_available(41 << 20))
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        assert "memfd_create" in str(shm_available())
    with monkeypatch.context() as patch:
        patch.setattr(shm_memory.platform, "machine", lambda: "sparc64")
        patch.setattr(shm_memory.ctypes, "CDLL", refuse)
        assert "shared memory on sparc64 needs libatomic" in str(shm_available())
    with monkeypatch.context() as patch:
        patch.setattr(shm_memory.sys, "platform", "darwin")
        assert "needs Linux" in str(shm_available())


def test_messages_with_the_fences_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(shm_memory.platform, "machine", lambda: "aarch64")

    class Fence:
        def __call__(self, order: int) -> None:
            calls.append(order)

    monkeypatch.setattr(shm_memory.ctypes, "CDLL", lambda _: SimpleNamespace(atomic_thread_fence=Fence()))
    with Host(2) as host:
        before = len(calls)
        host.endpoints[0].put(1, message(b"abc"), message(bytes(PIECE), step=1))
        host.move()
        assert host.endpoints[1].received == [(0, 0, b"abc"), (0, 1, bytes(PIECE))]
    assert set(calls) == {5}
    assert len(calls) - before >= 8


def test_memory_that_a_peer_has_given_back_is_written_after_a_fence() -> None:
    """Between the peer's word and what the program or this rank writes next: a piece of the pool, and a lent body."""
    layout = OutboxLayout.choose(2, PIECE, 4 * PIECE)
    outbox, log = Outbox(layout), []
    pool, peers_words = StagingPool(outbox), memoryview(bytearray(8 * layout.block_words)).cast("Q")
    piece = pool.stage(memoryview(bytes([1]) * PIECE), None, peers_words)
    peers_words[PEER.given_back + piece.number] = piece.use
    pool._order = lambda: log.append(("fence", piece.out, int(piece.array[0])))
    assert pool.stage(memoryview(bytes([2]) * PIECE), None, peers_words) is piece
    assert log == [("fence", False, 1)]
    assert piece.array[0] == 2

    log.clear()
    loans = _Loans(peers_words, layout.pieces, lambda: log.append("fence"))
    number, use = loans.add(message(b"lent"))
    endpoint = SimpleNamespace(message_sent=lambda sent: log.append(bytes(sent.body)))
    loans.collect(endpoint)
    assert log == []
    peers_words[PEER.given_back + number] = use
    loans.collect(endpoint)
    assert log == ["fence", b"lent"]
    outbox.close()


# ----------------------------------------------------------------------------------------------------------- meeting


def test_all_ranks_meet_once() -> None:
    with Host(5) as host:
        assert [rank.counters.connections for rank in host.ranks] == [4] * 5
        assert host.ranks[2].ranks_per_host == 5
        assert [set(rank.connected_peers()) for rank in host.ranks] == [set(range(5)) - {r} for r in range(5)]
        assert [endpoint.lost for endpoint in host.endpoints] == [[]] * 5


def test_a_wrong_key_is_noticed_on_both_sides() -> None:
    other = JobIdentity(bytes(32), "job/default", 0)
    with Host(2, meet=False, identities=[IDENTITY, other]) as host:
        host.move(until=lambda: host.endpoints[0].lost)
        host.move()
        assert host.endpoints[0].lost == [(1, "the process at rank 1's address does not know the job's key")]
        assert host.ranks[1].counters.refused_connections == 1
        assert not host.ranks[1].connected_peers()


def test_other_sizes_are_noticed_on_both_sides() -> None:
    with Host(2, meet=False) as host, Host(2, meet=False, max_body_bytes=2 * PIECE, pool_bytes=1 << 20) as other:
        host.ranks[1], other.ranks[1] = other.ranks[1], host.ranks[1]
        host.ranks[0]._meetings._addresses[1] = other.names[1]
        host.move(until=lambda: host.ranks[1].counters.refused_connections or host.endpoints[0].lost)
        host.move()
        assert host.ranks[1].counters.refused_connections == 1
        assert not host.ranks[0].connected_peers()
        assert not host.ranks[1].connected_peers()


def test_strangers_are_refused_and_counted_and_who_only_asks_is_not() -> None:
    with Host(2) as host:
        stranger(host.names[1]).close()
        host.move()
        assert host.ranks[1].counters.refused_connections == 0
        babbler = stranger(host.names[1])
        babbler.sendall(bytes(48))  # as long as a handshake begins
        host.move()
        assert host.ranks[1].counters.refused_connections == 1
        assert babbler.recv(1) == b""
        babbler.close()
        host.endpoints[0].put(1, message(b"x"))
        host.move()
        assert host.endpoints[1].received == [(0, 0, b"x")]


def test_many_idle_strangers_do_not_keep_a_peer_out() -> None:
    with Host(2, meet=False, config=TcpConfig(pending_handshakes_max=4)) as host:
        idlers = [stranger(host.names[1]) for _ in range(9)]
        host.move(until=lambda: host.ranks[0].connected_peers() and host.ranks[1].connected_peers())
        assert host.ranks[1].counters.refused_connections >= 5
        for idler in idlers:
            idler.close()


def test_a_peer_that_does_not_listen_is_lost_when_it_is_needed() -> None:
    with Host(2, meet=False) as host:
        host.close(1)
        host.move()
        assert host.endpoints[0].lost == []
        host.endpoints[0].put(1, message(b"x"))
        host.move()
        assert len(host.endpoints[0].lost) == 1
        assert "cannot connect to @totalreduce-" in host.endpoints[0].lost[0][1]
        assert not host.endpoints[0].outbox[1]


def test_a_lower_rank_that_does_not_come_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(2, meet=False) as host:
        host.endpoints[1].put(0, message(b"x"))
        host.move(only=[1])
        clock.now += 1.0
        host.move(only=[1])
        assert host.endpoints[1].lost == []  # it listens
        host.close(0)
        clock.now += 1.0
        host.move(only=[1])
        assert [peer for peer, _ in host.endpoints[1].lost] == [0]
        assert "cannot connect" in host.endpoints[1].lost[0][1]


def test_a_lower_rank_that_never_comes_is_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(2, meet=False, config=TcpConfig(connect_timeout_s=3.0)) as host:
        host.endpoints[1].put(0, message(b"x"))
        host.move(only=[1])
        clock.now += 3.5
        host.move(only=[1])
        assert host.endpoints[1].lost == [(0, "no connection within 3.0 s")]


# ------------------------------------------------------------------------------------------------------------- dying


def test_what_was_published_is_read_before_the_end_is_told() -> None:
    with Host(2) as host:
        host.endpoints[0].put(1, *(message(bytes([step]) * 9000, step=step) for step in range(10)))
        host.move(only=[0])
        host.close(0)
        host.move()
        assert host.endpoints[1].received == [(0, step, bytes([step]) * 9000) for step in range(10)]
        assert host.endpoints[1].lost == [(0, "its connection ended (the connection was closed by the other end)")]
        host.endpoints[1].put(0, message(b"for nobody"))
        host.move()
        assert not host.endpoints[1].outbox[0]
        assert len(host.endpoints[1].lost) == 1


def test_what_others_have_published_is_read_before_the_end_is_told() -> None:
    """They may say why the rank has ended."""
    with Host(3) as host:
        reader = host.endpoints[2]
        seen: list[int] = []
        reader.peer_lost = lambda peer, reason: seen.append(len(reader.received))  # type: ignore[method-assign]
        host.endpoints[0].put(2, message(b"first"))
        host.move()
        host.endpoints[1].put(
            2, *(message(bytes([step]), step=step) for step in range(10))
        )  # more than are read in a turn
        host.move(only=[1])
        host.close(0)
        host.move(only=[2])
        assert seen == [11]


def test_the_end_of_a_rank_is_told_although_messages_of_others_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(3) as host:
        for rank in (0, 1):
            host.endpoints[rank].put(2, message(b"first"))
        host.move()
        host.endpoints[2].open = False
        host.endpoints[1].put(2, message(b"there is no memory for it"))
        host.move(only=[1])
        host.close(0)
        host.move(only=[2])
        assert host.endpoints[2].lost == []
        clock.now += 0.2
        host.move(only=[2])
        assert [peer for peer, _ in host.endpoints[2].lost] == [0]


def test_a_rank_that_goes_unused_is_no_loss_until_it_is_needed() -> None:
    with Host(3) as host:
        host.close(2)
        host.move()
        assert host.endpoints[0].lost == []
        assert set(host.ranks[0].connected_peers()) == {1}
        host.endpoints[0].put(2, message(b"x"))
        host.move()
        assert host.endpoints[0].lost == [(2, "its connection ended (the connection was closed by the other end)")]


def test_a_rank_on_which_operations_without_messages_rely_is_lost_when_it_goes() -> None:
    with Host(3) as host:
        host.ranks[0].boards.rely_on([0, 1])
        host.close(1)
        host.move()
        [(peer, reason)] = host.endpoints[0].lost
        assert peer == 1
        assert "its connection ended" in reason
        assert host.endpoints[2].lost == []


def test_pieces_of_a_dead_reader_come_back() -> None:
    with Host(3) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(1, *(message(bytes(PIECE), step=step) for step in range(4)))
        host.move()
        host.endpoints[0].put(2, message(b"waits for room"))
        host.move()
        assert host.endpoints[2].received == []
        host.close(1)
        host.move()
        assert host.endpoints[2].received == [(0, 0, b"waits for room")]
        assert bytes(host.endpoints[1].leases[0].body) == bytes(PIECE)  # still readable, and may still be given back
        host.endpoints[1].leases[0].release()


def test_who_talks_on_the_silent_socket_is_lost() -> None:
    with Host(2) as host:
        host.endpoints[0].put(1, message(b"x"))
        host.move()
        host.ranks[0]._connections[1].sock.send(b"?")
        host.move(only=[1])
        assert host.endpoints[1].lost == [(0, "its connection ended (it sent unexpected data)")]


def test_a_heartbeat_that_stands_still_is_a_frozen_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(2, config=TWO_SECONDS) as host:
        for _ in range(100):  # ten seconds of nothing but heartbeats
            clock.now += 0.1
            host.move(1)
        assert host.endpoints[0].lost == []
        for _ in range(25):
            clock.now += 0.1
            host.move(1, only=[0])
        assert [peer for peer, _ in host.endpoints[0].lost] == [1]
        assert host.endpoints[0].lost[0][1].startswith("silent for 2.")
        assert host.endpoints[0].lost[0][1].endswith("raise TOTALREDUCE_PEER_TIMEOUT_S)")


def test_who_was_stopped_and_given_up_knows_that_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(2, config=TWO_SECONDS) as host:
        host.endpoints[0].put(1, message(b"x"))
        host.endpoints[1].put(0, message(b"x"))
        host.move()
        for _ in range(25):
            clock.now += 0.1
            host.move(1, only=[0])
        assert [peer for peer, _ in host.endpoints[0].lost] == [1]
        host.move(1, only=[1])
        [(peer, reason)] = host.endpoints[1].lost
        assert peer == 0
        assert reason.startswith("its connection ended (the connection was closed by the other end); before that, this")
        assert "sent no heartbeat for 2.5 s" in reason


def test_who_was_stopped_himself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shm_module, "time", clock)
    with Host(2, config=TWO_SECONDS) as host:
        clock.now += 60.0
        host.move(1, only=[0])  # rank 1 has not moved either: its heartbeat stands where it stood
        assert host.endpoints[0].lost == []
        host.move(1)
        clock.now += 1.0
        host.move(1)
        assert [endpoint.lost for endpoint in host.endpoints] == [[], []]


# ---------------------------------------------------------------------------------------------------------- sleeping


def test_a_sleeper_is_woken_once_per_sleep() -> None:
    with Host(2) as host:
        assert host.ranks[1].fall_asleep(eager=False)
        assert asleep(host, 1) == ASLEEP
        assert not readable(host, 1)
        host.endpoints[0].put(1, message(b"a"), message(b"b", step=1))
        host.move(only=[0])
        assert readable(host, 1)
        host.ranks[1].wake_up(eager=False)
        assert asleep(host, 1) == 0
        host.move()
        assert len(host.endpoints[1].received) == 2
        assert not readable(host, 1)
        host.endpoints[0].put(1, message(b"c", step=2))
        host.move(only=[0])
        assert not readable(host, 1)  # nobody slept
        assert not host.ranks[1].fall_asleep(eager=False)  # it is seen without a bell


def test_two_threads_asleep_and_one_awake_count_as_asleep() -> None:
    with Host(2) as host:
        assert host.ranks[1].fall_asleep(eager=False)
        assert host.ranks[1].fall_asleep(eager=False)
        host.ranks[1].wake_up(eager=False)
        assert asleep(host, 1) == ASLEEP
        host.endpoints[0].put(1, message(b"a"))
        host.move(only=[0])
        assert readable(host, 1)
        host.ranks[1].wake_up(eager=False)
        assert asleep(host, 1) == 0


def test_who_waits_for_room_is_woken_by_what_is_given_back() -> None:
    with Host(2) as host:
        host.endpoints[1].keeps = True
        host.endpoints[0].put(1, *(message(bytes(PIECE), step=step) for step in range(5)))
        host.move()
        assert_woken_when_given_back(host, 0, host.endpoints[1].leases[3])
        assert len(host.endpoints[1].received) == 5


def test_who_waits_for_a_full_ring_is_woken_when_it_is_read() -> None:
    with Host(2) as host:
        host.endpoints[0].put(1, *(message(b"x", step=step) for step in range(40)))
        host.move(only=[0], rounds=30)
        assert host.ranks[0].fall_asleep(eager=False)
        assert asleep(host, 0) == ASLEEP | WANTS_ROOM
        host.move(1, only=[1])
        assert readable(host, 0)
        host.ranks[0].wake_up(eager=False)


def test_wake_ends_the_next_wait_and_a_wait_that_has_begun() -> None:
    with Host(2) as host:
        host.ranks[0].wake()
        assert not host.ranks[0].fall_asleep(eager=False)
        assert host.ranks[0].fall_asleep(eager=False)
        host.ranks[0].wake()
        assert readable(host, 0)
        host.ranks[0].wake_up(eager=False)


def test_wake_after_close_does_nothing() -> None:
    host = Host(2)
    with host:
        pass
    host.ranks[0].wake()


def test_closing_leaves_no_descriptor_behind() -> None:
    with Host(3):
        pass
    before = open_files()
    for _ in range(3):
        with Host(3) as host:
            host.endpoints[0].put(1, message(bytes(PIECE)))
            host.move()
        del host
    assert open_files() <= before


def test_out_of_memory_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigurationError, match="no shared memory of 8 MiB: Cannot allocate memory"):
        Outbox(OutboxLayout.choose(2, 1 << 20, 6 << 20))


def test_an_address_is_a_random_name() -> None:
    (first, one), (second, two) = listen(), listen()
    assert one != two
    assert one.startswith("@totalreduce-")
    first.close()
    second.close()
