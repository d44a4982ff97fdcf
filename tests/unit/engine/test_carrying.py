"""What the engine and its carriers say to each other, with a carrier that only notes what it is told."""

import pytest

from totalreduce.engine import carrying
from totalreduce.engine.carrying import Carrier
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Carriage, Progress, State
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature

SIGNATURE = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (6,))


class Noted(Carriage):
    def __init__(self, *, can_give_back):
        self.told, self._can_give_back = [], can_give_back
        self.bytes_sent, self.bytes_received = 10, 20

    def give_back(self):
        self.told.append("give back")
        return self._can_give_back

    def end(self):
        self.told.append("end")

    def fail(self):
        self.told.append("fail")

    def promote(self):
        self.told.append("promote")


class Taking(Carrier):
    def __init__(self, *, can_give_back=True):
        self.can_give_back = can_give_back

    def take(self, operation):
        return Noted(can_give_back=self.can_give_back)

    def may_take(self, operation):
        return True


def engine_with(carrier):
    engine = Engine(0, 2, EngineConfig())
    engine.carrying.carriers.insert(0, carrier)
    return engine


def submit(engine, name="w"):
    return engine.submit(Submission(name, SIGNATURE, [memoryview(bytearray(24))]), 0.0)


def frames_to(engine, peer):
    kinds = []
    while (message := engine.next_message(peer, 0.0)) is not None:
        kinds.append(Header.unpack(message.header).frame)
    return kinds


def test_a_carrier_carries_an_operation_out_without_a_message():
    engine = engine_with(Taking())
    operation = submit(engine)
    assert engine.carrying.carried == {operation: operation.carriage}
    assert frames_to(engine, 1) == []
    engine.promote(operation, 0.0)
    engine.carrying.advanced(operation, Progress.WAITING, 0.0)
    assert operation.state is State.WAITING
    engine.carrying.advanced(operation, Progress.MOVING, 0.0)
    assert operation.state is State.MOVING
    engine.carrying.advanced(operation, Progress.DONE, 0.0)
    assert engine.table.pop_completed() == [operation]
    assert operation.carriage.told == ["promote", "end"]
    assert (engine.counters.bytes_sent, engine.counters.bytes_received) == (10, 20)
    assert not engine.carrying.carried


@pytest.mark.parametrize("why", ["frame", "refused"])
@pytest.mark.parametrize("can_give_back", [True, False])
def test_an_operation_is_given_back_unless_all_ranks_have_it_in_their_carriers(why, can_give_back):
    engine = engine_with(Taking(can_give_back=can_give_back))
    operation = submit(engine)
    carriage = operation.carriage
    if why == "refused":
        engine.carrying.advanced(operation, Progress.REFUSED, 0.0)
    else:
        engine.delivered(engine.accept(1, Header(Frame.POSTED, 0, *operation.key), 0.0), 0.0)
    assert carriage.told == ["give back"]
    if can_give_back:
        assert operation.carriage is None
        assert not engine.carrying.carried
        assert frames_to(engine, 1)[0] is Frame.POSTED, "the peer hears that messages carry it out"
        engine.carrying.advanced(operation, Progress.DONE, 0.0)  # a report that comes too late
        assert not operation.finished
    else:
        assert operation.carriage is carriage
        assert frames_to(engine, 1) == []


def test_an_operation_that_fails_is_taken_out_of_its_carrier():
    engine = engine_with(Taking())
    operation = submit(engine)
    engine.peer_lost(1, "killed", 0.0)
    engine.tick(9.0)
    assert operation.finished
    assert operation.carriage.told == ["fail"]
    assert not engine.carrying.carried


def test_a_name_keeps_the_carriage_of_its_last_operation_and_names_of_long_ago_do_not(monkeypatch):
    monkeypatch.setattr(carrying, "_KEPT_MAX", 2)
    engine = engine_with(Taking())
    submissions = [Submission(name, SIGNATURE, [memoryview(bytearray(24))]) for name in ("a", "b", "c", None)]
    kept = []
    for submission in submissions:
        operation = engine.submit(submission, 0.0)
        engine.carrying.advanced(operation, Progress.DONE, 0.0)
        kept.append(operation.carriage)
    assert [engine.carrying.find(submission) for submission in submissions] == [None, kept[1], kept[2], None]
    other = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (7,))
    assert engine.carrying.find(submissions[2]._replace(signature=other)) is None
    assert engine.carrying.find(submissions[2]._replace(ranks=(0,))) is None
    assert engine.carrying.find(submissions[2]._replace(scope="group/")) is None
