"""The conformance suite rejects what is wrong, for the right reason, and never by hanging."""

import faults
import pytest

from totalreduce import kernels
from totalreduce.testing import ConformanceError, check_case, check_simulated, check_transport
from totalreduce.testing.conformance import simulated
from totalreduce.testing.conformance_cases import cases_for

FAULTS = [
    (faults.Drops, "hang|DeadlineExceededError"),
    (faults.SwapsTwoBodies, "wrong elements"),
    (faults.Duplicates, "twice|never posted|its connection ended"),
    (faults.CorruptsOneByte, "wrong elements"),
    (faults.DeliversToWrongLane, "wrong elements|protocol violation|its connection ended"),
]
SCHEDULES = [
    (faults.with_allreduce(faults.skips_last_step), "wrong elements"),
    (faults.with_allreduce(faults.counts_twice), "wrong elements"),
    (faults.with_allreduce(faults.replaces_instead_of_adding), "wrong elements|protocol violation"),
    (faults.with_allreduce(faults.wrong_chunk), "wrong elements|are expected"),
    (faults.with_barrier(faults.barrier_that_lets_through), "before every rank had submitted it"),
    (faults.with_broadcast(faults.broadcast_without_tail), "wrong elements|before every rank"),
]


def check_simulated_with(fault: faults.Fault) -> None:
    for case in cases_for(3):
        check_case(case, simulated(prepare=faults.tamper_simulated(fault)))


def test_without_a_fault_the_same_set_up_is_accepted() -> None:
    fault = faults.Honest()
    check_simulated_with(fault)
    assert fault.fired
    assert check_transport(faults.tampered_inproc(fault), world_sizes=(3,)) > 100


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "reason"), FAULTS)
def test_wrong_simulated_transport(kind: type[faults.Fault], reason: str) -> None:
    fault = kind()
    with pytest.raises(ConformanceError, match=reason):
        check_simulated_with(fault)
    assert fault.fired


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "reason"), FAULTS)
def test_wrong_transport_between_threads(kind: type[faults.Fault], reason: str) -> None:
    fault = kind()
    deadline_s = 2.0 if kind is faults.Drops else 20.0
    with pytest.raises(ConformanceError, match=reason):
        check_transport(faults.tampered_inproc(fault), world_sizes=(3,), timeout_s=deadline_s)
    assert fault.fired


def test_wrong_way_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("totalreduce.engine.engine.star_program_for", faults.star_that_forgets_one)
    with pytest.raises(ConformanceError, match=r"wrong elements|before every rank"):
        check_simulated(world_sizes=(4,))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("programs", "reason"), SCHEDULES)
def test_wrong_schedule(programs: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("totalreduce.engine.engine.program_for", programs)
    with pytest.raises(ConformanceError, match=reason):
        check_simulated(world_sizes=(3,))


def test_kernel_that_forgets_the_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.combine
    monkeypatch.setattr(kernels, "combine", lambda *args, **kwargs: right(*args, **{**kwargs, "divisor": 1}))
    with pytest.raises(ConformanceError, match=r"avg of .* wrong elements"):
        check_simulated(world_sizes=(2,))


def test_kernel_that_leaves_the_last_element_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.combine

    def short(op, local, incoming, destination, **types):
        views = {"local_dtype": local, "incoming_dtype": incoming, "destination_dtype": destination}
        right(op, *(view[: max(0, len(view) - types[name].itemsize)] for name, view in views.items()), **types)

    monkeypatch.setattr(kernels, "combine", short)
    with pytest.raises(ConformanceError, match="wrong elements"):
        check_simulated(world_sizes=(2,))
