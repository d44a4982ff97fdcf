"""Schedules, carriers, transports, sparse methods and commands by name, with those that other installed packages add.

A package adds one with an entry point in its ``pyproject.toml``, as a pytest plug-in does::

    [project.entry-points."totalreduce.schedules"]
    fanout = "my_package.fanout:SCHEDULES"

A program adds one with :meth:`Extensions.add`, before it makes a group. All ranks must have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Extensions", "classes_of_settings"]

T = TypeVar("T")


class Extensions(Mapping[str, T], Generic[T]):
    """The items of one kind by name. An item of another package is imported when it is first asked for."""

    def __init__(
        self, kind: str, group: str, built_in: Mapping[str, T | EntryPoint], check: Callable[[str, object], T]
    ) -> None:
        """Begin with the items of this package.

        Args:
            kind: What the items are, for errors: ``"sparse method"``.
            group: The group of entry points in which other packages declare theirs.
            built_in: The items of this package; an entry point stands for one whose module is above that of the caller.
            check: Returns its second argument, an item with the name of the first, if that is of the right type;
                raises ``ConfigurationError`` otherwise.
        """
        self._kind, self._group, self._check = kind, group, check
        self._items: dict[str, T | EntryPoint] = dict(built_in)
        self._built_in = frozenset(built_in)
        self._declared: dict[str, EntryPoint] | None = None
        self._names: tuple[str, ...] | None = None

    def __getitem__(self, name: str) -> T:
        """Return an item. Raises ``ConfigurationError``."""
        item = self._items.get(name)
        entry = self._entries().get(name) if item is None else item
        if not isinstance(entry, EntryPoint | None):
            return entry
        if entry is None:
            nearest = did_you_mean(name, self)
            raise ConfigurationError(
                f"{self._kind} {name!r} is not known{nearest}; there are {', '.join(map(repr, self))}"
            )
        try:
            loaded = entry.load()
        except Exception as error:
            source = entry.dist.name if entry.dist is not None else "an installed package"
            raise ConfigurationError(
                f"{self._kind} {name!r} of {source} cannot be imported from {entry.value}: {error!r}"
            ) from error
        checked = self._items[name] = self._check(name, loaded)
        return checked

    def __iter__(self) -> Iterator[str]:
        """Iterate over ``names``."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names: this package's, then those that were added, in alphabetical order."""
        if self._names is None:
            self._names = (*(name for name in self._items if name in self._built_in), *self.added())
        return self._names

    def __contains__(self, name: object) -> bool:
        """Return whether there is an item of this name, without importing it."""
        return name in self._items or name in self._entries()

    def added(self) -> list[str]:
        """Return the names that are not this package's, in alphabetical order."""
        return sorted((self._items.keys() | self._entries().keys()) - self._built_in)

    def add(self, name: str, item: T) -> None:
        """Add an item for this process. Raises ``ConfigurationError``."""
        if name in self:
            raise ConfigurationError(f"there is a {self._kind} called {name!r} already; choose another name")
        self._items[name] = self._check(name, item)
        self._names = None

    def remove(self, name: str) -> None:
        """Remove an item that :meth:`add` has added; tests do that."""
        if name not in self._built_in:
            self._items.pop(name, None)
            self._names = None

    def _entries(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages, read once: it takes milliseconds."""
        if self._declared is None:
            found = entry_points(group=self._group)
            self._declared = {entry.name: entry for entry in found if entry.name not in self._built_in}
        return self._declared


def classes_of_settings(kind: str, group: str, built_in: Iterable[Any]) -> Extensions[Callable[..., Any]]:
    """Return items that are classes of settings, each with its own name in the attribute ``name``.

    Args:
        kind: As for ``Extensions``; so is ``group``.
        group: The group of entry points.
        built_in: The classes of this package, or their entry points.
    """

    def check(name: str, item: object) -> Callable[..., Any]:
        if not callable(item) or getattr(item, "name", None) != name:
            raise ConfigurationError(
                f"the {kind} {name!r} is a class of settings with the attribute name={name!r}, not {item!r}"
            )
        return item

    return Extensions(kind, group, {item.name: item for item in built_in}, check)
