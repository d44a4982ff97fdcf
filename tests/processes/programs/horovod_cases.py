"""Cases of ``totalreduce.horovod``, run by all ranks of a job; each in a job of its own within the processes.

The test names a case on standard input, every rank carries it out and says how it went. Whatever travels is computed
by every rank for all ranks, so that results are compared with plain arithmetic.
"""

import argparse
import contextlib
import datetime
import gc
import json
import math
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import totalreduce as tr
import totalreduce.horovod as hvd
from totalreduce.horovod.context import context

TIMEOUT_S = 20.0
CASES = {}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
SHAPES = [(17,), (5, 7), (2, 3, 5)]


def case(function):
    CASES[function.__name__] = function
    return function


def values(rank, shape, dtype, seed=0):
    """What a rank contributes: small whole numbers and, in floats, quarters."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randint(-40, 40, shape, generator=generator) / 4).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -5, 6, shape, generator=generator).to(dtype)


def everybody(shape, dtype, seed=0, ranks=None):
    return [values(rank, shape, dtype, seed) for rank in (range(hvd.size()) if ranks is None else ranks)]


def total(tensors, op=hvd.Sum):
    """The reduction in the widest type, rounded once."""
    dtype = tensors[0].dtype
    wide = torch.stack([each.double() if dtype.is_floating_point else each.long() for each in tensors])
    match op:
        case hvd.Sum:
            result = wide.sum(0)
        case hvd.Average if dtype.is_floating_point:
            result = wide.mean(0)
        case hvd.Average:
            # The sum wraps around as the dtype does; the quotient is rounded towards zero.
            result = torch.div(wide.sum(0).to(dtype).long(), len(tensors), rounding_mode="trunc")
        case hvd.Min:
            result = wide.amin(0)
        case hvd.Max:
            result = wide.amax(0)
        case hvd.Product:
            result = wide.prod(0)
    return result.to(dtype)


def check(result, wanted, ulps=4, what=""):
    """Equal dtype, shape and values; floats up to the rounding of sums."""
    assert result.dtype == wanted.dtype, (what, result.dtype, wanted.dtype)
    assert result.shape == wanted.shape, (what, result.shape, wanted.shape)
    if result.dtype.is_floating_point:
        slack = ulps * torch.finfo(result.dtype).eps
        good = torch.allclose(result.double(), wanted.double(), rtol=slack, atol=slack)
    else:
        good = torch.equal(result, wanted)
    assert good, f"{what}: {result} is not {wanted}"


def same_everywhere(*tensors):
    """All ranks have the same bits."""
    mine = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    for theirs in hvd.allgather_object(mine):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@contextlib.contextmanager
def refused(kind, *words):
    """The block raises this error, here, and its text has these words."""
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__}"
    missing = [word for word in words if word not in text]
    assert not missing, (missing, text)


def halves():
    """Two process sets that share no rank, and which one is this rank's; with one rank the second is empty."""
    even, odd = list(range(0, hvd.size(), 2)), list(range(1, hvd.size(), 2))
    sets = [hvd.add_process_set(ranks) for ranks in (even, odd) if ranks and len(ranks) < hvd.size()]
    sets = sets or [hvd.global_process_set]
    return sets, sets[hvd.rank() % len(sets)]


# -------------------------------------------------------------------------------------------------------------- basics


@case
def who_is_who():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    hvd.init()  # harmless
    hvd.init(process_sets="dynamic")
    assert hvd.nccl_built() in (0, 1)
    assert hvd.ddl_built() is hvd.ccl_built() is hvd.mpi_enabled() is hvd.gloo_enabled() is False
    assert {type(flag()) for flag in (hvd.mpi_built, hvd.gloo_built, hvd.cuda_built, hvd.rocm_built)} == {bool}
    assert hvd.mpi_threads_supported() is True
    assert hvd.__version__ == tr.__version__
    assert "__version__" in hvd.__all__
    assert "elastic" in hvd.__all__


@case
def without_init():
    hvd.shutdown()
    hvd.shutdown()  # harmless
    assert not hvd.is_initialized()
    calls = [hvd.rank, hvd.local_size, hvd.join, hvd.barrier, lambda: hvd.add_process_set([0])]
    calls += [lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.SyncBatchNorm(3), lambda: hvd.broadcast_object(1)]
    calls += [lambda: hvd.broadcast_parameters({}, 0), lambda: hvd.start_timeline("/tmp/never.json")]
    for call in calls:
        with refused(ValueError, "hvd.init()"):
            call()


@case
def a_world_of_less_than_all_is_refused():
    hvd.shutdown()
    hvd.init(comm=list(range(int(os.environ["WORLD_SIZE"]))), timeout_s=TIMEOUT_S)
    assert hvd.size() == int(os.environ["WORLD_SIZE"])
    hvd.shutdown()
    with refused(ValueError, "process set"):
        hvd.init(comm=[0, 7], timeout_s=TIMEOUT_S)
    assert not hvd.is_initialized()


@case
def different_settings_are_refused_at_init():
    hvd.shutdown()
    if int(os.environ["WORLD_SIZE"]) > 1:
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        config = tr.CoordinationConfig(fusion_bytes=1 << 20 if last else 1 << 21)
        with refused(tr.PlanMismatchError, "fusion_bytes", str(1 << 20)):
            hvd.init(coordination=config, timeout_s=TIMEOUT_S)
        assert not hvd.is_initialized()
    hvd.init(timeout_s=TIMEOUT_S)
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


@case
def twenty_times_init_and_shutdown():
    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    hvd.shutdown()
    before = None
    for number in range(21):
        hvd.init(timeout_s=TIMEOUT_S)
        some = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
        check(hvd.allreduce(torch.full((3,), float(number)), name="x"), torch.full((3,), float(number)))
        if some.included():
            check(hvd.allgather(torch.ones(2), name="y", process_set=some), torch.ones(2))
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hvd.shutdown()
        assert some.process_set_id is None
        before = before or count()
    assert all(now <= then for now, then in zip(count(), before, strict=True)), (count(), before)


@case
def after_a_failure_init_begins_a_new_job():
    # By default all ranks give an operation up together before the wait of any of them runs out.
    assert context.members(hvd.global_process_set).coordinator.config.stall_abort_s == 0.9 * TIMEOUT_S
    if hvd.size() == 1:
        return
    last = hvd.rank() == hvd.size() - 1
    hvd.shutdown()
    config = tr.CoordinationConfig(stall_warning_s=0.5, stall_abort_s=1.0)
    for turn in range(2):
        hvd.init(timeout_s=TIMEOUT_S, coordination=config)
        part = hvd.add_process_set([0])
        # One rank never submits this, and waits for the others elsewhere: all get the same error.
        with refused(tr.StallError, "rank(s)"):
            hvd.barrier() if last else hvd.allreduce(torch.ones(2), name=f"missed by one {turn}")
        with refused(tr.StallError):
            hvd.allreduce(torch.ones(2), name="after it")
        assert hvd.is_initialized()
        hvd.init(timeout_s=TIMEOUT_S)
        assert part.process_set_id is None
        check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
        hvd.init()  # harmless: this job has not failed
        part = hvd.add_process_set([0])
        if part.included():
            check(hvd.allreduce(torch.ones(2), process_set=part), torch.ones(2))
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
        hvd.shutdown()


@case
def a_timeline_is_written_on_every_rank():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        hvd.allreduce(torch.ones(4), name="too early")
        hvd.start_timeline(str(path), mark_cycles=True)
        with refused(ValueError, "stop_timeline"):
            hvd.start_timeline(str(path))
        for step in range(3):
            hvd.allreduce(torch.ones(4), name="gradient")
            hvd.allgather(torch.ones(step), name="rows")
        hvd.stop_timeline()
        hvd.stop_timeline()  # harmless
        hvd.allreduce(torch.ones(4), name="too late")
        mine = path if hvd.rank() == 0 else path.with_suffix(f".rank{hvd.rank()}.json")
        events = json.loads(mine.read_text())["traceEvents"]
        names = {event["name"] for event in events if event["ph"] == "X"}
        assert {"gradient #0", "gradient #1", "rows #0", "QUEUE", "ALLREDUCE", "ALLGATHER"} <= names, names
        assert "NEGOTIATE" in names or hvd.size() == 1
        assert not any("too" in name for name in names)


# ------------------------------------------------------------------------------------------------------- process sets


