"""Whatever torch's default device and dtype are in the program, each function of the library has the same results."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from optimizer_cases import Net, batches, flat, loss_of, shard

import totalreduce as tr
from totalreduce.codecs.codecs import CODECS
from totalreduce.groups.group import Group
from totalreduce.groups.probe import survey
from totalreduce.recovery.sharing import compare_states, send_state
from totalreduce.sparse.methods import METHODS
from totalreduce.testing import run_ranks

WORLD_SIZE = 2
FLOAT = torch.float32
OPS = [tr.ReduceOp.SUM, tr.ReduceOp.AVG, tr.ReduceOp.MIN, tr.ReduceOp.MAX, tr.ReduceOp.PRODUCT]
#: Strategies whose exchanges do not depend on the order of arrivals, with exchanges in the first three steps.
STRATEGIES = [
    tr.LocalSGD(period=2, optimizer_state="average", codec=tr.Int8()),
    tr.PostLocalSGD(start=1, then=tr.LocalSGD(period=1)),
    tr.DiLoCo(period=2, fragments=2, overlap=1),
    tr.SlowMo(period=2),
    tr.EASGD(period=2),
    tr.Gossip(overlap=1),
    tr.Strom(threshold=1e-3),
]
SERVED = [
    tr.Async(scale="none"),
    tr.StaleSynchronous(slack=2),
    tr.ParameterServer(),
    tr.AsyncGossip(),
]
#: Made before a default is set.
MODEL, BATCHES = Net(FLOAT), batches(3, dtype=FLOAT)


def numbers(group: Group, *shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Return a tensor that names its device and dtype; all elements differ, here and from rank to rank."""
    count = int(np.prod(shape))
    begin = 1 + group.rank * count
    return torch.arange(begin, begin + count, dtype=dtype, device="cpu").view(shape)


def assert_same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(tensors, others, strict=True):
        assert one.device == other.device
        torch.testing.assert_close(one, other, rtol=0, atol=0, check_dtype=True)


# --------------------------------------------------------------------------------------------------------- a group


def reductions(group: Group) -> list[torch.Tensor]:
    results = [group.allreduce(numbers(group, 3, 2), op=op).wait() for op in OPS]
    results.append(group.allreduce(numbers(group, 3, 2).t()).wait())
    results.append(group.allreduce(numbers(group, 3, dtype=torch.bfloat16), op=tr.ReduceOp.AVG).wait())
    results.append(group.allreduce(numbers(group, 3, dtype=torch.int64), op=tr.ReduceOp.BAND).wait())
    results.append(group.reduce(numbers(group, 3), root=1).wait())
    output = torch.zeros(2, dtype=FLOAT, device="cpu")
    results.append(group.reduce_scatter(output, numbers(group, 4)).wait())
    results.append(group.allreduce(group.empty(3).copy_(numbers(group, 3))).wait())
    prepared = group.prepare_allreduce(numbers(group, 2, 3).t(), name="prepared")
    results.append(prepared.start().wait())
    group.barrier()
    return [*results, group.empty(0)]


def movements(group: Group) -> list[torch.Tensor]:
    def outputs() -> list[torch.Tensor]:
        return [torch.zeros(2, 3, dtype=FLOAT, device="cpu").t() for _ in range(WORLD_SIZE)]

    group.broadcast(own := numbers(group, 3, 2))
    group.allgather(gathered := outputs(), numbers(group, 3, 2)).wait()
    group.gather(rooted := outputs() if group.rank == 1 else None, numbers(group, 3, 2), root=1).wait()
    group.scatter(part := numbers(group, 3, 2), [numbers(group, 3, 2)] * WORLD_SIZE if group.rank == 0 else None).wait()
    group.alltoall(exchanged := outputs(), [numbers(group, 3, 2)] * WORLD_SIZE).wait()
    sent = group.send(numbers(group, 4), dst=1 - group.rank)
    group.recv(received := torch.zeros(4, dtype=FLOAT, device="cpu"), src=None).wait()
    sent.wait()
    return [own, *gathered, *(rooted or []), part, *exchanged, received]


