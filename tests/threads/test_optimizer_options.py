"""What Horovod's users set: accumulation, compression, predivision, sparse gradients, uneven data; native streams."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from optimizer_cases import (
    BUCKET_BYTES,
    OPTIMIZERS,
    Net,
    all_equal,
    batches,
    flat,
    loss_of,
    outcome,
    shard,
    train_alone,
)

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation.errors import ConfigurationError, MissingTensorError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.groups.group import Group
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.pytorch.round import Phase
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.testing import run_ranks

SIZES = [1, 2, 3, 4]
EVERY_SIZE = [1, 2, 3, 4, 5, 8]
DOORS = ["engine", "native"]


def enter(group: Group, door: str) -> Group:
    """The group, or the same with every collective behind a library that needs one order."""
    if door == "native":
        group.use(EngineCollectives(group.subgroup(range(group.world_size)).operations), CoordinationConfig())
    return group


def wrap(model: torch.nn.Module, group: Group, optimizer: str = "momentum", **settings: object) -> DistributedOptimizer:
    settings.setdefault("bucket_bytes", BUCKET_BYTES)
    return DistributedOptimizer(OPTIMIZERS[optimizer](list(model.parameters())), model, group=group, **settings)


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))])
@pytest.mark.parametrize("overlap", ["backward", "iterations"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_over_a_native_stream_training_equals_one_process(world_size: int, overlap: str, optimizer: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, int]:
        enter(group, "native")
        model = Net()
        wrapped = wrap(model, group, optimizer, overlap=overlap)
        for batch in batches(20):
            wrapped.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            wrapped.step()
        wrapped.close()
        return flat(model), group.coordinator.counters.messages

    results = run_ranks(world_size, body)
    assert all_equal([parameters for parameters, _ in results])
    assert torch.allclose(results[0][0], train_alone(OPTIMIZERS[optimizer]), rtol=0, atol=1e-12)
    assert [messages for _, messages in results] == [0] * world_size  # nobody had to agree on anything


@pytest.mark.parametrize("door", DOORS)
def test_steps_of_a_plan_move_no_metadata(door: str) -> None:
    """Every message of a steady step is one of a bucket's allreduce."""

    def body(group: Group) -> tuple[list[int], int]:
        enter(group, door)
        model = Net()
        wrapped = wrap(model, group)
        counts = []
        for batch in batches(6):
            before = group.statistics()
            wrapped.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            wrapped.step()
            counts.append(group.statistics().operations - before.operations)
            assert group.coordinator is None or group.coordinator.counters.messages == 0
        return counts, len(wrapped._dense.buckets)

    for counts, buckets in run_ranks(4, body):
        assert counts == [buckets] * 6


@pytest.mark.parametrize("door", DOORS)
def test_gradients_in_any_order_on_any_rank(door: str) -> None:
    """The hooks fire in an order of their own on every rank; a native stream starts the buckets in one."""

    def body(group: Group) -> torch.Tensor:
        enter(group, door)
        model = Net()
        wrapped = wrap(model, group)
        generator = random.Random(group.rank)
        for _ in range(5):
            wrapped.zero_grad()
            parameters = list(enumerate(model.parameters()))
            generator.shuffle(parameters)
            for index, parameter in parameters:
                (parameter * float(index + 1 + group.rank)).sum().backward()
            wrapped.step()
        return flat(model)

    results = run_ranks(4, body)
    assert all_equal(results)
    alone = Net()
    optimizer = OPTIMIZERS["momentum"](list(alone.parameters()))
    for _ in range(5):
        for index, parameter in enumerate(alone.parameters()):
            parameter.grad = torch.full_like(parameter, index + 1 + 1.5)
        optimizer.step()
    assert torch.allclose(results[0], flat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("passes", "num_batches"), [(1, 4), (2, 4), (3, 6), (4, 8), (2, 5), (3, 4), (4, 7)])
