"""torch.distributed, and what is built on it, beneath modes of torch: default devices and dtypes, inference."""

import pytest

#: An import of a large module may hold Python's lock for seconds, and a rank that is silent for long counts as lost.
PATIENT = {"TOTALREDUCE_PEER_TIMEOUT_S": "30"}
#: Every door takes and returns tensors that name device and dtype. The results must not depend on torch's defaults.
DEFAULTS = """
import contextlib
import copy
import functools
from datetime import timedelta
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
import totalreduce.horovod as hvd
from torch.distributed.tensor import Shard, distribute_tensor

FLOAT = torch.float32
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 8, device="cpu"), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
for index, each in enumerate(MODEL.parameters()):
    torch.nn.init.constant_(each, 0.1 * (1 + index))

def numbers(*shape, dtype=FLOAT):
    count = torch.Size(shape).numel()
    return torch.arange(1 + rank * count, 1 + rank * count + count, dtype=dtype, device="cpu").view(shape)

def zeros(*shape):
    return torch.zeros(*shape, dtype=FLOAT, device="cpu")

def flat(model):
    return torch.cat([each.detach().flatten() for each in [*model.parameters(), *model.buffers()]])

def step(model, optimizer, number):
    optimizer.zero_grad()
    F.mse_loss(model(numbers(3, 4) + number), numbers(3, 2)).backward()
    optimizer.step()

def attempts():
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = tr.State(model=model, optimizer=optimizer, seen=0)
    for attempt in tr.attempts(state, timeout=timedelta(seconds=60)):
        with attempt:
            wrapped = DistributedDataParallel(model)
            while state.steps < 3:
                step(wrapped, optimizer, state.steps)
                attempt.commit()
    return [flat(model)]

def collectives():
    dist.barrier()
    dist.monitored_barrier()
    results = [numbers(3), numbers(2, 3).t(), numbers(3)]
    dist.all_reduce(results[0])
    dist.all_reduce(results[1], dist.ReduceOp.AVG)
    dist.broadcast(results[2], 1)
    gathered = [zeros(2, 3).t() for _ in range(2)]
    dist.all_gather(gathered, numbers(3, 2))
    sparse = torch.sparse_coo_tensor(numbers(1, 1, dtype=torch.int64), numbers(1), (4,), device="cpu")
    dist.all_reduce(sparse)
    received = numbers(3)
    dist.send(received, 1) if rank == 0 else dist.recv(received)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1]
    dist.barrier(dist.new_group([0, 1]))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = distribute_tensor(zeros(2, 4) + 1, mesh, [Shard(0)]).full_tensor()
    return [*results, *gathered, sparse.to_dense(), received, whole]

def training(hook=None):
    wrapped = DistributedDataParallel(copy.deepcopy(MODEL))
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for number in range(3):
        step(wrapped, optimizer, number)
    return [flat(wrapped)]

def hook(method):
    return tr.ddp_hook(method, feedback=tr.ErrorFeedback(elements_min=0, bucket_elements=16))

def horovod():
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for number in range(3):
        step(model, wrapped, number)
    sparse = torch.sparse_coo_tensor(numbers(1, 1, dtype=torch.int64), numbers(1), (4,), device="cpu")
    rows = numbers(1 + rank, 2).requires_grad_()
    gathered = hvd.allgather(rows)
    gathered.square().sum().backward()
    exchanged, splits = hvd.alltoall(numbers(3), splits=torch.tensor([1, 2], dtype=torch.int32, device="cpu"))
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert [each["rank"] for each in hvd.allgather_object({"rank": rank})] == [0, 1]
    hvd.barrier()
    norm = hvd.SyncBatchNorm(4, device="cpu", dtype=FLOAT)
    norm(numbers(3, 4))
    return [flat(model), hvd.allreduce(numbers(3)), hvd.allreduce(numbers(2, 3).t(), op=hvd.Min), gathered.detach(),
            rows.grad, exchanged, splits, hvd.sparse_allreduce_async(sparse).wait().to_dense(), norm.running_var,
            hvd.reducescatter(numbers(4)), *hvd.grouped_allreduce([numbers(3), numbers(2, dtype=torch.float64)])]

def native():
    mine = native_group.allreduce(numbers(3), op=tr.ReduceOp.AVG).wait()
    native_group.allgather(rows := zeros(2, 3), numbers(3)).wait()
    native_group.alltoall(exchanged := [zeros(1 + rank) for _ in range(2)], [numbers(1), numbers(2)]).wait()
    native_group.barrier()
    assert native_group.allgather_object(rank) == [0, 1]
    return [mine, rows, *exchanged, native_group.allreduce(numbers(2, 3).t()).wait()]

@contextlib.contextmanager
def defaults(device, dtype):
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(FLOAT)

def check(door, results, expected, settings):
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=lambda text: f"{door}, {settings}: {text}")

def check_all(doors):
    for door in doors:
        expected = door()
        for settings in (("meta", torch.float64), ("meta", torch.bfloat16)):
            with defaults(*settings):
                check(door, door(), expected, settings)

def start(backend):
    store = dist.FileStore(os.environ["FOLDER"] + "/" + backend, 2)  # the launcher's is for one process group
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

with defaults("meta", torch.bfloat16):
    of_attempts = attempts()
start("totalreduce")
check(attempts, of_attempts, training(), "meta, bfloat16")
methods = (tr.OkTopk(density=0.2), tr.Coded(), tr.PowerSGD(rank=1))
check_all([collectives, training, *(functools.partial(training, functools.partial(hook, each)) for each in methods)])
hvd.init()
check_all([horovod])
hvd.shutdown()
dist.destroy_process_group()
start("gloo")
native_group = tr.init("torch", name="native", timeout_s=60)
check_all([native])
say("result")
"""


