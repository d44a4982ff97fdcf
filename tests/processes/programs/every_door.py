"""Everything that has compiled code, once. The arguments: ranks without Numba. Prints a digest of results by door."""

import hashlib
import os
import sys

if os.environ["RANK"] in sys.argv:
    os.environ["NUMBA_DISABLE_JIT"] = "1"

import numpy as np
import torch

import totalreduce as tr
from totalreduce.codecs.codecs import CODECS
from totalreduce.codecs.threshold import Threshold
from totalreduce.sparse.methods import METHODS

group = tr.init()
ALL = tr.ErrorFeedback(elements_min=1)
methods = [make(density=0.05) for name, make in METHODS.items() if name not in ("dense", "powersgd", "coded")]
codecs = [make(threshold=0.01) if make is Threshold else make() for make in CODECS.values()]
strategies = [
    *(tr.DiLoCo(period=2, codec=codec) for codec in (tr.Half(), tr.Half(dtype="float16"), tr.Int8())),
    tr.Strom(threshold=0.01),
    tr.ParameterServer(consistency=tr.ps.Sequential(), optimizer="server", codec=tr.Int8()),
]
doors = {
    "dense": {},
    **{repr(sync): {"sync": sync, "feedback": ALL} for sync in (*methods, *(tr.Coded(codec=each) for each in codecs))},
    **{repr(sync): {"sync": sync} for sync in strategies},
}


def say(door: str, *arrays: np.ndarray) -> None:
    print(hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:12], door, flush=True)


for door, settings in doors.items():
    torch.manual_seed(1)
    model = torch.nn.Linear(60, 50)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model, group=group, **settings)
    torch.manual_seed(group.rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    say(door, *(parameter.detach().numpy() for parameter in model.parameters()))

keys, pulled = np.arange(0, 300, 3), np.empty((100, 3), np.float32)
gradients = np.random.default_rng(group.rank).standard_normal((100, 3)).astype(np.float32)
for rule in (tr.ps.Momentum(0.1), tr.ps.Adagrad(0.1), tr.ps.Adam(), tr.ps.FTRL(l1=0.1)):
    with tr.ps.connect(group, num_keys=300, width=3, optimizer=rule, consistency=tr.ps.Sequential()) as client:
        for _ in range(2):
            client.push(keys, gradients)
            client.clock()
        client.pull(keys, pulled).wait()
        say(repr(rule), pulled)
        group.barrier()
group.close()
