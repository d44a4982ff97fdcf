"""Operations on tensors of the fake accelerator, case by case; ``tests/processes/test_staging.py`` asks for them.

It is started and asked by ``fake_accelerator.asked``.
"""

import gc
import logging
import threading

import pytest
import torch
from fake_accelerator import asked

import totalreduce as tr
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.groups.mesh import MeshCollectives

CASES = {}
SIZES = (1, 1000, 200_000)


def case(function):
    """Make a function known."""
    CASES[function.__name__] = function
    return function


def numbers(seed, count=1000, dtype=torch.float32):
    """Values of one rank and round, in host memory."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (made * 50).to(dtype)


def on_device(tensor, index=None):
    """A late copy: a kernel of the device's stream writes it."""
    made = torch.empty_like(tensor, device=f"fake:{rank % 2 if index is None else index}")
    made.copy_(tensor.pin_memory(), non_blocking=True)
    return made


def slow(tensor):
    """A tensor that a stream is still writing for some 50 ms: of 20 copies, half take a random time of up to 10 ms."""
    fake.delays(0.01, 0.0, seed=rank)
    made, source = torch.empty_like(tensor, device="fake:0"), tensor.pin_memory()
    for _ in range(20):
        made.copy_(source, non_blocking=True)
    return made


def same(operation, *tensors):
    """Carry an operation out on host tensors, then on those of a device; compare all tensors afterwards."""
    here = [tensor.clone() for tensor in tensors]
    there = [on_device(tensor) for tensor in tensors]
    operation(*here)
    operation(*there)
    for expected, found in zip(here, there, strict=True):
        assert torch.equal(found.cpu(), expected)


# ------------------------------------------------------------------------------------------------------- collectives


@case
def reductions():
    for count in SIZES:
        for op in (tr.ReduceOp.SUM, tr.ReduceOp.AVG, tr.ReduceOp.MAX):
            same(lambda x, op=op: group.allreduce(x, name="r", op=op).wait(), numbers(rank, count))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        same(lambda x: group.allreduce(x, name="types").wait(), numbers(rank, dtype=dtype))
    for root in range(size):
        same(lambda x, root=root: group.reduce(x, root=root, name="root").wait(), numbers(rank))


@case
def movements():
    for count in SIZES:
        mine = numbers(rank, count)
        for root in range(size):
            same(lambda x, root=root: group.broadcast(x, root=root, name="b"), mine)
        same(lambda out, x: group.allgather(out, x, name="g").wait(), torch.zeros(size * count), mine)
        blocks = [numbers(10 * rank + other, count) for other in range(size)]
        same(lambda out, *x: group.reduce_scatter(out, x, name="s").wait(), torch.zeros(count), *blocks)
        received = [torch.zeros(count) for _ in range(size)]
        same(lambda *x: group.alltoall(x[size:], x[:size], name="a").wait(), *blocks, *received)
        same(lambda x, *out: group.gather(out if rank == 0 else None, x, root=0, name="to").wait(), mine, *received)
        same(lambda out, *x: group.scatter(out, x if rank == 0 else None, root=0, name="from").wait(), mine, *blocks)


@case
def messages():
    if size == 1:
        return
    sent = numbers(5)
    for source in (0, None):
        if rank == 0:
            group.send(on_device(sent), dst=1).wait()
        elif rank == 1:
            received = torch.empty(1000, device="fake:1")
            work = group.recv(received, src=source)
            work.wait()
            assert torch.equal(received.cpu(), sent)
            assert work.source == 0


@case
def tensors_that_are_not_contiguous_or_have_no_elements():
    same(lambda x: group.allreduce(x[::3], name="strided").wait(), numbers(rank))
    same(lambda x: group.allreduce(x.view(10, 100).t(), name="transposed").wait(), numbers(rank))
    same(lambda x: group.allreduce(x[:0], name="empty").wait(), numbers(rank))
    with pytest.raises(tr.UnsupportedError, match="expanded"):
        group.allreduce(torch.zeros(1, device="fake:0").expand(4))


@case
def prepared_operations_begin_again():
    x, expected = torch.zeros(1000, device="fake:0"), torch.empty(1000)
    prepared = group.prepare_allreduce(x, name="prepared")
    for step in range(10):
        x.copy_(numbers(10 * step + rank).pin_memory(), non_blocking=True)
        prepared.start().wait()
        expected.copy_(numbers(10 * step + rank))
        group.allreduce(expected, name="prepared").wait()
        assert torch.equal(x.cpu(), expected)


# -------------------------------------------------------------------------------------- devices, and whose turn it is


