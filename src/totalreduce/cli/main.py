"""The ``totalreduce`` command.

A subcommand's file is imported when the subcommand is used: ``totalreduce run`` does not wait for torch. Packages
outside add commands with entry points of the group ``totalreduce.commands``. ``bench.allreduce`` is the name of the
command ``totalreduce bench allreduce``.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from totalreduce import __version__
from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.environment import is_debugging, words_to_complete
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.foundation.extensions import Extensions
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors

__all__ = ["build", "main"]

#: The error of a misspelt command line: Click's, or that of the Click within Typer, which is not public.
_UsageError: Any = typer.BadParameter.__base__


@dataclass(frozen=True, slots=True)
class _Built:
    """A command of this package."""

    module: str  #: The module of the command.
    attribute: str  #: In it, the name of a function or of a Typer application.
    settings: dict[str, Any] = field(default_factory=dict)  #: The settings of Typer's context.
    parser: str | None = None  #: In it, the name of the class that parses the command's words; ``None``: Typer's own.


@dataclass(frozen=True, slots=True)
class _Group:
    """A command that has nothing but commands below it, whose names begin with its own name and a dot."""

    help: str  #: What the commands have in common.
    more: str  #: How a user gets more commands if no other package adds one.


def _check(name: str, item: object) -> Any:
    if not callable(item):
        raise ConfigurationError(f"the command {name!r} is a typer.Typer or a function, not {item!r}")
    return item


COMMANDS: Extensions[Any] = Extensions(
    "command",
    "totalreduce.commands",
    {
        # `run` stops at the first word that is no option: what follows belongs to the script. torchrun's options are
        # often written with underscores.
        "run": _Built(
            "totalreduce.cli.run",
            "run",
            {"allow_interspersed_args": False, "token_normalize_func": lambda word: word.replace("_", "-")},
        ),
        "top": _Built("totalreduce.cli.top", "top"),
        "demo": _Built("totalreduce.cli.demo", "demo"),
        "bench": _Group(
            "Measure. Peers take turns in one run; no figure is reported before its results are checked.",
            "The commands that measure totalreduce itself are in a second package: `pip install ./benchmarks` in a "
            "copy of the repository adds them.",
        ),
        "bench.allreduce": _Built("totalreduce.bench.allreduce", "bench_allreduce"),
        "bench.collectives": _Built("totalreduce.bench.collectives", "bench_collectives"),
        "bench.urgent": _Built("totalreduce.bench.urgent", "bench_urgent"),
        "bench.codecs": _Built("totalreduce.bench.codecs", "bench_codecs"),
        "bench.ps": _Built("totalreduce.bench.ps", "bench_ps"),
        "bench.ddp": _Built("totalreduce.bench.ddp", "bench_ddp"),
        "bench.trace": _Built("totalreduce.planning.trace", "bench_trace"),
        "plan": _Built("totalreduce.planning.plan", "plan", parser="PlanCommand"),
        "doctor": _Built("totalreduce.cli.doctor", "doctor"),
        "timeline": _Built("totalreduce.cli.timeline", "timeline"),
        "examples": _Built("totalreduce.cli.examples", "examples"),
    },
    _check,
)


def build(names: Sequence[str] | None = None) -> typer.Typer:
    """Return the application with these subcommands and those below them; by default with all of them."""
    app = typer.Typer(
        name="totalreduce",
        help="Gradient synchronisation for PyTorch on ordinary networks.",
        callback=_options,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    groups: dict[str, typer.Typer] = {"": app}
    for name in COMMANDS:
        if names is None or any(f"{name}.".startswith(f"{wanted}.") for wanted in names):
            above, _, word = name.rpartition(".")
            _add(_group(above, groups), word, COMMANDS[name])
    return app


def _group(name: str, groups: dict[str, typer.Typer]) -> typer.Typer:
    """Return the application of a group, which the first call makes."""
    if name not in groups:
        group = COMMANDS[name]
        if not isinstance(group, _Group):
            raise ConfigurationError(f"no package can add a command below {name!r}, which is a command itself")
        more = _more_commands(name)
        groups[name] = typer.Typer(
            name=name, help=group.help, epilog=more, no_args_is_help=True, rich_markup_mode="rich"
        )
        groups[""].add_typer(groups[name])
    return groups[name]


def _more_commands(group: str) -> str:
    """Return how a user gets more commands of a group; nothing for other commands, or if another package adds some."""
    if group not in COMMANDS or any(name.startswith(f"{group}.") for name in COMMANDS.added()):
        return ""
    command = COMMANDS[group]
    return command.more if isinstance(command, _Group) else ""


def _add(app: typer.Typer, name: str, command: Any) -> None:
    settings, parser = {}, None
    if isinstance(command, _Built):
        module = importlib.import_module(command.module)
        settings = command.settings
        parser = None if command.parser is None else getattr(module, command.parser)
        command = getattr(module, command.attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    elif not isinstance(command, _Group):
        app.command(name, cls=parser, context_settings=settings)(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    A mistake of the user's is one line on standard error and exit code 2, also a misspelt option, for which Typer would
    show the usage first; ``TOTALREDUCE_DEBUG=1`` shows the traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _build_for(words_to_complete() or words)(words, prog_name="totalreduce", standalone_mode=False)
    except _UsageError as error:
        _show_usage_error(error, words)
        sys.exit(2)
    except typer.Abort:
        typer.echo("Aborted!", err=True)
        sys.exit(1)
    except (TotalReduceError, OSError) as error:
        expected = isinstance(error, TotalReduceError) or is_out_of_descriptors(error)
        if not expected or is_debugging():
            raise
        typer.secho(f"totalreduce: {describe_error(error)}", fg="red", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _show_usage_error(error: Any, words: Sequence[str]) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # a command with subcommands, and none was given
        error.show()
        return
    path = "totalreduce" if error.ctx is None else error.ctx.command_path
    hint = ""
    if path == "totalreduce" and words[0].endswith(".py"):
        hint = f" To start a script: totalreduce run {shlex.join(words)}."
    option = getattr(error, "option_name", "").lstrip("-")
    if path == "totalreduce run" and option:
        known = [word.lstrip("-") for word in error.possibilities or ()]
        hint = "" if did_you_mean(option, known) else " An option of the script comes after the script."
    more = _more_commands(path.rpartition(" ")[2])
    hint = f" {more}" if more else hint
    said = error.format_message()
    end = "" if said.endswith((".", "?")) else "."
    typer.secho(f"totalreduce: {said}{end}{hint} `{path} -h` shows the options", fg="red", err=True)


def _build_for(words: Sequence[str]) -> typer.Typer:
    for name in (".".join(words[:2]), *words[:1]):
        if name in COMMANDS:
            return build([name])
    return build(()) if words == ["--version"] else build()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"totalreduce {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Declare the options that stand before any subcommand."""


if __name__ == "__main__":
    main()
