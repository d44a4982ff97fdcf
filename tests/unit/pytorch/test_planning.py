"""From parameters to a plan: which of them are compressed, and that planning takes linear time."""

from dataclasses import replace

import pytest
import torch
from plan_settings import DENSE

import totalreduce as tr
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.planning import GradientPlan, build_plan
from totalreduce.sparse.session import Method


class Counted(torch.nn.Parameter):
    """A parameter that counts how often it is looked up in sets and dicts."""

    lookups = 0

    def __hash__(self) -> int:
        type(self).lookups += 1
        return super().__hash__()


def plan_of(parameters: list[torch.nn.Parameter], sync: Method | None) -> GradientPlan:
    settings = replace(DENSE, sync=sync, feedback=ErrorFeedback(elements_min=4))
    names = {parameter: [str(number)] for number, parameter in enumerate(parameters)}
    return build_plan(names, [{"params": parameters}], settings, uncompressed={"2"})


def test_small_parameters_and_those_to_be_sent_whole_are_not_compressed() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(*shape)) for shape in [(4, 4), (4,), (5, 4), (6, 4)]]
    plan = plan_of(parameters, tr.OkTopk(density=0.1))
    assert [spec.name for spec in plan.specs] == ["1", "2"]
    assert [spec.name for spec in plan.compressed.specs] == ["0", "3"]
    assert plan.compressed.parameters == (parameters[0], parameters[3])
    assert [spec.name for spec in plan_of(parameters, None).specs] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("sync", [None, tr.OkTopk(density=0.1)], ids=["whole", "compressed"])
def test_planning_looks_at_each_parameter_a_few_times(sync: Method | None) -> None:
    lookups = []
    for count in (20, 2000):
        parameters: list[torch.nn.Parameter] = [Counted(torch.zeros(4, 4)) for _ in range(count)]
        Counted.lookups = 0
        plan_of(parameters, sync)
        lookups.append(Counted.lookups / count)
    assert lookups[0] == lookups[1] < 20
