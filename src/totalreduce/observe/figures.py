"""The figures of one rank at one time, as a JSON document of bounded size: what a rank writes and a reader checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, final

from totalreduce.foundation.errors import ProtocolError

__all__ = ["DOCUMENT_BYTES_MAX", "Link", "RankFigures", "StepTimes"]

#: The size of a document, at most.
DOCUMENT_BYTES_MAX = 16 * 1024
#: Links that a document has, at most: those with the most bytes per second.
_LINKS_MAX = 64
#: Ranks of a subgroup's operation that a document names, at most.
_RANKS_MAX = 256
#: Sources that a document has, and figures of one source, at most.
_SOURCES_MAX, _FIGURES_MAX = 8, 24
#: Texts are cut to this length.
_TEXT_MAX = 200

Figure = int | float | str
_Made = TypeVar("_Made", bound="Link | RankFigures")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The messages between this rank and another one."""

    peer: int  #: The other rank.
    sent: int  #: Bytes sent since the group was formed.
    received: int  #: Bytes received.
    sent_per_s: float  #: Bytes per second, since the document before.
    received_per_s: float  #: Likewise.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """How long a training step takes, on the mean."""

    step_s: float = 0.0  #: Seconds; 0 until a step has been timed.
    compute_s: float = 0.0  #: The seconds of it in which the thread that trains was not blocked.
    exposed_s: float = 0.0  #: The other ones.
    hidden_share: float = 1.0  #: 0 to 1, as in ``StepReport``. It means nothing while ``step_s`` is 0.


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures(StepTimes):
    """The figures of one rank.

    Its times of steps are 0 until a step of this group has been timed. If no timed step has ended since the document
    before, they are those of that document.
    """

    seat: int  #: The place of the process in the job, which the launcher has given it. It never changes.
    rank: int  #: Its rank in the present group.
    world_size: int
    host: str  #: The name of its host.
    pid: int  #: The id of its process.
    epoch: int  #: The number of the membership, 0 if members never change.
    incarnation: int  #: How often the process of this seat was started again.
    step: int  #: The number of steps that have ended.
    since_step_s: float  #: The time since the last step has ended.
    bytes_sent: int  #: Bytes sent since the group was formed, in the fast lane, too.
    bytes_received: int
    sent_per_s: float  #: Bytes per second.
    received_per_s: float  #: Likewise.
    links: tuple[Link, ...] = ()  #: By peer, of messages only: the fast lane sends none.
    pending: str = ""  #: The name of the collective that is in flight for the longest time; empty if none is.
    pending_s: float = 0.0  #: The time since it was submitted.
    pending_of_all: bool = True  #: Whether all ranks of the group take part in that collective.
    pending_ranks: tuple[int, ...] = ()  #: If not: the ranks that take part, the first ones if there are many.
    reason: str = ""  #: Why it is in flight, as far as this rank knows.
    stalls: int = 0  #: Stall reports.
    mismatches: int = 0  #: Operations that ranks submitted differently.
    refused_connections: int = 0  #: Connections of strangers.
    dropped_messages: int = 0  #: Messages of failed operations or earlier memberships.
    #: Whether the group is still open. If it is not, these are the last figures before the next group.
    is_open: bool = True
    #: By name: figures of sparse methods and strategies.
    sources: dict[str, dict[str, Figure]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the document, of at most ``DOCUMENT_BYTES_MAX`` bytes. What exceeds the bounds is left out."""
        document = asdict(self)
        busiest = sorted(self.links, key=lambda link: -(link.sent_per_s + link.received_per_s))[:_LINKS_MAX]
        document["links"] = [asdict(link) for link in sorted(busiest, key=lambda link: link.peer)]
        document["pending_ranks"] = list(self.pending_ranks[:_RANKS_MAX])
        document["sources"] = {
            name[:_TEXT_MAX]: {key: _short(value) for key, value in list(figures.items())[:_FIGURES_MAX]}
            for name, figures in list(self.sources.items())[:_SOURCES_MAX]
        }
        text = json.dumps({key: _short(value) for key, value in document.items()}).encode()
        if len(text) > DOCUMENT_BYTES_MAX:
            document |= {"links": [], "sources": {}}
            text = json.dumps({key: _short(value) for key, value in document.items()}).encode()
        return text

    @classmethod
    def decode(cls, text: bytes) -> RankFigures:
        """Read a document. Raises ``ProtocolError``: it is too long, or no rank writes such a document."""
        if len(text) > DOCUMENT_BYTES_MAX:
            raise ProtocolError(f"figures of a rank have {len(text)} bytes, and at most {DOCUMENT_BYTES_MAX} are read")
        try:
            document = json.loads(text)
            links = tuple(_checked(Link, link) for link in document.pop("links"))
            ranks = tuple(_rank(value) for value in document.pop("pending_ranks"))
            sources = {
                str(name): {str(key): _figure(value) for key, value in figures.items()}
                for name, figures in document.pop("sources").items()
            }
            return _checked(cls, {**document, "links": links, "pending_ranks": ranks, "sources": sources})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"these are no figures of a rank: {error}") from None


def _short(value: Any) -> Any:
    """Return a value of the document, with a text cut and a number that JSON cannot have replaced by 0."""
    if isinstance(value, str):
        return value[:_TEXT_MAX]
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def _rank(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a rank is a number, not {type(value).__name__}")
    return value


def _figure(value: Any) -> Figure:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"a figure is a number or a text, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a figure is {value}")
    return value


def _checked(made: type[_Made], values: Mapping[str, Any]) -> _Made:
    """Return an object of a data class whose fields are numbers and texts, after a check of their types."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    for each in fields(made):
        wanted = kinds.get(str(each.type))
        value = values.get(each.name)
        if wanted is not None and (isinstance(value, bool) != (wanted == (bool,)) or not isinstance(value, wanted)):
            raise TypeError(f"{each.name} is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{each.name} is {value}")
    return made(**values)
