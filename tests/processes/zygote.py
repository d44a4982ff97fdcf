"""Makes workers: a process that has imported torch once and forks. Each worker is a real process of its own.

Run as ``python zygote.py FD LISTENER STUB``. FD is a Unix socket on which ``fleet.Fleet`` asks for workers and for the
ends of workers. LISTENER is a listening Unix socket. STUB is an executable that stands for the Python interpreter: it
connects to LISTENER and asks for a process that runs the program that the interpreter would have run.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import types
import weakref

import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.codecs.codecs import CODECS
from totalreduce.kernels import ahead, exchange
from totalreduce.launch.transports import TRANSPORTS
from totalreduce.runner.carriers import CARRIERS
from totalreduce.schedules import SCHEDULES
from totalreduce.sparse.methods import METHODS
from totalreduce.strategies.strategies import STRATEGIES

#: The lists that other packages can add to. To read what they add takes 12 ms of CPU time, in each process.
EXTENDED = (CARRIERS, CODECS, METHODS, SCHEDULES, STRATEGIES, TRANSPORTS)
SEARCHED = os.environ.get("PYTHONPATH")


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


def take_over(descriptors, numbers):
    """In the child: give files their numbers and signals their meaning."""
    # A descriptor could have the number of another file, so that all move out of the way first.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def work(source, environment, descriptors):
    """In the child: become the worker."""
    take_over(descriptors, range(3))
    for name in [name for name in os.environ if name.startswith("TOTALREDUCE_")]:
        del os.environ[name]
    os.environ.update(environment)
    names = {"os": os, "sys": sys, "time": time, "torch": torch, "dist": dist, "tr": tr, "signal": signal}
    names |= {"say": say, "hear": hear, "attempt": attempt, "rank": int(environment.get("RANK", 0)), "__name__": "w"}
    exec(compile(source, "<worker>", "exec"), names)
    if "FULL_EXIT" not in environment:
        end()


def become(request, numbers, descriptors, stub):
    """In the child: become the program that an interpreter with these arguments would run."""
    take_over(descriptors, numbers)
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get("PYTHONPATH") != SEARCHED:  # there may be packages that the zygote does not see
        for items in EXTENDED:
            items._declared = items._names = None
    os.chdir(request["folder"])
    kind, *rest = request["arguments"]
    sys.argv = [kind, *rest[1:]] if kind == "-c" else rest if kind == "-m" else [kind, *rest]
    first = os.path.dirname(os.path.abspath(kind)) if kind not in ("-c", "-m") else os.getcwd()
    sys.path[0:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.executable = stub
    if kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    # The program's variables live until the process has ended: the destructors of torch's gloo hang now and then.
    elif kind == "-m":
        _variables = runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        _variables = runpy.run_path(kind, run_name="__main__")
    if "mpi4py.MPI" not in sys.modules:  # it finalises MPI at the very end of the interpreter
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


def keep_torch_libraries():
    """Have the workers' exit leave torch's 174 operator libraries alone: to remove them takes 45 ms of CPU time."""
    for finalizer in list(weakref.finalize._registry):
        alive = finalizer.peek()
        if alive is not None and alive[1] is torch.library._del_library:
            finalizer.atexit = False


class Zygote:
    """Forks and reports until the test closes the channel."""

    def __init__(self, channel, listener, stub):
        self.stub = stub
        self.channel, self.listener = channel, listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ, self.on_request)
        self.selector.register(listener, selectors.EVENT_READ, self.on_stub)
        self.stubs = {}  # by connection: the process's descriptor and id
        self.task = None  # what a child does: it leaves the loop first, for its stack ends up in tracebacks

    def serve(self):
        while self.task is None:
            for key, _ in self.selector.select():
                if not key.data(key.fileobj):
                    return
                if self.task is not None:
                    break
        self.selector.close()
        for connection in (self.channel, self.listener, *self.stubs):
            connection.close()
        self.task()

    def fork(self, task, descriptors):
        """Have a child carry a task out; returns its id."""
        pid = os.fork()
        if not pid:
            self.task = task
            return 0
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    def on_request(self, channel):
        """The test wants a worker, or the exit code of one that has ended, or modules for later workers."""
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 8)
        if not data:
            return False
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            return True
        if "imports" in request:
            for name in request["imports"]:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
            channel.send(b"done")
            return True
        pid = self.fork(lambda: work(request["source"], request["environment"], descriptors), descriptors)
        if pid:
            channel.send(json.dumps(pid).encode())
        return True

    def on_stub(self, listener):
        """A stub wants the process that it stands for."""
        connection, _ = listener.accept()
        data, descriptors = b"", []
        with contextlib.suppress(ConnectionError):
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 200)
        if not data:  # it was killed meanwhile
            connection.close()
            return True
        request = json.loads(data)
        pid = self.fork(lambda: become(request, request["files"], descriptors, self.stub), descriptors)
        if not pid:
            connection.close()
            return True
        with contextlib.suppress(ConnectionError):  # if it was killed since, the end of the connection says so
            connection.send(struct.pack("i", pid))
        process = os.pidfd_open(pid)
        self.stubs[connection] = process, pid
        self.selector.register(process, selectors.EVENT_READ, lambda _: self.on_end(connection))
        self.selector.register(connection, selectors.EVENT_READ, self.on_end)
        return True

    def on_end(self, connection):
        """The process has ended, or its stub, which is the end of the process."""
        process, pid = self.stubs.pop(connection, (None, None))
        if process is None:
            return True
        signal.pidfd_send_signal(process, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(process)
        self.selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.send(struct.pack("i", os.waitstatus_to_exitcode(status)))
        connection.close()
        os.close(process)
        return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Importing everything a worker touches, before the first fork; what is there stays shared.
    _ = (tr.init, tr.DistributedOptimizer, tr.broadcast_parameters, tr.OkTopk, tr.ddp_hook, tr.ShardCopies)
    # The first optimizer of a process imports torch's compiler: seconds, if every worker does it at the same time.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    # Reading the compiled kernels of the sparse methods takes half a second of CPU time.
    ahead.load()
    exchange.load()
    for items in EXTENDED:
        items.added()
    "localhost".encode("idna")  # as for each socket's address; imports tables of characters
    keep_torch_libraries()
    gc.collect()
    gc.freeze()
    Zygote(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]), sys.argv[3]).serve()
