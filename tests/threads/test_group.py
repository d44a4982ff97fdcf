"""The group as its user sees it, ranks as threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import totalreduce as tr
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

CONFIG = tr.EngineConfig(timeout_s=30.0, segment_bytes=1024, segment_bytes_min=256)


def test_in_place_and_at_once() -> None:
    together = threading.Barrier(2)

    def body(group: tr.Group) -> tuple[bool, list[float], bool]:
        tensor = torch.arange(4.0) + 10 * group.rank
        if group.rank == 1:
            together.wait(30)
        work = group.allreduce(tensor, name="w")
        early = work.done()
        if group.rank == 0:
            together.wait(30)
        result = work.wait(timeout_s=20)
        assert work.done()
        assert work.exception() is None
        assert work.wait() is result
        return early, tensor.tolist(), result is tensor

    results = run_ranks(2, body)
    assert results[0] == (False, [10.0, 12.0, 14.0, 16.0], True)
    assert results[1][1:] == ([10.0, 12.0, 14.0, 16.0], True)


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_tensors_that_are_not_contiguous(transport: str) -> None:
    def body(group: tr.Group) -> list[list[float]]:
        base = torch.arange(24.0).reshape(4, 6) * (group.rank + 1)
        views = [base.t().clone().t(), base[:, ::2], base[1:3, 1::2], base.flip(0), base[0, 0]]
        works = [group.allreduce(view, name=f"view {index}") for index, view in enumerate(views[1:3], 1)]
        works.append(group.allreduce(views[0], name="view 0"))
        works.append(group.allreduce(views[4].clone(), name="scalar"))
        for work in works:
            work.wait()
        return [base.flatten().tolist(), views[0].flatten().tolist()]

    whole = torch.arange(24.0).reshape(4, 6)
    for rank, (base, transposed) in enumerate(run_ranks(3, body, transport=transport)):
        wanted = whole * (rank + 1)
        wanted[:, ::2] = whole[:, ::2] * 6
        wanted[1:3, 1::2] = whole[1:3, 1::2] * 6
        assert transposed == (whole * 6).flatten().tolist()
        assert base == wanted.flatten().tolist()


def test_a_gradient_is_reduced_without_a_history() -> None:
    def body(group: tr.Group) -> bool:
        tensor = torch.ones(3, requires_grad=True)
        group.allreduce(tensor).wait()
        return tensor.grad_fn is None and tensor.tolist() == [2.0] * 3

    assert run_ranks(2, body) == [True, True]


def test_broadcast_blocks_unless_told_otherwise() -> None:
    def body(group: tr.Group) -> list[list[int]]:
        first = torch.full((5,), group.rank)
        group.broadcast(first, root=1)
        second = torch.full((2, 2), group.rank)
        group.broadcast(second, root=2, async_op=True).wait()
        return [first.tolist(), second.flatten().tolist()]

    assert run_ranks(3, body) == [[[1] * 5, [2] * 4]] * 3


def test_barrier_runs_what_was_deferred_first() -> None:
    def body(group: tr.Group) -> list[str]:
        happened: list[str] = []
        remove = group.on_quiesce(lambda: happened.append("flushed"))
        group.barrier()
        happened.append("barrier")
        remove()
        group.barrier()
        return happened

    assert run_ranks(2, body) == [["flushed", "barrier"]] * 2


def test_many_barriers_leave_nothing_behind() -> None:
    def body(group: tr.Group) -> int:
        for _ in range(200):
            group.barrier()
        return len(group._runner.engine.table.names)

    assert max(run_ranks(2, body)) <= 64


def test_several_threads_of_one_rank() -> None:
    def body(group: tr.Group) -> list[float]:
        def one(index: int) -> float:
            tensor = torch.full((300,), float(index + group.rank))
            return float(group.allreduce(tensor, name=f"tensor {index}", priority=index % 3).wait()[-1])

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, range(40)))

    assert run_ranks(2, body, engine=CONFIG) == [[2.0 * index + 1 for index in range(40)]] * 2


def test_two_groups_in_one_process_do_not_meet() -> None:
    first, second = make_groups(2), make_groups(2)
    tensors = {id(group): torch.tensor([float(index)]) for index, group in enumerate((*first, *second))}
    works = [group.allreduce(tensors[id(group)], name="w") for group in (*first, *second)]
    assert [work.wait().item() for work in works] == [1.0, 1.0, 5.0, 5.0]
    for group in (*first, *second):
        group.close(1.0)


def test_a_deadline_names_the_rank_that_is_missing_and_the_operation_goes_on() -> None:
    gone_on = threading.Event()

    def body(group: tr.Group) -> str:
        tensor = torch.ones(1)
        if group.rank == 1:
            assert gone_on.wait(30)
            group.allreduce(tensor, name="late").wait()
            return ""
        work = group.allreduce(tensor, name="late")
        with pytest.raises(tr.DeadlineExceededError) as caught:
            work.wait(timeout_s=0.4)
        assert not work.done()
        gone_on.set()
        assert work.wait().item() == 2.0
        return str(caught.value)

    message = run_ranks(2, body)[0]
    assert "rank 0 waited 0.4 s for 'late'" in message
    assert "never submitted by rank(s) 1" in message


def test_a_rank_that_leaves_is_named() -> None:
    left = threading.Event()

    def body(group: tr.Group) -> tuple[int, int] | None:
        group.barrier()
        if group.rank == 2:
            group.close()
            left.set()
            return None
        assert left.wait(30)
        with pytest.raises(tr.PeerLost) as pending:
            group.allreduce(torch.ones(1), name="w").wait()
        with pytest.raises(tr.PeerLost) as later:
            group.allreduce(torch.ones(1), name="x")
        return pending.value.rank, later.value.rank

    results = run_ranks(3, body)
    assert results == [(2, 2), (2, 2), None]


def test_a_closed_group() -> None:
    [group] = make_groups(1)
    with group:
        assert group.allreduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]
    group.close()
    with pytest.raises(tr.GroupClosed, match="has closed the group; make a new one"):
        group.allreduce(torch.ones(2))


def test_closing_frees_those_who_wait() -> None:
    first, second = make_groups(2)
    work = first.allreduce(torch.ones(1), name="never")
    waiting = threading.Thread(target=lambda: first.close(2.0))
    waiting.start()
    with pytest.raises(tr.GroupClosed, match="'never' pending"):
        work.wait(timeout_s=20)
    waiting.join(20)
    assert not waiting.is_alive()
    second.close(1.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tensor": [1.0]}, "is a list, not a torch.Tensor"),
        ({"tensor": torch.ones(2, dtype=torch.complex64)}, "has dtype torch.complex64; it must be one of uint8, int8"),
        ({"tensor": torch.ones(2).to_sparse()}, "use .to_dense"),
        ({"tensor": torch.empty(2, device="meta")}, "is on meta and has no values"),
        ({"tensor": torch.ones(1).expand(3)}, "several elements share memory"),
        ({"tensor": torch.ones(2, dtype=torch.bool), "op": tr.ReduceOp.AVG}, "AVG of bool is not defined"),
        ({"tensor": torch.ones(2), "op": tr.ReduceOp.NONE}, "NONE of float32 is not defined"),
        ({"tensor": torch.ones(2), "priority": 2**31}, "does not fit into 32 bits"),
        ({"tensor": torch.ones(2), "timeout_s": 0}, "timeout_s must be positive"),
        ({"tensor": torch.ones(2), "name": "x" * 2000}, "longer than 1024 bytes"),
    ],
)
def test_what_cannot_be_reduced_says_why(arguments: dict[str, object], match: str) -> None:
    [group] = make_groups(1)
    with group:
        with pytest.raises(tr.ConfigurationError, match=match):
            group.allreduce(**{"name": "w", **arguments})
        assert group.allreduce(torch.ones(1), name="w").wait().item() == 1.0


def test_roots_must_exist() -> None:
    [group] = make_groups(1)
    with group, pytest.raises(ValueError, match="root 1 is no rank of a group of 1"):
        group.broadcast(torch.ones(1), root=1)


def test_the_same_name_twice_in_flight() -> None:
    def body(group: tr.Group) -> str:
        group.barrier()
        message = ""
        if group.rank == 0:
            work = group.allreduce(torch.ones(1), name="w")
            with pytest.raises(ValueError, match="'w' is already in flight") as caught:
                group.allreduce(torch.ones(1), name="w")
            message = str(caught.value)
        else:
            threading.Event().wait(0.05)
            work = group.allreduce(torch.ones(1), name="w")
        work.wait()
        assert group.allreduce(torch.ones(1), name="w").wait().item() == 2.0
        return message

    assert "rank 0" in run_ranks(2, body)[0]


def test_statistics() -> None:
    def body(group: tr.Group) -> tr.Statistics:
        for _ in range(3):
            group.allreduce(torch.ones(1000), name="w").wait()
        group.barrier()
        return group.statistics()

    for statistics in run_ranks(2, body, engine=CONFIG):
        assert statistics.operations == 4
        assert statistics.payload_bytes == 3 * 4000
        assert statistics.bytes_sent > 3 * 4000
        assert statistics.messages_sent == statistics.messages_received
        assert statistics.floating_bytes == 0
        assert statistics.floating_bytes_peak <= CONFIG.floating_bytes_max
        assert 0.0 <= statistics.hidden_share <= 1.0
        assert statistics.active_s > 0.0
        assert statistics.mismatches == statistics.stalls == statistics.refused_connections == 0
        assert statistics.as_dict()["operations"] == 4


def test_observers_see_what_happens() -> None:
    class Watch(tr.Observer):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def submitted(self, name: str, iteration: int, now: float, *, num_bytes: int, priority: int) -> None:
            self.seen.append(("submitted", f"{name} {iteration} {num_bytes} {priority}"))

        def done(self, name: str, iteration: int, now: float, *, error: BaseException | None) -> None:
            self.seen.append(("done", f"{name} {iteration} {error}"))

    def body(group: tr.Group) -> list[tuple[str, str]]:
        watch = Watch()
        group.observers.append(watch)
        for _ in range(2):
            group.allreduce(torch.ones(2), name="w", priority=3).wait()
        return watch.seen

    seen = [("submitted", "w 0 8 3"), ("done", "w 0 None"), ("submitted", "w 1 8 3"), ("done", "w 1 None")]
    assert run_ranks(2, body) == [seen, seen]


@pytest.mark.parametrize("compute", ["inline", "thread"])
def test_both_ways_to_compute_give_the_same(compute: str) -> None:
    def body(group: tr.Group) -> bytes:
        tensors = [torch.randn(5000, generator=torch.Generator().manual_seed(group.rank + i)) for i in range(5)]
        works = [group.allreduce(tensor, name=f"tensor {i}") for i, tensor in enumerate(tensors)]
        return b"".join(work.wait().numpy().tobytes() for work in works)

    results = run_ranks(3, body, compute=compute, engine=CONFIG)
    reference = run_ranks(3, body, compute="inline")
    assert len(set(results)) == 1
    assert len(results[0]) == len(reference[0])


def test_a_barrier_that_ran_out_of_time_can_be_waited_for_again() -> None:
    late = threading.Event()

    def ranks(group: tr.Group) -> None:
        if group.rank == 1:
            assert late.wait(20)
        else:
            with pytest.raises(tr.DeadlineExceededError, match="barrier"):
                group.barrier(timeout_s=0.2)
            late.set()
        group.barrier(timeout_s=10)  # the same one on both ranks
        group.barrier(timeout_s=10)  # and the next one

    run_ranks(2, ranks)


def failing(happened: list[str], name: str, error: type[BaseException]) -> Callable[[], None]:
    def callback() -> None:
        happened.append(name)
        raise error(name)

    return callback


def test_every_callback_of_the_end_runs_and_the_first_failure_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    happened: list[str] = []
    (group,) = make_groups(1, transport="inproc", engine=CONFIG)
    group.on_quiesce(lambda: happened.append("quiesce 1"))
    group.on_quiesce(failing(happened, "quiesce 2", ValueError))
    group.on_quiesce(lambda: happened.append("quiesce 3"))
    group.at_close(failing(happened, "close 1", OSError))
    group.at_close(failing(happened, "close 2", KeyboardInterrupt))
    group.at_close(lambda: happened.append("close 3"))
    with pytest.raises(ValueError, match="quiesce 2"):
        group.close()
    assert happened == ["quiesce 1", "quiesce 2", "quiesce 3", "close 1", "close 2", "close 3"]
    # ``_close`` has raised the first failure of its own callbacks, and the second one is in the log.
    logged = [(record.levelname, str(record.exc_info[1])) for record in caplog.records if record.exc_info]
    assert logged == [("ERROR", "close 2"), ("ERROR", "close 1")]
    with pytest.raises(tr.GroupClosed):
        group.allreduce(torch.ones(1))
    group.close()
    assert len(happened) == 6


def test_a_subgroup_too_calls_everything_at_its_end() -> None:
    def body(group: tr.Group) -> list[str]:
        happened: list[str] = []
        part = group.subgroup([0, 1])
        part.on_quiesce(failing(happened, "quiesce", RuntimeError))
        part.at_close(failing(happened, "close 1", OSError))
        part.at_close(lambda: happened.append("close 2"))
        with pytest.raises(RuntimeError, match="quiesce"):
            part.close()
        return [*happened, str(group.allreduce(torch.ones(1)).wait().item())]

    assert run_ranks(2, body) == [["quiesce", "close 1", "close 2", "2.0"]] * 2
