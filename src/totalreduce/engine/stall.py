"""The stall watch: who has not submitted what.

No rank sees more than its neighbours, so a rank whose operation is late asks every peer "have you submitted this?" and
makes one report out of the answers. A peer that is asked about an operation it has never submitted learns in the same
moment that it keeps somebody waiting, and reports too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Inquiry", "StallReport"]

#: How long answers are waited for before the report is made without them.
ANSWER_S = 1.0


@dataclass(slots=True)
class Inquiry:
    """Answers collected so far about one operation."""

    asked_at: float
    warn: bool
    answers: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def answered(self, peer: int, *, submitted: bool, progress: str) -> None:
        """Note one answer."""
        self.answers[peer] = progress
        if not submitted and peer not in self.missing:
            self.missing.append(peer)


@dataclass(frozen=True, slots=True)
class StallReport:
    """One operation that is late.

    Attributes:
        tensor: Name of the operation.
        iteration: How often the name had been submitted before.
        waited_s: Seconds since it was submitted here; where this rank is the late one, since the asking rank did.
        missing: Ranks that never submitted it.
        progress: What each rank that has submitted it says about its progress.
        silent: Ranks that did not answer.
    """

    tensor: str
    iteration: int
    waited_s: float
    missing: tuple[int, ...]
    progress: dict[int, str]
    silent: tuple[int, ...]

    def __str__(self) -> str:
        """One sentence for the log."""
        parts = [f"tensor {self.tensor!r} (iteration {self.iteration}) has been pending for {self.waited_s:.1f} s"]
        if self.missing:
            parts.append(f"never submitted by rank(s) {', '.join(map(str, self.missing))}")
        if self.silent:
            parts.append(f"no answer from rank(s) {', '.join(map(str, self.silent))}")
        if self.progress:
            parts.append("; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.progress.items())))
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "tensor": self.tensor,
            "iteration": self.iteration,
            "waited_s": self.waited_s,
            "missing": list(self.missing),
            "silent": list(self.silent),
            "progress": {str(rank): text for rank, text in self.progress.items()},
        }
