"""Reports the times of native operations to the engine's observers (see ``Observer.coordinated``)."""

from __future__ import annotations

from typing import final

from totalreduce.native.packing import Batch
from totalreduce.native.planned import PlannedReduction
from totalreduce.runner.runner import Runner

__all__ = ["Reports"]


@final
class Reports:
    """Informs the observers of one engine. Any thread that does not hold the engine's lock may call it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def batch(self, batch: Batch) -> None:
        """Report a batch that has ended."""
        observers = self._runner.engine.observers
        if not observers:
            return
        with self._runner.locked():
            for operation in batch.mine:
                request = operation.request
                for observer in observers:
                    observer.coordinated(
                        request.name,
                        operation.iteration,
                        kind=request.kind.name.lower(),
                        num_bytes=request.num_bytes,
                        batch=batch.number,
                        fused=len(batch.operations),
                        submitted=operation.submitted_at,
                        agreed=batch.agreed,
                        begun=batch.begun,
                        packed=batch.packed or batch.ended,
                        ended=batch.ended,
                        unpacked=batch.unpacked,
                        error=operation.error or batch.error,
                    )

    def planned(self, reduction: PlannedReduction) -> None:
        """Report a reduction of a plan that has ended."""
        if not self._runner.engine.observers:
            return
        with self._runner.locked():
            for observer in self._runner.engine.observers:
                observer.coordinated(
                    reduction.name,
                    reduction.round,
                    kind="allreduce",
                    num_bytes=reduction.tensor.nbytes,
                    batch=reduction.number,
                    fused=1,
                    submitted=reduction.submitted_at,
                    agreed=reduction.submitted_at,
                    begun=reduction.started_at,
                    packed=reduction.started_at,
                    ended=reduction.ended_at,
                    unpacked=reduction.ended_at,
                    error=reduction.error,
                )
