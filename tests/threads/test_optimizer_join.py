"""``DistributedOptimizer.join``: with closures, after time-outs, and when the ranks with data miss gradients.

``test_optimizer_options`` has the rounds and averages of ranks that join.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    Net,
    all_equal,
    batches,
    flat,
    impatient,
    loss_of,
    outcome,
    repeat_until_done,
    shard,
    train_alone,
    wrap,
)

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MissingTensorError,
    PlanMismatchError,
)
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import run_ranks

PATIENT = EngineConfig(timeout_s=30.0, stall_warning_s=0)


class Rows(torch.nn.Module):
    """A module with sparse gradients and one with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(8, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("divisor", ["world", "active"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_without_data_take_part_in_the_losses_of_closures(world_size: int, divisor: str, clips: bool) -> None:
    """Rank r has r steps, so rank 0 has never passed a closure."""

    def body(group: Group) -> tuple[list[float], int]:
        model = Net()
        wrapped = wrap(model, group, join_divisor=divisor)
        losses = []
        for step in range(group.rank):

            def closure(step: int = step) -> torch.Tensor:
                wrapped.zero_grad()
                loss_of(model, batches(1)[0]).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(wrapped.param_groups[0]["params"], 1.0)
                return torch.tensor(100.0 * step + group.rank)

            losses.append(wrapped.step(closure).item())
        return losses, wrapped.join()

    for rank, (losses, last) in enumerate(run_ranks(world_size, body)):
        assert last == world_size - 1
        for step, loss in enumerate(losses):
            active = range(step + 1, world_size)
            total = sum(100.0 * step + other for other in active)
            assert loss == pytest.approx(total / (len(active) if divisor == "active" else world_size), rel=1e-6)
        assert len(losses) == rank


@pytest.mark.parametrize("late", ["gradients", "loss"])
def test_a_step_with_a_closure_goes_on_after_a_time_out(late: str) -> None:
    first = threading.Event()

    def body(group: Group) -> tuple[float, int, torch.Tensor]:
        model, calls, losses = Net(), [], []
        wrapped = wrap(model, group, overlap="step")

        def closure() -> float:
            calls.append(1)
            wrapped.zero_grad()
            loss_of(model, batches(1)[0]).backward()
            if group.rank == 1 and late == "loss":
                _ = wrapped.param_groups  # the gradients are reduced, and then this rank is late
                assert first.wait(20)
            return float(group.rank)

        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group, 1.0):
                wrapped.step(closure)
            with pytest.raises(ConfigurationError, match="repeat it"):
                wrapped.step()
            calls_that_would_lose_it = [wrapped.join, wrapped.zero_grad, wrapped.replan]
            calls_that_would_lose_it.append(lambda: wrapped.add_param_group({"params": []}))
            for call in calls_that_would_lose_it:
                with pytest.raises(ConfigurationError, match="repeat it"):
                    call()
            if late == "gradients":
                with pytest.raises(ConfigurationError, match="Repeat that call"):
                    loss_of(model, batches(2)[1]).backward()
            first.set()
        elif late == "gradients":
            assert first.wait(20)
        for _ in range(2):
            repeat_until_done(lambda: losses.append(wrapped.step(closure)))
        return losses[0] + 10 * losses[1], len(calls), flat(model)

    results = run_ranks(2, body, engine=PATIENT)
    assert [(losses, calls) for losses, calls, _ in results] == [(5.5, 2)] * 2
    assert all_equal([parameters for _, _, parameters in results])


def test_after_a_missing_gradient_the_next_step_calls_its_closure() -> None:
    def body(group: Group) -> tuple[float, int, torch.Tensor]:
        model, calls = Net(), []
        wrapped = wrap(model, group, on_missing="error")

        def closure() -> float:
            calls.append(1)
            wrapped.zero_grad()
            if group.rank == 0 or len(calls) > 1:
                loss_of(model, batches(1)[0]).backward()
            return 10.0 * len(calls) + group.rank

        with pytest.raises(MissingTensorError):
            wrapped.step(closure)
        return wrapped.step(closure), len(calls), flat(model)

    results = run_ranks(2, body)
    assert [(loss, calls) for loss, calls, _ in results] == [(20.5, 2)] * 2
    assert all_equal([parameters for _, _, parameters in results])


def test_backward_cannot_change_the_gradients_of_an_interrupted_step_with_a_closure_unnoticed() -> None:
    late = threading.Event()

    def body(group: Group) -> None:
        model = Net()
        wrapped = wrap(model, group)

        def closure() -> float:
            loss_of(model, batches(1)[0]).backward()
            _ = wrapped.param_groups
            if group.rank == 0:
                until_the_end.enter_context(impatient(group))  # when both ranks have the gradients
            else:
                assert late.wait(20)
            return 1.0

        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), contextlib.ExitStack() as until_the_end:
                wrapped.step(closure)
            with pytest.raises(ConfigurationError, match="Load a checkpoint"):
                loss_of(model, batches(2)[1]).backward()
            late.set()
            with pytest.raises(ConfigurationError, match="was closed"):
                wrapped.step(closure)
        else:
            wrapped.step(closure)

    run_ranks(2, body, engine=PATIENT)


def test_a_closure_with_two_rounds_beside_a_rank_without_data() -> None:
    """As sharpness-aware minimisation does it: gradients are read within the closure, and then computed once more."""

    def body(group: Group) -> list[float]:
        model = Net()
        wrapped = wrap(model, group, join_divisor="active")

        def closure() -> float:
            for batch in batches(2):
                wrapped.zero_grad()
                loss_of(model, batch).backward()
                assert wrapped.param_groups[0]["params"][0].grad is not None
            return 2.0 * group.rank

        losses = [wrapped.step(closure) for _ in range(3 * (group.rank > 0))]
        assert wrapped.join() == 2
        return losses

    assert run_ranks(3, body) == [[], [3.0] * 3, [3.0] * 3]


def test_losses_keep_their_type_and_their_digits() -> None:
    def body(group: Group) -> list[object]:
        model = Net()
        wrapped = wrap(model, group)

        def step(loss: object) -> object:
            loss_of(model, batches(1)[0]).backward()
            return wrapped.step(lambda: loss)

        half = step(torch.tensor([[group.rank]], dtype=torch.bfloat16))
        assert isinstance(half, torch.Tensor)
        assert half.dtype is torch.bfloat16
        assert half.tolist() == [[0.5]]
        with pytest.raises(ConfigurationError, match="loss of one element, not of 3"):
            step(torch.ones(3))
        wrapped.step()
        return [step(1.0 + 1e-12 * group.rank), step(None), step(group.rank)]

    assert run_ranks(2, body) == [[1.0 + 0.5e-12, None, 0.5]] * 2


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_a_closure_without_gradients_does_not_sum_them_again(op: ReduceOp) -> None:
    def body(group: Group) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        wrapped = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), group=group, op=op)
        values = []
        for resets in (False, True):
            weight.grad = None
            (weight * 1.0).sum().backward()
            wrapped.synchronize()
            if op is ReduceOp.SUM and not resets:
                with pytest.raises(ConfigurationError, match="reduced already"):
                    wrapped.step(lambda: 1.0)
                wrapped.step()
            else:
                wrapped.step(weight.grad.zero_ if resets else lambda: 1.0)
            values.append(-weight.item())
        return values

    assert run_ranks(2, body) == [[2.0, 2.0] if op is ReduceOp.SUM else [1.0, 1.0]] * 2


