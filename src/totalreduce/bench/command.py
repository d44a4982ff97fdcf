"""The commands of ``totalreduce bench``: the options that they share, and how their reports are printed and saved."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import BenchmarkFailedError, Setting
from totalreduce.bench.report import Report
from totalreduce.cli.pictures import require_matplotlib
from totalreduce.cli.report import write_text
from totalreduce.foundation.errors import ConfigurationError

_SHARED: dict[str, tuple[Any, Any]] = {
    "ranks": (
        Annotated[
            int | None,
            typer.Option("--ranks", "-n", help="Worker processes. [dim]default: 4, or one per emulated host[/dim]"),
        ],
        None,
    ),
    "emulate_hosts": (
        Annotated[int, typer.Option(help="Put the workers into this many network namespaces (root, Linux). 0: none.")],
        0,
    ),
    "emulate_rate": (Annotated[str, typer.Option(help="Rate of each emulated host's link, as 1gbit.")], "1gbit"),
    "ranks_per_host": (
        Annotated[int | None, typer.Option(min=1, help="Workers in each emulated host. [dim]default: 1[/dim]")],
        None,
    ),
    "transport": (Annotated[str, typer.Option(help="What Total Reduce sends through: auto, shm, tcp, torch.")], "auto"),
    "against": (
        Annotated[
            list[str] | None,
            typer.Option(
                help="Measure this too, in turns in the same run: gloo, fifo (this engine without priorities), and "
                "where it says so openmpi and mpich. Repeatable, or separated by commas."
            ),
        ],
        None,
    ),
    "mpirun": (
        Annotated[
            list[str] | None,
            typer.Option(
                help="Where an MPI's mpirun is, as mpich=/opt/mpich/bin/mpirun; the python beside it, if there is one, "
                "must have mpi4py and NumPy. [dim]default: mpirun on PATH[/dim] Repeatable."
            ),
        ],
        None,
    ),
    "rounds": (Annotated[int, typer.Option(help="How often each peer is measured.")], 1),
}
_JSON = Annotated[
    Path | None, typer.Option("--json", help="Write every figure, all samples, versions and machine to this file.")
]
_MARKDOWN = Annotated[Path | None, typer.Option("--markdown", help="Write the tables in Markdown to this file.")]
_PLOT = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this file, as out.png or .svg.")]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``totalreduce bench``.

    Attributes:
        name: The word after ``totalreduce bench``.
        measure: Returns a report, or ``None`` where nothing is left to print and save. Its parameters are options; the
            fields of its ``parameters``, a record, are options too.
        shared: Names of the shared options, of which ``measure`` gets a ``setting``.
        defaults: Defaults of options that differ from the usual ones.
        examples: Stand at the end of ``--help``.
        plot: Whether ``--plot`` is an option.
        json: Whether ``--json`` and ``--markdown`` are options.
    """

    name: str
    measure: Callable[..., Report | None]
    shared: Sequence[str]
    defaults: dict[str, Any]
    examples: Sequence[str]
    plot: bool
    json: bool

    def add_to(self, app: typer.Typer) -> None:
        """Add the command to an application."""
        text, epilog = self._help()
        app.command(self.name, help=text, epilog=epilog)(self.function())

    def function(self) -> Callable[..., None]:
        """Return the command as a function whose parameters are the options and whose docstring is the help."""

        def run(**given: Any) -> None:
            self._run(given)

        more = {name: _SHARED[name] for name in self.shared}
        more |= {"plot": (_PLOT, None)} if self.plot else {}
        more |= {"markdown": (_MARKDOWN, None), "json": (_JSON, None)} if self.json else {}
        more |= {name: (more[name][0], value) for name, value in self.defaults.items() if name in more}
        parameters = [
            *(each.replace(default=self.defaults.get(each.name, each.default)) for each in self._own()),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
                for name, (annotation, default) in more.items()
            ),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__doc__ = "\n\n".join(self._help())
        return run

    def _help(self) -> tuple[str, str]:
        """Return the text of the help and the examples below it."""
        # rich keeps every line break of a docstring, and of an epilog only double ones
        paragraphs = (self.measure.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        return text, "\n\n".join(("[bold]Examples[/bold]", *self.examples))

    def _own(self) -> Iterator[inspect.Parameter]:
        """Yield the options of this command alone."""
        for parameter in inspect.signature(self.measure, eval_str=True).parameters.values():
            if parameter.name == "parameters":
                yield from inspect.signature(parameter.annotation, eval_str=True).parameters.values()
            elif parameter.name != "setting":
                yield parameter

    def _run(self, given: dict[str, Any]) -> None:
        path, text, picture = (given.pop(name, None) for name in ("json", "markdown", "plot"))
        if picture is not None:
            require_matplotlib(picture)
        if self.shared:
            given["setting"] = make_setting(**{name: given.pop(name) for name in self.shared})
        own = inspect.signature(self.measure, eval_str=True).parameters
        if "parameters" in own:
            kind = own["parameters"].annotation
            given["parameters"] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        try:
            report = self.measure(**given)
        except BenchmarkFailedError as error:
            print(f"no figures: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        if report is None:
            return
        for table in report.tables:
            table.print()
        report.save(self.name, path)
        if text is not None:
            write_text(text, "--markdown", "\n".join(table.to_markdown() for table in report.tables))
        if picture is not None and report.draw is not None:
            report.draw(picture)


def benchmark(
    name: str,
    *examples: str,
    shared: Sequence[str] = (),
    plot: bool = False,
    json: bool = True,
    **defaults: Any,
) -> Callable[[Callable[..., Report | None]], Command]:
    """Make a command of a function; the arguments are those of ``Command``."""
    return lambda measure: Command(name, measure, shared, defaults, examples, plot, json)


def make_setting(
    ranks: int | None = None,
    emulate_hosts: int = 0,
    emulate_rate: str = "1gbit",
    against: Sequence[str] | None = None,
    rounds: int = 1,
    *,
    ranks_per_host: int | None = None,
    transport: str = "auto",
    mpirun: Sequence[str] | None = None,
) -> Setting:
    """Return the setting that the shared options describe."""
    if ranks_per_host is not None:
        if not emulate_hosts:
            raise ConfigurationError("--ranks-per-host goes with --emulate-hosts")
        if ranks not in (None, emulate_hosts * ranks_per_host):
            raise ConfigurationError(f"{emulate_hosts} hosts with {ranks_per_host} ranks each are not --ranks {ranks}")
        ranks = emulate_hosts * ranks_per_host
    return Setting(
        ranks=ranks or emulate_hosts or 4,
        hosts=emulate_hosts,
        rate=emulate_rate,
        against=tuple(name.strip() for text in against or () for name in text.split(",")),
        rounds=rounds,
        transport=transport,
        mpirun=dict(_named_path(text) for text in mpirun or ()),
    )


def split_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the different names of a list separated by commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(known):
        raise ConfigurationError(f"{option} takes {', '.join(known)}, not {text!r}")
    return names


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--mpirun takes openmpi=PATH or mpich=PATH, not {text!r}")
    return name, Path(path)
