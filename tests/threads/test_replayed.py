"""``tr.replayed`` with ranks as threads: values, errors, and what new processes get, without launcher and losses."""

import dataclasses

import pytest
import torch

from totalreduce.foundation.errors import (
    ConfigurationError,
    GroupClosed,
    PeerLost,
    ReplayMismatchError,
    UnsupportedError,
)
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.recovery.checkpoint import Checkpoint
from totalreduce.recovery.replay import Entry, Parcel
from totalreduce.recovery.replayed import _deliver, _describe, _pack_entries, _unpack_entries, replayed
from totalreduce.recovery.routing import find_route
from totalreduce.testing import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_and_checkpoints(size: int) -> None:
    def body(group):
        state = Checkpoint(total=torch.full((2,), float(group.rank)), local={"mine": group.rank})
        prepared = []
        with replayed(state, group) as job:
            begin = state.total.tolist()
            for _ in range(job.version, 3):
                part = torch.arange(6.0).reshape(2, 3).t() + group.rank  # not contiguous
                returned = job.allreduce(part, prepare=lambda: prepared.append(job.version))
                most = job.allreduce(torch.tensor([group.rank + 1]), op=ReduceOp.MAX, name="most")
                root = size - 1
                copy = job.broadcast(torch.tensor(float(group.rank)), root=root)
                rows = job.allgather(torch.tensor([group.rank, job.version]))
                assert returned is part
                state.total = part.sum(dim=0) + copy + most
                state.mine += 1
                job.checkpoint()
        return begin, state.total.tolist(), rows.tolist(), prepared, state.mine - group.rank, job.version

    sums = [sum(9.0 * row + sum(range(3)) + 3 * rank for rank in range(size)) + (size - 1) + size for row in (0, 1)]
    for result in run_ranks(size, body):
        assert result == ([0.0, 0.0], sums, [[rank, 2] for rank in range(size)], [0, 1, 2], 3, 3)


def failing(size, call):
    """Return by rank the text of the error of ``call(job, state, rank)``."""

    def body(group):
        state = Checkpoint(value=torch.zeros(2))

        def program():
            with replayed(state, group) as job:
                job.allreduce(torch.zeros(1))
                call(job, state, group.rank)

        with pytest.raises(ReplayMismatchError) as caught:
            program()
        return str(caught.value), caught.value.version, caught.value.position

    return run_ranks(size, body)


def changed(job, state, rank):
    state.value = state.value + (rank == 1)
    job.checkpoint()


MISMATCHES = {
    "shape": (
        lambda job, _, rank: job.allreduce(torch.zeros(2 + rank // 2)),
        'call: rank 0 has "allreduce(sum) of float32[2]", rank 2 has "allreduce(sum) of float32[3]"',
    ),
    "name": (
        lambda job, _, rank: job.allreduce(torch.zeros(2), name="b" if rank == 1 else "a"),
        "rank 0 has \"allreduce(sum) of float32[2] named 'a'\", rank 1 has",
    ),
    "kind": (
        lambda job, _, rank: job.checkpoint() if rank == 2 else job.broadcast(torch.zeros(2), root=1),
        'rank 0 has "broadcast(root=1) of float32[2]", rank 2 has "a checkpoint"',
    ),
    "end": (
        lambda job, _, rank: None if rank == 2 else job.allgather(torch.zeros(2)),
        'rank 2 has "the end of the program"',
    ),
    "value": (changed, "value value: rank 0 has"),
}


@pytest.mark.faults("F23")
@pytest.mark.parametrize("case", MISMATCHES)
def test_calls_that_differ_are_an_error_on_every_rank(case: str) -> None:
    call, words = MISMATCHES[case]
    for text, version, position in failing(3, call):
        assert text.startswith("call 1 after version 0: the processes of the job do not make the same calls:\n")
        assert words in text
        assert (version, position) == (0, 1)


def test_calls_outside_of_the_context_and_wrong_arguments_are_refused() -> None:
    def body(group):
        state = Checkpoint(value=1)
        job = replayed(state, group)
        errors = []
        for call in (lambda: job.allreduce(torch.zeros(1)), job.checkpoint):
            with pytest.raises(ConfigurationError, match=r"belongs into the body of `with tr\.replayed"):
                call()
        with job:
            for kind, call in (
                (UnsupportedError, lambda: job.allreduce(torch.zeros(1, dtype=torch.complex64))),
                (ConfigurationError, lambda: job.broadcast(torch.zeros(1), root=2)),
                (ConfigurationError, lambda: job.allreduce(torch.zeros(1), name=3)),
            ):
                with pytest.raises(kind) as caught:
                    call()
                errors.append(str(caught.value))
            version = job.checkpoint()
        with pytest.raises(ConfigurationError, match="belongs into the body"):
            job.allgather(torch.zeros(1))
        return version, errors

    for version, (dtype, root, name) in run_ranks(2, body):
        assert version == 1
        assert "complex64" in dtype
        assert "root 2 is no rank of a group of 2" in root
        assert "the name of an operation is a string, not int" in name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"result_copies": 0}, "result_copies"),
        ({"local_replicas": -1}, "local_replicas"),
        ({"log_bytes": 1 << 30}, "log_bytes"),
    ],
)
def test_options_out_of_range_are_refused(options, message) -> None:
    def body(group):
        with pytest.raises(ConfigurationError, match=message):
            replayed(Checkpoint(value=1), group, **options)
        with pytest.raises(ConfigurationError, match=r"needs a tr\.Checkpoint, not a dict"):
            replayed({}, group)

    run_ranks(1, body)


