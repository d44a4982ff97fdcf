"""The memory of an operation's tensors: its bytes in place, held where it is, and used by one operation at a time."""

import gc
import threading
import weakref

import pytest
import torch

from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    TotalReduceError,
    UnsupportedError,
)
from totalreduce.tensors import dtypes
from totalreduce.tensors.memory import MemoryInFlight, Operands

DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.complex64]


def operands_of(*written, reads=(), name="t"):
    made = Operands(name)
    for tensor in written:
        made.add(tensor, writes=True)
    for tensor in reads:
        made.add(tensor)
    return made


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_in_place(dtype: torch.dtype) -> None:
    whole = torch.arange(24).to(dtype).view(4, 6)
    for tensor in (whole, whole[1:3], whole[2:3, :5], torch.nn.Parameter(whole) if dtype.is_floating_point else whole):
        operands = Operands("t")
        view = operands.add(tensor, writes=True)
        operands.prepare()
        assert (view.format, view.nbytes, view.readonly) == ("B", tensor.numel() * dtype.itemsize, False)
        assert bytes(view) == tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        view[:] = bytes(len(view))
        assert not tensor.detach().any()


def test_the_bytes_keep_the_memory_alive() -> None:
    tensor = torch.full((1000,), 3.0)
    view = Operands("t").add(tensor, writes=True)
    part, alive = view[8:16], weakref.ref(tensor.untyped_storage())
    del tensor, view
    gc.collect()
    assert alive() is not None
    assert torch.frombuffer(part, dtype=torch.float32).tolist() == [3.0, 3.0]
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(
    ("view_of", "flat"),
    [
        pytest.param(lambda numbers: numbers.conj(), [1 - 2j, 3 + 4j], id="conjugate"),
        pytest.param(lambda numbers: numbers.conj().imag, [-2.0, 4.0], id="negative"),
        pytest.param(lambda numbers: numbers.flip(0)[::1].conj().conj(), [3 - 4j, 1 + 2j], id="twice conjugate"),
        pytest.param(lambda numbers: numbers.conj().view(2, 1).expand(2, 1), [1 - 2j, 3 + 4j], id="expanded by one"),
    ],
)
def test_views_that_are_something_else_than_their_memory(view_of, flat, writes: bool) -> None:
    """torch conjugates and negates when it reads: the memory holds other numbers."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    tensor = view_of(numbers)
    operands = Operands("t")
    view = operands.add(tensor, writes=writes)
    operands.prepare()
    values = torch.frombuffer(view, dtype=tensor.dtype)
    assert values.tolist() == flat
    values.mul_(10)
    operands.finish()
    written_in_place = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    expected = [10 * value for value in flat] if writes or written_in_place else flat
    assert tensor.flatten().tolist() == expected


def test_nothing_is_copied_before_prepare() -> None:
    """An earlier operation may still write the tensor: its memory is read when it is this operation's turn."""
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(4)
    operands = Operands("t")
    copied = operands.add(target, writes=True)
    operands.copy(source[:, 1][:1].expand(4), copied)
    strided = operands.add(source[:, 2])
    source += 100
    operands.prepare()
    assert target.tolist() == [101.0] * 4
    assert torch.frombuffer(strided, dtype=torch.float32).tolist() == [102.0, 106.0, 110.0]


def test_tensors_without_memory_or_place_are_refused() -> None:
    zeros = torch._efficientzerotensor((5,))
    with pytest.raises(UnsupportedError, match=r"tensor 't' has no memory .* use \.clone\(\) first"):
        Operands("t").add(zeros)
    with pytest.raises(UnsupportedError, match=r"tensor 't' is expanded: several elements share memory"):
        Operands("t").add(torch.zeros(1).expand(5), writes=True)


def test_nothing_is_nothing() -> None:
    operands = Operands("t")
    assert len(operands.add(torch.empty(3, 0), writes=True)) == 0
    assert (operands.reads, operands.writes) == ([], [])
    operands.prepare()
    operands.finish()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.qint8), r"'t' is quantised .* \.int_repr\(\)"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
            r"'t' is nested; pass its parts",
        ),
        (lambda: torch.ones(3).to_sparse(), r"'t' has layout torch.sparse_coo; use \.to_dense"),
        (lambda: torch.empty(3, device="meta"), r"'t' is on meta"),
        (lambda: [1.0, 2.0], r"'t' is a list, not a torch.Tensor"),
    ],
    ids=["quantised", "nested", "sparse", "meta", "list"],
)
@pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantiz|TypedStorage)")
def test_tensors_that_are_refused(make, words: str) -> None:
    for check in (dtypes.dtype_of, dtypes.moved_dtype_of):
        with pytest.raises(UnsupportedError, match=words):
            check(make(), "t")


