"""Updates that are averaged, and applied by an outer optimizer: DiLoCo, in its streaming form, too, and SlowMo.

Every rank trains by itself. After a period, the ranks average how far they have come from the parameters that all had
(the *update*), and an outer optimizer moves these common parameters along the average. With an outer learning rate of 1
and no momentum that is parameter averaging.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105), with
Nesterov momentum; "Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512): fragments take turns, and
steps go on while a fragment is exchanged. Wang, Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020, with heavy-ball
momentum.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, final

import numpy as np

from totalreduce.codecs.codec import Codec, check_codec, load_kernels
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.partition import balanced_range
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action
from totalreduce.strategies.strategy import (
    ElementsCopy,
    HostCopy,
    Later,
    Pending,
    Replica,
    Strategy,
    StrategySession,
    mean_of,
)

__all__ = ["DiLoCo", "HeavyBall", "Nesterov", "OuterOptimizer", "OuterSession", "SlowMo"]


class OuterOptimizer(Protocol):
    """The rule by which the common parameters move along the averaged update."""

    def move(self, common: Array, update: Array, velocity: Array) -> None:
        """Change the common parameters and the velocity in place.

        With an overlap, and parameters on an accelerator, another thread than the one that trains calls this.

        Args:
            common: The parameters that all ranks have.
            update: Their change on average, with the opposite sign: it stands in the place of a gradient.
            velocity: Zeros at first.
        """


@dataclass(frozen=True, slots=True)
class Nesterov:
    """SGD with Nesterov momentum, as ``torch.optim.SGD(nesterov=True)``.

    Attributes:
        lr: The learning rate.
        momentum: The momentum.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_momentum(self)

    def move(self, common: Array, update: Array, velocity: Array) -> None:
        """Step against update plus momentum times velocity."""
        lr, momentum = _accumulated(self, update, velocity)
        common -= lr * (update + momentum * velocity)


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """SGD with momentum, as ``torch.optim.SGD``; attributes and errors as of ``Nesterov``."""

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        _check_momentum(self)

    def move(self, common: Array, update: Array, velocity: Array) -> None:
        """Step against the velocity."""
        lr, _ = _accumulated(self, update, velocity)
        common -= lr * velocity


def _check_momentum(settings: Nesterov | HeavyBall) -> None:
    checks.real_field(settings, "lr", above=0)
    checks.real_field(settings, "momentum", minimum=0, below=1)


def _accumulated(settings: Nesterov | HeavyBall, update: Array, velocity: Array) -> tuple[Any, Any]:
    """Bring the velocity up to date; return learning rate and momentum as numbers of its dtype."""
    lr, momentum = velocity.dtype.type(settings.lr), velocity.dtype.type(settings.momentum)
    velocity *= momentum
    velocity += update
    return lr, momentum


@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo(Strategy):
    """Settings of DiLoCo.

    Attributes:
        period: The number of steps between two exchanges of the same parameters.
        outer: The outer optimizer. With a learning rate of 1 and no momentum the steps are those of ``LocalSGD``.
        fragments: The number of parts of the model, of the same size: ranges of elements, which may begin and end
            within a tensor. They are exchanged one after the other, at even distances within a period, so that the
            network is used evenly and each needs less overlap ("Streaming DiLoCo", 2025).
        overlap: The number of steps that go on while a fragment is exchanged; below ``period``. 0: training waits.
        mix: With ``overlap`` only: the weight of this rank's own parameters where a result is taken over; with 0.5,
            half of the rank's own steps since the exchange has begun are lost. Or
            ``"progress"``: the rank's own steps since the exchange has begun are added to the common parameters, so
            that no step is lost (Shen et al., "CoCoD-SGD", IJCAI 2019). Try it first where an overlap costs loss.
        codec: Encodes updates, with error feedback. ``None``: they are sent as they are.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "diloco"

    period: int = 100
    outer: OuterOptimizer = field(default_factory=Nesterov)
    fragments: int = 1
    overlap: int = 0
    mix: float | Literal["progress"] = 0.5
    codec: Codec | None = None

    def __post_init__(self) -> None:
        checks.integer_fields(self, "period", "fragments", minimum=1)
        checks.integer_fields(self, "overlap", minimum=0)
        if self.mix != "progress":
            checks.real_field(self, "mix", minimum=0, below=1)
        check_codec(self.codec)
        if isinstance(self.outer, type) or not callable(getattr(self.outer, "move", None)):
            raise ConfigurationError(
                f"outer is an outer optimizer, for instance tr.Nesterov(lr=0.7), not {self.outer!r}"
            )
        if self.overlap >= self.period:
            raise ConfigurationError(f"overlap must be below the period, {self.period}, not {self.overlap}")
        if self.fragments > self.period:
            raise ConfigurationError(f"{self.fragments} fragments need a period of as many steps, not {self.period}")

    def session(self, replica: Replica, rank: int, world_size: int) -> OuterSession:
        """Return the session of one rank."""
        return OuterSession(self, replica, rank, world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowMo(Strategy):
    """Settings of SlowMo: averages, and momentum on their changes.

    Attributes:
        period: The number of steps between two averages.
        lr: The slow learning rate, the paper's alpha.
        momentum: The slow momentum, the paper's beta.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "slowmo"

    period: int = 16
    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        self._outer()

    def session(self, replica: Replica, rank: int, world_size: int) -> OuterSession:
        """Return the session of one rank."""
        return OuterSession(self._outer(), replica, rank, world_size)

    def _outer(self) -> DiLoCo:
        return DiLoCo(period=self.period, outer=HeavyBall(self.lr, self.momentum))


