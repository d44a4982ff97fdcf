"""``tr.ddp_hook`` in real processes, case by case; ``tests/processes/test_ddp_hook.py`` starts this and asks for them.

Reads names of cases from standard input, all ranks the same ones, and prints for each a JSON line with the event
``case`` and the traceback, if it failed. The variable BACKEND says over which back end of torch.distributed.
"""

import contextlib
import copy
import datetime
import io
import json
import math
import os
import pickle
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
from totalreduce.foundation.types import OpKind
from totalreduce.groups.probe import selector_of
from totalreduce.pytorch import ddp_bucket
from totalreduce.sparse import device

TIMEOUT_S = 60.0
#: Every matrix is compressed.
SMALL = tr.ErrorFeedback(elements_min=0)
#: In MB; after the first pass there is a bucket for about each layer.
CAP = 0.003
CASES = {}


def case(function):
    """Make a function known."""
    CASES[function.__name__] = function
    return function


class Net(torch.nn.Module):
    """Four layers of matrices and vectors, and one that nobody uses unless told to."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, dtype=dtype) for a, b in ((9, 40), (40, 33), (33, 20)))
        self.head = torch.nn.Linear(20, 3, dtype=dtype)
        self.extra = torch.nn.Linear(20, 20, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, inputs, *, extra=False):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        if extra:
            inputs = inputs + self.extra(inputs)
        return self.head(inputs)


def batch(step, rank=None, dtype=torch.float32):
    """A rank's batch of a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 9, generator=generator).to(dtype)


def loss_of(model, step, **options):
    dtype = next(model.parameters()).dtype
    return model(batch(step, dtype=dtype), **options).float().square().sum()


def without_extra(model=None):
    """A model all of whose parameters are used."""
    model = model or Net()
    model.extra = None
    return model


def wrap(module, method, feedback=SMALL, grad_scaler=None, **options):
    """A model, and the state of its hook."""
    model = DistributedDataParallel(module, bucket_cap_mb=CAP, **options)
    state, hook = tr.ddp_hook(method, feedback=feedback, grad_scaler=grad_scaler)
    model.register_comm_hook(state, hook)
    return model, state


def named_gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def own_gradients(module, *steps, **options):
    """Of this rank alone, as a model without DDP has them."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    for step in steps:
        loss_of(twin, step, **options).backward()
    return named_gradients(twin)


def summed(tensors):
    """Over the ranks, in float64."""
    totals = {name: tensor.double() for name, tensor in tensors.items()}
    for total in totals.values():
        dist.all_reduce(total)
    return totals


def residuals(state, model):
    return state.state_dict(model)["residuals"]


def same_everywhere(tensors):
    """Whether all ranks have the same bits."""
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors]).view(torch.int32)
    first = flat.clone()
    dist.broadcast(first, 0)
    odd = torch.tensor([int(not torch.equal(first, flat))])
    dist.all_reduce(odd)
    return not odd.item()


class Ledger:
    """Checks that what is applied and what is kept back add up, pass after pass."""

    def __init__(self, model, state, tolerance=1e-5):
        self.model, self.state, self.tolerance = model, state, tolerance
        self.before = summed(residuals(state, model))

    def check(self, own):
        """After a backward pass for which this rank had these gradients."""
        after, size = summed(residuals(self.state, self.model)), dist.get_world_size()
        wanted = summed(own)
        applied = named_gradients(self.model.module)
        assert set(self.before) == set(after) >= {name for name, gradient in own.items() if gradient.dim() > 1}
        for name, gradient in wanted.items():
            total, got = gradient, applied[name].double() * size
            if name in after:
                total, got = total + self.before[name], got + after[name]
            scale = max(1.0, total.abs().max().item())
            torch.testing.assert_close(got, total, rtol=0, atol=self.tolerance * scale, msg=name)
        self.before = after
        assert same_everywhere(applied.values())


def train(model, optimizer, steps, first=0, **options):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, **options).backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.005)


# ------------------------------------------------------------------------------------------------------------- results


@case
def everything_sent_is_plain_ddp():
    plain = DistributedDataParallel(without_extra(), bucket_cap_mb=CAP)
    train(plain, sgd(plain), 4)
    exact = {"density": 1.0, "values": "float32"}
    # One of each kind of action.
    for method in (tr.OkTopk(**exact), tr.GTopk(**exact), tr.SharedTopk(density=1.0), tr.Dense()):
        model, _ = wrap(without_extra(), method, gradient_as_bucket_view=method.name == "oktopk")
        train(model, sgd(model), 4)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert same_everywhere(model.parameters())


@case
def what_is_applied_and_kept_back_adds_up():
    few = {"density": 0.05}
    for method in (tr.OkTopk(**few), tr.TopkA(**few), tr.GTopk(**few), tr.SharedTopk(**few), tr.PowerSGD(rank=1)):
        model, state = wrap(without_extra(), method, gradient_as_bucket_view=method.name == "topka")
        ledger, optimizer, buckets = Ledger(model, state), sgd(model), []
        for step in range(4):
            own = own_gradients(model.module, step)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            ledger.check(own)
            optimizer.step()
            buckets.append(len(state.reports))
        assert same_everywhere(model.parameters())
        assert buckets[0] == 1 < buckets[-1], buckets  # DDP has packed them anew
        assert state.steps == 4
        if method.name == "oktopk":
            assert state.residual_norm() > 0
            assert all(session._steps == 4 for session in state._sessions.by_bucket.values())
            assert 0 < sum(report.selected for report in state.reports) < 300


@case
def steps_that_are_left_out_change_nothing():
    """The program skips a step, or a GradScaler does, because of a gradient that is none of DDP's."""
    few = {"density": 0.05}
    for method in (tr.OkTopk(**few), tr.TopkA(**few), tr.PowerSGD(rank=1)):
        for momentum in (0.0, 0.5) if method.name == "topka" else (0.0,):
            ends = []
            for left_out in ((), (2, 3), (0,)):
                model, state = wrap(without_extra(), method, tr.ErrorFeedback(elements_min=0, momentum=momentum))
                other = torch.nn.Parameter(torch.ones(2))
                optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.005)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
                state.grad_scaler = scaler
                before = summed(residuals(state, model))
                for step in range(4):
                    if step in left_out:
                        for by_scaler in (True, False):
                            optimizer.zero_grad(set_to_none=by_scaler)
                            scaler.scale(loss_of(model, 10 + step) + (other * math.inf).sum()).backward()
                            if by_scaler:
                                scaler.step(optimizer)
                                scaler.update()
                        optimizer.zero_grad()
                        assert equal(summed(residuals(state, model)), before), (method.name, step)
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, step)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    before = summed(residuals(state, model))
                ends.append(before)
                state.close()
            assert any(kept.any() for kept in before.values()), method.name
            if method.name == "topka":  # others estimate thresholds; and DDP has other buckets after the first pass
                assert equal(*ends[:2])


@contextlib.contextmanager
def everything_on_a_device():
    """Buckets are worked on as on an accelerator; there is none here, so by torch's operations in the CPU's memory."""

    def accumulator_of(tensors, streams, *, settled=False):
        return device.DeviceAccumulator(tensors, streams, device.kernels_for(torch.device("cpu")), settled=settled)

    original, ddp_bucket.accumulator_of = ddp_bucket.accumulator_of, accumulator_of
    try:
        yield
    finally:
        ddp_bucket.accumulator_of = original


@contextlib.contextmanager
def rings():
    """Sums of three begin with the same rank in all groups, which they do not with a star."""
    if dist.get_backend() != "totalreduce":
        yield
        return
    selector = selector_of(dist.distributed_c10d._world.default_pg.group)
    kept, selector.overrides = selector.overrides, {OpKind.ALLREDUCE: "ring"}
    try:
        yield
    finally:
        selector.overrides = kept


@case
def a_device_gives_the_same_bits():
    if dist.get_world_size() > 3:
        return  # whom sums of four begin with depends on the group, and each model has a group of its own
    for dtype, method, feedback in (
        (torch.float32, tr.OkTopk(density=0.05), tr.ErrorFeedback(elements_min=0, momentum=0.9, clip_norm=0.5)),
        (torch.bfloat16, tr.OkTopk(density=0.05), SMALL),
        (torch.float32, tr.PowerSGD(rank=1), SMALL),
    ):
        trained = []
        for where in (contextlib.nullcontext(), everything_on_a_device()):
            with where, rings():
                model, state = wrap(without_extra(Net(dtype)), method, feedback)
                train(model, sgd(model), 3)
                state.flush_residuals()
                train(model, sgd(model), 1, first=3)
                trained.append([*model.parameters(), *residuals(state, model).values()])
        for here, there in zip(*trained, strict=True):
            assert torch.equal(here, there)


@case
def types_of_gradients():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        module = without_extra(Net(dtype))
        model, state = wrap(module, tr.OkTopk(density=0.05))
        optimizer = sgd(model)
        ledger = Ledger(model, state)
        for step in range(4):
            own = own_gradients(module, step)
            whole = {name: gradient for name, gradient in own.items() if gradient.dim() == 1}
            optimizer.zero_grad()
            loss_of(model, step).backward()
            # What rounding to the gradients' type cuts off is kept back, too.
            ledger.check({name: gradient for name, gradient in own.items() if gradient.dim() > 1})
            for name, total in summed(whole).items():
                mean = (total / dist.get_world_size()).to(dtype)
                gradient = dict(module.named_parameters())[name].grad
                torch.testing.assert_close(gradient, mean, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            optimizer.step()
        assert all(kept.dtype is torch.float32 for kept in residuals(state, model).values())


@case
def some_dense_layouts_of_memory():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model, state = wrap(module, tr.TopkA(density=0.1))
    generator = torch.Generator().manual_seed(dist.get_rank())
    ledger = Ledger(model, state)
    for _ in range(3):
        inputs = torch.randn(2, 3, 9, 9, generator=generator)
        twin = copy.deepcopy(module)
        twin.zero_grad()
        twin(inputs).square().sum().backward()
        model.zero_grad()
        model(inputs).square().sum().backward()
        ledger.check(named_gradients(twin))


# ---------------------------------------------------------------------------------------------- not finite, accumulated


@case
def a_nan_anywhere_spoils_the_pass_everywhere():
    for poison, name in ((math.nan, "layers.0.weight"), (math.inf, "head.bias"), (-math.inf, "layers.1.weight")):
        model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
        optimizer = sgd(model)
        train(model, optimizer, 3)
        ledger, before = Ledger(model, state), residuals(state, model)
        parameter = dict(model.module.named_parameters())[name]
        if dist.get_rank() == dist.get_world_size() - 1:
            handle = parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2]), poison))  # noqa: B023
        model.zero_grad()
        loss_of(model, 3).backward()
        assert all(gradient.isnan().all() for gradient in named_gradients(model).values())
        after = residuals(state, model)
        assert all(torch.equal(kept.view(torch.int32), after[key].view(torch.int32)) for key, kept in before.items())
        assert (state.steps, state.skipped_steps) == (3, 1)
        assert all(report.skipped for report in state.reports)
        if dist.get_rank() == dist.get_world_size() - 1:
            handle.remove()
        own = own_gradients(model.module, 4)
        model.zero_grad()
        loss_of(model, 4).backward()
        ledger.check(own)


@case
def passes_without_synchronisation_are_added():
    for view in (False, True):
        model, state = wrap(without_extra(), tr.TopkA(density=0.05), gradient_as_bucket_view=view)
        ledger = Ledger(model, state)
        for step in range(0, 6, 2):
            own = own_gradients(model.module, step, step + 1)
            model.zero_grad()
            with model.no_sync():
                loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
            ledger.check(own)
        assert state.steps == 3


@case
def parameters_that_are_not_used():
    rank = dist.get_rank()
    for set_to_none in (True, False):
        model, state = wrap(Net(), tr.OkTopk(density=0.05), find_unused_parameters=True)
        ledger = Ledger(model, state)
        # Used by all, by nobody, by one rank only, by nobody.
        for step, used in enumerate((True, False, rank == 0, False)):
            own = own_gradients(model.module, step, extra=used)
            used_somewhere = step in (0, 2)
            if not used and used_somewhere:
                own |= {f"extra.{name}": torch.zeros_like(p) for name, p in model.module.extra.named_parameters()}
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, step, extra=used).backward()
            kept = ledger.before["extra.weight"]
            ledger.check(own)
            if not used_somewhere:  # nothing of it was sent
                torch.testing.assert_close(ledger.before["extra.weight"], kept, rtol=0, atol=1e-6)
                gradient = model.module.extra.weight.grad
                assert gradient is None if set_to_none else not gradient.any()
        assert ledger.before["extra.weight"].any()


@case
def static_graph():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05), static_graph=True)
    ledger = Ledger(model, state)
    for step in range(4):
        own = own_gradients(model.module, step)
        model.zero_grad()
        loss_of(model, step).backward()
        ledger.check(own)
    assert state.steps == 4


@case
def uneven_inputs():
    model, state = wrap(without_extra(), tr.TopkA(density=0.05))
    with model.join():
        for step in range(3 + dist.get_rank()):
            model.zero_grad()
            loss_of(model, step).backward()
    assert state.steps == 2 + dist.get_world_size()
    assert same_everywhere([torch.tensor([float(state.steps)])])


@case
def a_pass_that_breaks_off_changes_nothing():
    module = without_extra()
    model, state = wrap(module, tr.OkTopk(density=0.05))
    train(model, sgd(model), 3)
    ledger, before = Ledger(model, state), residuals(state, model)

    def refuse(gradient):
        raise ValueError("no gradient")

    handle = module.layers[0].weight.register_hook(refuse)
    with raises(ValueError, "no gradient"):
        loss_of(model, 3).backward()
    handle.remove()
    assert state._pass.buckets  # some had left
    assert equal(residuals(state, model), before)
    # torch wants another DDP after this.
    ledger.model = model = DistributedDataParallel(module, bucket_cap_mb=CAP)
    model.register_comm_hook(state, tr.ddp_hook(tr.OkTopk(density=0.05))[1])
    own = own_gradients(module, 4)
    model.zero_grad()
    loss_of(model, 4).backward()
    ledger.check(own)
    assert (state.steps, state.skipped_steps) == (4, 0)


# ----------------------------------------------------------------------------------------------------------- feedback


@case
def gradients_are_clipped_before_they_are_accumulated():
    size, norm = dist.get_world_size(), 0.5
    feedback = tr.ErrorFeedback(elements_min=0, clip_norm=norm)
    model, state = wrap(without_extra(), tr.TopkA(density=0.05), feedback)
    ledger = Ledger(model, state)
    for step in range(3):
        own = own_gradients(model.module, step)
        total = math.sqrt(sum(g.double().square().sum().item() for g in own.values() if g.dim() > 1))
        factor = min(1.0, norm / math.sqrt(size) / total)
        assert factor < 1
        model.zero_grad()
        loss_of(model, step).backward()
        ledger.check({name: g * factor if g.dim() > 1 else g for name, g in own.items()})


@case
def momentum_is_corrected():
    feedback = tr.ErrorFeedback(elements_min=0, momentum=0.5)
    model, state = wrap(without_extra(), tr.TopkA(density=0.0), feedback)
    velocities, totals = {}, {}
    for step in range(3):
        for name, gradient in own_gradients(model.module, step).items():
            velocities[name] = 0.5 * velocities.get(name, 0) + gradient
            totals[name] = totals.get(name, 0) + velocities[name]
        loss_of(model, step).backward()
        model.zero_grad()
    saved = state.state_dict(model)
    for name, kept in saved["residuals"].items():
        torch.testing.assert_close(kept, totals[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(saved["velocities"][name], velocities[name], rtol=1e-5, atol=1e-5)
    model, state = wrap(without_extra(), tr.TopkA(density=0.1, values="float32"), feedback)
    loss_of(model, 0).backward()
    saved = state.state_dict(model)
    for name, parameter in model.module.named_parameters():
        if name in saved["velocities"]:  # what was applied has lost its velocity
            assert not saved["velocities"][name][parameter.grad != 0].any()
            assert saved["velocities"][name].any()


@case
def loss_scales_are_taken_out():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
    optimizer, ends = sgd(model), []
    train(model, optimizer, 1)
    weights, saved = copy.deepcopy(model.state_dict()), copied(state.state_dict(model))
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
        model.load_state_dict(weights)
        state.load_state_dict(saved, model)
        state.grad_scaler = scaler
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(copied({**state.state_dict(model), **model.state_dict()}))
    assert scaler.get_scale() == 4096.0
    assert equal(*ends)


@case
def residuals_are_flushed():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
    train(model, sgd(model), 3)
    ledger = Ledger(model, state)
    own = own_gradients(model.module, 3)
    state.flush_residuals()
    model.zero_grad()
    loss_of(model, 3).backward()
    ledger.check(own)
    assert state.residual_norm() == 0
    loss_of(model, 4).backward()
    assert state.residual_norm() > 0


# -------------------------------------------------------------------------------------------------------- checkpoints


def copied(state):
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@case
def states_are_saved_and_loaded():
    feedback = tr.ErrorFeedback(elements_min=0, momentum=0.5)
    for method in (tr.OkTopk(density=0.05), tr.PowerSGD(rank=1)):
        model, state = wrap(without_extra(), method, feedback)
        train(model, sgd(model), 4)
        saved = copied(state.state_dict(model))
        assert saved["steps"] == 4
        assert len(saved["sessions"]) > 1
        other, new = wrap(copy.deepcopy(model.module), method, feedback)
        new.load_state_dict(saved, other)
        assert equal(saved, copied(new.state_dict(other.module)))
        train(model, sgd(model), 3, first=4)
        # The first buckets of the new DDP are other ones than those it makes of them.
        before = [len(key) for key in state._sessions.buckets()]
        seen, reduce = [], new.reduce

        def note(bucket, seen=seen, reduce=reduce):
            seen.append(len(bucket.parameters()))
            return reduce(bucket)

        new.reduce = note
        train(other, sgd(other), 3, first=4)
        assert seen[: len(before)] != before
        assert new.steps == state.steps == 7
        ends = [{**hook.state_dict(each), **each.module.state_dict()} for hook, each in ((state, model), (new, other))]
        if dist.get_world_size() <= 2 or os.environ["BACKEND"] == "gloo":
            assert equal(*map(copied, ends))
        else:  # the order in which small tensors are added depends on the name of the hook's process group
            for name, parameter in model.module.named_parameters():
                torch.testing.assert_close(ends[1][name], parameter.detach(), rtol=1e-5, atol=1e-6)
        assert not new._sessions.saved


@case
def the_same_buckets_go_on_with_the_same_bits():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
    train(model, sgd(model), 4)
    saved, weights, ends = copied(state.state_dict(model)), copy.deepcopy(model.state_dict()), []
    for _ in range(2):
        model.load_state_dict(weights)
        state.load_state_dict(saved, model)
        train(model, sgd(model), 4, first=4)
        ends.append(copied({**state.state_dict(model), **model.state_dict()}))
    assert equal(*ends)


@case
def states_of_another_number_of_ranks():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
    train(model, sgd(model), 3)
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = state.state_dict(model)
    states = [None] * size
    dist.all_gather_object(states, saved)
    more = [copy.deepcopy(states[old % size]) | {"rank": old, "world_size": size + 1} for old in range(size + 1)]
    state.load_state_dict(more, model)
    got, per_rank = summed(residuals(state, model)), [old["residuals"] for old in more]
    for name, total in got.items():
        torch.testing.assert_close(total, sum(kept[name].double() for kept in per_rank), rtol=1e-6, atol=1e-6)
    ledger, own = Ledger(model, state), own_gradients(model.module, 3)
    model.zero_grad()
    loss_of(model, 3).backward()
    ledger.check(own)
    for wrong in ([saved | {"rank": rank + size}], [saved | {"world_size": size + 1}], []):
        with raises(tr.ConfigurationError, "residuals were saved by"):
            state.load_state_dict(wrong, model)
    with raises(tr.ConfigurationError, "of another model"):
        state.load_state_dict(saved, torch.nn.Linear(3, 3))
    with raises(tr.ConfigurationError, "needs the model"):
        state.state_dict(torch.nn.Linear(3, 3))


@case
def states_are_pickled():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05), tr.ErrorFeedback(elements_min=0, momentum=0.5))
    train(model, sgd(model), 3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    ((hook, loaded),) = again._comm_hooks  # torch keeps it, but does not register it
    again.register_comm_hook(loaded, hook)
    assert loaded.process_group is None
    assert loaded.steps == 3
    twice = copy.deepcopy(loaded)
    loss_of(again, 3).backward()
    model.zero_grad()
    loss_of(model, 3).backward()
    other = DistributedDataParallel(copy.deepcopy(model.module), bucket_cap_mb=CAP)
    other.register_comm_hook(twice, hook)
    other.zero_grad()
    loss_of(other, 3).backward()
    assert loaded.steps == twice.steps == 4
    assert equal(copied(loaded.state_dict(again)), copied(twice.state_dict(other)))
    one, two = summed(residuals(state, model)), summed(residuals(loaded, again))
    for name, parameter in again.module.named_parameters():
        if name in one:  # other buckets, so other elements were sent
            size = dist.get_world_size()
            got = two[name] + size * parameter.grad
            torch.testing.assert_close(got, one[name] + size * dict(model.module.named_parameters())[name].grad)
    small = DistributedDataParallel(torch.nn.Linear(3, 3), bucket_cap_mb=CAP)
    small.register_comm_hook(pickle.loads(pickle.dumps(state)), hook)
    with raises(tr.ConfigurationError, "of another model"):
        small(torch.ones(1, 3)).sum().backward()


# ------------------------------------------------------------------------------------------------- groups and mistakes


@contextlib.contextmanager
def raises(kind, text):
    raised = None
    try:
        yield
    except kind as error:
        raised = str(error)
    assert raised is not None, f"no {kind.__name__} was raised"
    assert text in raised, raised


@case
def groups_of_some_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(ranks) for ranks in ([*range(size - 1)] or [0], [size - 1])]
    group = groups[rank == size - 1 and size > 1]
    model = DistributedDataParallel(without_extra(), process_group=group)
    state, hook = tr.ddp_hook(tr.TopkA(density=0.05), feedback=SMALL, process_group=group)
    model.register_comm_hook(state, hook)
    train(model, sgd(model), 3)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    members = dist.get_process_group_ranks(group)
    first = flat.clone()
    dist.broadcast(first, members[0], group=group)
    assert torch.equal(first, flat)
    assert state.state_dict(model)["world_size"] == len(members)
    state.close()
    state.close()


