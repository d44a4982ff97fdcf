"""Callbacks of futures that start collectives: ranks run them in different orders, and find each other all the same.

The ranks are threads, each with a process group of its own; both kinds of orders are forced with events.
"""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.c10d import futures as followed
from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.tensors.work import operation_of
from totalreduce.testing import run_ranks

PATIENCE_S = 20.0


def process_group(group: tr.Group, seconds: float = PATIENCE_S) -> Any:
    """Return the process group over a rank's group."""
    made: Any = ProcessGroupTotalReduce(
        group, dist.HashStore(), timedelta(seconds=seconds), devices=["cpu"], others={}, close_others=lambda: None
    )
    made.setGroupName("7")
    made.setGroupDesc("default_pg")
    return made


def run(world_size: int, body: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Run ``body(process group)`` on ranks."""

    def on_rank(group: tr.Group) -> Any:
        made = process_group(group)
        try:
            return body(made)
        finally:
            made.shutdown()

    return run_ranks(world_size, on_rank, **options)


def future_of(made: Any, value: float = 1.0, count: int = 4) -> Any:
    """Start an allreduce; return its future."""
    return made.allreduce([torch.full((count,), value)]).get_future()


def first(future: Any) -> float:
    """Return the first element of the tensor of a future."""
    return future.value()[0][0].item()


def chain(futures: list[Any], callback: Callable[[Any, int], Any]) -> list[Any]:
    """Return the values of the callbacks that get the futures and their numbers.

    A callback of an operation that has ended runs where it is registered. So that callbacks may wait for each other,
    each is registered by a thread of its own.
    """
    values: dict[int, Any] = {}

    def register(index: int) -> None:
        values[index] = futures[index].then(lambda future: callback(future, index)).wait()

    threads = [threading.Thread(target=register, args=(index,)) for index in range(len(futures))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [values[index] for index in range(len(futures))]


class InOrder:
    """Lets callbacks go on in an order that the test chooses."""

    def __init__(self, order: list[int]) -> None:
        self._events = {index: threading.Event() for index in order}
        self._before = dict(zip(order[1:], order[:-1], strict=True))

    def wait_for_turn(self, index: int) -> None:
        if index in self._before:
            assert self._events[self._before[index]].wait(PATIENCE_S)

    def has_started(self, index: int) -> None:
        self._events[index].set()


def orders(count: int, rank: int) -> list[int]:
    """Return the order in which a rank's callbacks start their collectives: another one on each rank."""
    indices = list(range(count))
    return [indices, indices[::-1], [*indices[1::2], *indices[::2]]][rank]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shapes", ["equal", "different"])
def test_what_callbacks_start_belongs_to_their_operations(size: int, shapes: str) -> None:
    def body(made: Any) -> list[float]:
        turns = InOrder(orders(8, made.rank()))

        def callback(future: Any, index: int) -> float:
            assert first(future) == size
            turns.wait_for_turn(index)
            second = future_of(made, float(index), index + 1 if shapes == "different" else 4)
            turns.has_started(index)
            return second.wait()[0][-1].item()

        return chain([future_of(made) for _ in range(8)], callback)

    assert run(size, body) == [[float(size * index) for index in range(8)]] * size


@pytest.mark.parametrize("early", [0, 1])
def test_a_callback_may_be_registered_before_the_end_or_after_it(early: int) -> None:
    registered = threading.Event()

    def body(made: Any) -> tuple[list[float], bool]:
        if made.rank() != early:
            assert registered.wait(PATIENCE_S)  # so the operations of the other rank are pending
        works = [made.allreduce([torch.ones(3)]) for _ in range(4)]
        if made.rank() != early:
            for work in works:
                work.wait()
        threads = []

        def callback(index: int) -> float:
            threads.append(threading.get_ident())
            return future_of(made, float(index)).wait()[0][0].item()

        order = range(4) if made.rank() == early else reversed(range(4))
        chained = {index: works[index].get_future().then(lambda _, index=index: callback(index)) for index in order}
        if made.rank() == early:
            registered.set()
        values = [chained[index].wait() for index in range(4)]
        return values, threading.get_ident() in threads

    said = run(2, body)
    assert [values for values, _ in said] == [[0.0, 2.0, 4.0, 6.0]] * 2
    assert [at_once for _, at_once in said] == [rank != early for rank in range(2)]


def test_callbacks_of_callbacks() -> None:
    depth, width = 5, 3

    def body(made: Any) -> list[list[float]]:
        results: list[list[float]] = [[] for _ in range(width)]
        ended = [threading.Event() for _ in range(width)]
        turns = InOrder(orders(width, made.rank()))

        def go_on(future: Any, index: int, level: int) -> None:
            results[index].append(first(future))
            if level == depth:
                ended[index].set()
            else:
                following = future_of(made, 10.0 * index + level)
                following.add_done_callback(lambda future: go_on(future, index, level + 1))

        def begin(future: Any, index: int) -> None:
            turns.wait_for_turn(index)
            go_on(future, index, 0)
            turns.has_started(index)

        chain([future_of(made) for _ in range(width)], begin)
        for event in ended:
            assert event.wait(PATIENCE_S)
        return results

    expected = [[2.0, *(2.0 * (10.0 * index + level) for level in range(depth))] for index in range(width)]
    assert run(2, body) == [expected] * 2


def test_callbacks_that_callbacks_register_on_one_future() -> None:
    # Three callbacks, in different orders, each register two more on a future that they share.
    def body(made: Any) -> list[list[float]]:
        turns, shared = InOrder(orders(3, made.rank())), future_of(made)
        shared.wait()

        def register(_: Any, index: int) -> list[Any]:
            turns.wait_for_turn(index)
            started = [
                shared.then(lambda _, value=10.0 * index + number: future_of(made, value)).wait() for number in range(2)
            ]
            turns.has_started(index)
            return started

        started = chain([future_of(made) for _ in range(3)], register)
        return [[future.wait()[0][0].item() for future in each] for each in started]

    assert run(2, body) == [[[0.0, 2.0], [20.0, 22.0], [40.0, 42.0]]] * 2


def test_a_long_chain() -> None:
    length = 200

    def body(made: Any) -> tuple[list[float], int]:
        future, values = future_of(made), []

        def link(future: Any, index: int) -> Any:
            values.append(first(future))
            return future_of(made, float(index)).wait()

        for index in range(length):
            future = future.then(lambda before, index=index: link(before, index))
        values.append(future.wait()[0][0].item())
        return values, max(map(len, (record.name for record in made.group._runner.engine.table.names)))

    for values, longest in run(2, body):
        assert values == [2.0, *(2.0 * index for index in range(length))]
        assert longest < 100


def test_a_callback_deep_in_others_has_a_short_name() -> None:
    def body(made: Any) -> str:
        names = []

        def callback(level: int) -> None:
            if level == 30:
                work = made.allreduce([torch.ones(1)])
                names.append(operation_of(work._works[0]).name)
                work.wait()
                return
            future_of(made).then(lambda _: callback(level + 1)).wait()

        future_of(made).then(lambda _: callback(1)).wait()
        return names[0]

    expected = "all_reduce #0 in a callback of all_reduce #0 of the default group, 30 callbacks deep"
    assert run(2, body) == [expected] * 2


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_callbacks_that_wait_do_not_use_up_the_threads(count: int) -> None:
    # On rank 0 no callback goes on before all have started; then each waits for a collective of its own.
    registered = threading.Event()

    def body(made: Any) -> tuple[list[float], float]:
        all_wait = threading.Barrier(count)

        def callback(index: int) -> float:
            if made.rank() == 0:
                all_wait.wait(PATIENCE_S)
            return torch.futures.wait_all([future_of(made, float(index), 1)])[0][0].item()

        if made.rank() == 1:
            assert registered.wait(PATIENCE_S)
        futures = [future_of(made) for index in range(count)]
        chained = [future.then(lambda _, index=index: callback(index)) for index, future in enumerate(futures)]
        registered.set()
        begin = time.monotonic()
        return [future.wait() for future in chained], time.monotonic() - begin

    for values, seconds in run(2, body):
        assert values == [2.0 * index for index in range(count)]
        assert seconds < PATIENCE_S / 2


def test_a_callback_may_wait_for_the_future_of_another_callback_and_by_functions_of_torch() -> None:
    def body(made: Any) -> list[float]:
        head = future_of(made)
        one = head.then(lambda _: future_of(made, 3.0).wait())
        two = head.then(lambda _: torch.futures.wait_all([one, future_of(made, 4.0)]))
        three = future_of(made, 5.0).then(lambda future: [future.value(), *two.wait()])
        return [tensors[0][0].item() for tensors in three.wait()]

    assert run(2, body) == [[10.0, 6.0, 8.0]] * 2


def test_a_callback_of_several_operations() -> None:
    def body(made: Any) -> tuple[list[float], str]:
        turns = InOrder(orders(2, made.rank()))

        def callback(_: Any, index: int) -> float:
            turns.wait_for_turn(index)
            work = made.allreduce([torch.full((2,), float(index + 1))])
            names.append((index, operation_of(work._works[0]).name))
            turns.has_started(index)
            work.wait()
            return work.result()[0][0].item()

        names: list[tuple[int, str]] = []
        parts = [[future_of(made) for _ in range(3)] for _ in range(2)]
        return chain([torch.futures.collect_all(each) for each in parts], callback), dict(names)[1]

    name = "all_reduce #0 in a callback of all_reduce #3 of the default group and 2 more"
    assert run(2, body) == [([2.0, 4.0], name)] * 2


def test_an_error_of_a_callback_is_that_of_its_future() -> None:
    def body(made: Any) -> list[str]:
        def fail(_: Any) -> None:
            raise KeyError("in the callback")

        failed = future_of(made).then(fail)
        after = failed.then(lambda future: future.value())
        texts = []
        for attempted in (
            failed.wait,
            after.wait,
            torch.futures.collect_all([future_of(made), failed]).wait,
            lambda: torch.futures.wait_all([failed]),
        ):
            with pytest.raises(RuntimeError) as caught:
                attempted()
            texts.append(str(caught.value))
        assert first(future_of(made).then(lambda future: future).wait()) == 2.0
        return texts

    for texts in run(2, body):
        assert len(texts) == 4
        for text in texts:
            assert "KeyError: 'in the callback'" in text


def test_a_mismatch_in_a_callback_says_which_callback() -> None:
    def body(made: Any) -> str:
        future = future_of(made)
        future.then(lambda _: None)
        chained = future.then(lambda _: made.allreduce([torch.ones(3 + made.rank())]).wait())
        with pytest.raises(RuntimeError) as caught:
            chained.wait()
        assert first(future_of(made).then(lambda future: future).wait()) == 2.0
        return str(caught.value)

    for text in run(2, body):
        assert "all_reduce #0 in callback #1 of all_reduce #0 of the default group: rank " in text
        assert "float32[3]" in text
        assert "float32[4]" in text


def test_a_mismatch_says_which_one_of_the_collectives_of_a_callback_it_is() -> None:
    def body(made: Any) -> str:
        def callback(_: Any) -> None:
            both = [made.allreduce([torch.ones(count)]) for count in (3, 3 + made.rank())]
            for work in both:
                work.wait()

        with pytest.raises(RuntimeError) as caught:
            future_of(made).then(callback).wait()
        assert future_of(made).wait()[0][0].item() == 2.0, "both ranks have their error before one of them leaves"
        return str(caught.value)

    for text in run(2, body):
        assert "all_reduce #1 in a callback of all_reduce #0 of the default group: rank " in text


def test_a_callback_counts_the_collectives_of_each_group_by_itself() -> None:
    """Ranks that are no members of a smaller group know nothing of what the callback starts there."""

    def body(made: Any) -> list[float]:
        half = [0, 1] if made.rank() < 2 else [2, 3]
        part = process_group(made.group.subgroup(half, name=str(half)))

        def callback(_: Any) -> list[float]:
            groups = [part, part, made] if made.rank() < 2 else [made]
            works = [future_of(group, float(index)) for index, group in enumerate(groups, 4 - len(groups))]
            return [work.wait()[0][0].item() for work in works]

        found = future_of(made).then(callback).wait()
        part.shutdown()
        return found

    assert run(4, body) == [[2.0, 4.0, 12.0]] * 2 + [[12.0]] * 2


def test_all_ranks_of_a_collective_must_have_the_callback() -> None:
    def body(made: Any) -> tuple[str, float]:
        half = [0, 1] if made.rank() < 2 else [2, 3]
        part = process_group(made.group.subgroup(half, name=str(half)))
        chained = future_of(part).then(lambda _: made.allreduce([torch.ones(2)]).wait())
        with pytest.raises(RuntimeError) as caught:
            chained.wait()
        again = future_of(made).then(lambda _: future_of(part, 3.0).wait()).wait()
        part.shutdown()
        return str(caught.value), again[0][0].item()

    for rank, (text, again) in enumerate(run(4, body)):
        half = "0, 1" if rank < 2 else "2, 3"
        assert f"calls a collective of ranks 0, 1, 2, 3, but only the ranks {half} have this callback" in text
        assert again == 6.0, "the ranks of a smaller group all have the callback"


def test_callbacks_of_messages() -> None:
    # The two ranks of a message have its callback. Messages that callbacks send are matched by their tags alone.
    def body(made: Any) -> list[float]:
        me, other, got = made.rank(), 1 - made.rank(), torch.zeros(1)
        # From any rank: the sender is known at the end only.
        work = made.send([torch.tensor([7.0])], other, 3) if me == 0 else made.recv([got], None, 3)
        total = work.get_future().then(lambda _: future_of(made, 5.0).wait()[0][0].item()).wait()
        taken = [torch.zeros(1) for _ in range(3)]

        def exchange(index: int) -> None:
            sent = made.send([torch.tensor([10.0 * me + index])], other, 20 + index)
            made.recv([taken[index]], other, 20 + index).wait()
            sent.wait()

        chained = [future_of(made).then(lambda _, index=index: exchange(index)) for index in range(3)]
        for future in chained:
            future.wait()
        return [total, *(tensor.item() for tensor in taken)]

    assert run(2, body) == [[10.0, 10.0, 11.0, 12.0], [10.0, 0.0, 1.0, 2.0]]


def test_a_callback_that_is_not_followed_cannot_start_collectives() -> None:
    def body(made: Any) -> str:
        said: list[str] = []
        ran = threading.Event()

        def callback() -> None:
            try:
                made.allreduce([torch.ones(1)])
            except ValueError as error:
                said.append(str(error))
            ran.set()

        made._calls.callbacks.run(callback)
        assert ran.wait(PATIENCE_S)
        return said[0]

    for text in run(2, body):
        assert "Register the callback with work.get_future().then(...)" in text


def test_prepared_operations_in_callbacks_need_names() -> None:
    def body(made: Any) -> list[str]:
        prepared = made.group.prepare_allreduce(torch.ones(2))
        named = made.group.prepare_allreduce(torch.ones(2), name="w")
        texts = []
        for attempted in (prepared.start, lambda: made.group.prepare_allreduce(torch.ones(2))):
            with pytest.raises(RuntimeError) as caught:
                future_of(made).then(lambda _, attempted=attempted: attempted()).wait()
            texts.append(str(caught.value))
        assert future_of(made).then(lambda _: named.start().wait()[0].item()).wait() == 2.0
        return texts

    for texts in run(2, body):
        for text in texts:
            assert "a callback of a future uses a prepared operation without a name" in text


def test_operations_of_a_group_of_the_library_have_their_callbacks_too() -> None:
    def body(made: Any) -> list[float]:
        turns = InOrder(orders(3, made.rank()))

        def callback(_: Any, index: int) -> float:
            turns.wait_for_turn(index)
            work = made.group.allreduce(torch.full((index + 1,), float(index)))
            turns.has_started(index)
            return work.wait()[-1].item()

        return chain([future_of(made) for _ in range(3)], callback)

    assert run(2, body) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_over_other_transports_and_nothing_is_kept(transport: str) -> None:
    def body(made: Any) -> tuple[float, int, int]:
        total = 0.0
        for step in range(30):
            chained = [
                future_of(made, 1.0, 10).then(lambda _, step=step, index=index: future_of(made, float(step)).wait())
                for index in range(5)
            ]
            total += sum(future.wait()[0][0].item() for future in chained)
        table = made.group._runner.engine.table
        return total, len(table.names.once), len(table.names)

    gc.collect()
    before = len(followed._followed)
    for total, once, names in run(2, body, transport=transport):
        assert total == 5 * 2.0 * sum(range(30))
        assert once == 0
        assert names == 1, "the operations of the program, which are counted"
    gc.collect()
    assert len(followed._followed) <= before


def test_errors_and_reports_name_the_threads_that_share_a_group(caplog: pytest.LogCaptureFixture) -> None:
    met = threading.Barrier(2)

    def body(made: Any) -> list[str]:
        texts = []
        if made.rank() == 0:  # two threads, and this is the order of their calls here
            thread = threading.Thread(target=lambda: made.allreduce([torch.ones(3)]).wait(), name="checkpoint")
            thread.start()
            thread.join()
        else:
            made.allreduce([torch.ones(3)]).wait()
        met.wait(PATIENCE_S)
        with pytest.raises(dist.DistBackendError) as caught:
            made.allreduce([torch.ones(3 + made.rank())]).wait()
        texts.append(str(caught.value))
        if made.rank() == 0:
            pending, deadline = made.allreduce([torch.ones(2)]), time.monotonic() + PATIENCE_S
            while "stalled" not in caplog.text and time.monotonic() < deadline:
                with pytest.raises(dist.DistBackendError) as late:
                    pending.wait(timedelta(seconds=0.3))
            texts += [str(late.value), caplog.text]
        met.wait(PATIENCE_S)
        return texts

    zero, one = run(2, body, engine=tr.EngineConfig(timeout_s=PATIENCE_S, stall_warning_s=0.2))
    advice = re.compile(
        r"The threads 'checkpoint', '[^']+' of this process have called collectives of this group, .*"
        r"dist\.new_group\(\), dcp\.async_save\(\.\.\., process_group=\.\.\.\)"
    )
    assert advice.search(zero[0])
    assert "The threads" not in one[0]
    assert advice.search(zero[1])
    assert re.search(r"rank 0: stalled: all_reduce #2 of the default group .*" + advice.pattern, zero[2])
