"""What errors of torch.distributed say: names of calls, models that differ, messages, threads that share a group."""

import re
import textwrap

import pytest

START = """
from datetime import timedelta

dist.init_process_group("totalreduce", timeout=timedelta(seconds=60))

def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""
"""


def run(fleet, num_workers, source, **variables):
    """Run a program on some ranks; return what each said last as ``result``."""
    workers = fleet.start(num_workers, START + textwrap.dedent(source), **variables)
    said = [worker.read("result", 60.0) for worker in workers]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
    return said


def test_models_that_differ_are_recognised_in_the_constructor_of_ddp(fleet):
    source = """
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Gain(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(*shape))

    dimensions = error_of(lambda: DDP(Gain(4, 3) if rank == 0 else Gain(12)))
    dist.barrier()
    # Of as many dimensions: torch compares the sizes, and raises an error on rank 1 alone. Rank 0 goes on to copy.
    alone = error_of(lambda: DDP(Gain(4 + rank)))
    if rank == 1:
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), async_op=True)
    dist.all_reduce(after := torch.ones(1))
    say("result", dimensions=dimensions, alone=alone, after=after.item())
    dist.destroy_process_group()
    """
    zero, one = run(fleet, 2, source)
    for facts in (zero, one):
        assert re.search(r"broadcast #1 of the default group: rank \d submitted broadcast", facts["dimensions"])
        assert "DistributedDataParallel compares the models of all ranks here, and they differ" in facts["dimensions"]
        assert "those of rank 0 have 2" in facts["dimensions"]
        assert "those of rank 1 have 1" in facts["dimensions"]
        assert "[(name, tuple(p.shape)) for name, p in model.named_parameters()]" in facts["dimensions"]
        assert facts["after"] == 2.0
    assert "appears not to match sizes of the same param in process 0" in one["alone"]
    assert re.search(r"broadcast #\d+ of the default group: rank \d submitted", zero["alone"])
    assert "rank 1 submitted allgather" in zero["alone"]
    assert "DistributedDataParallel copies the parameters and buffers of one rank to all others here" in zero["alone"]


def test_an_error_in_a_hooks_callback_ends_the_backward_pass_as_it_is(fleet):
    source = """
    from torch import nn

    def fail(future):
        raise KeyError("in a callback")

    def value(future):
        return future.value()[0]

    def differ(future):
        dist.all_reduce(torch.ones(3 + rank))
        return value(future)

    said = []
    for callbacks in ([fail, value], [value, fail], [differ], [value]):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3), bucket_cap_mb=0.00001)

        def hook(state, bucket, callbacks=callbacks):
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            for callback in callbacks:
                future = future.then(callback)
            return future

        model.register_comm_hook(None, hook)
        try:
            model(torch.ones(2, 4)).sum().backward()
            said.append(["", ""])
        except Exception as error:
            said.append([type(error).__name__, str(error)])
        dist.barrier()
    say("result", said=said)
    dist.destroy_process_group()
    """
    for facts in run(fleet, 2, source):
        first, last, mismatch, fine = facts["said"]
        assert first == last == ["KeyError", "'in a callback'"]
        assert mismatch[0] == "DistBackendError"
        assert re.search(r"all_reduce #0 in a callback of all_reduce #\d+ of the default group: rank", mismatch[1])
        assert fine == ["", ""]


def test_messages_that_do_not_come_name_sender_receiver_and_tag(fleet):
    source = """
    import os
    texts = []
    if rank != 2:
        group = dist.group.WORLD
        if rank == 0:
            pending = group.recv([torch.ones(3)], 1, 5)
            texts.append(error_of(lambda: pending.wait(timedelta(seconds=0.3))))
            anybody = group.recv([torch.ones(3)], None, 6)
            texts.append(error_of(lambda: anybody.wait(timedelta(seconds=0.3))))
        else:
            large = group.send([torch.ones(10_000_000)], 0, 7)
            texts.append(error_of(lambda: large.wait(timedelta(seconds=0.3))))
    dist.barrier()
    pair = dist.new_group([1, 2], group_desc="pair")
    if rank == 2:
        late = pair.recv([torch.ones(2, dtype=torch.int64)], 0, 3)
        texts.append(error_of(lambda: late.wait(timedelta(seconds=0.3))))
    dist.barrier()
    say("result", texts=texts)
    os._exit(0)
    """
    zero, one, two = run(fleet, 3, source)
    message, anybody = zero["texts"]
    assert "message from rank 1 to rank 0 with tag 5 of the default group (3 elements of float32, 12 bytes)" in message
    assert "rank 1 has not called send to rank 0" in message
    assert "a message from any rank with tag 6 of the default group" in anybody
    [large] = one["texts"]
    assert "message from rank 1 to rank 0 with tag 7 of the default group (10000000 elements of float32" in large
    assert "rank 0 has not called recv from rank 1" in large
    [late] = two["texts"]
    assert "message from rank 1 to rank 2 with tag 3 of group 'pair' (ranks 1, 2) (2 elements of int64" in late
    assert "rank 1 has not called send to rank 2" in late
    for facts in (zero, one, two):
        for text in facts["texts"]:
            assert "unnamed" not in text


