"""Jobs of real worker processes that a test talks to, stops, kills and asks what they saw."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from environments import worker_environments

HERE = Path(__file__).parent
FOREIGN = ("TOTALREDUCE_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


class Worker:
    """One process."""

    def __init__(self, zygote, rank, source, environment):
        self.rank = rank
        self._zygote = zygote
        inner_in, self._stdin = os.pipe()
        self._stdout, inner_out = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        request = {"source": source, "environment": environment}
        descriptors = [inner_in, inner_out, self._errors.fileno()]
        socket.send_fds(zygote, [json.dumps(request).encode()], descriptors)
        self.pid = json.loads(zygote.recv(100))
        self._exit = os.pidfd_open(self.pid)
        self._buffer = b""
        self.exit_code = None
        os.close(inner_in)
        os.close(inner_out)

    def read_line(self, event="any", timeout_s=30.0):
        """The next line; ``event`` is for the error message."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._stdout, 65536) if ready else b""
            assert data, f"rank {self.rank} said nothing for {event!r}; its errors:\n{self.errors()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def read(self, event, timeout_s=30.0):
        """The next line, which must be ``event``; its facts."""
        facts = json.loads(self.read_line(event, timeout_s))
        assert facts["event"] == event, f"rank {self.rank} said {facts}, not {event!r}\n{self.errors()}"
        return facts

    def tell(self, line="go"):
        """Send a line."""
        os.write(self._stdin, f"{line}\n".encode())

    def send(self, number):
        """Send a signal; returns the time. Not reaped before ``wait``, so the id cannot be somebody else's."""
        os.kill(self.pid, number)
        return time.monotonic()

    def errors(self):
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def wait(self, timeout_s=20.0):
        """Exit code; negative if a signal ended it."""
        if self.exit_code is None:
            ready, _, _ = select.select([self._exit], [], [], timeout_s)
            assert ready, f"rank {self.rank} still runs after {timeout_s} s; its errors:\n{self.errors()}"
            self._zygote.send(json.dumps({"wait": self.pid}).encode())
            self.exit_code = json.loads(self._zygote.recv(100))
        return self.exit_code

    def close(self):
        """Kill it if it runs, free everything."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for descriptor in (self._stdin, self._stdout, self._exit):
            os.close(descriptor)
        self._errors.close()


class Fleet:
    """Starts jobs; one zygote serves all of them."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._base = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        self._base |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"totalreduce-zygote-{os.urandom(8).hex()}"
        listener.bind("\0" + address)
        listener.listen(64)
        #: An executable that stands for the Python interpreter, without 2 s of imports.
        self.python = self._make_stub(address)
        inherited = [theirs.fileno(), listener.fileno()]
        command = [sys.executable, str(HERE / "zygote.py"), *map(str, inherited), str(self.python)]
        self._process = subprocess.Popen(command, pass_fds=inherited, env=self._base)
        theirs.close()
        listener.close()
        self._workers = []

    def _make_stub(self, address):
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "python"
        text = (HERE / "stub.py").read_text().replace("{python}", sys.executable).replace("{address}", address)
        path.write_text(f"#!{sys.executable} -IS\n{text}")
        path.chmod(0o755)
        for program in Path(sys.executable).parent.iterdir():  # mpirun, for instance, is found beside the interpreter
            if not program.name.startswith("python"):
                path.with_name(program.name).symlink_to(program)
        return path

    def start(self, num_workers, source, *, by_rank=None, **variables):
        """Start the ranks of a job on a Python text; ``by_rank`` adds variables (or removes: ``None``) for some."""
        environments = worker_environments(
            self._base,
            num_workers,
            workers_per_host=num_workers,
            master_address="127.0.0.1",
            job_id=f"test-{os.urandom(4).hex()}",
        )
        workers = []
        for rank, environment in enumerate(environments):
            changed = {**environment, **variables, **(by_rank or {}).get(rank, {})}
            present = {name: text for name, text in changed.items() if text is not None}
            workers.append(Worker(self._socket, rank, textwrap.dedent(source), present))
        self._workers += workers
        return workers

    def preload(self, *modules):
        """Have the zygote import modules that take seconds, once for all workers that start later.

        For packages that a few tests need. The modules must start no threads.
        """
        self._socket.send(json.dumps({"imports": modules}).encode())
        assert self._socket.recv(100) == b"done", f"the zygote cannot import {modules}"

    @staticmethod
    def end(pid):
        """Kill a process that a worker has started, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def end_jobs(self):
        """End every worker of the test."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def close(self):
        """End the zygote."""
        self.end_jobs()
        self._socket.close()
        self._process.wait(20)
        self._folder.cleanup()