@case
def host_memory_on_one_rank_and_a_device_on_the_other():
    expected = numbers(rank)
    group.allreduce(expected, name="mixed").wait()
    x = numbers(rank) if rank == 0 else on_device(numbers(rank))
    group.allreduce(x, name="mixed").wait()
    assert torch.equal(x.cpu(), expected)


@case
def tensors_of_several_devices_in_one_call():
    outputs = [torch.zeros(1000, device=("fake:0", "fake:1", "cpu")[other % 3]) for other in range(size)]
    for source in (numbers(rank), on_device(numbers(rank), 1)):
        for output in outputs:
            output.zero_()
        group.allgather(outputs, source).wait()
        for other, output in enumerate(outputs):
            assert torch.equal(output.cpu(), numbers(other))


@case
def memory_of_results_on_several_devices_is_read_before_it_is_written_again():
    fake.delays(0.02, 0.0, seed=rank)
    rounds = []
    for step in range(20):
        outputs = [torch.zeros(1000, device=f"fake:{other % 2}") for other in range(size)]
        ended = threading.Event()  # no stream waits for the copies, as with ``wait``
        work = group.allgather(outputs, numbers(10 * step + rank), name="two devices")
        work.on_done(lambda _, ended=ended: ended.set())
        assert ended.wait(20.0)
        rounds.append((outputs, work))
    for step, (outputs, work) in enumerate(rounds):
        work.wait()
        for other, output in enumerate(outputs):
            assert torch.equal(output.cpu(), numbers(10 * step + other))


@case
def operations_without_names_keep_their_order():
    for step in range(5):
        device, host, last = on_device(numbers(step)), numbers(step + 1), on_device(numbers(step + 2))
        works = [group.allreduce(each, op=tr.ReduceOp.SUM) for each in (device, host, last)]
        for work in reversed(works):
            work.wait()
        for index, each in enumerate((device, host, last)):
            torch.testing.assert_close(each.cpu(), size * numbers(step + index))


@case
def a_name_in_flight_is_refused_while_its_tensors_are_copied():
    x = slow(torch.ones(1000))
    work = group.allreduce(x, name="twice")
    with pytest.raises(tr.ConfigurationError, match="'twice' is already in flight"):
        group.allreduce(torch.zeros(1000), name="twice")
    work.wait()
    assert x.tolist() == [float(size)] * 1000


@case
def memory_in_flight_is_refused():
    x = slow(numbers(rank))
    work = group.allreduce(x, name="first")
    with pytest.raises(tr.ConfigurationError, match="shares memory with 'first'"):
        group.allreduce(x[10:20], name="second")
    work.wait()


@case
def a_later_operation_on_the_same_tensor_waits_for_the_result():
    ordered = group.subgroup(range(size), name="ordered")
    ordered.keep_order()
    for step in range(5):
        x = on_device(numbers(step))
        works = [ordered.allreduce(x, name=f"{index}", op=tr.ReduceOp.AVG) for index in range(4)]
        works[-1].wait()
        torch.testing.assert_close(x.cpu(), numbers(step))


# ------------------------------------------------------------------------------------------------------------- waits


@case
def no_call_waits_for_a_kernel():
    x = torch.zeros(1000, device="fake:0") + rank
    group.allreduce(x, name="waits").wait()
    torch.accelerator.synchronize("fake:0")
    fake.take_waits()
    works = []
    for _ in range(4):
        x = torch.zeros(1000, device="fake:0") + rank
        works.append(group.allreduce(x, name=f"waits{len(works)}"))
    mine = threading.current_thread().name
    assert [kind for kind, thread in fake.take_waits() if thread == mine] == []
    for work in works:
        work.wait()
    assert [kind for kind, thread in fake.take_waits() if thread == mine] == []


@case
def another_stream_may_wait_for_the_result():
    side = torch.Stream(device="fake:0")
    for step in range(5):
        x = on_device(numbers(step), 0)
        work = group.allreduce(x, name="side", op=tr.ReduceOp.AVG)
        with side:
            work.wait()
            doubled = x * 2
        side.synchronize()
        torch.testing.assert_close(doubled.cpu(), 2 * numbers(step))


@case
def done_means_that_the_result_is_there():
    for step in range(5):
        x = on_device(numbers(step))
        work = group.allreduce(x, name="done", op=tr.ReduceOp.AVG)
        while not work.done():
            pass
        side = torch.Stream(device=x.device)
        with side:
            copy = x.clone()
        side.synchronize()
        torch.testing.assert_close(copy.cpu(), numbers(step))


