"""Makes the name ``totalreduce`` known to frameworks over ``torch.distributed``, once they are imported.

* Lightning's ``Trainer(strategy="totalreduce")`` and Fabric's ``Fabric(strategy="totalreduce")`` are ``strategy="ddp"``
  on this back end. Lightning finds strategies in a registry, and has no entry point for those of other packages.
* Accelerate's ``InitProcessGroupKwargs(backend="totalreduce")``, and with it ``ddp_backend="totalreduce"`` of
  Transformers' ``TrainingArguments``, work on CPUs, too. For GPUs Accelerate passes the name of any back end on. For
  CPUs its method ``PartialState._prepare_backend`` returns gloo, and another name is an error.

Each function takes a module of the framework. What it does not find there, in a version that it does not know, it
leaves alone.
"""

from __future__ import annotations

import functools
from typing import Any

from totalreduce.c10d.importing import after_import
from totalreduce.c10d.names import BACKEND_NAME

__all__ = ["install"]


def install() -> None:
    """Register with each framework now, or as soon as it is imported; harmless when called again."""
    for package in ("pytorch_lightning.strategies", "lightning.pytorch.strategies"):
        after_import(package, "StrategyRegistry", _lightning)
    for package in ("lightning_fabric.strategies", "lightning.fabric.strategies"):
        after_import(package, "STRATEGY_REGISTRY", _fabric)
    after_import("accelerate.state", "PartialState", _accelerate)


def _lightning(strategies: Any) -> None:
    _register(getattr(strategies, "StrategyRegistry", None), getattr(strategies, "DDPStrategy", None))


def _fabric(strategies: Any) -> None:
    _register(getattr(strategies, "STRATEGY_REGISTRY", None), getattr(strategies, "DDPStrategy", None))


def _register(registry: Any, strategy: Any) -> None:
    if registry is None or strategy is None or BACKEND_NAME in registry:
        return
    registry.register(
        BACKEND_NAME,
        strategy,
        description=f"DistributedDataParallel on the back end {BACKEND_NAME}",
        process_group_backend=BACKEND_NAME,
    )


def _accelerate(state: Any) -> None:
    original = getattr(getattr(state, "PartialState", None), "_prepare_backend", None)
    if original is None or getattr(original, "knows_totalreduce", False):
        return

    @functools.wraps(original)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None) -> Any:
        if backend != BACKEND_NAME:
            return original(self, cpu, sagemaker_dp, backend)
        _, distributed_type = original(self, cpu, sagemaker_dp, None)
        return BACKEND_NAME, distributed_type

    prepare.knows_totalreduce = True  # type: ignore[attr-defined]
    state.PartialState._prepare_backend = prepare
