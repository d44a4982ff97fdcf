"""Snapshots in ``tests/recorded``, of each kind of state, which an older version of the library has written."""

import shutil

import pytest
import recorded_snapshots as recorded
import torch
from torch.utils._pytree import tree_flatten

from totalreduce.kernels import ahead
from totalreduce.recovery.copies import ShardCopies
from totalreduce.recovery.hook_states import HookStates
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State
from totalreduce.testing import run_ranks


def are_equal(found, expected) -> bool:
    """Whether two nested values are the same, to the bit."""
    (ours, shape), (theirs, other_shape) = tree_flatten(found), tree_flatten(expected)
    return shape == other_shape and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", recorded.STRATEGIES)
def test_jobs_of_blocks_begin_with_what_each_rank_had(tmp_path, kind: str) -> None:
    ahead.load()  # the ranks' deadlines are not for compilation
    folder = tmp_path / kind
    shutil.copytree(recorded.RECORDED / kind, folder)

    def body(group):
        job, optimizer = recorded.begin(kind, group, folder)
        with job:
            state, files = job.state, Snapshots(folder, every=recorded.VERSION)
            written = files.read_own(recorded.VERSION, group.rank, 2), files.read_shared(recorded.VERSION)
            job._blocks.own.agree()
            assert are_equal(job._blocks.own.current(), written[0])
            weight = (written[0] if kind == "diloco" else written[1])["model"]["weight"]
            assert torch.equal(state.model.weight.detach(), weight)
            for step in job.steps(recorded.VERSION + 1):  # it goes on
                with job.step():
                    assert (state.version, state.best, step) == (6, 15.0, 6)
                    assert state.model.seen.tolist() == [6.0 * (1 + group.rank), 15.0]
                    state.model(group.rank, step).backward()
                    optimizer.step()
            assert state.version == 7

    run_ranks(2, body)


def test_what_hooks_keep_back_is_loaded() -> None:
    files = Snapshots(recorded.RECORDED / "hooks", every=5)
    module = torch.nn.Sequential(
        *(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2))
    )
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.05), torch.amp.GradScaler("cpu", enabled=False)
    state = State(model=module, optimizer=optimizer, scaler=scaler)
    state.load_shared(files.read_shared(files.latest()))
    assert state.version == 5
    for rank in range(2):
        hooks, own = HookStates(state, 1), files.read_own(5, rank, 2)
        hooks.begin_with(own, 5)
        assert are_equal(hooks.current(), own)
        assert set(own["residuals"]) == set(own["velocities"]) == {"0.weight", "2.weight", "4.weight"}


def test_parts_of_sharded_states_are_loaded(tmp_path) -> None:
    shutil.copytree(recorded.RECORDED / "shards", tmp_path / "shards")

    def body(group):
        state, copies = recorded.make_sharded(), ShardCopies(every=2)
        copies.synchronize(state, group, 1, Snapshots(tmp_path / "shards", every=6), has_begun=False)
        assert state.version == copies.version == 6
        assert state.best == 15.0
        expected = torch.linspace(0.0, 1.0, 12).reshape(3, 4) + 6.0 * (1.0 + group.rank)
        assert torch.allclose(state.model.weight.detach(), expected)

    run_ranks(2, body)