@case
def process_sets():
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.rank(), everyone.size()) == (0, hvd.rank(), hvd.size())
    assert everyone.included()
    assert hvd.process_set_by_id(0) is everyone
    assert hvd.remove_process_set(everyone) is False
    with refused(ValueError, "hvd.add_process_set()"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    with refused(ValueError, "no process set with id 77"):
        hvd.process_set_by_id(77)
    with refused(ValueError, f"job of {hvd.size()}"):
        hvd.add_process_set([hvd.size()])
    with refused(ValueError, "different ranks"):
        hvd.ProcessSet([0, 0])
    unknown = hvd.ProcessSet([0])
    assert unknown.size() is unknown.rank() is unknown.included() is None
    if hvd.size() == 1:
        with refused(ValueError, "already"):
            hvd.add_process_set([0])
        return
    last = hvd.size() - 1
    tail = hvd.add_process_set(hvd.ProcessSet([last, 1] if last > 1 else [1]))  # in any order
    assert tail.ranks == sorted({1, last})
    assert hvd.process_set_by_id(tail.process_set_id) is tail
    with refused(ValueError, "already"):
        hvd.add_process_set(sorted({1, last}))
    if last > 1:
        with refused(tr.PlanMismatchError, "ranks"):  # they do not mean the same
            hvd.add_process_set([0] if hvd.rank() == 0 else [0, last])
    if tail.included():
        assert tail.rank() == tail.ranks.index(hvd.rank())
        check(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=tail), torch.full((2,), float(tail.size())))
        check(hvd.broadcast(torch.tensor([hvd.rank()]), last, process_set=tail), torch.tensor([last]))
        with refused(ValueError, "root_rank 0"):
            hvd.broadcast(torch.ones(1), 0, process_set=tail)
        assert hvd.allgather_object(hvd.rank(), process_set=tail) == tail.ranks
        assert hvd.broadcast_object(hvd.rank(), last, process_set=tail) == last
        state = {"w": torch.full((2,), float(hvd.rank()))}
        hvd.broadcast_parameters(state, 1, process_set=tail)
        check(state["w"], torch.ones(2))
    else:
        for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
            with refused(ValueError, f"rank {hvd.rank()} is not a member"):
                call(torch.ones(2), process_set=tail)
        with refused(ValueError, "not a member"):
            tail.rank()
    first = tail.process_set_id
    assert hvd.remove_process_set(tail) is True
    assert tail.process_set_id is None
    with refused(ValueError, "not known"):
        hvd.remove_process_set(tail)
    again = hvd.add_process_set([last])
    assert again.process_set_id > first
    if again.included():
        check(hvd.allreduce(torch.ones(1), process_set=again), torch.ones(1))
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, last + 1))]
    hvd.init(process_sets=sets, timeout_s=TIMEOUT_S)
    assert [each.process_set_id for each in sets] == [1, 2]
    mine = sets[0] if hvd.rank() == 0 else sets[1]
    wanted = torch.tensor(float(len(mine.ranks)))
    check(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=mine), wanted)


# ---------------------------------------------------------------------------------------------------------- allreduce


@case
def sums_and_averages_of_every_dtype_and_shape():
    for dtype in (*INTEGERS, *FLOATS):
        for shape in SHAPES:
            inputs = everybody(shape, dtype)
            mine = inputs[hvd.rank()].clone()
            for op in (hvd.Sum, hvd.Average, None):
                result = hvd.allreduce(mine, op=op, name=f"{dtype}/{shape}")
                check(result, total(inputs, hvd.Average if op is None else op), what=f"{dtype} {shape} {op}")
                same_everywhere(result)
            assert torch.equal(mine, inputs[hvd.rank()])


@case
def minima_maxima_and_products():
    for dtype in (*INTEGERS, *FLOATS):
        inputs = everybody((11, 3), dtype)
        if dtype.is_floating_point:
            inputs = [(each.sign() + (each == 0)) * 2 for each in inputs]  # products stay exact
        for op in (hvd.Min, hvd.Max, hvd.Product):
            check(hvd.allreduce(inputs[hvd.rank()], op=op), total(inputs, op), what=f"{dtype} {op}")


@case
def in_place_keeps_the_storage():
    for dtype in (torch.int32, torch.float32, torch.float16):
        inputs = everybody((4, 6), dtype)
        tensor = inputs[hvd.rank()].clone()
        place = tensor.data_ptr()
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert tensor.data_ptr() == place
        check(tensor, total(inputs))
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    hvd.allreduce_(parameter, op=hvd.Sum)
    check(parameter.data, torch.full((3,), float(sum(range(hvd.size())))))
    hvd.broadcast_(parameter, hvd.size() - 1)
    assert parameter.is_leaf
    assert parameter.requires_grad


def scaled(tensor, factor):
    """Rounded once; integers are cut off."""
    wide = tensor.double() * factor
    return (wide if tensor.dtype.is_floating_point else wide.trunc()).to(tensor.dtype)


@case
def factors_before_and_after():
    for dtype in (*INTEGERS, *FLOATS):
        inputs = everybody((9,), dtype)
        for before, after in ((0.5, 1.0), (1.0, 3.0), (2.0, 0.25)):
            wanted = scaled(total([scaled(each, before) for each in inputs]), after)
            result = hvd.allreduce(inputs[hvd.rank()], op=hvd.Sum, prescale_factor=before, postscale_factor=after)
            check(result, wanted, what=f"{dtype} {before} {after}")


@case
def sizes_and_layouts_of_every_kind():
    rank = hvd.rank()
    for shape in ((0,), (), (1,), (0, 3), (hvd.size() + 1,), ((1 << 16) + 3,)):
        inputs = everybody(shape, torch.float64)
        check(hvd.allreduce(inputs[rank], op=hvd.Sum), total(inputs), what=f"{shape}")
    inputs = everybody((6, 8), torch.float64)
    layouts = [lambda t: t.t(), lambda t: t[::2, 1::3], lambda t: t[:, None].expand(6, 2, 8), lambda t: t.flip(0)]
    for view in layouts:
        strided = view(inputs[rank].clone())
        check(hvd.allreduce(strided, op=hvd.Sum), total([view(each) for each in inputs]))
        wanted = torch.cat([view(each) for each in inputs])
        check(hvd.allgather(strided), wanted)
    holder = inputs[rank].clone()
    hvd.allreduce_(holder[:, ::2], op=hvd.Sum)  # writes through the view
    check(holder[:, ::2], total([each[:, ::2] for each in inputs]))
    check(holder[:, 1::2], inputs[rank][:, 1::2])


@case
def more_than_fits_into_one_fusion():
    hvd.shutdown()
    hvd.init(coordination=tr.CoordinationConfig(fusion_bytes=4096), timeout_s=TIMEOUT_S)
    inputs = [everybody((size,), torch.float32, seed=size) for size in (10, 2000, 30, 1, 900)]
    handles = [hvd.allreduce_async(each[hvd.rank()], name=f"t{i}", op=hvd.Sum) for i, each in enumerate(inputs)]
    for handle, each in zip(handles, inputs, strict=True):
        check(hvd.synchronize(handle), total(each))