def test_results_do_not_depend_on_the_defaults_of_torch(fleet, tmp_path):
    workers = fleet.start(2, DEFAULTS, FOLDER=str(tmp_path), **PATIENT)
    for worker in workers:
        worker.read("result", 60.0)
    for worker in workers:
        assert worker.wait() == 0, worker.errors()


#: Every collective begins in the mode, and ends within it, outside of it, in another thread, or in a future.
INFERENCE = """
import functools
import threading
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel
import totalreduce.horovod as hvd

dist.init_process_group("totalreduce", timeout=timedelta(seconds=60))
total = 3.0
failures = []

def contiguous(value):
    return torch.full((2, 3), float(value))

def strided(value):
    return torch.full((3, 2), float(value)).t()

def lists(make):
    return [make(0) for _ in range(2)]

# Each returns the handles, the tensors that take the results, and the value of all elements of each.

def all_reduce(make):
    tensor = make(rank + 1)
    return dist.all_reduce(tensor, async_op=True), [tensor], [total]

def all_reduce_coalesced(make):
    tensors = [make(rank + 1), make(2 * rank + 2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return manager, tensors, [total, 2 * total]

def broadcast(make):
    tensor = make(rank + 1)
    return dist.broadcast(tensor, 1, async_op=True), [tensor], [2.0]

def reduce(make):
    tensor = make(rank + 1)
    return dist.reduce(tensor, 1, async_op=True), [tensor], [total if rank == 1 else 1.0]

def all_gather(make):
    outputs = lists(make)
    return dist.all_gather(outputs, make(rank + 1), async_op=True), outputs, [1.0, 2.0]

def gather(make):
    outputs = lists(make) if rank == 1 else None
    return dist.gather(make(rank + 1), outputs, 1, async_op=True), outputs or [], [1.0, 2.0] if outputs else []

def scatter(make):
    tensor = make(0)
    return dist.scatter(tensor, [make(1), make(2)] if rank == 1 else None, 1, async_op=True), [tensor], [rank + 1.0]

def reduce_scatter(make):
    tensor = make(0)
    return dist.reduce_scatter(tensor, [make(rank + 1)] * 2, async_op=True), [tensor], [total]

def all_to_all(make):
    outputs = lists(make)
    return dist.all_to_all(outputs, [make(rank + 1)] * 2, async_op=True), outputs, [1.0, 2.0]

def message(make):
    tensor = make(rank + 1)
    return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0), [tensor], [1.0]

def sparse(make):
    tensor = torch.sparse_coo_tensor([[0, 1]], [rank + 1.0] * 2, (2,), check_invariants=False)
    return dist.all_reduce(tensor, async_op=True), [tensor], [total]

def into_tensors(make):
    whole, part, row = torch.zeros(4), torch.zeros(2), torch.zeros(2)
    works = [dist.all_gather_into_tensor(whole, torch.full((2,), rank + 1.0), async_op=True),
             dist.reduce_scatter_tensor(part, torch.full((4,), rank + 1.0), async_op=True),
             dist.all_to_all_single(row, torch.full((2,), rank + 1.0), async_op=True)]
    return works, [part, whole[:2], whole[2:], row[1]], [total, 1.0, 2.0, 2.0]

def by_native(make):
    tensors = [make(rank + 1), make(rank + 1), make(0)]
    works = [native.allreduce(tensors[0], op=tr.ReduceOp.AVG), native.broadcast(tensors[1], root=1, async_op=True),
             native.reduce_scatter(tensors[2], [make(rank + 1)] * 2)]
    return works, tensors, [total / 2, 2.0, total]

def by_horovod(make):
    tensors = [make(rank + 1), make(rank + 1)]
    works = [hvd.allreduce_async_(tensors[0], op=hvd.Sum, postscale_factor=0.5), hvd.broadcast_async_(tensors[1], 1)]
    return works, tensors, [total / 2, 2.0]

def waited(handles):
    for handle in handles if isinstance(handles, list) else [handles]:
        handle.wait()

def in_a_thread(handles):
    thread = threading.Thread(target=waited, args=(handles,))
    thread.start()
    thread.join(30.0)

def by_a_future(handles):
    for handle in handles if isinstance(handles, list) else [handles]:
        handle.get_future().wait() if hasattr(handle, "get_future") else handle.wait()

def check(door):
    for make in (contiguous, strided):
        for end in (waited, in_a_thread, by_a_future):
            for inside in (True, False):
                with torch.inference_mode():
                    handles, tensors, values = door(make)
                    if inside:
                        end(handles)
                if not inside:
                    end(handles)
                found = [(tensor.to_dense() if tensor.is_sparse else tensor).unique().tolist() for tensor in tensors]
                if found != [[value] for value in values]:
                    failures.append(f"{door.__name__} {make.__name__} {end.__name__} inside={inside}: {found} {values}")

for door in (all_reduce, all_reduce_coalesced, broadcast, reduce, all_gather, gather, scatter, reduce_scatter,
             all_to_all, message, sparse, into_tensors):
    check(door)

layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = DistributedDataParallel(layers)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.full((3, 4), rank + 1.0)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():  # in training mode, too: DDP broadcasts the buffers
        model(torch.ones(3, 4))
        objects = [None, None]
        dist.all_gather_object(objects, layers[1].running_mean.tolist())
        dist.barrier()
if objects[0] != objects[1]:
    failures.append(f"buffers differ: {objects}")

hvd.init()
check(by_horovod)
hvd.shutdown()
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.FileStore(os.environ["FOLDER"] + "/gloo", 2), rank=rank, world_size=2)
native = tr.init("torch", name="native", timeout_s=60)
check(by_native)
say("result", failures=failures)
"""


