"""Values that travel between ranks: what arrives is what was sent, or nothing was."""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import random
import sys
import tracemalloc
import types
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.encoding import decode, empty_tensors, encode, pack, pack_refusal, unpack


class Colour(enum.Enum):
    RED = "r"
    GREEN = "g"
    VERT = "g"  # noqa: PIE796  (another name for GREEN)


class Outer:
    class Shade(enum.IntEnum):
        DARK = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Settings:
    lr: float


class Attributes(dict):
    pass


def same(a: object, b: object) -> bool:
    """Of the same types all the way down, and equal; not a number is equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    return a == b or (a != a and b != b)  # noqa: PLR0124  (not a number)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def after_a_journey(value: object) -> object:
    """Both ways in which objects travel; they must give the same."""
    document, tensors = encode(value)
    memory = empty_tensors(document)
    assert [(t.dtype, t.shape) for t in memory] == [(t.dtype, t.shape) for t in tensors]
    for mine, theirs in zip(memory, tensors, strict=True):
        mine.copy_(theirs)
    there, here = decode(document, memory), unpack(pack(value))
    assert same(there, here)
    return here


def namespace(attributes: dict[str, object]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(attributes)
    return made


ZONE = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
VALUES = {
    "scalars": [None, True, False, 0, -1, 2**200, 1.5, -0.0, 5e-324, math.inf, -math.inf, math.nan, "", "ä\x00\ud800"],
    "complex numbers": [1j, complex(math.inf, -0.0)],
    "bytes": [b"", b"\x00\xff" * 100, bytearray(b"ab"), bytearray()],
    "containers": [[], (), {}, set(), frozenset(), [[[]]], ({"a": [1, (2,)]},), {1, "a", (2, b"c")}, {frozenset({3})}],
    "keys": {"a": 1, 2: 3, True: 4, None: 5, 2.5: 6, (1, "b"): 7, b"c": 8, Colour.RED: 9, frozenset({1}): 10},
    "an ordered dict": collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),
    "a counter": collections.Counter("banana"),
    "a namespace": argparse.Namespace(lr=0.1, layers=[1, 2], inner=argparse.Namespace(name=None)),
    "a simple namespace": types.SimpleNamespace(a=types.SimpleNamespace(), self=1),
    "a namespace with any names": namespace({"not a name": 1, "self": 2, "args": 3}),
    "enumerations": [Colour.RED, Colour.GREEN, Outer.Shade.DARK, Level.LOW, Word.YES, Access.READ],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("c:\\d"), pathlib.Path("ä")],
    "dates and times": [
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 23, 59, 59, 999999),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        datetime.time(1, 2, 3, tzinfo=ZONE),
        datetime.timedelta(days=-1, microseconds=1),
        datetime.timedelta.max,
    ],
    "what torch has beside tensors": [
        torch.device("cpu"),
        torch.device("cuda", 3),
        torch.float32,
        torch.float8_e4m3fn,
        torch.Size([1, 2]),
    ],
    "tensors": [
        torch.arange(6).view(2, 3),
        torch.randn(3, 4).t(),
        torch.zeros(0, 5),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([2**63], dtype=torch.uint64),
    ],
    "arrays": [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(3, 2).T,
        np.zeros((0, 3), np.float16),
        np.array(7, np.uint64),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["one", "zwölf", ""]),
        np.array([b"ab", b"\xff"]),
        np.array(["2024-02-29", "NaT"], "M8[s]"),
        np.array([1, 2], "m8[25us]"),
        np.arange(10)[::-2],
        np.arange(6).reshape(2, 3).astype(np.int8, order="F"),
    ],
    "scalars of NumPy": [
        np.float32(0.1),
        np.float64("nan"),
        np.int8(-5),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex128(1j),
        np.str_("text"),
        np.bytes_(b"x"),
        np.datetime64("2024-02-29T12:00", "ns"),
        np.timedelta64(3, "D"),
    ],
    "states of random numbers": [
        random.Random(1).getstate(),
        np.random.RandomState(1).get_state(),
        np.random.default_rng(1).bit_generator.state,
        torch.Generator().manual_seed(1).get_state(),
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_arrives_as_it_is(name):
    back = after_a_journey(VALUES[name])
    assert same(back, VALUES[name]), back


def test_members_of_enumerations_are_the_same_objects():
    assert after_a_journey([Colour.VERT, Level.LOW])[0] is Colour.GREEN


def test_a_state_dict_keeps_what_load_state_dict_goes_by():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    back = after_a_journey(state)
    assert type(back) is collections.OrderedDict
    assert same(dict(back), {name: tensor.detach() for name, tensor in state.items()})
    assert back._metadata == state._metadata
    assert type(back._metadata) is type(state._metadata)
    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).load_state_dict(back)


def test_what_arrives_is_nobodys_else_and_may_be_changed():
    sent = {"tensor": torch.ones(2), "array": np.ones(2), "list": [1]}
    back = after_a_journey(sent)
    back["tensor"] += 1
    back["array"] += 1
    back["list"].append(2)
    assert sent["tensor"].tolist() == sent["array"].tolist() == [1, 1]
    assert sent["list"] == [1]


def test_parameters_arrive_as_tensors():
    back = after_a_journey(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=20,
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(plain)
def test_any_nested_value_arrives_as_it_is(value):
    assert same(unpack(pack(value)), value)


# ------------------------------------------------------------------------------------------------------------ refusals


def local_enumeration():
    class Local(enum.Enum):
        ONE = 1

    return Local.ONE


REFUSED = {
    "a function": (print, "builtin_function_or_method cannot be sent; only numbers, strings"),
    "an object of a class": (object(), "a object cannot be sent"),
    "a module": (json, "a module cannot be sent"),
    "a class": (Colour, "EnumType cannot be sent"),
    "a dataclass": (Settings(0.1), r"a Settings cannot be sent; send dataclasses.asdict\(...\) of it"),
    "a named tuple": (Point(1), r"a Point cannot be sent; send its _asdict\(\)"),
    "what torch.max returns": (torch.ones(2, 2).max(0), "it would arrive as a tuple: send a tuple"),
    "a subclass of dict": (Attributes(), "a Attributes cannot be sent; it would arrive as a dict: send a dict"),
    "a default dict": (collections.defaultdict(list), "defaultdict cannot be sent; it would arrive as a dict"),
    "a masked array": (np.ma.array([1]), "MaskedArray cannot be sent; it would arrive as a ndarray"),
    "an array of objects": (np.array([None, {}]), "a NumPy array of dtype object cannot be sent .*send a list"),
    "an array of records": (np.zeros(1, "i4,f8"), "a NumPy array of dtype"),
    "a record": (np.zeros(1, "i4,f8")[0], "a NumPy scalar of dtype"),
    "an array of long doubles": (np.zeros(1, np.longdouble), "dtype (long|float)"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "a tensor cannot be sent: it has layout torch.sparse_coo"),
    "a member of a local enumeration": (local_enumeration(), "<locals>.Local.ONE, where the other ranks would look"),
    "several flags": (Access.READ | Access.WRITE, "where the other ranks would look"),
    "an integer of too many digits": (10**5000, "cannot be written as JSON"),
    "a time zone with a name": (
        datetime.datetime(2024, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {"utcoffset": lambda *_: None})()),
        "time zone",
    ),
    "a key": ({"a": {object(): 1}}, r"the key <object .* of value\['a'\]: a object cannot be sent"),
    "an element": ([0, {"b": (1, {2, print})}], r"value\[1\]\['b'\]\[1\]\[\d\]: a builtin_function"),
    "a state's extras": (argparse.Namespace(model=torch.nn.Linear(1, 1)), r"value\['model'\]: a Linear cannot be sent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_arrive_as_something_else_is_refused(name):
    value, words = REFUSED[name]
    with pytest.raises(ConfigurationError, match=words):
        encode(value)


def test_depth_is_bounded():
    value = 1
    for _ in range(40):
        value = [value]
    with pytest.raises(ConfigurationError, match="nested deeper than 32 levels"):
        encode(value)
    for depth in (40, 100_000):
        text = document('{"list": [' * depth + "1" + "]}" * depth)
        with pytest.raises(ProtocolError):
            decode(text, [])


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(ConfigurationError, match="nested deeper"):
        encode(value)


def test_a_refusal_is_raised_where_it_arrives():
    with pytest.raises(ConfigurationError, match="rank 3 has no such thing"):
        unpack(pack_refusal("rank 3 has no such thing"))


# --------------------------------------------------------------------------------- what no correct peer sends


def document(node: str, *tensors: tuple[str, list]) -> str:
    return f'{{"tensors": {json.dumps(tensors)}, "value": {node}}}'


def packed(text: str, data: bytes = b"") -> torch.Tensor:
    length = len(text.encode()).to_bytes(8, "little")
    return torch.frombuffer(bytearray(length + text.encode() + data), dtype=torch.uint8)


BYTES = ("uint8", [8])
MALICE = [
    "",
    "[]",
    "{}",
    "3",
    '{"value": 1}',
    '{"tensors": [], "value": 1, "more": 2}',
    '{"tensors": 5, "value": 1}',
    document('{"call": ["os.system", "true"]}'),
    document('{"a": 1, "b": 2}'),
    document("{}"),
    document("[1]"),
    document('{"list": 5}'),
    document('{"list": {"list": []}}'),
    document('{"set": [{"list": []}]}'),
    document('{"dict": [[{"list": []}, 1]]}'),
    document('{"dict": [1]}'),
    document('{"dict": [[1]]}'),
    document('{"counter": [1]}'),
    document('{"size": ["a"]}'),
    document('{"size": [{"tensor": 0}]}'),
    document('{"ordered dict": []}'),
    document('{"namespace": [[1, 2]]}'),
    document('{"complex": ["a", 1]}'),
    document('{"complex": [1]}'),
    document('{"date": "yesterday"}'),
    document('{"date": 5}'),
    document('{"timedelta": ["a"]}'),
    document('{"timedelta": [1e300]}'),
    document('{"path": 5}'),
    document('{"device": "teapot"}'),
    document('{"dtype": "load"}'),
    document('{"dtype": ["float32"]}'),
    document('{"enum": ["os", "system", "x"]}'),
    document('{"enum": ["os"]}'),
    document('{"enum": [1, 2, 3]}'),
    document('{"tensor": 0}'),
    document('{"tensor": -1}', BYTES),
    document('{"tensor": true}', BYTES, BYTES),
    document('{"tensor": "0"}', BYTES),
    document('{"bytes": 1}', BYTES),
    document('{"array": [0, "O", [1]]}', BYTES),
    document('{"array": [0, "|O", [1]]}', BYTES),
    document('{"array": [0, "V8", [1]]}', BYTES),
    document('{"array": [0, "<f8,<f8", [1]]}', BYTES),
    document('{"array": [0, "<f16", [1]]}', BYTES),
    document('{"array": [0, "<f8", [2]]}', BYTES),
    document('{"array": [0, "<f8", [-1]]}', BYTES),
    document('{"array": [0, "<f8", 1]}', BYTES),
    document('{"array": [0, "<f8"]}', BYTES),
    document('{"array": [0, "<U0", [1]]}', BYTES),
    document('{"array": [0, "<M8[parsec]", [1]]}', BYTES),
    document('{"array": [0, "<f8", [1]]}', ("float64", [1])),
    document('{"number": [0, "<f4"]}', BYTES),
    document("1", ("object", [1])),
    document("1", ("float32", [-1])),
    document("1", ("float32", [1.0])),
    document("1", ("float32", [True])),
    document("1", ("float32", 8)),
    document("1", ("float32",)),
    document("1", ("uint8", [2**62, 2**62])),
    document("1", ("uint8", [2**62])),
]


@pytest.mark.parametrize("text", MALICE)
def test_documents_that_encode_never_makes_are_refused(text):
    def read():
        memory = empty_tensors(text)
        decode(text, memory)

    # A member of an enumeration that this process does not have may come from a correct peer.
    expected = (ProtocolError, ConfigurationError) if '"enum"' in text else ProtocolError
    with pytest.raises(expected):
        read()
    with pytest.raises(expected):
        unpack(packed(text, bytes(8 * text.count("uint8"))))


def test_texts_that_are_no_unicode_are_refused():
    with pytest.raises(ProtocolError):
        unpack(packed(document('{"array": [0, "<U1", [2]]}', BYTES), b"\x00\x00\x11\x00\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 8, b"\x05" + bytes(7) + b"1234", b"\x02" + bytes(7) + b"\xff\xff"]
)
def test_bytes_that_pack_never_makes_are_refused(data):
    with pytest.raises(ProtocolError):
        unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_length_that_is_not_the_announced_one_is_refused(size):
    with pytest.raises(ProtocolError, match=f"announces 8 bytes of tensors has {size}"):
        unpack(packed(document('{"bytes": 0}', BYTES), bytes(size)))


def test_no_memory_is_taken_for_what_is_announced_and_not_there():
    text = document('{"tensor": 0}', ("uint8", [1 << 33]))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="8589934592 bytes"):
        unpack(packed(text))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


KINDS = ["list", "set", "dict", "namespace", "ordered dict", "array", "number", "bytes", "tensor", "size", "complex"]
KINDS += ["enum", "path", "date", "timedelta", "device", "dtype", "counter"]


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.floats(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KINDS), inner, max_size=1),
        max_leaves=8,
    )
)
def test_noise_is_a_value_or_an_error_of_ours(node):
    text = document(json.dumps(node), BYTES)
    with contextlib.suppress(ProtocolError, ConfigurationError):
        unpack(packed(text, bytes(8)))


class Lazy(types.ModuleType):
    """A module that does something when it is looked into, like those that are imported late."""

    touched = False

    def __getattribute__(self, name):
        Lazy.touched = True
        return super().__getattribute__(name)


def test_looking_for_an_enumeration_runs_no_code_and_imports_nothing():
    module = Lazy("late")
    sys.modules["late"] = module
    Lazy.touched = False
    before = set(sys.modules)
    try:
        for where in (["late", "Colour", "RED"], ["late.inner", "Colour", "RED"], ["antigravity", "A", "B"]):
            with pytest.raises(ConfigurationError, match="has imported no such member"):
                decode(document(json.dumps({"enum": where})), [])
    finally:
        del sys.modules["late"]
    assert not Lazy.touched
    assert set(sys.modules) == before - {"late"}


def test_only_members_of_enumerations_are_found():
    for where in (["os", "environ", "HOME"], [__name__, "Settings", "lr"], [__name__, "Colour", "__module__"]):
        with pytest.raises(ConfigurationError, match="no such member"):
            decode(document(json.dumps({"enum": where})), [])
