"""Every exception of the library, in one tree.

::

    TotalReduceError            also a RuntimeError, which is what torch.distributed and Horovod raise
    ├── ConfigurationError      also a ValueError: a setting, an environment variable, an argument
    │   └── UnsupportedError    a tensor this build cannot synchronise (device, layout, dtype)
    ├── MismatchError           ranks disagree about one operation
    │   ├── PlanMismatchError   ranks disagree about the model or the settings of a plan
    │   └── ReplayMismatchError processes of a replayed job make different calls
    ├── StallError              some rank never submitted an operation that others wait for
    ├── MissingTensorError      a rank left a planned tensor out and the policy forbids it
    ├── DeadlineExceededError   also a TimeoutError: the operation goes on, this wait does not
    │   └── SlowWorkersError    a request to a parameter server waits for workers that are steps behind
    ├── PeerLost                a rank died, froze or left
    ├── GroupClosed             this rank closed the group
    ├── RendezvousError         the group could not be formed
    │   ├── AuthenticationError a peer could not prove that it knows the job's key
    │   └── RecoveryError       the job cannot go on after a loss
    ├── RefusedError            a parameter server has not applied a request
    ├── WorkerFailedError       a worker of ``tr.run`` has failed
    └── ProtocolError           bytes that no correct peer sends

An error says what happened, where (rank, tensor), and what to do about it.
"""

from __future__ import annotations

from typing import Any, Self

from totalreduce.foundation.call_names import in_words

__all__ = [
    "AuthenticationError",
    "ConfigurationError",
    "DeadlineExceededError",
    "GroupClosed",
    "MismatchError",
    "MissingTensorError",
    "PeerLost",
    "PlanMismatchError",
    "ProtocolError",
    "RecoveryError",
    "RefusedError",
    "RendezvousError",
    "ReplayMismatchError",
    "SlowWorkersError",
    "StallError",
    "TotalReduceError",
    "UnsupportedError",
    "WorkerFailedError",
]


class TotalReduceError(RuntimeError):
    """Base of everything this library raises on purpose.

    It is a ``RuntimeError``, because that is what torch.distributed and Horovod raise when communication fails: a
    recovery loop written for them (``except RuntimeError``) catches the library's errors too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Let errors travel between processes (multiprocessing, futures) with their fields."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[TotalReduceError], args: tuple[Any, ...], fields: dict[str, Any]) -> TotalReduceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigurationError(TotalReduceError, ValueError):
    """A setting is invalid. It is raised before anything is sent; nothing has changed."""


class UnsupportedError(ConfigurationError):
    """The tensor's device, layout or dtype cannot be synchronised by this transport."""


class MismatchError(TotalReduceError):
    """Ranks submitted different operations under one name.

    Raised on every rank by ``Work.wait``; the tensors' contents are then undefined. You do not get it for different
    *orders* of submission, which are legal. The group stays usable, and so does the name.

    Attributes:
        tensor: Name of the operation.
        ranks: The ranks that were compared: two, or the first one of each of ``sets``.
        values: What each of them submitted, in the same order.
        sets: Sets of ranks that submitted the same, if all were compared; else each of ``ranks`` by itself.
    """

    def __init__(self, tensor: str, ranks: tuple[int, ...], values: tuple[str, ...]) -> None:
        both = "; ".join(f"rank {rank} submitted {value}" for rank, value in zip(ranks, values, strict=True))
        what = in_words(tensor)
        super().__init__(f"{what}: {both}. Submit the same kind, dtype, shape and reduction on every rank.")
        self.tensor, self.ranks, self.values = tensor, ranks, values
        self.sets: tuple[tuple[int, ...], ...] = tuple((rank,) for rank in ranks)

    @classmethod
    def between(cls, tensor: str, sets: tuple[tuple[int, ...], ...], values: tuple[str, ...]) -> MismatchError:
        """Return the error for ``sets`` of ranks that submitted the same, after a comparison of all ranks."""
        error = cls(tensor, tuple(ranks[0] for ranks in sets), values)
        said = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} submitted {value}"
            for ranks, value in zip(sets, values, strict=True)
        )
        error.args = (
            f"tensor {tensor!r}: {said}. Submit the same kind, dtype, shape, device and reduction on every rank.",
        )
        error.sets = sets
        return error


class PlanMismatchError(MismatchError):
    """Ranks built different plans: another model, other shapes, other settings. Raised on every rank.

    The message lists the differences (at most a screenful). Nothing was planned; the group stays usable.
    """

    def __init__(self, plan: str, differences: tuple[str, ...]) -> None:
        TotalReduceError.__init__(
            self,
            f"the ranks do not agree on {plan!r}:\n  "
            + "\n  ".join(differences)
            + "\nBuild the same model with the same settings on every rank.",
        )
        self.tensor, self.ranks, self.values, self.differences = plan, (), (), differences
        self.sets = ()


