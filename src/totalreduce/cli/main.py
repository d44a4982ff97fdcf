"""The ``totalreduce`` command.

A subcommand's file is imported when the subcommand is used: ``totalreduce run`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from totalreduce import __version__
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors

__all__ = ["build", "main"]

COMMANDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # `run` stops at the first word that is no option: what follows belongs to the script.
    "run": ("totalreduce.cli.run", "run", {"allow_interspersed_args": False}),
    "demo": ("totalreduce.cli.demo", "demo", {}),
    "bench": ("totalreduce.cli.bench", "bench_app", {}),
    "doctor": ("totalreduce.cli.doctor", "doctor", {}),
    "timeline": ("totalreduce.cli.timeline", "timeline", {}),
}
"""Name, where it is (a function or a Typer application), and its settings."""


def build(names: Sequence[str] = tuple(COMMANDS)) -> typer.Typer:
    """The application with these subcommands."""
    app = typer.Typer(
        name="totalreduce",
        help="Gradient synchronisation for PyTorch on ordinary networks.",
        callback=_options,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        module, attribute, settings = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=settings)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    A mistake of the user's is one line on standard error and exit code 2; ``TOTALREDUCE_DEBUG=1`` shows the
    traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _build_for(words)(words)
    except (TotalReduceError, OSError) as error:
        expected = isinstance(error, TotalReduceError) or is_out_of_descriptors(error)
        if not expected or current().get("TOTALREDUCE_DEBUG", "0") != "0":
            raise
        typer.secho(f"totalreduce: {describe_error(error)}", fg="red", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _build_for(words: Sequence[str]) -> typer.Typer:
    if words and words[0] in COMMANDS:
        return build(words[:1])
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
