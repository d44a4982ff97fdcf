"""Parts of recovery by themselves: the sampler, the state, the rules of the decision, the launcher's restarts."""

import itertools
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from totalreduce.foundation.environment import read_settings
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.launch.restarts import RecoveryOptions, Restarts, worker_variables
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.recovery.dealing import batches_of, samples_of_step, steps_of
from totalreduce.recovery.epochs import Epochs
from totalreduce.recovery.job import recoverable
from totalreduce.recovery.membership import Decision, Member, Membership, Policy, Report
from totalreduce.recovery.sampler import ElasticSampler
from totalreduce.recovery.sharing import compare_states, send_state
from totalreduce.recovery.state import State
from totalreduce.recovery.stream import ElasticStream
from totalreduce.recovery.wishes import Wish
from totalreduce.testing import run_ranks


def placed(count, batch, rank, world_size, **options):
    sampler = ElasticSampler(count, batch, **options)
    sampler.place(rank, world_size)
    return sampler


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("count", "batch"), [(100, 8), (64, 8), (17, 2), (23, 1), (9, 3), (1000, 7)])
def test_the_ranks_get_every_sample_once_and_the_same_number_of_steps(world_size, count, batch) -> None:
    dealt = [list(placed(count, batch, rank, world_size)) for rank in range(world_size)]
    assert sorted(itertools.chain(*itertools.chain(*dealt))) == list(range(count))
    assert len({len(steps) for steps in dealt}) == 1
    assert {len(share) for steps in dealt for share in steps} <= set(range(1, batch + 2))
    assert [len(placed(count, batch, rank, world_size)) for rank in range(world_size)] == [len(dealt[0])] * world_size


def test_samples_are_dealt_anew_when_ranks_change() -> None:
    used = []
    samplers = [placed(200, 4, rank, 5) for rank in range(5)]
    for world_size in (5, 3, 4, 2):
        for rank in range(world_size):
            samplers[rank].place(rank, world_size)
            samplers[rank].load_state_dict(samplers[0].state_dict())
        for _ in range(3):
            used += [sample for rank in range(world_size) for sample in next(iter(samplers[rank]))]
            for sampler in samplers[:world_size]:
                sampler.advance()
    used += [sample for rank in range(2) for step in samplers[rank] for sample in step]
    assert sorted(used) == list(range(200))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = (placed(50, 5, 0, 1, seed=seed) for seed in (3, 3, 4))
    assert list(first) == list(again) != list(other)
    again.set_epoch(1)
    assert list(first) != list(again)
    assert list(placed(6, 2, 0, 1, shuffle=False)) == [[0, 1], [2, 3], [4, 5]]


def test_an_epoch_that_is_begun_again_goes_on_at_its_cursor() -> None:
    sampler = placed(10, 2, 0, 1, shuffle=False)
    sampler.advance()
    sampler.set_epoch(0)
    assert (sampler.cursor, sampler.left, next(iter(sampler))) == (2, 8, [2, 3])
    sampler.set_epoch(1)
    assert sampler.cursor == 0


def test_incomplete_batches_can_be_dropped() -> None:
    dealt = [list(placed(23, 4, rank, 2, shuffle=False, drop_last=True)) for rank in range(2)]
    assert dealt == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]


def test_a_rank_for_which_no_sample_is_left_gets_one_that_does_not_count() -> None:
    samplers = [placed(2, 4, rank, 3, shuffle=False) for rank in range(3)]
    assert [sampler.next_share for sampler in samplers] == [1, 1, 0]
    dealt = [list(sampler) for sampler in samplers]
    assert dealt[:2] == [[[0]], [[1]]]
    assert dealt[2] in dealt[:2]


def test_ranks_join_after_a_block_without_samples_only_if_the_next_step_has_samples_for_them() -> None:
    """Such as the block of ``job.once`` between two steps: the step that follows it is the next one."""
    sampler = placed(7, 2, 0, 2)
    sampler.advance()
    assert (sampler.next_total, sampler.has_samples_for(4, 1)) == (3, True)
    assert [sampler.has_samples_for(world_size, 0) for world_size in (3, 4)] == [True, False]
    sampler.advance()
    assert (sampler.next_total, sampler.has_samples_for(4, 0)) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((iter([]), 1), "data set with a length"), ((0, 1), "at least 1"), ((5, 0), "at least 1"), ((5, 1.5), "whole")],
)
def test_what_cannot_be_dealt_is_refused(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ElasticSampler(*arguments)


def test_a_position_beyond_the_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has used 11 samples of its epoch, and the data set has 10"):
        ElasticSampler(10, 2).load_state_dict({"epoch": 0, "cursor": 11})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "world_size"), [(1, 1), (4, 1), (1, 5), (3, 2), (4, 7)])
