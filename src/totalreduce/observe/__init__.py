"""Watching: the timeline of every operation and its analysis, the live view of a job, and logs as JSON.

Of the live view, ``publisher`` runs in each rank and writes ``figures`` into a ``board``, the folder of the job, where
the launcher writes what it knows (``job``). ``view`` is what a person should see of both; ``table``, ``dashboard`` and
``metrics`` show it. Nothing here changes what the engine does.
"""

from __future__ import annotations

from totalreduce.observe.analysis import TimelineReport, analyse
from totalreduce.observe.logs import JsonFormatter
from totalreduce.observe.merge import merge_timelines, merged_trace
from totalreduce.observe.timeline import Timeline, rank_path

__all__ = ["JsonFormatter", "Timeline", "TimelineReport", "analyse", "merge_timelines", "merged_trace", "rank_path"]
