"""The fake accelerator of ``tests/helpers``, case by case; ``tests/processes/test_fake_accelerator.py`` asks for them.

It is started and asked by ``fake_accelerator.asked``.
"""

import copy
import io
import threading

import fake_accelerator
import pytest
import torch
from fake_accelerator import asked

CASES = {}


def case(function):
    """Make a function known."""
    CASES[function.__name__] = function
    return function


def wrong(attempt):
    """How many of the attempts did not give the value that they should have; each attempt gets another value."""
    outcomes = [bool((attempt(float(number)) == number).all()) for number in range(1, 6)]
    torch.accelerator.synchronize("fake:0")
    torch.accelerator.synchronize("fake:1")
    return outcomes.count(False)


def check(attempt, late):
    """Without its wait ``attempt`` fails each time if jobs of the kind ``late`` are late; with it, at no delay."""
    fake.lazy(late)
    assert wrong(lambda value: attempt(value, waits=False)) == 5
    check_right(lambda value: attempt(value, waits=True))


def check_right(attempt):
    for kind in fake_accelerator.KINDS:
        fake.lazy(kind)
        assert wrong(attempt) == 0
    fake.delays(0.002, 0.002)
    assert wrong(attempt) == 0
    fake.delays(0.0, 0.0)


def pinned(elements=100):
    return torch.empty(elements, pin_memory=True)


def on_device(value, index=0):
    made = torch.full((100,), value, device=f"fake:{index}")
    torch.accelerator.synchronize(f"fake:{index}")
    return made


# --------------------------------------------------------------------------------------------------------- a device


@case
def torch_knows_two_devices():
    assert torch.accelerator.current_accelerator().type == "fake"
    assert torch.accelerator.device_count() == torch.fake.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    with torch.fake.device(1):
        assert torch.empty(1, device="fake").device == torch.device("fake:1")
        assert torch.accelerator.current_stream() == torch.fake.default_stream(1)
    assert torch.fake.current_device() == 0
    side = torch.Stream(device="fake:1")
    with side:
        assert torch.accelerator.current_stream("fake:1") == side
        assert torch.fake.current_stream() == side
    assert torch.accelerator.current_stream("fake:1") == torch.fake.default_stream(1)


def trained(device, make_optimizer):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers)
    batches = torch.randn(3, 8, 5)
    model.to(device)
    optimizer = make_optimizer(model.parameters())
    ready = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    torch.manual_seed(4)
    for batch in batches:
        optimizer.zero_grad()
        model(batch.to(device)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert len(ready) == 3 * 6
    assert {gradient.grad.device for gradient in ready} == {torch.device(device)}
    return torch.cat([each.detach().cpu().flatten() for each in (*model.parameters(), *model.buffers())])


@case
def training_has_the_bits_of_the_cpu():
    makers = (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    )
    fake.delays(0.0005, 0.0001)
    for make in makers:
        on_cpu = trained("cpu", make)
        assert torch.equal(on_cpu, trained("fake:0", make))
        assert torch.equal(on_cpu, trained("fake:1", make))
    fake.delays(0.0, 0.0)


@case
def views_types_and_indices_are_those_of_the_cpu():
    ours, theirs = torch.arange(24.0, device="fake").view(4, 6), torch.arange(24.0).view(4, 6)
    for change in (
        lambda t: t.t()[1:4:2].contiguous(),
        lambda t: t[torch.tensor([2, 0], device=t.device)],
        lambda t: t[t > 7],
        lambda t: t.to(torch.bfloat16).view(torch.int16),
        lambda t: t.to(torch.int32) % 5,
        lambda t: torch.cat([t[:, 1], t[0]]).sort().values,
        lambda t: t.clone().index_add_(1, torch.tensor([1, 1], device=t.device), t[:, :2]),
        lambda t: torch.stack(torch._foreach_mul([t, t + 1], 3.0)),
        lambda t: t.clone().resize_(2, 2),
        lambda t: t.new_zeros(3).copy_(t[:3, 5]),
        lambda t: t.topk(3, dim=1).indices,
        lambda t: t.unfold(1, 3, 2),
    ):
        assert torch.equal(change(ours).cpu(), change(theirs))
    part = ours.clone()
    part[:, 2] = part[:, 3] * 2  # a column of poison while the others stand
    assert torch.equal(part.cpu(), theirs.index_copy(1, torch.tensor([2]), theirs[:, 3:4] * 2))
    assert torch.equal(copy.deepcopy(ours).cpu(), theirs)


@case
def sparse_gradients_have_the_bits_of_the_cpu():
    def train(device):
        torch.manual_seed(5)
        table = torch.nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 1 + step], device=device)).square().sum().backward()
            rows = table.weight.grad.coalesce()
            table.weight.grad = torch.sparse_coo_tensor(rows.indices(), rows.values() * 2, rows.shape)
            optimizer.step()
        return table.weight.detach().cpu(), table.weight.grad.to_dense().cpu()

    for ours, theirs in zip(train("fake:1"), train("cpu"), strict=True):
        assert torch.equal(ours, theirs)