def test_the_number_of_steps_is_that_of_steps_dealt_one_after_the_other(batch, world_size, drop_last) -> None:
    for left in range(6 * batch * world_size):
        num_steps, rest = 0, left
        while total := samples_of_step(rest, batch, world_size, drop_last=drop_last):
            num_steps, rest = num_steps + 1, rest - total
        assert steps_of(left, batch, world_size, drop_last=drop_last) == num_steps


LAUNCHED = {"RANK": "2", "WORLD_SIZE": "3"}
#: What launchers say, and the number of ranks with which the job begins.
LAUNCHES = {
    "alone": ({}, 0, 1),
    "three ranks": (LAUNCHED, 2, 3),
    "and two that only serve": (
        {**LAUNCHED, "TOTALREDUCE_RANK": "2", "TOTALREDUCE_WORLD_SIZE": "5", "TOTALREDUCE_SERVERS": "2"},
        *(2, 3),
    ),
    "and more that may come": ({"RANK": "2", "WORLD_SIZE": "6", "TOTALREDUCE_BEGIN_RANKS": "0-3"}, 2, 4),
    "one that has come": ({"RANK": "5", "WORLD_SIZE": "6", "TOTALREDUCE_BEGIN_RANKS": "0-3"}, 0, 4),
    "variables that contradict each other": ({"RANK": "3", "WORLD_SIZE": "3"}, 0, 1),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_before_the_group_is_known_samples_are_dealt_to_the_ranks_that_the_launcher_starts(launch, monkeypatch) -> None:
    variables, rank, world_size = LAUNCHES[launch]
    for name, text in {"MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, text)
    for dealer in (ElasticSampler(100, 4), ElasticStream(range(100), 4)):
        assert (dealer.rank, dealer.world_size) == (rank, world_size)
        before = len(dealer)
        dealer.place(rank, world_size)
        assert before == len(dealer)
    assert before == len(list(placed(100, 4, rank, world_size)))


def test_a_position_without_a_number_of_steps_is_that_of_the_present_ranks() -> None:
    """As versions of the library have written that did not count steps."""
    sampler = placed(100, 4, 0, 3)
    num_steps = len(sampler)
    sampler.load_state_dict({"epoch": 0, "cursor": 36})
    assert len(sampler) == num_steps


class Blocked:
    """Says which signals are blocked when it is iterated, as in the worker processes that are then started."""

    def __iter__(self):
        return iter([signal.pthread_sigmask(signal.SIG_BLOCK, [])])


def test_signals_that_this_process_handles_are_blocked_in_the_worker_processes_of_a_loader() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        [blocked] = batches_of(Blocked())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.SIGUSR1 in blocked
    assert signal.SIGUSR2 not in blocked, "it has its usual effect"
    assert list(Blocked()) == [blocked - {signal.SIGUSR1}], "the mask of this thread is as before"


# ---------------------------------------------------------------------------------------------------------- the state


def in_one_rank(body):
    [result] = run_ranks(1, body)
    return result


def make_state(group, **values):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, group=group)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    return State(model=model, optimizer=optimizer, sampler=ElasticSampler(8, 2), scheduler=scheduler, **values)


def test_a_block_is_undone() -> None:
    def body(group):
        state = make_state(group, best=1.0, history=[1])
        state.keep()
        before = {name: each.clone() for name, each in state.model.named_buffers()}
        state.model(torch.randn(5, 3)).sum().backward()
        changed = [name for name, each in state.model.named_buffers() if not torch.equal(each, before[name])]
        state.history.append(2)
        state.best = 2.0
        state.optimizer.wrapped.param_groups[0]["lr"] = 7.0
        state.sampler.advance()
        state.restore()
        undone = all(torch.equal(each, before[name]) for name, each in state.model.named_buffers())
        gradients = [each.grad for each in state.model.parameters()]
        lr = state.optimizer.wrapped.param_groups[0]["lr"]
        return changed, undone, set(gradients), state.history, state.best, lr, state.sampler.cursor

    changed, *rest = in_one_rank(body)
    assert changed == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert rest == [True, {None}, [1], 1.0, 0.1, 0]


def test_a_state_goes_to_another_process_bit_by_bit() -> None:
    def body(group):
        source, target = make_state(group, best=1.0), make_state(group, best=0.0)
        for _ in range(3):
            source.model(torch.randn(5, 3)).sum().backward()
            source.optimizer.step()
            source.scheduler.step()
        source.best = 3.5
        source.sampler.load_state_dict({"epoch": 2, "cursor": 4})
        source.count(None)
        source.count("evaluation")
        different = source.digests() != target.digests()
        target.load_shared(source.shared())
        equal = source.digests() == target.digests()
        lr = target.optimizer.wrapped.param_groups[0]["lr"]
        numbers = (target.version, target.steps, target.best, target.sampler.state_dict(), lr)
        return different, equal, numbers, target.is_done("evaluation"), target.is_done("other"), source.describe()

    different, equal, numbers, done, other, description = in_one_rank(body)
    assert (different, equal, done, other) == (True, True, True, False)
    assert numbers == (2, 1, 3.5, {"epoch": 2, "cursor": 4, "part": 0, "begun": 0, "steps": 2}, 0.0125)
    assert "parameter 0.weight: torch.float32[4, 3]" in description.splitlines()


def test_parts_that_cannot_be_recovered_are_refused() -> None:
    def body(group):
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=group)
        other = torch.nn.Linear(2, 1)
        lbfgs = DistributedOptimizer(torch.optim.LBFGS(other.parameters()), other, group=group, name="other")
        errors = []
        for values in (
            {"optimizer": "sgd"},
            {"optimizer": lbfgs},
            {"optimizer": optimizer, "version": 3},
            {"optimizer": optimizer, "thing": object()},
            {"optimizer": optimizer, "sampler": [1]},
        ):
            with pytest.raises(ConfigurationError) as caught:
                State(model=model, **values)
            errors.append(str(caught.value))
        with pytest.raises(ConfigurationError) as caught:
            recoverable(State(model=model, optimizer=inner))
        return [*errors, str(caught.value)]

    none, lbfgs, name, kind, sampler, plain = in_one_rank(body)
    assert "needs an optimizer of torch, not a str" in none
    assert "needs a state with a DistributedOptimizer, not a SGD" in plain
    assert "tr.attempts" in plain
    assert "LBFGS" in lbfgs
    assert "'version'" in name
    assert "object" in kind
    assert "a tr.ElasticSampler or a tr.ElasticStream, not a list" in sampler


