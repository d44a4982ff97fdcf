"""One worker of the demo: ``python -m totalreduce.cli.demo_worker SETTINGS.json``.

With ``distributed`` it trains its rows of every batch with the others, else all rows alone, in plain torch.
The four lines that make the difference are numbered.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import totalreduce as tr
from totalreduce.cli.demo_setup import DemoSettings, ProgressSender
from totalreduce.cli.models import SmallGPT, count_parameters
from totalreduce.observe.progress import TrainingReport

_HELD_OUT_SHARE = 0.05
_HELD_OUT_WINDOWS = 64
_WARM_UP_STEPS = 5  # not timed: first calls allocate, and the forward order is learnt in step 1
_PROMPT = "The "
_SAMPLE_CHARACTERS = 240
_REPORT_INTERVAL_S = 0.2


class Corpus:
    """A text as character numbers: a twentieth from its middle is held out, batches come from the rest."""

    def __init__(self, text: str, settings: DemoSettings) -> None:
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        data = torch.tensor([numbers[character] for character in text])
        held_out = max(settings.context + 1, int(len(data) * _HELD_OUT_SHARE))
        middle = (len(data) - held_out) // 2
        self.held_out = data[middle : middle + held_out]
        self._training = torch.cat((data[:middle], data[middle + held_out :]))
        self._context, self._batch = settings.context, settings.num_ranks * settings.batch_per_rank
        self._random = torch.Generator().manual_seed(settings.seed)

    def next_batch(self) -> Tensor:
        """The whole batch of the next step, the same on every rank: ``int64[ranks * batch, context + 1]``."""
        last = len(self._training) - self._context
        starts = torch.randint(last, (self._batch,), generator=self._random)
        return _windows(self._training, starts, self._context)

    def prompt(self) -> Tensor:
        """What a sample begins with: a few words, or a piece of the text if it has not these letters."""
        if set(_PROMPT) <= set(self.alphabet):
            return torch.tensor([self.alphabet.index(character) for character in _PROMPT])
        return self.held_out[: len(_PROMPT)]

    def held_out_windows(self) -> Tensor:
        """Evenly spread over the held-out text: ``int64[windows, context + 1]``."""
        last = len(self.held_out) - self._context - 1
        starts = torch.linspace(0, last, min(_HELD_OUT_WINDOWS, last + 1)).long()
        return _windows(self.held_out, starts, self._context)


def _windows(data: Tensor, starts: Tensor, context: int) -> Tensor:
    return data[starts[:, None] + torch.arange(context + 1)]


def _loss(model: SmallGPT, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class LossMean:
    """The ranks' mean loss of every step, one step late: the least urgent operation."""

    def __init__(self, group: tr.Group | None) -> None:
        self.values: list[float] = []
        self._group = group
        self._pending: deque[tr.Work] = deque()

    def add(self, loss: Tensor) -> None:
        """Take this rank's loss of the step just done."""
        if self._group is None:
            self.values.append(loss.item())
            return
        self.finish()
        mean = self._group.allreduce(loss.clone(), name="loss", op=tr.ReduceOp.AVG, priority=1_000_000)
        self._pending.append(mean)

    def finish(self) -> None:
        """Wait for what is in flight."""
        while self._pending:
            self.values.append(self._pending.popleft().wait().item())


class Speedometer:
    """Times steps, and tells the launcher now and then how it goes (rank 0 only)."""

    def __init__(self, settings: DemoSettings, group: tr.Group | None) -> None:
        self._settings, self._group = settings, group
        self._sender = ProgressSender(settings.folder) if group is None or group.rank == 0 else None
        self._began = self._reported = time.perf_counter()
        self.seconds: list[float] = []
        self._steps_reported = 0

    def step_done(self, losses: list[float]) -> None:
        """Call after every step with the losses known by then."""
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now
        last = len(self.seconds) == self._settings.num_steps
        if self._sender is None or not losses or (now - self._reported < _REPORT_INTERVAL_S and not last):
            return
        tokens = self._settings.num_ranks * self._settings.batch_per_rank * self._settings.context
        steps = len(self.seconds) - self._steps_reported
        counters = self._group.statistics() if self._group is not None else None
        self._sender.send(
            TrainingReport(
                step=len(self.seconds),
                loss=losses[-1],
                tokens_per_s=steps * tokens / (now - self._reported),
                sent_bytes=counters.bytes_sent if counters is not None else None,
                hidden_share=counters.hidden_share if counters is not None else None,
            )
        )
        self._reported, self._steps_reported = now, len(self.seconds)

    def median_s(self) -> float:
        """Median time of a step once warm."""
        return statistics.median(self.seconds[_WARM_UP_STEPS:] or self.seconds)

    def close(self) -> None:
        """Free the socket."""
        if self._sender is not None:
            self._sender.close()


def train(settings: DemoSettings, group: tr.Group | None) -> dict[str, object]:
    """Train and return the result of this rank, JSON-ready."""
    torch.manual_seed(settings.seed)
    corpus = Corpus((Path(settings.folder) / "text.txt").read_text("utf-8"), settings)
    model = SmallGPT(len(corpus.alphabet), settings.context, settings.width, settings.num_layers, settings.num_heads)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    rows = slice(None)
    if group is not None:
        optimizer = tr.DistributedOptimizer(  # 1: all start from rank 0's weights; gradients become the mean
            optimizer, model, group=group, bucket_bytes=settings.bucket_bytes
        )
        first = group.rank * settings.batch_per_rank
        rows = slice(first, first + settings.batch_per_rank)  # 2: every rank takes its rows of the batch
    schedule = LambdaLR(optimizer, lambda step: _learning_rate_factor(step, settings.num_steps))
    losses, speed = LossMean(group), Speedometer(settings, group)
    for _ in range(settings.num_steps):
        loss = _loss(model, corpus.next_batch()[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.add(loss.detach())
        speed.step_done(losses.values)
    losses.finish()
    result: dict[str, object] = {
        "losses": losses.values,
        "step_s": speed.median_s(),
        "digest": _digest(model),
    }
    result["parameters"] = count_parameters(model)
    if group is not None:
        result["statistics"] = group.statistics().as_dict()
    if group is None or group.rank == 0:
        result |= _evaluate(model, corpus, settings)
    speed.close()
    return result


def _learning_rate_factor(step: int, num_steps: int) -> float:
    """Ten steps of warm-up, then half a cosine down to a tenth."""
    return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))


def _digest(model: torch.nn.Module) -> str:
    """Equal for bit-identical parameters only."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _evaluate(model: SmallGPT, corpus: Corpus, settings: DemoSettings) -> dict[str, object]:
    model.eval()
    prompt = corpus.prompt()
    generator = torch.Generator().manual_seed(settings.seed)
    sample = model.generate(prompt, _SAMPLE_CHARACTERS, generator)
    characters = [corpus.alphabet[number] for number in sample.tolist()]
    return {
        "held_out_loss": _loss(model, corpus.held_out_windows()).item(),
        "prompt": "".join(characters[: len(prompt)]),
        "sample": "".join(characters[len(prompt) :]),
    }


def main(settings_path: str) -> None:
    """Train and write the result."""
    settings = DemoSettings.load(Path(settings_path))
    if settings.distributed:
        torch.set_num_threads(1)
        with tr.init(timeout_s=60.0, timeline=settings.timeline) as group:  # 4: meet the other ranks
            result = train(settings, group)
            rank = group.rank
            group.barrier()
    else:
        result, rank = train(settings, None), 0
    settings.result_path(rank).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
