"""Sixteen float32 at a time, in LLVM's words: what no loop that a compiler vectorises by itself can say.

Selecting is *compressing*: out of sixteen lanes those that are large enough move together to the front. LLVM turns that
into one instruction where the CPU has it (AVX-512) and into a few scalar ones elsewhere; the branch around it is
taken for one group in seven at a density of 1 %. Numba compiles what is here into the loops of ``selection``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "accumulate_lanes", "load_word", "select_lanes", "store_word", "trailing_zeros"]

LANES = 16

_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _MASK = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, ir.IntType(1)))
_MAGNITUDE = 0x7FFFFFFF


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _load(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()))
    loaded.align = 4
    return loaded


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    stored = builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()))
    stored.align = 4


def _spread(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _append(builder: Any, lanes: Any, bound: Any, position: Any, index: Any, value: Any, count: Any) -> Any:
    """Append the lanes whose magnitude is at least ``bound`` to the lists; the new count."""
    magnitude = builder.and_(builder.bitcast(lanes, _INTS), ir.Constant(_INTS, [_MAGNITUDE] * LANES))
    mask = builder.icmp_signed(">=", magnitude, _spread(builder, bound, _INTS))
    bits = builder.bitcast(mask, ir.IntType(LANES))
    before = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0)), likely=False):
        places = builder.add(_spread(builder, position, _INTS), ir.Constant(_INTS, list(range(LANES))))
        for kind, vector, target in ((_FLOATS, lanes, value), (_INTS, places, index)):
            name = f"llvm.experimental.vector.compress.v{LANES}{'f32' if kind is _FLOATS else 'i32'}"
            compress = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, _MASK, kind]), name)
            packed = builder.call(compress, [vector, mask, ir.Constant(kind, ir.Undefined)])
            _store(builder, packed, builder.gep(target, [count]))
        number = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(bits.type, [bits.type]), f"llvm.ctpop.i{LANES}"
        )
        grown = builder.add(count, builder.zext(builder.call(number, [bits]), _INDEX))
        inside = builder.block
    result = builder.phi(_INDEX)
    result.add_incoming(count, before)
    result.add_incoming(grown, inside)
    return result


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_lanes(
    _typing: Any,
    gradient: Any,
    residual: Any,
    at: Any,
    scale: Any,
    bound: Any,
    first: Any,
    index: Any,
    value: Any,
    count: Any,
) -> Any:
    """``gradient[at:at+16] = gradient * scale + residual``; append what is large enough; the new count.

    ``index`` and ``value`` must have room for 16 more, whatever is appended. ``first``: the index of lane 0.
    """
    signature = types.int64(
        gradient, residual, types.int64, types.float32, types.int32, types.int32, index, value, types.int64
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gradient, residual, at, scale, bound, first, index, value, count = arguments
        kinds = signature.args
        place = _pointer(context, builder, kinds[0], gradient, at)
        scaled = builder.fmul(_load(builder, place), _spread(builder, scale, _FLOATS))
        total = builder.fadd(scaled, _load(builder, _pointer(context, builder, kinds[1], residual, at)))
        _store(builder, total, place)
        zero = ir.Constant(_INDEX, 0)
        indices = _pointer(context, builder, kinds[6], index, zero)
        values = _pointer(context, builder, kinds[7], value, zero)
        return _append(builder, total, bound, first, indices, values, count)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def select_lanes(_typing: Any, source: Any, at: Any, bound: Any, first: Any, index: Any, value: Any, count: Any) -> Any:
    """Append those of ``source[at:at+16]`` that are large enough; the new count. See ``accumulate_lanes``."""
    signature = types.int64(source, types.int64, types.int32, types.int32, index, value, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, bound, first, index, value, count = arguments
        kinds = signature.args
        zero = ir.Constant(_INDEX, 0)
        indices = _pointer(context, builder, kinds[4], index, zero)
        values = _pointer(context, builder, kinds[5], value, zero)
        lanes = _load(builder, _pointer(context, builder, kinds[0], source, at))
        return _append(builder, lanes, bound, first, indices, values, count)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(_typing: Any, source: Any, at: Any) -> Any:
    """The eight bytes from ``source[at]`` on, the first one lowest: Numba runs on little-endian machines only."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], *arguments)
        loaded = builder.load(builder.bitcast(place, _INDEX.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(source, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_word(_typing: Any, target: Any, at: Any, word: Any) -> Any:
    """Undo ``load_word``: overwrite the eight bytes from ``target[at]`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, word = arguments
        place = _pointer(context, builder, signature.args[0], target, at)
        stored = builder.store(word, builder.bitcast(place, _INDEX.as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(target, types.int64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_typing: Any, word: Any) -> Any:
    """How many of a word's lowest bits are zero; 64 of 64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate
