"""The conformance suite rejects what is wrong, for the right reason, and never by hanging."""

import itertools

import faults
import pytest

from totalreduce import kernels
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import algorithms_of
from totalreduce.testing import Case, Collective, ConformanceError, check_case, check_simulated, check_transport
from totalreduce.testing.conformance import simulated
from totalreduce.testing.conformance_cases import cases_for
from totalreduce.transports.simulated import SimulatedNetwork

FAULTS = [
    (faults.Drops, "hang|DeadlineExceededError"),
    (faults.SwapsTwoBodies, "wrong elements"),
    (faults.Duplicates, "twice|never posted|its connection ended"),
    (faults.CorruptsOneByte, "wrong elements"),
    (faults.DeliversToWrongLane, "wrong elements|protocol violation|its connection ended"),
]
WRONG = "wrong elements"
REFUSED = "protocol violation|rank . submitted"
HANGS = "hang"
RING, STAR, TREE, DIRECT = Algorithm.RING, Algorithm.STAR, Algorithm.TREE, Algorithm.DIRECT
SCHEDULES = [
    (OpKind.ALLREDUCE, RING, faults.skips_last_step, WRONG),
    (OpKind.ALLREDUCE, RING, faults.counts_twice, WRONG),
    (OpKind.ALLREDUCE, RING, faults.replaces_instead_of_adding, WRONG),
    (OpKind.ALLREDUCE, RING, faults.wrong_chunk, f"{WRONG}|{REFUSED}"),
    (OpKind.ALLREDUCE, STAR, faults.forgets_partial_sums, WRONG),
    (OpKind.ALLREDUCE, TREE, faults.stops_before_spreading, WRONG),
    (OpKind.ALLREDUCE, TREE, faults.nothing_at_all, WRONG),
    (OpKind.ALLREDUCE, DIRECT, faults.forgets_partial_sums, WRONG),
    (OpKind.ALLREDUCE, Algorithm.HALVING_DOUBLING, faults.keeps_the_wrong_half, f"{WRONG}|{REFUSED}"),
    (OpKind.ALLREDUCE, Algorithm.HIERARCHICAL, faults.skips_last_step, f"{WRONG}|{REFUSED}|{HANGS}"),
    (OpKind.BARRIER, Algorithm.DISSEMINATION, faults.nothing_at_all, "before every rank had submitted it"),
    (OpKind.BROADCAST, Algorithm.CHAIN, faults.forgets_the_root, f"{WRONG}|before every rank"),
    (OpKind.BROADCAST, TREE, faults.nothing_at_all, f"{WRONG}|before every rank"),
    (OpKind.REDUCE, Algorithm.CHAIN, faults.nothing_at_all, f"{WRONG}|before every rank"),
    (OpKind.REDUCE, TREE, faults.loses_a_subtree, f"{WRONG}|before every rank"),
    (OpKind.ALLGATHER, RING, faults.swaps_two_blocks, f"{WRONG}|{REFUSED}"),
    (OpKind.ALLGATHER, DIRECT, faults.swaps_two_blocks, f"{WRONG}|{REFUSED}"),
    (OpKind.ALLGATHER, DIRECT, faults.forgets_a_pair, f"{WRONG}|before every rank"),
    (OpKind.GATHER, DIRECT, faults.swaps_two_blocks, f"{WRONG}|{REFUSED}"),
    (OpKind.SCATTER, DIRECT, faults.gives_another_ranks_block, f"{WRONG}|{REFUSED}"),
    (OpKind.ALLTOALL, DIRECT, faults.forgets_a_pair, f"{WRONG}|before every rank"),
    (OpKind.ALLTOALL, DIRECT, faults.swaps_two_blocks, f"{WRONG}|{REFUSED}"),
    (OpKind.REDUCE_SCATTER, DIRECT, faults.combines_a_rank_twice, WRONG),
    (OpKind.REDUCE_SCATTER, DIRECT, faults.forgets_partial_sums, WRONG),
    (OpKind.REDUCE_SCATTER, RING, faults.skips_last_step, f"{WRONG}|before every rank"),
]


def schedule_name(value: object) -> str | None:
    return getattr(value, "__name__", getattr(value, "name", "")).lower() if not isinstance(value, str) else ""


def check_simulated_with(fault: faults.Fault) -> None:
    for case in cases_for(3):
        check_case(case, simulated(prepare=faults.tamper_simulated(fault)))


def check_cases_with(kind: OpKind) -> None:
    """Run the cases of the suite, on four simulated ranks, that have a collective of this kind."""
    cases = [case for case in cases_for(4) if any(collective.kind is kind for collective in case.collectives)]
    assert cases
    for case in cases:
        check_case(case, simulated())


