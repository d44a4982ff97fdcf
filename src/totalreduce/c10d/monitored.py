"""The barrier whose error names the missing ranks.

Every rank sends a message to rank 0, which answers all of them, so that the others learn at once, from rank 0, which
ranks did not come. The texts of the errors are gloo's, for which monitoring tools and tests look.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from totalreduce.foundation.errors import DeadlineExceededError, TotalReduceError
from totalreduce.groups.group import Group

__all__ = ["monitored_barrier"]

#: The other ranks wait this much longer than rank 0, for its answer.
_GRACE_S = 1.0


def monitored_barrier(group: Group, tag: int, timeout_s: float, *, wait_all_ranks: bool) -> None:
    """Return when every rank is here.

    The group is for these barriers only: messages of an earlier barrier that failed may still be pending in it. All
    ranks give the same ``tag``. With ``wait_all_ranks`` rank 0 waits until the deadline, to name all missing ranks.

    Raises:
        torch.distributed.DistBackendError: On rank 0 with the missing ranks, on the others with the answer of rank 0.
    """
    if group.rank == 0:
        _collect(group, tag, timeout_s, wait_all_ranks)
    else:
        _report(group, tag, timeout_s)


def _collect(group: Group, tag: int, timeout_s: float, wait_all_ranks: bool) -> None:
    deadline = time.monotonic() + timeout_s
    arrivals = {
        rank: group.recv(torch.zeros(1, dtype=torch.uint8, device="cpu"), src=rank, tag=tag)
        for rank in range(1, group.world_size)
    }
    missing: list[int] = []
    for rank, arrival in arrivals.items():
        left_s = deadline - time.monotonic()
        if left_s <= 0 and not wait_all_ranks and not arrival.done():
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {1000 * timeout_s:.0f} ms")
        try:
            arrival.wait(max(0.0, left_s))
        except TotalReduceError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    verdict = torch.zeros(group.world_size, dtype=torch.uint8, device="cpu")
    verdict[missing] = 1
    answers = [
        group.send(verdict, dst=rank, tag=tag)
        for rank, arrival in arrivals.items()
        if arrival.done() and arrival.exception() is None
    ]
    for answer in answers:
        answer.wait(max(1.0, timeout_s))
    if missing:
        raise dist.DistBackendError(f"[Rank 0]: {_failed(missing)} in {1000 * timeout_s:.0f} ms")


def _report(group: Group, tag: int, timeout_s: float) -> None:
    verdict = torch.zeros(group.world_size, dtype=torch.uint8, device="cpu")
    try:
        group.send(torch.ones(1, dtype=torch.uint8, device="cpu"), dst=0, tag=tag)
        group.recv(verdict, src=0, tag=tag).wait(timeout_s + _GRACE_S)
        missing = verdict.nonzero().flatten().tolist()
        reason = _failed(missing) if missing else ""
        cause = None
    except TotalReduceError as error:
        reason, cause = str(error), error
        if isinstance(error, DeadlineExceededError):
            reason = f"Timed out after {1000 * timeout_s:.0f} ms: {error}"
    if reason:
        raise dist.DistBackendError(
            f"[Rank {group.rank}]: Rank {group.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank. What is known here: {reason}"
        ) from cause


def _failed(ranks: list[int]) -> str:
    who = ", ".join(map(str, ranks))
    return f"Rank{'s' if len(ranks) > 1 else ''} {who} failed to pass monitoredBarrier"
