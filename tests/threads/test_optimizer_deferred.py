"""``overlap="iterations"``: step() returns at once, and each module waits for its own parameters only."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from optimizer_cases import OPTIMIZERS, Branches, Net, all_equal, batches, flat, loss_of, shard, train_alone, wrap

from totalreduce.foundation.errors import ConfigurationError, PeerLost, UnsupportedError
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.pytorch.order import ForwardOrder
from totalreduce.testing import run_ranks


def wrap_deferred(model: torch.nn.Module, group: Group, kind: str = "sgd", **settings: Any) -> DistributedOptimizer:
    return wrap(model, group, OPTIMIZERS[kind], overlap="iterations", **settings)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Group, step: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, shard(batches(step + 1)[step], group)).backward()
    optimizer.step()


def after_one_step() -> torch.Tensor:
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    return flat(model)


EVERY_OPTIMIZER = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
]


@pytest.mark.parametrize("kind", EVERY_OPTIMIZER, ids=lambda kind: kind.__name__)
def test_any_torch_optimizer_gives_the_same_bits_as_without_deferring(
    kind: type[torch.optim.Optimizer],
) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        results = []
        for overlap in ("backward", "iterations"):
            model = Net()
            inner = kind(
                [
                    {"params": [model.first.weight, model.third.bias], "lr": 0.02},
                    {"params": [p for n, p in model.named_parameters() if n not in ("first.weight", "third.bias")]},
                ],
                lr=0.01,
            )
            optimizer = DistributedOptimizer(
                inner, model, group=group, bucket_bytes=1024, overlap=overlap, name=overlap
            )
            for step in range(5):
                one_step(model, optimizer, group, step)
            optimizer.close()
            results.append(flat(model))
        return results

    for without, deferred in run_ranks(2, body):
        assert torch.equal(without, deferred)
        assert not torch.equal(without, flat(Net()))


def test_a_learning_rate_that_is_a_tensor_is_taken_as_it_was_at_step() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        rate = torch.tensor(0.01, dtype=torch.float64)
        inner = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
        optimizer = DistributedOptimizer(inner, model, group=group, overlap="iterations")
        one_step(model, optimizer, group)
        rate.fill_(100.0)
        optimizer.flush()
        return flat(model)

    (result,) = run_ranks(1, body)
    assert (result - flat(Net())).abs().max() < 0.02


def test_step_returns_although_another_rank_has_not_even_begun() -> None:
    stepped = threading.Event()

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap_deferred(model, group)
        if group.rank == 1:
            assert stepped.wait(20)
        one_step(model, optimizer, group)
        assert optimizer._deferred.pending
        assert torch.equal(flat(model), flat(Net())), "nothing is updated yet"
        if group.rank == 0:
            stepped.set()
        optimizer.flush()
        return flat(model)

    results = run_ranks(2, body)
    assert (results[0] - after_one_step()).abs().max() <= 1e-12
    assert all_equal(results)


def test_each_module_updates_its_own_parameters_just_before_it_runs() -> None:
    def body(group: Group) -> list[tuple[str, list[str]]]:
        model = Net()
        optimizer = wrap_deferred(model, group, bucket_bytes=1)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        one_step(model, optimizer, group)
        log: list[tuple[str, list[str]]] = []
        for name, module in model.named_children():
            module.register_forward_pre_hook(
                lambda _module, _inputs, name=name: log.append(
                    (name, [n for n, p in model.named_parameters() if not torch.equal(p, start[n])])
                )
            )
        loss_of(model, shard(batches(1)[0], group))
        return log

    for log in run_ranks(2, body):
        updated = {name: set(parameters) for name, parameters in log}
        assert [name for name, _ in log] == ["first", "second", "third", "head"]
        assert updated["first"] == {"first.weight", "first.bias"}
        assert updated["second"] == updated["first"] | {"second.weight", "second.bias"}
        assert updated["third"] == updated["second"] | {"third.weight", "third.bias"}
        assert updated["head"] == updated["third"] | {"head.weight", "head.bias"}


def test_every_parameter_is_updated_exactly_once_per_step() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.counts: dict[int, int] = {}

        def step(self, closure: Any = None) -> None:
            for param_group in self.param_groups:
                for parameter in param_group["params"]:
                    if parameter.grad is not None:
                        self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
            super().step(closure)

    def body(group: Group) -> list[int]:
        model = Net()
        inner = Counting(model.parameters())
        optimizer = DistributedOptimizer(inner, model, group=group, bucket_bytes=1024, overlap="iterations")
        for step in range(4):
            one_step(model, optimizer, group, step)
            model.eval()
            if step == 2:
                model(batches(1)[0][0])
            model.train()
        optimizer.close()
        return [inner.counts[id(parameter)] for parameter in model.parameters()]

    assert run_ranks(2, body) == [[4] * 8, [4] * 8]


def test_zeroed_gradients_do_not_come_back_and_kept_ones_become_the_reduced() -> None:
    def body(group: Group) -> tuple[bool, torch.Tensor, torch.Tensor]:
        model = Net()
        optimizer = wrap_deferred(model, group)
        one_step(model, optimizer, group)
        optimizer.zero_grad()
        optimizer.flush()
        all_none = all(parameter.grad is None for parameter in model.parameters())
        one_step(model, optimizer, group)
        optimizer.zero_grad(set_to_none=False)
        optimizer.flush()
        zeros = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        one_step(model, optimizer, group)
        optimizer.flush()
        return all_none, zeros, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    (none_0, zeros_0, kept_0), (none_1, zeros_1, kept_1) = run_ranks(2, body)
    assert none_0
    assert none_1
    assert zeros_0.abs().max() == zeros_1.abs().max() == 0
    assert torch.equal(kept_0, kept_1)
    assert kept_0.abs().max() > 0


def test_a_second_backward_survives_zeroing_after_step() -> None:
    """The contribution is needed again after the user has zeroed the gradients."""

    def body(group: Group, set_to_none: bool) -> tuple[torch.Tensor, int]:
        model = Net()
        optimizer = wrap_deferred(model, group)
        first, second, third = batches(3)
        for pair in ((first, second), (second, third)):
            for batch in pair:
                loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.flush()
        return flat(model), optimizer.resubmissions

    model = Net()
    plain = OPTIMIZERS["sgd"](list(model.parameters()))
    first, second, third = batches(3)
    for a, b in ((first, second), (second, third)):
        plain.zero_grad()
        (loss_of(model, a) + loss_of(model, b)).backward()
        plain.step()
    for set_to_none in (True, False):
        for result, resubmissions in run_ranks(2, lambda group, flag=set_to_none: body(group, flag)):
            assert (result - flat(model)).abs().max() <= 1e-12
            assert resubmissions > 0


def test_gradients_overwritten_in_place_when_needed_again_are_an_error_not_a_wrong_result() -> None:
    def body(group: Group) -> None:
        model = Net()
        optimizer = wrap_deferred(model, group)
        for batch in batches(2):
            loss_of(model, shard(batch, group)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)  # behind the optimizer's back
        with pytest.raises(ConfigurationError, match=r"overwritten after step.*optimizer\.zero_grad"):
            optimizer.flush()

    run_ranks(2, body)


@pytest.mark.parametrize(
    "barrier",
    [
        lambda model, optimizer, group: optimizer.flush(),
        lambda model, optimizer, group: optimizer.state_dict(),
        lambda model, optimizer, group: optimizer.state,
        lambda model, optimizer, group: model.state_dict(),
        lambda model, optimizer, group: group.barrier(),
        lambda model, optimizer, group: group.close(),
        lambda model, optimizer, group: optimizer.close(),
        lambda model, optimizer, group: model.eval()(batches(1)[0][0]),
        lambda model, optimizer, group: torch.no_grad()(model)(batches(1)[0][0]),
        lambda model, optimizer, group: torch.no_grad()(model.first)(batches(1)[0][0]),
        lambda model, optimizer, group: optimizer.replan(),
        lambda model, optimizer, group: optimizer.load_state_dict(
            OPTIMIZERS["sgd"](list(Net().parameters())).state_dict()
        ),
    ],
    ids=[
        "flush",
        "optimizer.state_dict",
        "optimizer.state",
        "model.state_dict",
        "group.barrier",
        "group.close",
        "optimizer.close",
        "eval",
        "no_grad",
        "no_grad_submodule",
        "replan",
        "load_state_dict",
    ],
)
def test_full_barriers_apply_everything(barrier: Any) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap_deferred(model, group)
        one_step(model, optimizer, group)
        if group.rank == 0:
            barrier_result = barrier(model, optimizer, group)
            del barrier_result
        else:
            barrier(model, optimizer, group)
        return flat(model)

    results = run_ranks(2, body)
    assert (results[0] - after_one_step()).abs().max() <= 1e-12
    assert all_equal(results)


def test_model_state_loaded_after_step_is_not_overwritten_by_the_old_update() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap_deferred(model, group)
        saved = copy.deepcopy(model.state_dict())
        one_step(model, optimizer, group)
        model.load_state_dict(saved)
        optimizer.flush()
        return flat(model)

    assert all(torch.equal(result, flat(Net())) for result in run_ranks(2, body))


def test_an_optimizer_out_of_scope_still_owes_its_last_update() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        one_step(model, wrap_deferred(model, group), group)
        group.barrier()
        return flat(model)

    results = run_ranks(2, body)
    assert (results[0] - after_one_step()).abs().max() <= 1e-12


def test_a_survivor_of_a_lost_rank_can_close_and_save() -> None:
    stepped, gone = threading.Event(), threading.Event()

    def body(group: Group) -> list[int]:
        model = Net()
        optimizer = wrap_deferred(model, group)
        one_step(model, optimizer, group)
        optimizer.flush()
        before = flat(model)
        optimizer.zero_grad()
        loss_of(model, shard(batches(1)[0], group)).backward()
        if group.rank == 1:
            assert stepped.wait(20)
            group.close()  # without step(), so the last bucket never comes
            gone.set()
            return []
        optimizer.step()
        assert optimizer._deferred.pending
        stepped.set()
        assert gone.wait(20)
        with pytest.raises(PeerLost):
            model.state_dict()
        with pytest.raises(PeerLost):
            optimizer.close()
        optimizer.close()
        assert torch.equal(flat(model), before)
        assert torch.equal(torch.cat([each.flatten() for each in model.state_dict().values()]), before)
        assert len(optimizer.state_dict()["param_groups"]) == 1
        return [len(each._post_accumulate_grad_hooks or {}) for each in model.parameters()]

    assert run_ranks(2, body) == [[0] * 8, []]


def test_parameters_read_by_a_parent_module_are_updated_in_time() -> None:
    """``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``."""

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = Net()
            self.first = net.first
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
            self.out = torch.nn.Linear(16, 2, dtype=torch.float64)
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in [*self.attention.parameters(), *self.out.parameters()]:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)[None]
            return self.out(self.attention(hidden, hidden, hidden, need_weights=False)[0][0])

    def body(group: Group) -> list[torch.Tensor]:
        results = []
        for overlap in ("backward", "iterations"):
            model = Attending()
            optimizer = wrap(model, group, OPTIMIZERS["adamw"], overlap=overlap, bucket_bytes=1, name=overlap)
            for step in range(5):
                one_step(model, optimizer, group, step)
            optimizer.close()
            results.append(flat(model))
        return results

    for without, deferred in run_ranks(2, body):
        assert torch.equal(without, deferred)


def test_a_forward_that_bypasses_its_module_is_an_error_not_a_stale_gradient() -> None:
    class Bypassing(Net):
        bypass = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.bypass:
                return super().forward(inputs)
            hidden = torch.tanh(self.first(inputs))
            return torch.nn.functional.linear(hidden, self.second.weight, self.second.bias)[:, :2]

    def body(group: Group) -> None:
        model = Bypassing()
        optimizer = wrap_deferred(model, group, bucket_bytes=1)
        one_step(model, optimizer, group)
        model.bypass = True
        with pytest.raises(ConfigurationError, match=r"'second\..*' was used before its deferred update.*flush"):
            one_step(model, optimizer, group)
        optimizer.flush()

    run_ranks(2, body)


class BypassingFirst(Net):
    """Reads the parameters of its first layer without calling it, and calls the layers after it."""

    bypass = False
    before_bypass: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.bypass:
            return super().forward(inputs)
        if self.before_bypass is not None:
            self.before_bypass()
        hidden = torch.tanh(torch.nn.functional.linear(inputs, self.first.weight, self.first.bias))
        return self.head(torch.tanh(self.third(torch.tanh(self.second(hidden)))))


@pytest.mark.parametrize("between", ["nothing", "no_grad"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["bucket_each", "one_bucket"])
def test_an_update_between_a_bypassing_forward_and_its_backward_is_noticed(bucket_bytes: int, between: str) -> None:
    """A later layer, a pass without gradients or its gradient's hook applies the update of the bypassed layer."""

    def body(group: Group) -> torch.Tensor:
        model = BypassingFirst()
        optimizer = wrap_deferred(model, group, bucket_bytes=bucket_bytes)
        one_step(model, optimizer, group)
        model.bypass = True
        loss = loss_of(model, shard(batches(2)[1], group))
        if between == "no_grad":
            with torch.no_grad():
                model.third(torch.zeros(1, 12, dtype=torch.float64))
        with pytest.raises(ConfigurationError, match=r"'first\..*' was used before its deferred update.*flush"):
            loss.backward()
        optimizer.flush()
        return flat(model)

    results = run_ranks(2, body)
    assert (results[0] - after_one_step()).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["bucket_each", "one_bucket"])
