"""Load every compiled kernel of sparse methods and codecs before the first gradient comes.

Numba keeps compiled functions in files. To read them takes a second of processor time, and to compile them ten seconds;
that belongs to the construction of an optimizer and not to its first step.

The group has met by then, and heartbeats must leave meanwhile. While Numba compiles, it holds the interpreter's lock
most of the time, and on a busy machine the thread that sends heartbeats then got the lock too rarely: the other ranks
gave this one up. So the kernels are compiled in a process of their own, for which this one waits without the lock. One
process of a machine has that done for all. That also keeps Numba's files right: it locks none of them, and two
processes that add code for two types to one function could each take the same file for it.

Where Numba cannot be used, or fails, or no file can be kept, all kernels are their twins in NumPy, and a warning says
so. To compile them in every process of every job was rejected: each would stop sending heartbeats for it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from totalreduce.foundation.os_errors import describe_error
from totalreduce.kernels import coding, machine_code, merging, quantisation, scattering, selection
from totalreduce.kernels.machine_code import kernels_folder, open_kernels_folder

__all__ = ["codec_calls", "load", "load_codecs", "sparse_calls"]

_log = logging.getLogger(__name__)

#: The program of the process that compiles: it makes the calls of one list of this module, says after each how many
#: are done, and finds modules where this process does.
_PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[2:]
from totalreduce.kernels import ahead
calls = getattr(ahead, sys.argv[1])()
for number, call in enumerate(calls, 1):
    call()
    print(f"{number} of {len(calls)}", flush=True)
"""
#: How long that process may take. Afterwards this process compiles by itself.
_COMPILE_S: Final = 600.0
#: How often the log says how far it is.
_SAY_S: Final = 3.0
#: The kernels take less on the disk.
_ROOM_BYTES: Final = 8 << 20


def load() -> None:
    """Load the kernels of the sparse methods, with the types that the methods use; a second call takes no time."""
    _load("sparse_calls", sparse_calls())


def load_codecs() -> None:
    """Load the kernels of the codecs; a second call takes no time. ``load`` has those of lists of elements."""
    _load("codec_calls", codec_calls())


def _load(name: str, calls: Sequence[Callable[[], Any]]) -> None:
    """Make the calls of a list of this module, whose kernels are compiled first."""
    from totalreduce.kernels.compiled import use_twins  # which imports Numba, as the kernels do
    from totalreduce.kernels.numba_names import WHY_NOT

    reason = WHY_NOT
    if hasattr(selection.select, "twin"):  # it is to be compiled: Numba is there, and has not failed before
        try:
            _compile_once(name)
            for call in calls:
                call()
        except Exception as error:  # whatever another version of Numba raises
            reason = describe_error(error).splitlines()[0]
            use_twins()
    if reason:
        machine_code.warn(
            "sparse methods, codecs and the parameter server compute with NumPy, which is slower, because there is no "
            "compiled code: %s",
            reason,
        )


def _compile_once(name: str) -> None:
    """Have a process compile the kernels of a list of calls of this module, unless one of this machine has done so.

    If that process fails, Numba compiles them in this one when they are called.

    Raises:
        NoCodeError: They cannot be kept, or the other process that compiles them does not come to an end.
    """
    mark = f"{name}.compiled"
    try:
        with open_kernels_folder(kernels_folder()) as folder:
            if folder.has(mark):
                return
            machine_code.check_room(folder, _ROOM_BYTES)
            _log.info("the kernels are being compiled, once on this machine: some ten seconds of one core")
            with machine_code.only_one(folder, f"{name}.lock"):
                if not folder.has(mark) and _compile_apart(name):
                    folder.write(mark, b"")
    except OSError as error:
        raise machine_code.NotKeptError(error) from error


def _compile_apart(name: str) -> bool:
    """Make the calls of a list of this module in a process of its own; return whether that has succeeded.

    The log says how many are done, and when.
    """
    argv = [sys.executable, "-c", _PROGRAM, name, *sys.path]
    begin = time.monotonic()
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
        try:
            said = _follow(process, begin)
        except BaseException:
            process.kill()
            raise
    if said is None:
        _log.warning("the kernels were not compiled within %g s; this process compiles them now", _COMPILE_S)
        return False
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit code {process.returncode}"
        _log.warning("the process that compiles the kernels has failed (%s); this process compiles them now", cause)
        return False
    _log.info("the kernels were compiled in %.0f s", time.monotonic() - begin)
    return True