def test_a_full_log_is_an_error_on_all_ranks_and_a_checkpoint_empties_it() -> None:
    def body(group):
        with replayed(Checkpoint(value=1), group, log_bytes=3000) as job:
            job.allreduce(torch.ones(500))
            with pytest.raises(
                ConfigurationError, match=r"call 1 after version 0: .* Call job\.checkpoint\(\) more often"
            ):
                job.allreduce(torch.ones(500), prepare=lambda: pytest.fail("prepare was called"))
            job.checkpoint()
            return job.allreduce(torch.ones(500)).sum().item()

    assert run_ranks(2, body) == [1000.0, 1000.0]


def test_without_the_launcher_a_loss_is_an_error() -> None:
    def body(group):
        job = replayed(Checkpoint(value=1), group)
        if group.rank == 1:
            with pytest.raises(GroupClosed), job:
                group.close(reason="it was told so")
            return None
        with pytest.raises(PeerLost) as caught, job:
            job.allreduce(torch.ones(1))
        return str(caught.value)

    error, _ = run_ranks(2, body)
    assert error is not None
    assert error.startswith("rank 1 is lost")


def test_parcels_travel_along_their_routes() -> None:
    """Two parcels with different holders, of 7 ranks: every requester has the bytes, others that pass them on, too."""
    parcels = [
        Parcel("results", (0,), find_route(7, [3], [4, 6]), frozenset([4, 6])),
        Parcel("results", (1,), find_route(7, [6, 5], [0, 2, 3]), frozenset([0, 2, 3])),
        Parcel("own", (2,), find_route(7, [1], [1]), frozenset([1])),
    ]

    def body(group):
        def packed(parcel):
            assert parcel.route.sources[group.rank] is None
            return torch.full((100 + parcel.numbers[0],), 7 + parcel.numbers[0], dtype=torch.uint8)

        got = _deliver(group, parcels, packed)
        return [None if data is None else (data.numel(), set(data.tolist())) for data in got]

    got = run_ranks(7, body)
    first, second = (100, {7}), (101, {8})
    assert [each[0] for each in got] == [first, first, first, first, first, None, first]
    assert [each[1] for each in got] == [second, second, second, second, None, second, None]
    assert [each[2] for each in got] == [None] * 7


def test_entries_of_the_log_are_packed_with_all_that_describes_them() -> None:
    results = {
        0: (_describe(OpKind.ALLREDUCE, torch.zeros(2, 3), "a", op=ReduceOp.AVG), torch.rand(2, 3)),
        5: (_describe(OpKind.BROADCAST, torch.zeros((), dtype=torch.int64), "", root=1), torch.tensor(3)),
        7: (_describe(OpKind.ALLGATHER, torch.zeros(4, dtype=torch.bool), ""), torch.ones(2, 4, dtype=torch.bool)),
    }
    unpacked = _unpack_entries(_pack_entries({number: Entry(*each) for number, each in results.items()}))
    assert unpacked.keys() == results.keys()
    for number, (call, result) in results.items():
        assert unpacked[number].call == call
        assert torch.equal(unpacked[number].result, result)
        assert dataclasses.astuple(unpacked[number].call) == dataclasses.astuple(call)


def test_fewer_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTALREDUCE_ON_LOSS", "shrink")

    def body(group):
        group.formation = lambda **_: group
        with pytest.raises(ConfigurationError, match=r"cannot go on with fewer ranks.*--on-loss replace"):
            replayed(Checkpoint(value=1), group).__enter__()

    run_ranks(1, body)