def test_without_a_fault_the_same_set_up_is_accepted() -> None:
    fault = faults.Honest()
    check_simulated_with(fault)
    assert fault.fired


@pytest.mark.slow
def test_without_a_fault_the_same_set_up_between_threads_is_accepted() -> None:
    fault = faults.Honest()
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "algorithm", "change", "reason"), SCHEDULES, ids=schedule_name)
def test_wrong_schedule(
    kind: OpKind, algorithm: Algorithm, change: faults.Change, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other cases of the suite, which have no collective of this kind, are those of a right schedule."""
    monkeypatch.setattr("totalreduce.engine.planner.program_for", faults.changed(kind, algorithm, change))
    with pytest.raises(ConformanceError, match=reason):
        check_cases_with(kind)


@pytest.mark.parametrize("kind", [OpKind.REDUCE, OpKind.REDUCE_SCATTER])
def test_sums_that_are_kept_where_nobody_may_write(kind: OpKind, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the direct reduce only the root keeps sums, and it may.
    for algorithm in {*algorithms_of(kind)} - ({DIRECT} if kind is OpKind.REDUCE else set()):
        careless = faults.changed(kind, algorithm, faults.unchanged, preserves=False)
        monkeypatch.setattr("totalreduce.engine.planner.program_for", careless)
        with pytest.raises(ConformanceError, match="changed its inputs" if kind is OpKind.REDUCE_SCATTER else WRONG):
            check_cases_with(kind)


@pytest.mark.slow
def test_the_same_set_up_with_nothing_changed_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = faults.changed(OpKind.ALLREDUCE, Algorithm.RING, faults.unchanged)
    monkeypatch.setattr("totalreduce.engine.planner.program_for", honest)
    assert check_simulated(world_sizes=(4,)) > 1000


# ----------------------------------------------------------------------------------------------------------- selectors

CHOICES = [
    {OpKind.ALLREDUCE: algorithm, OpKind.BROADCAST: other, OpKind.REDUCE: other, OpKind.ALLGATHER: third}
    for algorithm, other, third in ((RING, Algorithm.CHAIN, RING), (STAR, TREE, DIRECT), (TREE, TREE, RING))
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 2), (1, 2)])
def test_ranks_that_choose_different_schedules(pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    selectors = faults.quarrelling_selectors(*(CHOICES[index] for index in pair))
    monkeypatch.setattr("totalreduce.engine.planner.Selector", selectors)
    with pytest.raises(ConformanceError, match=r"rank . submitted .*, carried out by .*; rank . submitted .*, carried"):
        check_simulated(world_sizes=(4,))


ALGORITHM_PAIRS = [
    (kind, *pair)
    for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER)
    for pair in itertools.permutations(algorithms_of(kind), 2)
]


@pytest.mark.parametrize(("kind", "first", "others"), ALGORITHM_PAIRS, ids=schedule_name)
def test_no_two_schedules_are_taken_for_one(
    kind: OpKind, first: Algorithm, others: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes: neither a hang nor a wrong sum, but an error that names both."""
    for world_size, num_elements in itertools.product((2, 3), (0, 1, 100)):
        selectors = faults.quarrelling_selectors({kind: first}, *[{kind: others}] * (world_size - 1))
        monkeypatch.setattr("totalreduce.engine.planner.Selector", selectors)
        collective = Collective(name="w", kind=kind, num_elements=num_elements)
        case = Case(name="quarrel", world_size=world_size, collectives=(collective,))
        with pytest.raises(ConformanceError, match=r"rank . submitted .*, carried out by "):
            check_case(case, simulated())


# -------------------------------------------------------------------------------------------------------------- leases


def check_lending(kind: type[faults.Loan], monkeypatch: pytest.MonkeyPatch) -> list[faults.Loan]:
    lending = faults.Lending(kind)
    monkeypatch.setattr(SimulatedNetwork, "_deliver", lambda *places, **kind: lending.deliver(*places, **kind))
    check_simulated(world_sizes=(3,))
    return lending.loans


def test_a_transport_that_lends_its_memory_gets_it_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loans = check_lending(faults.Loan, monkeypatch)
    assert len(loans) > 1000
    assert {loan.released for loan in loans} == {1}
    assert not any(loan.written for loan in loans)


@pytest.mark.parametrize("kind", [faults.LoanUsedAgain, faults.LoanOfAnother, faults.LoanNotCopied])
def test_a_transport_that_lends_wrongly(kind: type[faults.Loan], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConformanceError, match=WRONG):
        check_lending(kind, monkeypatch)


# ------------------------------------------------------------------------------------------------------------- kernels


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
