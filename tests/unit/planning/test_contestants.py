"""Contestants of ``bench strategies``: how they are spelled, and that no strategy of the library is missing."""

import inspect
import re
from pathlib import Path

import pytest

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.contestants import make_strategy, parse_contestant, strategies, takes_own_steps
from totalreduce.strategies.strategy import Strategy
from totalreduce_benchmarks.strategies import bench_strategies

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "strategies.md"
CLASSES = {
    name: item
    for name, item in ((name, getattr(tr, name)) for name in tr.__all__)
    if isinstance(item, type) and issubclass(item, Strategy)
}


def made(text):
    return make_strategy(parse_contestant(text))


def test_each_strategy_is_a_contestant_and_a_row_of_the_page():
    assert len(CLASSES) == 14
    assert {item.name for item in CLASSES.values()} == set(strategies())
    chosen = inspect.signature(bench_strategies).parameters["methods"].default.split(",")
    assert {parse_contestant(text).name for text in chosen} == set(strategies())
    assert len({made(text) for text in chosen if parse_contestant(text).name == "parameter_server"}) == 3
    table = PAGE.read_text().partition("| strategy | what the ranks do |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `tr\.(\w+)\(", table, re.MULTILINE)) == set(CLASSES)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("local_sgd", tr.LocalSGD()),
        ("diloco:period=50:codec=int8", tr.DiLoCo(period=50, codec=tr.Int8())),
        ("diloco:outer_lr=0.5", tr.DiLoCo(outer=tr.Nesterov(0.5, 0.9))),
        ("diloco:outer_lr=1.0:outer_momentum=0.0", tr.DiLoCo(outer=tr.Nesterov(1.0, 0.0))),
        ("post_local_sgd:start=9:period=4", tr.PostLocalSGD(start=9, then=tr.LocalSGD(period=4))),
        ("async:rate=0.25", tr.Async()),
        ("eager:mode=solo", tr.Eager(mode="solo")),
        ("parameter_server", tr.ParameterServer()),
        ("parameter_server:consistency=sequential", tr.ParameterServer(consistency=tr.ps.Sequential())),
        ("parameter_server:consistency=bounded", tr.ParameterServer(consistency=tr.ps.Bounded(4))),
        (
            "parameter_server:consistency=bounded:tau=2:optimizer=worker",
            tr.ParameterServer(consistency=tr.ps.Bounded(2), optimizer="worker"),
        ),
        (
            "parameter_server:consistency=eventual:codec=int8",
            tr.ParameterServer(consistency=tr.ps.Eventual(), codec=tr.Int8()),
        ),
    ],
)
def test_settings_behind_a_name(text, wanted):
    assert made(text) == wanted


def test_the_learning_rate_is_no_setting_of_the_strategy():
    contestant = parse_contestant(" async:rate=0.25:max_staleness=8 ")
    assert (contestant.text, contestant.name) == ("async:rate=0.25:max_staleness=8", "async")
    assert (contestant.settings, contestant.rate) == ({"max_staleness": 8}, 0.25)
    assert parse_contestant("oktopk").rate == 1.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("local_sgd:period", "a setting is written as period=50, not 'period'"),
        ("local_sgd:perod=4", "'local_sgd:perod=4': .*perod"),
        ("local_sgd:period=0", "period"),
        ("strom", "'strom': .*threshold"),
        ("diloco:codec=int9", "int9"),
        ("oktopk", "'oktopk' is no strategy; there are local_sgd, .*parameter_server"),
        ("parameter_server:consistency=strict", "sequential, bounded, eventual, not 'strict'"),
        ("parameter_server:tau=4", "'parameter_server:tau=4': .*tau"),
    ],
)
def test_what_makes_no_sense_is_refused(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        made(text)


@pytest.mark.parametrize(
    ("text", "world_size", "wanted"),
    [
        ("oktopk", 4, False),
        ("diloco", 4, False),
        ("async", 4, True),
        ("async:max_staleness=0", 4, False),
        ("quorum:n=3", 4, True),
        ("quorum:n=3", 3, False),
        ("async_gossip", 4, True),
        ("async_gossip", 1, False),
        ("parameter_server:consistency=sequential:codec=int8", 4, False),
        ("parameter_server:consistency=bounded", 4, True),
        ("parameter_server:consistency=bounded:tau=0", 4, False),
        ("parameter_server:consistency=eventual", 4, True),
    ],
)
def test_whether_ranks_may_take_different_numbers_of_steps(text, world_size, wanted):
    assert takes_own_steps(parse_contestant(text), world_size) is wanted
