"""Certificates, keys and the TLS channel between two sockets, one step at a time."""

import contextlib
import dataclasses
import logging
import random
import socket
from pathlib import Path

import pytest

import totalreduce as tr
from totalreduce.foundation.environment import read_settings
from totalreduce.foundation.errors import AuthenticationError, ConfigurationError
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity
from totalreduce.transports.tls import HungUp, TlsChannel, TlsCredentials

IDENTITY = JobIdentity(bytes(range(32)), "job/default", 0)


@pytest.fixture
def careless(monkeypatch):
    """Makes credentials that were not checked by their owner."""

    def make(tls):
        with monkeypatch.context() as patch:
            patch.setattr(TlsCredentials, "_shake_own_hand", lambda _: b"unchecked")
            return TlsCredentials(tls)

    return make


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    yield pair
    for sock in pair:
        sock.close()


def channels(sockets, connecting, accepting):
    return (
        TlsChannel(sockets[0], connecting, other="rank 1 at 10.0.0.1:7", accepting=False),
        TlsChannel(sockets[1], accepting, other="somebody at 10.0.0.2", accepting=True),
    )


def step(channel):
    """Returns whether the TLS handshake is complete for this end."""
    try:
        channel.advance()
    except BlockingIOError:
        return False
    return True


def joined(sockets, connecting, accepting):
    client, server = channels(sockets, connecting, accepting)
    assert [step(client), step(server), step(client), step(server)] == [False, False, True, True]
    client.trusted = server.trusted = True
    return client, server


def receive(channel, num_bytes, chunk=1 << 20):
    got = bytearray()
    room = memoryview(bytearray(chunk))
    try:
        while len(got) < num_bytes:
            got += room[: channel.recv_into(room)]
    except BlockingIOError:
        pass
    return bytes(got)


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_environment_names_the_files():
    variables = {"TOTALREDUCE_TLS_CERT": "a.pem", "TOTALREDUCE_TLS_KEY": "a.key", "TOTALREDUCE_TLS_CA": "ca.pem"}
    settings = read_settings(variables)
    assert settings.tls == tr.Tls(Path("a.pem"), Path("a.key"), Path("ca.pem"))
    assert settings.warnings == ()
    assert read_settings({}).tls is None
    for name in variables:
        with pytest.raises(ConfigurationError, match=f"; not set: {name}$"):
            read_settings({**variables, name: ""})
    with pytest.raises(ConfigurationError, match=r"; not set: TOTALREDUCE_TLS_KEY and TOTALREDUCE_TLS_CA$"):
        read_settings({"TOTALREDUCE_TLS_CERT": "a.pem"})


@pytest.mark.parametrize("field", ["cert", "key", "ca"])
def test_a_file_that_cannot_be_used_is_named(authorities, tmp_path, field):
    good = authorities.issue("good")
    missing = dataclasses.replace(good, **{field: tmp_path / "missing.pem"})
    with pytest.raises(ConfigurationError, match=r"missing\.pem: No such file"):
        TlsCredentials(missing)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN SOMETHING-----\n")
    garbage.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"garbage\.pem"):
        TlsCredentials(dataclasses.replace(good, **{field: garbage}))


