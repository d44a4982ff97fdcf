"""What is counted of training steps: where their time goes on each rank, reports, figures of sparse methods."""

import threading
import time

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.groups.steps import Reading
from totalreduce.observe import publisher as publishers
from totalreduce.observe.board import Board
from totalreduce.observe.figures import RankFigures
from totalreduce.observe.publisher import Publisher, figures_of
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.sparse.topka import TopkA
from totalreduce.strategies.averaging import LocalSGD
from totalreduce.testing import run_ranks

#: A pause is long beside the time by which the end of the first step, from which on steps are timed, may be late.
STEPS, PAUSE_S = 4, 0.1
SYNCS = {
    "dense": None,
    "sparse": TopkA(density=0.25),
    "strategy": LocalSGD(period=1),
}


def train(group: Group, sync: object, pause_s: float) -> DistributedOptimizer:
    """Train a small model; rank 1 computes longer."""
    model = torch.nn.Linear(8, 4, bias=False)
    torch.nn.init.constant_(model.weight, 0.1)  # ranks as threads share the generator of random numbers
    feedback = ErrorFeedback(elements_min=0)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=sync, feedback=feedback
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        time.sleep(pause_s * (group.rank == 1))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", SYNCS)
def test_the_ranks_that_wait_for_a_slow_one_are_exposed(kind):
    def rank(group: Group):
        optimizer = train(group, SYNCS[kind], PAUSE_S)
        figures = next(iter(group.meter.sources.values()))()
        optimizer.close()
        return group.meter.totals, figures, dict(group.meter.sources)

    (fast, figures, closed), (slow, _, _) = run_ranks(2, rank)
    assert fast.steps == slow.steps == STEPS
    assert fast.timed_steps == STEPS - 1
    assert closed == {}
    paused_s = (STEPS - 1) * PAUSE_S
    assert 0.7 * paused_s < fast.exposed_s <= fast.step_s  # the first of the pauses may have begun before
    assert slow.step_s - slow.exposed_s > 0.9 * paused_s
    assert slow.exposed_s < 0.5 * fast.exposed_s
    if kind == "sparse":
        assert figures["method"] == "topka"
        assert (figures["selected"], figures["elements"], figures["density"]) == (8, 32, 0.25)
    if kind == "strategy":
        assert (figures["strategy"], figures["local_steps"]) == ("local_sgd", STEPS)


def test_reports_come_after_so_many_steps_and_have_the_bytes_of_links():
    def rank(group: Group):
        reports = []
        remove = group.on_report(reports.append, every=2)
        before = Reading.of(group.operations.runner)
        for number in range(6):
            group.allreduce(torch.ones(1000), name=f"x{number}", op=ReduceOp.SUM).wait()
            group.end_step()
            if number == 4:
                remove()
        with pytest.raises(ConfigurationError, match="every"):
            group.on_report(reports.append, every=0)
        runner = group.operations.runner
        return reports, figures_of(runner, before, Reading.of(runner), 7, 2), group.statistics()

    for number, (reports, figures, statistics) in enumerate(run_ranks(3, rank)):
        assert [(report.step, report.steps) for report in reports] == [(2, 2), (4, 2)]
        assert all(report.bytes_sent > 0 for report in reports)
        assert (figures.seat, figures.incarnation, figures.rank, figures.world_size) == (7, 2, number, 3)
        assert {link.peer for link in figures.links} == {0, 1, 2} - {number}
        assert 0 < sum(link.sent for link in figures.links) <= statistics.bytes_sent
        assert (figures.step, figures.pending) == (6, "")


def test_the_publisher_writes_what_is_in_flight_and_that_the_group_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(publishers, "_JOIN_S", 20.0)  # the last figures are read
    board = Board(tmp_path)

    def rank(group: Group):
        publisher = Publisher(tmp_path, group.rank, interval_s=0.01)
        runner = group.operations.runner
        publisher.follow(runner)
        if group.rank == 0:
            work = group.allreduce(torch.ones(4), name="late")
            give_up_at = time.monotonic() + 10.0
            while not (now := board.read_figures()).get(0) or not now[0].figures.pending:
                assert time.monotonic() < give_up_at
                time.sleep(0.01)
            found = now[0].figures
            group.barrier()
            work.wait()
        else:
            group.barrier()
            found = group.allreduce(torch.ones(4), name="late").wait()
        publisher.leave(runner)
        return found, publisher.cpu_s

    (found, cpu_s), _ = run_ranks(2, rank)
    assert (found.pending, found.is_open, cpu_s > 0) == ("late", True, True)
    assert found.pending_s > 0
    assert [reading.figures.is_open for reading in board.read_figures().values()] == [False, False]


