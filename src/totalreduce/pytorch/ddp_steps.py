"""Whether the step with the gradients of a backward pass was taken, which DDP's hook is not told.

A program may leave a step out: a ``GradScaler`` does so where gradients overflow, a training loop where a loss is not
finite. What the pass has sent of the residuals was then not applied, and they must be what they were. A step is taken

- if an optimizer of torch has stepped with the parameter;
- if its gradient is still there when the next one is added to it: the program accumulates;
- or if the parameter is in no optimizer of torch: the program updates it by itself. A warning says so if torch has
  counted no change of it.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, final

import torch

from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.hooks import HookHandles, WeakHook

__all__ = ["StepWatch"]

_log = logging.getLogger(__name__)


@final
class StepWatch:
    """Decides for each parameter of a ``Memory`` whether the step after a pass was taken."""

    def __init__(self, memory: Memory) -> None:
        """Begin without parameters. The steps of all optimizers of torch are watched as long as this object lives."""
        self._memory = memory
        self._watched: set[torch.nn.Parameter] = set()
        self._optimized: set[torch.nn.Parameter] = set()  #: Those that are known to be in an optimizer of torch.
        self._has_looked = self._has_warned = False
        self._handles = HookHandles()
        self._handles.after_any_step(WeakHook(self._after_step))

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Have ``decide`` called before a gradient is added to that of a parameter."""
        if parameter not in self._watched:
            self._watched.add(parameter)
            self._handles.before_gradient(parameter, WeakHook(self._before_gradient, parameter))

    def _before_gradient(self, parameter: torch.nn.Parameter, _gradient: torch.Tensor) -> None:
        if parameter in self._memory.undecided:
            self.decide(parameter)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        undecided = self._memory.undecided
        found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler that lets a fused optimizer skip
        if not undecided or (found_inf is not None and bool(found_inf)):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in undecided and parameter.grad is not None:
                    self._optimized.add(parameter)
                    self._memory.accept(parameter)

    def decide(self, parameter: torch.nn.Parameter) -> None:
        """Decide whether the last step was taken, with what is known before the next gradient comes."""
        memory, gradient = self._memory, parameter.grad
        accumulates = gradient is not None and bool(gradient.any())
        if accumulates or not self._has_optimizer(parameter):
            if not accumulates and parameter._version == memory.undecided[parameter]:
                self._warn()
            memory.accept(parameter)
        else:
            memory.take_back(parameter)

    def decide_all(self) -> None:
        """Decide for all parameters."""
        for parameter in [*self._memory.undecided]:
            self.decide(parameter)

    def decide_left_out(self) -> None:
        """Decide for the parameters that have no gradient any more."""
        for parameter in [*self._memory.undecided]:
            if parameter.grad is None or not parameter.grad.any():
                self.decide(parameter)

    def _has_optimizer(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter is in an optimizer of torch, also if none has taken a step yet."""
        if parameter not in self._optimized and not self._has_looked:
            self._has_looked = True  # some 0.1 s, and only if the first step of a program was left out
            optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
            self._optimized.update(p for each in optimizers for group in each.param_groups for p in group["params"])
        return parameter in self._optimized

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "tr.ddp_hook: gradients were reset, no optimizer of torch has the parameters, and torch has counted no "
                "change of them. The hook takes the step as taken (parameters may have been changed through .data), "
                "and what it has sent of the residuals as applied. If the program has left the step out, this part of "
                "them is lost. Have the program write to the parameters under torch.no_grad(), and not through .data"
            )
