"""The order of accesses to words that threads and processes share: x86-64 keeps it by itself, aarch64 does not.

No test can show a wrong order on x86-64, nor under an emulator that runs there. So these tests read the code: the
source, in which every shared word is accessed by functions that keep the order, and what LLVM makes of it for aarch64.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from totalreduce.kernels import exchange, relay

KERNELS = Path(exchange.__file__).parent
READS, WRITES = {"load_shared"}, {"store_shared", "raise_shared"}
OF_ENTRIES = {name for name in vars(exchange) if name.startswith("E_")}

#: Writes LLVM's assembly of a module for aarch64. Numba compiles for the processor of this machine, so the processor's
#: own instructions are left out, and LLVM translates the rest.
CROSS = """
import importlib, platform, sys
platform.machine = lambda: "another processor"
from llvmlite import binding
sys.path.insert(0, sys.argv[2])
text, _ = importlib.import_module(sys.argv[1]).assembly()
text = text.replace(binding.get_process_triple(), "aarch64-unknown-linux-gnu")
lines = [line for line in text.splitlines() if not line.startswith("target datalayout")]
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
target = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
print(target.emit_assembly(binding.parse_assembly("\\n".join(lines))))
"""
#: The functions by which words are accessed. Each has a word of its own, at 8 times its number.
FUNCTIONS = """
from numba import cfunc, int64
from totalreduce.kernels import atomics, vectors

def accesses(address, word):
    block = atomics.int64_at(address)
    atomics.store_shared(block, 11, word)
    atomics.store(address + 8 * 12, word)
    atomics.raise_shared(block, 13, word)
    vectors.fence()
    return atomics.load_shared(block, 14) + atomics.load(address + 8 * 15)

def assembly():
    made = cfunc(int64(int64, int64), error_model="numpy", _nrt=False)(accesses)
    return made.inspect_llvm(), made.native_name
"""


def names_in(expression, words):
    """The words that the index of an access names, but not those within it: ``LEAVES_BY + row[ROW_PEER]``."""
    if isinstance(expression, ast.BinOp):
        return names_in(expression.left, words) | names_in(expression.right, words)
    return {getattr(expression, "id", None) or getattr(expression, "attr", "")} & words


def accesses_in(module, words):
    """Return the words that a module accesses plainly, and those by the functions that keep the order.

    Each has the sets ``read`` and ``written``.
    """
    plain, ordered = ({"read": set(), "written": set()} for _ in range(2))
    for node in ast.walk(ast.parse((KERNELS / module).read_text())):
        if isinstance(node, ast.Subscript):
            kind = "read" if isinstance(node.ctx, ast.Load) else "written"
            plain[kind] |= names_in(node.slice, words)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in READS | WRITES:
            ordered["read" if node.func.id in READS else "written"] |= names_in(node.args[1], words)
    return plain, ordered


def cross_compiled(module, folder=""):
    made = subprocess.run(
        [sys.executable, "-c", CROSS, module, str(folder)], capture_output=True, text=True, timeout=900, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def ordered_offsets(assembly, instruction):
    """The constants that are added to an address that one of aarch64's ordered instructions uses."""
    found, added = set(), {}
    for line in assembly.splitlines():
        if match := re.match(r"\s+add\s+(x\d+), x\d+, #(\d+)$", line):
            added[match[1]] = int(match[2])
        elif match := re.match(rf"\s+{instruction}\s+\w+, \[(x\d+)\]", line):
            found.add(added.get(match[1]))
    return found


def plain_offsets(assembly):
    """The constants in usual loads and stores of words, but for those of the stack."""
    found = set()
    for line in assembly.splitlines():
        if match := re.match(r"\s+(ldr|str|ldp|stp)\s+x.*\[(x\d+), #(\d+)\]", line):
            found |= {int(match[3])} | ({int(match[3]) + 8} if match[1] in ("ldp", "stp") else set())
    return found


def test_exactly_the_shared_words_of_the_exchange_are_accessed_in_order():
    words = {name for name in vars(exchange) if name.isupper()}
    plain, ordered = accesses_in("exchange_code.py", words)
    shared = set(exchange.SHARED)
    assert not (plain["read"] | plain["written"]) & shared
    assert ordered["written"] == shared
    # What a function returns tells Python of the culprit.
    assert ordered["read"] == shared - {"CULPRIT"}
    assert all(f"``{name}``" in exchange.__doc__ for name in shared | OF_ENTRIES)


