"""One rank of ``bench versions``: ``python -P versions_worker.py CONFIG``, under the version that is measured.

This file uses the public interface of the package only, so that it also runs with versions older than itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import totalreduce as tr

_PERIOD = 8191
_SEED = 11
_SIGNAL = 0.1
_BLOCK_BYTES = 16 << 20
_BLOCKS = (3, 1000)
_WARMUP_BLOCKS = 4
#: How much longer than the timed part of its blocks a case may take.
_WHOLE_OVER_TIMED = 8
#: More ranks than cores leave one rank without a core for seconds, and its peers must not take it for dead.
_SILENCE_S = 30.0


def main(config_path: str) -> None:
    """Measure one case on this rank and write the samples to ``rankN.json`` beside the configuration."""
    path = Path(config_path)
    config = json.loads(path.read_text(encoding="utf-8"))
    group = tr.init(config["transport"], tcp=tr.TcpConfig(silence_s=_SILENCE_S))
    cases = {"allreduce": _allreduce, "step": _step, "sparse": _sparse}[config["what"]](group, config)
    document = {"package": str(tr.__file__), "version": tr.__version__, "cases": cases}
    path.with_name(f"rank{group.rank}.json").write_text(json.dumps(document), encoding="utf-8")
    group.barrier()
    group.close()
    sys.stdout.flush()
    os._exit(0)


def _allreduce(group: tr.Group, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Sums of every size."""
    return [{"size": size, **_allreduce_of(group, size, config["seconds"])} for size in config["sizes"]]


def _allreduce_of(group: tr.Group, size: int, seconds: float) -> dict[str, Any]:
    """A block has several operations in a row, because a small one is shorter than the skew after a barrier."""
    count, times = max(1, size // 4), max(1, min(20, _BLOCK_BYTES // size))
    pattern = (torch.arange(count) % _PERIOD + 1).float()
    mine, wanted = pattern * (group.rank + 1), pattern * (group.world_size * (group.world_size + 1) // 2)
    buffer = torch.empty(times, count)
    tensors = list(buffer)

    def fill() -> None:
        buffer.copy_(mine)

    def reduce() -> None:
        for tensor in tensors:
            group.allreduce(tensor, name="versions.allreduce").wait()

    def check() -> None:
        if not bool((buffer == wanted).all()):
            sys.exit(f"allreduce of {count} elements gave a wrong sum")

    return _time(group, seconds, fill, reduce, check, times=times)


def _step(group: tr.Group, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Training steps of an MLP with 14.6 million parameters."""
    torch.manual_seed(_SEED)
    sizes = (784, 2048, 2048, 2048, 2048, 200)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = tr.DistributedOptimizer(inner, model, group=group)
    generator = torch.Generator().manual_seed(_SEED + group.rank)
    inputs = torch.randn(64, sizes[0], generator=generator)
    targets = torch.randint(sizes[-1], (64,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    samples = _time(group, config["seconds"], _nothing, step, _nothing)
    _require_equal_replicas(group, model)
    optimizer.close()
    return [samples]


def _sparse(group: tr.Group, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps that send one gradient by Ok-Topk: from the beginning of backward until the parameters are updated."""
    count = config["elements"]
    model = _Flat(1, count)  # vectors are not compressed
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=tr.OkTopk(density=0.01))
    signal = torch.randn(1, count, generator=torch.Generator().manual_seed(_SEED)) * _SIGNAL
    generator = torch.Generator().manual_seed(_SEED + 1 + group.rank)
    noise = torch.randn(1, count, generator=generator)

    def make_gradient() -> None:
        turn = int(torch.randint(count, (), generator=generator))
        model.gradients[:] = [noise.roll(turn).add_(signal)]
        optimizer.zero_grad()

    def step() -> None:
        model().backward()
        optimizer.step()

    samples = _time(group, config["seconds"], make_gradient, step, _nothing)
    _require_equal_replicas(group, model)
    optimizer.close()
    return [samples]


class _Flat(nn.Module):
    """One parameter whose next gradient is given.

    Attributes:
        gradients: A list of one tensor, which the next backward pass takes out of it.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.gradients: list[torch.Tensor] = []

    def forward(self) -> Any:
        return _Given.apply(self.weight, self.gradients)  # type: ignore[no-untyped-call]


class _Given(torch.autograd.Function):
    """A function of a parameter whose gradient is the tensor in a list."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        # Taken out of the list: autograd keeps a tensor that has no other owner, and copies one that has.
        return ctx.gradients.pop(), None


def _time(
    group: tr.Group,
    seconds: float,
    prepare: Callable[[], None],
    run: Callable[[], None],
    check: Callable[[], None],
    *,
    times: int = 1,
) -> dict[str, Any]:
    """Time as many blocks as fit into ``seconds``; all ranks agree on their number.

    Returns:
        ``seconds`` of one operation by block, the processor time ``cpu_s`` of this rank in all timed blocks, and the
        number of ``messages`` that it sent and of ``operations`` that it carried out in them.
    """

    def block() -> tuple[float, float, int]:
        prepare()
        group.barrier()
        messages, cpu, begin = group.statistics().messages_sent, time.process_time(), time.monotonic()
        run()
        elapsed, cpu = time.monotonic() - begin, time.process_time() - cpu
        messages = group.statistics().messages_sent - messages
        check()
        return elapsed, cpu, messages

    begin = time.monotonic()
    fastest_s = min(block()[0] for _ in range(_WARMUP_BLOCKS))
    whole_s = (time.monotonic() - begin) / _WARMUP_BLOCKS
    # A rank alone sums in no time, but has to prepare and to check.
    wanted = min(seconds / fastest_s, _WHOLE_OVER_TIMED * seconds / whole_s)
    agreed = torch.tensor([wanted / group.world_size], dtype=torch.float64)
    group.allreduce(agreed, name="versions.agreed").wait()
    fewest, most = _BLOCKS
    blocks = max(fewest, min(most, int(agreed)))
    samples = [block() for _ in range(blocks)]
    return {
        "seconds": [elapsed / times for elapsed, _, _ in samples],
        "cpu_s": sum(cpu for _, cpu, _ in samples),
        "messages": sum(messages for _, _, messages in samples),
        "operations": blocks * times,
    }


def _require_equal_replicas(group: tr.Group, model: nn.Module) -> None:
    digest = 0
    for parameter in model.parameters():
        digest = zlib.crc32(parameter.detach().numpy().tobytes(), digest)
    total = torch.tensor([digest], dtype=torch.float64)
    group.allreduce(total, name="versions.digest").wait()
    if float(total) != digest * group.world_size:
        sys.exit("the ranks' replicas differ")


def _nothing() -> None:
    """Prepare nothing, check nothing."""


if __name__ == "__main__":
    main(sys.argv[1])