@case
def many_handles_in_any_order():
    kinds = [torch.int32, torch.float32, torch.float16, torch.float64, torch.int64]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(hvd.rank())).tolist()  # each rank has its own
    inputs = {index: everybody((index % 7, 3), kinds[index % 5], seed=index) for index in range(40)}
    pending = False
    for _ in range(3):  # from the second round on the names are known
        handles = {}
        for index in order:
            handles[index] = hvd.allreduce_async(inputs[index][hvd.rank()], name=f"t{index}", op=hvd.Sum)
            pending |= not hvd.poll(handles[index])
        for index in reversed(order):
            check(hvd.synchronize(handles[index]), total(inputs[index]), what=f"t{index}")
            assert hvd.poll(handles[index])
            check(hvd.synchronize(handles[index]), total(inputs[index]))  # again
    assert pending or hvd.size() == 1
    handle = hvd.allreduce_async_(tensor := torch.ones(3), name="in place", op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    with refused(ValueError, "handle"):
        hvd.poll(17)


@case
def groups_of_tensors():
    rank = hvd.rank()
    inputs = [everybody(shape, torch.float32, seed=i) for i, shape in enumerate([(3,), (), (4, 5), (0,)])]
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        mine = [each[rank].clone() for each in inputs]
        for result, each in zip(hvd.grouped_allreduce(mine, op=op, name="group"), inputs, strict=True):
            check(result, total(each, op))
        results = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=op))
        for result, each, own in zip(results, inputs, mine, strict=True):
            check(result, total(each, op))
            check(own, each[rank])
        results = hvd.grouped_allreduce_(mine, op=op)
        assert all(a is b for a, b in zip(results, mine, strict=True))
        for own, each in zip(mine, inputs, strict=True):
            check(own, total(each, op))
    mine = [each[rank].clone() for each in inputs]
    hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum, prescale_factor=2.0, name="scaled"))
    for own, each in zip(mine, inputs, strict=True):
        check(own, total(each) * 2)
    assert hvd.grouped_allreduce([]) == []
    _, part = halves()
    results = hvd.grouped_allreduce([each[rank] for each in inputs], op=hvd.Sum, name="part", process_set=part)
    for index, result in enumerate(results):
        check(result, total(everybody(inputs[index][0].shape, torch.float32, index, part.ranks)))
    gathered = hvd.grouped_allgather([torch.full((rank + 1, 2), float(rank)), torch.ones(2, 3)], name="gathered")
    check(gathered[0], torch.cat([torch.full((r + 1, 2), float(r)) for r in range(hvd.size())]))
    check(gathered[1], torch.ones(2 * hvd.size(), 3))
    gathered = hvd.synchronize(hvd.grouped_allgather_async([torch.tensor(rank), torch.full((rank,), rank)]))
    check(gathered[0], torch.arange(hvd.size()))
    check(gathered[1], torch.cat([torch.tensor([r] * r, dtype=torch.int64) for r in range(hvd.size())]))


@case
def an_error_in_one_member_fails_the_group_on_all_ranks():
    if hvd.size() == 1:
        return
    wrong = hvd.rank() == hvd.size() - 1
    tensors = [torch.ones(4), torch.ones(3 if wrong else 2), torch.ones(5)]
    with refused(tr.MismatchError, "together.1of3", "float32[3]", "float32[2]"):
        hvd.grouped_allreduce(tensors, name="together")
    tensors[1] = torch.ones(2)
    for result, tensor in zip(hvd.grouped_allreduce(tensors, name="together"), tensors, strict=True):
        check(result, tensor)  # the job goes on, under the same name


@case
def what_is_wrong_is_said_on_every_rank():
    if hvd.size() == 1:
        return
    first, rest = hvd.rank() == 0, ", ".join(map(str, range(1, hvd.size())))
    root = 0 if first else hvd.size() - 1
    attempts = {
        "shape": (lambda: hvd.allreduce(torch.ones(2 if first else 3), name="shape"), "float32[2]", "float32[3]"),
        "numel": (lambda: hvd.allreduce(torch.ones((2, 3) if first else (3, 2)), name="numel"), "[2, 3]", "[3, 2]"),
        "dtype": (lambda: hvd.allreduce(torch.ones(2).to(torch.float32 if first else torch.int32), name="dtype"),
                  "float32", "int32"),
        "op": (lambda: hvd.allreduce(torch.ones(2), name="op", op=hvd.Sum if first else hvd.Max), "sum", "max"),
        "scale": (lambda: hvd.allreduce(torch.ones(2), name="scale", prescale_factor=2.0 if first else 4.0), "2", "4"),
        "root": (lambda: hvd.broadcast(torch.ones(2), root, name="root"), "root=0", f"root={hvd.size() - 1}"),
        "kind": (lambda: hvd.allreduce(torch.ones(2), name="kind") if first else hvd.allgather(
            torch.ones(2), name="kind"), "allreduce", "allgather"),
        "width": (lambda: hvd.allgather(torch.ones(2, 3 if first else 4), name="width"), "[any, 3]", "[any, 4]"),
    }  # fmt: skip
    for name, (attempt, *words) in attempts.items():
        with refused(tr.MismatchError, repr(name), "rank 0 ", rest, *words):
            attempt()
        with refused(hvd.HorovodInternalError):
            attempt()
        check(hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name), torch.full((2,), float(hvd.size())))


@case
def a_call_that_is_refused_on_one_rank_does_not_spoil_later_ones():
    """Unnamed operations meet by their number on all ranks."""
    size, ones = hvd.size(), torch.ones(hvd.size())
    if hvd.rank() == 0:
        none, sparse, unknown = None, torch.eye(2).to_sparse(), hvd.ProcessSet([0])
        collectives = [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter]
        collectives += [hvd.allreduce_async, hvd.allgather_async, lambda t, **o: hvd.broadcast(t, 0, **o)]
        for call in collectives:
            with refused(ValueError, "needs a tensor, not None", "zero_grad()"):
                call(none)
            with refused(tr.UnsupportedError, "dense"):
                call(sparse, name="sparse")
            with refused(ValueError, "a string, not 5"):
                call(ones, name=5)
            with refused(ValueError, "a ProcessSet, not [0]"):
                call(ones, process_set=[0])
            with refused(ValueError, "not known"):
                call(ones, process_set=unknown)
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with refused(ValueError, "tensor 1 of", "not None"):
                call([ones, none])
            with refused(ValueError, "list of tensors"):
                call(ones)
        for call in (hvd.allreduce, hvd.reducescatter):
            with refused(ValueError, "op is one of Average, Sum"):
                call(ones, op="sum")
            with refused(ValueError, "prescale_factor must be a number"):
                call(ones, prescale_factor="2")
            with refused(ValueError, "Compression.none"):
                call(ones, compression="fp16")
        with refused(ValueError, "op=Sum"):
            hvd.allreduce(ones, hvd.Sum)  # the second argument is average
        with refused(ValueError, "whole numbers"):
            hvd.alltoall(ones, [0.5] * size)
        with refused(ValueError, "splits"):
            hvd.alltoall(ones, [2] * size)
        with refused(ValueError, "sparse COO tensor, not torch.strided"):
            hvd.sparse_allreduce_async(ones, name=None)
        with refused(ValueError, "Average or Sum, not MAX"):
            hvd.sparse_allreduce_async(sparse, name=None, op=hvd.Max)
    check(hvd.allreduce(ones, op=hvd.Sum), ones * size)
    check(hvd.grouped_allreduce([ones, ones * 2], op=hvd.Sum)[1], ones * 2 * size)
    check(hvd.allgather(ones[:1]), ones)
    check(hvd.broadcast(ones * hvd.rank(), 0), ones * 0)
    check(hvd.alltoall(ones), ones)
    check(hvd.reducescatter(ones, op=hvd.Sum), ones[:1] * size)
    hvd.barrier()


@case
def arguments_of_a_wrong_type_are_refused():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap_ = hvd.DistributedOptimizer
    attempts = [
        (lambda: hvd.broadcast_parameters(model, 0), "model.state_dict(), not a Linear"),
        (lambda: hvd.broadcast_parameters(torch.ones(2), 0), "not a Tensor"),
        (lambda: hvd.broadcast_optimizer_state(model, 0), "torch.optim.Optimizer, not a Linear"),
        (lambda: hvd.broadcast_optimizer_state(inner, "0"), "root_rank 0"),
        (lambda: wrap_(model, model.named_parameters()), "torch.optim.Optimizer, not a Linear"),
        (lambda: wrap_(inner, model), "(name, parameter)"),
        (lambda: wrap_(inner, model.state_dict()), "(name, parameter)"),
        (lambda: wrap_(inner, compression="fp16"), "Compression.none"),
        (lambda: wrap_(inner, op="sum"), "op is one of"),
        (lambda: wrap_(inner, gradient_predivide_factor=None), "gradient_predivide_factor must be a number"),
        (lambda: wrap_(inner, process_set=[0]), "a ProcessSet, not [0]"),
        (lambda: hvd.barrier([0]), "a ProcessSet, not [0]"),
        (lambda: hvd.add_process_set(3), "different ranks"),
        (lambda: hvd.remove_process_set(3), "a ProcessSet, not 3"),
        (lambda: hvd.start_timeline(5), "path of a file"),
        (lambda: hvd.synchronize(None), "handle"),
    ]
    for attempt, words in attempts:
        with refused(ValueError, words):
            attempt()
    optimizer = wrap_(inner, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))


@case
def a_name_in_flight_is_refused():
    if hvd.size() == 1:
        return
    # Nobody can end the first one before rank 0 has begun it, which it does behind the barrier.
    if hvd.rank():
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        with refused(ValueError, "'twice'", "in flight"):
            hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    hvd.barrier()
    if not hvd.rank():
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    check(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))
    check(hvd.allreduce(torch.ones(3), name="twice", op=hvd.Sum), torch.full((3,), float(hvd.size())))


