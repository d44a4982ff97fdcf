"""Mistakes of a user: the first line of the error says what is wrong in the program, and what to write instead.

Each program runs on two ranks. ``docs/mistakes.md`` has the same list, and a test compares the two.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import quoted, table_below
from torch import nn

import totalreduce as tr
from totalreduce.testing import run_ranks


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def names(group, size=1):
    """What the programs of the page know: on each rank the group, a model, its optimizer, and a tensor."""
    model = nn.Linear(2, size, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return SimpleNamespace(
        rank=group.rank, group=group, model=model, torch_optimizer=sgd(model), tensor=torch.ones(2), array=np.ones(2)
    )


def others_fail(its):
    """What the rank does meanwhile whose program is right."""
    with pytest.raises(tr.TotalReduceError):
        its.group.allreduce(its.tensor, name="later").wait(timeout_s=20)


def several_tensors(its):
    its.group.allreduce([its.tensor, its.tensor])


def swapped(its):
    tr.DistributedOptimizer(its.model, its.torch_optimizer, group=its.group)


def different_models(its):
    its = names(its.group, size=1 + its.rank)
    tr.DistributedOptimizer(its.torch_optimizer, its.model, group=its.group)


def two_in_flight(its):
    if its.rank == 0:
        its.group.allreduce(its.tensor, name="loss")
        its.group.allreduce(torch.ones(2), name="loss")
    others_fail(its)


def closed(its):
    its.group.close()
    its.group.allreduce(its.tensor)


def uneven(its):
    optimizer = tr.DistributedOptimizer(its.torch_optimizer, its.model, group=its.group)
    for _ in range(1 + its.rank):
        optimizer.zero_grad()
        its.model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    its.group.close()


def other_order(its):
    shapes = [(2,), (3,)] if its.rank == 0 else [(3,), (2,)]
    for shape in shapes:
        its.group.allreduce(torch.ones(shape)).wait()


def only_rank_0(its):
    if its.rank == 0:
        its.group.allreduce(its.tensor, name="loss").wait(timeout_s=0.2)
    others_fail(its)


def distributed(**settings):
    return lambda its: tr.DistributedOptimizer(its.torch_optimizer, its.model, group=its.group, **settings)


#: The mistake as the page shows it, the program, and how the first line of the error begins; "…" stands for any text.
MISTAKES = [
    ("`group.allreduce([1.0, 2.0])`", lambda its: its.group.allreduce([1.0, 2.0]),
     "'unnamed' is a list, not a torch.Tensor: write torch.tensor(value)"),
    ("`group.allreduce(3.0)`", lambda its: its.group.allreduce(3.0),
     "'unnamed' is a float, not a torch.Tensor: write torch.tensor(value)"),
    ("`group.allreduce(array)` with NumPy's array", lambda its: its.group.allreduce(its.array),
     "'unnamed' is a ndarray, not a torch.Tensor: write torch.from_numpy(array)"),
    ("`group.allreduce([a, b])` with tensors", several_tensors,
     "'unnamed' is a list, not a torch.Tensor: call allreduce for each tensor"),
    ("`group.allreduce({\"loss\": 1})`", lambda its: its.group.allreduce({"loss": 1}),
     "'unnamed' is a dict, not a torch.Tensor: objects of other types travel with group.allgather_object"),
    ("`op=\"mean\"`", lambda its: its.group.allreduce(its.tensor, op="mean"),
     "tensor 'unnamed': op='mean' is no reduction: write tr.ReduceOp.AVG"),
    ("`op=torch.distributed.ReduceOp.AVG`",
     lambda its: its.group.allreduce(its.tensor, op=torch.distributed.ReduceOp.AVG),
     "tensor 'unnamed': op=<RedOpType.AVG: 1> is no reduction: write tr.ReduceOp.AVG"),
    ("`schedule=\"rign\"`", lambda its: its.group.allreduce(its.tensor, schedule="rign"),
     "schedule 'rign' is not known (did you mean 'ring'?)"),
    ("`tr.init(\"tpc\")`", lambda _: tr.init("tpc"), "transport 'tpc' is not known (did you mean 'tcp'?)"),
    ("`root=2` of two ranks", lambda its: its.group.broadcast(its.tensor, root=2), "root 2 is no rank of a group of 2"),
    ("a sparse tensor", lambda its: its.group.allreduce(its.tensor.to_sparse()),
     "tensor 'unnamed' has layout torch.sparse_coo; use .to_dense()"),
    ("a tensor without values", lambda its: its.group.allreduce(its.tensor.to("meta")),
     "tensor 'unnamed' is on meta and has no values; use .to_empty(device='cpu') first"),
    ("`tensor.expand(4, 2)`", lambda its: its.group.allreduce(its.tensor.expand(4, 2)),
     "tensor 'unnamed' is expanded: several elements share memory. Use .contiguous()"),
    ("one name twice, before `wait()`", two_in_flight,
     "an operation named 'loss' is already in flight on rank …; wait for it or use another name"),
    ("ranks call in different orders", other_order, "tensor 'unnamed#0': rank …Submit the same kind, dtype, shape"),
    ("only rank 0 calls", only_rank_0, "rank 0 waited 0.2 s for 'loss': …never submitted by rank(s) 1"),
    ("a call after `group.close()`", closed, "rank … has closed the group; make a new one with init()"),
    ("`tr.DistributedOptimizer(model)`", lambda its: tr.DistributedOptimizer(its.model, group=its.group),
     "the optimizer must be a torch.optim.Optimizer, not a Linear: write torch.optim.SGD(model.parameters(), lr=0.1)"),
    ("optimizer and model swapped", swapped, "the optimizer must be a torch.optim.Optimizer, not a Linear"),
    ("no `group=`", lambda its: tr.DistributedOptimizer(its.torch_optimizer, its.model),
     "tr.DistributedOptimizer needs the group of ranks. Write …group=tr.init())"),
    ("the group in the place of the model", lambda its: tr.DistributedOptimizer(its.torch_optimizer, its.group),
     "tr.DistributedOptimizer needs the group of ranks. The second argument is the model; write …group=tr.init())"),
    ("a `DistributedOptimizer` wrapped twice",
     lambda its: tr.DistributedOptimizer(distributed()(its), its.model, group=its.group),
     "the optimizer is a DistributedOptimizer already: pass the torch optimizer"),
    ("the optimizer of another model",
     lambda its: tr.DistributedOptimizer(sgd(nn.Linear(2, 1)), its.model, group=its.group),
     "2 parameter(s) of the optimizer are not in the model …Pass the model that holds them"),
    ("a model without trainable parameters",
     lambda its: (its.model.requires_grad_(requires_grad=False), distributed()(its)),
     "no parameter of the optimizer is trainable: nothing to synchronise"),
    ("`sync=\"topkk\"`", distributed(sync="topkk"), "sync='topkk' is not known (did you mean 'topka'?)"),
    ("`sync=tr.PostLocalSGD`", distributed(sync=tr.PostLocalSGD),
     "sync=the class PostLocalSGD needs settings that have no default ('start'): write sync=tr.PostLocalSGD(...)"),
    ("`overlap=\"bakward\"`", distributed(overlap="bakward"),
     "overlap is 'backward', 'step' or 'iterations', not 'bakward' (did you mean 'backward'?)"),
    ("`compression=\"fp61\"`", distributed(compression="fp61"),
     "compression is 'none', 'fp16' or 'bf16', not 'fp61' (did you mean 'fp16'?)"),
    ("`DistributedOptimizer(op=\"mean\")`", distributed(op="mean"), "op='mean' is no reduction: write tr.ReduceOp.AVG"),
    ("`tr.OkTopk(density=2)`", lambda _: tr.OkTopk(density=2), "density must be from 0 to 1, not 2.0"),
    ("`tr.DiLoCo(codec=\"int8\")`", lambda _: tr.DiLoCo(period=10, codec="int8"),
     "codec is None or a codec, for instance tr.Int8(), not 'int8'"),
    ("a whole checkpoint for `load_state_dict`",
     lambda its: distributed()(its).load_state_dict({"model": {}, "optimizer": {}}),
     "load_state_dict needs what state_dict() of an optimizer has returned; this has no 'param_groups', only 'model'"),
    ("other models on the ranks", different_models, "the ranks do not agree on 'model.plan':"),
    ("ranks with different numbers of batches", uneven,
     "rank 0 is lost: it has closed the group (if it had fewer batches: optimizer.join()"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "first_line"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_the_first_line_says_what_is_wrong(program, first_line):
    with pytest.raises(tr.TotalReduceError) as caught:
        run_ranks(2, lambda group: program(names(group)))
    begin = ".*".join(re.escape(part) for part in first_line.split("…"))
    assert re.match(begin, str(caught.value).splitlines()[0]), str(caught.value)


def test_the_page_has_these_mistakes():
    rows = table_below("docs/mistakes.md", "In the program")
    assert [row[:2] for row in rows] == [(mistake, quoted(first_line)) for mistake, _, first_line in MISTAKES]
    assert all(instead for *_, instead in rows)


# A rank has the gradient (1 + rank, 2) of one row; the average is (1.5, 2), and the learning rate 0.1.
NO_MISTAKES = {
    "zero_grad() between backward and step": (lambda _, opt, back: (back(), opt.zero_grad(), opt.step()), 0.0),
    "step() without backward": (lambda _, opt, __: opt.step(), 0.0),
    "two backwards before step()": (lambda _, opt, back: (back(), back(), opt.step()), 2.0),
    "a gradient clipped by hand": (lambda its, opt, back: (back(), its.model.weight.grad.mul_(0.5), opt.step()), 0.5),
}


@pytest.mark.parametrize(("loop", "times"), NO_MISTAKES.values(), ids=NO_MISTAKES)
def test_what_is_right_with_ddp_gives_the_same(loop, times):
    """These loops raise no error, because they are none with DistributedDataParallel: the result is its result."""

    def body(group):
        its = names(group)
        optimizer = tr.DistributedOptimizer(its.torch_optimizer, its.model, group=group)
        row = torch.tensor([[1.0 + its.rank, 2.0]])
        loop(its, optimizer, lambda: its.model(row).sum().backward())
        return its.model.weight.detach()

    expected = torch.ones(1, 2) - 0.1 * times * torch.tensor([[1.5, 2.0]])
    for weight in run_ranks(2, body):
        torch.testing.assert_close(weight, expected)
