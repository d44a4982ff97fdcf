"""Makes workers: a process that has imported torch once and forks. Each worker is a real process of its own.

Run as ``python zygote.py FD``; FD is a Unix socket on which ``fleet.Fleet`` asks for workers and for their ends.
"""

import atexit
import gc
import json
import os
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.kernels import ahead


def say(event, **facts):
    """One line to the test, with the time (the monotonic clock is the same in all processes)."""
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())


def hear():
    """Wait for a line from the test."""
    return sys.stdin.readline().strip()


def attempt(event, function, *arguments, **options):
    """Call, and say how it ended: error, its rank if it names one, seconds."""
    begin = time.monotonic()
    try:
        value = function(*arguments, **options)
    except Exception as error:
        seconds = time.monotonic() - begin
        kinds = [kind.__name__ for kind in type(error).__mro__]
        rank = getattr(error, "rank", None)
        say(event, error=type(error).__name__, kinds=kinds, rank=rank, text=str(error), seconds=seconds)
        return None
    say(event, error=None, seconds=time.monotonic() - begin)
    return value


def work(source, environment, descriptors):
    """In the child: become the worker."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = os.fdopen(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith("TOTALREDUCE_")]:
        del os.environ[name]
    os.environ.update(environment)
    names = {"os": os, "sys": sys, "time": time, "torch": torch, "dist": dist, "tr": tr, "signal": signal}
    names |= {"say": say, "hear": hear, "attempt": attempt, "rank": int(environment.get("RANK", 0)), "__name__": "w"}
    exec(compile(source, "<worker>", "exec"), names)
    if "FULL_EXIT" not in environment:
        end()


def end():
    """End the worker as the interpreter does, but without the destruction of all modules and objects.

    The destruction writes to every page that the worker shares with the zygote, which takes 0.35 s of CPU time. Workers
    whose test concerns the interpreter's end get the variable ``FULL_EXIT``; an exception also ends them in full.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(channel):
    """Fork and report until the test closes the socket."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 8)
        if not data:
            return None
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            channel.close()
            return work(request["source"], request["environment"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(pid).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Importing everything a worker touches, before the first fork; what is there stays shared.
    _ = (tr.init, tr.DistributedOptimizer, tr.broadcast_parameters, tr.OkTopk, tr.ddp_hook)
    # The first optimizer of a process imports torch's compiler: seconds, if every worker does it at the same time.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    # Reading the compiled kernels of the sparse methods takes half a second of CPU time.
    ahead.load()
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
