"""Which errors of workers are the program's, so that another start would end by them, too."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

__all__ = ["ProgramErrors"]

#: A process that has been a rank for longer had trained meanwhile: its error comes and goes, and restarts help.
_MEMBER_S = 60.0


@final
class ProgramErrors:
    """Remembers by which error of the program the processes of each seat have failed last."""

    def __init__(self) -> None:
        self._errors: dict[int, str] = {}
        self._member_since: dict[int, float] = {}

    def started(self, seat: int) -> None:
        """Note that a process was started for a seat."""
        self._member_since.pop(seat, None)

    def joined(self, seats: Collection[int], now: float) -> None:
        """Note that the processes of these seats are ranks of a group."""
        for seat in seats:
            self._member_since.setdefault(seat, now)

    def is_repeated(self, seat: int, error: str, now: float) -> bool:
        """Note by which error a process has failed; return whether the seat has failed by it before.

        What is not the program's error, such as a lost rank, may come between: a rank that fails takes others with it.

        Args:
            seat: The seat.
            error: The exception's type and place in the program; "" if the program is not to blame.
            now: The time in seconds.
        """
        before = self._errors.get(seat, "")
        if now - self._member_since.pop(seat, now) >= _MEMBER_S:
            before = self._errors[seat] = ""
        self._errors[seat] = error or before
        return error != "" and error == before

    def are_equal(self, seats: Collection[int]) -> bool:
        """Whether several seats have failed by one error of the program, and no process has been a rank since."""
        errors = {"" if seat in self._member_since else self._errors.get(seat, "") for seat in seats}
        return len(seats) > 1 and len(errors) == 1 and "" not in errors
