"""Parts of PyTorch that stand on torch.distributed train on this back end as they do on gloo: the same losses."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
row = pytest.mark.tested_with

START = """
import torch.nn as nn

dist.init_process_group(BACKEND)
size = dist.get_world_size()

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def losses(trained, optimizer, steps=3, seed=rank):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        inputs = torch.randn(4, 8, generator=generator)
        loss = (trained(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
"""
PARTS = {
    "FSDP1": """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
found = losses(model, torch.optim.AdamW(model.parameters(), lr=0.01))
""",
    "tensor parallelism": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
found = losses(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
""",
    "pipelining": """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
model = build()
part = model[:1] if rank == 0 else model[1:]
inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda made, wanted: (made - wanted).square().mean())
collected = []
if rank == 0:
    schedule.step(inputs)
else:
    schedule.step(target=inputs, losses=collected)
found = [loss.item() for loss in collected] + [p.grad.square().sum().item() for p in part.parameters()]
""",
    "ZeroRedundancyOptimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = nn.parallel.DistributedDataParallel(build())
found = losses(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
""",
    "Join": """
from torch.distributed.algorithms.join import Join
model = nn.parallel.DistributedDataParallel(build())
with Join([model]):
    found = losses(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2 + 2 * rank)
found += [p.sum().item() for p in model.parameters()]
""",
    "distributed checkpoints": """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
model = fully_shard(build(), mesh=mesh)
found = losses(model, torch.optim.SGD(model.parameters(), lr=0.1))
dcp.save({"model": model.state_dict()}, checkpoint_id=FOLDER)
loaded = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), mesh=mesh)
state = {"model": loaded.state_dict()}
dcp.load(state, checkpoint_id=FOLDER)
loaded.load_state_dict(state["model"])
same = [torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), loaded.parameters())]
found += [float(all(same))]
assert all(same)
""",
    "torchmetrics": """
import torchmetrics
metric = torchmetrics.MeanMetric()
for value in range(3):
    metric.update(float(value + 10 * rank))
found = [metric.compute().item()]
assert found == [6.0]
""",
}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("FSDP1", marks=row("FSDP1", "torch")),
        pytest.param("tensor parallelism", marks=row("tensor parallelism", "torch")),
        pytest.param("pipelining", marks=row("pipelining", "torch")),
        pytest.param("ZeroRedundancyOptimizer", marks=row("ZeroRedundancyOptimizer", "torch")),
        pytest.param("Join", marks=row("Join", "torch")),
        pytest.param("distributed checkpoints", marks=row("distributed checkpoints", "torch")),
        pytest.param("torchmetrics", marks=row("torchmetrics", "torchmetrics")),
    ],
)
def test_losses_are_those_on_gloo(fleet, tmp_path, part):
    if part == "torchmetrics":
        pytest.importorskip("torchmetrics")
    found = {}
    for backend in ("totalreduce", "gloo"):
        names = f"BACKEND, FOLDER = {backend!r}, {str(tmp_path / backend)!r}\n"
        end = '\nsay("result", found=found)\ndist.destroy_process_group()\n'
        workers = fleet.start(2, names + START + PARTS[part] + end)
        found[backend] = [worker.read("result", 90)["found"] for worker in workers]
        if backend == "totalreduce":
            assert [worker.wait(60) for worker in workers] == [0, 0], [worker.errors() for worker in workers]
    assert found["totalreduce"] == [pytest.approx(values, rel=1e-5) for values in found["gloo"]]
    assert len(found["gloo"][1]) >= 1