def test_a_join_goes_on_after_time_outs() -> None:
    first, second = threading.Event(), threading.Event()

    def body(group: Group) -> tuple[int, torch.Tensor]:
        model = Net()
        wrapped = wrap(model, group)
        if group.rank == 0:
            with impatient(group):  # reductions of buckets keep the time-out of their first round
                loss_of(model, batches(1)[0]).backward()
                repeat_until_done(wrapped.step)
                for late in (first, second):
                    with pytest.raises(DeadlineExceededError):
                        wrapped.join()
                    for call in (wrapped.step, wrapped.synchronize, wrapped.replan, lambda: wrapped.param_groups):
                        with pytest.raises(ConfigurationError, match=r"no more data: repeat join\(\)"):
                            call()
                    late.set()
        else:
            for late, batch in zip((None, first, second), batches(3), strict=True):
                assert late is None or late.wait(20)
                wrapped.zero_grad()
                loss_of(model, batch).backward()
                wrapped.step()
        last: list[int] = []
        repeat_until_done(lambda: last.append(wrapped.join()))
        group.broadcast(parameters := flat(model), root=last[0]).wait()
        # The optimizer can be used again, with all ranks.
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(parameters, model.parameters())
        wrapped.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        repeat_until_done(wrapped.step)
        return last[0], flat(model)

    results = run_ranks(2, body, engine=PATIENT)
    assert [last for last, _ in results] == [1, 1]
    assert all_equal([parameters for _, parameters in results])


