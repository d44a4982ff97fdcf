"""Contestants: ways of keeping ranks in step, as commands name them: ``diloco:period=50:codec=int8``.

The settings are those of the strategy's or the method's class. Where a setting is an object, it has a name and numbers
of its own: ``diloco:outer_lr=0.7:outer_momentum=0.9`` and ``parameter_server:consistency=bounded:tau=4``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from totalreduce.strategies.strategy import Strategy

__all__ = [
    "Contestant",
    "make_strategy",
    "name_of",
    "parse_contestant",
    "parse_settings",
    "strategies",
    "takes_own_steps",
]

_OUTER_MOMENTUM: Final = 0.9
#: The default of ``parameter_server:consistency=bounded``.
_TAU: Final = 4


@dataclass(frozen=True)
class Contestant:
    """A way of keeping ranks in step."""

    text: str  #: As the command line has it.
    name: str  #: What stands before the first colon.
    settings: Mapping[str, Any] = field(default_factory=dict)  #: The others, by name.
    #: The learning rate, in times of that of all others: where gradients are added up and not averaged, the inverse of
    #: the number of ranks.
    rate: float = 1.0


def name_of(text: str) -> str:
    """Return what stands before the first colon."""
    return text.partition(":")[0]


def parse_contestant(text: str) -> Contestant:
    """Read a contestant. Raises ``ConfigurationError``: a setting has no value, or the codec is unknown."""
    name, *words = text.strip().split(":")
    settings = parse_settings(text, words)
    return Contestant(text.strip(), name, settings, settings.pop("rate", 1.0))


def parse_settings(text: str, words: Iterable[str]) -> dict[str, Any]:
    """Return the settings that the words of a contestant have, by name. Raises ``ConfigurationError``."""
    return dict(_setting(text, word) for word in words)


def _setting(text: str, word: str) -> tuple[str, Any]:
    """Return the name and the value of ``period=16``: a codec, a number, or the text."""
    from totalreduce.codecs.codecs import CODECS

    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigurationError(f"{text!r}: a setting is written as period=50, not {word!r}")
    if key == "codec":
        return key, CODECS[value]()
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


def strategies() -> dict[str, Callable[..., Strategy]]:
    """Return the classes of all strategies by name: also that of the parameter server, which is on a higher floor."""
    from totalreduce.server.dense import ParameterServer
    from totalreduce.strategies.strategies import STRATEGIES

    return {**STRATEGIES, ParameterServer.name: ParameterServer}


def make_strategy(contestant: Contestant) -> Strategy:
    """Return the settings of a strategy. Raises ``ConfigurationError``."""
    from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
    from totalreduce.strategies.outer import DiLoCo, Nesterov

    known = strategies()
    make = known.get(contestant.name)
    if make is None:
        nearest = did_you_mean(contestant.name, known)
        raise ConfigurationError(f"{contestant.name!r} is no strategy{nearest}; there are {', '.join(known)}")
    settings = dict(contestant.settings)
    try:
        if make is PostLocalSGD:
            return PostLocalSGD(start=settings.pop("start", 0), then=LocalSGD(**settings))
        if make is DiLoCo and "outer_lr" in settings:
            settings["outer"] = Nesterov(settings.pop("outer_lr"), settings.pop("outer_momentum", _OUTER_MOMENTUM))
        if "consistency" in settings:
            settings["consistency"] = _consistency(contestant.text, settings["consistency"], settings.pop("tau", _TAU))
        return make(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{contestant.text!r}: {error}") from error


def _consistency(text: str, name: object, tau: int) -> Any:
    """Return a rule of ``tr.ps`` by its name."""
    from totalreduce.server.clocks import Bounded, Eventual, Sequential

    rules: dict[object, Any] = {"sequential": Sequential(), "bounded": Bounded(tau), "eventual": Eventual()}
    if name not in rules:
        raise ConfigurationError(f"{text!r}: consistency is one of {', '.join(map(str, rules))}, not {name!r}")
    return rules[name]


def takes_own_steps(contestant: Contestant, world_size: int) -> bool:
    """Return whether ranks may take different numbers of steps, as no rank waits for the slowest one in each step."""
    from totalreduce.server.dense import ParameterServer
    from totalreduce.server.served_steps import ServedStrategy
    from totalreduce.strategies.async_gossip import AsyncGossip

    known = strategies()
    make = known.get(contestant.name)
    if not (isinstance(make, type) and issubclass(make, ServedStrategy | ParameterServer | AsyncGossip)):
        return False
    strategy = make_strategy(contestant)
    if isinstance(strategy, ServedStrategy | ParameterServer):
        return not strategy.is_synchronous(world_size)
    return world_size > 1
