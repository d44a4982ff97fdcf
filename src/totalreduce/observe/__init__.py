"""Watching: the timeline of every operation, its analysis, and ``progress`` for a terminal.

Nothing here changes what the engine does.
"""

from __future__ import annotations

from totalreduce.observe.analysis import TimelineReport, analyse
from totalreduce.observe.merge import merge_timelines, merged_trace
from totalreduce.observe.timeline import Timeline, rank_path

__all__ = ["Timeline", "TimelineReport", "analyse", "merge_timelines", "merged_trace", "rank_path"]