# ------------------------------------------------------------------------------------------------------ what is held


def test_a_storage_is_not_resizable_while_it_is_held() -> None:
    tensor = torch.arange(1000.0)
    first, second = operands_of(tensor), operands_of(reads=[tensor[10:]])
    for num_bytes in (0, 4004, 400_000):
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(num_bytes)
    first.finish()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100_000)
    second.finish()
    tensor.untyped_storage().resize_(400_000)
    assert tensor[:1000].tolist() == list(range(1000))


def test_a_tensor_that_torch_could_not_resize_is_an_error() -> None:
    """torch has given it the new shape by then, and there is no memory behind it."""
    tensor = torch.arange(1000.0)
    operands = operands_of(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100_000)
    with pytest.raises(TotalReduceError, match=r"'t' was given other memory .* or resize_\)"):
        operands.finish()


def test_a_storage_that_was_not_resizable_stays_so() -> None:
    tensor = torch.arange(10.0)
    array = tensor.numpy()
    operands_of(tensor).finish()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(1000)
    assert array[3] == 3.0


def test_what_fails_is_held_until_nobody_has_its_bytes() -> None:
    """A transport may still be sending from it."""
    tensor = torch.arange(1000.0)
    operands = Operands("t")
    view = operands.add(tensor)
    del operands
    gc.collect()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100_000)
    del view
    gc.collect()
    tensor.resize_(100_000)


def test_holds_of_many_threads() -> None:
    tensor = torch.arange(1000.0)

    def hold_again_and_again():
        for _ in range(2000):
            operands_of(reads=[tensor]).finish()

    threads = [threading.Thread(target=hold_again_and_again) for _ in range(4)]
    kept = operands_of(tensor)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(400_000)
    kept.finish()
    tensor.untyped_storage().resize_(400_000)


@pytest.mark.parametrize("whole", [torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]], ids=["contiguous", "strided"])
@pytest.mark.parametrize("replace", ["data", "set_"])
def test_a_tensor_with_other_memory_at_the_end(whole: torch.Tensor, replace: str) -> None:
    operands = operands_of(whole, name="w")
    view = operands.add(torch.zeros(1))
    if replace == "data":
        whole.data = torch.ones(4, 4)
    else:
        whole.set_(torch.ones(4, 4))
    with pytest.raises(TotalReduceError, match=r"tensor 'w' was given other memory while the operation was in flight"):
        operands.finish()
    assert len(view) == 4


def test_a_tensor_that_is_only_read_may_be_given_other_memory() -> None:
    tensor = torch.arange(4.0)
    operands = Operands("t")
    view = operands.add(tensor)
    tensor.data = torch.ones(9)
    assert torch.frombuffer(view, dtype=torch.float32).tolist() == [0, 1, 2, 3]
    operands.finish()


# ------------------------------------------------------------------------------------------------------------ overlap

WHOLE = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        (WHOLE, WHOLE, True),
        (WHOLE[:4], WHOLE[4:], False),
        (WHOLE[:5], WHOLE[4:], True),
        (WHOLE[2], WHOLE, True),
        (WHOLE, WHOLE[2], True),
        (WHOLE[:, 1], WHOLE[:, 2], False),
        (WHOLE[:, 1], WHOLE[:, 1:3], True),
        (WHOLE[:, 1], WHOLE[3], True),
        (WHOLE[3], WHOLE[:, 1], True),
        (WHOLE[:, ::2], WHOLE[:, 1::2], False),
        (WHOLE[1:3, 1], WHOLE[4], False),
        (WHOLE[::2, 1], WHOLE[3], False),
        (WHOLE, torch.zeros(8, 8), False),
        (torch.from_numpy(WHOLE.numpy()[1:]), WHOLE[1], True),
        (WHOLE[:0], WHOLE, False),
    ],
)
def test_who_shares_memory(one: torch.Tensor, other: torch.Tensor, shares: bool) -> None:
    for first, second in ((one, other), (other, one)):
        memory = MemoryInFlight()
        memory.claim(operands_of(first, name="first"))
        second_one = operands_of(second, name="second")
        if shares:
            with pytest.raises(ConfigurationError, match=r"tensor 'second' shares memory with 'first', which is in fl"):
                memory.claim(second_one)
        else:
            memory.claim(second_one)


