"""Watching: the timeline of every operation, and ``progress`` for a terminal.

Nothing here changes what the engine does.
"""

from __future__ import annotations

from totalreduce.observe.merge import merge_timelines
from totalreduce.observe.timeline import Timeline, rank_path

__all__ = ["Timeline", "merge_timelines", "rank_path"]