def objects(group: Group) -> list[torch.Tensor]:
    value = {"tensor": numbers(group, 3), "rank": group.rank, "empty": b""}
    values = [group.broadcast_object(value), *group.allgather_object(value)]
    values += group.gather_object(value, root=1) or []
    values.append(group.scatter_object([value, value] if group.rank == 0 else None))
    group.agree("settings", {"lr": 0.1})
    assert [each["rank"] for each in values[:3]] == [0, 0, 1]
    return [each["tensor"] for each in values]


def plans(group: Group) -> list[torch.Tensor]:
    specs = [tr.TensorSpec("a", (3,), FLOAT), tr.TensorSpec("b", (2,), torch.float64)]
    results = []
    for on_missing in ("zero", "error"):
        plan = group.plan(on_missing, specs, on_missing=on_missing)
        with plan.step() as step:
            step.submit("a", numbers(group, 3))
            if group.rank == 0 or on_missing == "error":
                step.submit("b", numbers(group, 2, dtype=torch.float64))
        results += step.finish().values()
    return results


def links(group: Group) -> list[torch.Tensor]:
    assert len(survey(group).hosts) == WORLD_SIZE
    return []


def coordinated(group: Group) -> list[torch.Tensor]:
    coordinator = group.coordinate()
    works = [coordinator.allreduce(numbers(group, 3, 2).t(), name="sum", op=tr.ReduceOp.AVG)]
    works += coordinator.grouped_allreduce([numbers(group, 3), numbers(group, 2, dtype=torch.bfloat16)], name="two")
    works.append(coordinator.allgather(numbers(group, 1 + group.rank, 2), name="rows"))
    works.append(coordinator.alltoall(numbers(group, 3), [1, 2], name="exchange"))
    works.append(coordinator.reduce_scatter(numbers(group, 4), name="part"))
    works.append(coordinator.broadcast(numbers(group, 3), name="copy"))
    coordinator.barrier()
    coordinator.join()
    return [work.wait() for work in works]


# -------------------------------------------------------------------------------------------------------- training


def train(group: Group, sync: object = None, momentum: float = 0.9, **settings: object) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    tr.broadcast_parameters(model, group)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, **settings)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_of(model, shard(batch, group)).backward()
        optimizer.step()
    tr.broadcast_optimizer_state(optimizer, group)
    parameters = flat(model)
    optimizer.close()
    return [parameters, *(state["momentum_buffer"] for state in inner.state.values() if state)]


def sparsely(sync: object) -> Callable[[Group], list[torch.Tensor]]:
    feedback = tr.ErrorFeedback(elements_min=0, bucket_elements=100, momentum=0.5, clip_norm=1.0, report_every=1)
    return lambda group: train(group, sync, 0.0, feedback=feedback)


def chosen(group: Group) -> list[torch.Tensor]:
    """Times decide on the method, so that the parameters may differ from run to run."""
    sparsely(tr.Auto(density=0.2))(group)
    return []


def joining(group: Group) -> list[torch.Tensor]:
    """Ranks take different numbers of steps."""
    model = copy.deepcopy(MODEL)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    for batch in BATCHES[group.rank :]:
        optimizer.zero_grad()
        loss_of(model, shard(batch, group)).backward()
        optimizer.step()
    assert optimizer.join() == 0
    optimizer.close()
    return [flat(model)]


