"""Compile the functions that the package keeps in files, for levels of x86-64, into libraries that a wheel carries.

``make dist`` calls it. ``foundation/shipped_code.py`` says how the libraries are found, and ``docs/security.md`` why
they are trusted. The linker is that of binutils (``ld``). The libraries refer to functions of the C library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llvmlite import binding

from totalreduce.foundation.shipped_code import LEVELS, write_manifest
from totalreduce.kernels import exchange, relay
from totalreduce.kernels.machine_code import SYMBOL, SYMBOLS, CompiledFunction, emit

#: What is compiled.
FUNCTIONS = (exchange.FUNCTION, relay.FUNCTION)
#: Nothing is written into the libraries that depends on the folder, the time or the machine.
LINK = [
    *("ld", "-shared", "-s", "--gc-sections", "--build-id=none", "--hash-style=gnu"),
    *("-z", "noexecstack", "-z", "now", "-z", "relro", "-z", "max-page-size=4096", "-z", "noseparate-code"),
]
#: Only the function is visible. What it needs after an exception of Python, which it cannot raise, ends the process.
VISIBLE = f"{{ global: {SYMBOL}; local: *; }};\n"
ABORTING = "declare void @abort()\n"
ABORTS = "define hidden void @{name}() {{\n  call void @abort()\n  unreachable\n}}\n"


def main(arguments: list[str]) -> None:
    """Make the folder with the libraries and their manifest anew; without levels there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder, which is made anew")
    parser.add_argument("levels", nargs="*", choices=[*LEVELS, []], help=f"some of {', '.join(LEVELS)}")
    parser.add_argument("--one", action="store_true", help="compile one level in this process; write no manifest")
    options = parser.parse_args(arguments)
    if options.one:
        for function in FUNCTIONS:
            make_library(function, options.levels[0], options.folder)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    if not options.levels:
        return
    if shutil.which("ld") is None:
        sys.exit("ld, the linker of binutils, is needed: install it, or build a wheel without code: make dist LEVELS=")
    options.folder.mkdir(parents=True)
    for level in options.levels:
        # Numba asks the environment for its processor when it is imported. Settings of the user do not count.
        env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        env |= {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
        subprocess.run([sys.executable, __file__, str(options.folder), level, "--one"], env=env, check=True)  # noqa: S603
    write_manifest(options.folder, {function.name: function.sources for function in FUNCTIONS}, options.levels)


def make_library(function: CompiledFunction, level: str, folder: Path) -> None:
    """Compile a function for a level, for which Numba compiles in this process, and link its library."""
    ends = [ABORTS.format(name=symbol) for symbol in SYMBOLS if symbol.startswith(("Py", "numba_"))]
    with tempfile.TemporaryDirectory() as name:
        code, aborting, visible = (Path(name, part) for part in ("function.o", "aborting.o", "visible.map"))
        code.write_bytes(emit(function, level))
        target = binding.Target.from_triple(binding.get_process_triple())
        machine = target.create_target_machine(cpu=level, features="", reloc="pic", codemodel="small")
        aborting.write_bytes(machine.emit_object(binding.parse_assembly(ABORTING + "".join(ends))))
        visible.write_text(VISIBLE)
        library = folder / f"{function.name}-{level}.so"
        command = [*LINK, f"--version-script={visible}", "-o", str(library), str(code), str(aborting)]
        subprocess.run(command, check=True)  # noqa: S603


if __name__ == "__main__":
    main(sys.argv[1:])
