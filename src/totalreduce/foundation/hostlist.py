"""Slurm's compressed lists: ``node[01-03,7],login`` for hosts and ``2(x3),1`` for tasks per host."""

from __future__ import annotations

import itertools
import re

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["expand_counts", "expand_hostlist"]

#: A longer list is a mistake, not a cluster; expanding ``n[0-9999999999]`` would take all memory.
_HOSTS_MAX = 100_000

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return every host of a Slurm host list, such as ``rack[0-1]n[00-03],login``, in the list's order."""
    hosts: list[str] = []
    for word in _split_outside_brackets(text):
        pieces = _PIECE.findall(word)
        if not word or "".join(f"[{ranges}]" if ranges else literal for ranges, literal in pieces) != word:
            raise ConfigurationError(f"cannot read the host list {text!r} at {word!r}")
        choices = [_expand_ranges(ranges, text) if ranges else [literal] for ranges, literal in pieces]
        total = len(hosts)
        for choice in choices:
            total = max(total, 1) * len(choice)
        if total > _HOSTS_MAX:
            raise ConfigurationError(f"the host list {text!r} names more than {_HOSTS_MAX} hosts")
        hosts.extend("".join(parts) for parts in itertools.product(*choices))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks of each host: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word.strip())
        repeat = int(match[2] or 1) if match else 0
        if match is None or len(counts) + repeat > _HOSTS_MAX:
            raise ConfigurationError(f"cannot read the list of tasks per host {text!r} at {word!r}")
        counts.extend([int(match[1])] * repeat)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    words, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return words


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"cannot read the host list {text!r} at [{ranges}]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _HOSTS_MAX:
            raise ConfigurationError(f"the host list {text!r} has the range {part!r}, empty or too long")
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers
