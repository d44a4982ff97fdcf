"""Copies of the ranks' parts: which version counts, who can lose what, and how much memory they take."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from totalreduce.foundation.errors import PeerLost, RecoveryError
from totalreduce.recovery.copies import ShardCopies, _Messages, _Version
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State
from totalreduce.testing import run_ranks

ROWS = 100_000


def make_state(value: float) -> State:
    """A state whose tensors are plain, so that each rank has its own."""
    model = torch.nn.Linear(1, ROWS, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seen=[])


def train(copies, state, steps):
    for _ in range(steps):
        state.model.weight.data += 1
        state.seen = [*state.seen, state.steps]
        state.count(None)
        copies.commit(state, state.version - 1)


def run_job(copies, steps, value=100.0, epoch=1, snapshots=None, has_begun=False):
    """Run steps on ranks that have these copies, or none (a new process); return their values and versions."""

    def body(group):
        mine = copies[group.rank]
        state = make_state(value * group.rank)
        mine.synchronize(state, group, epoch, snapshots and snapshots[group.rank], has_begun=has_begun)
        begun_with = state.version, state.model.weight[0].item()
        train(mine, state, steps)
        if snapshots:
            snapshots[group.rank].wait()
        mine._receive()  # the messages have arrived, and no rank knows yet that the version counts
        group.barrier()
        return *begun_with, state.version, state.model.weight[0].item(), mine.version

    return run_ranks(len(copies), body)


def test_the_last_version_but_one_counts_and_memory_is_two_versions() -> None:
    copies = [ShardCopies(every=2) for _ in range(3)]
    ends = run_job(copies, 7)
    # Versions 0, 2, 4, 6 are copied. That of 6 counts when the next one begins, or after a loss.
    assert [each[:4] for each in ends] == [(0, 0.0, 7, 7.0)] * 3
    assert [each[4] for each in ends] == [4, 4, 4]
    part = 4 * ROWS
    for each in copies:
        assert 4 * part <= each.num_bytes <= 4.2 * part
        assert each.num_copied == 4
        assert 0 < each.seconds < 60


def test_a_new_rank_gets_the_part_of_the_lost_one() -> None:
    copies = [ShardCopies(every=2) for _ in range(3)]
    run_job(copies, 7)
    copies[1] = ShardCopies(every=2)
    begun = run_job(copies, 1, epoch=2)
    assert [each[:2] for each in begun] == [(6, 6.0)] * 3
    assert [each[4] for each in begun] == [6] * 3
    assert all(each.num_bytes < 4.2 * 4 * ROWS for each in copies)  # the versions of the last epoch are given up


def test_a_new_rank_trains_what_the_lost_one_trained() -> None:
    """A group was added to the optimizer, and the layer in the other one was frozen."""
    copies = [ShardCopies(every=1) for _ in range(2)]

    def make():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
        state = State(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.5))
        return model, state

    def body(group, epoch, num_steps):
        model, state = make()
        copies[group.rank].synchronize(state, group, epoch, None, has_begun=epoch > 1)
        if epoch == 1:
            model[1].requires_grad_(False)
            state.optimizer.add_param_group({"params": [model[0].weight], "lr": 0.5})
        for _ in range(num_steps):
            model(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            state.count(None)
            copies[group.rank].commit(state, state.version - 1)
        copies[group.rank]._receive()
        group.barrier()
        return state.digests(), [group["lr"] for group in state.optimizer.param_groups]

    before = run_ranks(2, lambda group: body(group, 1, 2))
    copies[1] = ShardCopies(every=1)
    assert run_ranks(2, lambda group: body(group, 2, 0)) == before
    assert before[1][1] == [0.1, 0.5]


def test_the_version_before_is_kept_until_the_last_one_counts() -> None:
    copies = [ShardCopies(every=2) for _ in range(3)]
    run_job(copies, 7)
    copies[1] = ShardCopies(every=2)
    copies[2]._versions[-1].rows.pop(1)  # as if rank 1 had been lost before its part had arrived
    assert [each[:2] for each in run_job(copies, 0, epoch=2)] == [(4, 4.0)] * 3


@pytest.mark.parametrize("interrupted", ["load_parts", "gather_lengths", "the barrier"])
def test_a_loss_in_the_recovery_leaves_the_last_version_that_counts(interrupted: str, monkeypatch) -> None:
    """Version 4 counts. Rank 2's part of version 6 has not come to rank 3, and rank 2 is lost while ranks recover."""
    copies = [ShardCopies(every=2) for _ in range(4)]
    run_job(copies, 7)
    copies[3]._versions[-1].rows.pop(2)
    copies[0] = ShardCopies(every=2)

    def lose(*_arguments, **_options):
        raise RuntimeError("rank 2 is lost")

    with monkeypatch.context() as patch:
        if interrupted == "the barrier":
            patch.setattr(ShardCopies, "_receive", lose)
            patch.setattr(ShardCopies, "_end_messages", lambda each: setattr(each, "_messages", _Messages()))
        else:
            patch.setattr(f"totalreduce.recovery.copies.{interrupted}", lose)
        with pytest.raises(RuntimeError, match="rank 2 is lost"):
            run_job(copies, 0, epoch=2)
    copies[2] = ShardCopies(every=2)
    assert [each[:2] for each in run_job(copies, 1, epoch=3)] == [(4, 4.0)] * 4
    assert all(each.num_bytes < 4.2 * 4 * ROWS for each in copies)
    assert [each.version for each in copies] == [4] * 4


