"""The self-guided header: 64 bytes whose layout is fixed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import (
    HEADER_BYTES,
    Flag,
    Frame,
    Header,
    pack_signature,
    unpack_schedule,
    unpack_signature,
    with_count,
)
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature, operation_id


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


headers = st.builds(
    Header,
    st.sampled_from(Frame),
    unsigned(32),
    unsigned(64),
    unsigned(32),
    unsigned(32),
    unsigned(16),
    unsigned(8),
    unsigned(32),
    st.binary(min_size=24, max_size=24),
    st.integers(-(2**31), 2**31 - 1),
)


@given(headers)
def test_round_trip(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 64
    assert Header.unpack(packed) == Header.unpack(memoryview(bytearray(packed))) == header


def test_layout() -> None:
    """Other versions must read this: changing it means a new version number."""
    signature = pack_signature(Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.AVG, 3, (2, 5)))
    header = Header(
        Frame.DATA,
        0x01020304,
        0x1112131415161718,
        0x21222324,
        0x31323334,
        0x4142,
        Flag.URGENT,
        0x51525354,
        signature,
        -2,
    )
    assert header.pack().hex() == (
        "5254030104030201181716151413121124232221343332314241020054535251"
        "0108020003000000" + signature[8:12].hex() + "fb24ffcd0a00000000000000feffffff00000000"
    )  # fmt: skip


@pytest.mark.parametrize(("place", "value"), [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, max(Frame) + 1), (3, 255)])
def test_wrong_magic_version_or_frame(place: int, value: int) -> None:
    packed = bytearray(Header(Frame.DATA, 0).pack())
    packed[place] = value
    with pytest.raises(ProtocolError, match=r"not a totalreduce header|unknown frame"):
        Header.unpack(packed)


@given(st.binary(min_size=64, max_size=64))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    try:
        header = Header.unpack(data)
    except ProtocolError:
        return
    assert header.pack()[:3] == data[:3]


@given(st.binary(min_size=24, max_size=24))
def test_any_signature_can_be_described(data: bytes) -> None:
    assert unpack_signature(data)


def test_descriptions() -> None:
    signature = Signature(OpKind.ALLREDUCE, DType.BFLOAT16, ReduceOp.AVG, 0, (3, 4))
    assert signature.describe() == "allreduce(avg) of bfloat16[3, 4]"
    assert unpack_signature(pack_signature(signature)) == "allreduce(avg) of bfloat16[12]"
    assert Signature(OpKind.BROADCAST, DType.BOOL, ReduceOp.NONE, 2, ()).describe() == "broadcast(root=2) of bool[]"
    assert Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,)).describe() == "barrier"
    blocks = Signature(OpKind.ALLGATHER, DType.INT32, ReduceOp.NONE, 0, (), (3, 0, 4), Algorithm.RING)
    assert blocks.describe() == "allgather of int32[blocks of 3, 0, 4] by ring"
    assert unpack_signature(pack_signature(blocks)) == "allgather of int32[7] by ring"
    assert unpack_signature(bytes(24)) == "an unknown operation (kind 0, dtype 0, reduction 0)"


def test_every_field_of_a_signature_shows() -> None:
    packed = {
        pack_signature(Signature(kind, dtype, reduction, root, shape, algorithm=algorithm))
        for algorithm in (Algorithm.AUTO, Algorithm.RING, Algorithm.DISSEMINATION)
        for kind in OpKind
        for dtype in DType
        for reduction in ReduceOp
        for root in (0, 1)
        for shape in ((), (1,), (6,), (2, 3), (3, 2), (1, 6))
    }
    assert len(packed) == 3 * len(OpKind) * len(DType) * len(ReduceOp) * 2 * 6


def test_sizes_of_blocks_show() -> None:
    packed = {
        pack_signature(Signature(OpKind.ALLGATHER, DType.INT32, ReduceOp.NONE, 0, (), sizes))
        for sizes in ((1, 2, 3), (3, 2, 1), (6,), (6, 0), (0, 6), (2, 2, 2))
    }
    assert len(packed) == 6


def test_the_schedule_that_was_chosen_shows() -> None:
    """A different choice is a disagreement, although both ranks have asked for the same."""
    signature = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (3,))
    ring, tree = (pack_signature(signature, algorithm) for algorithm in (Algorithm.RING, Algorithm.TREE))
    assert ring != tree
    assert unpack_signature(ring) == unpack_signature(tree) == "allreduce(sum) of float32[3]"
    assert (unpack_schedule(ring), unpack_schedule(tree)) == ("ring", "tree")
    assert unpack_schedule(b"\xff" * 24) == "an unknown schedule (0xffffffff)"


def test_the_count_of_a_pair_replaces_the_number_of_elements() -> None:
    packed = pack_signature(Signature(OpKind.GATHER, DType.INT32, ReduceOp.NONE, 1, ()))
    assert unpack_signature(with_count(packed, 2**40 + 1)) == "gather(root=1) of int32[1099511627777]"
    assert with_count(packed, 1) == packed
    assert with_count(packed, 2)[:16] == packed[:16]


def test_operation_ids_are_what_they_were() -> None:
    assert operation_id("n:layer1.weight") == 0x1F6A62EC221D685C
