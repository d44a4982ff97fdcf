"""``sync=tr.ParameterServer(...)`` on real ranks: bits, staleness, conservation, snapshots."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from optimizer_cases import OPTIMIZERS, Factory, Net, all_equal, batches, flat, impatient, loss_of, repeat_until_done

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, SlowWorkersError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.tensors.work import Work
from totalreduce.testing import run_ranks

ps = tr.ps
SIZES = [1, 2, 3, 4]
NUM_STEPS = 4
RULES = [ps.Sequential(), ps.Bounded(0)]


class Counting(torch.nn.Module):
    """Parameters whose gradients are ones."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(size, dtype=dtype) for size in (3, 400, 70, 1, 129)])

    def forward(self, factor: float) -> torch.Tensor:
        return sum((part.sum() for part in self.parts), torch.zeros(())) * factor


def train(
    group: Group, sync: object, factory: Factory = OPTIMIZERS["sgd"], steps: range = range(NUM_STEPS)
) -> torch.Tensor:
    """Train on this rank's part of the batches."""
    model = Net(torch.float32)
    optimizer = DistributedOptimizer(factory(list(model.parameters())), model, group=group, sync=sync)
    for inputs, targets in batches(steps.stop, dtype=torch.float32)[steps.start :]:
        optimizer.zero_grad()
        mine = slice(group.rank, None, group.world_size)
        loss_of(model, (inputs[mine], targets[mine])).backward()
        optimizer.step()
    if sync is not None:
        optimizer.strategy_steps.finish()
    optimizer.close()
    return flat(model)


def in_order_of_ranks(world_size: int, factory: Factory) -> torch.Tensor:
    """The reference: one process adds the gradients of all ranks in the order of ranks."""
    model = Net(torch.float32)
    optimizer = factory(list(model.parameters()))
    for inputs, targets in batches(NUM_STEPS, dtype=torch.float32):
        totals: list[torch.Tensor] = []
        for rank in range(world_size):
            optimizer.zero_grad()
            loss_of(model, (inputs[rank::world_size], targets[rank::world_size])).backward()
            grads = [parameter.grad.clone() for parameter in model.parameters()]
            totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else grads
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total / world_size
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("optimizer", ["server", pytest.param("worker", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", SIZES)
def test_synchronous_steps_without_more_are_the_synchronous_optimizer(world_size: int, optimizer: str) -> None:
    expected = run_ranks(world_size, lambda group: train(group, None, OPTIMIZERS["adamw"]))
    sync = tr.ParameterServer(consistency=ps.Bounded(0), optimizer=optimizer)
    found = run_ranks(world_size, lambda group: train(group, sync, OPTIMIZERS["adamw"]))
    assert all_equal([*found, *expected])


def test_synchronous_steps_without_more_have_the_same_calls() -> None:
    def body(group: Group) -> None:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = DistributedOptimizer(inner, model, group=group, sync=tr.ParameterServer())
        model(1.0).backward()
        outer.step()
        steps = outer.strategy_steps
        assert (steps.steps_taken, steps.statistics().staleness) == (1, {0: 1})
        with pytest.raises(ConfigurationError, match="no server has anything"):
            steps.save("folder")
        outer.close()
        with pytest.raises(ConfigurationError, match="not op=SUM"):
            DistributedOptimizer(inner, model, group=group, sync=tr.ParameterServer(), op=tr.ReduceOp.SUM)

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("kind", "rule", "optimizer"),
    [
        ("momentum", RULES[1], "server"),
        ("adamw", RULES[0], "worker"),
        pytest.param("sgd", RULES[0], "server", marks=pytest.mark.slow),
        pytest.param("adamw", RULES[0], "server", marks=pytest.mark.slow),
        pytest.param("momentum", RULES[1], "worker", marks=pytest.mark.slow),
    ],
)
def test_synchronous_steps_through_servers_have_the_bits_of_a_sum_in_the_order_of_ranks(
    world_size: int, kind: str, rule: ps.Consistency, optimizer: str
) -> None:
    sync = tr.ParameterServer(consistency=rule, optimizer=optimizer, servers=[world_size - 1, 0][:world_size], shards=3)
    found = run_ranks(world_size, lambda group: train(group, sync, OPTIMIZERS[kind]))
    assert all_equal([*found, in_order_of_ranks(world_size, OPTIMIZERS[kind])])
    if world_size <= 2:  # a sum of two numbers has no order
        assert all_equal([*found, *run_ranks(world_size, lambda group: train(group, None, OPTIMIZERS[kind]))])


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))])
@pytest.mark.parametrize("optimizer", ["server", "worker"])
@pytest.mark.parametrize("rule", [ps.Sequential(), ps.Bounded(2), ps.Eventual()], ids=str)
@pytest.mark.parametrize("overlap", ["backward", "iterations"])
def test_every_gradient_counts_once(world_size: int, optimizer: str, rule: ps.Consistency, overlap: str) -> None:
    """Ranks take different numbers of steps, and one of them is slow."""

    def body(group: Group) -> tuple[torch.Tensor, int]:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = tr.ParameterServer(consistency=rule, optimizer=optimizer, servers=[0])
        outer = DistributedOptimizer(inner, model, group=group, sync=sync, overlap=overlap, bucket_bytes=1)
        for _ in range(6 + group.rank):
            outer.zero_grad()
            model(-float(10**group.rank)).backward()
            time.sleep(0.003 if group.rank == 0 else 0.0)
            outer.step()
        outer.strategy_steps.finish()
        outer.close()
        return flat(model), max(outer.strategy_steps.staleness, default=0)

    total = sum((6 + rank) * 10**rank for rank in range(world_size)) / world_size
    for parameters, staleness in run_ranks(world_size, body):
        torch.testing.assert_close(parameters, torch.full_like(parameters, total), rtol=1e-12, atol=1e-9)
        assert rule.bound is None or staleness <= rule.bound


def test_a_slow_rank_holds_others_back_by_the_bound_alone() -> None:
    """Rank 1 takes three steps before the first one of rank 0, and the fourth one before the second one of rank 0."""
    third, slow, fourth = threading.Event(), threading.Event(), threading.Event()

    def body(group: Group) -> dict[int, int]:
        model = Counting()
        sync = tr.ParameterServer(consistency=ps.Bounded(3))
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        for number in range(4):
            outer.zero_grad()
            model(1.0).backward()
            if (group.rank, number) == (0, 0):
                assert third.wait(20)
                time.sleep(0.1)
                slow.set()
            elif (group.rank, number) == (0, 1):
                assert fourth.wait(20)
            elif (group.rank, number) == (1, 3):
                third.set()
            outer.step()
            if (group.rank, number) == (1, 3):
                assert slow.is_set()
                fourth.set()
        outer.strategy_steps.finish()
        outer.close()
        return dict(outer.strategy_steps.statistics().staleness)

    _, staleness = run_ranks(2, body)
    assert max(staleness) == 3


@pytest.mark.parametrize("rule", [ps.Sequential(), ps.Bounded(2)], ids=str)
def test_what_codes_do_not_express_is_kept(rule: ps.Consistency) -> None:
    """With SGD at a rate of 1, parameters and residuals together are the sum of all gradients."""

    def body(group: Group) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        torch.manual_seed(group.rank)
        model = Counting(torch.float32)
        sync = tr.ParameterServer(consistency=rule, codec=tr.Ternary())
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        pushed = torch.zeros(603, dtype=torch.float64)
        for _ in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            pushed += torch.cat([parameter.grad.double() for parameter in model.parameters()])
            outer.step()
        steps = outer.strategy_steps
        rest = steps._client._client._residual.values.astype(np.float64)
        rest = np.concatenate([steps._pushes.rows.of(rest, number).numpy() for number in range(5)])
        steps.finish()
        outer.close()
        return flat(model).double().numpy(), rest, pushed.numpy(), steps.statistics().bytes_sent

    results = run_ranks(2, body)
    factor = 1 / 2
    rests = sum(rest for _, rest, _, _ in results)
    expected = -factor * sum(pushed for _, _, pushed, _ in results)
    assert np.abs(rests).max() > 0.1
    scale = factor if rule.bound == 0 else 1.0  # the mean is taken on the server, or before the code is made
    for parameters, *_ in results:
        np.testing.assert_allclose(parameters - scale * rests, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("rule", "optimizer", "codec"),
    [
        (ps.Sequential(), "server", None),
        (ps.Sequential(), "worker", None),
        (ps.Eventual(), "server", None),
        (ps.Sequential(), "server", tr.Int8()),
    ],
    ids=str,
)
def test_gradients_that_leave_during_backward_have_the_bits_of_those_of_the_step(
    rule: ps.Consistency, optimizer: str, codec: object
) -> None:
    """Clipped, accumulated, dropped, missing, and in no_sync(): the results are those without overlap."""

    def body(group: Group, *, overlap: bool) -> tuple[torch.Tensor, list[int], int]:
        random = torch.Generator().manual_seed(7 + group.rank)
        model = Counting(torch.float32)
        sync = tr.ParameterServer(consistency=rule, optimizer=optimizer, servers=[0], codec=codec, overlap=overlap)
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        # a bucket of 200 bytes: each parameter has its own, the last one first
        outer = DistributedOptimizer(inner, model, group=group, sync=sync, bucket_bytes=200)
        early, parts = [], list(model.parts)

        def backward(*numbers: int) -> None:
            weights = [torch.randn(part.shape, generator=random) for part in parts]
            sum((parts[n] * weights[n]).sum() for n in numbers).backward()

        everything, steps = range(5), outer.strategy_steps
        for step in range(9):
            outer.zero_grad()
            if step == 1:  # these are missing, and come back
                backward(4, 3, 1)
            elif step == 2:
                backward(*everything)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            elif step == 4:
                backward(*everything)
                backward(0, 2)
            elif step == 6:
                with outer.no_sync():
                    backward(*everything)
                early.append(steps.early_buckets)
                backward(*everything)
            elif step == 7:
                backward(*everything)
                outer.zero_grad()  # the step is left out, and another one taken
                backward(4)
            else:
                backward(*everything)
            early.append(steps.early_buckets)
            outer.step()
        withdrawn = steps.withdrawn_steps
        steps.finish()
        outer.close()
        return flat(model), early, withdrawn

    ranks = 2 if rule.bound == 0 else 1  # otherwise the order of updates may be another one
    at_once = run_ranks(ranks, lambda group: body(group, overlap=False))
    found = run_ranks(ranks, lambda group: body(group, overlap=True))
    if codec is None:
        assert all_equal([parameters for parameters, *_ in [*found, *at_once]])
    else:  # each bucket has codes of its own
        torch.testing.assert_close(found[0][0], at_once[0][0], atol=0.1, rtol=0)
    for _, early, withdrawn in found:
        # 5 buckets; 2 in step 1, because a gradient is missing; 5 in step 2, which are withdrawn, so none in step 3.
        assert early == [5, 7, 12, 12, 17, 17, 17, 22, 27, 27]
        assert withdrawn == 3
    assert {tuple(early) for _, early, _ in at_once} == {(0,) * 10}


