"""What the launcher knows of a running job, as a JSON document: its seats, its members, and what has happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

__all__ = ["JobRecord", "describe_event"]

#: The events that are kept, the last ones.
_EVENTS_MAX = 200
#: Texts are cut to this length.
_TEXT_MAX = 500


@final
class JobRecord:
    """Follows the events of one run of the launcher. A plain object: ``document`` is what is written."""

    def __init__(self, job: str, command: Sequence[str], num_ranks: int, begin: Mapping[str, Any]) -> None:
        """Begin."""
        self._begin = {
            **begin,
            "job": job,
            "command": " ".join(command)[:_TEXT_MAX],
            "num_ranks": num_ranks,
        }
        self._seats: dict[int, dict[str, Any]] = {}
        self._members: list[int] | None = None
        self._epoch = 0
        self._counts = {"lost": 0, "restarts": 0}
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_MAX)

    def note(self, event: Mapping[str, Any]) -> None:
        """Note one of the events of ``RecoveryOptions``. Jobs without recovery have ``started`` and ``ended`` alone."""
        kind, seat = event["event"], event.get("rank")
        if kind == "started" and isinstance(seat, int):
            incarnation = event.get("incarnation", 0)
            self._seats[seat] = {
                "state": "running",
                "host": str(event.get("host"))[:_TEXT_MAX],
                "pid": event.get("pid"),
                "incarnation": incarnation,
            }
            self._counts["restarts"] += bool(incarnation)
        elif kind == "ended" and isinstance(seat, int):
            failed = bool(event["exit_code"])
            how = event.get("signal") or f"exit code {event['exit_code']}"
            self._seats.setdefault(seat, {}).update(state="lost" if failed else "ended", how=how)
            self._counts["lost"] += failed
        elif kind == "epoch":
            self._epoch = event["epoch"]
            self._members = [member["seat"] for member in event["members"]]
        for sentence in describe_event(event):
            self._events.append({"time": event["time"], "event": kind, "text": sentence[:_TEXT_MAX]})

    def document(self, now: float) -> dict[str, Any]:
        """Return everything, in a form that JSON can hold. ``now`` is the time of the day in seconds."""
        return {
            **self._begin,
            "seats": {str(seat): dict(entry) for seat, entry in sorted(self._seats.items())},
            "members": self._members,
            "epoch": self._epoch,
            **self._counts,
            "events": list(self._events),
            "written_at": now,
        }


def describe_event(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences that tell a user what has happened; none for events that are only of use to programs."""
    kind, rank = event["event"], event.get("rank")
    if kind == "ended" and event["exit_code"]:
        end = f"was killed by {event['signal']}" if event["signal"] else f"failed with exit code {event['exit_code']}"
        error = f": {event['error']}" if event.get("error") else ""
        yield f"rank {rank} {end}{error}"
    elif kind == "started" and event["incarnation"]:
        how = "is replaced by a spare process" if event["was_spare"] else "is started again"
        yield f"rank {rank} {how} ({event['restarts_left']} restarts left)"
    elif kind == "program failed":
        who = "all ranks have failed by one error" if event["everywhere"] else f"rank {rank} has failed as before"
        yield f"{who}: {event['at']}. That is the program's error: it is not started again"
    elif kind == "start failed":
        what = "a spare process" if rank is None else f"rank {rank}"
        yield f"{what} cannot be started on {event['host']}: {event['error']}"
    elif kind == "spare ended":
        yield f"a spare process ended with exit code {event['exit_code']} before it had a seat: no more are started"
        for line in event["last_errors"]:
            yield f"  {line}"
    elif kind == "suspected":
        why = "is stopped" if event["by"] is None else f"is silent, says rank {event['by']}"
        yield f"rank {rank} {why}: it is killed"
    elif kind == "keeper" and event["starts"]:
        yield "the process that serves the store of the ranks was lost, and is started again"
    elif kind == "values refused":
        yield f"the store of the ranks was given {event['count']} values that no rank writes: they are ignored"
    elif kind == "host added":
        yield f"host {event['host']} is listed with {event['slots']} slots"
    elif kind == "host removed":
        yield f"host {event['host']} is listed with {event['slots'] or 'no'} slots: workers without a slot are ended"
    elif kind == "host blacklisted":
        why = (
            "workers fail there" if event["is_reached"] else "no worker can be started there, or the connection is lost"
        )
        yield f"host {event['host']} gets no workers for {event['seconds']:g} s: {why}"
        for line in event["last_errors"]:
            yield f"  {line}"
    elif kind == "host back":
        yield f"host {event['host']} is tried again"
    elif kind == "hosts refused":
        yield f"the hosts stay as they are: {event['error']}"
    elif kind == "epoch" and event["epoch"] > 1:
        yield f"{len(event['members'])} ranks go on from version {event['version']} (membership {event['epoch']})"