@case
def average_is_deprecated():
    wanted = torch.full((2,), (hvd.size() - 1) / 2)
    for average, result in ((True, wanted), (False, wanted * hvd.size())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check(hvd.allreduce(torch.full((2,), float(hvd.rank())), average=average), result)
            check(hvd.allreduce_(torch.full((2,), float(hvd.rank())), average), result)
        assert [each.category for each in caught] == [DeprecationWarning] * 2
    with warnings.catch_warnings(), refused(ValueError, "average"):
        warnings.simplefilter("ignore")
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)


@case
def compressed_tensors():
    inputs = everybody((50,), torch.float32)
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        tensor = torch.linspace(-3, 3, 7)
        small, context = compression.compress(tensor)
        assert small.dtype == dtype
        check(compression.decompress(small, context), tensor.to(dtype).float())
        whole, context = compression.compress(torch.arange(3))
        assert compression.decompress(whole, context).dtype == whole.dtype == torch.int64
        result = hvd.allreduce(inputs[hvd.rank()], compression=compression, op=hvd.Sum, name="x")
        check(result, total([each.to(dtype) for each in inputs]).float())
        (result,) = hvd.grouped_allreduce([inputs[hvd.rank()]], compression=compression, op=hvd.Average)
        check(result.to(dtype), total([each.to(dtype) for each in inputs], hvd.Average))
        assert result.dtype == torch.float32
        rows = torch.ones(hvd.size(), 3)
        check(hvd.reducescatter(rows, compression=compression, op=hvd.Sum), rows[:1] * hvd.size())
    check(hvd.allreduce(inputs[hvd.rank()], compression=hvd.Compression.none, op=hvd.Sum), total(inputs))


def adasum_of(tensors):
    """The tree of pairs at distance 1, 2, 4, ..., after the surplus ranks were combined with the first ones."""
    vectors = [each.double() for each in tensors]

    def pair(a, b):
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b

    power = 1 << (len(vectors).bit_length() - 1)
    vectors = [pair(v, vectors[i + power]) if i + power < len(vectors) else v for i, v in enumerate(vectors[:power])]
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@case
def adasum_of_tensors():
    inputs = everybody((40,), torch.float64)
    wanted = adasum_of(inputs)
    tensor = inputs[hvd.rank()].clone()
    check(hvd.allreduce(tensor, op=hvd.Adasum, name="a"), wanted, ulps=1000)
    check(tensor, inputs[hvd.rank()])
    check(hvd.allreduce(tensor, op=hvd.Adasum, name="a", postscale_factor=2.0), wanted * 2, ulps=1000)
    handle = hvd.allreduce_async_(tensor, op=hvd.Adasum)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is tensor
    check(tensor, wanted, ulps=1000)
    same_everywhere(tensor)
    with refused(tr.UnsupportedError, "Adasum"):
        hvd.allreduce(torch.arange(3), op=hvd.Adasum)
    with refused(ValueError, "Adasum"):
        hvd.reducescatter(torch.ones(8), op=hvd.Adasum)


@case
def adasum_of_tensors_that_differ_is_refused_on_every_rank():
    if hvd.size() == 1:
        return
    last = hvd.rank() == hvd.size() - 1
    for name in (None, "a"):
        with refused(tr.PlanMismatchError, '["float32", 2]', '["float32", 3]'):
            hvd.allreduce(torch.ones(3 if last else 2), op=hvd.Adasum, name=name)
        with refused(tr.PlanMismatchError, "float64", "float32"):
            hvd.allreduce(torch.ones(2).to(torch.float64 if last else torch.float32), op=hvd.Adasum, name=name)
        with refused(tr.UnsupportedError if last else tr.PlanMismatchError, "Adasum combines"):
            hvd.allreduce(torch.ones(2).to(torch.int32 if last else torch.float32), op=hvd.Adasum, name=name)
        check(hvd.allreduce(torch.ones(2), op=hvd.Adasum, name=name), torch.ones(2))


# ------------------------------------------------------------------------------------------------- other collectives


@case
def gathered_rows():
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*INTEGERS, *FLOATS, torch.bool, torch.complex64):
        equal = [torch.full((3, 2), r + 1).to(dtype) for r in range(size)]
        check(hvd.allgather(equal[rank], name=f"{dtype}"), torch.cat(equal))
        ragged = [torch.full((r % 3, 2), r + 1).to(dtype) for r in range(size)]
        check(hvd.allgather(ragged[rank], name=f"{dtype}"), torch.cat(ragged))
    check(hvd.allgather(torch.tensor(rank)), torch.arange(size))
    handles = [hvd.allgather_async(torch.full((i * rank % 4, 3), i), name=f"r{i}") for i in range(12)]
    for i, handle in enumerate(handles):
        check(hvd.synchronize(handle), torch.cat([torch.full((i * r % 4, 3), i) for r in range(size)]))
    for last in range(3):  # rows grow from call to call
        part = [torch.full((last + r, 1), r) for r in range(size)]
        check(hvd.allgather(part[rank], name="growing"), torch.cat(part))


@case
def broadcasts_from_every_root():
    for root in range(hvd.size()):
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            inputs = everybody((5, 3), dtype, seed=root) if dtype is not torch.bool else [
                torch.tensor([r % 2 == 0, True]) for r in range(hvd.size())]  # fmt: skip
            tensor = inputs[hvd.rank()].clone()
            check(hvd.broadcast(tensor, root, name=f"{dtype}/{root}"), inputs[root])
            check(tensor, inputs[hvd.rank()])
            assert hvd.broadcast_(tensor, root) is tensor
            check(tensor, inputs[root])
    tensor = torch.full((4,), float(hvd.rank()))
    check(hvd.synchronize(hvd.broadcast_async(tensor, 0)), torch.zeros(4))
    check(hvd.synchronize(hvd.broadcast_async_(tensor[::2], 0)), torch.zeros(2))
    check(tensor, torch.tensor([0.0, hvd.rank(), 0.0, hvd.rank()]))
    for root in (-1, hvd.size()):
        with refused(ValueError, f"root_rank {root}"):
            hvd.broadcast(torch.ones(1), root)


@case
def rows_for_everybody():
    rank, size = hvd.rank(), hvd.size()

    def part(source, target, dtype):
        return torch.full(((source + 2 * target) % 3, 2), 10 * source + target).to(dtype)

    for dtype in (torch.int32, torch.float32, torch.uint8, torch.bfloat16):
        rows = torch.cat([part(rank, target, dtype) for target in range(size)])
        splits = [len(part(rank, target, dtype)) for target in range(size)]
        counts = [len(part(source, rank, dtype)) for source in range(size)]
        wanted = torch.cat([part(source, rank, dtype) for source in range(size)])
        output, received = hvd.alltoall(rows, splits, name=f"{dtype}")
        check(output, wanted)
        check(received, torch.tensor(counts, dtype=torch.int32))
        output, received = hvd.alltoall(rows, torch.tensor(splits), name=f"{dtype}")
        check(output, wanted)
        check(received, torch.tensor(counts))
        output, received = hvd.synchronize(hvd.alltoall_async(rows, splits))
        check(received, torch.tensor(counts, dtype=torch.int32))
        equal = torch.arange(2 * size).to(dtype) + 2 * rank
        result = hvd.alltoall(equal)
        check(result, torch.cat([torch.tensor([2 * rank, 2 * rank + 1]) + 2 * s for s in range(size)]).to(dtype))
        assert len(hvd.synchronize(hvd.alltoall_async(equal))) == 2
    check(hvd.alltoall(torch.empty(0, 3)), torch.empty(0, 3))


@case
def bad_splits_are_refused():
    size = hvd.size()
    for splits in ([1] * (size + 1), [2] * size, [-1, *[1] * (size - 1)], [1] * (size - 1)):
        with refused(ValueError, "splits"):
            hvd.alltoall(torch.ones(size), splits)
    if size > 1:
        with refused(ValueError, "splits"):
            hvd.alltoall(torch.ones(size + 1))
    check(hvd.alltoall(torch.ones(size)), torch.ones(size))


