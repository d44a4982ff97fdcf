"""The floating store: bounded per peer, paid back in portions."""

import pytest

from totalreduce.engine.allowance import Allowance
from totalreduce.engine.floating import FloatingStore, floating_cost
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Frame, Header


def header(operation: int, body_bytes: int = 100) -> Header:
    return Header(Frame.DATA, 0, operation, body_bytes=body_bytes)


def test_messages_are_claimed_by_operation() -> None:
    store = FloatingStore(10_000)
    messages = [store.accept(peer, header(operation)) for operation in (1, 2) for peer in (5, 6)]
    assert len(store) == 4
    assert (1, 0) in store
    assert (3, 0) not in store
    assert store.claim((1, 0)) == messages[:2]
    assert store.claim((1, 0)) == []
    assert (1, 0) not in store
    assert len(store) == 2
    assert store.total_bytes == store.peak_bytes == 4 * floating_cost(100)


def test_claimed_memory_counts_until_it_is_released() -> None:
    store = FloatingStore(2200)
    for number in range(2):
        store.accept(0, header(number))
    [message] = store.claim((0, 0))
    with pytest.raises(ProtocolError, match="its share is 2200"):
        store.accept(0, header(3))
    store.release(message)
    assert store.total_bytes == floating_cost(100)
    assert store.accept(0, header(3)).body.nbytes == 100
    assert store.peak_bytes == 2 * floating_cost(100)


class Loan:
    """Memory of a transport."""

    may_be_kept = True

    def __init__(self) -> None:
        self.body, self.released = memoryview(bytearray(100)), 0

    def release(self) -> None:
        self.released += 1


def test_memory_of_the_transport_counts_too_and_is_given_back() -> None:
    store, loan = FloatingStore(1200), Loan()
    message = store.accept(0, header(0), loan)
    assert message.body is loan.body
    assert store.total_bytes == floating_cost(100)
    assert loan.released == 0
    store.release(message)
    assert loan.released == 1
    assert store.total_bytes == 0


def test_peers_do_not_take_each_others_share() -> None:
    store = FloatingStore(1200)
    assert store.accept(0, header(0)).peer == 0
    assert store.accept(1, header(0)).peer == 1
    with pytest.raises(ProtocolError, match="rank 1 would have 2120"):
        store.accept(1, header(1))


def test_empty_messages_cost_too() -> None:
    store = FloatingStore(3000)
    for number in range(3):
        store.accept(0, header(number, 0))
    with pytest.raises(ProtocolError):
        store.accept(0, header(4, 0))


def test_credit_is_paid_in_portions() -> None:
    allowance = Allowance(4000)
    allowance.owe(0, 999)
    assert not allowance.is_due(0)
    allowance.owe(0, 1)
    assert allowance.is_due(0)
    assert allowance.take_credit(0) == 1000
    assert allowance.take_credit(0) == 0
    allowance.owe(0, 7)
    assert not allowance.is_due(0)
    assert allowance.take_credit(0) == 7