def test_accumulation_with_a_remainder_equals_the_large_batch(door: str, passes: int, num_batches: int) -> None:
    data = batches(num_batches)

    def body(group: Group) -> tuple[torch.Tensor, int]:
        enter(group, door)
        model = Net()
        wrapped = wrap(model, group, backward_passes_per_step=passes)
        for begin in range(0, num_batches, passes):
            wrapped.zero_grad()
            for batch in data[begin : begin + passes]:
                loss_of(model, shard(batch, group)).backward()
            wrapped.step()
        return flat(model), wrapped.resubmissions

    results = run_ranks(3, body)
    assert all_equal([parameters for parameters, _ in results])
    assert [again for _, again in results] == [0, 0, 0]  # nothing left before the last pass
    alone = Net()
    optimizer = OPTIMIZERS["momentum"](list(alone.parameters()))
    for begin in range(0, num_batches, passes):
        optimizer.zero_grad()
        for batch in data[begin : begin + passes]:
            loss_of(alone, batch).backward()
        optimizer.step()
    assert torch.allclose(results[0][0], flat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("compression", "dtype", "tolerance"), [("fp16", torch.float16, 2e-3), ("bf16", torch.bfloat16, 1.6e-2)]
)
def test_compression(door: str, compression: str, dtype: torch.dtype, tolerance: float) -> None:
    """Gradients travel as a half type: half the bytes of float32, and the values that type can hold."""

    def body(group: Group) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        enter(group, door)
        model = Net(dtype=torch.float32)
        wrapped = wrap(model, group, compression=compression, bucket_bytes=1 << 20)
        before = group.statistics().payload_bytes
        loss_of(model, shard(batches(1, dtype=torch.float32)[0], group)).backward()
        mine = [parameter.grad.clone() for parameter in model.parameters()]
        wrapped.synchronize()
        sent = group.statistics().payload_bytes - before
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
        reduced = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return reduced, mine, sent

    results = run_ranks(4, body)
    assert all_equal([reduced for reduced, _, _ in results])
    own = [torch.cat([grad.to(dtype).double().flatten() for grad in mine]) for _, mine, _ in results]
    exact = sum(own) / 4
    worst = max(grad.abs().max().item() for grad in own)
    assert (results[0][0].double() - exact).abs().max() <= tolerance * worst
    num_elements = results[0][0].numel()
    assert 2 * num_elements <= results[0][2] < 2.2 * num_elements


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
@pytest.mark.parametrize("world_size", SIZES)
def test_predivision_changes_where_and_not_what(door: str, factor: float, world_size: int) -> None:
    def body(group: Group) -> torch.Tensor:
        enter(group, door)
        model = Net()
        wrapped = wrap(model, group, gradient_predivide_factor=factor)
        for batch in batches(3):
            wrapped.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            wrapped.step()
        return flat(model)

    results = run_ranks(world_size, body)
    assert all_equal(results)
    assert torch.allclose(results[0], train_alone(OPTIMIZERS["momentum"], 3), rtol=0, atol=1e-12)


def embedding_model() -> torch.nn.Module:
    table = torch.nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
    model = torch.nn.ModuleDict({"table": table, "out": torch.nn.Linear(4, 1, dtype=torch.float64)})
    generator = torch.Generator().manual_seed(3)  # ranks are threads: the global one is not a rank's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def words_of(rank: int) -> list[int]:
    """Rank 1 has no words at all; the others share some."""
    return [] if rank == 1 else [rank % 9, 3, 3, 8 - rank % 4]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("sparse", ["dense", "gather"])
