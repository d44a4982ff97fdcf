"""The words of compiled functions: no two have one place, and Python and the functions mean the same ones."""

import ast
import ctypes
from pathlib import Path

import numpy as np
import pytest
from numba import cfunc, int64

from totalreduce.foundation.words import CACHE_LINE_WORDS, Structure
from totalreduce.kernels import atomics, exchange, relay

STRUCTURES = [
    *(relay.HEAD, relay.LINE, relay.TRACK, relay.OPERATION, relay.PEER, relay.ROW),
    *(exchange.HEAD, exchange.PEER, exchange.ENTRY),
]
#: By what has the number of the first word, a variable or a function: the structure. Without one it is the head.
OF_BASES = {
    "relay_code.py": {"at": "LINE", "track": "TRACK", "operation": "OPERATION", "_operation": "OPERATION"},
    "exchange_code.py": {"at": "PEER", "_peer": "PEER"},
}


class Example(Structure):
    one: int = 1
    three: int = 3
    last: int = 1


def lengths_of(structure):
    return {name: getattr(type(structure), name) for name in type(structure).__annotations__}


def test_a_structure_numbers_its_words_one_after_the_other():
    words, as_bytes = Example(), Example(unit=8)
    assert (words.one, words.three, words.last, words.num_words) == (0, 1, 4, 5)
    assert (as_bytes.one, as_bytes.three, as_bytes.last, as_bytes.num_words) == (0, 8, 32, 5)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: type(structure).__qualname__)
def test_the_words_of_a_structure_neither_overlap_nor_leave_a_gap(structure):
    unit = 8 if structure is exchange.ENTRY else 1
    used = [
        getattr(structure, name) // unit + index
        for name, count in lengths_of(structure).items()
        for index in range(count)
    ]
    assert sorted(used) == list(range(structure.num_words))


def test_the_parts_of_a_block_follow_each_other():
    ends = [
        relay.LINES_AT + relay.LINES_MAX * relay.LINE.num_words,
        relay.TRACKS_AT + relay.TRACKS_MAX * relay.TRACK.num_words,
        relay.OPERATIONS_AT + relay.OPERATIONS_MAX * relay.OPERATION.num_words,
    ]
    assert relay.HEAD.num_words == relay.LINES_AT
    assert ends == [relay.TRACKS_AT, relay.OPERATIONS_AT, relay.BLOCK_WORDS]
    assert exchange.block_words(3) == exchange.ORDER + 9 + 3 * exchange.PEER.num_words
    # Each counter of an entry is alone in a cache line.
    counters = {exchange.ENTRY.staged, exchange.ENTRY.reduced, exchange.ENTRY.copied, exchange.ENTRY_BYTES}
    assert counters == {8 * CACHE_LINE_WORDS * line for line in (1, 2, 3, 4)}


def test_a_compiled_function_writes_each_word_where_python_reads_it():
    names = [(number, name) for number, structure in enumerate(STRUCTURES) for name in lengths_of(structure)]
    source = "def write(address):\n    block = int64_at(address)\n" + "".join(
        f"    block[S{number}.{name} + {1000 * number}] = {1 + index}\n" for index, (number, name) in enumerate(names)
    )
    scope = {f"S{number}": structure for number, structure in enumerate(STRUCTURES)} | {"int64_at": atomics.int64_at}
    exec(source + "    return 0\n", scope)
    code = cfunc(int64(int64), error_model="numpy", _nrt=False)(scope["write"])
    words = np.zeros(1000 * len(STRUCTURES), np.int64)
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(words.ctypes.data)
    for index, (number, name) in enumerate(names):
        assert words[1000 * number + getattr(STRUCTURES[number], name)] == 1 + index, name
    assert np.count_nonzero(words) == len(names)
    assert "extractvalue" not in code.inspect_llvm()  # they are constants


@pytest.mark.parametrize("module", OF_BASES)
def test_a_function_uses_the_words_of_the_structure_to_which_its_number_belongs(module):
    indices = []
    for node in ast.walk(ast.parse(Path(relay.__file__).with_name(module).read_text())):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "block":
            indices.append(node.slice)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("_shared"):
            indices.append(node.args[1])
    found = set()
    for index in indices:
        base, _, word = ast.unparse(index).partition(" + ")
        structure = OF_BASES[module].get(base.partition("(")[0], "HEAD")
        if isinstance(index, ast.BinOp) and structure != "HEAD":
            assert word.startswith(f"{structure}."), ast.unparse(index)
        elif base.partition(".")[0].isupper():
            assert base.startswith(("HEAD.", "ORDER")), ast.unparse(index)
        found.add(structure)
    assert found == {"HEAD", *OF_BASES[module].values()}
