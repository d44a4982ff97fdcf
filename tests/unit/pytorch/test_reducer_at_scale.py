"""The reducer on more ranks than can run here: what counts of ranks decide, in half types.

The reducers of all ranks are in one thread. What they submit is reduced when all have submitted it: as the engine does,
by its kernel for half types in the order of a ring, or as a native library does, with a rounded sum at every hop.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from totalreduce.foundation.errors import MissingTensorError
from totalreduce.foundation.types import DType, ReduceOp
from totalreduce.kernels.reduction import combine
from totalreduce.pytorch.buckets import ParameterSpec, plan_buckets
from totalreduce.pytorch.reducer import Arithmetic, Reducer

WIRE = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}


class World:
    """The stream and the control group of every rank."""

    def __init__(self, world_size: int, *, native: bool) -> None:
        self.world_size, self.native = world_size, native
        self.submitted: dict[int, list[torch.Tensor]] = {}

    def submit(self, index, tensor, *, op, priority):
        self.submitted.setdefault(index, []).append(tensor)
        if len(self.submitted[index]) == self.world_size:
            self.reduce(self.submitted.pop(index), op)
        return SimpleNamespace(_handle=None, wait=lambda: None)

    def reduce(self, tensors, op):
        if self.native:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            assert op is ReduceOp.SUM
        else:
            total = self.as_the_engine(tensors, op)
        for tensor in tensors:
            tensor.copy_(total)

    def as_the_engine(self, tensors, op):
        dtype = WIRE[tensors[0].dtype]
        partial, end = tensors[0].float(), torch.empty_like(tensors[0])
        for number, tensor in enumerate(tensors[1:], 2):
            last = number == len(tensors)
            target = end if last else partial
            combine(
                op,
                memory(partial),
                memory(tensor),
                memory(target),
                local_dtype=DType.FLOAT32,
                incoming_dtype=dtype,
                destination_dtype=dtype if last else DType.FLOAT32,
                divisor=len(tensors) if last and op is ReduceOp.AVG else 1,
            )
        return end

    def allreduce(self, tensor, *, name, op, priority):
        """Of who lacks a gradient: as if the other ranks had all they should."""
        return SimpleNamespace(_handle=None, wait=lambda: tensor)


def memory(tensor):
    return memoryview(tensor.view(torch.uint8).numpy())


def reducers(world_size, dtype, op, *, native=False, predivide=1.0, forbid=False, active=False):
    world = World(world_size, native=native)
    made = []
    for rank in range(world_size):
        parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 1)]
        specs = [ParameterSpec.of(name, (), parameter) for name, parameter in zip("ab", parameters, strict=True)]
        plan = plan_buckets(specs, 1)
        group = SimpleNamespace(
            rank=rank,
            world_size=world_size,
            coordinator=None,
            operations=SimpleNamespace(closed=False),
            control=world,
            empty=lambda size, dtype: torch.empty(size, dtype=dtype),
        )
        stream = SimpleNamespace(begin=lambda: None, submit=world.submit)
        arithmetic = Arithmetic.of(
            op, world_size, predivide=predivide, wire_dtype=None, divide_by_active=active, native=native
        )
        group.planned = lambda names, stream=stream: stream
        reducer = Reducer(group, "model", parameters, specs, plan, arithmetic=arithmetic, forbid_missing=forbid)
        made.append((reducer, parameters))
    return made


#: Each way to reduce, from the first world in which a count of ranks is rounded.
CASES = [
    (257, torch.bfloat16, ReduceOp.SUM, {}),
    (257, torch.bfloat16, ReduceOp.AVG, {"native": True}),
    (257, torch.bfloat16, ReduceOp.AVG, {"predivide": 2.0}),
    (512, torch.bfloat16, ReduceOp.AVG, {}),
    (2049, torch.float16, ReduceOp.SUM, {}),
]


@pytest.mark.parametrize(("world_size", "dtype", "op", "options"), CASES)
def test_one_rank_without_a_gradient_is_noticed_on_every_rank(world_size, dtype, op, options):
    made = reducers(world_size, dtype, op, forbid=True, **options)
    for lacking in (None, world_size - 1):
        for rank, (reducer, parameters) in enumerate(made):
            reducer.begin()
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1 / 64)
            if rank == lacking:
                parameters[0].grad = None
            reducer.close()
        for reducer, _ in made:
            if lacking is None:
                reducer.finish(world_size)
                assert all(gradient is not None for bucket in reducer.buckets for gradient in bucket.reduced())
            else:
                with pytest.raises(MissingTensorError) as caught:
                    reducer.finish(world_size)
                assert caught.value.tensor == "a"
            assert len(reducer.active_ranks) == world_size


@pytest.mark.parametrize(("world_size", "dtype", "op", "options"), CASES[:4])
@pytest.mark.parametrize("num_joined", [0, 1, 100])
def test_averages_are_divided_by_the_exact_number_of_active_ranks(world_size, dtype, op, options, num_joined):
    made = reducers(world_size, dtype, op, active=True, **options)
    for rank, (reducer, parameters) in enumerate(made):
        reducer.begin(joined=rank < num_joined)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(rank == world_size - 1))
        reducer.close()
    for reducer, _ in made[:: world_size - 1]:
        reducer.finish(world_size)
        active = world_size - num_joined
        assert len(reducer.active_ranks) == active
        got = torch.cat([gradient for bucket in reducer.buckets for gradient in bucket.reduced()])
        wanted = 1.0 if op is ReduceOp.SUM else 1.0 / active
        if num_joined == 0 and not options:
            assert torch.equal(got, torch.full_like(got, wanted)), "no factor but 1"
        assert torch.allclose(got, torch.full_like(got, wanted), rtol=2 * torch.finfo(dtype).eps, atol=0)
