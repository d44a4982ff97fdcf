"""Which operations a gate takes, and which it refuses."""

import threading

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.runner.gate import Gate


def is_taken(gate: Gate) -> bool:
    try:
        gate.check()
    except ConfigurationError:
        return False
    else:
        return True


def test_operations_are_refused_for_the_last_reason_until_they_are_taken_again() -> None:
    gate = Gate()
    assert is_taken(gate)
    for reason in ("first", "second"):
        gate.refuse(reason)
        with pytest.raises(ConfigurationError, match=reason):
            gate.check()
        assert gate.is_formed  # a group that refuses operations for a while is formed
    gate.take()
    assert is_taken(gate)


def test_a_group_that_is_not_formed_may_have_another_reason() -> None:
    gate = Gate()
    gate.await_formation("call tr.recoverable")
    gate.refuse("call hvd.elastic.run")
    assert not gate.is_formed
    assert not is_taken(gate)
    assert gate.reason == "call hvd.elastic.run"


def test_a_thread_that_is_admitted_is_the_only_one_whose_operations_are_taken() -> None:
    gate, taken = Gate(), []
    gate.refuse("a step is taken alone")

    def worker() -> None:
        gate.admit_thread()
        taken.append(is_taken(gate))

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join(10.0)
    assert taken == [True]
    assert not is_taken(gate)
