"""The public interface of the package as two files, which the tests compare with the code.

``docs/reference/commands.md`` has every command with its options, and ``tests/unit/project/public_names.txt`` has every
public name with its signature. ``make interface`` writes both after an intended change; the difference belongs into the
commit.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.cli import get_docs_for_click

from totalreduce.cli.main import build

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
NAMES = ROOT / "tests" / "unit" / "project" / "public_names.txt"
MODULES = (
    "totalreduce",
    "totalreduce.server",
    "totalreduce.horovod",
    "totalreduce.horovod.elastic",
    "totalreduce.testing",
)
_OWN = ("run", "top", "demo", "bench", "plan", "doctor", "timeline", "examples")
_EXAMPLES = re.compile(r"\[bold\]Examples\[/bold\]\n+(.*?)(?=\n\n(?:\*\*|#)|\Z)", re.DOTALL)


def commands_page() -> str:
    """Return the page of all commands of this package, in Markdown."""
    command = typer.main.get_command(build(_OWN))
    _keep_whole_summaries(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="totalreduce", title="Commands")
    text = _EXAMPLES.sub(_block_of_examples, text)
    text = text.replace("```console\n$ ", "```text\n")
    return re.sub(r"\[/?(?:bold|dim|italic)\]", "", text).rstrip() + "\n"


def _keep_whole_summaries(command: Any) -> None:
    """Let lists of commands have the first paragraph of each command's help, which is otherwise cut."""
    for each in getattr(command, "commands", {}).values():
        each.short_help = " ".join((each.help or "").split("\n\n")[0].split())
        _keep_whole_summaries(each)


def _block_of_examples(found: re.Match[str]) -> str:
    lines = [line for line in found[1].splitlines() if line]
    return "\n".join(["Examples:", "", "```sh", *lines, "```"])


def public_names() -> str:
    """Return a line for each public name, and for each public name in a public class."""
    lines: list[str] = []
    for module in map(importlib.import_module, MODULES):
        for name in sorted(module.__all__):
            lines += _describe(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def _describe(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, ModuleType):
        yield f"{name} (module)"
    elif not isinstance(thing, type):
        yield f"{name}{_signature(thing) if callable(thing) else ''}"
    else:
        yield f"{name}{'' if issubclass(thing, enum.Enum | BaseException) else _signature(thing)}"
        for member in sorted(name for name in dir(thing) if not name.startswith("_")):
            owner = next(kind for kind in thing.__mro__ if member in vars(kind))
            if owner.__module__.startswith("totalreduce"):
                value = inspect.getattr_static(thing, member)
                function = getattr(value, "__func__", value)
                yield f"{name}.{member}{_signature(function) if inspect.isfunction(function) else ''}"


def _signature(thing: Any) -> str:
    """Return names, kinds and defaults of parameters. Types are left out: users' type checkers test them."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<(\w+\.\w+): \d+>", r"\1", text)  # members of enumerations
    text = re.sub(r"=ProcessSet\(.*?\)", "=global_process_set", text)  # its ranks depend on what was called before
    return re.sub(r"<(?:class|function) '?([\w.]+)'?(?: at 0x[0-9a-f]+)?>", r"\1", text)


if __name__ == "__main__":
    COMMANDS.write_text(commands_page(), "utf-8")
    NAMES.write_text(public_names(), "utf-8")
