"""Whole jobs in virtual time: no hang, no wrong value, the culprit named, and the same seed gives the same events."""

import functools
import time

import pytest
from jobs import ROOTED, Job, make_job, run_job

from totalreduce.engine import early
from totalreduce.engine.entries import Entries
from totalreduce.foundation.errors import PeerLost
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import algorithms_of
from totalreduce.testing.conformance_oracle import Collective
from totalreduce.testing.simulation import TimedSubmission

FAULTS = (None, None, "crash", "cut")


def fault_of(seed: int) -> str | None:
    return FAULTS[seed % len(FAULTS)]


# A thousand seeds, each twice, are in `make soak` as well.
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3))])
def test_random_jobs(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        run_job(make_job(seed, fault=fault_of(seed)))


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 40))])
def test_random_jobs_in_which_a_rank_is_late(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are ahead of it by more operations than it keeps entries of, in other orders than its own."""
    waited = []
    end = Entries._end_if_empty

    def count(entries: Entries, peer: int, waiting: object) -> None:
        waited.append(peer)
        end(entries, peer, waiting)

    monkeypatch.setattr(Entries, "_end_if_empty", count)
    for seed in range(5 * block, 5 * (block + 1)):
        monkeypatch.setattr(early, "PEER_BYTES_MAX", (1 + seed % 5) * early.ENTRY_COST)
        monkeypatch.setattr(early, "_HINTS_MAX", seed % 4)
        run_job(make_job(seed, fault=fault_of(seed), has_late_rank=True))
    assert len(waited) > 30


@pytest.mark.parametrize("seed", range(8))
def test_the_same_seed_gives_the_same_events(seed: int) -> None:
    first, second = (run_job(make_job(seed, fault=fault_of(seed))) for _ in range(2))
    assert first.trace == second.trace
    if first.cluster.network.world_size > 1:
        assert len(first.trace) > 50


def test_other_seeds_give_other_events() -> None:
    assert len({repr(run_job(make_job(seed, world_size=3)).trace) for seed in range(5)}) == 5


KINDS = [(kind, algorithm) for kind in OpKind if kind is not OpKind.SEND_RECV for algorithm in algorithms_of(kind)]


@pytest.mark.parametrize(("kind", "algorithm"), KINDS, ids=lambda value: value.name.lower())
def test_a_loss_in_the_middle_of_a_collective_is_named_on_every_survivor(kind: OpKind, algorithm: Algorithm) -> None:
    """Many of one kind in flight, so that the crash hits them at every stage; nobody hangs, nobody names another."""
    lost = 0
    for seed in range(6):
        several = len(algorithms_of(kind)) > 1
        collectives = [
            Collective(
                name=f"{index}",
                kind=kind,
                num_elements=0 if kind is OpKind.BARRIER else 200 * (index + 1),
                uneven=bool(index % 2),
                root=(seed + index) % 4 if kind in ROOTED else 0,
                schedule=algorithm if several else Algorithm.AUTO,
            )
            for index in range(5)
        ]
        job = run_job(make_job(seed, fault="crash", world_size=4, collectives=collectives))
        after = [
            s for (rank, _), s in job.submissions.items() if rank not in job.dead and s.at_s > job.fault_at_s + 0.1
        ]
        assert all(isinstance(submission.error, PeerLost) for submission in after)
        lost += sum(s.error is not None for (rank, _), s in job.submissions.items() if rank not in job.dead)
    assert lost > 6


@pytest.mark.parametrize(
    ("world_size", "fault"),
    [
        pytest.param(size, fault, marks=[] if (size, fault) in ((3, "stop"), (5, "crash")) else pytest.mark.slow)
        for size in (3, 4, 5, 8)
        for fault in ("crash", "stop")
    ],
)
def test_ranks_that_end_at_their_error_are_not_taken_for_its_cause(world_size: int, fault: str) -> None:
    """Every survivor names the first victim, although each ends as soon as its program has an error."""
    ended = 0
    for seed in range(20 if world_size < 8 else 6):
        job = make_job(seed, fault=fault, world_size=world_size)
        gone = end_at_errors(job)
        run_job(job)
        assert gone <= set(range(world_size)) - set(job.dead)
        ended += len(gone)
    assert ended > 6


def end_at_errors(job: Job) -> set[int]:
    """Have each rank crash at its first error; return the set of the ranks that have."""
    gone: set[int] = set()

    def on_done(rank: int, submission: TimedSubmission) -> None:
        if submission.error is not None and rank not in (*job.dead, *gone):
            gone.add(rank)
            job.cluster.network.crash(rank)

    for (rank, _), submission in job.submissions.items():
        submission.on_done = functools.partial(on_done, rank, submission)
    return gone


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_crash_is_noticed_by_every_survivor_at_once(world_size: int) -> None:
    seen = 0
    for seed in range(20):
        job = run_job(make_job(seed, fault="crash", world_size=world_size))
        for (rank, _), submission in job.submissions.items():
            if rank not in job.dead and submission.error is not None:
                assert isinstance(submission.error, PeerLost)
                assert submission.error.rank == job.dead[0]
                assert submission.done_at_s <= max(submission.at_s, job.fault_at_s + 0.1)
                seen += 1
    assert seen > 20


def test_a_cut_link_is_noticed_within_the_silence() -> None:
    seen = 0
    for seed in range(20):
        job = run_job(make_job(seed, fault="cut", world_size=4))
        errors = [submission.error for submission in job.submissions.values() if submission.error is not None]
        seen += len(errors)
    assert seen > 20


@pytest.mark.parametrize("world_size", [32, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 256))])
def test_a_large_ring_completes(world_size: int) -> None:
    begin = time.process_time()
    collectives = [
        Collective(name="ring", num_elements=513, schedule=Algorithm.RING),
        Collective(name="chain", kind=OpKind.BROADCAST, num_elements=40, root=7, schedule=Algorithm.CHAIN),
        Collective(name="barrier", kind=OpKind.BARRIER),
    ]
    job = run_job(make_job(1, world_size=world_size, collectives=collectives))
    assert len(job.submissions) == 3 * world_size
    assert all(submission.error is None for submission in job.submissions.values())
    print(f"{world_size} ranks, {len(job.trace)} events: {time.process_time() - begin:.1f} s of processor time")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_seeds_twice() -> None:
    begin = time.perf_counter()
    for seed in range(1000):
        first = run_job(make_job(seed, fault=fault_of(seed)))
        assert run_job(make_job(seed, fault=fault_of(seed))).trace == first.trace, seed
    print(f"1,000 seeds, each twice: {time.perf_counter() - begin:.1f} s")
