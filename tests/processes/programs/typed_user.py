"""A user's program, which type checkers read and nobody runs: the types of the package reach those who import it."""

from typing import assert_type

import torch

import totalreduce as tr
import totalreduce.horovod as hvd

group = tr.init(timeout_s=30)
assert_type(group, tr.Group)
assert_type(group.rank, int)
assert_type(group.allreduce(torch.ones(1), op=tr.ReduceOp.AVG), tr.Work)
assert_type(group.allreduce(torch.ones(1)).wait(), torch.Tensor)

model = torch.nn.Linear(2, 2)
tr.broadcast_parameters(model, group)
optimizer = tr.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=tr.OkTopk(density=0.01)
)
assert_type(optimizer.hidden_share, float | None)

state = tr.State(model=model, optimizer=optimizer, best=0.0)
with tr.recoverable(state) as job:
    assert_type(job, tr.Job)
    for epoch in job.epochs(3):
        assert_type(epoch, int)

try:
    group.barrier()
except tr.PeerLost as error:
    assert_type(error.rank, int)

assert_type(hvd.size(), int)

# A checker that does not know the types of the package takes these lines for correct, and says that "ignore" is unused.
tr.init(timeout_s="30")  # type: ignore[arg-type]
tr.OkTopk(density="a tenth")  # type: ignore[arg-type]
tr.init().allreduse(torch.ones(1))  # type: ignore[attr-defined]