@case
def scattered_rows():
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int32, torch.int64, *FLOATS):
        for rows in (size, 2 * size + 1, size - 1, 0):
            inputs = everybody((rows, 3), dtype, seed=rows)
            begin = rank * (rows // size) + min(rank, rows % size)
            mine = slice(begin, begin + rows // size + (rank < rows % size))
            for op in (hvd.Sum, hvd.Average, hvd.Max):
                result = hvd.reducescatter(inputs[rank], op=op, name=f"{dtype}/{rows}")
                check(result, total(inputs, op)[mine], what=f"{dtype} {rows} {op}")
            if dtype.is_floating_point:
                result = hvd.reducescatter(inputs[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
                check(result, (total(inputs).double() * 2).to(dtype)[mine])
    check(hvd.reducescatter(torch.ones(size)), torch.ones(1))  # an average, unless told otherwise
    check(hvd.synchronize(hvd.reducescatter_async(torch.ones(size), op=hvd.Sum)), torch.full((1,), float(size)))
    pair = [torch.ones(size, 2), torch.full((size, 1), float(rank))]
    for results in (
        hvd.grouped_reducescatter(pair, op=hvd.Sum, name="pair"),
        hvd.synchronize(hvd.grouped_reducescatter_async(pair, op=hvd.Sum)),
    ):
        check(results[0], torch.full((1, 2), float(size)))
        check(results[1], torch.full((1, 1), float(sum(range(size)))))
    with refused(ValueError, "scalar"):
        hvd.reducescatter(torch.tensor(1.0))


@case
def barriers_wait():
    sets, part = halves()
    for process_set in (hvd.global_process_set, part):
        late = process_set.ranks[-1]
        if hvd.rank() == late:
            time.sleep(0.3)
        at = time.monotonic()
        hvd.barrier(process_set)
        left = time.monotonic()
        times = hvd.allgather_object([at, left], process_set=process_set)
        assert max(came for came, _ in times) <= min(gone for _, gone in times)
    hvd.barrier()
    if len(sets) == 2 and hvd.rank() % 2 == 0:  # the others are not held up
        for _ in range(3):
            hvd.barrier(process_set=part)
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="beside")
    hvd.barrier()
    check(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))


# ---------------------------------------------------------------------------------------------------------- gradients


def gradient(function, inputs, upstream):
    """This rank's gradient of its input, for this gradient of its output."""
    tensor = inputs.clone().requires_grad_()
    output = function(tensor)
    output.backward(upstream(output))
    return output.detach(), tensor.grad


@case
def gradients_of_every_collective():
    rank, size = hvd.rank(), hvd.size()
    ranks = range(size)

    def upstream(r, shape, seed=9):
        return values(r, shape, torch.float64, seed)

    for op in (hvd.Sum, hvd.Average):
        for name in (None, f"allreduce {op}"):
            _, result = gradient(
                lambda t: hvd.allreduce(t, op=op, name=name, prescale_factor=0.5),  # noqa: B023
                values(rank, (4, 3), torch.float64),
                lambda out: upstream(rank, out.shape),
            )
            check(result, total([upstream(r, (4, 3)) for r in ranks], op) * 0.5)
    _, result = gradient(
        lambda t: hvd.grouped_allreduce([t, t * 2], op=hvd.Sum)[1], values(rank, (3,), torch.float64), torch.ones_like
    )
    check(result, torch.full((3,), 2.0 * size, dtype=torch.float64))
    # Ragged: every rank's rows of the average.
    before, rows = sum(r + 1 for r in range(rank)), sum(r + 1 for r in ranks)
    for name in (None, "gather"):
        _, result = gradient(
            lambda t: hvd.allgather(t, name=name),  # noqa: B023
            values(rank, (rank + 1, 2), torch.float64),
            lambda out: upstream(rank, out.shape),
        )
        mean = total([upstream(r, (rows, 2)) for r in ranks], hvd.Average)
        check(result, mean[before : before + rank + 1])
    _, result = gradient(hvd.allgather, torch.tensor(1.0, dtype=torch.float64), lambda out: upstream(rank, out.shape))
    check(result, total([upstream(r, (size,)) for r in ranks], hvd.Average)[rank])
    root = size - 1
    _, result = gradient(
        lambda t: hvd.broadcast(t, root, name="from the last"),
        values(rank, (4,), torch.float64),
        lambda out: upstream(rank, out.shape),
    )
    mean = total([upstream(r, (4,)) for r in ranks], hvd.Average)
    check(result, mean if rank == root else torch.zeros_like(mean))
    # What came back is the gradient of what was sent: 10 * target + source, where the rows went.
    splits = [1 + target % 2 for target in ranks]
    _, result = gradient(
        lambda t: hvd.alltoall(t, splits, name="rows")[0],
        torch.zeros(sum(splits), dtype=torch.float64),
        lambda out: torch.repeat_interleave(
            torch.tensor([10.0 * rank + source for source in ranks], dtype=torch.float64), len(out) // size
        ),
    )
    wanted = [10.0 * target + rank for target in ranks for _ in range(splits[target])]
    check(result, torch.tensor(wanted, dtype=torch.float64))
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        _, result = gradient(
            lambda t: hvd.reducescatter(t, op=op, name=f"scatter {op}"),  # noqa: B023
            values(rank, (size + 1, 2), torch.float64),
            lambda out: torch.full_like(out, rank + 1.0),
        )
        owners = [0, *ranks]  # the first rank has one row more
        check(result, torch.tensor([[factor * (r + 1.0)] * 2 for r in owners], dtype=torch.float64))
    # Through a collective, twice.
    tensor = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(tensor**3, op=hvd.Average).sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), tensor)
    check(second, torch.full((2,), 18.0, dtype=torch.float64))
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))  # without gradients, too


@case
def gradients_within_a_process_set():
    _, part = halves()
    mine, ranks = part.rank(), part.ranks
    _, result = gradient(
        lambda t: hvd.allgather(t, process_set=part),
        torch.ones(2, dtype=torch.float64),
        lambda out: torch.arange(len(out), dtype=torch.float64) * (mine + 1),
    )
    mean = torch.arange(2 * len(ranks), dtype=torch.float64) * (sum(range(1, len(ranks) + 1)) / len(ranks))
    check(result, mean[2 * mine : 2 * mine + 2])
    _, result = gradient(
        lambda t: hvd.broadcast(t, ranks[-1], process_set=part),
        torch.ones(2, dtype=torch.float64),
        lambda out: torch.full_like(out, hvd.rank()),
    )
    check(result, torch.full((2,), sum(ranks) / len(ranks) if hvd.rank() == ranks[-1] else 0.0, dtype=torch.float64))


# --------------------------------------------------------------------------------------------------- starting equal


