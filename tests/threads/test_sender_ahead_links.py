"""A rank that is far ahead of another one, over real transports: nobody is lost, and the values are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from totalreduce.engine import early
from totalreduce.engine.operation import Operation
from totalreduce.fastlane.lane import FastLane
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.groups.group import Group
from totalreduce.tensors.work import Work
from totalreduce.testing import run_ranks

NUMBER = 120
SHORT = EngineConfig(
    segment_bytes=4096,
    segment_bytes_min=1024,
    bulk_bytes=256,
    eager_bytes=2048,
    floating_bytes_max=40_000,
    timeout_s=30,
)
#: The ranks share one interpreter.
PATIENT = TcpConfig(silence_s=20.0)


@pytest.fixture(autouse=True)
def few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "PEER_BYTES_MAX", 5 * early.ENTRY_COST)
    monkeypatch.setattr(early, "_HINTS_MAX", 5)
    offer = FastLane.take

    def offer_some(lane: FastLane, operation: Operation) -> object:
        # A lane takes up to a thousand operations; messages carry the others out, on all ranks.
        is_refused = lane._rank == 0 and operation.name.startswith("order")
        num_carried = sum(carriage is not None and not carriage.ended for carriage in lane._entries)
        return offer(lane, operation) if num_carried < 20 and not is_refused else None

    monkeypatch.setattr(FastLane, "take", offer_some)


def tags(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    for number in order:
        tensor = torch.full((1 + number % 7,), float(number) if group.rank == 0 else -1.0)
        message = {"dst": 1} if group.rank == 0 else {"src": 0}
        yield tensor, getattr(group, "send" if group.rank == 0 else "recv")(tensor, tag=number, **message)


def metrics(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    for number in order:
        tensor = torch.full((3,), float(number) if group.rank == 0 else -1.0)
        yield tensor, group.broadcast(tensor, name=f"metric {number}", async_op=True)


def large_metrics(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    for number in order:
        tensor = torch.full((5000,), float(number) if group.rank == 0 else -1.0)
        yield tensor, group.broadcast(tensor, name=f"metric {number}", async_op=True)


def sums(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    for number in order:
        tensor = torch.full((3 + number % 5,), number - 1.0 if group.rank == 0 else 1.0)
        yield tensor, group.allreduce(tensor, name=f"sum {number}")


def orders(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    """The late rank sends them. The other one receives only."""
    for number in order:
        tensor = torch.full((3,), float(number) if group.rank == 1 else -1.0)
        yield tensor, group.broadcast(tensor, root=1, name=f"order {number}", async_op=True)


def exchanges(group: Group, order: list[int]) -> Iterator[tuple[torch.Tensor, Work]]:
    for number in order:
        received, sent = torch.zeros(2, 3), torch.full((2, 3), float(number))
        yield received, group.alltoall(list(received), list(sent), name=f"exchange {number}")


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("kind", [tags, metrics, large_metrics, sums, orders, exchanges])
def test_a_late_rank_receives_in_the_opposite_order(kind, transport: str) -> None:
    """Each of its operations ends before it submits the next one, so no credit is needed for that."""

    def body(group: Group) -> None:
        order = list(range(NUMBER))
        engine = group._runner.engine
        if kind is orders:  # of known names, which are not described any more
            for _, work in kind(group, order):
                work.wait()
        if group.rank == 0:
            begun = [*kind(group, order)]
            assert engine._entries.waiting or (kind is orders and transport != "shm")
            group.send(torch.zeros(0), dst=1, tag=NUMBER)
            for _, work in begun:
                work.wait()
        else:
            begun = []
            group.recv(torch.zeros(0), src=0, tag=NUMBER).wait()
            for tensor, work in kind(group, order[::-1]):
                work.wait()
                begun.insert(0, (tensor, work))
        for number, (tensor, _) in enumerate(begun):
            assert tensor.eq(number).all()
        group.barrier()
        assert not engine._entries.waiting
        assert not engine.table.early.records

    hosts = [0, 0] if transport == "shm" else None
    run_ranks(2, body, transport=transport, engine=SHORT, tcp=PATIENT, hosts=hosts)