def test_losses_in_a_row_do_not_add_up_versions(monkeypatch) -> None:
    copies = [ShardCopies(every=2) for _ in range(3)]
    run_job(copies, 7)

    def lose(_group):
        raise RuntimeError("a rank is lost")

    for epoch in range(2, 8):
        with monkeypatch.context() as patch:
            patch.setattr("totalreduce.groups.group.Group.barrier", lose)
            with pytest.raises(RuntimeError, match="a rank is lost"):
                run_job(copies, 0, epoch=epoch)
        assert all(len(each._versions) <= 3 for each in copies)
    copies[epoch % 3] = ShardCopies(every=2)
    assert [each[:2] for each in run_job(copies, 0, epoch=8)] == [(6, 6.0)] * 3


def test_messages_that_the_loss_has_interrupted_are_no_copies() -> None:
    copies = ShardCopies()
    copies._versions = [_Version(1, 10, 3, {0: torch.zeros(1)})]
    ends = {1: (True, None), 2: (True, PeerLost(1, "gone")), 3: (False, None)}
    for source, (done, error) in ends.items():
        work = SimpleNamespace(done=lambda done=done: done, exception=lambda error=error: error)
        copies._messages.arrivals[source] = torch.zeros(1), work
    copies._end_messages()
    assert list(copies._versions[0].rows) == [0, 1]
    assert not copies._messages.arrivals


def test_ranks_have_their_own_plain_tensors_unless_their_number_has_changed() -> None:
    copies = [ShardCopies(every=1) for _ in range(3)]

    def differ(group):
        state = make_state(0.0)
        copies[group.rank].synchronize(state, group, 1, None, has_begun=False)
        state.model.weight.data += 10.0 * group.rank
        train(copies[group.rank], state, 2)
        group.barrier()

    run_ranks(3, differ)
    assert [each[:2] for each in run_job([copies[0], ShardCopies(every=1), copies[2]], 0, epoch=2)] == [
        (2, 2.0),
        (2, 12.0),
        (2, 22.0),
    ]
    assert [each[:2] for each in run_job([copies[2], copies[0]], 0, epoch=3)] == [(2, 2.0)] * 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_neighbours_that_are_lost_together(replicas: int) -> None:
    copies = [ShardCopies(every=2, replicas=replicas) for _ in range(4)]
    run_job(copies, 5)
    copies[1:3] = [ShardCopies(every=2, replicas=replicas) for _ in range(2)]
    if replicas == 2:
        assert [each[:2] for each in run_job(copies, 0, epoch=2)] == [(4, 4.0)] * 4
        return
    with pytest.raises(RecoveryError, match="nobody has the shards of rank 1 of 4 ranks, of version 4, any more"):
        run_job(copies, 0, epoch=2)


