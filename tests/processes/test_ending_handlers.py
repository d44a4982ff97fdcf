"""Programs that end their group in a handler of SIGTERM, which interrupts a busy loop of collectives anywhere."""

import random
import re
import select
import signal
import time

import pytest

#: What is promised; and what is allowed beside other tests. A process that is stuck takes five seconds and more.
AT_ONCE_S, LOADED_S = 1.0, 4.0

LOOPS = """
import functools, traceback
from totalreduce.c10d import backend
link, interface, way = (os.environ[name] for name in ("LINK", "INTERFACE", "WAY"))
value, small = torch.ones(int(os.environ["ELEMENTS"])), torch.ones(50)
if interface == "c10d":
    backend.init = functools.partial(backend.init, link)
    dist.init_process_group("totalreduce")
    end, size = dist.destroy_process_group, dist.get_world_size()

    def step(number):
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        work = dist.all_reduce(small, op=dist.ReduceOp.MAX, async_op=True)
        dist.broadcast(value, src=number % size)
        if number % 3 == 0:
            dist.barrier()
        work.wait()
else:
    group = tr.init(link)
    end, size = group.close, group.world_size

    def step(number):
        group.allreduce(value, name="value", op=tr.ReduceOp.MAX).wait()
        work = group.allreduce(small, name="small", op=tr.ReduceOp.MAX)
        group.broadcast(value, root=number % size)
        if number % 3 == 0:
            group.barrier()
        work.wait()

asked = False

def on_term(number, frame):
    global asked
    asked = True
    if way == "interrupt":
        raise KeyboardInterrupt
    end()
    if way == "exit":
        sys.exit(0)
    if way == "kernel":
        os._exit(0)

for number in range(4):
    step(number)
signal.signal(signal.SIGTERM, on_term)
say("ready")
try:
    while not asked:
        number += 1
        step(number)
except BaseException as error:
    traceback.clear_frames(error.__traceback__)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # torch says these words if the process group ends before a collective begins, or while it begins.
    ended = ("Default process group has not been initialized", "is not registered, please create group")
    fine = kinds & {"PeerLost", "GroupClosed", "DistBackendError", "SystemExit", "KeyboardInterrupt"}
    if not fine and not any(words in str(error) for words in ended):
        raise
    if way == "interrupt" and isinstance(error, KeyboardInterrupt):
        end()
"""


def end_by_signals(fleet, link, interface, way, seed, limit_s):
    """Start a job, and send the signal to all ranks or to one; all processes end in time and say nothing."""
    chosen = random.Random(seed)
    facts = {"LINK": link, "INTERFACE": interface, "WAY": way, "ELEMENTS": str(chosen.choice((100, 30_000, 1_000_000)))}
    workers = fleet.start(2, LOOPS, **facts)
    for worker in workers:
        worker.read("ready")
    signal.sigtimedwait([], chosen.random() * 0.02)  # any moment
    since = time.monotonic()
    for worker in chosen.choice([workers, workers, workers[:1], workers[1:]]):
        worker.send(signal.SIGTERM)
    for worker in workers:
        ended = select.select([worker._exit], [], [], max(0.0, since + limit_s - time.monotonic()))[0]
        assert ended, f"rank {worker.rank} of {facts}, seed {seed}, runs on; its errors:\n{worker.errors()}"
        assert worker.wait() == 0, (worker.rank, facts, seed, worker.errors())
        errors = worker.errors()
        if way == "interrupt":  # Python drops what a handler raises in a __del__
            errors = re.sub(r"Exception ignored in: .*?\nKeyboardInterrupt: *\n", "", errors, flags=re.DOTALL)
        assert "Traceback" not in errors, (worker.rank, facts, seed, worker.errors())
    fleet.end_jobs()


WAYS = ["return", "exit", "kernel", "interrupt"]


@pytest.mark.faults("F7", "F24")
@pytest.mark.parametrize("interface", ["c10d", "group"])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_handler_of_sigterm_ends_the_group(fleet, link, interface):
    for seed in range(3):
        end_by_signals(fleet, link, interface, WAYS[seed], seed, LOADED_S)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interface", ["c10d", "group"])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_two_hundred_handlers_of_sigterm(fleet, link, interface, way):
    for seed in range(200):
        end_by_signals(fleet, link, interface, way, seed, AT_ONCE_S)