@pytest.mark.parametrize(
    ("rule", "overlap", "leaves"),
    [
        (ps.Sequential(), None, True),
        (ps.Bounded(0), None, True),
        (ps.Bounded(1), None, False),
        (ps.Eventual(), None, False),
        (ps.Eventual(), True, True),
    ],
    ids=str,
)
def test_gradients_leave_early_by_default_only_where_servers_keep_them_anyway(
    rule: ps.Consistency, overlap: bool | None, leaves: bool
) -> None:
    def body(group: Group) -> tuple[int, list[float]]:
        model = Counting()
        sync = tr.ParameterServer(servers=[0], consistency=rule, overlap=overlap)
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        model(-1.0).backward()
        early = outer.strategy_steps.early_buckets
        outer.step()
        outer.close()
        return early, flat(model).unique().tolist()

    assert run_ranks(1, body) == [(int(leaves), [1.0])]


def test_an_interruption_between_the_requests_of_a_step_pushes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group, where: str) -> None:
        model = Counting()
        sync = tr.ParameterServer(servers=[0], overlap=where == "push_range")
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        client = outer.strategy_steps._client
        call, calls = getattr(client, where), []

        def interrupted(*arguments: object, **settings: object) -> ps.Ticket:
            calls.append(call(*arguments, **settings))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                outer.step(lambda: model(1.0).backward())
        assert len(calls) == 1
        with pytest.raises(ConfigurationError, match="interrupted while it sent requests"):
            outer.step()
        with pytest.raises(ConfigurationError, match="interrupted while it sent requests"):
            outer.strategy_steps.stepped()
        assert outer.strategy_steps.steps_taken == (1 if where == "clock" else 0)
        outer.close()

    for where in ("push_range", "clock"):
        run_ranks(1, lambda group, where=where: body(group, where))


@pytest.mark.parametrize("rule", [ps.Sequential(), ps.Bounded(4)], ids=str)
def test_an_interruption_of_the_torch_optimizer_takes_no_step_twice(
    rule: ps.Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In synchronous steps it comes behind the answers of servers, in others before anything is pushed."""

    def body(group: Group) -> None:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = tr.ParameterServer(servers=[0], optimizer="worker", consistency=rule)
        outer = DistributedOptimizer(inner, model, group=group, sync=sync)
        step = inner.step

        def interrupted() -> None:
            step()
            raise KeyboardInterrupt

        model(-1.0).backward()
        with monkeypatch.context() as patch:
            patch.setattr(inner, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                outer.step()
        for repeat in (outer.step, outer.strategy_steps.stepped):
            with pytest.raises(ConfigurationError, match="or took the step of the torch optimizer"):
                repeat()
        assert flat(model).unique().tolist() == [1.0]
        outer.close()

    run_ranks(1, body)


@pytest.mark.parametrize("where", ["push_range", "clock"])
def test_a_step_that_fails_is_repeated_only_if_nothing_was_submitted(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: Group) -> list[float]:
        model = Counting()
        sync = tr.ParameterServer(servers=[0], overlap=False)
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)

        def failing(*arguments: object, **settings: object) -> ps.Ticket:
            raise MemoryError

        model(-1.0).backward()
        with monkeypatch.context() as patch:
            patch.setattr(outer.strategy_steps._client, where, failing)
            with pytest.raises(MemoryError):
                outer.step()
        if where == "push_range":
            outer.step()
        else:
            with pytest.raises(ConfigurationError, match="interrupted while it sent requests"):
                outer.step()
        outer.close()
        return flat(model).unique().tolist()

    assert run_ranks(1, body) == [[1.0 if where == "push_range" else 0.0]]


def test_gradients_that_no_step_has_used_are_dropped_in_the_end(tmp_path: Path) -> None:
    def body(group: Group) -> list[float]:
        model = Counting()
        sync = tr.ParameterServer(servers=[0], consistency=ps.Eventual(), overlap=True)
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        model(-1.0).backward()
        outer.step()
        model(-1.0).backward()
        with pytest.raises(ConfigurationError, match=r"call step\(\) before save\(\)"):
            outer.strategy_steps.save(tmp_path)
        outer.strategy_steps.finish()
        outer.close()
        return flat(model).unique().tolist()

    assert run_ranks(2, body) == [[1.0], [1.0]]
    with pytest.raises(ConfigurationError, match="overlap is True, False or None"):
        tr.ParameterServer(overlap="backward")


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    def body(group: Group, optimizer: str) -> list[float]:
        model = Counting()
        sync = tr.ParameterServer(optimizer=optimizer, servers=[0])
        inner = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(8.0)
        outer = DistributedOptimizer(inner, model, group=group, sync=sync)
        for step in range(2):
            for number, parameter in enumerate(model.parameters()):
                present = number == 1 or (number == 2 and group.rank == 0) or (number == 4 and step == 0)
                parameter.grad = torch.ones_like(parameter) if present else None
            outer.step()
        outer.strategy_steps.finish()
        outer.close()
        return [parameter[0].item() for parameter in model.parameters()]

    for optimizer in ("server", "worker"):
        for values in run_ranks(2, lambda group, optimizer=optimizer: body(group, optimizer)):
            # p = p - (1 + p / 2) twice; with a mean gradient of 1/2; unchanged; once
            assert values == [8.0, 0.5, 1.25, 8.0, 3.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", [ps.Sequential(), ps.Eventual()], ids=str)
@pytest.mark.parametrize("optimizer", ["server", "worker"])
def test_schedules_of_learning_rates_come_to_the_servers(optimizer: str, rule: ps.Consistency) -> None:
    """Also a rate of 0, with which a warm-up begins."""

    def body(group: Group) -> torch.Tensor:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = tr.ParameterServer(servers=[0], optimizer=optimizer, consistency=rule)
        outer = DistributedOptimizer(inner, model, group=group, sync=sync)
        schedule = torch.optim.lr_scheduler.LambdaLR(outer, lambda step: step / 2)
        for _ in range(4):
            outer.zero_grad()
            model(-1.0).backward()
            outer.step()
            schedule.step()
        outer.strategy_steps.finish()
        outer.close()
        return flat(model)

    for parameters in run_ranks(2, body):
        assert parameters.unique().tolist() == [3.0]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_training_goes_on_from_a_snapshot_with_other_ranks(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """The gradients do not depend on the number of ranks, so the bits are those of a run without interruption."""

    def steps(group: Group, steps: range, **more: object) -> torch.Tensor:
        model = Counting(torch.float32)
        sync = tr.ParameterServer(servers=range(group.world_size), shards=3, **more)
        outer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, group=group, sync=sync)
        for step in steps:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (step * 7 + number) % 5 - 1.5)
            outer.step()
        if steps.stop == 3:
            outer.strategy_steps.save(tmp_path)
        outer.strategy_steps.finish()
        outer.close()
        return flat(model)

    expected = run_ranks(1, lambda group: steps(group, range(7)))
    run_ranks(sizes[0], lambda group: steps(group, range(3)))
    found = run_ranks(sizes[1], lambda group: steps(group, range(3, 7), restore=tmp_path))
    assert all_equal([*found, *expected])


@pytest.mark.parametrize(
    ("rule", "optimizer", "sizes"),
    [(ps.Sequential(), "server", (1, 1)), (ps.Bounded(4), "worker", (2, 1)), (ps.Bounded(4), "worker", (1, 2))],
    ids=str,
)
def test_a_snapshot_before_the_first_step_is_pulled(
    tmp_path: Path, rule: ps.Consistency, optimizer: str, sizes: tuple[int, int]
) -> None:
    """The model of a program that restores has other values, until it takes those of the servers over."""

    def body(group: Group, begin: float, restore: Path | None = None) -> tuple[float, int]:
        model = Counting()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(begin)
        sync = tr.ParameterServer(
            consistency=rule, optimizer=optimizer, servers=range(group.world_size), restore=restore
        )
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        if restore is None:
            outer.strategy_steps.save(tmp_path)
        [value] = flat(model).unique().tolist()
        outer.strategy_steps.finish()
        outer.close()
        return value, outer.strategy_steps.steps_taken

    assert run_ranks(sizes[0], lambda group: body(group, 2.0)) == [(2.0, 0)] * sizes[0]
    assert run_ranks(sizes[1], lambda group: body(group, 5.0, tmp_path)) == [(2.0, 0)] * sizes[1]


def test_a_rank_that_was_lost_before_it_met_the_others_waits_for_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 begins where a lost worker had ended its first clock. Rank 0 sets the parameters later."""

    def connect_there(group: Group, **settings: object) -> ps.Connection:
        client = ps.connect(group, **settings)
        if group.rank == 1:
            client.clock().wait()
        else:
            time.sleep(0.2)
        return client

    def body(group: Group) -> list[float]:
        model = Counting()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
        sync = tr.ParameterServer(consistency=ps.Bounded(4), servers=[0])
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        outer.step()  # pulls
        values = flat(model).unique().tolist()
        outer.strategy_steps.finish()
        outer.close()
        return values

    monkeypatch.setattr("totalreduce.server.dense.connect", connect_there)
    assert run_ranks(2, body) == [[3.0], [3.0]]


def test_a_step_that_has_failed_fails_again() -> None:
    def body(group: Group) -> int:
        model = Counting()
        sync = tr.ParameterServer(servers=[0])
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        group.barrier()
        if group.rank == 1:
            group.close()
            return 0
        assert outer.strategy_steps._client.has_ended(5.0)
        for _ in range(2):  # without gradients, so that the end of the step is the first call that fails
            with pytest.raises(PeerLost):
                outer.step()
        return 2

    assert run_ranks(2, body) == [2, 0]


def test_the_last_parameters_can_be_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, which has them, sends them late."""

    out_of_time = threading.Event()

    def body(group: Group) -> tuple[list[float], int]:
        model = Counting()
        sync = tr.ParameterServer(servers=[0], optimizer="worker")
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        model(-1.0).backward()
        outer.step()
        broadcast = group.control.broadcast

        def late(*arguments: object, **settings: object) -> Work:
            assert out_of_time.wait(20)
            return broadcast(*arguments, **settings)

        if group.rank == 1:
            monkeypatch.setattr(group.control, "broadcast", late)
        else:
            with pytest.raises(DeadlineExceededError), impatient(group, client=outer.strategy_steps._client):
                outer.strategy_steps.finish()
            out_of_time.set()
        repeat_until_done(outer.strategy_steps.finish)
        outer.close()
        return flat(model).unique().tolist(), outer.strategy_steps.steps_taken

    assert run_ranks(2, body) == [([1.0], 1)] * 2


def test_a_step_that_ran_out_of_time_is_repeated_and_counts_once() -> None:
    late = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Counting()
        sync = tr.ParameterServer(servers=[0])
        outer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, group=group, sync=sync)
        for step in range(2):
            outer.zero_grad()
            model(-1.0).backward()
            if group.rank == 1 and step == 1:
                assert late.wait(20)
            if group.rank == 0 and step == 1:
                with pytest.raises(SlowWorkersError), impatient(group, client=outer.strategy_steps._client):
                    outer.step()
                with pytest.raises(ConfigurationError, match="interrupted"):
                    model(-1.0).backward()
                for parameter in model.parameters():
                    parameter.grad = None
                late.set()
            repeat_until_done(outer.step)
        repeat_until_done(outer.strategy_steps.finish)
        outer.close()
        return flat(model)

    for parameters in run_ranks(2, body):
        assert parameters.unique().tolist() == [2.0]


def test_what_servers_cannot_do_is_refused() -> None:
    class Own(torch.optim.SGD):
        """Perhaps with another rule."""

    def begin(group: Group, make: Factory, **settings: object) -> DistributedOptimizer:
        model = Counting(torch.float32)
        sync = tr.ParameterServer(servers=[0], **settings)
        return DistributedOptimizer(make(list(model.parameters())), model, group=group, sync=sync)

    def body(group: Group) -> None:
        with pytest.raises(ConfigurationError, match="and this is <class"):
            begin(group, lambda parameters: Own(parameters, lr=0.1))
        with pytest.raises(ConfigurationError, match="no torch optimizer 'LBFGS'"):
            begin(group, lambda parameters: torch.optim.LBFGS(parameters))
        with pytest.raises(ConfigurationError, match="does not support LBFGS"):
            begin(group, lambda parameters: torch.optim.LBFGS(parameters), optimizer="worker")
        groups = [{"lr": 0.1}, {"lr": 0.2}]
        with pytest.raises(ConfigurationError, match="have different settings"):
            begin(
                group,
                lambda each: torch.optim.SGD([{"params": p, **groups[i % 2]} for i, p in enumerate(each)], lr=1.0),
            )
        outer = begin(group, lambda parameters: torch.optim.SGD(parameters, lr=0.1), codec=tr.Int8())
        for parameter in outer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, torch.nan)
        with pytest.raises(ConfigurationError, match="not finite"):
            outer.step()
        outer.param_groups[0]["weight_decay"] = 0.2
        with pytest.raises(ConfigurationError, match="settings of the torch optimizer have changed"):
            outer.step()
        outer.param_groups[0]["weight_decay"] = 0
        outer.strategy_steps.finish()
        with pytest.raises(ConfigurationError, match="finish"):
            outer.step()
        outer.close()

    run_ranks(1, body)
    with pytest.raises(ConfigurationError, match="leaves nothing on servers"):
        tr.ParameterServer(optimizer="worker", restore="somewhere")
    with pytest.raises(ConfigurationError, match="consistency is a rule"):
        tr.ParameterServer(consistency=4)
