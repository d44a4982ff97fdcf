"""Horovod's side of ``bench coordination``: ``horovodrun`` runs this file in the Python that has Horovod.

Stands by itself: it imports nothing of this package, whose torch may be another one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

_WARMUP_STEPS = 20


def main(num_tensors: int, num_steps: int, poll_s: float) -> None:
    """Measure as ``coordination_worker`` does; rank 0 prints every rank's samples.

    ``poll_s``: look so often whether a handle is done; 0: as Horovod waits by itself, which spins.
    """
    torch = importlib.import_module("torch")
    hvd = importlib.import_module("horovod.torch")
    torch.set_num_threads(1)
    hvd.init()
    tensors = [torch.empty(1) for _ in range(num_tensors)]
    one = torch.empty(num_tensors)

    def step(tensors: list[Any], names: list[str]) -> float:
        for tensor in tensors:
            tensor.fill_(hvd.rank() + 1)
        hvd.barrier()
        begin = time.monotonic()
        handles = [hvd.allreduce_async_(t, name=name, op=hvd.Sum) for t, name in zip(tensors, names, strict=True)]
        for handle in handles:
            while poll_s and not hvd.poll(handle):
                time.sleep(poll_s)
            hvd.synchronize(handle)
        seconds = time.monotonic() - begin
        hvd.barrier()  # nobody checks while another rank still works
        wanted = hvd.size() * (hvd.size() + 1) / 2
        if any((tensor != wanted).any() for tensor in tensors):
            sys.exit("Horovod's sum is wrong")
        return seconds

    samples: dict[str, list[float]] = {"many": [], "one": []}
    for number in range(_WARMUP_STEPS + num_steps):
        many = step(tensors, [f"many.{index}" for index in range(num_tensors)])
        single = step([one], ["one"])
        if number >= _WARMUP_STEPS:
            samples["many"].append(many)
            samples["one"].append(single)
    everybodys = {name: hvd.allgather(torch.tensor(values)[None], name=name) for name, values in samples.items()}
    if hvd.rank() == 0:
        document = {name: values.tolist() for name, values in everybodys.items()}
        sys.stdout.write(f"\nRESULT {json.dumps(document)}\n")
        sys.stdout.flush()
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
