"""Load every compiled kernel of sparse methods and codecs before the first gradient comes.

Numba keeps compiled functions in files. To read them takes a second of processor time, and to compile them ten seconds;
that belongs to the construction of an optimizer and not to its first step.

The group has met by then, and heartbeats must leave meanwhile. While Numba compiles, it holds the interpreter's lock
most of the time, and on a busy machine the thread that sends heartbeats then got the lock too rarely: the other ranks
gave this one up. So the kernels are compiled in a process of their own, for which this one waits without the lock. One
process of a machine has that done for all. That also keeps Numba's files right: it locks none of them, and two
processes that add code for two types to one function could each take the same file for it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Final

import numpy as np

from totalreduce.kernels import coding, machine_code, merging, quantisation, scattering, selection
from totalreduce.kernels.machine_code import kernels_folder, open_kernels_folder
from totalreduce.kernels.numba_names import check_numba

__all__ = ["call_codecs", "call_sparse", "load", "load_codecs"]

_log = logging.getLogger(__name__)

#: The program of the process that compiles: it calls one function of this module, and finds modules where this process
#: does.
_PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[2:]
from totalreduce.kernels import ahead
getattr(ahead, sys.argv[1])()
"""
#: How long that process may take. Afterwards this process compiles by itself.
_COMPILE_S: Final = 600.0
#: The kernels take less on the disk.
_ROOM_BYTES: Final = 8 << 20


def load() -> None:
    """Load the kernels of the sparse methods, with the types that the methods use; a second call takes no time."""
    _compile_once("call_sparse")
    call_sparse()


def load_codecs() -> None:
    """Load the kernels of the codecs; a second call takes no time. ``load`` has those of lists of elements."""
    _compile_once("call_codecs")
    call_codecs()


def _compile_once(name: str) -> None:
    """Have a process compile the kernels that a function of this module calls, unless one of this machine has done so.

    If that is not possible, Numba compiles them in this process when they are called.

    Raises:
        UnsupportedError: Numba cannot be used.
    """
    check_numba()
    path = kernels_folder()
    if path is None:
        return
    mark = f"{name}.compiled"
    try:
        with open_kernels_folder(path) as folder:
            if folder.has(mark):
                return
            _log.info("the kernels are being compiled, once on this machine: some ten seconds of processor time")
            folder.write("room", bytes(_ROOM_BYTES))  # else a full disk would cost two compilations
            folder.remove("room")
            with machine_code.only_one(folder, f"{name}.lock"):
                if not folder.has(mark) and _compile_apart(name):
                    folder.write(mark, b"")
    except OSError as error:
        machine_code.warn_not_kept(error)
    except machine_code.NoCodeError as error:
        _log.warning("this process compiles the kernels by itself: %s", error)


def _compile_apart(name: str) -> bool:
    """Call a function of this module in a process of its own; return whether that has succeeded."""
    argv = [sys.executable, "-c", _PROGRAM, name, *sys.path]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        _log.warning("the kernels were not compiled within %g s; this process compiles them now", _COMPILE_S)
        return False
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        cause = said[-1] if said else f"exit code {done.returncode}"
        _log.warning("the process that compiles the kernels has failed (%s); this process compiles them now", cause)
    return not done.returncode


def call_sparse() -> None:
    """Call every kernel of the sparse methods once, with the types that the methods use."""
    one, n = np.float32(1.0), 2 * selection.LANES
    values, index = np.ones(n, np.float32), np.arange(n, dtype=np.int32)
    room_index, room_value = np.empty(2 * n, np.int32), np.empty(2 * n, np.float32)
    selection.accumulate(values.copy(), values, one, 1, 0, room_index, room_value, 0)
    selection.select(values, 1, 0, room_index, room_value, 0)
    selection.kth_magnitude([values], 1)
    selection.keep_largest(room_index[:n], room_value[:n], 1, n)
    selection.count_bins(values, 1, 0, np.zeros(1, np.int64))
    code = np.zeros(coding.coded_bytes_max(n, n), np.uint8)
    coding.decode_gaps(code[: coding.encode_gaps(index, 0, 0, code)], 0, n, index)
    coding.round_values(values)
    coding.widen(np.zeros(n, np.uint16), np.empty(n, np.float32))
    for num_lists in (2, 3):
        bounds = np.arange(num_lists + 1) * n
        merging.add_up(np.tile(index, num_lists), np.tile(values, num_lists), bounds)
    merging.found_in(index, index)
    for scattered in (scattering.overwrite, scattering.scatter, scattering.scatter_add):
        scattered(values, 0, index, values, one)
    scattering.gather(values, 0, index, values)
    scattering.keep_rest(values, 0, index, values, values, index)


def call_codecs() -> None:
    """Call every kernel of the codecs once."""
    values, out = np.ones(10, np.float32), np.zeros(10, np.float32)
    scale, code = np.ones(2, np.float32), np.zeros(16, np.uint8)
    one, integers = scale[:1], code[:10].view(np.int8)
    quantisation.within_limit(values)
    quantisation.encode_bytes(values.copy(), 10, 0, False, True, one, integers)
    quantisation.decode_bytes(one, integers, 10, False, out)
    quantisation.encode_nibbles(values.copy(), 10, 0, False, True, one, code[:5])
    quantisation.decode_nibbles(one, code[:5], 10, False, out)
    quantisation.encode_trits(values.copy(), 10, 0, True, one, code[:2])
    quantisation.decode_trits(one, code[:2], 10, False, out)
    quantisation.encode_signs(values.copy(), 64, True, scale, code[:8])
    quantisation.decode_signs(scale, code[:8], 64, False, out)
    quantisation.round_halves(values.copy(), True, np.zeros(10, np.uint16))
    listed, signs = np.arange(3, dtype=np.int32), np.zeros(1, np.uint8)
    quantisation.take_quanta(values.copy(), np.float32(1.0), listed, True, signs)
    quantisation.write_quanta(signs, np.float32(1.0), listed, out)
