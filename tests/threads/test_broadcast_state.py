"""Starting all ranks from one: parameters, buffers, optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import OPTIMIZERS, Net, batches, flat, loss_of, wrap

from totalreduce.foundation.errors import (
    ConfigurationError,
    PlanMismatchError,
    UnsupportedError,
)
from totalreduce.groups.encoding import pack, unpack
from totalreduce.groups.group import Group
from totalreduce.pytorch import broadcast
from totalreduce.pytorch.broadcast import broadcast_optimizer_state, broadcast_parameters
from totalreduce.testing import run_ranks


class Zoo(torch.nn.Module):
    """Parameters and buffers of many kinds, different on every rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.big = torch.nn.Parameter(draw(300, 7))
        self.transposed = torch.nn.Parameter(draw(5, 3).t())
        self.short = torch.nn.Parameter(draw(3).bfloat16())
        self.scalar = torch.nn.Parameter(draw())
        self.empty = torch.nn.Parameter(draw(0, 4))
        self.tied = self.big
        self.register_buffer("flags", draw(5) > 0)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("phases", torch.complex(draw(3), draw(3)))
        self.register_buffer("table", draw(4), persistent=False)

    def tensors(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in (*self.parameters(), *self.buffers())]


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 24])
def test_parameters_and_buffers_of_any_dtype(root: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "_PIECE_BYTES", piece_bytes)

    def body(group: Group) -> list[torch.Tensor]:
        model = Zoo(seed=group.rank)
        broadcast_parameters(model, group, root=root)
        assert model.tied is model.big
        return model.tensors()

    expected = Zoo(seed=root).tensors()
    for tensors in run_ranks(3, body):
        assert [t.dtype for t in tensors] == [t.dtype for t in expected]
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_a_handful_of_operations_for_many_tensors() -> None:
    def body(group: Group) -> int:
        model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(100))
        before = group.statistics().operations
        broadcast_parameters(model, group)
        return group.statistics().operations - before

    assert max(run_ranks(2, body)) <= 3


def test_a_state_dict_can_be_broadcast() -> None:
    def body(group: Group) -> torch.Tensor:
        state = {"w": torch.full((3,), float(group.rank)), "n": torch.tensor(group.rank)}
        broadcast_parameters(state, group, root=1)
        return torch.cat([state["w"], state["n"].reshape(1)])

    assert all(result.tolist() == [1.0] * 4 for result in run_ranks(2, body))


def test_different_shapes_are_refused_before_anything_is_written() -> None:
    def body(group: Group) -> tuple[str, float]:
        state = {"w": torch.full((3 + (group.rank == 1),), float(group.rank))}
        with pytest.raises(PlanMismatchError) as caught:
            broadcast_parameters(state, group)
        return str(caught.value), float(state["w"][0])

    for rank, (message, value) in enumerate(run_ranks(3, body)):
        assert 'tensors.w: rank 0 has "float32[3]", rank 1 has "float32[4]"' in message
        assert value == rank


def test_what_is_no_tensor_is_refused_and_the_others_are_told() -> None:
    def body(group: Group) -> str:
        state: dict[str, Any] = {"w": torch.ones(2)}
        if group.rank == 1:
            state["epoch"] = 3
        with pytest.raises((ConfigurationError, PlanMismatchError)) as caught:
            broadcast_parameters(state, group)
        with pytest.raises(UnsupportedError, match=r"'w' has layout"):
            broadcast_parameters({"w": torch.eye(2).to_sparse()}, group)
        with pytest.raises(ConfigurationError, match=r"'weight' is not initialised yet"):
            broadcast_parameters(torch.nn.LazyLinear(2), group)
        return str(caught.value)

    assert all("'epoch' is a int, not a tensor" in message for message in run_ranks(2, body))


def quantised(rank: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.5 + 0.4 * rank, 3 - rank, torch.qint8)


def nested(_: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)


WITHOUT_PLAIN_VALUES = {
    "quantised": (quantised, r"is quantised \(torch.qint8\): .* \.int_repr\(\)"),
    "nested": (nested, "is nested; pass its parts"),
    "sparse": (lambda _: torch.eye(2).to_sparse(), "has layout torch.sparse_coo; use"),
    "meta": (lambda _: torch.empty(3, device="meta"), "is on meta and has no values"),
}
IGNORED = "ignore:.*(nested tensors is in prototype|quantiz|TypedStorage)"


