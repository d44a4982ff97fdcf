"""How messages call operations that the program gave no name: by the collective and a number.

``all_reduce #13 of the default group`` is call number 13 (counted from 0) of a collective of that group, and
``all_reduce #0 in a callback of broadcast #2 of the default group`` the first one in a callback of that broadcast.
"""

from __future__ import annotations

import re

__all__ = ["UNNAMED", "call_name", "in_words", "track_and_number"]

#: Stands for the name of operations that have none.
UNNAMED = "unnamed"
#: Title, number and place of a call.
_CALL = re.compile(r"(.+?) #(\d+) ((?:of|in) .+)")
_NUMBER = re.compile(r" #\d+")


def call_name(title: str, number: int, place: str) -> str:
    """Return the name of a call for people.

    Args:
        title: What the program calls: ``all_reduce``.
        number: How many calls preceded it, by which all ranks know it.
        place: What is counted there: ``of the default group``, or ``in a callback of ...``.
    """
    return f"{title} #{number} {place}"


def in_words(name: str) -> str:
    """Return the subject of a sentence about an operation: the call, or the tensor if the program gave it a name."""
    return name if _CALL.fullmatch(name) or name.startswith("message from rank ") else f"tensor {name!r}"


def track_and_number(name: str) -> tuple[str, str]:
    """Return a name without the number of the call, and the number; "" if the name has none.

    Numbers that engines and coordinators append (``barrier#7``) are numbers, too.
    """
    call = _CALL.fullmatch(name)
    if call:
        title, number, place = call.groups()
        return f"{title} {_NUMBER.sub('', place)}", number
    track, _, number = name.rpartition("#")
    return (track, number) if track and number.isdecimal() else (name, "")
