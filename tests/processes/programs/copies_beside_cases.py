"""Strategies, states and servers with models of the fake accelerator; ``tests/processes/test_copies_beside.py`` asks.

Every rank reads names of cases from standard input, and prints for each a JSON line with the event ``case`` and the
traceback, if it failed. The first line says why there is no fake accelerator, if there is none.
"""

import json
import os
import sys
import threading
import time
import traceback

import pytest
import torch

sys.path.append(os.environ["HELPERS"])
import fake_accelerator

import totalreduce as tr
from totalreduce.recovery import snapshots, weights
from totalreduce.recovery.buffers import BufferRow, buffers_of

CASES = {}
SHAPES = [(7, 3), (5,), (3, 2, 2, 2), (1,)]
#: Of each parameter: its type, and the number of its device. The third is not contiguous.
KINDS = [(torch.float32, 0), (torch.bfloat16, 0), (torch.float32, 1), (torch.float32, 0)]


def case(function):
    """Make a function known."""
    CASES[function.__name__] = function
    return function


def numbers(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters_on(device):
    """Parameters on the host, or on both devices."""
    made = []
    for index, (shape, (dtype, number)) in enumerate(zip(SHAPES, KINDS, strict=True)):
        values = numbers(index, shape).to(dtype)
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        made.append(torch.nn.Parameter(values.to("cpu" if device == "cpu" else f"fake:{number}")))
    return made


def late(tensor, device):
    """A copy that a stream of the device has still to make."""
    return torch.empty_like(tensor, device=device).copy_(tensor.pin_memory(), non_blocking=True)


def gradients(parameters, step):
    for index, parameter in enumerate(parameters):
        made = numbers(1000 * step + 10 * index + rank, parameter.shape).to(parameter.dtype)
        parameter.grad = made if parameter.is_cpu else late(made, parameter.device)


def trained(sync, device, reloads_after=None):
    """Return the parameters after 7 steps, and the waits of this thread for the device."""
    parameters = parameters_on(device)
    inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    optimizer = tr.DistributedOptimizer(inner, named_parameters=named, group=group, sync=sync)
    fake.take_waits()
    for step in range(7):
        gradients(parameters, step)
        optimizer.step()
        if step == reloads_after:
            optimizer.strategy_steps.load_state(optimizer.strategy_steps.state())
    waits = [kind for kind, thread in fake.take_waits() if thread == threading.current_thread().name]
    optimizer.strategy_steps.finish()
    optimizer.close()
    return [parameter.detach().cpu() for parameter in parameters], waits


def same_bits(sync, *, waits, **settings):
    expected, _ = trained(sync, "cpu", **settings)
    for kind in (None, *fake_accelerator.KINDS):
        if kind is not None:
            fake.lazy(kind)
        found, waited = trained(sync, "fake", **settings)
        assert not waited or waits, waited
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), (kind, index, one, other)


@case
def diloco_waits_for_no_kernel():
    same_bits(tr.DiLoCo(period=2), waits=False)
    same_bits(tr.DiLoCo(period=3, overlap=1), waits=False)
    same_bits(tr.DiLoCo(period=3, overlap=2, fragments=2, mix="progress"), waits=False)
    same_bits(tr.DiLoCo(period=2, overlap=1, mix=0.0, codec=tr.Int8()), waits=False)


@case
def gossip_waits_for_no_kernel():
    same_bits(tr.Gossip(), waits=False)
    same_bits(tr.Gossip(overlap=1), waits=False)
    same_bits(tr.Gossip(overlap=2, period=2), waits=False)
    same_bits(tr.Gossip(overlap=2, graph="random"), waits=False)


@case
def strategies_whose_result_is_due_at_once_have_the_bits_of_host_tensors():
    same_bits(tr.LocalSGD(period=2, optimizer_state="average"), waits=True)
    same_bits(tr.EASGD(period=2), waits=True)
    same_bits(tr.SlowMo(period=3), waits=True)
    same_bits(tr.Strom(threshold=0.01), waits=True)


@case
def strategies_with_servers_have_the_bits_of_host_tensors():
    for settings in ({"optimizer": "worker"}, {"optimizer": "server", "consistency": tr.ps.Sequential()}):
        same_bits(tr.ParameterServer(**settings), waits=True)


@case
def states_that_are_saved_and_loaded_have_the_bits_of_host_tensors():
    for sync in (tr.DiLoCo(period=3, overlap=2, mix="progress"), tr.Gossip(overlap=2)):
        same_bits(sync, waits=True, reloads_after=4)


@case
def values_of_a_parameter_server_are_on_the_device():
    with tr.ps.connect(group, num_keys=100, width=4) as client:
        for kind in (None, *fake_accelerator.KINDS):
            if kind is not None:
                fake.lazy(kind)
            values, keys = numbers(rank, (3, 4)), torch.tensor([10 * rank, 10 * rank + 3, 99 - rank])
            client.assign(late(keys, "fake:1"), late(values, "fake:0")).wait()
            out = torch.zeros(3, 4, device="fake:1")
            for pull in (client.pull(keys, out), client.pull(slice(10 * rank, 10 * rank + 3), out)):
                while not pull.done():
                    time.sleep(0.001)
                found = out.cpu()
            assert torch.equal(found[0], values[0])
            client.pull(keys, out).wait()
            assert torch.equal(out.cpu(), values)
            with pytest.raises(tr.ConfigurationError, match="share memory"):
                client.push_pull(keys, out, out)


@case
def copies_of_states_wait_once():
    def model_on(device):
        norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(4)))
        for index, tensor in enumerate((*norms.parameters(), *norms.buffers())):
            tensor.data.copy_(10 * numbers(index, tensor.shape).abs())
        return norms.to(device)

    def copies_of(model):
        yield lambda: [BufferRow(buffers_of(model)).copy()]
        yield lambda: list(snapshots._copied(dict(model.state_dict())).values())
        yield lambda: weights._copied(list(model.parameters()), None)

    here, there = model_on("cpu"), model_on("fake:0")
    for kind in fake_accelerator.KINDS:
        for expected, found in zip(copies_of(here), copies_of(there), strict=True):
            fake.lazy(kind)
            for parameter in (*there.parameters(), *there.buffers()):
                parameter.data.add_(0)  # a kernel that is late
            unpinned = fake.count("unpinned")
            fake.take_waits()
            copies = found()
            assert [wait for wait, _ in fake.take_waits()] == ["event"]
            assert fake.count("unpinned") == unpinned
            for one, other in zip(copies, expected(), strict=True):
                assert torch.equal(one, other)


@case
def calls_that_are_replayed_have_the_bits_of_host_tensors():
    def called(device):
        state = tr.Checkpoint(model=torch.zeros(5, device=device), pair=[{"a": torch.ones(1, device=device)}, 2])
        with tr.replayed(state, group) as job:
            mine = late(numbers(rank, (3, 5)), device) if device != "cpu" else numbers(rank, (3, 5))
            found = [job.allgather(mine), job.broadcast(mine.clone(), root=1), job.allreduce(mine)]
            state.model = state.model + found[-1][0]
            assert job.checkpoint() == 1
        return [*found, state.model, state.pair[0]["a"]]

    expected = called("cpu")
    for kind in fake_accelerator.KINDS:
        fake.lazy(kind)
        for one, other in zip(expected, called("fake:0"), strict=True):
            assert other.device.type == "fake"
            assert torch.equal(one, other.cpu())


def main():
    for line in sys.stdin:
        fake.delays(0.005, 0.001, seed=rank)
        failure = None
        try:
            CASES[line.strip()]()
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps({"event": "case", "failure": failure}), flush=True)


try:
    fake, absence = fake_accelerator.load(0.005, 0.001), None
except fake_accelerator.NoCompiler as error:
    absence = str(error)
print(json.dumps({"event": "loaded", "missing": absence}), flush=True)
if absence is None:
    group = tr.init()
    rank, size = group.rank, group.world_size
    main()