class ReplayMismatchError(MismatchError):
    """In ``tr.replayed``, a process makes another call than the others, or another one than before its loss.

    Raised on every rank, before any rank has got data for the call. The job ends with it.

    Attributes:
        version: The number of checkpoints before the call.
        position: The number of calls between the last checkpoint and this call.
        differences: What the processes do in this place.
    """

    def __init__(self, version: int, position: int, differences: tuple[str, ...]) -> None:
        where = f"call {position} after version {version}"
        TotalReduceError.__init__(
            self,
            f"{where}: the processes of the job do not make the same calls:\n  "
            + "\n  ".join(differences)
            + "\nBetween two checkpoints, every process must make the same calls in the same order, also one that was "
            "started again.",
        )
        self.tensor, self.ranks, self.values, self.sets = where, (), (), ()
        self.version, self.position, self.differences = version, position, differences


class MissingTensorError(TotalReduceError):
    """A planned tensor was left out by some ranks and ``on_missing="error"``. Raised on every rank.

    Attributes:
        tensor: Name of the first tensor that is missing somewhere.
        ranks: The ranks that left it out.
    """

    def __init__(self, tensor: str, ranks: tuple[int, ...], step: int) -> None:
        who = ", ".join(str(rank) for rank in ranks)
        super().__init__(
            f"step {step}: rank(s) {who} never submitted {tensor!r}. "
            'Use on_missing="zero" to count it as a zero contribution.'
        )
        self.tensor, self.ranks, self.step = tensor, ranks, step


class StallError(TotalReduceError):
    """Some rank never submitted an operation that others wait for, for longer than ``stall_abort_s``.

    Raised on every rank, by every pending and every later operation of that agreement (see ``docs/coordination.md``).
    The tensors' contents are undefined. Ranks that are merely slow need a longer ``stall_abort_s``.

    Attributes:
        tensor: The operation that waited longest.
        ranks: The ranks that did not submit it, or did not answer.
        waited_s: How long it waited, in seconds.
        where: The line of the program that submitted it.
    """

    def __init__(self, tensor: str, ranks: tuple[int, ...], waited_s: float, where: str) -> None:
        who = ", ".join(str(rank) for rank in ranks) or "unknown"
        place = f" (submitted at {where})" if where else ""
        super().__init__(
            f"tensor {tensor!r}{place} waited {waited_s:.1f} s for rank(s) {who}, which never submitted it. Does every "
            "rank call the same operations, with as many batches? If a rank is only slow, raise stall_abort_s"
        )
        self.tensor, self.ranks, self.waited_s, self.where = tensor, ranks, waited_s, where


class DeadlineExceededError(TotalReduceError, TimeoutError):
    """A wait has reached its deadline. The operation is still pending and may be waited for again."""

    def __new__(cls, *args: object) -> Self:
        """Use ``TimeoutError``'s constructor; that of ``RuntimeError`` would refuse to make an ``OSError``."""
        return TimeoutError.__new__(cls, *args)


class SlowWorkersError(DeadlineExceededError):
    """A request to a parameter server has waited for slower workers until its deadline. It may be waited for again.

    Attributes:
        clock: The clock of this worker.
        clocks: The clocks of the workers for which it waits, by rank, as servers have told last. A server tells again
            when the slowest clock changes.
    """

    def __new__(cls, *_args: object) -> Self:
        """Keep the arguments away from the constructor of ``OSError``, which would take them for an error number."""
        return TimeoutError.__new__(cls)

    def __init__(self, clock: int, clocks: dict[int, int], waited_s: float) -> None:
        who = ", ".join(f"rank {rank} at clock {behind}" for rank, behind in sorted(clocks.items()))
        super().__init__(
            f"a request of a worker at clock {clock} has waited {waited_s:.3g} s for slower workers: {who}. Does every "
            "rank call clock() after each step? If a rank is only slow, allow more staleness or a longer timeout_s"
        )
        self.clock, self.clocks = clock, clocks


class RefusedError(TotalReduceError):
    """A parameter server has refused a request; it has applied nothing of it. Other servers may have applied theirs."""


class PeerLost(TotalReduceError):
    """A rank died, froze, was cut off or left while it was needed.

    Raised by every pending and every later operation of the group on every survivor. The group is over; tensors of
    operations that had already finished are good.

    Attributes:
        rank: The lost rank.
        reason: How the loss was noticed.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank, self.reason = rank, reason


class GroupClosed(TotalReduceError):
    """This rank closed the group; it cannot be used any more."""


class RendezvousError(TotalReduceError):
    """The ranks could not find or reach each other in time."""


class AuthenticationError(RendezvousError):
    """A peer could not prove that it knows the job's key."""


class RecoveryError(RendezvousError):
    """The job cannot go on after a loss: too few ranks are left, or nobody has its state, or their states differ."""


class ProtocolError(TotalReduceError):
    """A peer sent bytes that no correct peer sends. The connection is dropped and counted."""


class WorkerFailedError(TotalReduceError):
    """A worker of ``tr.run`` has failed, and the others were ended. The message has the worker's traceback.

    Attributes:
        rank: The rank of the worker that failed first.
        traceback: Its traceback, as text, from the function on; its last lines of standard error if it has none.
        exit_code: Its exit code; 128 plus the number of the signal that killed it.
    """

    def __init__(self, rank: int, reason: str, traceback: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {reason}" + (f"\n\n{traceback.rstrip()}" if traceback else ""))
        self.rank, self.traceback, self.exit_code = rank, traceback, exit_code
