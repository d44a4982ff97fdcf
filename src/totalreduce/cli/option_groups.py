"""Options of a command as dataclasses. Typer reads a signature in which each option is a parameter of its own."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

__all__ = ["grouped"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer whose parameters are the fields of the dataclasses that ``command`` takes.

    A field is annotated as a parameter of a command would be. A dataclass may have dataclasses as fields. The class
    attribute ``PANEL`` is the panel of the help in which its options stand.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            parameters += list(_parameters_of(kind))
        else:
            parameters.append(parameter.replace(annotation=kind))
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}

    @functools.wraps(command)
    def call(**values: Any) -> None:
        made = {name: _made(kind, values) for name, kind in groups.items()}
        command(**{name: value for name, value in values.items() if name in hints}, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _parameters_of(kind)
            continue
        for option in get_args(kind)[1:]:
            option.rich_help_panel = getattr(group, "PANEL", None)
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def _made(group: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(group)
    return group(
        **{
            field.name: _made(hints[field.name], values)
            if dataclasses.is_dataclass(hints[field.name])
            else values[field.name]
            for field in dataclasses.fields(group)
        }
    )