@case
def parameters_in_every_form():
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    model[1].num_batches_tracked += hvd.rank() + 5
    forms = {
        "state": lambda m: m.state_dict(),
        "named": lambda m: m.named_parameters(),
        "list of pairs": lambda m: list(m.named_parameters()),
        "list": lambda m: list(m.parameters()),
        "iterator": lambda m: m.parameters(),
        "any order": lambda m: dict(list(m.state_dict().items())[:: 1 - 2 * (hvd.rank() % 2)]),
    }
    for root, form in enumerate(forms.values()):
        root %= hvd.size()
        torch.manual_seed(10 * root + hvd.rank())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        wanted = hvd.broadcast_object({name: tensor.clone() for name, tensor in model.state_dict().items()}, root)
        hvd.broadcast_parameters(form(model), root_rank=root)
        for name, parameter in model.named_parameters():
            check(parameter.data, wanted[name], ulps=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert int(model[1].num_batches_tracked) == 5
    with refused(ValueError, "'x' more than once"):
        hvd.broadcast_parameters([("x", torch.ones(1)), ("x", torch.ones(1))], 0)
    with refused(ValueError, "not a tensor"):
        hvd.broadcast_parameters({"x": 5}, 0)
    with refused(ValueError, "root_rank"):
        hvd.broadcast_parameters(model.state_dict(), hvd.size())
    if hvd.size() > 1:
        with refused(tr.PlanMismatchError, "x", "float32[2]", "float32[3]"):
            hvd.broadcast_parameters({"x": torch.ones(2 if hvd.rank() == 0 else 3)}, 0)


def optimizers():
    """Every class of torch.optim, with the gradients it wants."""
    made = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            made[name] = kind
    return made


def step_of(name, optimizer, parameters, seed):
    """One step of a plain optimizer with made-up gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name == "SparseAdam":
            parameter.grad = parameter.grad.to_sparse(1)
    optimizer.step(lambda: torch.tensor(1.0)) if name == "LBFGS" else optimizer.step()


@case
def the_state_of_every_optimizer():
    kinds = optimizers()
    assert {"SGD", "Adam", "LBFGS", "SparseAdam", "Adafactor"} <= set(kinds)
    for number, (name, kind) in enumerate(kinds.items()):
        root = number % hvd.size()
        for fresh in (True, False):
            torch.manual_seed(3)
            parameters = [torch.nn.Parameter(torch.randn(4, 2)), torch.nn.Parameter(torch.randn(3, 5))]
            groups = parameters if name == "LBFGS" else [{"params": [parameters[0]]}, {"params": [parameters[1]]}]
            optimizer = kind(groups, lr=0.1)
            if hvd.rank() == root:
                optimizer.param_groups[-1]["lr"] = 0.025
                step_of(name, optimizer, parameters, seed=1)
                step_of(name, optimizer, parameters, seed=2)
            elif not fresh:
                step_of(name, optimizer, parameters, seed=7)
            hvd.broadcast_parameters(parameters, root)
            before = [parameter.detach().clone() for parameter in parameters]
            hvd.broadcast_optimizer_state(optimizer, root_rank=root, model=None)
            assert all(map(torch.equal, before, parameters)), f"{name}: no step is taken"
            assert optimizer.param_groups[-1]["lr"] == 0.025, name
            assert type(optimizer.param_groups[-1]["lr"]) is float
            states = hvd.allgather_object(optimizer.state_dict())
            for state in states:
                assert equal(state, states[root]), f"{name}: {state} is not {states[root]}"
            step_of(name, optimizer, parameters, seed=4)
            same_everywhere(*parameters)
    model = torch.nn.Linear(2, 1)
    wrapped = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=hvd.rank() + 1.0))
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert wrapped.param_groups[0]["lr"] == 1.0
    assert wrapped.param_groups[0]["betas"] == (0.9, 0.999)


@case
def gradients_are_zeros_where_horovod_leaves_zeros():
    for wraps in (False, True):
        model = Net()
        model.heads[1].bias.requires_grad_(False)
        own = model.body.bias.grad = torch.ones(8, dtype=torch.float64)
        optimizer = wrap(model) if wraps else torch.optim.SGD(model.parameters(), lr=0.1)
        before = flat(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert model.heads[1].bias.grad is None
        assert model.body.bias.grad is own
        for parameter in (model.body.weight, model.heads[0].weight, model.heads[0].bias, model.heads[1].weight):
            check(parameter.grad, torch.zeros_like(parameter))
            check(hvd.broadcast(parameter.grad, 0), torch.zeros_like(parameter))
        assert torch.equal(flat(model), before)

    # A program that steps without zero_grad: the zeros are added to.
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean()

    model = Net()
    optimizer = wrap(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses(model, 0, hvd.rank()).backward()
    optimizer.step()
    close(model, plain(Net(), torch.optim.SGD, 1, losses))
    for sparse_as_dense in (False, True):
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(table.parameters()), lr=0.1), sparse_as_dense=sparse_as_dense
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=table)
        before = table.weight.detach().clone()
        assert table.weight.grad.layout is torch.sparse_coo
        optimizer.step()
        check(table.weight.data, before)
    model = Net()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in model.parameters())


def equal(a, b):
    """Nested values are of the same types and equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or a != a  # noqa: PLR0124  (not a number)


@case
def objects():
    for root in range(hvd.size()):
        values_ = [None, 5, -2.5, math.inf, "text", b"", b"\x00\xff", [], (1, "a"), {"a": [1, {3: None}]}, True]
        for value in values_:
            result = hvd.broadcast_object(value if hvd.rank() == root else "mine", root, name="any")
            assert equal(result, value), (result, value)
    tensor = torch.arange(6).view(2, 3)
    assert equal(hvd.broadcast_object({"state": tensor}, 0), {"state": tensor})
    large = bytes(range(256)) * (1 << 16)  # 16 MiB
    assert hvd.broadcast_object(large if hvd.rank() == 0 else None, 0) == large
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(hvd.size())]
    assert hvd.allgather_object("x" * hvd.rank(), name="any") == ["x" * rank for rank in range(hvd.size())]

    names = argparse.Namespace(lr=0.1, data=Path("data"), sizes={1, 2}, started=datetime.date(2024, 2, 29))
    assert hvd.broadcast_object(names if hvd.rank() == 0 else None, 0) == names
    seen = [{"step": np.int64(rank), "loss": np.full((2, 3), rank, np.float32)} for rank in range(hvd.size())]
    for mine, theirs in zip(seen, hvd.allgather_object(seen[hvd.rank()]), strict=True):
        assert type(theirs["step"]) is np.int64
        assert theirs["step"] == mine["step"]
        assert theirs["loss"].dtype == np.float32
        assert np.array_equal(theirs["loss"], mine["loss"])

    class Custom:
        pass

    last = hvd.size() - 1
    with refused(ValueError, f"rank {last}", "a Custom cannot be sent", "never pickled"):
        hvd.broadcast_object(Custom() if hvd.rank() == last else None, last)
    with refused(ValueError, f"rank {last}", "dtype object", "never pickled"):
        hvd.allgather_object(np.array([None]) if hvd.rank() == last else 1)
    assert hvd.broadcast_object(hvd.rank(), last) == last


# ----------------------------------------------------------------------------------------------------------- training


