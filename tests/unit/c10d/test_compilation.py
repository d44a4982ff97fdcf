"""``never_compiled``: Dynamo traces neither marked code nor what that calls, and is not imported for it."""

import pytest
import torch

from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.c10d.work import OperationWork
from totalreduce.groups.group import Group
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work


def helper(tensor):
    return tensor * 2


@never_compiled
def marked(tensor):
    return helper(tensor)


@never_compiled
class Marked:
    def method(self, tensor):
        return helper(tensor)

    @property
    def hook(self):
        return lambda tensor: helper(tensor)


@pytest.fixture
def graphs():
    """Number of operations in each graph that Dynamo makes; ``compiled`` with it as the back end."""
    found = []

    def keep(graph, _):
        found.append(sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    yield found, torch.compile(backend=keep)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [marked, Marked().method])
def test_a_call_ends_the_graph(graphs, function):
    found, compiled = graphs

    @compiled
    def compute(tensor):
        return function(tensor.sin()).cos() + 1

    assert torch.equal(compute(torch.ones(3)), (torch.ones(3).sin() * 2).cos() + 1)
    assert found == [1, 2]


def test_it_is_an_error_where_one_graph_is_wanted():
    @torch.compile(backend="eager", fullgraph=True)
    def compute(tensor):
        return marked(tensor)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="totalreduce moves messages"):
        compute(torch.ones(3))


@pytest.mark.parametrize(("hook", "traced"), [(marked, 0), (Marked().method, 0), (Marked().hook, 0), (helper, 1)])
def test_a_frame_that_autograd_begins_is_not_traced(graphs, hook, traced):
    found, compiled = graphs
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(hook)

    @compiled
    def step():
        weight.sum().backward()

    step()
    assert weight.grad.tolist() == [2.0] * 3
    assert len(found) == 1 + traced


@pytest.mark.parametrize("kind", [ProcessGroupTotalReduce, OperationWork, Group, Work])
def test_what_communicates_is_marked(kind):
    functions = [member for member in vars(kind).values() if callable(member) and hasattr(member, "__code__")]
    assert len(functions) > 5
    assert all(function._torchdynamo_disable for function in functions)
