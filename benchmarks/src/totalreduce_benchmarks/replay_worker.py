"""One rank of ``bench replay``: a trace's training step, again and again, with each way to communicate.

Compute is emulated: events happen at the trace's times, shifted by all the time a wait has blocked so far.
The cores' work for communication therefore slows no rank's emulated compute down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from totalreduce.bench import values
from totalreduce.bench.arithmetic import wire_limit_s
from totalreduce.bench.context import Context, sleep_until
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.planning.fusion import ELEMENT_BYTES, Message, lay_out, optimizer_messages
from totalreduce.planning.traces import Trace
from totalreduce.tensors.work import Work
from totalreduce_benchmarks.replay import Block, ReplayJob, ReplayParameters, ReplaySamples, TraceSamples

_WARMUP_STEPS = 2
_DDP_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_DDP_BUCKET_BYTES = 25 << 20  # bucket_cap_mb of DistributedDataParallel


class Player(Protocol):
    """A way to communicate one step's gradients."""

    messages: list[Message]

    def ready(self, index: int, tensor: torch.Tensor) -> None:
        """All gradients of message ``index`` are there."""

    def forward_begins(self) -> None:
        """The next forward pass is about to begin."""

    def needed(self, index: int) -> None:
        """The forward pass needs message ``index``: return when it is reduced."""


class EnginePlayer:
    """As DistributedOptimizer works with ``overlap="iterations"``: a layer awaits its own message."""

    def __init__(self, group: Group, elements: Sequence[int], bucket_bytes: int) -> None:
        self.messages = optimizer_messages(elements, bucket_bytes)
        self._group = group
        self._works: dict[int, Work] = {}

    def ready(self, index: int, tensor: torch.Tensor) -> None:
        """Submit at once."""
        self._works[index] = self._group.allreduce(
            tensor, name=f"bench.message{index}", op=ReduceOp.SUM, priority=self.messages[index].priority
        )

    def forward_begins(self) -> None:
        """Nothing: the forward pass may begin while later layers' gradients travel."""

    def needed(self, index: int) -> None:
        """Wait for this message only."""
        work = self._works.pop(index, None)
        if work is not None:
            work.wait()


