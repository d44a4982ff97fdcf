"""Recoverable jobs that go on from a snapshot, with ranks as threads: other numbers of ranks, buffers that differ."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

import totalreduce as tr
from totalreduce.testing import run_ranks

NUM_SAMPLES = 24


class Model(torch.nn.Module):
    """A cache that grows, by another number of elements on each rank, and statistics that differ between ranks."""

    def __init__(self, *, has_buffers: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        if has_buffers:
            self.register_buffer("seen", torch.zeros(1))
        self.has_buffers = has_buffers

    def forward(self, batch: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        if step in (1, 4):
            self.register_buffer("cache", torch.arange(step + 2.0 * rank), persistent=False)
        if self.has_buffers and step == 0:  # and in no block after it
            self.seen += batch.sum()
        return (self.weight * batch.unsqueeze(1)).sum()


def train(group, folder, last_version: int, *, has_buffers: bool, batch: int):
    """Train up to a version, and write each fourth one. Return what a rank has at the end."""
    model = Model(has_buffers=has_buffers)
    optimizer = tr.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, group=group)
    sampler = tr.ElasticSampler(NUM_SAMPLES, batch, seed=1)
    loader = DataLoader(torch.arange(float(NUM_SAMPLES)), batch_sampler=sampler)
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler)
    used: list[int] = []
    with tr.recoverable(state, snapshots=tr.Snapshots(folder, every=4)) as job:
        begin = state.version
        for _ in job.epochs(2):
            for samples in job.batches(loader):
                with job.step():
                    model(samples, state.version, group.rank).backward()
                    optimizer.step()
                used += samples.int().tolist()
                if state.version == last_version:
                    break
            if state.version == last_version:
                break
    buffers = {name: each.tolist() for name, each in model.named_buffers()}
    return begin, used, buffers, state.digests(), state.version


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("num_later", [1, 2, 3])
def test_jobs_of_other_numbers_of_ranks_go_on_from_one_snapshot(tmp_path, caplog, num_later: int, has_buffers) -> None:
    """Two ranks are ended after version 4, in the middle of an epoch."""
    options = {"has_buffers": has_buffers, "batch": 2}
    before = run_ranks(2, lambda group: train(group, tmp_path / "s", 4, **options))
    caplog.set_level(logging.WARNING, logger="totalreduce.recovery.snapshots")
    after = run_ranks(num_later, lambda group: train(group, tmp_path / "s", 0, **options))
    assert {each[0] for each in after} == {4}
    used = sorted(sample for ranks in (before, after) for each in ranks for sample in each[1])
    assert used == sorted(2 * list(range(NUM_SAMPLES)))
    assert len({str(each[3]) for each in after}) == 1
    words = [record.getMessage() for record in caplog.records if "the snapshot is of" in record.getMessage()]
    if num_later == 2:
        undisturbed = run_ranks(2, lambda group: train(group, tmp_path / "plain", 0, **options))
        assert [each[2:] for each in after] == [each[2:] for each in undisturbed]
        assert words == []
    else:  # the step after version 4 makes the cache anew on each rank
        assert [each[2].get("seen") for each in after] == [before[0][2].get("seen")] * num_later
        [word] = words
        assert f"the snapshot is of 2 ranks, and there are {num_later}: residuals begin at zero" in word


@pytest.mark.parametrize("has_buffers", [False, True])
def test_buffers_of_each_rank_come_back_with_their_shapes(tmp_path, has_buffers: bool) -> None:
    """The cache was registered in the block of version 1, and has not changed since."""
    options = {"has_buffers": has_buffers, "batch": 2}
    written = run_ranks(2, lambda group: train(group, tmp_path, 4, **options))
    read = run_ranks(2, lambda group: begun(group, tmp_path, options))
    assert read == [each[2] for each in written]
    assert [len(each["cache"]) for each in read] == [1, 3]


def begun(group, folder, options):
    """Return the buffers with which a job begins."""
    model = Model(has_buffers=options["has_buffers"])
    optimizer = tr.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, group=group)
    sampler = tr.ElasticSampler(NUM_SAMPLES, options["batch"], seed=1)
    with tr.recoverable(
        tr.State(model=model, optimizer=optimizer, sampler=sampler), snapshots=tr.Snapshots(folder, every=4)
    ):
        return {name: each.tolist() for name, each in model.named_buffers()}
