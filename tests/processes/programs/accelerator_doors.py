"""What users call, with tensors of the fake accelerator: ``tests/processes/test_accelerator_doors.py`` asks for cases.

A case calls ``same_bits`` with a function of a device. It runs on the CPU, and then on a device of the fake once for
each kind of job that can be late, each time with the same data; what it returns must have the same bits.

It is started and asked by ``fake_accelerator.asked``. The variable DOOR says how the ranks meet: ``group``, ``c10d`` or
``horovod``.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from fake_accelerator import asked
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
import totalreduce.horovod as hvd
from totalreduce.sparse.methods import METHODS

CASES = {}
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DOOR = os.environ["DOOR"]
#: The kinds of jobs that are late, each alone; then all of them, by random times.
LATES = ("kernels", "to_host", "to_device", "jobs")
EVERYTHING = tr.ErrorFeedback(elements_min=1)


def case(door):
    """Make a function known."""

    def known(function):
        CASES[function.__name__] = function
        return function

    return known


def same_bits(run, lates=LATES):
    """Compare the tensors that ``run(device)`` returns, by name: on the CPU, and on a device with late jobs."""
    fake.delays(0.0, 0.0)
    wanted = run(torch.device("cpu"))
    for late in lates:
        if late == "jobs":
            fake.delays(0.001, 0.0005, seed=rank)
        else:
            fake.lazy(late)
        found = run(torch.device("fake", rank % 2))
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert value.device.type == "fake", f"{name} is on {value.device}"
            assert same(value.detach().cpu(), wanted[name].detach()), f"{name} differs, with late {late}"


def same(ours, theirs):
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(bits(ours), bits(theirs))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def values(seed, *shape, device, dtype=torch.float32):
    """Values of this rank, with the kernel or the copy that makes them in flight."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank))
    return (made * 20).to(dtype).pin_memory().to(device, non_blocking=True)


# -------------------------------------------------------------------------------------------------- training


def make_model(device):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 20), torch.nn.BatchNorm1d(20), torch.nn.Tanh(), torch.nn.Linear(20, 10)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(10, 1)).to(device)


def train(device, make_optimizer, model=None, steps=4, passes=1):
    """The optimizer and the model after some steps with data of this rank."""
    model = make_model(device) if model is None else model
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            model(values(10 * step + number, 8, 6, device=device)).square().mean().backward()
        optimizer.step()
    return optimizer, model


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, foreach=False)


def trained_with(lates=LATES, **settings):
    """Train with a ``tr.DistributedOptimizer`` with these settings."""

    def run(device):
        def make(model):
            return tr.DistributedOptimizer(sgd(model), model, group=group, **settings)

        optimizer, model = train(device, make, passes=settings.get("backward_passes_per_step", 1))
        strategy = getattr(optimizer, "strategy_steps", None)
        if strategy is not None:
            strategy.finish()
        optimizer.close()
        return state_of(model)

    same_bits(run, lates)


@case("group")
def dense_gradients():
    trained_with(bucket_bytes=400)


@case("group")
def dense_gradients_until_the_step():
    trained_with(overlap="step", bucket_bytes=400, buffers="average")


@case("group")
def dense_gradients_until_the_next_forward():
    trained_with(overlap="iterations", bucket_bytes=400)


@case("group")
def accumulated_gradients():
    trained_with(backward_passes_per_step=2)


@case("group")
def gradients_as_half_types():
    trained_with(compression="bf16", gradient_predivide_factor=2.0)
    trained_with(compression="fp16")


@case("group")
def rows_of_sparse_gradients():
    def run(device):
        torch.manual_seed(3)
        table = torch.nn.Embedding(12, 4, sparse=True).to(device)
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), table, group=group, sparse="gather"
        )
        for step in range(3):
            optimizer.zero_grad()
            places = torch.tensor([1, 2, 4 + rank, 1 + step], device=device)
            (table(places) * values(step, 4, 4, device=device)).sum().backward()
            optimizer.step()
        optimizer.close()
        return state_of(table)

    same_bits(run)


@case("group")
def sparse_methods():
    made = [make(density=0.1) for name, make in METHODS.items() if name not in ("dense", "powersgd", "coded")]
    for number, sync in enumerate((*made, tr.PowerSGD(rank=2), tr.Coded(codec=tr.Int8()))):
        trained_with(lates=[LATES[number % 4]], sync=sync, feedback=EVERYTHING)


