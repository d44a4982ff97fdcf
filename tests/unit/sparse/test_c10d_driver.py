"""``C10dDriver`` on sixty-four ranks: what is in flight at once, and that no order of the ranks stops it.

The ranks are threads, and ``torch.distributed`` is a recording one: a message ends when both of its ranks have begun
it, as with gloo, and counts as in flight until the rank has waited for it.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from totalreduce.foundation.errors import PeerLost
from totalreduce.sparse import c10d_driver
from totalreduce.sparse.actions import Allgather, Alltoall, Messages
from totalreduce.sparse.c10d_driver import C10dDriver
from totalreduce.tensors.streams import SideStreams

RANKS = 64
#: Two batches of eight distances, each with a message that is sent and one that is received.
REQUESTS_MAX = 32
LIMIT_S = 5.0


@dataclass(frozen=True)
class Request:
    begin: Any
    tensor: torch.Tensor
    group: "FakeGroup"
    group_peer: int


class Work:
    def __init__(self, group: "FakeGroup") -> None:
        self.group, self.ended = group, threading.Event()

    def wait(self) -> None:
        if not self.ended.wait(LIMIT_S):
            raise RuntimeError(f"rank {self.group.rank} waits for a message that its peer has not begun")
        self.group.in_flight -= 1


class FakeGroup:
    """One rank's process group; ``begun`` is shared by all ranks."""

    def __init__(self, rank: int, size: int, begun: dict[tuple[int, int], Any], lock: threading.Lock) -> None:
        self.rank, self.size, self.begun, self.lock = rank, size, begun, lock
        self.in_flight = self.most = self.total = 0

    def post(self, request: Request) -> Work:
        work = Work(self)
        self.in_flight += 1
        self.total += 1
        self.most = max(self.most, self.in_flight)
        sends = request.begin is FakeDistributed.isend
        pair = (self.rank, request.group_peer) if sends else (request.group_peer, self.rank)
        with self.lock:
            other = self.begun.pop(pair, None)
            if other is None:
                self.begun[pair] = (request, work)
                return work
        source, target = (request, other[0]) if sends else (other[0], request)
        assert source.begin is not target.begin
        target.tensor.copy_(source.tensor)
        work.ended.set()
        other[1].ended.set()
        return work


class FakeDistributed:
    """The part of ``torch.distributed`` that exchanges use."""

    DistError, DistBackendError = torch.distributed.DistError, torch.distributed.DistBackendError
    P2POp = Request
    irecv, isend = object(), object()

    @staticmethod
    def get_rank(group: FakeGroup) -> int:
        return group.rank

    @staticmethod
    def get_world_size(group: FakeGroup) -> int:
        return group.size

    @staticmethod
    def batch_isend_irecv(requests: list[Request]) -> list[Work]:
        return [request.group.post(request) for request in requests]


def on_all_ranks(monkeypatch, body, size=RANKS):
    """Run ``body(driver, rank)`` on every rank, each a little late; results and groups by rank."""
    monkeypatch.setattr(c10d_driver, "dist", FakeDistributed)
    begun: dict[tuple[int, int], Any] = {}
    lock = threading.Lock()
    groups = [FakeGroup(rank, size, begun, lock) for rank in range(size)]
    late = random.Random(5)
    delays = [late.random() * 0.02 for _ in groups]

    def run(rank: int) -> Any:
        time.sleep(delays[rank])
        return body(C10dDriver(groups[rank], torch.device("cpu")), rank)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    assert not begun
    assert all(group.in_flight == 0 for group in groups)
    return results, groups


def block(source, target, size):
    return np.full(size, (7 * source + target) % 251, np.uint8)


def reply(driver, *actions):
    for step, action in enumerate(actions):
        last = driver.start(action, channel=0, step=step, priority=0).reply()
    return last


def test_an_alltoall_has_a_bounded_number_of_requests_in_flight(monkeypatch):
    def body(driver, rank):
        blocks = [block(rank, other, 3 + other) for other in range(RANKS)]
        return reply(driver, Alltoall(blocks, [3 + rank] * RANKS))

    results, groups = on_all_ranks(monkeypatch, body)
    for rank, result in enumerate(results):
        assert [each.tolist() for each in result] == [block(other, rank, 3 + rank).tolist() for other in range(RANKS)]
    assert {group.total for group in groups} == {2 * (RANKS - 1)}
    assert max(group.most for group in groups) == REQUESTS_MAX


def test_an_allgather_of_blocks_some_of_which_are_empty(monkeypatch):
    sizes = [0 if rank % 3 == 0 else rank for rank in range(RANKS)]

    def body(driver, rank):
        # Two, one after the other: the second begins on some ranks while the first goes on elsewhere.
        gathers = [Allgather(block(rank, number, sizes[rank]), sizes) for number in range(2)]
        return reply(driver, *gathers)

    results, groups = on_all_ranks(monkeypatch, body)
    for result in results:
        assert [each.tolist() for each in result] == [block(other, 1, sizes[other]).tolist() for other in range(RANKS)]
    assert max(group.most for group in groups) <= REQUESTS_MAX


@pytest.mark.parametrize("seed", range(3))
def test_messages_between_any_pairs_end_whatever_each_rank_has_to_do(monkeypatch, seed):
    """Ranks have different numbers of peers, so that their batches hold different distances."""
    chance = random.Random(seed)
    pairs = {
        (source, target)
        for source in range(RANKS)
        for target in range(RANKS)
        if source != target and chance.random() < (source + 1) / RANKS
    }

    def body(driver, rank):
        sends = {target: block(rank, target, 5) for source, target in sorted(pairs) if source == rank}
        receives = {source: 5 for source, target in sorted(pairs, reverse=True) if target == rank}
        return reply(driver, Messages(sends, receives))

    results, groups = on_all_ranks(monkeypatch, body)
    for rank, came in enumerate(results):
        wanted = {source: block(source, rank, 5).tolist() for source, target in pairs if target == rank}
        assert {source: each.tolist() for source, each in came.items()} == wanted
    assert max(group.most for group in groups) <= REQUESTS_MAX


def test_few_ranks_begin_everything_at_once(monkeypatch):
    _, groups = on_all_ranks(monkeypatch, lambda driver, rank: reply(driver, Allgather(block(rank, 0, 4), [4] * 9)), 9)
    assert {group.most for group in groups} == {16}


def test_an_error_of_torch_keeps_its_cause():
    """``tr.attempts`` looks there for the rank that is lost."""
    driver = C10dDriver.__new__(C10dDriver)
    driver.rank, driver._device, driver._streams, driver._failed = 0, torch.device("cpu"), SideStreams(), None
    error = torch.distributed.DistBackendError("rank 1 is lost")
    error.__cause__ = cause = PeerLost(1, "gone")
    for _ in range(2):  # the second time as the error of an action that cannot begin any more
        with pytest.raises(torch.distributed.DistBackendError) as caught, driver.guarded():
            raise error
        assert caught.value.__cause__ is cause