@final
@dataclass(frozen=True, slots=True)
class _Moved:
    """Where an average moves a fragment. It is computed in the thread of the exchange, and counts when it is due."""

    average: Array
    common: Array
    velocity: Array
    placed: ElementsCopy  #: The common parameters.


@final
class _Fragment:
    """A part of the model."""

    def __init__(self, replica: Replica, begin: int, end: int, *, overlaps: bool, adds_progress: bool) -> None:
        self.begin = begin  #: Its first element, in all tensors one behind the other.
        self.common = replica.read_range(begin, end)  #: The parameters that all ranks have.
        self.velocity = np.zeros_like(self.common)  #: That of the outer optimizer.
        #: What this rank's codes have not expressed. An exchange under way writes to it in another thread.
        self.rest = np.zeros_like(self.common)
        nothing = self.common[:0]
        #: With overlap: this rank's update in the last exchange, with which it can be restarted.
        self.under_way = np.zeros_like(self.common if overlaps else nothing)
        #: With ``mix="progress"``: this rank's parameters with which the last exchange began.
        self.begun: ElementsCopy = HostCopy((self.common if adds_progress else nothing).copy())
        if adds_progress:
            self.begun = replica.place(begin, self.begun.values())
        self.settled = Later(lambda: None)  #: When this rank's update of the last exchange is in ``rest``.
        #: Whether the common parameters are moved in the thread of the exchange, and not in place when it is due.
        self.moves_beside = False
        self.moved: _Moved | None = None  #: If so: where the last exchange moves them.

    def copy(self, replica: Replica) -> ElementsCopy:
        """Return a copy of the replica's elements."""
        return replica.copy(self.begin, self.begin + self.common.size)

    def note(self, own: ElementsCopy) -> None:
        """Note this rank's parameters, with which an exchange begins."""
        # On a host without accelerators the copies would cost more than the thread that trains saves.
        self.moves_beside = self.under_way.size > 0 and not isinstance(own, HostCopy)
        self.settled = Later(lambda: self._settle(own))

    def _settle(self, own: ElementsCopy) -> None:
        self.rest += self.common - own.values()
        if self.under_way.size:
            self.under_way[:] = self.rest