@case("group")
def strategies():
    made = (
        tr.LocalSGD(period=2),
        tr.PostLocalSGD(start=2, then=tr.LocalSGD(period=2)),
        tr.DiLoCo(period=2, codec=tr.Int8()),
        tr.DiLoCo(period=4, fragments=2, overlap=1, codec=tr.Half()),
        tr.SlowMo(period=2),
        tr.EASGD(period=2),
        tr.Gossip(),
        tr.Gossip(overlap=1),
        tr.Strom(threshold=0.02),
        tr.ParameterServer(consistency=tr.ps.Sequential(), optimizer="server", codec=tr.Int8()),
        tr.ParameterServer(consistency=tr.ps.Sequential()),
    )
    for number, sync in enumerate(made):
        trained_with(lates=[LATES[number % 4]], sync=sync)


@case("group")
def adasum():
    def run(device):
        _, model = train(device, lambda model: tr.AdasumOptimizer(sgd(model), model, group=group))
        return state_of(model)

    same_bits(run)


@case("group")
def synchronous_batch_norm():
    def run(device):
        model = tr.convert_sync_batchnorm(make_model(device), group)
        inputs = values(1, 5 + rank, 6, device=device).requires_grad_()
        model(inputs).pow(2).sum().backward()
        return state_of(model) | {"inputs": inputs.grad}

    same_bits(run)


@case("group")
def states_of_rank_0():
    def run(device):
        model = make_model(device)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01 + rank, foreach=False)
        if rank == 0:
            model(values(1, 8, 6, device=device)).square().mean().backward()
            adam.step()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank)
        tr.broadcast_parameters(model, group)
        tr.broadcast_optimizer_state(adam, group)
        state = {
            f"{key} of {number}": each[key]
            for number, each in enumerate(adam.state.values())
            for key in ("exp_avg", "exp_avg_sq")
        }
        assert len(state) == 2 * len(list(model.parameters()))
        return state_of(model) | state

    same_bits(run)


@case("group")
def values_on_servers():
    def run(device):
        keys = torch.arange(0, 300, 3)
        found = {}
        for rule in (tr.ps.Momentum(0.1), tr.ps.Adam()):
            connected = tr.ps.connect(group, num_keys=300, width=3, optimizer=rule, consistency=tr.ps.Sequential())
            with connected as client:
                pulled = torch.zeros(100, 3, device=device)
                for step in range(2):
                    client.push(keys, values(step, 100, 3, device=device))
                    client.clock()
                    client.pull(keys, pulled).wait()
                found[repr(rule)] = pulled
                group.barrier()
        with tr.ps.connect(group, num_keys=100, consistency=tr.ps.Sequential(), codec=tr.Int8()) as client:
            pulled = torch.zeros(100, device=device)
            client.push_range(0, 100, values(5, 100, device=device))
            client.clock()
            client.pull_range(0, 100, pulled).wait()
            found["range"] = pulled
            group.barrier()
        return found

    same_bits(run)


@case("group")
def scaled_losses():
    """An overflow on the last rank lets all ranks skip the step."""

    def run(device):
        model = make_model(device)
        optimizer = tr.DistributedOptimizer(sgd(model), model, group=group)
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(values(step, 8, 6, device=device)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 and rank == size - 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.close()
        assert scaler.get_scale() == 32.0
        return {name: value for name, value in state_of(model).items() if "running" not in name}

    same_bits(run)


def waits_of_the_program(step):
    """What the host waits for in two steps, in other threads than the library's."""
    fake.delays(0.001, 0.0005, seed=rank)
    inputs = [values(number, 8, 6, device=torch.device("fake", rank % 2)) for number in range(5)]
    for number in range(3):
        step(inputs[number])
    fake.take_waits()
    for number in range(3, 5):
        step(inputs[number])
    return [wait for wait in fake.take_waits() if not wait[1].startswith("totalreduce")]


@case("group")
def no_thread_of_the_program_waits_for_the_device():
    for settings in ({}, {"buffers": "average"}, {"compression": "bf16"}, {"overlap": "iterations"}):
        model = make_model(torch.device("fake", rank % 2))
        optimizer = tr.DistributedOptimizer(sgd(model), model, group=group, bucket_bytes=400, **settings)

        def step(inputs, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        assert waits_of_the_program(step) == [], settings
        optimizer.close()


# --------------------------------------------------------------------------------------------- torch.distributed


@case("c10d")
def collectives_of_torch():
    def run(device):
        mine = values(1, 30, device=device)
        found = {}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            found[f"all_reduce {op}"] = mine.clone()
            dist.all_reduce(found[f"all_reduce {op}"], op)
        found["late"] = mine * 2
        work = dist.all_reduce(found["late"], async_op=True)
        found["broadcast"] = mine * 3
        dist.broadcast(found["broadcast"], 1)
        work.wait()
        blocks = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(blocks, mine)
        found["all_gather"] = torch.cat(blocks)
        found["into_tensor"] = torch.zeros(size * 30, device=device)
        dist.all_gather_into_tensor(found["into_tensor"], mine)
        found["reduce_scatter"] = torch.zeros(30, device=device)
        dist.reduce_scatter(found["reduce_scatter"], [mine * number for number in range(size)])
        found["reduce_scatter_tensor"] = torch.zeros(30, device=device)
        dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], mine.repeat(size))
        found["all_to_all"] = torch.zeros(30 * size, device=device)
        dist.all_to_all_single(found["all_to_all"], mine.repeat(size))
        found["reduce"] = mine * 4
        dist.reduce(found["reduce"], 0)
        if rank != 0:
            found.pop("reduce")
        found["message"] = mine * 5
        if rank == 0:
            dist.send(found["message"], 1)
        elif rank == 1:
            dist.recv(found["message"], 0)
        return found

    same_bits(run)