def test_reading_together_is_no_conflict_and_writing_is() -> None:
    memory, tensor = MemoryInFlight(), torch.zeros(10)
    readers = [operands_of(reads=[tensor[index:]], name=f"reader {index}") for index in range(5)]
    for reader in readers:
        memory.claim(reader)
    writer = operands_of(tensor[8:9], name="writer")
    with pytest.raises(ConfigurationError, match="'writer' shares memory with 'reader "):
        memory.claim(writer)
    for reader in readers:
        memory.release(reader)
    memory.claim(writer)
    with pytest.raises(ConfigurationError, match="'reader 0' shares memory with 'writer'"):
        memory.claim(readers[0])
    memory.release(writer)
    memory.claim(readers[0])


def test_what_is_only_read_at_the_beginning() -> None:
    """It must not be under way, and is free again at once."""
    memory, tensor, target = MemoryInFlight(), torch.zeros(10), torch.zeros(10)
    writer = operands_of(tensor, name="writer")
    memory.claim(writer)

    def copying() -> Operands:
        made = Operands("copy")
        made.copy(tensor, made.add(target, writes=True))
        return made

    with pytest.raises(ConfigurationError, match="'copy' shares memory with 'writer'"):
        memory.claim(copying())
    memory.release(writer)
    memory.claim(copying())
    memory.claim(writer)


@pytest.mark.parametrize(
    ("written", "read", "fine"),
    [
        ([WHOLE[0], WHOLE[1]], [WHOLE[2], WHOLE[2]], True),
        ([WHOLE[0], WHOLE[0]], [], False),
        ([WHOLE[0]], [WHOLE[:2]], False),
        ([WHOLE[:, 1]], [WHOLE[:, 2].clone(), WHOLE[3]], False),
        ([WHOLE[:, 1], WHOLE[:, 2]], [], True),
    ],
)
def test_tensors_of_one_operation(written, read, fine: bool) -> None:
    operands = operands_of(*written, reads=read)
    if fine:
        MemoryInFlight().claim(operands)
    else:
        with pytest.raises(ConfigurationError, match=r"'t': two of its tensors share memory"):
            MemoryInFlight().claim(operands)


def test_many_in_flight_against_a_plain_list() -> None:
    """The same answers as from comparing each with each."""
    generator = torch.Generator().manual_seed(7)
    memory, storage, active = MemoryInFlight(), torch.zeros(400), []
    refused = 0
    for _ in range(3000):
        start, length, writes = (int(torch.randint(0, high, (), generator=generator)) for high in (390, 9, 3))
        span = (start, start + length + 1, writes == 0)
        tensor = storage[span[0] : span[1]]
        operands = operands_of(tensor) if span[2] else operands_of(reads=[tensor])
        clash = any((span[2] or theirs[2]) and span[0] < theirs[1] and theirs[0] < span[1] for _, theirs in active)
        try:
            memory.claim(operands)
        except ConfigurationError:
            refused += 1
            assert clash
        else:
            assert not clash
            active.append((operands, span))
        while len(active) > 30 or (active and int(torch.randint(0, 3, (), generator=generator)) == 0):
            operands, _ = active.pop(int(torch.randint(0, len(active), (), generator=generator)))
            memory.release(operands)
    assert 300 < refused < 2700


def test_waiting_for_memory() -> None:
    memory, tensor = MemoryInFlight(), torch.zeros(10)
    first, second = operands_of(tensor, name="first"), operands_of(tensor, name="second")
    memory.claim(first)
    with pytest.raises(DeadlineExceededError, match=r"'second' waited 0\.05 s for 'first', which uses the same memory"):
        memory.claim(second, wait_s=0.05)
    thread = threading.Timer(0.1, memory.release, [first])
    thread.start()
    memory.claim(second, wait_s=10.0)
    thread.join()
    with pytest.raises(ConfigurationError, match="'first' shares memory with 'second'"):
        memory.claim(first)