def _follow(process: subprocess.Popen[bytes], begin: float) -> bytes | None:
    """Wait for the process that compiles; return what it wrote of errors, or ``None`` if it was ended at the limit."""
    while True:
        try:
            return process.communicate(timeout=_SAY_S)[1]
        except subprocess.TimeoutExpired as waited:
            seconds, lines = time.monotonic() - begin, (waited.output or b"").decode("ascii", "replace").splitlines()
            if seconds > _COMPILE_S:
                process.kill()
                return None
            _log.info("compiled %s kernels after %.0f s", lines[-1] if lines else "none of the", seconds)


def sparse_calls() -> list[Callable[[], Any]]:
    """Return calls of every kernel of the sparse methods, each of them once, with the types that the methods use."""
    one, n = np.float32(1.0), 2 * selection.LANES
    values, index = np.ones(n, np.float32), np.arange(n, dtype=np.int32)
    room_index, room_value = np.empty(2 * n, np.int32), np.empty(2 * n, np.float32)
    code = np.zeros(coding.coded_bytes_max(n, n), np.uint8)

    def add_up(num_lists: int) -> None:
        bounds = np.arange(num_lists + 1) * n
        merging.add_up(np.tile(index, num_lists), np.tile(values, num_lists), bounds)

    return [
        lambda: selection.accumulate(values.copy(), values, one, 1, 0, room_index, room_value, 0),
        lambda: selection.select(values, 1, 0, room_index, room_value, 0),
        lambda: selection.kth_magnitude([values], 1),
        lambda: selection.keep_largest(room_index[:n], room_value[:n], 1, n),
        lambda: selection.count_bins(values, 1, 0, np.zeros(1, np.int64)),
        lambda: coding.decode_gaps(code[: coding.encode_gaps(index, 0, 0, code)], 0, n, index),
        lambda: coding.round_values(values),
        lambda: coding.widen(np.zeros(n, np.uint16), np.empty(n, np.float32)),
        lambda: add_up(2),
        lambda: add_up(3),
        lambda: merging.found_in(index, index),
        lambda: scattering.overwrite(values, 0, index, values, one),
        lambda: scattering.scatter(values, 0, index, values, one),
        lambda: scattering.scatter_add(values, 0, index, values, one),
        lambda: scattering.gather(values, 0, index, values),
        lambda: scattering.keep_rest(values, 0, index, values, values, index),
    ]


def codec_calls() -> list[Callable[[], Any]]:
    """Return calls of every kernel of the codecs, each of them once."""
    values, out = np.ones(10, np.float32), np.zeros(10, np.float32)
    scale, code = np.ones(2, np.float32), np.zeros(16, np.uint8)
    one, integers = scale[:1], code[:10].view(np.int8)
    listed, signs = np.arange(3, dtype=np.int32), np.zeros(1, np.uint8)
    return [
        lambda: quantisation.within_limit(values),
        lambda: quantisation.encode_bytes(values.copy(), 10, 0, False, True, one, integers),
        lambda: quantisation.decode_bytes(one, integers, 10, False, out),
        lambda: quantisation.encode_nibbles(values.copy(), 10, 0, False, True, one, code[:5]),
        lambda: quantisation.decode_nibbles(one, code[:5], 10, False, out),
        lambda: quantisation.encode_trits(values.copy(), 10, 0, True, one, code[:2]),
        lambda: quantisation.decode_trits(one, code[:2], 10, False, out),
        lambda: quantisation.encode_signs(values.copy(), 64, True, scale, code[:8]),
        lambda: quantisation.decode_signs(scale, code[:8], 64, False, out),
        lambda: quantisation.round_halves(values.copy(), True, np.zeros(10, np.uint16)),
        lambda: quantisation.take_quanta(values.copy(), np.float32(1.0), listed, True, signs),
        lambda: quantisation.write_quanta(signs, np.float32(1.0), listed, out),
    ]
