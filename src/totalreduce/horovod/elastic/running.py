"""``run``: calls a function again, with the ranks that there are then, when processes are lost or join."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.horovod.context import context
from totalreduce.horovod.elastic.state import ElasticRun, State, progress_of, train_as_latest
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.runs import Runs, latest_version

__all__ = ["run"]

_AnyState = TypeVar("_AnyState", bound=State)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def run(
    func: Callable[Concatenate[_AnyState, _Arguments], _Result],
) -> Callable[Concatenate[_AnyState, _Arguments], _Result]:
    """Have a function outlive the loss of ranks. A decorator; the function's first argument is a ``State``.

    Before each call of the function, all ranks begin with the state of the rank whose state is the latest. If a rank is
    lost, the others go back to the last commit, form a group, and call the function again: with a new process in place
    of the lost one (``totalreduce run --on-loss replace``), or without it (``shrink``). If processes join, ``commit``
    raises ``HostsUpdatedInterrupt``, and nothing is rolled back. When the function has returned, this rank waits until
    it has returned on all ranks. Without these options there is one call, and a loss is an error.

    Where ranks can be replaced, no collective is possible before this function is called, and a job has one such
    function, which is called once. Errors other than the loss of a rank end this process; the other ranks go on.

    Returns:
        The function, with the same arguments and result.

    Raises:
        ConfigurationError: By the returned function: its first argument is no ``State``; or this process runs another
            program than the others; or the function was called before.
        RecoveryError: By the returned function: too few processes have come in time, or no process has the state.
        PeerLost: By the returned function: a rank is lost, and ranks cannot be replaced.
        SystemExit: By the returned function, with ``shrink``: the others have ended the job.
    """

    @functools.wraps(func)
    def wrapper(state: _AnyState, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not isinstance(state, State):
            raise ConfigurationError(
                f"the first argument of a function with @hvd.elastic.run is a state, such as hvd.elastic.TorchState, "
                f"not a {type(state).__name__}"
            )
        group = context.group
        can_replace = group.formation is not None
        if can_replace and context.formed_group is not None:
            raise ConfigurationError(
                "a job whose ranks can be replaced (--on-loss) calls one function with @hvd.elastic.run, and calls it "
                "once: a process that is started later could not know which call the others are in. Put all phases "
                "into one function, and the present phase into the state"
            )
        function = _Function(state)
        results: list[_Result] = []
        try:
            for call in Runs(function, context, group.timeout_s, group.formation_settings):
                with call:
                    results.append(func(state, *args, **kwargs))
                if call.error is not None:
                    function.has_lost = True
        except BaseException as error:
            if can_replace:
                context.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            progress_of(state).run = None
        return results[-1]

    return cast("Callable[Concatenate[_AnyState, _Arguments], _Result]", wrapper)


@final
class _Function:
    """A function with its state, as a part of the program that is run again (``recovery.runs.Restartable``)."""

    def __init__(self, state: State) -> None:
        self._state, self._progress = state, progress_of(state)
        #: Whether the last call has ended by a loss. Then the state goes back to the last commit, but not before the
        #: next call is certain: if the others have ended the job meanwhile, the state is what the function left.
        self.has_lost = False

    @property
    def version(self) -> int:
        return self._progress.committed if self.has_lost else self._progress.version

    def describe(self) -> str:
        return self._state.describe()

    def level(self, group: Group, *, has_state: bool, decision: Decision | None) -> None:
        state, progress = self._state, self._progress
        source, versions = latest_version(group, self.version if has_state else None)
        progress.source = source
        if self.has_lost:
            state.restore()
        if decision is not None:
            train_as_latest(state)
            context.plan_again()
        if decision is not None and decision.epoch > 1:
            state.on_reset()
        state.sync()
        progress.level(max(0, versions[source]))
        self.has_lost = False

    def begin(self, group: Group, assembly: Assembly | None, number: int) -> ElasticRun:
        progress = self._progress
        progress.run = ElasticRun(group, assembly, number)
        return progress.run
