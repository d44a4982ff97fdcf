"""States of strategies with servers and of parameter servers that an older version has written (``tests/recorded``)."""

import shutil

import numpy as np
import pytest
import recorded_servers as recorded
import torch
from torch.utils._pytree import tree_flatten

from totalreduce.testing import run_ranks


@pytest.mark.parametrize("name", recorded.STRATEGIES)
def test_states_of_strategies_with_servers_are_loaded(name: str) -> None:
    """Training goes on with the bits of the torch optimizer alone; the state of the old one was like that, too."""
    alone, inner = recorded.make(name)
    recorded.train(alone, inner, range(2))
    saved = torch.load(recorded.RECORDED / f"{name}.pt")
    ours, written = (tree_flatten(each) for each in (inner.state_dict()["state"], saved["strategy"]["optimizer"]))
    assert ours[1] == written[1]
    assert all(map(torch.equal, ours[0], written[0]))
    recorded.train(alone, inner, range(2, 3))

    def body(group):
        model, inner = recorded.make(name)
        optimizer = recorded.wrap(group, name, model, inner)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.strategy_steps.load_state(saved["strategy"])
        recorded.train(model, optimizer, range(2, 3 if group.rank == 0 else 2))
        optimizer.strategy_steps.finish()
        state = optimizer.strategy_steps.state()
        optimizer.close()
        return model.state_dict(), state

    for model, state in run_ranks(2, body):
        assert all(torch.equal(value, alone.state_dict()[key]) for key, value in model.items())
        assert all(map(torch.equal, tree_flatten(state["optimizer"])[0], tree_flatten(inner.state_dict()["state"])[0]))


def test_a_snapshot_of_a_model_on_a_parameter_server_is_restored(tmp_path) -> None:
    """Two ranks have taken two steps each: four updates by halves of ones. One rank takes two more."""
    shutil.copytree(recorded.RECORDED / "parameter_server", tmp_path / "model")
    alone = recorded.ServerModel()
    inner = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.5)

    def take(steps: int, share: float) -> torch.Tensor:
        for _ in range(steps):
            inner.zero_grad()
            (alone() * share).backward()
            inner.step()
        return torch.cat([part.detach() for part in alone.parts])

    def body(group):
        model, optimizer = recorded.make_served_model(group, tmp_path / "model")
        begin = torch.cat([part.detach().clone() for part in model.parts])
        assert optimizer.strategy_steps.steps_taken == 2
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        optimizer.strategy_steps.finish()
        optimizer.close()
        return begin, torch.cat([part.detach() for part in model.parts])

    [(begin, end)] = run_ranks(1, body)
    torch.testing.assert_close(begin, take(4, 0.5), rtol=0, atol=1e-6)
    torch.testing.assert_close(end, take(2, 1.0), rtol=0, atol=1e-6)


def test_a_snapshot_of_keys_is_restored(tmp_path) -> None:
    """The values are those of Adam: with these gradients of one sign, a key moves by about 0.1 when it is pushed."""
    shutil.copytree(recorded.RECORDED / "keys", tmp_path / "keys")

    def body(group):
        with recorded.connect(group, restore=tmp_path / "keys") as client:
            assert client.step == recorded.SAVED_STEP
            values = np.empty(recorded.NUM_KEYS, np.float32)
            client.pull_range(0, recorded.NUM_KEYS, values).wait()
        return values

    expected = np.ones(recorded.NUM_KEYS)
    for step in range(recorded.SAVED_STEP):
        expected[step:] -= np.where(np.arange(step, recorded.NUM_KEYS) + step > 0, 0.1, 0.0)
    for values in run_ranks(3, body):
        np.testing.assert_allclose(values, expected, atol=0.02)
