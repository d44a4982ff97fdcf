"""Gossip: after each step a rank gives half of its parameters to one other rank, and takes what one other rank gives.

Assran, Loizou, Ballas and Rabbat, "Stochastic Gradient Push", ICML 2019 (push-sum over directed graphs); Lian, Zhang,
Zhang and Liu, "Asynchronous Decentralized Parallel SGD", ICML 2018 (random pairs, here without their asynchrony). Every
rank knows all partners of all steps, so no rank asks and none can wait in a circle.

A *push-sum weight* goes with the parameters, because a graph may give some ranks more than others. Parameters are
divided by it, so that all ranks come to the average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Exchange, Messages
from totalreduce.strategies.strategy import ElementsCopy, Later, Pending, Replica, Strategy, StrategySession, mean_of

__all__ = ["Gossip", "GossipSession", "partners"]

Graph = Literal["ring", "exponential", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Settings of gossip.

    Attributes:
        graph: ``"exponential"``: the distance of the partner doubles from step to step, so that all ranks hear of each
            other within log2(P) exchanges; ``"ring"``: the partner is the next rank; ``"random"``: pairs are drawn anew
            for each exchange, and average with each other.
        period: The number of steps between two exchanges.
        overlap: The number of steps that go on while parameters are exchanged. If it is larger than ``period``, several
            messages of a rank are under way, and its updates count only as much as the weight that it has kept.
        seed: Of the random pairs.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "gossip"

    graph: Graph = "exponential"
    period: int = 1
    overlap: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of("graph", self.graph, ("ring", "exponential", "random"))
        checks.integer_fields(self, "period", minimum=1)
        checks.integer_fields(self, "overlap", minimum=0)
        checks.integer_fields(self, "seed", minimum=0)

    def session(self, replica: Replica, rank: int, world_size: int) -> GossipSession:
        """Return the session of one rank."""
        return GossipSession(self, replica, rank, world_size)


def partners(settings: Gossip, number: int, rank: int, world_size: int) -> tuple[int | None, int | None]:
    """Return the rank to which this one sends in an exchange, and the rank that sends to it; ``None``: it rests."""
    if world_size == 1:
        return None, None
    if settings.graph == "random":
        order = list(range(world_size))
        Random(settings.seed * 1_000_003 + number).shuffle(order)
        place = order.index(rank) ^ 1
        partner = order[place] if place < world_size else None
        return partner, partner
    distance = 1
    if settings.graph == "exponential":
        distance = 1 << (number % max(1, (world_size - 1).bit_length()))
    return (rank + distance) % world_size, (rank - distance) % world_size


@final
class GossipSession(StrategySession):
    """The session of gossip."""

    def __init__(self, settings: Gossip, replica: Replica, rank: int, world_size: int) -> None:
        """Begin with a push-sum weight of one."""
        self._settings, self._replica = settings, replica
        self._rank, self._world_size = rank, world_size
        self._steps = self._number = 0
        self._tensors = range(len(replica.sizes))
        self._weight = 1.0
        self._last_channel = settings.overlap + 1  #: That of ``ending``.
        #: Whether updates count wholly while a message is under way. With several messages under way, the weight can be
        #: so small that an update divided by it would let training diverge.
        self._counts_wholly = 0 < settings.overlap <= settings.period
        #: Where updates count wholly: the parameters before the step.
        self._size = sum(replica.sizes)
        self._before: ElementsCopy = replica.copy(0, self._size if self._counts_wholly else 0)
        num_under_way = -(-settings.overlap // settings.period)
        #: The messages of the last exchanges, of which some may be under way.
        self._messages = deque([Later(self._nothing)] * num_under_way, maxlen=num_under_way)
        #: By channel: what has come, and where it is for the next update.
        self._placed: dict[int, tuple[Array, ElementsCopy]] = {}

    def ends_exchange(self) -> bool:
        """Whether an exchange that began with the end of a period is due."""
        return self._ends_period(self._steps + 1 - self._settings.overlap)

    def _ends_period(self, steps: int) -> bool:
        """Whether a period ends after so many steps."""
        return steps > 0 and steps % self._settings.period == 0

    def stepped(self, weight: float) -> list[Pending]:
        """Begin an exchange with the partners of this step."""
        del weight
        self._steps += 1
        if self._counts_wholly:
            self._count_whole_step()
        if not self._ends_period(self._steps):
            return []
        to, _ = partners(self._settings, self._number, self._rank, self._world_size)
        self._number += 1
        if to is None:
            message = Later(self._nothing)
        else:
            self._weight /= 2
            message = self._half(self._replica.copy(0, self._size), self._replica.dtype.type(self._weight))
        self._messages.append(message)
        return [self._exchange(message, self._number, self._steps + self._settings.overlap)]

    def _nothing(self) -> Array:
        """Return the message of a rank without a partner."""
        return np.zeros(self._size + 1, self._replica.dtype)

    def _half(self, own: ElementsCopy, half: Any) -> Later[Array]:
        """Return the message of a rank that gives a share of its parameters away."""
        return Later(lambda: np.append(own.values() * half, half))

    def _exchange(self, message: Later[Array], number: int, due: int) -> Pending:
        """Return an exchange, numbered from 1, in which this rank sends a message to its partner, if it has one."""
        to, source = partners(self._settings, number - 1, self._rank, self._world_size)
        exchange = _rest(message) if to is None or source is None else _swap(message, to, source)
        channel = number % (self._settings.overlap + 1)
        return Pending(channel, due, self._placing(channel, exchange))

    def _placing(self, channel: int, exchange: Exchange) -> Exchange:
        """Carry an exchange out, and bring what has come to where it is needed; in the thread of the exchange."""
        result = yield from exchange
        if result is not None:
            self._placed[channel] = result, self._replica.place(0, result[:-1])
        return result

    def restart(self, channel: int, due: int) -> Pending:
        """Return an exchange that has begun, and whose result is not applied, from its beginning."""
        del channel
        number = (due - self._settings.overlap) // self._settings.period
        return self._exchange(self._messages[number - self._number - 1], number, due)

    def _count_whole_step(self) -> None:
        """Divide the update of the step that has just ended by the weight, below 1 while a message is under way.

        The paper adds updates to the product of parameters and weight. So an update counts wholly in the sum over all
        ranks, whatever the weight of its rank is.
        """
        if self._weight != 1.0:
            self._replica.update(0, self._before, _wholly, self._replica.dtype.type(self._weight))
        self._before = self._replica.copy(0, self._size)  # as parameters of few bits are rounded

    def ending(self) -> list[Pending]:
        """Begin an average of the parameters of all ranks, weighted as push-sum does."""
        values = self._replica.read(self._tensors)
        weight = values.dtype.type(self._weight)
        exchange = mean_of(np.append(values * weight, weight), None, self._rank, self._world_size, self._steps)
        return [Pending(self._last_channel, self._steps, exchange)]

    def apply(self, channel: int, result: Any) -> None:
        """Add what has come to this rank's share; ``None``: this rank has rested. Or take the last average over."""
        if result is None:
            return
        if channel == self._last_channel:
            self._weight = 1.0
            self._replica.write(self._tensors, result[:-1] / result[-1])
        else:
            came, placed = self._placed.pop(channel, (None, None))
            if came is not result or placed is None:  # the result is that of a saved state
                placed = self._replica.place(0, result[:-1])
            share, self._weight = self._weight, self._weight + float(result[-1])
            kind = result.dtype.type
            self._replica.update(0, placed, _together, kind(share), kind(self._weight))
        if self._counts_wholly:
            self._before = self._replica.copy(0, self._size)

    def state(self) -> Mapping[str, Any]:
        """Return numbers of steps and exchanges, the weight; with overlap messages, and parameters before a step."""
        own: dict[str, Any] = {"weight": self._weight}
        if self._settings.overlap:
            own["messages"] = [message.get() for message in self._messages]
        if self._counts_wholly:
            own["before"] = self._before.values()
        return {"shared": {"steps": self._steps, "number": self._number}, "own": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps, self._number = state["shared"]["steps"], state["shared"]["number"]
        self._weight = state["own"]["weight"]
        self._messages.extend(_known(message) for message in state["own"].get("messages", ()))
        self._placed.clear()
        if self._counts_wholly:
            self._before = self._replica.place(0, state["own"]["before"])


def _wholly(own: Any, before: Any, weight: Any) -> Any:
    return before + (own - before) / weight


def _together(own: Any, came: Any, share: Any, weight: Any) -> Any:
    return (own * share + came) / weight


def _known(message: Array) -> Later[Array]:
    return Later(lambda: message)


def _rest(message: Later[Array]) -> Generator[Action, Any, Array | None]:
    """Take part in an exchange in which this rank has no partner.

    The rank keeps its message, which has no weight if the rank had no partner either when the exchange began.
    """
    yield Messages({}, {})
    own = message.get()
    return own if own[-1] else None


def _swap(message: Later[Array], to: int, source: int) -> Generator[Action, Any, Array]:
    own = message.get()
    block = own.view(np.uint8)
    came = yield Messages({to: block}, {source: block.size})
    return np.ascontiguousarray(came[source]).view(own.dtype)