def test_collectives_that_begin_in_inference_mode_end_anywhere(fleet, tmp_path):
    workers = fleet.start(2, INFERENCE, FOLDER=str(tmp_path), **PATIENT)
    assert [worker.read("result", 60.0)["failures"] for worker in workers] == [[], []]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()


#: What modes, the profiler and autograd see of a call must be what they see of gloo's.
OBSERVED = """
import gc
import warnings
from datetime import timedelta
import torch.distributed._functional_collectives as functional
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

warnings.simplefilter("ignore")
dist.init_process_group("totalreduce", timeout=timedelta(seconds=60))
ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
differences = []

def mine(*shape):
    return torch.full(shape or (4,), rank + 1.0)

# Each returns the tensors with results, made by ``make`` before the mode begins, and makes the call.

def all_reduce(group):
    x = mine()
    return [x], lambda: dist.all_reduce(x, group=group)

def strided(group):
    x = mine(3, 2).t()
    return [x], lambda: dist.all_reduce(x, group=group)

def asynchronous(group):
    x = mine()
    return [x], lambda: dist.all_reduce(x, group=group, async_op=True).wait()

def maximum(group):
    x = mine()
    return [x], lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)

def coalesced(group):
    xs = [mine(), mine(2)]
    def call():
        with dist._coalescing_manager(group):
            for x in xs:
                dist.all_reduce(x, group=group)
    return xs, call

def gathers_coalesced(group):
    wholes, parts = [torch.zeros(8), torch.zeros(4)], [mine(), mine(2)]
    def call():
        with dist._coalescing_manager(group):
            for whole, part in zip(wholes, parts):
                dist.all_gather_into_tensor(whole, part, group=group)
    return wholes, call

def scatters_coalesced(group):
    parts, wholes = [torch.zeros(2), torch.zeros(1)], [mine(), mine(2)]
    def call():
        with dist._coalescing_manager(group):
            for part, whole in zip(parts, wholes):
                dist.reduce_scatter_tensor(part, whole, group=group)
    return parts, call

def broadcast(group):
    x = mine()
    return [x], lambda: dist.broadcast(x, 1, group=group)

def reduce(group):
    x = mine()
    return [x] * (rank == 1), lambda: dist.reduce(x, 1, group=group)

def all_gather(group):
    x, outputs = mine(), [torch.zeros(4) for _ in range(2)]
    return outputs, lambda: dist.all_gather(outputs, x, group=group)

def all_gather_into_tensor(group):
    x, output = mine(), torch.zeros(8)
    return [output], lambda: dist.all_gather_into_tensor(output, x, group=group)

def reduce_scatter(group):
    xs, output = [mine(), mine()], torch.zeros(4)
    return [output], lambda: dist.reduce_scatter(output, xs, group=group)

def reduce_scatter_tensor(group):
    x, output = mine(), torch.zeros(2)
    return [output], lambda: dist.reduce_scatter_tensor(output, x, group=group)

def all_to_all(group):
    xs, outputs = [mine(), mine()], [torch.zeros(4) for _ in range(2)]
    return outputs, lambda: dist.all_to_all(outputs, xs, group=group)

def all_to_all_single(group):
    x, output = mine(), torch.zeros(4)
    return [output], lambda: dist.all_to_all_single(output, x, group=group)

def gather(group):
    x, outputs = mine(), [torch.zeros(4) for _ in range(2)] if rank == 1 else None
    return outputs or [], lambda: dist.gather(x, outputs, 1, group=group)

def scatter(group):
    output, xs = torch.zeros(4), [mine(), mine()] if rank == 1 else None
    return [output], lambda: dist.scatter(output, xs, 1, group=group)

def message(group):
    x = mine()
    return [x], lambda: dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)

def any_message(group):
    x = mine()
    return [x], lambda: dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, group=group)

def barrier(group):
    return [], lambda: dist.barrier(group)

def monitored(group):
    return [], lambda: dist.monitored_barrier(group, timedelta(seconds=60))

def sparse(group):
    x = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=False)
    return [x], lambda: dist.all_reduce(x, group=group)

def objects(group):
    found = [None, None]
    return [], lambda: dist.all_gather_object(found, rank, group=group)

def functionals(group):
    x, results = mine(), [torch.zeros(4), torch.zeros(8), torch.zeros(2)]
    def call():
        results[0].copy_(functional.all_reduce(x, "sum", group))
        results[1].copy_(functional.all_gather_tensor(x, 0, group))
        results[2].copy_(functional.reduce_scatter_tensor(x, "sum", 0, group))
    return results, call

def sharded_tensor(group):
    x, result = torch.arange(4.0), torch.zeros(4)
    mesh = DeviceMesh.from_group(group, "cpu")
    def call():
        part = distribute_tensor(x, mesh, [Shard(0)])
        result.copy_(part.redistribute(mesh, [Replicate()]).to_local())
    return [result], call

def linear():
    layer = torch.nn.Linear(4, 4)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return layer

def replicated(group):
    layer = linear()
    def call():
        DistributedDataParallel(layer, process_group=group)(mine(2, 4)).sum().backward()
    layer.weight.grad = torch.zeros(4, 4)
    return [layer.weight.grad], call

def fsdp(group):
    model = fully_shard(linear(), mesh=DeviceMesh.from_group(group, "cpu"))
    return [], lambda: model(mine(2, 4)).sum().backward()

DOORS = (all_reduce, strided, asynchronous, maximum, coalesced, gathers_coalesced, scatters_coalesced, broadcast,
         reduce, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor, all_to_all,
         all_to_all_single, gather, scatter, message, any_message, barrier, monitored, sparse, objects, functionals,
         sharded_tensor, replicated, fsdp)

def shown(value):
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return [shown(each) for each in value] if isinstance(value, (list, tuple)) else type(value).__name__

class Seen(TorchDispatchMode):
    # The operators of c10d that a mode sees, their arguments and results, and whether they name the process group.
    def __init__(self, group):
        super().__init__()
        self.group, self.seen = group, []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            [at] = [index for index, each in enumerate(func._schema.arguments) if each.name == "process_group"]
            self.seen.append((str(func), dist.ProcessGroup.unbox(args[at]) is self.group, shown(args), shown(result)))
        return result

def values(tensors):
    return [(tensor.to_dense() if tensor.is_sparse else tensor).tolist() for tensor in tensors]

def compare(what, by_gloo, by_ours):
    if by_gloo != by_ours:
        differences.append(f"{what}: {by_gloo} with gloo, {by_ours} with totalreduce")

def counted(group, door):
    tensors, call = door(group)
    with CommDebugMode() as mode:
        call()
    return {str(key): count for key, count in mode.get_comm_counts().items()}, values(tensors)

def logged(group, door):
    from torch.utils._debug_mode import DebugMode
    tensors, call = door(group)
    with DebugMode() as mode:
        call()
    lines = [line for line in mode.debug_string().splitlines() if "c10d" in line]
    name = f", {group.group_name})"
    return [line.replace(name, ", GROUP)") if "_functional" in line else line for line in lines], values(tensors)

def seen(group, door):
    tensors, call = door(group)
    with Seen(group) as outer, Seen(group) as inner:
        call()
    return outer.seen, inner.seen, values(tensors)

def profiled(group, door):
    tensors, call = door(group)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sorted(event.name for event in profiler.events() if event.name.startswith("c10d::")), values(tensors)

def changed(group, door):
    tensors, call = door(group)
    before = [tensor._version for tensor in tensors]
    call()
    return [tensor._version > version for tensor, version in zip(tensors, before)]

LOOKS = (logged,) if os.environ.get("LOOK") == "logged" else (counted, seen, profiled)
for door in DOORS:
    for look in LOOKS:
        compare(f"{look.__name__} {door.__name__}", look(gloo, door), look(ours, door))
    if any(there and not here for there, here in zip(changed(gloo, door), changed(ours, door))):
        differences.append(f"{door.__name__} does not count as a change")

# Without values: fake tensors, within their mode and outside of it, and graphs of them.

def faked(group, door):
    with FakeTensorMode():
        tensors, call = door(group)
        call()
    return [(type(tensor).__name__, tuple(tensor.shape)) for tensor in tensors]

for door in (all_reduce, strided, coalesced, broadcast, reduce, all_gather, all_gather_into_tensor,
             reduce_scatter_tensor, all_to_all_single, gather, scatter, message, barrier, monitored):
    try:
        wanted = faked(gloo, door)
    except Exception:  # torch has no kernel for it
        continue
    compare(f"fake {door.__name__}", wanted, faked(ours, door))

def graph(group, **options):
    def program(x):
        dist.all_reduce(x, group=group)
        return x + 1
    return make_fx(program, **options)(mine()).code

compare("a graph", graph(gloo, tracing_mode="fake"), graph(ours, tracing_mode="fake"))
try:
    graph(ours)
    differences.append("a graph with real tensors is recorded")
except Exception as error:
    text = f"{type(error).__name__}: {error}"
    if "tracing_mode='fake'" not in text:
        differences.append(text)

# Tensors whose class carries operators out.

def wrapped(group):
    fake = FakeTensorMode().from_tensor(mine())
    two, later = TwoTensor(mine(), mine() * 10), functional.all_reduce(mine(), "sum", group)
    for x in (fake, two, later):
        dist.all_reduce(x, group=group)
    gathered = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(gathered, functional.all_reduce(mine(), "sum", group), group=group)
    return two.a.tolist(), two.b.tolist(), (later + 0).tolist(), [each.tolist() for each in gathered]

compare("wrapped tensors", wrapped(gloo), wrapped(ours))

# A mode that keeps the results of operators, and returns them when the call is repeated: selective checkpointing.

class Kept(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kept = None
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if self.kept is None:
            self.kept = func(*args, **(kwargs or {}))
        return self.kept

def repeated(group):
    tensors, mode = [mine(), mine()], Kept()
    for x in tensors:
        with mode:
            dist.all_reduce(x, group=group)
        gc.collect()
    return [x.tolist() for x in tensors]

compare("repeated calls", repeated(gloo), repeated(ours))
with CommDebugMode():
    handle = dist.all_reduce(mine(), async_op=True)
    handle.get_future().wait()
    compare("a handle", ["OperationWork", True], [type(handle).__name__, handle.is_success()])
sum_of_two, listed = mine(), mine()
with CommDebugMode() as mode:  # calls with bare values in the place of options
    ours.allreduce(sum_of_two, dist.ReduceOp.MAX).wait()
    ours.broadcast(listed, root=1).wait()
    ours.barrier().wait()
compare("bare values", [2, [2.0] * 4, [2.0] * 4], [mode.get_total_counts(), sum_of_two.tolist(), listed.tolist()])
say("result", differences=differences)
"""


@pytest.mark.parametrize("look", ["others", pytest.param("logged", marks=pytest.mark.slow)])
def test_observers_see_what_they_see_of_gloo(fleet, look):
    """``logged`` is ``DebugMode``, which imports torch's compiler."""
    fleet.preload("torch.distributed.fsdp", "torch.distributed.tensor.debug", "torch.testing._internal.two_tensor")
    workers = fleet.start(2, OBSERVED, LOOK=look, **PATIENT)
    assert [worker.read("result", 60.0)["differences"] for worker in workers] == [[], []]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
