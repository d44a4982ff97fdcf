"""torch.distributed, and what is built on it, beneath modes of torch: default devices and dtypes, inference."""

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
    workers = fleet.start(2, DEFAULTS, FOLDER=str(tmp_path))
    for worker in workers:
        worker.read("result", 60.0)
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