@case
def settings_that_differ():
    if dist.get_world_size() > 1:
        with raises(tr.PlanMismatchError, "other settings"):
            tr.ddp_hook(tr.OkTopk(density=0.05 if dist.get_rank() else 0.1))
    with raises(tr.ConfigurationError, "DistributedOptimizer"):
        tr.ddp_hook(tr.Auto())


@case
def sparse_gradients_are_refused():
    module = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2))
    model, _ = wrap(module, tr.OkTopk(density=0.05))
    with raises(tr.UnsupportedError, "sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@case
def a_default_device_changes_nothing():
    model, state = wrap(without_extra(), tr.OkTopk(density=0.05))
    ledger, own = Ledger(model, state), own_gradients(model.module, 0)
    loss = loss_of(model, 0)
    with torch.device("meta"):
        loss.backward()
    ledger.check(own)


# ---------------------------------------------------------------------------------------------------------------- main


def say(event, **facts):
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


def main():
    """Until there are no more names."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ["BACKEND"], timeout=datetime.timedelta(seconds=TIMEOUT_S))
    for line in sys.stdin:
        begin, failure = time.monotonic(), None
        try:
            CASES[line.strip()]()
        except BaseException:
            failure = traceback.format_exc()
        say("case", failure=failure, seconds=time.monotonic() - begin)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
