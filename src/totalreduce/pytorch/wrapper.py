"""The part of a wrapping optimizer that only forwards to the torch optimizer within."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["OptimizerWrapper", "no_optimizer"]


def no_optimizer(value: object) -> str:
    """Return the sentence for an argument that is no torch optimizer, with what to write instead of a model."""
    hint = ": write torch.optim.SGD(model.parameters(), lr=0.1)" if isinstance(value, torch.nn.Module) else ""
    return f"the optimizer must be a torch.optim.Optimizer, not a {type(value).__name__}{hint}"


class OptimizerWrapper(torch.optim.Optimizer, ABC):
    """A ``torch.optim.Optimizer`` for ``isinstance`` (schedulers, ``GradScaler``) whose data is the inner optimizer's.

    ``torch.optim.Optimizer.__init__`` is not called on purpose: it would make parameter groups and state a second time.
    Unknown attributes are not forwarded: ``GradScaler`` looks for ``_step_supports_amp_scaling``, and would then give
    its scale to the wrapper instead of the fused optimizer within.

    The methods that register hooks register them on the inner optimizer, which is also the hooks' argument. While the
    inner optimizer has a step hook, no update is deferred.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigurationError(no_optimizer(inner))
        self._inner = inner

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._inner

    @property
    def kind(self) -> str:
        """Name of the torch optimizer's class."""
        return type(self._inner).__qualname__

    @abstractmethod
    def flush(self) -> None:
        """Bring parameters and state up to date."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The torch optimizer's state, up to date."""
        self.flush()
        return self._inner.state

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state, up to date. It can be loaded with and without this wrapper."""
        self.flush()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the torch optimizer's state after all deferred updates."""
        self.flush()
        try:
            self._inner.load_state_dict(state_dict)
        except KeyError as error:
            if "param_groups" in state_dict and "state" in state_dict:
                raise
            has = ", ".join(map(repr, list(state_dict)[:3])) or "nothing"
            raise ConfigurationError(
                f"load_state_dict needs what state_dict() of an optimizer has returned; this has no {error}, only "
                f"{has}. Of a checkpoint with several states, pass that of the optimizer"
            ) from error

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The torch optimizer's defaults."""
        return self._inner.defaults

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:  # noqa: D102  (torch's; see the class)
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:  # noqa: D102
        return self._inner.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:  # noqa: D102
        return self._inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:  # noqa: D102
        return self._inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:  # noqa: D102
        return self._inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:  # noqa: D102
        return self._inner.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: save its state_dict()")