@pytest.mark.parametrize("world_size", EVERY_SIZE)
def test_sparse_gradients(door: str, sparse: str, world_size: int) -> None:
    def forward(model: torch.nn.Module, rank: int) -> torch.Tensor:
        words = torch.tensor(words_of(rank), dtype=torch.long)
        return (model["out"](model["table"](words)) * (1.0 + rank)).sum()

    def body(group: Group) -> tuple[torch.Tensor, bool]:
        enter(group, door)
        model = embedding_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedOptimizer(optimizer, model, group=group, sparse=sparse, bucket_bytes=BUCKET_BYTES)
        for _ in range(2):
            wrapped.zero_grad()
            forward(model, group.rank).backward()
            wrapped.synchronize()
            is_sparse = model["table"].weight.grad.is_sparse
            wrapped.step()
        return flat(model), is_sparse

    results = run_ranks(world_size, body)
    assert all_equal([parameters for parameters, _ in results])
    assert {is_sparse for _, is_sparse in results} == {sparse == "gather"}
    alone = embedding_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(forward(alone, rank) for rank in range(world_size)) / world_size).backward()
        optimizer.step()
    assert torch.allclose(results[0][0], flat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sync", [None, OkTopk(density=1.0)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sparse_adam_gets_sparse_gradients_that_travelled_as_dense_ones(world_size: int, sync: object) -> None:
    def make() -> tuple[torch.nn.ModuleList, torch.optim.SparseAdam]:
        tables = torch.nn.ModuleList([torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64) for _ in range(2)])
        for table in tables:
            torch.nn.init.ones_(table.weight)
        return tables, torch.optim.SparseAdam(list(tables.parameters()), lr=0.5)

    def loss(tables: torch.nn.ModuleList, step: int, rank: int) -> torch.Tensor:
        # The second table is used in the first step alone, whose gradients are not reset.
        words = torch.tensor([rank, 4])
        return sum(((rank + 1.0) * table(words)).sum() for table in tables[: 2 - step % 2])

    def body(group: Group) -> tuple[torch.Tensor, set[torch.layout], int]:
        tables, inner = make()
        settings = {} if sync is None else {"sync": sync, "feedback": ErrorFeedback(elements_min=0)}
        wrapped = DistributedOptimizer(inner, tables, group=group, sparse="dense", **settings)
        for step in range(2):
            loss(tables, step, group.rank).backward()
            wrapped.step()
        gradients = [table.weight.grad for table in tables]
        return flat(tables), {gradient.layout for gradient in gradients}, len(gradients[0].coalesce().values())

    results = run_ranks(world_size, body)
    assert all_equal([parameters for parameters, _, _ in results])
    tables, alone = make()
    for step in range(2):
        (sum(loss(tables, step, rank) for rank in range(world_size)) / world_size).backward()
        alone.step()
    for parameters, layouts, num_rows in results:
        assert torch.allclose(parameters, flat(tables), rtol=0, atol=1e-12 if sync is None else 1e-6)
        assert (layouts, num_rows) == ({torch.sparse_coo}, world_size + 1)