def wrapped(device, hook=None, **options):
    model = DistributedDataParallel(make_model(device), bucket_cap_mb=0.001, **options)
    if hook is not None:
        model.register_comm_hook(*hook())
    for step in range(4):
        if step:
            model.zero_grad()
        model(values(step, 8, 6, device=device)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
    return state_of(model.module)


@case("c10d")
def distributed_data_parallel():
    same_bits(wrapped)
    same_bits(lambda device: wrapped(device, gradient_as_bucket_view=True))


@case("c10d")
def no_thread_of_a_program_with_ddp_waits_for_the_device():
    for hook in (None, tr.OkTopk(density=0.1)):
        model = DistributedDataParallel(make_model(torch.device("fake", rank % 2)), bucket_cap_mb=0.001)
        optimizer = sgd(model)
        if hook is not None:
            model.register_comm_hook(*tr.ddp_hook(hook, feedback=EVERYTHING))

        def step(inputs, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        assert waits_of_the_program(step) == [], hook


@case("c10d")
def hooks_of_distributed_data_parallel():
    made = (tr.OkTopk(density=0.1), tr.TopkA(density=0.1), tr.PowerSGD(rank=2), tr.Coded(codec=tr.Int8()))
    for sync, late in zip(made, LATES, strict=True):
        same_bits(lambda device, sync=sync: wrapped(device, lambda: tr.ddp_hook(sync, feedback=EVERYTHING)), [late])


# ------------------------------------------------------------------------------------------------------- Horovod


@case("horovod")
def collectives_of_horovod():
    def run(device):
        mine = values(1, 12, 2, device=device)
        found = {"average": hvd.allreduce(mine, name="a"), "sum": hvd.allreduce(mine, op=hvd.Sum, name="s")}
        found["scaled"] = hvd.allreduce(mine, prescale_factor=0.5, postscale_factor=3.0, op=hvd.Sum, name="f")
        found["in place"] = mine.clone()
        hvd.allreduce_(found["in place"], op=hvd.Max, name="i")
        handles = [hvd.allreduce_async(mine * number, name=f"h{number}") for number in range(3)]
        for number, handle in enumerate(handles):
            found[f"handle {number}"] = hvd.synchronize(handle)
        for number, each in enumerate(hvd.grouped_allreduce([mine, mine * 2], name="g")):
            found[f"grouped {number}"] = each
        found["gathered"] = hvd.allgather(mine[: rank + 1], name="r")
        found["broadcast"] = hvd.broadcast(mine, root_rank=1, name="b")
        found["exchanged"] = hvd.alltoall(mine, name="x")
        found["scattered"] = hvd.reducescatter(mine, op=hvd.Sum, name="y")
        return found

    same_bits(run)


@case("horovod")
def no_thread_of_a_program_with_horovod_waits_for_the_device():
    tensors = [values(number, 30, device=torch.device("fake", rank % 2)) for number in range(3)]
    fake.take_waits()
    hvd.allreduce(tensors[0], name="a")
    hvd.synchronize(hvd.allreduce_async_(tensors[1], name="b"))
    hvd.broadcast(tensors[2], root_rank=0, name="c")
    assert [wait for wait in fake.take_waits() if not wait[1].startswith("totalreduce")] == []


@case("horovod")
def optimizer_of_horovod():
    def run(device):
        def make(model):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            return hvd.DistributedOptimizer(
                sgd(model), named_parameters=model.named_parameters(), compression=hvd.Compression.none
            )

        _, model = train(device, make)
        return state_of(model)

    same_bits(run)


@case("horovod")
def half_types_and_batch_norm_of_horovod():
    def run(device):
        def make(model):
            return hvd.DistributedOptimizer(
                sgd(model), named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
            )

        layers = list(make_model(device))
        layers[1] = hvd.SyncBatchNorm(20).to(device)
        _, model = train(device, make, model=torch.nn.Sequential(*layers))
        return state_of(model)

    same_bits(run)


torch.set_num_threads(1)
fake = asked.loaded()
if DOOR == "group":
    group = tr.init()
elif DOOR == "c10d":
    dist.init_process_group("totalreduce", timeout=timedelta(seconds=60))
else:
    hvd.init()
asked.answer(CASES)
