"""Commands of ``totalreduce bench``: the options that they share, and how their reports are printed and saved."""

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
_RANKS_MAX = 4096
_JSON = Annotated[
    Path | None, typer.Option("--json", help="Write every figure, all samples, versions and machine to this file.")
]
_MARKDOWN = Annotated[Path | None, typer.Option("--markdown", help="Write the tables in Markdown to this file.")]
_PLOT = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this file, as out.png or .svg.")]


@dataclass(frozen=True, slots=True)
class _Benchmark:
    """A function that measures, as a command.

    Attributes:
        measure: Returns a report, or ``None`` where nothing is left to print and save. Its parameters are options; the
            fields of its ``parameters``, a record, are options too.
        others: The other attributes are the arguments of ``benchmark``.
    """

    name: str
    measure: Callable[..., Report | None]
    shared: Sequence[str]
    defaults: dict[str, Any]
    plot: bool
    json: bool

    def options(self) -> Iterator[inspect.Parameter]:
        """Yield the options of the command."""
        for each in self._own():
            yield each.replace(default=self.defaults.get(each.name, each.default))
        more = {name: _SHARED[name] for name in self.shared}
        more |= {"plot": (_PLOT, None)} if self.plot else {}
        more |= {"markdown": (_MARKDOWN, None), "json": (_JSON, None)} if self.json else {}
        for name, (annotation, default) in more.items():
            value = self.defaults.get(name, default)
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=value)

    def _own(self) -> Iterator[inspect.Parameter]:
        """Yield the options of this command alone, with their usual defaults."""
        for parameter in inspect.signature(self.measure, eval_str=True).parameters.values():
            if parameter.name == "parameters":
                yield from inspect.signature(parameter.annotation, eval_str=True).parameters.values()
            elif parameter.name != "setting":
                yield parameter

    def run(self, given: dict[str, Any]) -> None:
        """Measure with these options; print the report, and save it."""
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
) -> Callable[[Callable[..., Report | None]], Callable[..., None]]:
    """Make a command of a function that returns a report: a function whose parameters are the options.

    Args:
        name: The benchmark's name in its report.
        examples: Stand at the end of ``--help``.
        shared: Names of the shared options, of which the function gets a ``setting``.
        plot: Whether ``--plot`` is an option.
        json: Whether ``--json`` and ``--markdown`` are options.
        defaults: Defaults of options that differ from the usual ones.
    """

    def command_of(measure: Callable[..., Report | None]) -> Callable[..., None]:
        made = _Benchmark(name, measure, shared, defaults, plot, json)

        def command(**given: Any) -> None:
            made.run(given)

        command.__signature__ = inspect.Signature(list(made.options()))  # type: ignore[attr-defined]
        # rich keeps every line break of a docstring
        paragraphs = [" ".join(paragraph.split()) for paragraph in (measure.__doc__ or "").split("\n\n")]
        command.__doc__ = "\n\n".join((*paragraphs, "[bold]Examples[/bold]", *examples))
        return command

    return command_of


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


def split_ranks(option: str, text: str, *, least: int = 2, may_be_empty: bool = False) -> list[int]:
    """Return the different numbers of ranks of a list separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not (words or may_be_empty) or not all(word.isdecimal() and least <= int(word) <= _RANKS_MAX for word in words):
        raise ConfigurationError(
            f"{option} takes numbers of ranks from {least} to {_RANKS_MAX}, as 2,4,8, not {text!r}"
        )
    return list(dict.fromkeys(map(int, words)))


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--mpirun takes openmpi=PATH or mpich=PATH, not {text!r}")
    return name, Path(path)
