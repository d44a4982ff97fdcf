"""``totalreduce examples``: the scripts that come with the package."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["example_files", "examples", "examples_folder", "summary"]

#: In an installed package, and in a source tree.
_FOLDERS = (Path(__file__).parents[1] / "examples", Path(__file__).parents[3] / "examples")


def examples(
    *,
    copy: Annotated[Path | None, typer.Option(metavar="DIR", help="Write them into this folder.")] = None,
) -> None:
    """List the examples, or copy them into a folder.

    A file that is there already is overwritten only if it is the same; otherwise nothing is written.

    [bold]Examples[/bold]

    totalreduce examples
    totalreduce examples --copy examples
    """
    folder = examples_folder()
    files = example_files(folder)
    console = Console()
    if copy is None:
        for path in files:
            console.print(f"[bold]{path.relative_to(folder)}[/bold]  {escape(summary(path))}", highlight=False)
        return
    _copy(files, folder, copy)
    what = "the first lines of each say what it is, and of a program how it is run"  # some are modules
    console.print(f"{len(files)} files are in {copy}; {what}.", soft_wrap=True)


def examples_folder() -> Path:
    """Return the folder of the examples. Raises ``ConfigurationError``: this installation has none."""
    for folder in _FOLDERS:
        if (folder / "torch_ddp.py").is_file():
            return folder
    raise ConfigurationError("this installation of totalreduce has no examples; install its wheel or use a source tree")


def example_files(folder: Path) -> list[Path]:
    """Return the files of a folder of examples and of the packages in it, without what Python has compiled."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def summary(path: Path) -> str:
    """Return the first sentence that an example says of itself, or ``""``."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        paragraph = "".join(json.loads(text)["cells"][0]["source"]).split("\n\n")[1]
    elif path.suffix == ".py":
        paragraph = text.partition('"""')[2].partition('"""')[0].split("\n\n")[0]
    else:
        comments = re.match(r"(?:#!.*\n)?((?:#.*\n)*)", text)
        paragraph = re.sub(r"^# ?", "", comments[1] if comments else "", flags=re.MULTILINE).split("\n\n")[0]
    sentence = re.split(r"(?<=\.)\s|:\s", " ".join(paragraph.split()) + " ")[0]
    return sentence if not sentence or sentence.endswith(".") else f"{sentence}."


def _copy(files: list[Path], source: Path, target: Path) -> None:
    copies = {path: target / path.relative_to(source) for path in files}
    for path, copy in copies.items():
        if copy.is_symlink() or (copy.exists() and (not copy.is_file() or copy.read_bytes() != path.read_bytes())):
            raise ConfigurationError(f"--copy: {copy} is there already, with another content; name another folder")
    try:
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)  # scripts stay executable
    except OSError as error:
        raise ConfigurationError(f"--copy: cannot write into {target}: {error.strerror}") from error
