"""What surrounds the call of a collective: how messages call it, and the callback that makes it.

Operations without a name are matched by their number, which follows the order in which a program calls them. Callbacks
of futures run in threads, in no certain order. An operation that a callback starts is therefore named after the
operation whose callback it is: by an ``Origin``, which is equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import final

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Origin", "Unknown", "call_here", "origin_of_call", "surroundings"]

#: What the program calls for which this thread submits operations now, and what such calls are counted in, as
#: ``all_reduce`` and ``of the default group``. Both are empty for ``Group``'s methods.
call_here: ContextVar[tuple[str, str]] = ContextVar("call_here", default=("", ""))


@final
class Unknown:
    """Stands for a callback whose origin is not known, so that no other rank can find what it starts."""


@final
class Origin:
    """Where operations come from that a callback starts. One object for each run of a callback.

    Attributes:
        digest: 16 bytes that are equal on all ranks, and different for each callback of the program.
        ranks: The ranks that have this callback: those of the operation.
    """

    __slots__ = ("_counts", "_depth", "_number", "_root", "digest", "ranks")

    def __init__(self, digest: bytes, ranks: Sequence[int], root: str, depth: int = 0, number: int = 0) -> None:
        self.digest, self.ranks = digest, ranks
        self._root, self._depth, self._number = root, depth, number
        self._counts: dict[str, int] = {}

    @classmethod
    def of_operation(
        cls, key: tuple[int, int], ranks: Sequence[int], name: str, caller: Origin | Unknown | None
    ) -> Origin:
        """Return the origin from which those of an operation's callbacks are made.

        Args:
            key: The key of the operation.
            ranks: Its ranks.
            name: Its name for people.
            caller: The surroundings in which it was submitted.
        """
        digest = _digest(key[0].to_bytes(8, "little"), key[1].to_bytes(4, "little"))
        if isinstance(caller, Origin):
            return cls(digest, ranks, caller._root, caller._depth)
        return cls(digest, ranks, name)

    @classmethod
    def of_several(cls, origins: Sequence[Origin]) -> Origin:
        """Return the origin that stands for several operations, in this order."""
        common = set(origins[0].ranks).intersection(*(origin.ranks for origin in origins))
        root = origins[0]._root if len(origins) == 1 else f"{origins[0]._root} and {len(origins) - 1} more"
        digest = _digest(b"several", *(origin.digest for origin in origins))
        return cls(digest, sorted(common), root, max(origin._depth for origin in origins))

    def of_callback(self, registered_in: Origin | None, number: int) -> Origin:
        """Return the origin of what a callback starts.

        Args:
            registered_in: The callback that registered it; ``None``: the program has.
            number: How many callbacks were registered there before, on the same future.
        """
        there = b"" if registered_in is None else registered_in.digest
        digest = _digest(b"callback", self.digest, there, number.to_bytes(4, "little"))
        return Origin(digest, self.ranks, self._root, self._depth + 1, number)

    def name_next(self, scope: str, ranks: Sequence[int]) -> tuple[str, str]:
        """Return the name of the next operation that the callback starts, and what messages show behind its title.

        Args:
            scope: Of the group's names.
            ranks: The ranks of the group.

        Raises:
            ConfigurationError: Some ranks of the group do not have this callback.
        """
        nested = f", {self._depth} callbacks deep" if self._depth > 1 else ""
        if ranks != self.ranks and not set(ranks) <= set(self.ranks):
            raise ConfigurationError(
                f"a callback of {self._root} calls a collective of ranks {_list(ranks)}, but only the ranks "
                f"{_list(self.ranks)} have this callback, so the others could not find its operation. Wait for "
                "the first operation, and call the second one in the program instead of in a callback"
            )
        self._counts[scope] = number = self._counts.get(scope, -1) + 1
        callback = f"callback #{self._number}" if self._number else "a callback"
        return f"{self.digest.hex()}/{number}", f"#{number} in {callback} of {self._root}{nested}"


#: The callback that this thread runs now; ``None``: it runs the program.
surroundings: ContextVar[Origin | Unknown | None] = ContextVar("surroundings", default=None)


def origin_of_call() -> Origin | None:
    """Return the origin of what this thread calls now; ``None`` if the program calls it, and not a callback.

    Raises:
        ConfigurationError: A callback calls it of which no other rank can know which one it is.
    """
    origin = surroundings.get()
    if isinstance(origin, Unknown):
        raise ConfigurationError(
            "a callback calls a collective, and it is a callback of no collective's future, so the other ranks could "
            "not find the operation. Register the callback with work.get_future().then(...) or "
            "torch.futures.collect_all(...).then(...), or call the collective in the program"
        )
    return origin


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, …"


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
