"""Strom: all ranks have the same parameters, and send each other few elements of their updates.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015. There are no servers
and no sums on the way: each rank sends to all others the elements of its accumulated update that exceed a threshold, as
index and sign; a receiver adds the threshold with this sign to its parameters. The rest of the update stays with its
rank, and is sent when it has added up.

This module departs from the paper in two points. In the paper, ranks apply messages whenever they come, so replicas
differ for a while. Here all ranks apply the messages of a step after the same step, in the order of the ranks, so
parameters have the same bits on all ranks. In the paper the threshold is constant. Here it falls with the learning
rate: otherwise the small updates at the end of a schedule would never add up to a threshold, and never be sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np

from totalreduce.codecs.codec import TOO_LARGE
from totalreduce.codecs.threshold import MAXIMUM, MINIMUM, Threshold
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import ahead
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather
from totalreduce.strategies.strategy import Pending, Replica, Strategy, StrategySession

__all__ = ["Strom", "StromSession"]

_log = logging.getLogger(__name__)

#: A threshold is too small if more than this share of the elements have to send more than so many thresholds. As one
#: threshold is sent in a step, the parameters fall behind their updates.
_BEHIND: Final = 10
_BEHIND_SHARE: Final = 0.01
#: A rank tells the others the size of its message in bytes, and its threshold; 0: the message has plain values.
_HEADER = np.dtype([("size", np.int64), ("threshold", np.float64)])
#: By default, the threshold falls to this part of the largest one.
_FALLS_TO: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Strom(Strategy):
    """Settings of Strom's method.

    Attributes:
        threshold: The smallest magnitude of an accumulated update that is sent, and the change of a parameter for which
            a sign stands, as long as the learning rate is the largest one so far. Updates of a rank count
            ``1 / world_size``, as in an average of updates.
        smallest: The threshold falls in proportion to the learning rate, but not below this value. ``None``: a tenth
            of ``threshold``. Equal to ``threshold``: the threshold is constant.
        overlap: The number of steps that go on while messages are exchanged. 0: each step waits for the messages of
            all ranks of this step.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "strom"

    threshold: float
    smallest: float | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        Threshold(threshold=self.threshold)  # checks it
        if self.smallest is not None:
            checks.real_field(self, "smallest", minimum=MINIMUM, maximum=self.threshold)
        checks.integer_fields(self, "overlap", minimum=0)

    def session(self, replica: Replica, rank: int, world_size: int) -> StromSession:
        """Return the session of one rank."""
        return StromSession(self, replica, rank, world_size)