def test_every_word_of_an_entry_is_accessed_in_order():
    """Entries are memory of several processes. Their words are accessed by ``load`` and ``store`` only."""
    tree = ast.parse((KERNELS / "exchange_code.py").read_text())
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in OF_ENTRIES]
    accesses = {"load": set(), "store": set(), "_least": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in accesses:
            argument = node.args[1 if node.func.id == "_least" else 0]  # ``_least`` loads a counter of every peer
            accesses[node.func.id] |= {part for part in ast.walk(argument) if part in named}
    assert set(named) == set().union(*accesses.values())
    names = {function: {node.id for node in nodes} for function, nodes in accesses.items()}
    assert names["store"] == names["load"] | names["_least"] == OF_ENTRIES


def test_exactly_the_shared_words_of_the_relay_are_accessed_in_order():
    words = {name for name in vars(relay) if name.isupper()}
    plain, ordered = accesses_in("relay_code.py", words)
    assert not plain["read"] & set(relay.READ_SHARED)
    assert not plain["written"] & set(relay.WRITE_SHARED)
    assert ordered == {"read": set(relay.READ_SHARED), "written": set(relay.WRITE_SHARED)}
    assert all(f"``{name}``" in relay.__doc__ for name in {*relay.READ_SHARED, *relay.WRITE_SHARED})


def test_the_words_that_other_threads_use_of_an_operation_in_the_relay_are_the_shared_ones():
    """Of ``RelayedOperation``, which any thread may use; some methods are for the thread that moves messages."""
    tree = ast.parse((KERNELS.parent / "relay" / "relay.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RelayedOperation")
    read, written = set(), set()
    for method in kind.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in ("promote", "posted", "fail", "positions"):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Subscript) and getattr(node.value, "attr", getattr(node.value, "id", "")) in (
                "words",
                "_words",
            ):
                (read if isinstance(node.ctx, ast.Load) else written).update(
                    names_in(node.slice, {name for name in vars(relay) if name.isupper()} - {"LANES_AT", "LANE_WORDS"})
                )
    assert written == set(relay.READ_SHARED)
    assert read == set(relay.WRITE_SHARED) - {"IS_PROMOTED"}


def test_the_functions_that_keep_the_order_do_so_on_aarch64(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    assembly = cross_compiled("functions", tmp_path)
    assert ordered_offsets(assembly, "stlr") == {8 * 11, 8 * 12}
    assert ordered_offsets(assembly, "ldar") == {8 * 14, 8 * 15}
    assert ordered_offsets(assembly, "ldaxr") == ordered_offsets(assembly, "stlxr\\s+\\w+,") == {8 * 13}
    assert len(re.findall(r"\bdmb\s+ish\b", assembly)) == 1


@pytest.mark.slow
def test_the_exchange_accesses_its_shared_words_in_order_on_aarch64():
    assembly = cross_compiled("totalreduce.kernels.exchange_code")
    # Words of the head. The places of those of the peers depend on the number of ranks.
    shared = {8 * getattr(exchange, name) for name in exchange.SHARED if not name.startswith("PEER_")}
    assert shared <= ordered_offsets(assembly, "stlr") | ordered_offsets(assembly, "stlxr\\s+\\w+,")
    assert shared - {8 * exchange.CULPRIT} <= ordered_offsets(assembly, "ldar")
    assert not shared & plain_offsets(assembly) - {8 * exchange.FOUND}
    assert {getattr(exchange, name) for name in OF_ENTRIES} - {0} <= ordered_offsets(assembly, "stlr")


@pytest.mark.slow
def test_the_relay_accesses_its_shared_words_in_order_on_aarch64():
    assembly = cross_compiled("totalreduce.kernels.relay_code")
    assert len(re.findall(r"\bstlr\b", assembly)) >= len(relay.WRITE_SHARED)
    assert len(re.findall(r"\bldar\b", assembly)) >= len(relay.READ_SHARED)
