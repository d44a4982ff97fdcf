"""A picture of one step of a timeline, for ``totalreduce timeline --plot``: what each rank did, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from totalreduce.cli.pictures import save_figure
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Bar", "PictureLine", "StepPicture", "draw_step", "step_of"]

#: Lanes of operations of one rank, at most: those that took longest.
_OPERATIONS_MAX = 30
#: By part of an operation: its kind in the legend. All other parts of native operations are "wire".
_KINDS = {
    "QUEUED": "queued",
    "QUEUE": "queued",
    "NEGOTIATE": "agreement",
    "FUSE": "copy",
    "COPY": "copy",
    "WAIT": "the caller waits",
    "REDUCE": "addition",
}
_COLOURS = {
    "wire": "#3f6fb5",
    "queued": "#c3cfe2",
    "agreement": "#9d7fb8",
    "copy": "#8aa17d",
    "addition": "#6b6b6b",
    "the caller waits": "#d1605e",
}
_NAME_WIDTH = 30
#: The tracks above those of operations.
_FIRST = ("caller", "computation")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its beginning and length in milliseconds from the beginning of the picture, and its kind."""

    begin_ms: float
    length_ms: float
    kind: str


@dataclass(frozen=True, slots=True)
class PictureLine:
    """One line of the picture: a track of a rank's timeline."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class StepPicture:
    """What is drawn."""

    iteration: int  #: The iteration of the operations of the step.
    length_ms: float  #: The length of the picture.
    ranks: Mapping[int, tuple[PictureLine, ...]]


@dataclass(frozen=True, slots=True)
class _Span:
    rank: int
    track: int
    begin: int
    end: int
    name: str
    iteration: int | None


def step_of(trace: Mapping[str, Any], iteration: int | None = None) -> StepPicture:
    """Return the picture of one step: from the beginning of its first operation to the end of its last one.

    The operations of steps are those that came most often; what else was going on meanwhile is in the picture, too.
    Raises ``ConfigurationError``.

    Args:
        trace: A trace of ``merged_trace``.
        iteration: The number of times that the operations of the step were submitted before; ``None``: the last one.
    """
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    spans = [
        _Span(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"], e["name"], _iteration(e))
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    last: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.iteration is not None:
            last[span.rank, span.track] = max(span.iteration, last.get((span.rank, span.track), 0))
    final = max(last.values(), default=0)
    chosen = final if iteration is None else iteration
    of_step = [span for span in spans if span.iteration == chosen and last[span.rank, span.track] == final]
    if not of_step:
        raise ConfigurationError(f"the timelines have no step {chosen}: they have steps 0 to {final}")
    begin, end = min(span.begin for span in of_step), max(span.end for span in of_step)
    shown = [span for span in spans if span.begin < end and span.end > begin]
    lines: dict[int, tuple[PictureLine, ...]] = {}
    for rank in sorted({span.rank for span in spans}):
        mine = [span for span in shown if span.rank == rank and span.iteration is not None]
        longest = sorted(mine, key=lambda span: span.begin - span.end)[:_OPERATIONS_MAX]
        tracks = [track for name in _FIRST for (owner, track), known in names.items() if (owner, known) == (rank, name)]
        tracks += dict.fromkeys(span.track for span in sorted(longest, key=lambda span: span.begin))
        lines[rank] = tuple(
            PictureLine(names.get((rank, track), str(track)), _bars(shown, rank, track, begin, end)) for track in tracks
        )
    return StepPicture(chosen, (end - begin) / 1e3, lines)


def _iteration(event: Mapping[str, Any]) -> int | None:
    """Return the iteration of an operation's own span; ``None`` for the parts of operations, waits and additions."""
    arguments = event.get("args", {})
    return arguments["iteration"] if "outcome" in arguments else None


def _bars(spans: Sequence[_Span], rank: int, track: int, begin: int, end: int) -> tuple[Bar, ...]:
    """Return the bars of one track between two times, in microseconds; what reaches beyond is cut off."""
    return tuple(
        Bar((low - begin) / 1e3, (high - low) / 1e3, _KINDS.get(span.name, "wire"))
        for span in spans
        if (span.rank, span.track) == (rank, track) and span.iteration is None
        for low, high in [(max(span.begin, begin), min(span.end, end))]
        if high > low
    )


def draw_step(path: Path, picture: StepPicture) -> None:
    """Draw one picture, with a part for each rank. Raises ``ConfigurationError``: the file cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(lines) for lines in picture.ranks.values()]
    figure = Figure(figsize=(10.0, 0.9 + 0.19 * sum(heights) + 0.35 * len(heights)), layout="constrained")
    parts = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    used: set[str] = set()
    for axes, (rank, lines) in zip(parts[:, 0], picture.ranks.items(), strict=True):
        for row, line in enumerate(lines):
            for bar in line.bars:
                axes.barh(row, bar.length_ms, left=bar.begin_ms, height=0.75, color=_COLOURS[bar.kind])
                used.add(bar.kind)
        axes.set_yticks(range(len(lines)), [_short(line.name) for line in lines], fontsize=7)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_title(f"rank {rank}", fontsize="small", loc="left")
        axes.grid(visible=True, axis="x", alpha=0.3)
    parts[-1, 0].set_xlim(0.0, picture.length_ms)
    parts[-1, 0].set_xlabel(f"ms of step {picture.iteration}")
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize="small")
    save_figure(figure, path)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"
