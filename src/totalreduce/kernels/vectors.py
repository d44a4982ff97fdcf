"""Operations on sixty-four float32 at a time, in LLVM's code: compilers do not find them in a loop by themselves.

A comparison of sixty-four lanes with a bound gives one machine word of bits, and at a density of 1 % it has one bit or
none: the loop over its bits, in ``selection``, takes a few cycles while the next lanes come from memory. (LLVM can also
move the lanes themselves to the front, but only AVX-512 has an instruction for that; elsewhere it took 70 cycles each
time.) Numba compiles these functions into the loops of ``selection``, ``scattering``, ``coding`` and ``quantisation``.
"""

from __future__ import annotations

from typing import Any

from totalreduce.kernels.numba_names import intrinsic, ir, types

__all__ = [
    "LANES",
    "accumulate_lanes",
    "fence",
    "load_word",
    "prefetch",
    "select_lanes",
    "sign_lanes",
    "store_word",
    "stream_lanes",
    "trailing_zeros",
]

LANES = 64

_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT))
_MAGNITUDE = 0x7FFFFFFF


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _load(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()))
    loaded.align = 4
    return loaded


def _spread(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _reaching(builder: Any, lanes: Any, bound: Any) -> Any:
    """Return a word with a bit for each lane, the first one lowest: whether its magnitude is at least ``bound``."""
    magnitude = builder.and_(builder.bitcast(lanes, _INTS), ir.Constant(_INTS, [_MAGNITUDE] * LANES))
    return builder.bitcast(builder.icmp_signed(">=", magnitude, _spread(builder, bound, _INTS)), _INDEX)


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_lanes(_typing: Any, gradient: Any, residual: Any, at: Any, scale: Any, bound: Any) -> Any:
    """``gradient[at:at+64] = gradient * scale + residual``; return the word of ``_reaching``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gradient, residual, at, scale, bound = arguments
        place = _pointer(context, builder, signature.args[0], gradient, at)
        scaled = builder.fmul(_load(builder, place), _spread(builder, scale, _FLOATS))
        total = builder.fadd(scaled, _load(builder, _pointer(context, builder, signature.args[1], residual, at)))
        stored = builder.store(total, builder.bitcast(place, _FLOATS.as_pointer()))
        stored.align = 4
        return _reaching(builder, total, bound)

    return types.uint64(gradient, residual, types.int64, types.float32, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def select_lanes(_typing: Any, source: Any, at: Any, bound: Any) -> Any:
    """Return the word of ``_reaching`` for ``source[at:at+64]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, bound = arguments
        lanes = _load(builder, _pointer(context, builder, signature.args[0], source, at))
        return _reaching(builder, lanes, bound)

    return types.uint64(source, types.int64, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def sign_lanes(_typing: Any, source: Any, at: Any) -> Any:
    """Return a word with a bit for each element of ``source[at:at+64]``, the first one lowest: its sign bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _load(builder, _pointer(context, builder, signature.args[0], *arguments))
        negative = builder.icmp_signed("<", builder.bitcast(lanes, _INTS), ir.Constant(_INTS, [0] * LANES))
        return builder.bitcast(negative, _INDEX)

    return types.uint64(source, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_lanes(_typing: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """``target[at:at+64] = source[start:start+64]``, bypassing the caches; see ``fence``.

    The target's lanes must begin at a multiple of 64 bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, start, target, at = arguments
        lanes = _load(builder, _pointer(context, builder, signature.args[0], source, start))
        place = _pointer(context, builder, signature.args[2], target, at)
        stored = builder.store(lanes, builder.bitcast(place, _FLOATS.as_pointer()))
        stored.align = 64
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(_typing: Any) -> Any:
    """Order every access before it, streamed elements included, and every access after it."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(_typing: Any, source: Any, at: Any) -> Any:
    """Return the eight bytes from ``source[at]`` on, the first one lowest: Numba's machines are little-endian."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], *arguments)
        loaded = builder.load(builder.bitcast(place, _INDEX.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(source, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_word(_typing: Any, target: Any, at: Any, word: Any) -> Any:
    """Overwrite the eight bytes from ``target[at]`` on, as ``load_word`` reads them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, word = arguments
        place = _pointer(context, builder, signature.args[0], target, at)
        stored = builder.store(word, builder.bitcast(place, _INDEX.as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(target, types.int64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``, of any element type, before it is read and written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(_pointer(context, builder, signature.args[0], *arguments), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        request = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        builder.call(request, [place, _INT(1), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_typing: Any, word: Any) -> Any:
    """Return the number of a word's lowest bits that are zero; 64 for zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate
