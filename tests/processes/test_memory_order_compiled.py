"""The order of accesses to shared words in what LLVM compiles for aarch64, which another process does."""

import re
import subprocess
import sys

import pytest

from totalreduce.kernels import exchange, relay

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
    names = [word.removeprefix("HEAD.") for word in exchange.SHARED if word.startswith("HEAD.")]
    shared = {8 * getattr(exchange.HEAD, name) for name in names}
    assert shared <= ordered_offsets(assembly, "stlr") | ordered_offsets(assembly, "stlxr\\s+\\w+,")
    assert shared - {8 * exchange.HEAD.culprit} <= ordered_offsets(assembly, "ldar")
    assert not shared & plain_offsets(assembly) - {8 * exchange.HEAD.found}
    entries = {at for name, at in vars(exchange.ENTRY).items() if name != "num_words"}
    assert entries - {0} <= ordered_offsets(assembly, "stlr")


@pytest.mark.slow
def test_the_relay_accesses_its_shared_words_in_order_on_aarch64():
    assembly = cross_compiled("totalreduce.kernels.relay_code")
    assert len(re.findall(r"\bstlr\b", assembly)) >= len(relay.WRITE_SHARED)
    assert len(re.findall(r"\bldar\b", assembly)) >= len(relay.READ_SHARED)