@final
class StromSession(StrategySession):
    """The session of Strom's method."""

    def __init__(self, settings: Strom, replica: Replica, rank: int, world_size: int) -> None:
        """Begin with what the replica has, which all ranks have."""
        ahead.load_codecs()
        self._settings, self._replica, self._world_size = settings, replica, world_size
        self._warns = rank == 0
        self._steps, self._largest_rate = 0, 0.0
        self._tensors = range(len(replica.sizes))
        self._common = replica.read(self._tensors)
        self._rest = np.zeros(self._common.size, np.float32)
        #: The messages of the last steps, of which some may be under way, each with its threshold.
        nothing = (self._take(settings.threshold) for _ in range(settings.overlap))
        self._messages = deque(nothing, maxlen=settings.overlap)

    def ends_exchange(self) -> bool:
        """An exchange begins after each step, and its result is applied ``overlap`` steps later."""
        return self._steps >= self._settings.overlap

    def stepped(self, weight: float) -> list[Pending]:
        """Accumulate this step's update, and begin to send what exceeds the threshold."""
        del weight
        self._steps += 1
        overlap = self._settings.overlap
        update = self._replica.read(self._tensors) - self._common
        update *= update.dtype.type(1 / self._world_size)
        with np.errstate(over="ignore"):
            self._rest += update.astype(np.float32, copy=False)
        if overlap:  # otherwise the messages of this step are applied before the next one
            self._replica.write(self._tensors, self._common)
        threshold = self._threshold()
        message = self._take(threshold)
        self._messages.append(message)
        self._warn_if_behind(threshold)
        return [self._exchange(message, self._steps + overlap)]

    def _exchange(self, message: tuple[Array, float], due: int) -> Pending:
        """Return the exchange of a message whose result is due after so many steps."""
        overlap = self._settings.overlap
        exchange = _exchange(*message, self._rest.size, self._world_size)
        return Pending((due - overlap) % (overlap + 1), due, exchange)

    def restart(self, channel: int, due: int) -> Pending:
        """Return an exchange that has begun, and whose result is not applied, from its beginning."""
        del channel
        return self._exchange(self._messages[due - self._settings.overlap - self._steps - 1], due)

    def _threshold(self) -> float:
        """Return the threshold of this step, which falls with the learning rate."""
        settings, rate = self._settings, self._replica.learning_rate
        self._largest_rate = max(self._largest_rate, rate)
        smallest = _FALLS_TO * settings.threshold if settings.smallest is None else settings.smallest
        share = rate / self._largest_rate if self._largest_rate else 1.0
        return max(MINIMUM, smallest, share * settings.threshold)

    def _take(self, threshold: float) -> tuple[Array, float]:
        """Take from the rest what is sent; return the message, and its threshold, which is 0 if it has plain values.

        Values that no code can express (NaN, infinite, beyond 1e30) are sent plain, so that all ranks see them.
        """
        codec = Threshold(threshold=threshold)
        room = np.empty(codec.bytes_max(self._rest.size), np.uint8)
        used = codec.encode(self._rest, room, keeps=True)
        if used != TOO_LARGE:
            return room[:used].copy(), threshold
        plain = self._rest
        self._rest = np.zeros_like(plain)
        return plain.view(np.uint8), 0.0

    def _warn_if_behind(self, threshold: float) -> None:
        """Warn once, on rank 0, if the threshold is too small for the updates. Looks after 1, 2, 4, 8, ... steps."""
        if not self._warns or self._steps & (self._steps - 1):
            return
        share = np.count_nonzero(np.abs(self._rest) >= _BEHIND * threshold) / max(1, self._rest.size)
        if share > _BEHIND_SHARE:
            self._warns = False
            _log.warning(
                "after %d steps of Strom(threshold=%g), %.0f %% of the elements have to send more than %d thresholds, "
                "of which one is sent in a step: parameters fall behind their updates, and training may diverge. "
                "Choose a larger threshold, or a smaller learning rate",
                *(self._steps, threshold, 100 * share, _BEHIND),
            )

    def apply(self, channel: int, result: Any) -> None:
        """Move the common parameters, and the replica to them."""
        del channel
        self._common += result
        self._replica.write(self._tensors, self._common)

    def ending(self) -> list[Pending]:
        """Do nothing: the replicas are equal, and what was not sent is less than a few thresholds."""
        return []

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, the largest learning rate, common parameters, what was not sent, and messages.

        The learning rate is that of this rank. A rank that joins goes on with another rank's.
        """
        shared = {"steps": self._steps, "largest_rate": self._largest_rate, "common": self._common}
        own: dict[str, Any] = {"rest": self._rest}
        if self._settings.overlap:
            own["messages"] = [{"block": block, "threshold": threshold} for block, threshold in self._messages]
        return {"shared": shared, "own": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        shared = state["shared"]
        self._steps, self._largest_rate, self._common = shared["steps"], shared["largest_rate"], shared["common"]
        self._rest = state["own"]["rest"]
        self._messages.extend((each["block"], each["threshold"]) for each in state["own"].get("messages", ()))


def _exchange(block: Array, threshold: float, count: int, world_size: int) -> Generator[Action, Any, Array]:
    """Send this rank's message to all others; return the sum of all messages, added in the order of the ranks.

    Args:
        block: The message: a code, or plain values.
        threshold: That of the code; 0 if the message has plain values.
        count: The number of elements of all parameters.
        world_size: The number of ranks.
    """
    header = np.array([(block.size, threshold)], _HEADER)
    came = yield Allgather(header.view(np.uint8), [_HEADER.itemsize] * world_size)
    sizes: list[int] = []
    codecs: list[Threshold | None] = []  #: ``None``: the message has plain values.
    for source, each in enumerate(came):
        size, its_threshold = np.ascontiguousarray(each).view(_HEADER)[0].item()
        if its_threshold and not MINIMUM <= its_threshold <= MAXIMUM:
            raise ProtocolError(f"rank {source} announces a threshold of {its_threshold:g}")
        codec = Threshold(threshold=its_threshold) if its_threshold else None
        if not (size == 4 * count if codec is None else 0 <= size <= codec.bytes_max(count)):
            raise ProtocolError(f"rank {source} announces a message of {size} bytes for {count} elements")
        sizes.append(size)
        codecs.append(codec)
    blocks = yield Allgather(block, sizes)
    total = np.zeros(count, np.float32)
    for message, codec in zip(blocks, codecs, strict=True):
        if codec is None:
            total += np.ascontiguousarray(message).view(np.float32)
        else:
            codec.decode(message, total, adds=True)
    return total