def test_nothing_passes_an_operation_that_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is free for a moment while the waiting thread is not running; another operation claims it then."""
    memory, tensor = MemoryInFlight(), torch.zeros(10)
    first, second, third = (operands_of(tensor, name=name) for name in ("first", "second", "third"))
    memory.claim(first)
    woken = []

    def wait(_: float) -> None:
        memory._lock.release()
        memory.release(third if woken else first)
        if not woken:
            memory.claim(third)
        woken.append(second in [entry[3] for entry in memory._writes.entries])
        memory._lock.acquire()

    monkeypatch.setattr(memory._released, "wait", wait)
    memory.claim(second, wait_s=10.0)
    assert woken == [False, False]


def test_operands_of_a_further_operation_hold_the_memory_while_it_is_in_flight() -> None:
    tensor = torch.zeros(10)
    first = Operands("t")
    view, place = first.add(tensor, writes=True), first.place
    assert place is not None
    first.finish()
    further = Operands.again(place, tensor)
    tensor.resize_(10)  # not held yet
    further.prepare()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(400)
    view[:] = torch.full((10,), 3.0).view(torch.uint8).numpy().tobytes()
    further.finish()
    assert tensor.tolist() == [3.0] * 10
    tensor.untyped_storage().resize_(400)
    moved = Operands.again(place, tensor)
    assert moved.has_moved == (tensor.data_ptr() != place.span.start)


def test_a_place_keeps_no_memory() -> None:
    tensor = torch.zeros(10)
    operands = Operands("t")
    view, place = operands.add(tensor, writes=True), operands.place
    operands.finish()
    alive = weakref.ref(tensor.untyped_storage())
    del tensor, operands
    gc.collect()
    assert (alive(), len(view), place is None) == (None, 40, False)


@pytest.mark.parametrize(
    "add", [lambda o: o.add(torch.zeros(4, 4)[:, 1], writes=True), lambda o: o.add(torch.zeros(4)), lambda o: None]
)
def test_other_operands_have_no_place(add) -> None:
    operands = Operands("t")
    add(operands)
    assert operands.place is None


@pytest.mark.parametrize("well", [True, False])
def test_what_is_kept_for_the_next_operation_is_let_go_after_a_failure(well: bool) -> None:
    """The memory of an operation that has failed may still be held."""
    kept, memory = {"t": "its place", "other": "another one's"}, MemoryInFlight()
    operands = operands_of(torch.zeros(3), name="t")
    operands.kept_in = kept
    memory.claim(operands)
    operands.end(well=well)
    assert sorted(kept) == (["other", "t"] if well else ["other"])


@pytest.mark.parametrize("well", [True, False])
def test_an_end_releases_the_memory_once(well: bool) -> None:
    """Ctrl-C in the first call leads to a second one."""
    tensor, memory = torch.zeros(4), MemoryInFlight()
    first, other = operands_of(tensor), operands_of(torch.zeros(4))
    memory.claim(first)
    memory.claim(other)  # so that the memory of both is noted
    first.end(well=well)
    again = operands_of(tensor)
    memory.claim(again)
    first.end(well=well)
    with pytest.raises(ConfigurationError, match="in flight"):
        memory.claim(operands_of(tensor))
    again.end(well=True)
    memory.claim(operands_of(tensor))


def test_an_end_that_fails_releases_the_memory() -> None:
    tensor, memory = torch.zeros(4), MemoryInFlight()
    operands = operands_of(tensor)
    memory.claim(operands)
    tensor.data = torch.ones(4)
    with pytest.raises(TotalReduceError, match="other memory"):
        operands.end(well=True)
    assert operands.claimed_in is None


@pytest.mark.parametrize("alone", [True, False])
def test_a_claim_that_fails_notes_nothing(alone: bool) -> None:
    """The end of an operation that has claimed nothing must not release what another one has claimed."""
    tensor, memory = torch.zeros(4), MemoryInFlight()
    first, second = operands_of(tensor), operands_of(tensor)
    if not alone:
        memory.claim(operands_of(torch.zeros(4)))
    memory.claim(first)
    with pytest.raises(ConfigurationError, match="in flight"):
        memory.claim(second)
    assert second.claimed_in is None
    second.end(well=False)
    with pytest.raises(ConfigurationError, match="in flight"):
        memory.claim(operands_of(tensor))
    first.end(well=True)
    memory.claim(second)
    assert second.claimed_in is memory