def test_a_version_on_disk_replaces_copies_that_are_lost(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="totalreduce")
    snapshots = [Snapshots(tmp_path, every=3) for _ in range(3)]
    copies = [ShardCopies(every=2) for _ in range(3)]
    run_job(copies, 5, snapshots=snapshots)
    copies[0:2] = [ShardCopies(every=2) for _ in range(2)]
    begun = run_job(copies, 0, epoch=2, snapshots=snapshots)
    assert [each[:2] for each in begun] == [(3, 3.0)] * 3
    assert "the job goes on from version 3" in caplog.text
    assert "nobody has the shards of rank 0" in caplog.text
    fewer = run_job([ShardCopies(), ShardCopies()], 0, snapshots=snapshots)
    assert [each[:2] for each in fewer] == [(3, 3.0)] * 2


def test_a_version_that_is_being_written_is_waited_for(tmp_path, monkeypatch) -> None:
    snapshots = [Snapshots(tmp_path, every=3) for _ in range(3)]
    run_job([ShardCopies(every=2) for _ in range(3)], 3, snapshots=snapshots)
    write_part = Snapshots._write_part

    def write_slowly(*arguments):
        time.sleep(0.5)
        write_part(*arguments)

    monkeypatch.setattr(Snapshots, "_write_part", write_slowly)
    _, token = snapshots[0].shards_of(3)
    for rank, each in enumerate(snapshots):
        part = each.read_shard(3, rank, token)
        part["shared"]["version"] = 6
        each.write_shard(6, rank, 3, part)
    begun = run_job([ShardCopies(every=2) for _ in range(3)], 0, epoch=2, snapshots=snapshots, has_begun=True)
    assert [each[:2] for each in begun] == [(6, 3.0)] * 3


def test_a_job_that_lost_a_rank_before_any_version_counted_begins_anew() -> None:
    """The copies that are left lack the lost ranks' parts, but no rank had begun to train."""
    copies = [ShardCopies() for _ in range(3)]

    def lose(group):
        copies[group.rank]._group, copies[group.rank]._epoch = group, 1
        copies[group.rank]._copy(make_state(5.0))
        copies[group.rank]._receive()
        group.barrier()

    run_ranks(3, lose)
    copies[1:] = [ShardCopies(), ShardCopies()]
    assert [each[:2] for each in run_job(copies, 0, value=1.0, epoch=2)] == [(0, 0.0)] * 3


def test_a_loaded_state_has_memory_of_its_own() -> None:
    """The memory of a version is used again for later ones."""
    copies = [ShardCopies(every=1) for _ in range(2)]

    def body(group):
        state = make_state(0.0)
        weight = state.model.weight
        if not copies[group.rank].num_copied:
            state.optimizer.state[weight]["momentum_buffer"] = torch.ones(3)
        copies[group.rank].synchronize(state, group, copies[group.rank].num_copied, None, has_begun=False)
        train(copies[group.rank], state, 2)
        buffer = state.optimizer.state[weight]["momentum_buffer"]
        group.barrier()
        return buffer.tolist(), buffer.untyped_storage().nbytes(), weight.untyped_storage().nbytes()

    for _ in range(2):
        assert run_ranks(2, body) == [([1.0] * 3, 12, 4 * ROWS)] * 2


def test_a_job_that_has_begun_does_not_begin_anew_without_anybody_who_has_a_part() -> None:
    with pytest.raises(RecoveryError, match="nobody has the shards of any rank any more"):
        run_job([ShardCopies(), ShardCopies()], 0, epoch=3, has_begun=True)


def test_copies_of_version_0_that_count_are_no_step() -> None:
    copies = [ShardCopies() for _ in range(3)]
    run_job(copies, 0, value=5.0)
    assert [each.version for each in copies] == [0, 0, 0]
    copies[1:] = [ShardCopies(), ShardCopies()]
    assert [each[:2] for each in run_job(copies, 0, value=1.0, epoch=2)] == [(0, 0.0)] * 3