@final
class OuterSession(StrategySession):
    """The session of DiLoCo and SlowMo."""

    def __init__(self, settings: DiLoCo, replica: Replica, rank: int, world_size: int) -> None:
        """Begin with what the replica has, which all ranks have."""
        load_kernels(settings.codec)
        self._settings, self._replica = settings, replica
        self._rank, self._world_size = rank, world_size
        self._steps = 0
        total = sum(replica.sizes)
        count = max(1, min(settings.fragments, total))
        ranges = [balanced_range(total, count, number) for number in range(count)]
        overlaps = settings.overlap > 0
        self._adds_progress = overlaps and settings.mix == "progress"
        self._fragments = [
            _Fragment(replica, *bounds, overlaps=overlaps, adds_progress=self._adds_progress) for bounds in ranges
        ]

    def ends_exchange(self) -> bool:
        """Whether the exchange of a fragment is due after the next step."""
        return bool(self._turns(self._steps + 1 - self._settings.overlap))

    def _turns(self, steps: int) -> list[int]:
        """Return the fragments whose turn it is after so many steps."""
        if steps <= 0:
            return []
        period, count = self._settings.period, len(self._fragments)
        ends = [-(-(number + 1) * period // count) for number in range(count)]
        return [number for number, end in enumerate(ends) if (steps - end) % period == 0]

    def stepped(self, weight: float) -> list[Pending]:
        """Begin the exchange of the fragments whose turn it is."""
        del weight
        self._steps += 1
        pending = []
        for number in self._turns(self._steps):
            fragment = self._fragments[number]
            own = fragment.copy(self._replica)
            fragment.note(own)
            if self._adds_progress:
                fragment.begun = own
            pending.append(self._pending(number, self._steps + self._settings.overlap))
        return pending

    def _pending(self, number: int, due: int) -> Pending:
        return Pending(number, due, self._exchange(self._fragments[number], due - self._settings.overlap))

    def _exchange(self, fragment: _Fragment, begun: int) -> Generator[Action, Any, Array]:
        """Return the average of the ranks' updates, and prepare what it changes; in the thread of the exchange."""
        fragment.settled.get()
        average = yield from mean_of(fragment.rest, self._settings.codec, self._rank, self._world_size, begun)
        if fragment.moves_beside:
            fragment.moved = self._moved(fragment, average, fragment.common.copy(), fragment.velocity.copy())
        return average

    def _moved(self, fragment: _Fragment, average: Array, common: Array, velocity: Array) -> _Moved:
        """Move the common parameters along an average."""
        self._settings.outer.move(common, average, velocity)
        return _Moved(average, common, velocity, self._replica.place(fragment.begin, common))

    def restart(self, channel: int, due: int) -> Pending:
        """Return an exchange that has begun, and whose result is not applied, from its beginning."""
        fragment = self._fragments[channel]
        fragment.rest = fragment.under_way.copy()  # the exchange that has ended may still write to the old array
        return self._pending(channel, due)

    def apply(self, channel: int, result: Any) -> None:
        """Move the common parameters of the channel's fragment, and the replica to them.

        The channel after those of the fragments has the average of ``ending``.
        """
        if channel == len(self._fragments):
            self._begin_anew(result)
            return
        fragment, settings = self._fragments[channel], self._settings
        moved, fragment.moved = fragment.moved, None
        if moved is None or moved.average is not result:  # nor is that of a saved state
            moved = self._moved(fragment, result, fragment.common, fragment.velocity)
        fragment.common, fragment.velocity = moved.common, moved.velocity
        if self._adds_progress:
            self._replica.update(fragment.begin, moved.placed, _with_progress, fragment.begun)
        elif settings.overlap and settings.mix:
            mix = fragment.common.dtype.type(settings.mix)
            self._replica.update(fragment.begin, moved.placed, _mixed, mix, 1 - mix)
        else:
            self._replica.update(fragment.begin, moved.placed)

    def ending(self) -> list[Pending]:
        """Begin an average of the parameters, unless the last step has made them equal. Velocities stay as they are."""
        settings = self._settings
        if not settings.overlap and len(self._fragments) == 1 and not self._steps % settings.period:
            return []
        values = np.concatenate([fragment.copy(self._replica).values() - fragment.rest for fragment in self._fragments])
        exchange = mean_of(values, None, self._rank, self._world_size, self._steps)
        return [Pending(len(self._fragments), self._steps, exchange)]

    def _begin_anew(self, values: Array) -> None:
        """Take parameters over that all ranks have now."""
        for fragment in self._fragments:
            end = fragment.begin + fragment.common.size
            fragment.common[:] = values[fragment.begin : end]
            fragment.rest[:] = 0.0
        self._replica.write_range(0, values)

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps; common parameters and velocities; what was not sent, and what is under way."""
        for fragment in self._fragments:
            fragment.settled.get()
        shared = {
            "steps": self._steps,
            "common": [fragment.common for fragment in self._fragments],
            "velocities": [fragment.velocity for fragment in self._fragments],
        }
        own = {"rests": [fragment.rest for fragment in self._fragments]}
        if self._settings.overlap:
            own["under_way"] = [fragment.under_way for fragment in self._fragments]
        if self._adds_progress:
            own["begun"] = [fragment.begun.values() for fragment in self._fragments]
        return {"shared": shared, "own": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        shared, own = state["shared"], state["own"]
        self._steps = shared["steps"]
        parts = zip(self._fragments, shared["common"], shared["velocities"], own["rests"], strict=True)
        for fragment, common, velocity, rest in parts:
            fragment.common, fragment.velocity, fragment.rest = common, velocity, rest
            fragment.settled, fragment.moved = Later(lambda: None), None
        if self._settings.overlap:
            for fragment, under_way in zip(self._fragments, own["under_way"], strict=True):
                fragment.under_way = under_way
        if self._adds_progress:
            for fragment, begun in zip(self._fragments, own["begun"], strict=True):
                fragment.begun = self._replica.place(fragment.begin, begun)


def _with_progress(own: Any, common: Any, begun: Any) -> Any:
    return common + (own - begun)


def _mixed(own: Any, common: Any, mix: Any, rest: Any) -> Any:
    return mix * own + rest * common
