"""Compiled functions that the package carries: what fits is loaded, and of what does not fit nothing is used.

The function of these tests is LLVM's assembly, so that Numba compiles nothing.
"""

import json
import os
import platform
import shutil

import pytest
import ship_code

from totalreduce.cli import doctor
from totalreduce.foundation import shipped_code
from totalreduce.foundation.shipped_code import LEVELS, NoShippedCodeError, find_library, write_manifest
from totalreduce.kernels import machine_code

MODULE = """
def assembly():
    return "define i64 @double(i64 %0) {\\n  %2 = mul i64 2, %0\\n  ret i64 %2\\n}", "double"
"""
V3, V4 = LEVELS["x86-64-v3"], LEVELS["x86-64-v4"]
#: The levels of these tests.
MADE = ("x86-64-v3", "x86-64")

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("ld") is None, reason="code is shipped for x86-64, and ld links it"
)


@pytest.fixture
def function(tmp_path, monkeypatch):
    """A function of whom the package carries code for two levels; its cache is empty."""
    source, shipped = tmp_path / "doubling.py", tmp_path / "shipped"
    source.write_text(MODULE)
    shipped.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine_code, "SHIPPED", shipped)
    monkeypatch.setattr(shipped_code, "_processor_flags", lambda: V3)
    function = machine_code.CompiledFunction("doubling", 1, (source,), "what doubles")
    for level in MADE:
        ship_code.make_library(function, level, shipped)
    write_manifest(shipped, {function.name: function.sources}, MADE)
    return function


def find(function):
    return find_library(machine_code.SHIPPED, function.name, function.sources)


def test_code_that_fits_is_loaded_and_nothing_is_compiled(function, monkeypatch):
    def emit(_function):
        raise AssertionError

    monkeypatch.setattr(machine_code, "emit", emit)
    monkeypatch.setattr(machine_code, "_binding", lambda: emit(function))
    loaded = machine_code.load(function)
    assert (loaded.function(21), loaded.level) == (42, "x86-64-v3")


def test_the_code_is_for_the_best_level_that_the_processor_has(function, monkeypatch):
    for flags in (V3, V4):
        monkeypatch.setattr(shipped_code, "_processor_flags", lambda flags=flags: flags)
        assert find(function).path == machine_code.SHIPPED / "doubling-x86-64-v3.so"
    for flags in (V3 - {"avx2"}, frozenset()):
        monkeypatch.setattr(shipped_code, "_processor_flags", lambda flags=flags: flags)
        assert find(function).path == machine_code.SHIPPED / "doubling-x86-64.so"


def change_manifest(change):
    path = machine_code.SHIPPED / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def write_other(function):
    """A library that nothing can load, with the digest that the manifest says."""
    for level in MADE:
        (machine_code.SHIPPED / f"doubling-{level}.so").write_bytes(b"\x7fELF but no more")
    write_manifest(machine_code.SHIPPED, {function.name: function.sources}, MADE)


def flip_bit(_function):
    path = machine_code.SHIPPED / "doubling-x86-64-v3.so"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(function):
    path = machine_code.SHIPPED / "doubling-x86-64-v3.so"
    path.write_bytes(path.read_bytes()[:-1])


def fold(_function):
    (machine_code.SHIPPED / "doubling-x86-64-v3.so").unlink()
    (machine_code.SHIPPED / "doubling-x86-64-v3.so").mkdir()


#: What does not fit, and what is said of it.
MISFITS = {
    "no manifest": (lambda _: (machine_code.SHIPPED / "manifest.json").unlink(), "this installation carries none"),
    "no folder": (lambda _: shutil.rmtree(machine_code.SHIPPED), "this installation carries none"),
    "manifest cut": (lambda _: os.truncate(machine_code.SHIPPED / "manifest.json", 40), "manifest.json cannot be read"),
    "manifest of another form": (
        lambda _: (machine_code.SHIPPED / "manifest.json").write_text("[1]"),
        "manifest.json cannot be read",
    ),
    "other function": (lambda _: change_manifest(lambda all_: all_["functions"].clear()), "cannot be read: KeyError"),
    "other sources": (lambda function: function.sources[0].write_text(MODULE + "\n"), "the sources of doubling"),
    "sources that are gone": (lambda function: function.sources[0].unlink(), "it cannot be read"),
    "other architecture": (
        lambda _: change_manifest(lambda all_: all_.update(machine="aarch64")),
        "it is for aarch64, and this machine is x86_64",
    ),
    "only higher levels": (
        lambda _: change_manifest(lambda all_: all_["functions"]["doubling"]["files"].pop("x86-64")),
        "it is for x86-64-v3, which this processor is not",
    ),
    "other bit": (flip_bit, "doubling-x86-64-v3.so is damaged"),
    "file cut": (cut, "doubling-x86-64-v3.so is damaged"),
    "file gone": (lambda _: (machine_code.SHIPPED / "doubling-x86-64-v3.so").unlink(), "it cannot be read"),
    "a folder": (fold, "it cannot be read"),
    "no library": (write_other, "it cannot be loaded"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_code_that_does_not_fit_is_not_used_and_the_function_is_compiled(function, misfit, monkeypatch):
    change, reason = MISFITS[misfit]
    change(function)
    if misfit == "only higher levels":
        monkeypatch.setattr(shipped_code, "_processor_flags", frozenset)
    with pytest.raises(NoShippedCodeError, match=reason):
        machine_code.load_shipped(function)
    if function.sources[0].exists():
        loaded = machine_code.load(function)
        assert (loaded.function(21), loaded.level) == (42, "")


def test_the_doctor_says_what_is_used_and_why_not(function, monkeypatch):
    from totalreduce.kernels import exchange, relay

    monkeypatch.setattr(exchange, "FUNCTION", function)
    monkeypatch.setattr(relay, "FUNCTION", function)
    assert doctor._shipped_code() == "used, for x86-64-v3"
    monkeypatch.setattr(relay, "FUNCTION", function._replace(module="tripling", title="what triples"))
    assert doctor._shipped_code().startswith("used, for x86-64-v3 (what doubles); not used: ")
    (machine_code.SHIPPED / "manifest.json").unlink()
    assert doctor._shipped_code() == "not used: this installation carries none"


def test_the_processor_is_known_without_numba():
    assert "sse2" in shipped_code._processor_flags()


def test_a_processor_that_says_nothing_has_the_lowest_level(monkeypatch):
    def refuse(*_arguments, **_options):
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert shipped_code._processor_flags() == frozenset()
