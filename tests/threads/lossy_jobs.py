"""Jobs of ``tr.recoverable`` in which ranks are lost, without processes: the lost rank is one that was never there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import totalreduce as tr
from totalreduce.foundation.errors import PeerLost
from totalreduce.recovery.membership import Decision, Member


class Losses:
    """Raises the loss of a rank at places that a program comes to, once at each.

    Attributes:
        places: The places, as ``(version, place)``.
        num_lost: The number of losses so far.
    """

    def __init__(self, *places: tuple[int, str]) -> None:
        self.places, self.num_lost = set(places), 0

    def at(self, version: int, place: str) -> None:
        """Come to a place."""
        if (version, place) in self.places:
            self.places.remove((version, place))
            self.num_lost += 1
            raise PeerLost(7, f"lost at {place} of version {version}")


@contextlib.contextmanager
def lossy(state: tr.State, losses: Losses) -> Iterator[tr.recovery.job.Job]:
    """Run a job that goes on after losses with the ranks that there are. The place "vote" is that before the vote."""
    with tr.recoverable(state) as job:
        members = tuple(Member(seat, 0, has_state=False) for seat in range(job.group.world_size))
        policy = SimpleNamespace(on_loss="replace")
        decision = Decision(1, members, state.version)
        assembly = SimpleNamespace(current=decision, policy=policy, begin=lambda: None)
        blocks = job._blocks
        blocks.epochs = SimpleNamespace(assembly=assembly, leave=lambda _: None)
        blocks.own.restore(decision, has_state=False)

        def enter_next(_: object) -> None:
            job._optimizers.form_again()
            blocks.own.restore(Decision(1, members, 0), has_state=True)

        def before_vote() -> None:
            losses.at(state.version, "vote")
            blocks.begin_vote()

        job._enter_next = enter_next
        job._optimizers.guard(
            lambda: job.batch_counts, blocks.step_alone, blocks.before_wait, before_vote, blocks.end_vote
        )
        try:
            yield job
        finally:
            blocks.epochs = None
    assert not losses.places, f"nobody came to {losses.places}"
