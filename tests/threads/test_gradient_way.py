"""The way of a dense gradient, as ARCHITECTURE.md draws it: no call and no file more than the drawing has.

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
CALLS_MAX, FILES_MAX = 61, 18

#: What happens to a gradient on one rank of two, in order.
STATIONS = [
    "Round.ready",  # its hook has run
    "Bucket.pack",  # it is copied into its bucket
    "Operations.start",  # the bucket's bytes are those of an operation
    "Engine.submit",  # the operation is on the message list
    "SendQueue.push",  # its messages wait
    "SendQueue.pop",  # the most urgent message is chosen
    "Outbox.data_message",  # it gets its header
    "_SendingHalf.write",  # it leaves
    "Reception.receive",  # the peer's message has a destination
    "_ReceivingHalf.read",  # it arrives
    "combine",  # it is added
    "Engine.computed",  # the lane goes on
    "Handle.complete",  # the operation has ended
    "Operands.finish",  # the result is in the bucket
    "Bucket.reduced",  # the averaged gradients are handed to the parameters
]


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


def way_of(calls):
    """Return the functions on the way, in order; ``None`` if another thread has done a part of the work."""
    callers, order = defaultdict(set), list(dict.fromkeys(callee for _, callee in calls))
    for caller, callee in calls:
        callers[callee].add(caller)
    found, waiting = set(), [name for name in order if name.split(": ")[1] in STATIONS]
    if {name.split(": ")[1] for name in waiting} != set(STATIONS):
        return None
    while waiting:
        name = waiting.pop()
        if name is not None and name not in found:
            found.add(name)
            waiting += callers[name]
    return [name for name in order if name in found]


def drawn_on(page):
    """Return the functions of the drawing: a line has a file and its functions, or more functions of the last file."""
    section = page.read_text().partition("## The way of a gradient")[2].partition("\n## ")[0]
    drawn, file = set(), ""
    for line in re.search(r"```text\n(.*?)```", section, re.DOTALL)[1].splitlines():
        for word in line.split():
            if word.endswith(".py"):
                file = word
            else:
                drawn.add(f"{file}: {word}")
    return drawn


def test_the_drawing_has_every_call():
    steps = []
    gradients = run_ranks(2, lambda group: steps_of(group, steps), transport="tcp")
    assert gradients == [6.0, 6.0]  # the mean over ranks of four samples of 1 and of 2
    ways = [way for calls in steps if (way := way_of(calls)) is not None]
    assert ways, "in no step did one thread do everything"
    drawn = drawn_on(PAGE)
    # A peer's message may come before the operation is submitted here, which is another way: one step must be as drawn.
    way = min(ways, key=lambda found: len(drawn.symmetric_difference(found)))
    by_file = defaultdict(list)
    for name in way:
        by_file[name.split(": ")[0]].append(name.split(": ")[1])
    shown = "\n".join(f"{file:28}{'  '.join(names)}" for file, names in by_file.items())
    assert drawn == set(way), f"missing {sorted(set(way) - drawn)}, gone {sorted(drawn - set(way))}; it is\n{shown}"
    assert len(way) <= CALLS_MAX, shown
    assert len(by_file) <= FILES_MAX, shown