def test_backward_after_a_step_that_ran_out_of_time_is_refused() -> None:
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        wrapped = wrap(model, group, overlap="step")
        loss_of(model, batches(1)[0]).backward()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError), impatient(group):
                wrapped.step()
            with pytest.raises(ConfigurationError, match=r"Repeat that call until it returns, then"):
                loss_of(model, batches(2)[1]).backward()
            late.set()
        else:
            assert late.wait(20)
        repeat_until_done(wrapped.step)
        return flat(model)

    results = run_ranks(2, body, engine=PATIENT)
    assert (results[0] - train_alone(OPTIMIZERS["sgd"], 1)).abs().max() <= 1e-12
    assert all_equal(results)


def test_a_missing_gradient_is_reported_after_a_time_out() -> None:
    """All buckets have arrived, and the other rank has not said yet whether it is the one without a gradient."""
    late, closed = threading.Event(), threading.Event()

    def body(group: Group) -> tuple[list[str], torch.Tensor]:
        model = Net()
        wrapped = wrap(model, group, on_missing="error", overlap="step")
        if group.rank == 0:
            loss_of(model, batches(1)[0]).backward()
            assert closed.wait(20)
            with pytest.raises(DeadlineExceededError), impatient(group, 1.0):
                wrapped.step()
            late.set()
        else:
            wrapped._close_round()
            closed.set()
            assert late.wait(20)
        said: list[str] = []
        repeat_until_done(lambda: said.append(outcome(wrapped.step)))
        wrapped.zero_grad()
        loss_of(model, shard(batches(1)[0], group)).backward()
        said.append(outcome(wrapped.step))
        return said, flat(model)

    results = run_ranks(2, body, engine=PATIENT)
    assert [said for said, _ in results] == [["missed (1,)", "done"]] * 2
    assert (results[0][1] - train_alone(OPTIMIZERS["sgd"], 1)).abs().max() <= 1e-12


def test_a_joined_rank_does_not_gather_where_the_others_miss_gradients() -> None:
    def body(group: Group) -> list[str]:
        model = Rows()
        wrapped = wrap(model, group, on_missing="error", sparse="gather", overlap="step")
        said = []
        for step in range(3 if group.rank < 2 else 0):
            wrapped.zero_grad()
            rows = model.rows(torch.tensor([step, group.rank]))
            (rows if step == 1 and group.rank == 1 else model.out(rows)).sum().backward()
            said.append(outcome(wrapped.step))
        wrapped.join()
        return said

    assert run_ranks(3, body) == [["done", "missed (1,)", "done"]] * 2 + [[]]


