"""CUDA tensors under the plain back end: through pinned memory, and right whatever streams are busy."""

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


PROGRAM = """
dist.init_process_group("totalreduce")
torch.cuda.set_device(0)
size, device = dist.get_world_size(), torch.device("cuda", 0)
tensor = torch.zeros(1 << 20, device=device)
torch.cuda._sleep(50_000_000)
tensor += rank + 1
dist.all_reduce(tensor)
doubled = (tensor * 2)[:3].tolist()
future = dist.all_reduce(torch.ones(5, device=device), async_op=True).get_future()
future = future.then(lambda done: done.value()[0] * 2)
chained = future.wait().tolist()
parts = [torch.empty(3, device=device) for _ in range(size)]
dist.all_gather(parts, torch.full((3,), float(rank), device=device))
share = torch.empty(2, device=device)
dist.reduce_scatter_tensor(share, torch.arange(2.0 * size, device=device))
exchanged = torch.empty(size, device=device)
dist.all_to_all_single(exchanged, torch.full((size,), float(rank), device=device))
if rank == 0:
    dist.send(torch.full((4,), 5.0, device=device), 1)
elif rank == 1:
    dist.recv(received := torch.empty(4, device=device), 0)
    assert received.tolist() == [5.0] * 4
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device), device_ids=[0])
model(torch.full((2, 8), float(rank), device=device)).sum().backward()
gradient = model.module.weight.grad[0].tolist()
dist.barrier()
say("result", doubled=doubled, chained=chained, parts=[p.tolist() for p in parts], share=share.tolist(),
    exchanged=exchanged.tolist(), gradient=gradient)
dist.destroy_process_group()
"""


@needs_cuda
def test_collectives_of_cuda_tensors(fleet):
    # A process that has used CUDA must not be forked; this one and the zygote have not.
    workers = fleet.start(2, PROGRAM)
    for rank, worker in enumerate(workers):
        facts = worker.read("result", 100.0)
        assert facts["doubled"] == [6.0] * 3
        assert facts["chained"] == [4.0] * 5
        assert facts["parts"] == [[0.0] * 3, [1.0] * 3]
        assert facts["share"] == [4.0 * rank, 4.0 * rank + 2.0]
        assert facts["exchanged"] == [0.0, 1.0]
        assert facts["gradient"] == [1.0] * 8
        assert worker.wait() == 0