def rows(group: Group) -> list[torch.Tensor]:
    table = torch.nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2, dtype=FLOAT, device="cpu"))
    optimizer = tr.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), table, group=group)
    for _ in range(2):
        table(numbers(group, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [table.weight.detach()]


def adasum(group: Group) -> list[torch.Tensor]:
    tensors = [numbers(group, 3, 2), numbers(group, 1)]
    tr.adasum_(group, tensors, name="adasum")
    model = copy.deepcopy(MODEL)
    optimizer = tr.AdasumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    loss_of(model, shard(BATCHES[0], group)).backward()
    optimizer.step()
    return [*tensors, flat(model)]


def batch_norm(group: Group) -> list[torch.Tensor]:
    plain = torch.nn.BatchNorm1d(3, device="cpu", dtype=FLOAT)
    layers = [tr.SyncBatchNorm(3, group=group, name="own", device="cpu", dtype=FLOAT)]
    layers.append(tr.convert_sync_batchnorm(plain, group, name="converted"))
    results = []
    for layer in layers:
        inputs = numbers(group, 2, 3).requires_grad_()
        layer(inputs).square().sum().backward()
        results += [inputs.grad, layer.weight.grad, layer.running_mean, layer.running_var]
    return results


def counted(sync: object) -> Callable[[Group], list[torch.Tensor]]:
    """Return what trains with updates whose sum has no rounding, so that their order does not matter."""

    def body(group: Group) -> list[torch.Tensor]:
        model = torch.nn.Linear(3, 2, device="cpu", dtype=FLOAT)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 2.0 ** (1 + group.rank))
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return [flat(model)]

    return body


# ----------------------------------------------------------------------------------------------- servers and recovery


def server(group: Group) -> list[torch.Tensor]:
    results = []
    for optimizer, lr in ((tr.ps.Sum(), None), (tr.ps.Torch("Adagrad", {"lr": 0.5}), 0.5)):
        with tr.ps.connect(group, num_keys=4, width=2, optimizer=optimizer, consistency=tr.ps.Sequential()) as client:
            client.push(numbers(group, 2, dtype=torch.int64) - 1, numbers(group, 2, 2), lr=lr)
            client.clock()
            client.pull(slice(0, 4), values := torch.zeros(4, 2, dtype=FLOAT, device="cpu")).wait()
        results.append(values)
    return results


def recoverable(group: Group) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int64, device="cpu"))
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    state = tr.State(model=model, optimizer=optimizer)
    [order] = tr.ElasticSampler(8, 8, seed=1)
    with tr.recoverable(state) as job:
        for step in job.steps(len(order)):
            with job.step():
                model.seen += order[step] * (1 + group.rank)
                loss_of(model, shard(BATCHES[order[step] % 3], group)).backward()
                optimizer.step()
                optimizer.zero_grad()
    compare_states(state, group)
    newcomer = copy.deepcopy(MODEL)
    inner = torch.optim.SGD(newcomer.parameters(), lr=0.1 * (1 + group.rank))
    send_state(tr.State(model=newcomer, optimizer=inner, mine=numbers(group, 2)), group, 0, [1])
    assert inner.param_groups[0]["lr"] == 0.1
    return [flat(model), model.seen]


def replayed(group: Group) -> list[torch.Tensor]:
    state = tr.Checkpoint(total=numbers(group, 2))
    with tr.replayed(state, group) as job:
        for _ in range(job.version, 2):
            state.total = state.total + job.allreduce(numbers(group, 2)) + job.allgather(numbers(group, 2)).sum(0)
            state.total = state.total + job.broadcast(numbers(group, 2), root=1)
            job.checkpoint()
    return [state.total]


DOORS: dict[str, Callable[[Group], list[torch.Tensor]]] = {
    **{
        each.__name__: each
        for each in (reductions, movements, objects, plans, links, coordinated, train, joining, rows, adasum)
    },
    **{each.__name__: each for each in (batch_norm, server, recoverable, replayed)},
    "iterations": lambda group: train(group, overlap="iterations"),
    "compression": lambda group: train(group, compression="bf16", gradient_predivide_factor=2.0),
    "auto": chosen,
    **{f"sync={name}": sparsely(METHODS[name]()) for name in METHODS},
    **{f"codec={name}": sparsely(tr.Coded(codec=CODECS[name]())) for name in CODECS if name != "threshold"},
    **{type(strategy).__name__: lambda group, sync=strategy: train(group, sync) for strategy in STRATEGIES},
    **{type(strategy).__name__: counted(strategy) for strategy in SERVED},
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_default_device(run: Callable[[Group], list[torch.Tensor]], group: Group) -> list[torch.Tensor]:
    torch.set_default_device("meta")  # of this thread
    assert torch.empty(0).is_meta
    return run(group)


def in_device(run: Callable[[Group], list[torch.Tensor]], group: Group) -> list[torch.Tensor]:
    with torch.device("meta"):
        assert torch.empty(0).is_meta
        return run(group)


@pytest.mark.parametrize("door", DOORS)
def test_results_do_not_depend_on_the_defaults_of_torch(door: str) -> None:
    run = DOORS[door]
    expected = run_ranks(WORLD_SIZE, run)
    for dtype, under in ((torch.float64, in_device), (torch.bfloat16, with_default_device)):
        with default_dtype(dtype):
            results = run_ranks(WORLD_SIZE, functools.partial(under, run))
        for rank in range(WORLD_SIZE):
            assert_same(results[rank], expected[rank])
