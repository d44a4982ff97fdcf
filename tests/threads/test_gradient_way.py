"""The way of a dense gradient: the stations of the table in ARCHITECTURE.md, in its order, and few calls between them.

A training step is profiled. The way is every function that had to be entered to reach one of the stations at which
something happens to the gradient, from its hook to the averaged gradient: the stations, and all their callers.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import torch

import totalreduce as tr
from totalreduce.testing import run_ranks

SOURCE = Path(tr.__file__).parent
PAGE = SOURCE.parents[1] / "ARCHITECTURE.md"
CALLS_MAX, FILES_MAX = 62, 18


def steps_of(group, steps):
    """Train; record the calls of steps on rank 0, each as pairs of caller and callee."""

    def name(frame):
        path = frame.f_code.co_filename
        return f"{path[len(str(SOURCE)) + 1 :]}: {frame.f_code.co_qualname}" if path.startswith(str(SOURCE)) else None

    def profile(frame, event, _argument):
        if event == "call" and (callee := name(frame)) is not None:
            caller = frame.f_back
            while caller is not None and name(caller) is None:
                caller = caller.f_back
            steps[-1].append((None if caller is None else name(caller), callee))

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    for step in range(200):  # on a busy machine, threads take turns in most steps
        optimizer.zero_grad()
        loss = model(torch.full((4, 64), group.rank + 1.0)).sum()
        if step >= 3 and group.rank == 0:
            steps.append([])
            sys.setprofile(profile)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
    return model.weight.grad[0, 0].item()


def way_of(calls, stations):
    """Return the functions on the way to the stations, in order; ``None`` if another thread has done a part."""
    callers, order = defaultdict(set), list(dict.fromkeys(callee for _, callee in calls))
    for caller, callee in calls:
        callers[callee].add(caller)
    found, waiting = set(), list(stations)
    if not set(waiting) <= set(order):
        return None
    while waiting:
        name = waiting.pop()
        if name is not None and name not in found:
            found.add(name)
            waiting += callers[name]
    return [name for name in order if name in found]


def stations_of(page):
    """Return the stations of the table, in order, each with its file."""
    section = page.read_text().partition("## The way of a gradient")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", section, re.MULTILINE)
    return [f"{file}: {function}" for function, file in rows]


def test_the_table_has_the_stations_of_a_gradient_in_order():
    steps, stations = [], stations_of(PAGE)
    assert len(stations) == 15
    gradients = run_ranks(2, lambda group: steps_of(group, steps), transport="tcp")
    assert gradients == [6.0, 6.0]  # the mean over ranks of four samples of 1 and of 2
    ways = [way for calls in steps if (way := way_of(calls, stations)) is not None]
    assert ways, "in no step did one thread do everything"
    # A peer's message may come before the operation is submitted here, another way: one step must be as drawn.
    way = min(ways, key=len)
    by_file = defaultdict(list)
    for name in way:
        by_file[name.split(": ")[0]].append(name.split(": ")[1])
    shown = "\n".join(f"{file:28}{'  '.join(names)}" for file, names in by_file.items())
    # Sending, receiving and adding overlap, so that any may be first. Each is in the order of the table.
    for begin, end in ((0, 5), (5, 8), (8, 10), (10, 12), (12, 15)):
        assert [name for name in way if name in stations[begin:end]] == stations[begin:end], shown
    assert len(way) <= CALLS_MAX, shown
    assert len(by_file) <= FILES_MAX, shown
