"""What a program passes as ``sync=``: settings of a method or strategy, their class, or its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.sparse.session import Method
from totalreduce.strategies.strategy import Strategy

__all__ = ["settings_of"]

_EXAMPLES = "tr.OkTopk(density=0.01), tr.PowerSGD(rank=4) or tr.DiLoCo(period=100)"


def settings_of(sync: object, argument: str = "sync") -> Any:
    """Return the settings that a program means. Raises ``ConfigurationError``.

    Args:
        sync: Settings, which are returned as they are; a class of settings, or the name of one ("oktopk"), which are
            taken with the defaults; or ``None``.
        argument: The name of the argument, for errors.
    """
    if isinstance(sync, str):
        return _made(_named(sync, argument), argument, repr(sync))
    if isinstance(sync, type):
        if not (issubclass(sync, Strategy) or callable(getattr(sync, "session", None))):
            raise ConfigurationError(f"{argument}= takes {_EXAMPLES}, not the class {sync.__name__}")
        return _made(sync, argument, f"the class {sync.__name__}")
    if sync is not None and not isinstance(sync, Strategy) and not hasattr(sync, "name"):
        raise ConfigurationError(f"{argument}= takes {_EXAMPLES}, not {sync!r}")
    return sync


def _named(name: str, argument: str) -> Callable[[], Method | Strategy]:
    # Those of other packages are looked for, which takes a while.
    from totalreduce.sparse.auto import Auto
    from totalreduce.sparse.methods import METHODS
    from totalreduce.strategies.strategies import STRATEGIES

    if name == Auto.name:
        return Auto
    for known in (METHODS, STRATEGIES):
        if name in known:
            return known[name]
    names = [*METHODS, Auto.name, *STRATEGIES]
    raise ConfigurationError(
        f"{argument}={name!r} is not known{did_you_mean(name, names)}: there are {', '.join(names)}; with settings: "
        f"{argument}={_EXAMPLES}"
    )


def _made(make: Callable[[], Any], argument: str, given: str) -> Any:
    try:
        return make()
    except TypeError as error:  # "missing 1 required keyword-only argument: 'start'"
        missing = str(error).rpartition("argument")[2].lstrip("s: ")
        name = getattr(make, "__name__", given)
        raise ConfigurationError(
            f"{argument}={given} needs settings that have no default ({missing}): write {argument}=tr.{name}(...)"
        ) from error