def test_the_key_of_another_certificate(authorities):
    one, other = authorities.issue("one"), authorities.issue("other")
    with pytest.raises(ConfigurationError, match=r"one\.pem and .*other\.key .* key values mismatch"):
        TlsCredentials(dataclasses.replace(one, key=other.key))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(authorities):
    from cryptography.hazmat.primitives import serialization

    tls = authorities.issue("secret")
    key = serialization.load_pem_private_key(Path(tls.key).read_bytes(), None)
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    Path(tls.key).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    with pytest.raises(ConfigurationError, match=r"secret\.key is encrypted; decrypt it"):
        TlsCredentials(tls)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"authority": "foreign"}, r"own certificate .*mine\.pem was not signed by CA .*job-ca\.pem"),
        ({"days": -0.01}, r"own certificate .*mine\.pem has expired"),
    ],
)
def test_a_rank_whose_own_certificate_nobody_could_accept_says_so(authorities, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        TlsCredentials(authorities.issue("mine", **options))


def test_a_key_that_others_can_read_is_warned_of(authorities, caplog):
    tls = authorities.issue("open")
    with caplog.at_level(logging.WARNING):
        TlsCredentials(tls)
        assert not caplog.messages
        Path(tls.key).chmod(0o640)
        TlsCredentials(tls)
    assert caplog.messages == [f"the TLS key {tls.key} can be used by other users: `chmod 600 {tls.key}`"]


# ----------------------------------------------------------------------------------------------------- who is believed


def test_both_ends_know_the_same_binding_and_no_other_connection_has_it(sockets, rank_tls):
    credentials = [TlsCredentials(tls) for tls in rank_tls[:2]]
    client, server = joined(sockets, *credentials)
    assert client.binding() == server.binding()
    assert client.binding()[:64] == credentials[0].digest + credentials[1].digest
    for pair in (credentials, credentials[::-1]):
        others = socket.socketpair()
        for sock in others:
            sock.setblocking(False)
        again = joined(others, *pair)
        assert again[0].binding() == again[1].binding() != client.binding()
        assert again[0].binding()[64:] != client.binding()[64:]
        for sock in others:
            sock.close()


def test_the_codes_of_the_handshake_hold_for_one_binding_only():
    def exchange(connecting, accepting):
        connector, acceptor = Connector(IDENTITY, 0, 1), Acceptor(IDENTITY, 1, 2)
        connector.bind(connecting)
        acceptor.bind(accepting)
        acceptor.feed(connector.feed(acceptor.feed(connector.outgoing)))
        return acceptor.peer

    assert exchange(b"here", b"here") == 0
    with pytest.raises(AuthenticationError, match="does not know the job's key"):
        exchange(b"here", b"there")
    with pytest.raises(AuthenticationError, match="does not know the job's key"):
        exchange(b"", b"there")


WRONG = {
    "foreign": (
        {"authority": "foreign", "trusts": "foreign"},
        r"was not signed by CA .*job-ca\.pem \(",
        "does not accept this rank's certificate .*wrong.pem: .*unknown ca",
    ),
    "expired": (
        {"days": -0.01},
        "has expired",
        "does not accept this rank's certificate .*wrong.pem: .*certificate expired",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_acceptor_with_a_wrong_certificate_is_refused_after_one_round_trip(
    sockets, authorities, rank_tls, careless, kind
):
    options, here, there = WRONG[kind]
    # The wrong one would accept anybody: what is tested is that nobody accepts it.
    wrong = dataclasses.replace(authorities.issue("wrong", **options), ca=rank_tls[0].ca)
    client, server = channels(sockets, TlsCredentials(rank_tls[0]), careless(wrong))
    assert [step(client), step(server)] == [False, False]
    with pytest.raises(AuthenticationError, match=f"^the certificate of rank 1 at 10.0.0.1:7 {here}"):
        client.advance()
    client.say_why()
    with pytest.raises(AuthenticationError, match=f"^somebody at 10.0.0.2 {there}"):
        server.advance()


@pytest.mark.parametrize("kind", WRONG)
def test_a_connector_with_a_wrong_certificate_is_refused_with_the_first_thing_it_says(
    sockets, authorities, rank_tls, careless, kind
):
    options, here, there = WRONG[kind]
    wrong = dataclasses.replace(authorities.issue("wrong", **options), ca=rank_tls[0].ca)
    client, server = channels(sockets, careless(wrong), TlsCredentials(rank_tls[0]))
    assert [step(client), step(server), step(client)] == [False, False, True]
    assert client.send([b"HELLO"]) == 5
    with pytest.raises(AuthenticationError, match=f"^the certificate of somebody at 10.0.0.2 {here}"):
        server.advance()
    server.say_why()
    with pytest.raises(AuthenticationError, match=f"^rank 1 at 10.0.0.1:7 {there}"):
        client.recv_into(memoryview(bytearray(100)))


PLAIN = [Connector(IDENTITY, 0, 1).outgoing, b"GET / HTTP/1.1\r\n\r\n", bytes(100)]


@pytest.mark.parametrize("said", PLAIN, ids=["a rank", "http", "zeros"])
def test_who_does_not_speak_tls_is_told_to(sockets, rank_tls, said):
    _, server = channels(sockets, TlsCredentials(rank_tls[0]), TlsCredentials(rank_tls[1]))
    sockets[0].send(said)
    with pytest.raises(AuthenticationError, match=r"^somebody at 10.0.0.2 does not speak TLS 1.3 .*every rank\?"):
        server.advance()
    server.say_why()
    assert sockets[0].recv(100) == bytes.fromhex("15030300020246")


def test_who_hangs_up_instead_of_speaking_tls(sockets, rank_tls):
    client, _ = channels(sockets, TlsCredentials(rank_tls[0]), TlsCredentials(rank_tls[1]))
    assert not step(client)
    sockets[1].close()  # with something unread: a reset
    with pytest.raises(HungUp, match=r"rank 1 at 10.0.0.1:7 hung up when TLS began"):
        client.advance()


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("seed", range(5))
def test_what_is_sent_arrives_whatever_the_sizes_and_however_full_the_sockets_are(sockets, rank_tls, seed):
    dice = random.Random(seed)
    credentials = [TlsCredentials(tls) for tls in rank_tls[:2]]
    ends = joined(sockets, *credentials)
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    wholes = [dice.randbytes(700_000), dice.randbytes(500_000)]
    rest = [memoryview(whole) for whole in wholes]
    blocked, got = [None, None], [bytearray(), bytearray()]
    times_full = 0
    while any(rest) or [len(part) for part in got] != [500_000, 700_000]:
        side = dice.randrange(2)
        if dice.random() < 0.5:
            got[side] += receive(ends[side], 1, dice.choice([1, 64, 8192, 100_000, 400_000]))
        elif rest[side]:
            if blocked[side] is None:
                cuts = sorted(dice.randrange(dice.choice([50, 5000, 500_000])) for _ in range(dice.randrange(1, 5)))
                blocked[side] = [rest[side][a:b] for a, b in zip([0, *cuts], [*cuts, cuts[-1] + 9], strict=True)]
            try:
                sent = ends[side].send(blocked[side])
            except BlockingIOError:
                times_full += 1
                continue
            rest[side], blocked[side] = rest[side][sent:], None
    assert [bytes(part) for part in got] == wholes[::-1]
    assert times_full > 5


def test_nothing_counts_as_sent_before_the_socket_has_all_of_it(sockets, rank_tls):
    client, server = joined(sockets, *(TlsCredentials(tls) for tls in rank_tls[:2]))
    data, sent = bytes(range(250)) * 20_000, 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(data):
            sent += client.send([data[sent:]])
    assert sent < len(data)
    arrived = receive(server, len(data))
    assert len(arrived) >= sent  # the begun batch is half-way
    assert len(arrived) - sent < 64 * 1024
    while sent < len(data):
        sent += client.send([data[sent:]])
        arrived += receive(server, len(data))
    assert arrived == data


def test_a_changed_byte_ends_the_connection_and_nothing_of_it_is_delivered(sockets, rank_tls):
    client, server = joined(sockets, *(TlsCredentials(tls) for tls in rank_tls[:2]))
    before, wire = socket.socketpair()
    with before, wire:
        client._sock = before
        client.send([b"a true message"])
        client.send([b"pay 100"])
        sent = bytearray(wire.recv(1000))
    sent[-3] ^= 1
    sockets[0].send(sent)
    room = memoryview(bytearray(100))
    count = server.recv_into(room)
    assert bytes(room[:count]) == b"a true message"
    with pytest.raises(ConnectionAbortedError, match="TLS: decryption failed or bad record mac"):
        server.recv_into(room)


def test_the_end_of_the_connection(sockets, rank_tls):
    client, server = joined(sockets, *(TlsCredentials(tls) for tls in rank_tls[:2]))
    client.send([b"last words"])
    sockets[0].close()
    room = memoryview(bytearray(100))
    assert server.recv_into(room) == 10
    with pytest.raises(ConnectionResetError, match="closed by the other end"):
        server.recv_into(room)
