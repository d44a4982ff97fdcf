"""``tr.run``: a function as the program of several workers, from a notebook or a script.

The workers are new processes. A forked copy of a process that has used torch can hang, because torch's threads are not
copied, and cannot use CUDA. ``cloudpickle`` copies the function to them, also one that a cell of a notebook or
``__main__`` defines, which no other process can import. The call and what each worker returns are files in a private
folder.
"""

from __future__ import annotations

import contextlib
import linecache
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, WorkerFailedError
from totalreduce.launch import called
from totalreduce.launch.live import open_live_job
from totalreduce.launch.local import run_workers
from totalreduce.launch.output import Output, Streams
from totalreduce.launch.workers import RunResult

__all__ = ["run"]

_Returned = TypeVar("_Returned")
#: Of the interactive cells so many bytes of source are copied, so that tracebacks of workers show their lines.
_SOURCE_BYTES_MAX = 4 << 20


def run(
    function: Callable[..., _Returned],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    output: Output = "all",
) -> list[_Returned]:
    """Call a function in several new processes of this machine, and return what each of them returned.

    The processes are the ranks of one job, as with ``totalreduce run -n``: in the function, ``tr.init()`` returns the
    group, and ``torch.distributed.init_process_group`` needs no address. The function, its arguments and the global
    variables that it uses are copied to each process (``cloudpickle``); it may be defined in a notebook. What it prints
    comes with its rank, as ``[1] loss 0.31``. If a worker fails, the others are ended. Ctrl-C, or the interruption of a
    notebook's cell, ends all of them.

    Args:
        function: Called as ``function(*args, **kwargs)`` in every process.
        num_workers: The number of processes, at least 1.
        args: Positional arguments, the same for all ranks.
        kwargs: Keyword arguments, the same for all ranks.
        timeout_s: After so many seconds all processes are ended. By default there is no limit.
        output: ``"all"``: every line with its rank. ``"rank0"``: what rank 0 prints, as it is. A ``Path``: the files
            ``rank0.log``, ``rank1.log`` and so on in this folder.

    Returns:
        What the function returned, by rank.

    Raises:
        ConfigurationError: An argument is wrong, or the function or what it uses cannot be copied.
        WorkerFailedError: The function raised an error on some rank, or its process ended otherwise. The error has the
            rank and the traceback of the worker that failed first.
        DeadlineExceededError: ``timeout_s`` is over.
    """
    if not callable(function):
        raise ConfigurationError(f"tr.run takes a function and a number of workers, not {function!r}")
    checks.integer("the number of workers", num_workers, minimum=1)
    if output == "capture":
        raise ConfigurationError("output is 'all', 'rank0' or a folder; what a worker returns is the result of tr.run")
    call = _pickled(function, tuple(args), dict(kwargs or {}))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="totalreduce-run-")))
        (folder / "call").write_bytes(pickle.dumps((sys.path, _interactive_sources(), call)))
        streams = stack.enter_context(Streams())
        live, _ = open_live_job(stack, streams.note)
        result = run_workers(
            # -P: the folder of ``called`` has modules whose names are not this library's alone.
            [sys.executable, "-P", called.__file__, str(folder)],
            num_workers=num_workers,
            output=output,
            timeout_s=timeout_s,
            live=live,
            streams=streams,
        )
        for sentence in result.lost:
            streams.note(sentence)
        _raise_failure(result, folder, timeout_s)
        return [_returned(folder, rank) for rank in range(num_workers)]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # the objects are the user's, and so are their errors
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(
            f"{name}, its arguments, or a global variable that it uses cannot be copied to other processes "
            f"({type(error).__name__}: {error}). Make groups, locks, files and generators within the function"
        ) from error
    return data


def _interactive_sources() -> dict[str, Any]:
    """Return the entries of ``linecache`` that no file has: the cells of a notebook or of an interactive shell."""
    sources: dict[str, Any] = {}
    rest = _SOURCE_BYTES_MAX
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and entry[1] is None and entry[0] <= rest:
            sources[name] = entry
            rest -= entry[0]
    return sources


def _raise_failure(result: RunResult, folder: Path, timeout_s: float | None) -> None:
    """Raise the error of a run that has not succeeded."""
    if result.interrupted_by is not None:
        # As if it had come outside of the run: SIGINT raises KeyboardInterrupt, SIGTERM ends this process.
        signal.raise_signal(getattr(signal, result.interrupted_by))
        raise KeyboardInterrupt(f"all workers were ended by {result.interrupted_by}")
    if result.timed_out:
        raise DeadlineExceededError(
            f"the function has not returned on all ranks within {timeout_s:g} s (timeout_s), and all workers were ended"
        )
    failure = result.first_failure
    if failure is None:
        return
    error = folder / f"error{failure.rank}"
    if error.exists():
        trace = error.read_text(encoding="utf-8")
        raise WorkerFailedError(failure.rank, failure.error or failure.describe(), trace, failure.exit_code)
    trace = "\n".join(failure.last_errors)
    raise WorkerFailedError(failure.rank, failure.describe(), trace, failure.exit_code)


def _returned(folder: Path, rank: int) -> Any:
    """Return what a worker has returned. It has exit code 0, which a program that ends itself can have, too."""
    path = folder / f"result{rank}"
    if not path.exists():
        raise WorkerFailedError(rank, "its process has ended (exit code 0) before the function returned", "", 0)
    return pickle.loads(path.read_bytes())  # noqa: S301  (written by this user's process, in a private folder)
