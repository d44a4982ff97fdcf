"""The TCP transport alone, driven step by step by one thread: what leaves when, with and without TLS."""

import errno
import os
import select
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
from slow_link import SlowLink
from tcp_ranks import CONFIG, Message, Rank, settle, turn

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.header import Frame
from totalreduce.transports import connection as connection_module
from totalreduce.transports import tcp
from totalreduce.transports.connection import BEAT, UnsentLimit
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.tcp import TcpTransport, listen


@pytest.fixture(params=["plain", "tls"])
def ranks(request):
    files = request.getfixturevalue("rank_tls")[:2] if request.param == "tls" else [None, None]
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    made = [
        Rank(TcpTransport(rank, addresses, door, identity, CONFIG, tls))
        for rank, (door, tls) in enumerate(zip(doors, files, strict=True))
    ]
    yield made
    for rank in made:
        if not rank.left:
            rank.transport.close(0.0)


def only_wait(rank, *, timeout_s=20.0):
    """Let a rank wait, and never make progress."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        rank.transport.wait(0.05)


def connected(ranks):
    """Return the ranks when each has received message 0 of the other one, and nothing more moves."""
    first, second = ranks
    for rank in ranks:
        rank.post(Message(0, 0))
    turn(ranks, lambda: second.inbox == first.inbox == [0])
    settle(ranks)
    return first, second


def fill(sender, receiver, message):
    """Send, to somebody who does not read, until nothing more goes out."""
    receiver.receives = False
    quiet = 0
    while quiet < 20:
        count = len(sender.taken)
        message(sender)
        for rank in (sender, receiver):
            rank.transport.progress()
        quiet = quiet + 1 if len(sender.taken) == count else 0
        time.sleep(0.001)


def test_every_message_arrives_once_whole_and_in_order(ranks):
    first, second = ranks
    sizes = [0, 1, 63, 8191, 8192, 8193, 16383, 16384, 16385, 65535, 65536, 65537, 300_000, 5 << 20, 1, 0]
    first.post(*(Message(number, size) for number, size in enumerate(sizes)))
    second.post(*(Message(number, size) for number, size in enumerate(reversed(sizes))))
    turn(ranks, lambda: len(first.inbox) == len(second.inbox) == len(sizes))
    assert first.inbox == second.inbox == list(range(len(sizes)))
    assert first.transport.idle()
    assert second.transport.idle()
    assert not first.lost + second.lost


def test_the_last_messages_leave_although_their_peer_is_not_ready_any_more(ranks):
    """A full socket cuts the last messages in two; nothing but the socket itself will ask for the rest."""
    first, second = ranks

    def three(rank):
        if not rank.outbox and rank.transport.idle():
            rank.post(*(Message(len(rank.taken) + number, 1000) for number in range(3)))

    first.post(Message(0, 0))
    turn(ranks, lambda: second.inbox == [0])
    fill(first, second, three)
    assert not first.transport.idle()
    assert not first.ready_peers()
    second.receives = True
    turn(ranks, lambda: len(second.inbox) == len(first.taken))
    assert second.inbox == list(range(len(first.taken)))
    assert first.transport.idle()


def test_a_message_that_is_half_way_out_goes_on_while_its_rank_waits(ranks):
    first, second = connected(ranks)
    first.post(Message(1, 8 << 20))
    first.transport.progress()
    assert first.sent == [0], "it does not fit into the socket"
    reading = threading.Thread(target=turn, args=([second], lambda: second.inbox == [0, 1]))
    reading.start()
    deadline = time.monotonic() + 20.0
    while second.inbox != [0, 1] and time.monotonic() < deadline:
        first.transport.wait(0.05)
    reading.join()
    assert second.inbox == [0, 1]
    assert first.sent == [0], "only progress() tells the endpoint"
    assert not first.transport.idle()
    first.transport.progress()
    assert first.sent == [0, 1]
    assert first.transport.idle()


def test_the_memory_of_a_failed_operation_is_free_although_its_message_is_half_way_out(ranks):
    """The receiver gets the bytes as they were."""
    first, second = connected(ranks)
    long = Message(1, 32 << 20)
    body = bytearray(long.body)
    long.body = memoryview(body)
    first.post(long)
    first.transport.progress()
    assert first.sent == [0], "it does not fit into the socket"
    assert first.transport.keep_rests(lambda message: message is long)
    body[:] = bytes(len(body))
    turn(ranks, lambda: second.inbox == [0, 1])  # which compares the bytes


def test_a_second_wait_does_not_lose_that_a_message_has_left(ranks):
    """Two threads may wait at once. The end of the message is short, so the socket has room when it has left."""
    first, second = connected(ranks)

    def one(sender):
        if not sender.outbox:
            sender.post(Message(len(sender.taken), 60_000))

    fill(first, second, one)
    first.outbox.clear()
    first._ready[False].clear()
    numbers = list(range(len(first.taken)))
    (connection,) = (c for c in first.transport._connections.values() if c.outgoing.is_half_way)
    second.receives = True
    reading = threading.Thread(target=turn, args=([second], lambda: second.inbox == numbers))
    reading.start()
    deadline = time.monotonic() + 20.0
    while connection.outgoing.is_half_way and time.monotonic() < deadline:
        first.transport.wait(0.05)
    assert connection.outgoing.writable
    first.transport.wait(0.05)
    reading.join()
    first.transport.progress()
    assert first.sent == numbers
    assert first.transport.idle()


def test_nothing_follows_a_message_in_which_ctrl_c_struck(ranks, monkeypatch):
    """The bytes that were sent last may not have been counted, and would be sent twice.

    The kernel sometimes takes the rest of the long message in the call in which it strikes.
    """
    first, second = ranks
    first.post(Message(0, 0))
    turn(ranks, lambda: second.inbox == [0])
    settle(ranks)
    first.post(Message(1, 64 << 20))
    first.transport.progress()
    (connection,) = (c for c in first.transport._connections.values() if c.outgoing.is_half_way)

    def struck(sent):
        raise KeyboardInterrupt

    monkeypatch.setattr(connection.outgoing, "_consume", struck)
    first.post(Message(2, 10))
    reading = threading.Thread(target=turn, args=([second], lambda: second.lost))
    reading.start()
    with pytest.raises(KeyboardInterrupt):
        only_wait(first)
    reading.join()
    assert second.inbox in ([0], [0, 1])
    assert "ended" in second.lost[0]


def test_what_is_urgent_overtakes_everything_that_has_not_begun_to_leave(ranks):
    first, second = ranks

    def bulk(rank):
        while len(rank.outbox) < 3:
            rank.post(Message(len(rank.taken) + len(rank.outbox), 256 * 1024))

    fill(first, second, bulk)
    begun = len(first.taken)
    first.outbox.appendleft(Message(250, 10))
    second.receives = True
    turn(ranks, lambda: len(second.inbox) >= begun + 4)
    assert second.inbox[: begun + 2] == [*range(begun), 250, begun]


# ------------------------------------------------------------------------------------------------ a connection for bulk


def test_a_message_does_not_wait_for_bulk_that_is_half_way_out(ranks):
    first, second = ranks
    first.post(Message(0, 10))
    turn(ranks, lambda: second.inbox == [0])
    first.post_bulk(Message(1, 16 << 20), Message(2, 100_000))
    turn(ranks, lambda: first.taken[-1].number == 1)
    assert not first.transport.idle()
    first.post(Message(3, 10))
    turn(ranks, lambda: len(second.inbox) == 4)
    assert second.inbox == [0, 3, 1, 2]
    assert [rank.transport.counters.connections for rank in ranks] == [2, 2]


def test_bulk_in_both_directions_takes_no_third_connection(ranks):
    for rank in ranks:
        rank.post(Message(0, 10))
    turn(ranks, lambda: all(rank.inbox == [0] for rank in ranks))
    for rank in ranks:
        rank.post_bulk(Message(1, 100_000))
    turn(ranks, lambda: all(rank.inbox == [0, 1] for rank in ranks))
    assert [rank.transport.counters.connections for rank in ranks] == [2, 2]


def test_bulk_alone_opens_both_connections(ranks):
    first, second = ranks
    first.post_bulk(Message(0, 100_000), Message(1, 1_000_000))
    turn(ranks, lambda: second.inbox == [0, 1])
    assert [rank.transport.counters.connections for rank in ranks] == [2, 2]
    second.post(Message(0, 10))  # by one of them
    turn(ranks, lambda: first.inbox == [0])
    assert [rank.transport.counters.connections for rank in ranks] == [2, 2]


@pytest.mark.parametrize("why", ["refused", "no answer", "no descriptor"])
def test_bulk_shares_the_first_connection_if_there_can_be_no_second(ranks, why, monkeypatch):
    first, second = ranks
    first.post(Message(0, 10))
    turn(ranks, lambda: second.inbox == [0])
    peers = first.transport._peers
    if why == "refused":
        second.transport._peers.listener.sock.shutdown(socket.SHUT_RDWR)
    elif why == "no answer":
        monkeypatch.setattr(peers, "_config", replace(CONFIG, connect_timeout_s=0.05))
        monkeypatch.setattr(peers, "advance", lambda connection: None)
        first.transport._liveness.due_at = 0.0
        monkeypatch.setattr(tcp.Liveness, "look", lambda liveness, pulses, now: setattr(liveness, "due_at", now))
    else:

        def none_left(*_):
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr("totalreduce.transports.peer_connections.socket.socket", none_left)
    first.post_bulk(Message(1, 1_000_000), Message(2, 1_000_000))
    turn(ranks, lambda: len(second.inbox) == 3)
    first.post(Message(3, 10))
    first.post_bulk(Message(4, 100_000))
    turn(ranks, lambda: len(second.inbox) == 5)
    assert sorted(second.inbox) == [0, 1, 2, 3, 4]
    assert first.lost == second.lost == []
    assert first.transport.counters.connections == 1


def test_a_farewell_waits_for_bulk_that_was_sent_before_it(ranks):
    first, second = ranks
    first.post(Message(0, 10))
    turn(ranks, lambda: second.inbox == [0])
    first.post_bulk(Message(1, 100_000))
    turn(ranks, lambda: second.inbox == [0, 1])
    second.receives = False  # data stays unread; control frames are read in any case
    first.post_bulk(Message(2, 100_000))
    turn([first], lambda: first.sent == [0, 1, 2])
    first.post(Message(3, 0, Frame.LOST), Message(4, 0, Frame.GOODBYE))
    turn([first], lambda: len(first.sent) == 5)
    leaving = leave(first)
    look(second, 0.2)
    assert second.inbox == [0, 1, 3]
    second.receives = True
    turn([second], lambda: len(second.inbox) == 5)
    assert second.inbox == [0, 1, 3, 2, 4]
    leaving.join()


# ---------------------------------------------------------------------------------------- two connections of one pair

FAST = TcpConfig(heartbeat_s=0.05, silence_s=1.0)


@pytest.fixture
def crossed():
    """Two ranks that have connected to each other at the same time; what rank 0 sends takes a link of its own."""
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    link = SlowLink(addresses[1])
    identity = JobIdentity(bytes(16), "test", 0)
    made = [
        Rank(TcpTransport(0, [addresses[0], link.address], doors[0], identity, FAST)),
        Rank(TcpTransport(1, addresses, doors[1], identity, FAST)),
    ]
    for rank in made:
        rank.post(Message(0, 10))
    turn(made, lambda: all(rank.inbox == [0] for rank in made))
    assert [rank.transport.counters.connections for rank in made] == [2, 2]
    yield made, link
    link.close()
    made[1].transport.close(0.0)


def look(rank, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not rank.transport.progress():
            rank.transport.wait(0.005)


def leave(rank):
    """In a thread of its own, as another process would."""
    rank.left = True
    thread = threading.Thread(target=rank.transport.close, args=(5.0,))
    thread.start()
    return thread


def test_what_a_leaving_rank_said_last_arrives_on_the_slower_connection(crossed):
    """The other connection has ended long before, and that is no loss."""
    (leaver, other), link = crossed
    link.held.set()
    leaver.post(Message(1, 300_000), Message(2, 10))
    turn([leaver], lambda: not leaver.outbox and leaver.transport.idle())
    leaving = leave(leaver)
    look(other, 0.6)
    assert (other.inbox, other.lost) == ([0], [])
    assert len(other.transport._connections) == 1
    link.held.clear()
    turn([other], lambda: other.inbox == [0, 1, 2])
    assert other.lost == []
    turn([other], lambda: other.lost)  # and a moment after the end of the last one
    assert len(other.lost) == 1
    assert other.lost[0].startswith("its connection ended (the connection was closed by the other end)")
    leaving.join()


def test_a_farewell_may_wait_for_longer_than_silence_is_allowed(crossed):
    """A rank that leaves sends no heartbeats, and its bulk may need long on a slow link."""
    (leaver, other), link = crossed
    slow, fast = leaver.transport._routes[1], leaver.transport._peers.find_bulk_route(1, 0.0)
    assert slow is not fast
    leaver.transport._routes[1], leaver.transport._peers.bulk_routes[1] = fast, slow
    link._bytes_per_s = 150_000
    leaver.post_bulk(Message(1, 300_000))
    leaver.post(Message(2, 0, Frame.GOODBYE))
    turn([leaver], lambda: leaver.sent == [0, 2, 1] and leaver.transport.idle())
    leaving = leave(leaver)
    turn([other], lambda: other.inbox == [0, 1, 2])
    assert other.lost == []
    leaving.join()


def test_as_long_as_bytes_come_nobody_is_lost(crossed):
    """A body of which a part comes now and then, for longer than silence would be allowed."""
    (leaver, other), link = crossed
    link._bytes_per_s = 150_000
    leaver.post(Message(1, 300_000))
    turn([leaver], lambda: not leaver.outbox and leaver.transport.idle())
    leaving = leave(leaver)
    turn([other], lambda: other.inbox == [0, 1])
    assert other.lost == []
    leaving.join()


@pytest.mark.parametrize("ends", ["this rank's", "the other's"])
def test_a_connection_that_ends_while_the_peer_lives_on_is_a_loss(crossed, ends):
    """Somebody between the ranks has cut one of two connections. Heartbeats on the other one are no excuse."""
    (living, other), _road = crossed
    [cut] = [c for c in other.transport._connections.values() if c.opened_here == (ends == "this rank's")]
    cut.sock.shutdown(socket.SHUT_RDWR)
    stop = threading.Event()

    def live():
        while not stop.is_set():
            look(living, 0.05)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        turn([other], lambda: other.lost)
    finally:
        stop.set()
        thread.join()
        living.transport.close(0.0)
    assert len(other.lost) == 1


def test_the_end_of_the_only_connection_is_noticed_at_once(ranks):
    first, second = ranks
    first.post(Message(0, 10))
    turn(ranks, lambda: second.inbox == [0])
    [connection] = first.transport._connections.values()
    begin = time.monotonic()
    connection.sock.shutdown(socket.SHUT_RDWR)
    turn([second], lambda: second.lost)
    assert time.monotonic() - begin < CONFIG.heartbeat_s / 2


@pytest.fixture(params=["kernel says all", "kernel says little"])
def idle(request, monkeypatch):
    """Two ranks with one connection, on which nothing but heartbeats comes.

    An emulator or a sandbox may say less of a connection than Linux, so that its answer is too short.
    """
    if request.param == "kernel says little":
        monkeypatch.setattr(connection_module, "_TCP_INFO", struct.Struct("52xI12xI900x"))
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    made = [Rank(TcpTransport(rank, addresses, door, identity, FAST)) for rank, door in enumerate(doors)]
    made[0].post(Message(0, 10))
    turn(made, lambda: made[1].inbox == [0])
    settle(made)
    yield made
    for rank in made:
        rank.transport.close(0.0)


def test_heartbeats_wake_nobody(idle):
    speaking, listening = idle
    listening.transport.wait(0.0)  # whatever came before
    listening.transport.progress()
    begin = speaking.transport.counters.heartbeats_sent
    while speaking.transport.counters.heartbeats_sent < begin + 4:
        look(speaking, 0.02)
    assert listening.transport._poller.epoll.poll(0.05) == []
    [connection] = listening.transport._connections.values()
    unread = connection.sock.recv(100, socket.MSG_PEEK)
    assert set(unread) == set(BEAT)
    assert len(unread) >= 4
    speaking.post(Message(1, 0))
    turn([speaking], lambda: speaking.sent == [0, 1])
    assert listening.transport._poller.epoll.poll(5.0) != [], "a message wakes its receiver in any case"
    turn(idle, lambda: listening.inbox == [0, 1])


def test_ranks_that_only_send_heartbeats_are_not_lost(idle):
    until = time.monotonic() + 2 * FAST.silence_s
    while time.monotonic() < until:
        for rank in idle:
            look(rank, 0.02)
    assert [rank.lost for rank in idle] == [[], []]
    [connection] = idle[1].transport._connections.values()
    assert connection.sock.recv(1, socket.MSG_PEEK) == BEAT, "they were not read"


def test_a_rank_whose_heartbeats_end_is_lost(idle):
    living, other = idle
    begin = time.monotonic()
    while not other.lost:  # heartbeats that nobody reads end each wait at once
        assert time.monotonic() - begin < 20.0
        look(other, 0.02)
    assert other.lost[0].startswith("silent for")
    assert 0.5 * FAST.silence_s < time.monotonic() - begin < 10.0
    assert living.lost == []
    turn([living], lambda: living.lost)  # it goes on, finds its connection ended, and knows why
    assert living.lost[0].startswith("its connection ended (")
    assert "this process itself sent no heartbeat for" in living.lost[0]


def test_a_long_message_goes_into_the_socket_as_a_whole():
    """And the socket asks for the next message only when no more than the limit has not left."""
    limit_bytes, message = 32 * 1024, bytes(200_000)
    with socket.socket() as door, socket.socket() as sending:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024)
        door.bind(("127.0.0.1", 0))
        door.listen()
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200 * 1024)  # the kernel doubles it
        sending.connect(door.getsockname())
        receiving, _ = door.accept()
        sending.setblocking(False)
        limit = UnsentLimit(sending, limit_bytes)
        assert limit.is_long([b"header", message])
        assert not limit.is_long([b"header", bytes(limit_bytes)])
        with receiving, select.epoll() as epoll:
            epoll.register(sending, select.EPOLLOUT | select.EPOLLET)
            assert len(epoll.poll(0)) == 1
            assert limit.send([message[:5], message[5:]]) == (len(message), False)
            assert epoll.poll(0) == []
            left = len(message)
            while left > len(message) // 2:
                left -= len(receiving.recv(4096))
            assert epoll.poll(0) == []
            while not epoll.poll(0.01):
                left -= len(receiving.recv(4096))
            assert left > 0
            assert sending.send(b"the next message") == 16


@pytest.fixture
def narrow():
    """Two ranks, of which the second one has little room for what arrives."""
    doors = [listen("127.0.0.1") for _ in range(2)]
    for door in doors:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    config = TcpConfig(heartbeat_s=0.05, silence_s=20.0)
    made = [Rank(TcpTransport(rank, addresses, door, identity, config)) for rank, door in enumerate(doors)]
    made[0].post(Message(0, 10))
    turn(made, lambda: made[1].inbox == [0])
    made[0].post(*(Message(number, 50_000) for number in range(1, 60)))
    while made[0].outbox or not made[0].transport.idle():
        made[0].transport.progress()
        look(made[1], 0.005)
    yield made
    made[1].transport.close(0.0)


def test_closing_waits_while_a_slow_peer_takes_bytes(narrow):
    """Whatever comes to a socket that is closed makes the kernel throw away what it has not sent yet."""
    leaver, reader = narrow
    leaving = leave(leaver)
    begin = time.monotonic()
    while reader.inbox != list(range(60)):
        assert time.monotonic() - begin < 20.0
        reader.receives = not reader.receives
        look(reader, 0.1)
        assert reader.lost == []
    leaving.join()


def test_closing_does_not_wait_for_a_peer_that_takes_nothing(narrow):
    leaver, _ = narrow
    begin = time.monotonic()
    leaver.transport.close(20.0)
    assert time.monotonic() - begin < 10.0


def test_a_late_wake_up_does_not_write_to_the_next_file_with_the_number_of_the_pipe(monkeypatch):
    """A byte of it in a connection of another group would be a violation of the protocol there."""
    poller, in_write, written = tcp._Poller(), threading.Event(), []
    pipe = os.fstat(poller._wake_write_fd).st_ino
    write = os.write

    def slow(fd, data):
        in_write.set()
        time.sleep(0.3)
        written.append(os.fstat(fd).st_ino)
        return write(fd, data)

    monkeypatch.setattr(tcp.os, "write", slow)
    thread = threading.Thread(target=poller.wake)
    thread.start()
    assert in_write.wait(20)
    poller.close()
    ends = [os.pipe() for _ in range(3)]
    thread.join(20)
    for end in [end for both in ends for end in both]:
        os.close(end)
    assert written == [pipe]
    poller.wake()
    assert written == [pipe]
