"""What is counted of training steps: where their time goes on each rank, reports, figures of sparse methods."""

import time

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.groups.steps import Reading
from totalreduce.observe.board import Board
from totalreduce.observe.publisher import Publisher, figures_of
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.sparse.topka import TopkA
from totalreduce.strategies.averaging import LocalSGD
from totalreduce.testing import run_ranks

STEPS, PAUSE_S = 5, 0.02
SYNCS = {
    "dense": None,
    "sparse": TopkA(density=0.25),
    "strategy": LocalSGD(period=1),
}


def train(group: Group, sync: object, pause_s: float) -> DistributedOptimizer:
    """Train a small model; rank 1 computes longer."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4, bias=False)
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
    assert fast.exposed_s > 0.7 * paused_s
    assert fast.step_s > 0.9 * paused_s
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


def test_the_publisher_writes_what_is_in_flight_and_that_the_group_has_ended(tmp_path):
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


def test_a_publisher_that_cannot_write_says_so_once(tmp_path, caplog):
    def rank(group: Group):
        publisher = Publisher(tmp_path / "gone", group.rank, interval_s=0.01)
        publisher.follow(group.operations.runner)
        time.sleep(0.05)
        publisher.leave(group.operations.runner)

    run_ranks(1, rank)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text
