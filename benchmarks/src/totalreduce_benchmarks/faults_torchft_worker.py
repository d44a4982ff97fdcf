"""The training job of ``totalreduce bench faults`` by torchft: the same model, data and step as in ``faults_worker``.

Run as ``python -m totalreduce_benchmarks.faults_torchft_worker CONFIG RANK INCARNATION``, by a Python with torch and
torchft. Rank -1 is the lighthouse: it writes its address to the file ``lighthouse``. The other ranks write what those
of ``faults_worker`` do. A step's samples are those that torchft's sampler deals to the rank at this step of the epoch.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from totalreduce_benchmarks.faults_records import FaultsConfig, Final, read_stop
from totalreduce_benchmarks.faults_worker import Model, Points, make_optimizer

_BATCH = 4
#: The patience with a peer that is silent: that of the other contestants.
_SILENCE = timedelta(seconds=2)
_PATIENCE = timedelta(seconds=60)


def serve(folder: Path) -> None:
    """Run the lighthouse until this process is killed."""
    coordination: Any = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=int(_SILENCE.total_seconds() * 1e3)
    )
    draft = folder / "lighthouse.draft"
    draft.write_text(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}", encoding="utf-8")
    draft.rename(folder / "lighthouse")
    while True:
        time.sleep(60.0)


def train(config: FaultsConfig, rank: int, incarnation: int) -> None:
    """Train until the file ``stop`` says so."""
    folder, num_ranks = Path(config.folder), config.num_ranks
    torchft: Any = importlib.import_module("torchft")
    dtype: torch.dtype = getattr(torch, config.dtype)
    torch.manual_seed(0)
    model = Model(config.elements).to(dtype)
    inner = make_optimizer(config, model)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(folder / "lighthouse").read_text(encoding="utf-8"),
        replica_id=f"rank-{rank}",
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, inner)
    points = Points(dtype)
    sampler = torchft.DistributedSampler(
        points, replica_rank=rank, num_replica_groups=num_ranks, group_rank=0, num_replicas=1
    )
    steps_of_epoch = len(sampler) // _BATCH
    log = (folder / f"blocks-{rank}-{incarnation}.jsonl").open("a", buffering=1, encoding="utf-8")
    (folder / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    times = []
    while not 0 < (stop := read_stop(folder)) <= manager.current_step():
        step = manager.current_step()
        epoch, place = divmod(step, steps_of_epoch)
        sampler.set_epoch(epoch)
        samples = list(itertools.islice(sampler, place * _BATCH, (place + 1) * _BATCH))
        batch = [points[index] for index in samples]
        optimizer.zero_grad()  # begins the quorum
        output = model(torch.stack([inputs for _, inputs, _ in batch])).float()
        torch.nn.functional.cross_entropy(output, torch.tensor([target for _, _, target in batch])).backward()  # type: ignore[no-untyped-call]
        time.sleep(config.step_ms / 1e3)
        # As one bucket. The DistributedDataParallel of torchft 0.2.0 raises AssertionError when a rank is lost.
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        manager.allreduce(flat).wait()
        parts = flat.split_with_sizes([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        done = manager.current_step()
        if done == step:  # the step was not committed
            continue
        times.append(time.monotonic())
        if done == step + 1:  # otherwise this rank has got the state of another one, and its samples did not count
            about = {"about": step, "job_epoch": 0, "data_epoch": epoch, "samples": samples}
            log.write(json.dumps({"seat": rank, **about}) + "\n")
        size = manager.num_participants()
        line = {"seat": rank, "done": done, "digest": _digest(model, inner), "at": time.time(), "world_size": size}
        log.write(json.dumps(line) + "\n")
    steps = sorted(after - before for before, after in itertools.pairwise(times[1:]))
    step_s = steps[len(steps) // 2] if steps else 0.0
    final = Final(stop, _digest(model, inner), "", num_ranks, step_s)
    (folder / f"final-{rank}.json").write_text(json.dumps(asdict(final)), encoding="utf-8")
    manager.shutdown(wait=False)
    os._exit(0)  # its threads wait for other ranks that have ended


def _digest(model: torch.nn.Module, inner: torch.optim.Optimizer) -> str:
    """Return SHA-256 of the parameters and of the optimizer's state."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [
        value for entry in inner.state_dict()["state"].values() for value in entry.values() if torch.is_tensor(value)
    ]
    found = sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def main() -> None:
    """Be the lighthouse or a rank."""
    config = FaultsConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if int(sys.argv[2]) < 0:
        serve(Path(config.folder))
    train(config, int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