def test_times_of_steps_stay_until_a_timed_step_ends(tmp_path):
    """A document without the end of a timed step repeats the times; one across two groups has none."""

    def rank(group: Group):
        meter, runner, now = group.meter, group.operations.runner, [0.0]
        meter._clock = lambda: now[0]
        readings = [Reading.of(runner)]
        found = []

        def publish(steps: int, seconds: float) -> None:
            for _ in range(steps):
                now[0] += seconds
                meter.end_step()
            readings.append(Reading.of(runner))
            found.append(figures_of(runner, *readings[-2:], 0, 0, previous=found[-1] if found else None))

        publish(2, 9.0)  # the training of this engine may have begun in another one
        publish(0, 0.0)
        publish(1, 3.0)
        publish(0, 0.0)
        publish(2, 5.0)
        meter.begin_at(1)
        publish(0, 0.0)
        publish(2, 4.0)
        return [each.step_s for each in found]

    assert run_ranks(1, rank) == [[0.0, 0.0, 3.0, 3.0, 5.0, 0.0, 4.0]]


def test_the_first_steps_of_a_training_have_times():
    def rank(group: Group):
        runner = group.operations.runner
        before = Reading.of(runner)
        for _ in range(3):
            time.sleep(0.01)
            group.end_step()
        return figures_of(runner, before, Reading.of(runner), 0, 0).step_s

    assert run_ranks(1, rank)[0] >= 0.01


def test_the_figures_name_the_ranks_of_a_subgroup_that_take_part(tmp_path):
    def rank(group: Group):
        pair = group.subgroup([0, 2]) if group.rank != 1 else None
        if group.rank == 0:
            work = pair.allreduce(torch.ones(4), name="pair")
            reading = Reading.of(group.operations.runner)
            figures = figures_of(group.operations.runner, reading, reading, 0, 0)
        group.barrier()
        if group.rank == 2:
            pair.allreduce(torch.ones(4), name="pair").wait()
        if group.rank == 0:
            work.wait()
            return RankFigures.decode(figures.encode())
        return None

    figures = run_ranks(3, rank)[0]
    assert "pair" in figures.pending
    assert (figures.pending_of_all, figures.pending_ranks) == (False, (0, 2))


def test_a_folder_that_does_not_answer_delays_no_thread_that_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(publishers, "_JOIN_S", 0.05)
    answers, asked = threading.Event(), threading.Event()
    write = Board.write_figures

    def write_slowly(board, seat, document):
        asked.set()
        assert answers.wait(10.0)
        write(board, seat, document)

    monkeypatch.setattr(Board, "write_figures", write_slowly)

    def rank(group: Group):
        publisher = Publisher(tmp_path, 0, interval_s=0.01)
        runner = group.operations.runner
        publisher.follow(runner)
        assert asked.wait(10.0)
        begin, thread = time.monotonic(), publisher._thread
        publisher.follow(runner)
        publisher.leave(runner)
        delay_s = time.monotonic() - begin
        answers.set()
        thread.join(10.0)
        return delay_s

    [delay_s] = run_ranks(1, rank)
    assert delay_s < 5.0
    assert Board(tmp_path).read_figures()[0].figures.is_open is False  # the document that was late is not the last one


def test_a_publisher_writes_again_when_that_is_possible(tmp_path, monkeypatch):
    monkeypatch.setattr(publishers, "_RETRY_S", 0.02)
    board = Board(tmp_path / "later")

    def rank(group: Group):
        publisher = Publisher(board.path, 0, interval_s=0.01)
        publisher.follow(group.operations.runner)
        while not publisher._has_warned:
            time.sleep(0.005)
        board.path.mkdir(mode=0o700)
        give_up_at = time.monotonic() + 10.0
        while not publisher.documents and time.monotonic() < give_up_at:
            time.sleep(0.005)
        documents = publisher.documents
        publisher.leave(group.operations.runner)
        return documents

    assert run_ranks(1, rank)[0] > 0


def test_a_publisher_that_cannot_write_says_so_once(tmp_path, caplog):
    def rank(group: Group):
        publisher = Publisher(tmp_path / "gone", group.rank, interval_s=0.01)
        publisher.follow(group.operations.runner)
        time.sleep(0.05)
        publisher.leave(group.operations.runner)

    run_ranks(1, rank)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text