def test_sparse_adam_without_a_model_and_nobody_with_a_gradient() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor | None]:
        table = torch.nn.Embedding(6, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        inner = torch.optim.SparseAdam(list(table.parameters()), lr=0.5)
        wrapped = DistributedOptimizer(inner, named_parameters=table.named_parameters(), group=group, sparse="gather")
        wrapped.synchronize()
        untouched = table.weight.grad
        wrapped.step()
        if group.rank:
            table(torch.tensor([group.rank])).sum().backward()
        wrapped.step()
        return table.weight.detach().clone(), untouched

    results = run_ranks(3, body)
    assert all_equal([weights for weights, _ in results])
    assert [untouched for _, untouched in results] == [None] * 3
    changed = (results[0][0] != 1).any(dim=1)
    assert changed.tolist() == [False, True, True, False, False, False]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("divisor", ["world", "active"])
@pytest.mark.parametrize("overlap", ["backward", "iterations"])
@pytest.mark.parametrize("world_size", [*EVERY_SIZE[:-1], pytest.param(EVERY_SIZE[-1], marks=pytest.mark.slow)])
def test_uneven_data(door: str, divisor: str, overlap: str, world_size: int) -> None:
    """Rank r has r + 1 batches; those who are through lend zeros, and the last rank is known to all."""
    data = batches(world_size, size=4)

    def body(group: Group) -> tuple[torch.Tensor, int]:
        enter(group, door)
        model = Net()
        wrapped = wrap(model, group, "sgd", join_divisor=divisor, overlap=overlap)
        for batch in data[: group.rank + 1]:
            wrapped.zero_grad()
            (loss_of(model, batch) * (1.0 + group.rank)).backward()
            wrapped.step()
        last = wrapped.join()
        return flat(model), last

    results = run_ranks(world_size, body)
    assert [last for _, last in results] == [world_size - 1] * world_size
    alone = Net()
    optimizer = OPTIMIZERS["sgd"](list(alone.parameters()))
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        active = range(step, world_size)
        scale = sum(1.0 + rank for rank in active) / (world_size if divisor == "world" else len(active))
        (loss_of(alone, batch) * scale).backward()
        optimizer.step()
    assert torch.allclose(results[-1][0], flat(alone), rtol=0, atol=1e-12)


def test_after_everybody_joined_training_goes_on_and_joins_again() -> None:
    def body(group: Group) -> tuple[list[int], torch.Tensor]:
        model = Net()
        wrapped = wrap(model, group, "sgd")
        lasts = []
        for epoch in range(2):
            count = group.rank + 1 if epoch == 0 else group.world_size - group.rank
            for batch in batches(count):
                wrapped.zero_grad()
                loss_of(model, batch).backward()
                wrapped.step()
            lasts.append(wrapped.join())
            with torch.no_grad():
                for parameter in model.parameters():
                    group.broadcast(parameter, root=lasts[-1])
        return lasts, flat(model)

    results = run_ranks(3, body)
    assert [lasts for lasts, _ in results] == [[2, 0]] * 3
    assert all_equal([parameters for _, parameters in results])


def test_a_joined_rank_is_not_missed_but_a_lazy_one_is() -> None:
    def body(group: Group) -> list[str]:
        model = Net()
        wrapped = wrap(model, group, "sgd", on_missing="error", overlap="step")
        said = []
        if group.rank < 2:
            for step in range(3):
                wrapped.zero_grad()
                if step < 2 or group.rank == 0:
                    loss_of(model, batches(1)[0]).backward()
                said.append(outcome(wrapped.step))
        wrapped.join()
        return said

    assert run_ranks(3, body) == [["done", "done", "missed (1,)"]] * 2 + [[]]


HALVES = [
    (torch.bfloat16, {}),
    (torch.float16, {"op": ReduceOp.SUM}),
    (torch.float32, {"compression": "bf16", "gradient_predivide_factor": 3.0}),
    (torch.float32, {"compression": "fp16"}),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("dtype", "settings"), HALVES)
@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_missing_and_joined_ranks_in_half_types(
    world_size: int, dtype: torch.dtype, settings: dict[str, object], door: str
) -> None:
    """One rank has no gradients in the second step, and rank 0 joins after the third one."""

    def body(group: Group) -> tuple[list[str], list[torch.Tensor]]:
        enter(group, door)
        model = torch.nn.Linear(3, 1, dtype=dtype)
        wrapped = wrap(model, group, "sgd", on_missing="error", overlap="step", join_divisor="active", **settings)
        said, seen = [], []
        lazy, early = world_size - 1, 0
        for step in range(4 if group.rank != early else 3):
            wrapped.zero_grad()
            if step != 1 or group.rank != lazy:
                inputs = torch.full((1, 3), 2.0 if group.rank == early else 1.0, dtype=dtype)
                model(inputs).sum().backward()
            try:
                wrapped.synchronize()
                said.append("done")
                seen.append(model.weight.grad.clone())
            except MissingTensorError as error:
                said.append(f"{error.tensor} missed on {error.ranks}")
        wrapped.join()
        return said, seen

    results = run_ranks(world_size, body)
    averages = settings.get("op") is not ReduceOp.SUM
    for rank, (said, seen) in enumerate(results):
        wanted = ["done", f"bias missed on ({world_size - 1},)", "done"] + ["done"] * (rank != 0)
        assert [text.replace("weight", "bias") for text in said] == wanted
        everyone = (world_size + 1) / (world_size if averages else 1)
        others = 1.0 if averages else world_size - 1.0
        for gradient, value in zip(seen, [everyone, everyone, others], strict=False):
            assert torch.allclose(gradient, torch.full_like(gradient, value), rtol=0.02, atol=0)


def test_names_instead_of_a_model() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        inner = OPTIMIZERS["adamw"](list(model.parameters()))
        named = model.named_parameters() if group.world_size == 2 else None
        wrapped = DistributedOptimizer(inner, named_parameters=named, group=group, bucket_bytes=BUCKET_BYTES)
        for batch in batches(3):
            wrapped.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            wrapped.step()
        return flat(model)

    for world_size in (2, 3):
        results = run_ranks(world_size, body)
        assert all_equal(results)
        assert torch.allclose(results[0], train_alone(OPTIMIZERS["adamw"], 3), rtol=0, atol=1e-12)


def test_settings_that_make_no_sense_or_differ() -> None:
    def body(group: Group) -> None:
        model = Net()
        for settings, message in [
            ({"compression": "fp8"}, r"compression is 'none', 'fp16' or 'bf16', not 'fp8'"),
            ({"gradient_predivide_factor": 0.0}, r"gradient_predivide_factor must be positive"),
            ({"gradient_predivide_factor": 2.0, "op": ReduceOp.SUM}, r"cannot be 2.0 with sum"),
            ({"backward_passes_per_step": 0}, r"backward_passes_per_step must be at least 1"),
            ({"sparse": "maybe"}, r"sparse is 'dense' or 'gather'"),
            ({"join_divisor": 3}, r"join_divisor is 'world' or 'active'"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                wrap(model, group, **settings)
        inner = OPTIMIZERS["sgd"](list(model.parameters()))
        with pytest.raises(ConfigurationError, match=r"needs the model"):
            DistributedOptimizer(inner, group=group, overlap="iterations")
        with pytest.raises(ConfigurationError, match=r"the model has names already"):
            DistributedOptimizer(inner, model, named_parameters=model.named_parameters(), group=group)
        twice = [("same", parameter) for parameter in model.parameters()]
        with pytest.raises(ConfigurationError, match=r"'same' more than once"):
            DistributedOptimizer(inner, named_parameters=twice, group=group)
        compression = "fp16" if group.rank == 1 else "none"
        with pytest.raises(PlanMismatchError, match=r"settings.compression: rank 0 has \"none\", rank 1 has \"fp16\""):
            wrap(model, group, compression=compression)
        with pytest.raises(ConfigurationError, match=r"does not support LBFGS"):
            DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, group=group).join()

    run_ranks(2, body)


@pytest.mark.parametrize("overlap", ["backward", "step"])
def test_a_pass_after_synchronize_is_reduced_where_passes_are_accumulated(overlap: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        wrapped = wrap(model, group, backward_passes_per_step=2, overlap=overlap)
        for number, batch in enumerate(batches(3)):
            loss_of(model, shard(batch, group)).backward()
            if number == 1:
                wrapped.synchronize()
        wrapped.step()
        return flat(model)

    assert all_equal(run_ranks(2, body))


@pytest.mark.parametrize("skips", ["synchronize", "optimizer.zero_grad"])
def test_a_step_left_out_after_fewer_passes_does_not_shorten_the_next_one(skips: str) -> None:
    """Whether the gradients of the remainder were synchronised, or dropped."""

    def body(group: Group) -> list[bool]:
        model = Net()
        wrapped = wrap(model, group, backward_passes_per_step=3, overlap="step")
        for _ in range(2):
            loss_of(model, shard(batches(1)[0], group)).backward()
        if skips == "synchronize":
            wrapped.synchronize()
            model.zero_grad()
        else:
            wrapped.zero_grad()
        sent = []
        for _ in range(3):
            loss_of(model, shard(batches(1)[0], group)).backward()
            sent.append(wrapped._round.in_flight)
        wrapped.step()
        assert wrapped.resubmissions == 0
        return sent

    assert run_ranks(2, body) == [[False, False, True]] * 2


def table_with_gathered_rows(group: Group, **settings: object) -> tuple[torch.nn.Embedding, DistributedOptimizer]:
    """A table of ones, whose gradients are gathered: after a step of SGD, 1 - weight is the reduced gradient."""
    table = torch.nn.Embedding(4, 1, sparse=True, dtype=torch.float64)
    torch.nn.init.ones_(table.weight)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    return table, DistributedOptimizer(inner, table, group=group, sparse="gather", **settings)


@pytest.mark.parametrize("between", ["nothing", "model.zero_grad", "no_sync"])
def test_a_second_pass_over_gathered_gradients_is_reduced_too(between: str) -> None:
    """The first result is superseded: by a pass that adds to it, or because its step was skipped."""

    def body(group: Group) -> list[float]:
        table, wrapped = table_with_gathered_rows(group)
        table(torch.tensor([0])).sum().backward()
        wrapped.synchronize()
        if between == "model.zero_grad":
            table.zero_grad()
        context = wrapped.no_sync() if between == "no_sync" else contextlib.nullcontext()
        with context:
            table(torch.tensor([1 + group.rank])).sum().backward()
        wrapped.step()
        return (1 - table.weight).flatten().tolist()

    first = 0.0 if between == "model.zero_grad" else 1.0
    assert run_ranks(2, body) == [[first, 0.5, 0.5, 0.0]] * 2


def test_reading_the_groups_synchronises_gathered_gradients() -> None:
    def body(group: Group) -> list[float]:
        table, wrapped = table_with_gathered_rows(group)
        table(torch.tensor([group.rank])).sum().backward()
        (parameter,) = wrapped.param_groups[0]["params"]
        return parameter.grad.to_dense().flatten().tolist()

    assert run_ranks(2, body) == [[0.5, 0.5, 0.0, 0.0]] * 2


def test_passes_over_gathered_gradients_are_counted() -> None:
    def body(group: Group) -> list[Phase]:
        table, wrapped = table_with_gathered_rows(group, backward_passes_per_step=2, overlap="step")
        phases = []
        for _ in range(2):
            table(torch.tensor([group.rank])).sum().backward()
            phases.append(wrapped._round.phase)
        wrapped.step()
        return phases

    assert run_ranks(2, body) == [[Phase.LOCAL, Phase.OPEN]] * 2
