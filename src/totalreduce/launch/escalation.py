"""When workers that must stop are sent which signal: asked first, told then, killed at last."""

from __future__ import annotations

import signal

__all__ = ["Escalation"]


class Escalation:
    """Signals to send to every worker that still runs, in order of time. Knows no process and no clock.

    Attributes:
        stopping: Whether anything was planned: ends of workers are then no failures of their own.
    """

    def __init__(self, linger_s: float, grace_s: float) -> None:
        """Set the two patiences.

        Args:
            linger_s: How long survivors of a failure may go on, to print their own error and end.
            grace_s: How long a worker may take to end once it was asked to.
        """
        self._linger_s, self._grace_s = linger_s, grace_s
        self._steps: list[tuple[float, signal.Signals]] = []
        self._interruptions = 0
        self.stopping = False

    def failed(self, now: float) -> None:
        """A worker failed: leave the others a moment, then stop them."""
        if not self.stopping:
            self.stopping = True
            asked = now + self._linger_s
            self._steps = [(asked, signal.SIGTERM), (asked + self._grace_s, signal.SIGKILL)]

    def interrupted(self, by: signal.Signals, now: float) -> None:
        """The launcher was told to stop. Once: the signal is passed on. Twice: all is killed at once."""
        self.stopping = True
        self._interruptions += 1
        if self._interruptions > 1:
            self._steps = [(now, signal.SIGKILL)]
            return
        self._steps = [(now, by), (now + self._grace_s, signal.SIGKILL)]
        if by is not signal.SIGTERM:
            self._steps.insert(1, (now + self._grace_s / 2, signal.SIGTERM))

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send now, if any. Each is given out once; one overtaken by a harder one, never."""
        chosen: signal.Signals | None = None
        while self._steps and self._steps[0][0] <= now:
            chosen = self._steps.pop(0)[1]
        return chosen