def test_states_that_differ_are_an_error_on_every_rank() -> None:
    def body(group):
        state = make_state(group)
        send_state(state, group, 0, [1])
        compare_states(state, group)
        with torch.no_grad():
            state.model[2].weight += group.rank
        with pytest.raises(RecoveryError) as caught:
            compare_states(state, group)
        return str(caught.value)

    for message in run_ranks(2, body):
        assert message.startswith("version 0 of the state differs between ranks: ")
        assert "2.weight" in message


def test_after_a_signal_the_loss_of_a_rank_at_the_end_is_the_end_of_the_job() -> None:
    """All have the last version on disk. The launcher must start no process in the place of the lost one."""

    def body(group):
        model = torch.nn.Linear(2, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        job = recoverable(State(model=model, optimizer=optimizer))
        said = []
        assembly = SimpleNamespace(finish=lambda: said.append("finished"), suspect=said.append)
        job._blocks.epochs = Epochs(assembly, None, None)
        job._blocks.wish = Wish.END
        job.group = SimpleNamespace(rank=0, barrier=lambda: raise_(PeerLost(1, "gone")), close=lambda *_, **__: None)
        job._finish()
        return said

    def raise_(error):
        raise error

    assert run_ranks(1, body) == [["finished"]]


# ----------------------------------------------------------------------------------------------------------- decisions

LAST = Decision(4, (Member(0, 0, True), Member(1, 0, True), Member(2, 1, False)), 10)


def decide(on_loss, reports, ended=(), last=LAST, now=0.0, **options):
    policy = Policy(on_loss, 3, settle_s=5.0, deadline_s=100.0, **options)
    membership = Membership(policy, 5, last, 0.0)
    for report in reports:
        membership.reported(report, 0.0)
    for seat, incarnation in ended:
        membership.ended(seat, incarnation)
    return membership.proposal(now)


def test_the_version_is_the_largest_of_all_reports_also_of_processes_that_have_ended() -> None:
    reports = [Report(0, 0, True, 10), Report(1, 0, True, 11), Report(2, 1, True, 10), Report(1, 1)]
    decision = decide("replace", reports, ended=[(1, 0)])
    assert decision == Decision(5, (Member(0, 0, True), Member(1, 1, False), Member(2, 1, True)), 11)
    assert (decision.source, decision.newcomers, decision.rank_of(1, 1), decision.rank_of(1, 0)) == (0, (1,), 1, None)


def test_replace_waits_for_every_seat_and_shrink_for_every_living_member() -> None:
    two = [Report(0, 0, True, 10), Report(1, 0, True, 10)]
    assert decide("replace", two, ended=[(2, 1)]) is None
    assert decide("shrink", two) is None
    assert decide("shrink", two, ended=[(2, 1)]).members == (Member(0, 0, True), Member(1, 0, True))
    assert decide("shrink", two, now=5.0).members == (Member(0, 0, True), Member(1, 0, True))
    assert decide("shrink", two, ended=[(2, 1)], min_ranks=3) is None


def test_a_job_that_has_begun_needs_a_process_with_its_state() -> None:
    gone = [(0, 0), (1, 0), (2, 1)]
    with pytest.raises(RecoveryError, match="all processes that had the state of the job have ended"):
        decide("replace", [Report(0, 1), Report(1, 1), Report(2, 2)], ended=gone)
    first = Decision(1, (Member(0, 0, False), Member(1, 0, False), Member(2, 0, False)))
    begins = decide("replace", [Report(0, 1), Report(1, 0), Report(2, 0)], ended=[(0, 0)], last=first)
    assert [member.incarnation for member in begins.members] == [1, 0, 0]
    assert (begins.source, begins.newcomers) == (0, (1, 2))


def test_a_job_begins_with_fewer_ranks_than_seats() -> None:
    options = {"last": None, "max_ranks": 5}
    assert decide("shrink", [Report(0, 0), Report(1, 0)], **options) is None
    assert decide("shrink", [Report(0, 0), Report(1, 0), Report(2, 0)], **options).version == 0
    joined = decide("shrink", [*(Report(seat, seat // 2, True, 10) for seat in range(3)), Report(4, 0)], max_ranks=5)
    assert [(member.seat, member.has_state) for member in joined.members][-1] == (4, False)
    with pytest.raises(ConfigurationError, match="--max-ranks must be at least the number of workers, 3, not 2"):
        decide("shrink", [], max_ranks=2)


def test_at_the_deadline_the_missing_ranks_are_named() -> None:
    with pytest.raises(
        RecoveryError, match=r"membership 5 needs 3 ranks, and 1 have come within 100 s. Missing: rank 1, 2"
    ):
        decide("replace", [Report(0, 0, True, 10)], now=100.0)
    with pytest.raises(ConfigurationError, match="--min-ranks must be from 1 to the number of workers, 3, not 4"):
        decide("shrink", [], min_ranks=4)


# ------------------------------------------------------------------------------------------------------------ restarts


def restarts_of(options: RecoveryOptions, num_workers: int) -> Restarts:
    return Restarts(options, options.seats(num_workers, 0))


def start_again(restarts: Restarts, rank: int, now: float) -> None:
    restarts.placed(rank)
    restarts.started(rank, now)


def goes_on_after_failure(restarts: Restarts, rank: int, num_running: int, now: float, *, by_signal: bool) -> bool:
    restarts.failed(rank, now, by_signal=by_signal)
    return restarts.survives(rank, num_running)


def goes_on_after_displacement(restarts: Restarts, rank: int, num_running: int) -> bool:
    restarts.displaced(rank)
    return restarts.has_state(num_running)


def test_workers_are_started_again_at_once_after_a_signal_and_later_after_an_error() -> None:
    restarts = restarts_of(RecoveryOptions(on_loss="replace", restarts=4), 2)
    for rank in range(2):
        restarts.started(rank, 0.0)
    assert goes_on_after_failure(restarts, 0, 1, 5.0, by_signal=True)
    assert restarts.due(5.0) == [0]
    start_again(restarts, 0, 5.0)
    assert goes_on_after_failure(restarts, 1, 1, 5.0, by_signal=False)
    assert (restarts.due(5.9), restarts.due(6.0)) == ([], [1])
    start_again(restarts, 1, 6.0)
    assert goes_on_after_failure(restarts, 1, 1, 7.0, by_signal=False)
    assert (restarts.due(8.9), restarts.due(9.0)) == ([], [1])
    start_again(restarts, 1, 9.0)
    assert restarts.incarnations == [1, 2]
    assert goes_on_after_failure(restarts, 0, 1, 50.0, by_signal=False)
    assert restarts.due(50.0) == [0], "it ran for long, so the program is not broken"
    assert restarts.is_pending
    start_again(restarts, 0, 50.0)
    assert (restarts.left, restarts.is_pending) == (0, False)
    assert not goes_on_after_failure(restarts, 0, 1, 60.0, by_signal=True)


def test_shrink_goes_on_without_restarts_down_to_the_minimum() -> None:
    restarts = restarts_of(RecoveryOptions(on_loss="shrink", restarts=0, min_ranks=2), 4)
    assert goes_on_after_failure(restarts, 0, 3, 1.0, by_signal=True)
    assert goes_on_after_failure(restarts, 1, 2, 1.0, by_signal=True)
    assert not goes_on_after_failure(restarts, 2, 1, 1.0, by_signal=True)


def test_of_two_ranks_that_accuse_each_other_one_is_ended() -> None:
    restarts = restarts_of(RecoveryOptions(on_loss="replace"), 3)
    for rank in range(3):
        restarts.started(rank, 0.0)
    assert restarts.is_to_end(1, 0, by=0, epoch=2)
    assert not restarts.is_to_end(0, 0, by=1, epoch=2)
    assert not restarts.is_to_end(2, 1, by=0, epoch=2), "this incarnation is none of the worker's"
    assert restarts.is_to_end(0, 0, by=1, epoch=3)


def test_seats_beyond_the_number_of_workers_are_started_when_the_job_has_begun() -> None:
    restarts = restarts_of(RecoveryOptions(on_loss="shrink", restarts=1, max_ranks=4), 2)
    for rank in range(2):
        restarts.started(rank, 0.0)
    assert restarts.due(1.0) == []
    restarts.begun()
    assert restarts.due(1.0) == [2, 3]
    start_again(restarts, 2, 1.0)
    assert (restarts.due(1.0), restarts.incarnations, restarts.left) == ([3], [0, 0, 0, -1], 1)
    assert not restarts.is_pending, "the run does not wait for seats without a slot"


def test_a_worker_that_loses_its_host_costs_no_restart() -> None:
    restarts = restarts_of(RecoveryOptions(on_loss="shrink", restarts=1), 3)
    for rank in range(3):
        restarts.started(rank, 0.0)
    assert goes_on_after_displacement(restarts, 1, num_running=2)
    assert (restarts.due(0.0), restarts.left, restarts.is_pending) == ([1], 1, False)
    assert not goes_on_after_displacement(restarts, 0, num_running=0), "no process has the state of the job any more"
    assert goes_on_after_failure(restarts, 2, 0, 5.0, by_signal=True)
    assert goes_on_after_displacement(restarts, 0, num_running=0), "rank 2 is to be started again"
    assert restarts.due(5.0) == [2, 0, 1]


def test_numbers_of_ranks_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--max-ranks must be at least the number of workers, 4, not 3"):
        RecoveryOptions(on_loss="shrink", max_ranks=3).check(4, 0)
    with pytest.raises(ConfigurationError, match="--max-ranks 5 is more than the number of workers, 4, which never"):
        RecoveryOptions(on_loss="replace", max_ranks=5).check(4, 0)
    with pytest.raises(ConfigurationError, match="--max-servers 2 goes with --servers"):
        RecoveryOptions(on_loss="shrink", max_servers=2).check(4, 0)
    with pytest.raises(ConfigurationError, match="--max-servers 1 is less than the number of servers, 2"):
        RecoveryOptions(on_loss="shrink", max_servers=1).check(4, 2)
    with pytest.raises(ConfigurationError, match="--max-servers 3 is more than the number of servers, 2, which never"):
        RecoveryOptions(on_loss="replace", max_servers=3).check(4, 2)


def test_the_seats_of_servers_follow_those_of_all_workers_that_may_come() -> None:
    options = RecoveryOptions(on_loss="shrink", max_ranks=4, max_servers=3)
    options.check(2, 1)
    seats = options.seats(2, 1)
    assert (seats.count, list(seats.serving), seats.first) == (7, [4, 5, 6], [0, 1, 4])
    restarts = Restarts(options, seats)
    restarts.begun()
    assert restarts.due(0.0) == [2, 3, 5, 6]
    variables = worker_variables(options, seats, "127.0.0.1", 1)
    assert variables["TOTALREDUCE_BEGIN_RANKS"] == "0-1,4-4"
    assert read_settings(variables).begin_ranks == (0, 1, 4)
    variables = worker_variables(options, replace(options, max_ranks=None).seats(2, 0), "127.0.0.1", 1)
    assert read_settings(variables).begin_ranks == (0, 1)
    with pytest.raises(ConfigurationError, match="'4' is no list of ranges of ranks, such as 0-3,6-7"):
        read_settings({"TOTALREDUCE_BEGIN_RANKS": "4"})


def test_after_the_end_nothing_is_started_again() -> None:
    for on_loss, goes_on in (("replace", False), ("shrink", False)):
        restarts = restarts_of(RecoveryOptions(on_loss=on_loss), 2)
        restarts.finished()
        assert goes_on_after_failure(restarts, 0, 1, 1.0, by_signal=True) is goes_on
        assert not restarts.is_pending