@case
def mixed_precision_and_files():
    model = torch.nn.Linear(3, 2).to("fake:1")
    scaler, optimizer = torch.amp.GradScaler("fake"), torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("fake", dtype=torch.bfloat16):
        outcome = model(torch.ones(4, 3, device="fake:1"))
    assert outcome.dtype == torch.bfloat16
    scaler.scale(outcome.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.bias.grad.cpu(), torch.full((2,), 4.0))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="fake:0")["weight"]
    assert loaded.device == torch.device("fake:0")
    assert torch.equal(loaded.cpu(), model.weight.cpu())


# ------------------------------------------------------------------------------------------- a missing wait is poison


@case
def a_copy_to_the_host_ends_later():
    memory = pinned()

    def attempt(value, *, waits):
        source = on_device(value)
        memory.copy_(source, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().synchronize()
        return memory.clone()

    check(attempt, late="to_host")


@case
def a_copy_to_the_device_reads_its_source_later():
    def attempt(value, *, waits):
        memory = pinned().fill_(value)
        target = torch.empty(100, device="fake").copy_(memory, non_blocking=True)
        if waits:
            event = torch.accelerator.current_stream().record_event()
            event.synchronize()
            assert event.query()
        memory.fill_(-1.0)
        return target.cpu()

    check(attempt, late="to_device")


@case
def a_kernel_is_seen_by_another_stream_after_its_event():
    side = torch.Stream(device="fake:0")

    def attempt(value, *, waits):
        made = torch.full((100,), value / 2, device="fake") * 2
        if waits:
            side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            seen = made + 0
        side.synchronize()
        return seen.cpu()

    check(attempt, late="kernels")


@case
def a_kernel_must_not_change_what_another_stream_copies():
    side, memory = torch.Stream(device="fake:0"), pinned()

    def attempt(value, *, waits):
        source = on_device(value)
        with side:
            memory.copy_(source, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        source.fill_(-1.0)
        side.synchronize()
        return memory.clone()

    check(attempt, late="to_host")


@case
def devices_copy_to_each_other_in_the_order_of_both_streams():
    def attempt(value):
        made = torch.full((100,), value / 2, device="fake:0") * 2
        there = made.to("fake:1", non_blocking=True)
        made.fill_(-1.0)
        return (there + 0).cpu()

    check_right(attempt)


@case
def a_stream_is_in_order_without_waits():
    first, second = pinned(), pinned()

    def attempt(value):
        device = torch.full((100,), value, device="fake")
        first.copy_(device, non_blocking=True)
        device.copy_(second, non_blocking=True)  # its poison comes after the copy above has read
        torch.accelerator.synchronize()
        return first.clone()

    check_right(attempt)


# ------------------------------------------------------------------------------------------------------------- memory


@case
def freed_memory_of_a_device_waits_for_recorded_streams_alone():
    side, memory = torch.Stream(device="fake:0"), pinned()

    def attempt(value, *, waits):
        source = on_device(value)
        with side:
            memory.copy_(source, non_blocking=True)
        if waits:
            source.record_stream(side)
        del source
        side.synchronize()
        return memory.clone()

    check(attempt, late="to_host")


@case
def freed_pinned_memory_waits_for_the_copies_of_its_tensor():
    def attempt(value, *, waits):
        memory = pinned().fill_(value)
        source = memory if waits else torch.from_numpy(memory.numpy())
        target = torch.empty(100, device="fake").copy_(source, non_blocking=True)
        del memory, source
        return target.cpu()

    check(attempt, late="to_device")


@case
def new_memory_is_poison():
    assert torch.isnan(torch.empty(10, device="fake").cpu()).all()
    assert torch.isnan(pinned()).all()
    assert (torch.empty(10, dtype=torch.int32, device="fake").cpu() == -1).all()


@case
def memory_alive_is_counted_and_can_be_refused():
    torch.accelerator.synchronize()
    device, host = fake.count("device_memory"), fake.count("pinned_memory")
    tensor, memory = torch.empty(1000, device="fake:1"), pinned(1000)
    assert fake.count("device_memory") == device + 4032  # in multiples of 64 bytes
    assert fake.count("pinned_memory") == host + 4032
    with fake.limited(device_bytes=0, pinned_bytes=0):
        with pytest.raises(torch.OutOfMemoryError, match="fake out of memory"):
            torch.empty(1, device="fake")
        with pytest.raises(torch.OutOfMemoryError, match="out of pinned memory"):
            pinned()
        assert fake.register(tensor.data_ptr(), 100) == 2
    del tensor, memory
    assert (fake.count("device_memory"), fake.count("pinned_memory")) == (device, host)


@case
def memory_that_exists_can_be_pinned():
    array = torch.arange(100.0).numpy()
    address = array.__array_interface__["data"][0]
    memory = torch.from_numpy(array)
    assert not memory.is_pinned()
    assert fake.register(address, array.nbytes) == 0
    assert fake.register(address + 40, 4) == 712
    assert memory.is_pinned()
    assert memory[50:].is_pinned()
    unpinned = fake.count("unpinned")
    target = memory.to("fake", non_blocking=True)
    assert torch.equal(target.cpu(), torch.arange(100.0))
    assert fake.count("unpinned") == unpinned
    assert fake.unregister(address) == 0
    assert fake.unregister(address) == 713
    assert not memory.is_pinned()
    runtime = torch.fake.cudart()
    assert runtime.cudaHostRegister(address, array.nbytes, 0) == 0
    assert memory.is_pinned()
    assert runtime.cudaHostUnregister(address) == 0


# ------------------------------------------------------------------------------------------------------------- counts


@case
def bytes_copied_are_counted():
    def changes(copy_it):
        names = ("to_device", "to_host", "between", "unpinned")
        before = [fake.count(name) for name in names]
        copy_it()
        return tuple(fake.count(name) - value for name, value in zip(names, before, strict=True))

    device, memory = on_device(1.0), torch.ones(100)
    assert changes(lambda: device.copy_(memory)) == (400, 0, 0, 0)
    assert changes(lambda: device.copy_(pinned(), non_blocking=True)) == (400, 0, 0, 0)
    assert changes(lambda: memory.copy_(device, non_blocking=True)) == (0, 400, 0, 400)
    assert changes(lambda: device.to("fake:1")) == (0, 0, 400, 0)
    assert changes(lambda: device + device) == (0, 0, 0, 0)
    assert changes(lambda: memory.to(torch.float16).copy_(device)) == (0, 200, 0, 0)


@case
def waits_of_the_host_are_listed_with_their_threads():
    device, memory = on_device(1.0), pinned()
    fake.take_waits()
    memory.copy_(device, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    other = torch.Stream(device="fake")
    other.wait_event(event)
    device.add_(1.0)
    event.query()
    assert fake.take_waits() == []
    event.synchronize()
    other.synchronize()
    torch.accelerator.synchronize()
    device.cpu()
    memory.copy_(device)
    device[0].item()
    torch.ones(100).copy_(device, non_blocking=True)  # not pinned
    kinds = ["event", "stream", "device", "copy", "copy", "aten::_local_scalar_dense", "copy"]
    assert fake.take_waits() == [(kind, "MainThread") for kind in kinds]
    stops = threading.Event()

    def wait():
        event.synchronize()
        stops.wait()

    thread = threading.Thread(target=wait, name="other")
    thread.start()
    waits = []
    while not waits:
        waits = fake.take_waits()
    stops.set()
    thread.join()
    assert waits == [("event", "other")]


@case
def contexts_are_made_by_use_and_by_leaving_a_stream():
    """In a process of its own, which has used no device."""
    assert fake.contexts() == set()
    with torch.fake.device(1):
        side = torch.Stream(device="fake:1")
        with side:
            torch.ones(10, device="fake:1").add_(1.0)
    assert torch.fake.current_device() == 0
    assert fake.contexts() == {1}
    with side:
        pass
    assert fake.contexts() == {0, 1}


torch.set_num_threads(1)
fake = asked.loaded()
asked.answer(CASES)