class DdpPlayer:
    """DDP's order over gloo: buckets as they fill, all of them awaited before the next forward pass."""

    def __init__(self, elements: Sequence[int]) -> None:
        self.messages = ddp_messages(elements)
        self._works: list[dist.Work] = []

    def ready(self, index: int, tensor: torch.Tensor) -> None:
        """Hand the bucket to gloo. ``index`` is its place in the order, which readiness follows."""
        del index
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        self._works.append(work)

    def forward_begins(self) -> None:
        """Wait for everything."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def needed(self, index: int) -> None:
        """Nothing: all is there."""


def measure(context: Context, parameters: ReplayJob) -> ReplaySamples:
    """Replay each trace."""
    return ReplaySamples([_replay(context, trace, parameters.parameters) for trace in parameters.traces])


def _replay(context: Context, given: Trace, parameters: ReplayParameters) -> TraceSamples:
    before = context.goodput()
    trace = _balance(context, given, before, parameters)
    elements = [layer.elements for layer in trace.layers]
    flat = torch.empty(sum(elements))
    players: dict[str, Player] = {
        peer: DdpPlayer(elements)
        if peer == "gloo"
        else EnginePlayer(context.group_of(peer), elements, parameters.bucket_bytes)
        for peer in context.peers
    }
    blocks: dict[str, list[Block]] = {peer: [] for peer in players}
    for index in range(context.rounds):
        for peer, player in players.items():
            block = _play_block(context, trace, player, flat, steps=parameters.steps, what=f"{trace.model} by {peer}")
            blocks[peer].append(block)
        context.report(f"replay {trace.model}: round {index + 1} of {context.rounds} checked")
    return TraceSamples(
        model=trace.model,
        source=trace.source,
        goodput_bits_per_s=[before, context.goodput()],
        compute_s=trace.compute_s,
        forward_s=trace.forward_s,
        num_bytes=trace.num_bytes,
        messages={peer: len(player.messages) for peer, player in players.items()},
        blocks=blocks,
    )


def _balance(context: Context, trace: Trace, goodput: float, parameters: ReplayParameters) -> Trace:
    """Scale compute or gradients so that communication takes the wanted share; the same on every rank."""
    if parameters.balance == "none":
        return trace
    everyone = [row[0] for row in context.exchange([goodput])]
    communication_s = wire_limit_s(trace.num_bytes, context.world_size, sum(everyone) / len(everyone))
    scale = compute_scale(trace, communication_s, parameters.ratio)
    return trace.scaled(time=scale) if parameters.balance == "time" else trace.scaled(elements=1 / scale)


def _play_block(context: Context, trace: Trace, player: Player, flat: torch.Tensor, *, steps: int, what: str) -> Block:
    """Play some steps in a row, the first ones untimed, and check the sums that they leave behind."""
    values.fill(flat, rank=context.rank)
    tensors = [flat[message.begin : message.end] for message in player.messages]
    events = _events(trace, player.messages)
    durations: list[float] = []
    waited = [0.0] * len(trace.layers)
    context.barrier()
    begin = time.monotonic()
    for step in range(_WARMUP_STEPS + steps):
        blocked = _play_step(events, player, tensors, begin, trace.compute_s)
        end = time.monotonic()
        if step >= _WARMUP_STEPS:
            durations.append(end - begin)
            for layer, seconds in blocked.items():
                waited[layer] += seconds
        begin = end
    context.barrier()  # nobody checks while another rank still works
    values.check(flat, world_size=context.world_size, times=_WARMUP_STEPS + steps, what=what)
    return Block(durations, waited)


# When, whether it is a need (needs of one instant come after readiness), which layer, which message.
_Event = tuple[float, bool, int, int]


def _events(trace: Trace, messages: list[Message]) -> list[_Event]:
    """A step in order of time: each message when its last gradient is ready, each layer when it is needed."""
    events: list[_Event] = []
    for index, message in enumerate(messages):
        ready_s, last = max((trace.layers[layer].ready_s, layer) for layer in message.layers)
        events.append((ready_s, False, last, index))
        events += [(trace.layers[layer].needed_s, True, layer, index) for layer in message.layers]
    return sorted(events)


def _play_step(
    events: list[_Event], player: Player, tensors: list[torch.Tensor], begin: float, compute_s: float
) -> dict[int, float]:
    """One period; returns the seconds for which each layer's need blocked."""
    blocked: dict[int, float] = {}
    shift, forward_begun = 0.0, False
    for at, is_need, layer, index in events:
        sleep_until(begin + shift + at)
        if not is_need:
            player.ready(index, tensors[index])
            continue
        before = time.monotonic()
        if not forward_begun:
            player.forward_begins()
            forward_begun = True
        player.needed(index)
        blocked[layer] = time.monotonic() - before
        shift += blocked[layer]
    sleep_until(begin + shift + compute_s)
    return blocked


def ddp_messages(elements: Sequence[int]) -> list[Message]:
    """As DDP rebuilds its buckets: in the order of readiness, each closed once it has *reached* its limit."""
    groups: list[list[int]] = [[]]
    used, limit = 0, _DDP_FIRST_BUCKET_BYTES
    for index in reversed(range(len(elements))):
        groups[-1].append(index)
        used += elements[index] * ELEMENT_BYTES
        if used >= limit:
            groups.append([])
            used, limit = 0, _DDP_BUCKET_BYTES
    return lay_out([group for group in groups if group], elements)


def compute_scale(trace: Trace, communication_s: float, ratio: float) -> float:
    """Return the factor of times with which communication takes ``ratio`` times as long as compute."""
    return communication_s / (ratio * trace.compute_s)