def test_a_flush_before_a_bypassed_module_makes_its_gradients_good(bucket_bytes: int) -> None:
    def body(group: Group) -> torch.Tensor:
        model = BypassingFirst()
        optimizer = wrap_deferred(model, group, bucket_bytes=bucket_bytes)
        one_step(model, optimizer, group)
        model.bypass, model.before_bypass = True, optimizer.flush
        one_step(model, optimizer, group, 1)
        optimizer.close()
        return flat(model)

    results = run_ranks(2, body)
    assert (results[0] - train_alone(OPTIMIZERS["sgd"], 2)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["bucket_each", "one_bucket"])
def test_a_module_that_runs_in_the_second_pass_of_a_step_has_good_gradients(bucket_bytes: int) -> None:
    """The backward pass before it has applied its update."""

    def train(
        model: Branches, optimizer: torch.optim.Optimizer, parts: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for inputs, targets in parts:
            optimizer.zero_grad()
            for branch in ("left", "right"):
                torch.nn.functional.mse_loss(model(inputs, branch), targets).backward()
            optimizer.step()

    def body(group: Group) -> torch.Tensor:
        model = Branches()
        optimizer = wrap_deferred(model, group, bucket_bytes=bucket_bytes)
        train(model, optimizer, [shard(batch, group) for batch in batches(4)])
        optimizer.close()
        return flat(model)

    results = run_ranks(2, body)
    model = Branches()
    train(model, OPTIMIZERS["sgd"](list(model.parameters())), batches(4))
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


def test_a_hook_in_a_second_thread_waits_for_the_updates_that_another_hook_applies() -> None:
    """As where parameters are on the CPU and on a GPU. A new round would overwrite the gradients of the updates."""

    def body(group: Group) -> list[str]:
        model = Net()
        optimizer = wrap_deferred(model, group, bucket_bytes=1 << 20)
        one_step(model, optimizer, group)
        calls: list[str] = []
        stepping = threading.Event()
        inner, begin = optimizer.wrapped, optimizer._dense.begin
        step = inner.step

        def slow_step() -> None:
            stepping.set()
            second.join(0.2)
            step()
            calls.append("updated")

        def noted_begin(**arguments: bool) -> None:
            calls.append("begun")
            begin(**arguments)

        def hook() -> None:
            if stepping.wait(20):
                optimizer._on_gradient(1, True, optimizer._dense.parameters[1])

        inner.step, optimizer._dense.begin = slow_step, noted_begin
        second = threading.Thread(target=hook)
        second.start()
        optimizer._on_gradient(0, True, optimizer._dense.parameters[0])
        second.join(20)
        optimizer.close()
        return calls

    assert run_ranks(1, body) == [["updated", "begun"]]


def test_backward_through_an_old_graph_applies_the_update_first() -> None:
    """The graph was built before ``step()``, so its gradients are not stale: as in one process."""

    def run(optimizer: torch.optim.Optimizer, model: torch.nn.Linear, scale: float) -> torch.Tensor:
        inputs = torch.full((1, 2), scale, dtype=torch.float64)
        first, second = model(inputs).sum(), model(inputs * 3).sum()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        return flat(model)

    def fresh() -> torch.nn.Linear:
        model = torch.nn.Linear(2, 1, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        return model

    def body(group: Group) -> torch.Tensor:
        model = fresh()
        optimizer = wrap_deferred(model, group)
        run(optimizer, model, float(group.rank))
        optimizer.flush()
        return flat(model)

    results = run_ranks(2, body)
    model = fresh()
    expected = run(OPTIMIZERS["sgd"](list(model.parameters())), model, 0.5)
    assert (results[0] - expected).abs().max() <= 1e-12


def test_an_optimizer_that_keeps_state_in_its_groups_is_refused() -> None:
    class Stateful(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for param_group in self.param_groups:
                param_group["k"] = param_group.get("k", 0) + 1

    def body(group: Group) -> None:
        model = Net()
        optimizer = DistributedOptimizer(Stateful(model.parameters(), lr=0.1), model, group=group, overlap="iterations")
        one_step(model, optimizer, group)
        with pytest.raises(UnsupportedError, match=r"Stateful.step\(\) changes \['k'\].*overlap=\"backward\""):
            optimizer.flush()

    run_ranks(1, body)


def test_modules_never_called_do_not_hold_up_training() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Branches()
        optimizer = wrap_deferred(model, group, "adamw")
        for step in range(6):
            optimizer.zero_grad()
            inputs, targets = shard(batches(6)[step], group)
            torch.nn.functional.mse_loss(model(inputs, "left" if step < 3 else "right"), targets).backward()
            optimizer.step()
        optimizer.close()
        return flat(model)

    results = run_ranks(2, body)
    model = Branches()
    plain = OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(6):
        plain.zero_grad()
        inputs, targets = batches(6)[step]
        torch.nn.functional.mse_loss(model(inputs, "left" if step < 3 else "right"), targets).backward()
        plain.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


def test_who_waits_for_what() -> None:
    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(4, 2)
            self.other = torch.nn.Linear(4, 4)
            self.unseen = torch.nn.Linear(4, 4)

    model = Parts()
    parameters = dict(model.named_parameters())
    names = list(parameters)
    order = ForwardOrder(model, {parameter: index for index, parameter in enumerate(parameters.values())})
    order.record(model.other)  # called directly: the root never ran
    order.record(model.attention)
    assert order.readers(names.index("attention.out_proj.weight")) == [model.attention]
    assert order.readers(names.index("unseen.weight")) == []
    waits = order.waits([[index] for index in range(len(names))])
    # Nothing tells who reads what was never seen, so everybody waits for it.
    unseen = {"unseen.weight", "unseen.bias"}
    assert {names[index] for index in waits[id(model.other)]} == {"other.weight", "other.bias"} | unseen
    attention = {name for name in names if name.startswith("attention")}
    assert {names[index] for index in waits[id(model.attention)]} == attention | unseen
    assert order.bucket_priorities(
        [[names.index(n)] for n in ("unseen.bias", "attention.in_proj_bias", "other.bias")]
    ) == {
        0: 2,
        1: 1,
        2: 0,
    }
