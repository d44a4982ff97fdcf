"""What a person should see of a running job: made of the figures of its ranks and of what its launcher says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from totalreduce.observe.board import Board, RankReading
from totalreduce.observe.figures import Figure, StepTimes

__all__ = ["JobView", "LateRank", "LinkRow", "RankRow", "view_of"]

#: A rank whose last figures are older than this is silent.
SILENT_S = 5.0
#: Operations in flight for longer than this many steps, and this many seconds, show that some rank is late.
_PENDING_STEPS, _PENDING_S = 3.0, 1.0
#: A rank is slow if it computes for so much longer than the median rank: this share, and this share of the step.
_SLOW, _SLOW_OF_STEP = 1.15, 0.05
#: Links and events that are shown, at most.
_LINKS_MAX, _EVENTS_MAX = 32, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow(StepTimes):
    """One rank."""

    seat: int  #: Its place in the job.
    rank: int | None  #: Its rank in the present group; ``None`` if it has written no figures, or has no rank any more.
    host: str
    pid: int | None  #: The id of its process there; ``None`` if it is not known.
    #: ``starting``, ``running``, ``silent``, ``ended``, ``lost`` (it has failed), ``no group`` (its group has ended,
    #: and the next one is not formed yet), or ``left out`` (it is not a member of the present group).
    state: str
    note: str = ""  #: How it ended, or why it is late.
    is_late: bool = False  #: Whether others wait for it.
    incarnation: int = 0  #: How often it was started again.
    step: int = 0  #: As in ``RankFigures``.
    sent_per_s: float = 0.0  #: Bytes per second.
    received_per_s: float = 0.0  #: Bytes per second.
    age_s: float | None = None  #: The age of the figures.


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that others wait for."""

    seat: int
    why: str  #: A phrase.


@dataclass(frozen=True, slots=True)
class LinkRow:
    """The messages from one rank to another one, as the sender counts them."""

    sender: int  #: Its rank.
    receiver: int  #: Its rank.
    per_s: float  #: Bytes per second.
    total: int  #: Bytes since the group was formed.


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView(StepTimes):
    """A job. Times of steps are means over the ranks that run; if none runs, over all ranks at their ends."""

    job: str  #: Its id.
    command: str  #: What each rank runs.
    began_at: float  #: When the launcher has begun, in seconds of the time of the day.
    now: float  #: The time of this view.
    epoch: int = 0  #: The number of the membership.
    world_size: int = 0  #: The number of ranks of the present group.
    step: int = 0  #: The largest number of steps of a rank.
    sent_per_s: float = 0.0  #: Bytes per second, of all ranks together.
    late: tuple[LateRank, ...] = ()  #: The ranks that others wait for.
    ranks: tuple[RankRow, ...] = ()  #: All seats.
    links: tuple[LinkRow, ...] = ()  #: The busiest links.
    faults: dict[str, int] = field(default_factory=dict)  #: By kind: a number.
    #: By name: figures of sparse methods and strategies, of the first rank that has them.
    training: dict[str, dict[str, Figure]] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()  #: What has happened, the latest last: ``time``, ``event`` and ``text``.

    @classmethod
    def read(cls, board: Board, now: float) -> JobView:
        """Return the present view of the job of a folder. ``now`` is the time of the day."""
        return view_of(board.read_job(), board.read_figures(), now)

    def as_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return asdict(self)


def view_of(job: Mapping[str, Any], readings: Mapping[int, RankReading], now: float) -> JobView:
    """Return the view of a job."""
    seats = {int(seat): entry for seat, entry in job.get("seats", {}).items()}
    members = job.get("members")
    states = {
        seat: _state(seats.get(seat), readings.get(seat), is_member=members is None or seat in members)
        for seat in sorted({*seats, *readings})
    }
    running = {seat: readings[seat] for seat, state in states.items() if state == "running"}
    late = late_ranks(running, {seat: readings[seat] for seat, state in states.items() if state == "silent"})
    why = {each.seat: each.why for each in late}
    rows = []
    for seat, state in states.items():
        entry, reading = seats.get(seat, {}), readings.get(seat)
        row: dict[str, Any] = {"seat": seat, "rank": None, "pid": None, "state": state, "host": entry.get("host", "")}
        row["note"] = why.get(seat) or (str(entry.get("how", "")) if state in ("ended", "lost") else "")
        row["incarnation"] = int(entry.get("incarnation", 0))
        if reading is not None:
            figures = reading.figures
            names = ("step", "step_s", "compute_s", "exposed_s", "hidden_share", "sent_per_s", "received_per_s")
            row |= {name: getattr(figures, name) for name in names} | {"age_s": reading.age_s}
            row["rank"] = figures.rank if state in ("running", "silent") else None
            row["pid"] = figures.pid
            if row["host"] in ("", "localhost"):
                row["host"] = figures.host
            if state != "running":
                row |= {"sent_per_s": 0.0, "received_per_s": 0.0}
        rows.append(RankRow(**row, is_late=seat in why))
    present = [reading.figures for reading in running.values()]
    everything = [reading.figures for reading in readings.values()]
    # When no rank runs any more, what was true at the end is shown.
    shown = present or everything
    stepping = [each for each in shown if each.step_s > 0]
    links = [
        LinkRow(each.rank, link.peer, link.sent_per_s, link.sent)
        for each in present
        for link in each.links
        if link.sent
    ]
    training: dict[str, dict[str, Figure]] = {}
    for each in shown:
        for name, values in each.sources.items():
            training.setdefault(name, values)
    counted = ("stalls", "mismatches", "refused_connections", "dropped_messages")
    return JobView(
        job=str(job.get("job", "")),
        command=str(job.get("command", "")),
        began_at=float(job.get("began_at", 0.0)),
        now=now,
        epoch=max([int(job.get("epoch", 0)), *(each.epoch for each in present)]),
        world_size=max((each.world_size for each in present), default=int(job.get("num_ranks", 0))),
        step=max((each.step for each in everything), default=0),
        step_s=fmean(each.step_s for each in stepping) if stepping else 0.0,
        compute_s=fmean(each.compute_s for each in stepping) if stepping else 0.0,
        exposed_s=fmean(each.exposed_s for each in stepping) if stepping else 0.0,
        hidden_share=fmean(each.hidden_share for each in stepping or shown) if shown else 1.0,
        sent_per_s=sum(each.sent_per_s for each in present),
        late=late,
        ranks=tuple(rows),
        links=tuple(sorted(links, key=lambda link: -link.per_s)[:_LINKS_MAX]),
        faults={
            **{name: int(job.get(name, 0)) for name in ("lost", "restarts")},
            **{name: sum(getattr(each, name) for each in everything) for name in counted},
        },
        training=training,
        events=tuple(job.get("events", ())[-_EVENTS_MAX:]),
    )


def _state(entry: Mapping[str, Any] | None, reading: RankReading | None, *, is_member: bool) -> str:
    """Return the state of a seat, from what the launcher says and the age of its figures."""
    known = "running" if entry is None else str(entry.get("state", "running"))
    if known != "running":
        return known
    is_older = entry is not None and reading is not None and reading.figures.incarnation < entry.get("incarnation", 0)
    if reading is None or is_older:
        return "starting"
    if not is_member:
        return "left out"
    if not reading.figures.is_open:
        return "no group"
    return "silent" if reading.age_s > SILENT_S else "running"


def late_ranks(running: Mapping[int, RankReading], silent: Mapping[int, RankReading]) -> tuple[LateRank, ...]:
    """Return the seats that others wait for.

    If operations of some ranks are in flight for long, the ranks that have none in flight for as long are late: they
    have not submitted what the others wait for. Otherwise all ranks step together, and the rank is late that computes
    for longer than the others, which wait for it. Ranks without timed steps, such as those that only serve, are not
    compared with the others.

    Args:
        running: The figures of ranks that run, by seat.
        silent: Those of ranks that write no figures any more, although they have not ended.
    """
    late = [LateRank(seat, f"has been silent for {reading.age_s:.0f} s") for seat, reading in silent.items()]
    figures = {seat: reading.figures for seat, reading in running.items()}
    if len(figures) < 2:
        return tuple(late)
    stepping = {seat: each for seat, each in figures.items() if each.step_s > 0}
    step_s = median(each.step_s for each in stepping.values()) if stepping else 0.0
    patience_s = max(_PENDING_S, _PENDING_STEPS * step_s)
    waiting = {seat for seat, each in figures.items() if each.pending_s > patience_s}
    if waiting:
        longest = max((figures[seat] for seat in waiting), key=lambda each: each.pending_s)
        late += [
            LateRank(seat, f"has not submitted {longest.pending!r}, in flight elsewhere for {longest.pending_s:.1f} s")
            for seat, each in figures.items()
            if seat not in waiting and (longest.pending_of_all or each.rank in longest.pending_ranks)
        ]
        return tuple(late)
    typical_s = median(each.compute_s for each in stepping.values()) if stepping else 0.0
    for seat, each in stepping.items():
        extra_s = each.compute_s - typical_s
        if each.compute_s > _SLOW * typical_s and extra_s > _SLOW_OF_STEP * step_s:
            late.append(LateRank(seat, f"computes for {extra_s * 1e3:.1f} ms longer than the median rank"))
    return tuple(late)
