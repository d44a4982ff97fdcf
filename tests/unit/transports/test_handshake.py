"""Two ends prove to each other that they belong to one job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from totalreduce.foundation.errors import AuthenticationError, RendezvousError
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity

KEY = bytes(range(32))
IDENTITY = JobIdentity(KEY, "job/default", 0)


def pair(
    connecting: JobIdentity = IDENTITY, accepting: JobIdentity = IDENTITY, *, rank: int = 0, peer: int = 1
) -> tuple[Connector, Acceptor]:
    return Connector(connecting, rank, peer), Acceptor(accepting, peer, 4)


def test_success() -> None:
    connector, acceptor = pair(rank=2, peer=3)
    assert len(connector.outgoing) == acceptor.needed
    challenge = acceptor.feed(connector.outgoing)
    assert len(challenge) == connector.needed
    assert acceptor.peer == 2
    proof = connector.feed(challenge)
    assert connector.needed == 0
    assert len(proof) == acceptor.needed
    assert acceptor.feed(proof) == b""
    assert acceptor.needed == 0


def test_a_wrong_key_is_noticed_by_both_ends() -> None:
    other = JobIdentity(bytes(32), "job/default", 0)
    connector, acceptor = pair(accepting=other)
    challenge = acceptor.feed(connector.outgoing)
    with pytest.raises(AuthenticationError, match="rank 1's address does not know the job's key"):
        connector.feed(challenge)
    with pytest.raises(AuthenticationError, match="claims to be rank 0 does not know the job's key"):
        acceptor.feed(bytes(32))


@pytest.mark.parametrize(
    "other", [JobIdentity(KEY, "another job", 0), JobIdentity(KEY, "job/default", 1)], ids=["job", "epoch"]
)
def test_another_job_or_epoch(other: JobIdentity) -> None:
    connector, acceptor = pair(connecting=other)
    with pytest.raises(AuthenticationError, match="another job or membership"):
        acceptor.feed(connector.outgoing)


@pytest.mark.parametrize(("rank", "peer", "listener"), [(0, 2, 1), (1, 1, 1), (9, 1, 1)])
def test_a_connection_that_went_astray(rank: int, peer: int, listener: int) -> None:
    acceptor = Acceptor(IDENTITY, listener, 4)
    with pytest.raises(AuthenticationError, match=f"from rank {rank} to rank {peer} reached rank {listener}"):
        acceptor.feed(Connector(IDENTITY, rank, peer).outgoing)


def test_a_recorded_proof_is_worth_nothing() -> None:
    connector, acceptor = pair()
    proof = connector.feed(acceptor.feed(connector.outgoing))
    replayed = Acceptor(IDENTITY, 1, 4)
    replayed.feed(connector.outgoing)
    with pytest.raises(AuthenticationError):
        replayed.feed(proof)


def test_a_reflected_challenge_is_worth_nothing() -> None:
    """An attacker who has no key lets the victim answer its own question."""
    connector, acceptor = pair()
    challenge = acceptor.feed(connector.outgoing)
    with pytest.raises(AuthenticationError):
        acceptor.feed(challenge[16:])


def test_nonces_are_fresh() -> None:
    hellos = {Connector(IDENTITY, 0, 1).outgoing for _ in range(20)}
    assert len(hellos) == 20
    hello = hellos.pop()
    assert len({Acceptor(IDENTITY, 1, 4).feed(hello) for _ in range(20)}) == 20


def test_a_key_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="15 bytes; it needs at least 16"):
        JobIdentity(bytes(15), "job", 0)
    assert issubclass(AuthenticationError, RendezvousError)


@given(st.data())
def test_any_other_bytes_are_refused(data: st.DataObject) -> None:
    connector, acceptor = pair()
    size = acceptor.needed
    with pytest.raises(AuthenticationError):
        acceptor.feed(data.draw(st.binary(min_size=size, max_size=size)))
    size = connector.needed
    with pytest.raises(AuthenticationError):
        connector.feed(data.draw(st.binary(min_size=size, max_size=size)))


@given(st.integers(0, 47), st.integers(1, 255))
def test_one_changed_byte_of_a_hello_or_challenge_is_noticed(place: int, change: int) -> None:
    connector, acceptor = pair()
    hello = bytearray(connector.outgoing)
    hello[place % len(hello)] ^= change
    try:
        challenge = acceptor.feed(bytes(hello))
    except AuthenticationError:
        pass
    else:  # the nonce, or a rank that might be: the codes differ then
        with pytest.raises(AuthenticationError):
            connector.feed(challenge)
    connector, acceptor = pair()
    challenge = bytearray(acceptor.feed(connector.outgoing))
    challenge[place] ^= change
    with pytest.raises(AuthenticationError):
        connector.feed(bytes(challenge))