@pytest.mark.parametrize("form", [*WITHOUT_PLAIN_VALUES, "expanded"])
@pytest.mark.filterwarnings(IGNORED)
def test_tensors_without_plain_values_are_refused_on_all_ranks_before_anything_is_written(form: str) -> None:
    make, words = WITHOUT_PLAIN_VALUES.get(form, (lambda _: torch.zeros(1).expand(3), "is expanded: several elements"))

    def body(group: Group) -> float:
        state = {"first": torch.full((2,), float(group.rank)), "form": make(group.rank)}
        with pytest.raises(UnsupportedError, match=rf"tensor 'form' {words}"):
            broadcast_parameters(state, group, root=1)
        return state["first"][0].item()

    assert run_ranks(3, body) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("form", WITHOUT_PLAIN_VALUES)
@pytest.mark.filterwarnings(IGNORED)
def test_objects_with_tensors_without_plain_values_are_refused(form: str) -> None:
    make, words = WITHOUT_PLAIN_VALUES[form]
    with pytest.raises(ConfigurationError, match=rf"^value\['t'\]\[0\]: a tensor cannot be sent: it {words}"):
        pack({"t": [make(0)]})


def test_objects_with_conjugate_and_negative_views_have_their_values() -> None:
    values = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    conjugate, negative = unpack(pack([values, torch._neg_view(torch.arange(3.0))]))
    assert conjugate.tolist() == [0 - 1j, 1 - 1j, 2 - 1j]
    assert negative.tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    ],
    ids=["momentum", "adamw", "tensor_lr", "nadam", "asgd", "lbfgs"],
)
def test_optimizer_state_reaches_ranks_that_have_none(kind: Any) -> None:
    """After the broadcast, every rank's next step is the one the root makes."""

    def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            return loss

        optimizer.step(closure)

    def body(group: Group) -> tuple[torch.Tensor, float]:
        model = Net()
        optimizer = kind(list(model.parameters()))
        if group.rank == 1:
            for _ in range(3):
                step(model, optimizer)
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
        broadcast_parameters(model, group, root=1)
        broadcast_optimizer_state(optimizer, group, root=1)
        step(model, optimizer)
        return flat(model), float(optimizer.param_groups[0]["lr"])

    model = Net()
    optimizer = kind(list(model.parameters()))
    for _ in range(3):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
    optimizer.load_state_dict(optimizer.state_dict())  # NAdam: torch converts a float32 scalar when loading
    step(model, optimizer)
    for result, rate in run_ranks(3, body):
        assert torch.equal(result, flat(model))
        assert rate == float(optimizer.param_groups[0]["lr"])


def test_a_wrapped_optimizer_and_a_plain_one_are_the_same_kind() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["momentum"], overlap="iterations")
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        if group.rank == 0:
            broadcast_optimizer_state(optimizer, group)
        else:
            plain = OPTIMIZERS["momentum"](list(Net().parameters()))
            broadcast_optimizer_state(plain, group)
            return torch.cat([state["momentum_buffer"].flatten() for state in plain.state.values()])
        return torch.cat([state["momentum_buffer"].flatten() for state in optimizer.state.values()])

    results = run_ranks(2, body)
    assert torch.equal(results[0], results[1])
    assert results[0].abs().max() > 0


def test_different_optimizers_are_refused_and_unknown_state_is_named() -> None:
    def body(group: Group) -> tuple[str, str]:
        model = Net()
        kind = torch.optim.SGD if group.rank else torch.optim.AdamW
        with pytest.raises(PlanMismatchError) as kinds:
            broadcast_optimizer_state(kind(model.parameters(), lr=0.1), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if group.rank == 0:
            optimizer.state[model.head.weight]["callback"] = print
        with pytest.raises(ConfigurationError) as state:
            broadcast_optimizer_state(optimizer, group)
        return str(kinds.value), str(state.value)

    for kinds, state in run_ranks(2, body):
        assert 'optimizer: rank 0 has "AdamW", rank 1 has "SGD"' in kinds
        assert "state of rank 0" in state
        assert "['callback']: a builtin_function_or_method cannot be sent" in state