def test_a_rank_that_joins_again_stays_where_the_others_miss_gradients() -> None:
    def body(group: Group) -> list[str]:
        model = Net()
        wrapped = wrap(model, group, on_missing="error", overlap="step")
        wrapped.join()  # all ranks have joined, and begin another epoch
        said = []
        for step in range(2 if group.rank < 2 else 0):
            wrapped.zero_grad()
            if step or group.rank == 0:
                loss_of(model, batches(1)[0]).backward()
            said.append(outcome(wrapped.step))
        assert wrapped.join() == 1
        return said

    assert run_ranks(3, body) == [["missed (1,)", "done"]] * 2 + [[]]


@pytest.mark.parametrize("again", [1, 2])
def test_gathered_rows_arrive_once_after_time_outs(again: int) -> None:
    events, closed = [threading.Event() for _ in range(again)], threading.Event()

    def body(group: Group) -> None:
        model = Rows()
        with torch.no_grad():  # threads share torch's generator of random numbers
            model.out.weight.fill_(0.25)
        wrapped = wrap(model, group, op=ReduceOp.SUM, sparse="gather")
        model.out(model.rows(torch.tensor([2, 3 + group.rank]))).sum().backward()
        expected = torch.zeros(8, 4)
        expected[2], expected[3], expected[4] = 2 * model.out.weight[0], model.out.weight[0], model.out.weight[0]
        if group.rank == 0:
            assert closed.wait(20)
            for event in events:
                with pytest.raises(DeadlineExceededError), impatient(group, 1.0):
                    wrapped.synchronize()
                event.set()
        else:
            for event in events:  # rank 0 has the dense gradients by then, and waits for the rows of this rank
                wrapped._close_round()
                closed.set()
                assert event.wait(20)
        repeat_until_done(wrapped.synchronize)
        assert torch.equal(model.rows.weight.grad.to_dense(), expected)
        wrapped.step()

    run_ranks(2, body, engine=PATIENT)


@pytest.mark.parametrize("then", ["again", "replan"])
def test_rows_that_ran_out_of_time_are_those_of_their_round(then: str) -> None:
    """The dense gradients have arrived, and the rows have not. Gradients stay local until all have arrived."""
    late, closed = threading.Event(), threading.Event()

    def body(group: Group) -> tuple[list[float], float]:
        model = Rows()
        with torch.no_grad():
            model.rows.weight.fill_(1.0)
            model.out.weight.fill_(0.25)
            model.out.bias.fill_(0.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped = DistributedOptimizer(inner, model, group=group, op=ReduceOp.SUM, sparse="gather")
        model.out(model.rows(torch.tensor([2 + group.rank]))).sum().backward()
        if group.rank == 0:
            assert closed.wait(20)
            with pytest.raises(DeadlineExceededError), impatient(group, 1.0):
                wrapped.synchronize()
            assert model.out.bias.grad.item() == 1.0
            if then == "again":
                with pytest.raises(ConfigurationError, match="Repeat that call"):
                    model.rows(torch.tensor([5])).sum().backward()
                wrapped.zero_grad()
            late.set()
        else:
            wrapped._close_round()
            closed.set()
            assert late.wait(20)
        if then == "replan":
            wrapped.replan()
        repeat_until_done(wrapped.step)
        return (1.0 - model.rows.weight[:, 0]).tolist(), -model.out.bias.item()

    assert run_ranks(2, body, engine=PATIENT) == [([0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0], 2.0)] * 2


def test_close_after_a_failed_replan_gives_nothing_back_twice() -> None:
    def body(group: Group) -> None:
        model = Net()
        wrapped = wrap(model, group)
        stream, closed = wrapped._dense._stream, []
        close = stream.close
        stream.close = lambda: closed.append(close())
        model.second.weight.requires_grad_(group.rank == 0)
        with pytest.raises(PlanMismatchError):
            wrapped.replan()
        assert len(closed) == 1
        wrapped.close()
        assert len(closed) == 1

    run_ranks(2, body)
