"""Load every compiled kernel of sparse methods and codecs before the first gradient comes.

Numba keeps compiled functions in files. To read them takes a second of processor time, and to compile them ten seconds;
that belongs to the construction of an optimizer and not to its first step.
"""

from __future__ import annotations

import numpy as np

from totalreduce.kernels import coding, merging, quantisation, scattering, selection

__all__ = ["load", "load_codecs"]


def load() -> None:
    """Call every kernel once, with the types that the methods use; a second call takes no time."""
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


def load_codecs() -> None:
    """Call every kernel of the codecs once; a second call takes no time. ``load`` has those of lists of elements."""
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