def test_a_checkpoint_thread_beside_collectives_needs_a_group_of_its_own(fleet, tmp_path):
    source = """
    import os
    import torch.distributed.checkpoint as dcp

    pg, state = dist.group.WORLD, {"w": torch.arange(4.0)}
    dist.barrier()
    table = pg.group._runner.engine.table
    before = table._num_submitted

    def save(**options):
        return dcp.async_save(dict(state), checkpoint_id=os.environ["FOLDER"], **options)

    def called(calls):
        # Until so many calls have their place in the order.
        deadline = time.monotonic() + 30
        while table._num_submitted < before + calls and time.monotonic() < deadline:
            time.sleep(0.001)

    if rank == 0:  # the program's collective, and then the first one of the thread
        work = dist.all_reduce(torch.ones(3), async_op=True)
        saving = save()
        called(2)
        say("both called")
    else:
        hear()
        saving = save()
        called(1)
        work = dist.all_reduce(torch.ones(3), async_op=True)
    texts = [error_of(lambda: work.wait(timedelta(seconds=5))), str(saving.exception(30))]
    say("result", texts=texts)
    hear()
    os._exit(0)
    """
    variables = {"FOLDER": str(tmp_path / "state")}
    zero, one = fleet.start(2, START + textwrap.dedent(source), **variables)
    zero.read("both called", 60.0)
    one.tell()
    for worker in (zero, one):
        texts = worker.read("result", 60.0)["texts"]
        [text, *_] = [text for text in texts if "The threads" in text] or [pytest.fail(str(texts))]
        assert "MainThread" in text
        assert "of the default group" in text
        assert "dist.new_group(), dcp.async_save(..., process_group=...)" in text
    for worker in (zero, one):
        worker.tell()
        worker.wait()


def test_a_checkpoint_thread_with_a_group_of_its_own(fleet, tmp_path):
    source = """
    import os
    import torch.distributed.checkpoint as dcp

    group = dist.new_group()
    state = {"w": torch.arange(4.0) + 1, "step": 7}
    saving = dcp.async_save(state, checkpoint_id=os.environ["FOLDER"], process_group=group)
    totals = []
    for step in range(200):
        dist.all_reduce(total := torch.full((3,), float(step)))
        totals.append(total[0].item())
    saving.result(30)
    dist.barrier()
    loaded = {"w": torch.zeros(4), "step": 0}
    dcp.load(loaded, checkpoint_id=os.environ["FOLDER"])
    say("result", totals=totals, w=loaded["w"].tolist(), step=loaded["step"])
    dist.destroy_process_group()
    """
    for facts in run(fleet, 2, source, FOLDER=str(tmp_path / "state")):
        assert facts["totals"] == [2.0 * step for step in range(200)]
        assert facts["w"] == [1.0, 2.0, 3.0, 4.0]
        assert facts["step"] == 7


def test_fsdp_with_a_divide_factor_has_the_gradients_of_one_process(fleet):
    source = """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss(module, rank):
        torch.manual_seed(10 + rank)
        return module(torch.randn(6, 8)).square().sum()

    sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded.set_gradient_divide_factor(3.0)  # torch reduces with PREMUL_SUM(1 / 3)
    loss(sharded, rank).backward()
    alone = model()
    for other in range(dist.get_world_size()):
        loss(alone, other).backward()
    differ = [
        (own.grad.full_tensor() - expected.grad / 3.0).abs().max().item()
        for own, expected in zip(sharded.parameters(), alone.parameters(), strict=True)
    ]
    say("result", differ=differ)
    dist.destroy_process_group()
    """
    for facts in run(fleet, 2, source):
        assert len(facts["differ"]) == 4
        assert max(facts["differ"]) < 1e-5