@case
def a_tensor_that_the_program_deletes_keeps_its_memory():
    for step in range(5):
        works = [group.allreduce(on_device(numbers(step)), name=f"gone{index}") for index in range(3)]
        others = [on_device(numbers(90)) for _ in range(10)]
        results = [work.wait() for work in works]
        for each in results:
            torch.testing.assert_close(each.cpu(), size * numbers(step))
        del others


@case
def a_tensor_that_is_given_other_memory_is_an_error():
    x = slow(numbers(rank))
    work = group.allreduce(x, name="moved")
    x.data = torch.empty_like(x)
    with pytest.raises(tr.TotalReduceError, match="was given other memory"):
        work.wait()


# ------------------------------------------------------------------------------------------------------------- memory


@case
def bytes_are_copied_once_each_way():
    x = on_device(numbers(rank, 100_000))
    torch.accelerator.synchronize(x.device)
    unpinned = fake.count("unpinned")
    before = fake.count("to_host"), fake.count("to_device")
    group.allreduce(x, name="bytes").wait()
    assert (fake.count("to_host") - before[0], fake.count("to_device") - before[1]) == (400_000, 400_000)
    out = torch.empty(size * 100_000, device=x.device)
    before = fake.count("to_host"), fake.count("to_device")
    group.allgather(out, x, name="bytes too").wait()
    copied = fake.count("to_host") - before[0], fake.count("to_device") - before[1]
    assert copied == (400_000, size * 400_000)
    assert fake.count("unpinned") == unpinned


@case
def many_steps_take_no_more_memory():
    def steps(count):
        for step in range(count):
            x = on_device(numbers(0, 500 + 10 * (step % 7)))
            group.allreduce(x, name="many").wait()
        gc.collect()
        torch.accelerator.synchronize(x.device)
        return fake.count("pinned_memory")

    fake.delays(0.0, 0.0)
    first = steps(50)
    assert steps(300) <= first


@case
def pinned_memory_that_is_refused_is_a_warning():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("totalreduce").addHandler(handler)
    x, y = on_device(numbers(rank, 3_000_000)), numbers(rank, 3_000_000)
    with fake.limited(pinned_bytes=0):
        group.allreduce(x, name="large").wait()
    group.allreduce(y, name="large").wait()
    logging.getLogger("totalreduce").removeHandler(handler)
    assert torch.equal(x.cpu(), y)
    assert len([text for text in records if "refuses to pin" in text]) == 1


class Inside:
    """The engine in the role of a library that works on the device, which gloo cannot and NCCL does."""

    def __init__(self, natives):
        self.world_size, self.device = natives.world_size, torch.device("fake")
        self.reduce_scatter, self.close, self._natives = natives.reduce_scatter, natives.close, natives

    def allgather(self, output, tensor):
        return self._natives.allgather(output, tensor.clone())  # NCCL takes a part of the output; the engine does not

    def split(self, ranks, timeout_s):
        return Inside(self._natives.split(ranks, timeout_s))


@case
def a_mesh_waits_for_kernels_and_copies():
    """All ranks are on one host here. Each kind of job in turn is late, so that each wait that is missing shows."""
    if size == 1:  # a host with one rank is no mesh
        return
    part = group.subgroup(range(size))
    inside, whole = (EngineCollectives(part.control.subgroup(range(size)).operations) for _ in range(2))
    part.use(MeshCollectives(whole, Inside(inside), [0] * size, 30.0), CoordinationConfig())
    for late in ("kernels", "to_device", "to_host"):
        fake.lazy(late)
        for count, op in ((200_000 * size, tr.ReduceOp.SUM), (500_007, tr.ReduceOp.AVG)):
            values = [numbers(of, count).round() for of in range(size)]
            x = torch.zeros(count, device="fake:0")
            x += on_device(values[rank], 0)  # a kernel that the mesh must wait for
            work = part.allreduce(x, name=f"{late} {count}", op=op)
            result = work.wait() * 1  # a kernel that must wait for the mesh
            total = torch.stack(values).sum(0)
            wanted = total if op is tr.ReduceOp.SUM else total / size
            assert torch.allclose(result.cpu(), wanted), (late, count)
    part.close()


@case
def no_context_on_a_device_that_is_not_used():
    assert fake.contexts() <= {0, 1}
    threads = [thread.name for thread in threading.enumerate()]
    assert sum("stager" in name for name in threads) <= 1


fake = asked.loaded()
group = tr.init()
rank, size = group.rank, group.world_size
asked.answer(CASES, begin=lambda: fake.delays(0.005, 0.001, seed=rank))