class Net(torch.nn.Module):
    """Two heads; in float64, so that sums of ranks and of batches are the same up to 1e-12."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(6, 8)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(8, 2) for _ in range(2)])
        self.double()

    def forward(self, inputs, head=0):
        return self.heads[head](torch.tanh(self.body(inputs)))


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def batch(step, rank, size=4):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def plain(model, kind, steps, losses, lr=0.05):
    """One process with everybody's losses: the average over ranks of each one's ``losses(model, step, rank)``."""
    optimizer = kind(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            loss = losses(model, step, rank)
            if loss is not None:
                (loss / hvd.size()).backward()
        optimizer.step()
    return flat(model)


def close(model, reference, slack=1e-11):
    same_everywhere(flat(model))
    assert torch.allclose(flat(model), reference, rtol=0, atol=slack), (flat(model) - reference).abs().max()


def wrap(model, kind=torch.optim.SGD, lr=0.05, **options):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(kind(model.parameters(), lr=lr), **options)


@case
def training_equals_one_process():
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean() + model(batch(step, rank), 1).sum() * 0.01

    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = Net(seed=hvd.rank())
        optimizer = wrap(model, kind)
        assert isinstance(optimizer, torch.optim.Optimizer)
        for step in range(5):
            optimizer.zero_grad()
            losses(model, step, hvd.rank()).backward()
            optimizer.step()
        close(model, plain(Net(), kind, 5, losses))


@case
def parameters_without_gradients_and_other_heads():
    def losses(model, step, rank):
        if (step + rank) % 3 == 2:
            return None  # this rank skips the step
        return model(batch(step, rank), head=rank % 2).square().mean()

    model = Net(seed=hvd.rank())
    optimizer = wrap(model, torch.optim.Adam)
    for step in range(6):
        optimizer.zero_grad()
        loss = losses(model, step, hvd.rank())
        if loss is not None:
            loss.backward()
        optimizer.step()
    reference = Net()
    plain(reference, torch.optim.Adam, 6, losses)
    close(model, flat(reference))


@case
def alternating_networks():
    makes = [lambda: torch.nn.Linear(6, 6).double(), lambda: torch.nn.Linear(6, 1).double()]
    torch.manual_seed(0)
    generator, judge = (make() for make in makes)
    reference = [torch.nn.Linear(6, 6).double(), torch.nn.Linear(6, 1).double()]
    for model, copy in zip((generator, judge), reference, strict=True):
        copy.load_state_dict(model.state_dict())
    optimizers_ = [wrap(generator), wrap(judge)]
    plain_optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in reference]
    for step in range(6):
        turn = step % 2
        for pair, steppers, ranks in (
            ((generator, judge), optimizers_, [hvd.rank()]),
            (reference, plain_optimizers, range(hvd.size())),
        ):
            for index, model in enumerate(pair):
                model.requires_grad_(index == turn)
                steppers[index].zero_grad()
            for rank in ranks:
                (pair[1](torch.tanh(pair[0](batch(step, rank)))).sum() / len(ranks)).backward()
            assert all((p.grad is None) == (i != turn) for i, m in enumerate(pair) for p in m.parameters())
            steppers[turn].step()
    for model, copy in zip((generator, judge), reference, strict=True):
        close(model, flat(copy))


@case
def clipping_after_synchronize():
    model, reference = Net(), Net()
    optimizer = wrap(model)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        (model(batch(step, hvd.rank())).square().sum() * 100).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain_optimizer.zero_grad()
        for rank in range(hvd.size()):
            (reference(batch(step, rank)).square().sum() * 100 / hvd.size()).backward()
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain_optimizer.step()
        assert torch.allclose(norm, wanted, rtol=1e-12)
        close(model, flat(reference))


@case
def synchronizing_twice_does_no_harm():
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean()

    model = Net()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        losses(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        optimizer.synchronize()
        optimizer.step()  # without skip_synchronize()
    close(model, plain(Net(), torch.optim.SGD, 3, losses))


@case
def names_of_parameters():
    model = Net()

    def make(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    names = list(model.named_parameters())
    with refused(ValueError, "more than once", "body.weight"):
        make(named_parameters=[*names, ("body.weight", names[1][1])])
    with refused(ValueError, "missing", "(2, 8)"):
        make(named_parameters=names[:2])
    with refused(ValueError, "tuples (name, parameter)"):
        make(named_parameters=list(model.parameters()))
    with refused(ValueError, "groups"):
        make(groups="all")
    with refused(ValueError, "num_groups"):
        make(num_groups=-1)
    with refused(ValueError, "backward_passes_per_step"):
        make(backward_passes_per_step=0)
    with refused(ValueError, "MIN"):
        make(op=hvd.Min)
    with refused(ValueError, "Compression.fp16"):
        make(compression="fp16")
    with refused(ValueError, "gradient_predivide_factor"):
        make(op=hvd.Sum, gradient_predivide_factor=2.0)
    if hvd.size() > 1:
        with refused(tr.PlanMismatchError, "body.weight"):
            make(named_parameters=[(f"{hvd.rank()}.{name}", each) for name, each in names])
    make(named_parameters=names, num_groups=2, groups=[[names[0][1]], [names[1][1], names[2][1]]]).close()
    make(groups=3).close()


@case
def without_names_and_with_several_groups():
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean() + model(batch(step, rank), 1).square().mean()

    model, reference = Net(), Net()

    def groups(net):
        return [{"params": net.body.parameters(), "lr": 0.1}, {"params": net.heads.parameters(), "momentum": 0.5}]

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups(model), lr=0.05))
    plain_optimizer = torch.optim.SGD(groups(reference), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        losses(model, step, hvd.rank()).backward()
        optimizer.step()
        plain_optimizer.zero_grad()
        for rank in range(hvd.size()):
            (losses(reference, step, rank) / hvd.size()).backward()
        plain_optimizer.step()
    close(model, flat(reference))


@case
def accumulation_with_remainders():
    """Of 10 batches, so many a step: the last step has fewer."""

    def losses(model, number, rank):
        return model(batch(number, rank)).square().mean()

    for passes in (1, 2, 3, 4):
        model, reference = Net(), Net()
        optimizer = wrap(model, backward_passes_per_step=passes if passes != 4 else 2)
        if passes == 4:
            optimizer.set_backward_passes_per_step(4)
            with refused(ValueError, "from 1"):
                optimizer.set_backward_passes_per_step(0)
        plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
        for begin in range(0, 10, passes):
            numbers = range(begin, min(begin + passes, 10))
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            for number in numbers:
                losses(model, number, hvd.rank()).backward()
                for rank in range(hvd.size()):
                    (losses(reference, number, rank) / hvd.size()).backward()
            optimizer.step()
            plain_optimizer.step()
        close(model, flat(reference))


@case
def sums_predivision_and_compression():
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean()

    model = Net()
    optimizer = wrap(model, op=hvd.Sum, lr=0.05 / hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        losses(model, step, hvd.rank()).backward()
        optimizer.step()
    close(model, plain(Net(), torch.optim.SGD, 3, losses))
    options = [{"gradient_predivide_factor": 2.0}, {"compression": hvd.Compression.fp16}]
    options += [{"compression": hvd.Compression.bf16, "gradient_predivide_factor": float(hvd.size())}]
    for option, slack in zip(options, (1e-11, 3e-4, 3e-3), strict=True):
        model = Net()
        optimizer = wrap(model, **option)
        for step in range(3):
            optimizer.zero_grad()
            losses(model, step, hvd.rank()).backward()
            optimizer.step()
        close(model, plain(Net(), torch.optim.SGD, 3, losses), slack)


@case
def a_step_after_synchronize_warns():
    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean()

    model = Net()
    optimizer = wrap(model)
    shown = []
    for step, form in enumerate(("plain", "synchronized", "skips", "plain", "synchronized twice", "groups")):
        optimizer.zero_grad()
        losses(model, step, hvd.rank()).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if form == "groups":
                assert optimizer.param_groups[0]["params"][0].grad is not None  # waits, but is not the program's wait
            elif form != "plain":
                optimizer.synchronize()
            if form == "synchronized twice":
                optimizer.synchronize()
            with optimizer.skip_synchronize() if form == "skips" else contextlib.nullcontext():
                optimizer.step()
        shown.append(len(caught))
        for each in caught:
            assert "optimizer.step() called without optimizer.skip_synchronize()" in str(each.message)
            assert each.filename == __file__, each
    assert shown == [0, 1, 0, 0, 1, 0], shown
    close(model, plain(Net(), torch.optim.SGD, 6, losses))


@case
def names_that_programs_read():
    model = Net()
    given = dict(model.named_parameters())
    made = [
        (wrap(model), set(given)),
        (hvd.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1)), {f"0.{i}" for i in range(6)}),
        (wrap(Net(), op=hvd.Adasum), set(given)),
    ]
    for optimizer, names in made:
        known = optimizer._parameter_names
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert list(known) == held
        assert set(known.values()) == names
        assert hvd.allgather_object(set(known.values())) == [names] * hvd.size()
    assert made[0][0]._parameter_names == {parameter: name for name, parameter in given.items()}


@case
def sparse_tensors():
    rank, size = hvd.rank(), hvd.size()

    def entries(r):
        """Rank 0 has none; the others share some places."""
        places = [[(3 * r + i) % 7 for i in range(r)]]
        return torch.sparse_coo_tensor(places, torch.full((r, 2), r + 0.5, dtype=torch.float64), (7, 2))

    dense = sum(entries(r).to_dense() for r in range(size))
    for name in ("rows", None):
        for op, wanted in ((hvd.Sum, dense), (hvd.Average, dense / size), (None, dense / size)):
            handle = hvd.sparse_allreduce_async(entries(rank), name=name, op=op)
            result = hvd.synchronize(handle)
            assert result.layout is torch.sparse_coo
            check(result.to_dense(), wanted)
            check(handle().to_dense(), wanted)  # as Horovod's
    with refused(ValueError, "sparse"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense")


@case
def sparse_embeddings():
    rows, width = 12, 3

    def make():
        torch.manual_seed(1)
        return torch.nn.Embedding(rows, width, sparse=True).double()

    def seen(step, rank):
        """Some ranks see nothing in some steps."""
        draw = torch.Generator().manual_seed(10 * step + rank)
        return torch.randint(rows, (0 if (step + rank) % 3 == 1 else 4,), generator=draw)

    for kind in (torch.optim.SparseAdam, torch.optim.SGD):
        for sparse_as_dense in (False, True):
            model, reference = make(), make()
            optimizer = hvd.DistributedOptimizer(
                kind(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=sparse_as_dense
            )
            plain_optimizer = kind(reference.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                model(seen(step, hvd.rank())).square().sum().backward()
                optimizer.step()
                plain_optimizer.zero_grad()
                for rank in range(hvd.size()):
                    (reference(seen(step, rank)).square().sum() / hvd.size()).backward()
                plain_optimizer.step()
            close(model, flat(reference))


@case
def batch_norm_over_the_joint_batch():
    torch.manual_seed(0)
    layer, reference = hvd.SyncBatchNorm(4).double(), torch.nn.BatchNorm2d(4).double()
    sizes = [1 + rank % 3 for rank in range(hvd.size())]
    for step in range(3):
        parts = [torch.randn(n, 4, 3, 2, dtype=torch.float64) + rank for rank, n in enumerate(sizes)]
        upstream = [torch.randn_like(part) for part in parts]
        mine = parts[hvd.rank()].clone().requires_grad_()
        joint = torch.cat(parts).requires_grad_()
        output, wanted = layer(mine), reference(joint)
        before = sum(sizes[: hvd.rank()])
        own = slice(before, before + sizes[hvd.rank()])
        check(output, wanted[own], ulps=1e4, what=f"step {step}")
        output.backward(upstream[hvd.rank()])
        wanted.backward(torch.cat(upstream))
        check(mine.grad, joint.grad[own], ulps=1e4)
    check(hvd.allreduce(layer.weight.grad, op=hvd.Sum), reference.weight.grad, ulps=1e4)
    check(layer.running_mean, reference.running_mean, ulps=1e4)
    check(layer.running_var, reference.running_var, ulps=1e4)
    layer.load_state_dict(torch.nn.BatchNorm1d(4).state_dict())
    assert layer.eval()(torch.ones(2, 4, dtype=torch.float64)).shape == (2, 4)


@case
def an_optimizer_for_some_ranks():
    chosen = halves()[0][0]

    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean()

    model, reference = Net(), Net()
    names = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), names, process_set=chosen)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    ranks = chosen.ranks if chosen.included() else [hvd.rank()]
    for step in range(3):
        optimizer.zero_grad()
        losses(model, step, hvd.rank()).backward()
        optimizer.step()
        plain_optimizer.zero_grad()
        for rank in ranks:
            (losses(reference, step, rank) / len(ranks)).backward()
        plain_optimizer.step()
    assert torch.allclose(flat(model), flat(reference), rtol=0, atol=1e-12)


@case
def adasum_of_updates():
    for named in (True, False):
        model, reference = Net(), [Net() for _ in range(hvd.size())]
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters() if named else None, op=hvd.Adasum)
        starts = [parameter.detach().clone() for parameter in model.parameters()]
        for rank, net in enumerate(reference):
            net(batch(0, rank)).square().mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.05).step()
        model(batch(0, hvd.rank())).square().mean().backward()
        optimizer.synchronize()
        optimizer.set_backward_passes_per_step(2)
        with refused(ValueError, "Adasum"), optimizer.skip_synchronize():
            pass
        optimizer.step()
        for index, (parameter, start) in enumerate(zip(model.parameters(), starts, strict=True)):
            changes = [list(net.parameters())[index].detach() - start for net in reference]
            check(parameter.data, start + adasum_of(changes), ulps=1e4)
        same_everywhere(flat(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), None, hvd.Compression.fp16, op=hvd.Adasum)
    assert ["Adasum" in str(each.message) for each in caught] == [True]


# -------------------------------------------------------------------------------------------------------------- joins


@case
def ranks_with_fewer_batches():
    """Each rank is the first, and the last, to have no more data; once under new names and once under known ones."""
    size = hvd.size()
    for turn in range(2 * size):
        counts = [1 + (rank + turn) % size * min(size, 4) // size for rank in range(size)]
        names = [f"{name}{turn % size}" for name in "wxyz"]
        for step in range(counts[hvd.rank()]):
            alive = [rank for rank in range(size) if counts[rank] > step]
            mine = torch.full((3,), hvd.rank() + 1.0)
            check(hvd.allreduce(mine, op=hvd.Sum, name=names[0]), torch.full((3,), sum(r + 1.0 for r in alive)))
            # What has joined counts in the divisor.
            check(hvd.allreduce(mine, name=names[1]), torch.full((3,), sum(r + 1.0 for r in alive) / size))
            check(hvd.allreduce(mine, op=hvd.Max, name=names[2]), torch.full((3,), max(alive) + 1.0))
            pair = hvd.grouped_allreduce([mine, mine[:1].long()], op=hvd.Sum, name=names[3])
            check(pair[1], torch.tensor([sum(r + 1 for r in alive)]))
            check(hvd.allreduce(mine[:1] * 0), torch.zeros(1))
            hvd.barrier()
        last = hvd.join()
        assert counts[last] == max(counts)
        assert hvd.allgather_object(last) == [last] * size
    assert hvd.join(device=-1) in range(size)
    check(hvd.allgather(torch.ones(1)), torch.ones(size))


@case
def training_with_fewer_batches():
    size = hvd.size()
    for turn in range(0, size, max(1, size // 3)):
        counts = [2 + (rank + turn) % size for rank in range(size)]
        models = [Net(), Net(seed=1)]
        optimizers_ = [wrap(model, lr=0.05) for model in models]  # both are joined

        def losses(model, step, rank):
            return model(batch(step, rank)).square().mean() if step < counts[rank] else None  # noqa: B023

        for step in range(counts[hvd.rank()]):
            for model, optimizer in zip(models, optimizers_, strict=True):
                optimizer.zero_grad()
                losses(model, step, hvd.rank()).backward()
                optimizer.step()
            active = sum(count > step for count in counts)
            check(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="loss"), torch.full((1,), float(active)))
        last = hvd.join()
        assert counts[last] == size + 1
        for seed, model in enumerate(models):
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            close(model, plain(Net(seed=seed), torch.optim.SGD, size + 1, losses))
        for optimizer in optimizers_:
            optimizer.close()
        hvd.join()  # with none in use


@case
def what_cannot_go_on_without_data_is_refused():
    if hvd.size() == 1:
        return
    if hvd.rank() == hvd.size() - 1:
        hvd.join()
    else:
        # Whether the joining is known here yet or not: this one waits for the rank that never comes.
        with refused(tr.UnsupportedError, "'rows'", f"rank(s) {hvd.size() - 1} have joined"):
            hvd.allgather(torch.ones(2), name="rows")
        with refused(tr.UnsupportedError, "have joined"):
            hvd.broadcast(torch.ones(2), 0, name="from 0")
        with refused(tr.UnsupportedError, "have joined"):
            hvd.alltoall(torch.ones(hvd.size()), name="exchange")
        with refused(tr.UnsupportedError, "have joined"):
            hvd.reducescatter(torch.ones(hvd.size()), name="scatter")
        check(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="sum"), torch.full((2,), hvd.size() - 1.0))
        hvd.join()
    check(hvd.allgather(torch.ones(2), name="rows"), torch.ones(2 * hvd.size()))


# ------------------------------------------------------------------------------------------------ another way to begin


@case
def on_the_programs_own_process_group():
    """What NCCL carries out on accelerators, gloo carries out here."""
    hvd.shutdown()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    hvd.init(transport="torch", timeout_s=TIMEOUT_S)
    assert hvd.gloo_enabled()
    rank, size = hvd.rank(), hvd.size()
    inputs = everybody((7,), torch.float32)
    check(hvd.allreduce(inputs[rank], op=hvd.Sum), total(inputs))
    check(hvd.allgather(torch.full((rank, 2), rank), name="x"), torch.cat([torch.full((r, 2), r) for r in range(size)]))
    check(hvd.broadcast(inputs[rank], size - 1), inputs[size - 1])
    check(hvd.alltoall(torch.arange(size) + rank), torch.arange(size) + rank)
    check(hvd.reducescatter(torch.ones(size), op=hvd.Sum), torch.full((1,), float(size)))
    assert hvd.allgather_object(rank) == list(range(size))
    _, part = halves()
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=part), torch.full((2,), float(part.size())))

    def losses(model, step, rank):
        return model(batch(step, rank)).square().mean() if step < 3 + rank else None

    model = Net(seed=rank)
    optimizer = wrap(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3 + rank):
        optimizer.zero_grad()
        losses(model, step, rank).backward()
        optimizer.step()
    last = hvd.join()
    assert last == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    close(model, plain(Net(), torch.optim.SGD, 2 + size, losses))
    hvd.SyncBatchNorm(3)(torch.ones(2, 3) * rank).sum().backward()
    tensor = inputs[rank].double()
    check(hvd.allreduce(tensor, op=hvd.Adasum), adasum_of([each.double() for each in inputs]), ulps=1e4)
    hvd.shutdown()
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------------- main


def say(event, **facts):
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


def main():
    """Until there are no more names."""
    torch.set_num_threads(1)
    with tr.init(name="referee", timeout_s=3 * TIMEOUT_S) as referee:
        for line in sys.stdin:
            referee.barrier()
            begin, failure = time.monotonic(), None
            try:
                hvd.init(timeout_s=TIMEOUT_S)
                CASES[line.strip()]()
            except BaseException:
                failure = traceback.format_exc()
            hvd.shutdown()
            say("case", failure=failure, seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main()
