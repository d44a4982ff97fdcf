"""``DistributedOptimizer`` with Horovod's arguments and methods."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.horovod.arguments import checked_compression, checked_factor
from totalreduce.horovod.collectives import Adasum, Average, Reduction, Sum, checked_op
from totalreduce.horovod.compression import Compression, Compressor
from totalreduce.horovod.context import context
from totalreduce.horovod.functions import fill_missing_gradients
from totalreduce.horovod.process_sets import ProcessSet, global_process_set
from totalreduce.pytorch import adasum
from totalreduce.pytorch import optimizer as plain
from totalreduce.pytorch.planning import NamedParameters, ParameterSource
from totalreduce.pytorch.wrapper import no_optimizer

__all__ = ["AdasumOptimizer", "DistributedOptimizer", "GradientOptimizer"]

Named = list[tuple[str, torch.nn.Parameter]]

_COMPRESSIONS: dict[type[Compressor], Literal["none", "fp16", "bf16"]] = {
    Compression.none: "none",
    Compression.fp16: "fp16",
    Compression.bf16: "bf16",
}


class GradientOptimizer(plain.DistributedOptimizer):
    """``totalreduce.DistributedOptimizer`` with Horovod's methods. Made by ``DistributedOptimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self._user_synchronized = self._expects_synchronized = False
        super().__init__(optimizer, **options)

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks; the next ``step()`` is expected within ``skip_synchronize()``."""
        super().synchronize()
        self._user_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Give a context for ``step()`` after ``synchronize()``; that step does not communicate in any case."""
        before, self._expects_synchronized = self._expects_synchronized, True
        try:
            yield
        finally:
            self._expects_synchronized = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; warn after ``synchronize()`` and outside ``skip_synchronize()``, where Horovod reduces twice."""
        if self._user_synchronized and not self._expects_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). Here the "
                "gradients are reduced once all the same, with Horovod they are reduced again: write `with "
                "optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self._user_synchronized = False
        return super().step(closure)

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The first name of each parameter; programs read this attribute of Horovod's optimizer."""
        return {parameter: names[0] for parameter, names in self._source.names().items()}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that add up before gradients leave. On every rank.

        Raises:
            ConfigurationError: The number is less than one.
        """
        self._settings = dataclasses.replace(self._settings, backward_passes_per_step=_checked_passes(passes))
        self._round.restart_passes()

    def form_again(self) -> None:
        """Make a plan in the group after its members have changed (see the base class)."""
        self._user_synchronized = False
        super().form_again()

    def close(self) -> None:
        """Close the optimizer; ``join`` does not take part in its steps any more."""
        try:
            super().close()
        finally:
            context.forget(self)


class AdasumOptimizer(adasum.AdasumOptimizer):
    """``totalreduce.AdasumOptimizer`` with Horovod's methods. Made by ``DistributedOptimizer``."""

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The name of each parameter; programs read this attribute of Horovod's optimizer."""
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def synchronize(self) -> None:
        """Do nothing: ``step()`` combines the updates."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise a ``ConfigurationError``: ``step()`` always communicates."""
        raise ConfigurationError("op=Adasum combines the updates that step() makes: that cannot be skipped")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number; gradients add up on this rank until ``step()`` in any case."""
        _checked_passes(passes)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> GradientOptimizer | AdasumOptimizer:
    """Wrap a torch optimizer so that ``step()`` uses the gradients of all ranks. Collective among these.

    Gradients leave during backward. ``step()`` waits for them, or ``synchronize()`` if they are to be clipped or
    unscaled before. The returned optimizer is a ``torch.optim.Optimizer``, but not of the class of the given one.

    Args:
        optimizer: Any ``torch.optim`` optimizer. It is driven by the one returned: do not step it yourself.
        named_parameters: ``model.named_parameters()``; equal names on all ranks. Without it, places in the optimizer.
        compression: ``Compression.none``, ``fp16`` or ``bf16``. Not with ``Adasum``.
        backward_passes_per_step: The number of backward passes that add up before gradients leave; those of a remainder
            leave at ``step()``. Gradients are not divided by it.
        op: ``Average``, ``Sum``; or ``Adasum``, which combines the ranks' updates.
        gradient_predivide_factor: Averages are divided by this before the sum and by the rest after it.
        num_groups: Accepted, like ``groups``, without effect: Horovod packs gradients by groups, and this optimizer
            plans its buckets itself.
        groups: A number, or lists of parameters.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones, and become dense. Otherwise the rows of all
            ranks are gathered if it is known beforehand that gradients are sparse (``SparseAdam``).
        process_set: The ranks. On other ranks, the returned optimizer works without communication.

    Raises:
        ConfigurationError: A ``ValueError``. Parameters without a name, names given twice; settings that make no sense.
        UnsupportedError: A parameter that is complex.
        PlanMismatchError: The ranks' models or settings differ; on every rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(no_optimizer(optimizer))
    op, compression = checked_op(op), checked_compression(compression)
    context.number(process_set)
    _check_hints(num_groups, groups)
    named = None if named_parameters is None else _checked_names(named_parameters, optimizer)
    if op is Adasum:
        return _adasum(optimizer, named, compression, backward_passes_per_step, process_set)
    if op not in (Average, Sum):
        raise ConfigurationError(f"op is Average, Sum or Adasum, not {op.name}")
    if compression not in _COMPRESSIONS:
        raise ConfigurationError("compression is one of Compression.none, Compression.fp16 and Compression.bf16")
    group, name = _place(process_set, "DistributedOptimizer")
    wrapped = GradientOptimizer(
        optimizer,
        named_parameters=named,
        group=group,
        op=ReduceOp.AVG if op is Average else ReduceOp.SUM,
        compression=_COMPRESSIONS[compression],
        gradient_predivide_factor=checked_factor("gradient_predivide_factor", gradient_predivide_factor),
        backward_passes_per_step=_checked_passes(backward_passes_per_step),
        sparse="dense" if sparse_as_dense else "gather",
        # As with Horovod: gradients are this rank's own until synchronize() or step(), and programs broadcast values.
        overlap="step",
        initial=None,
        buffers=None,
        name=name,
    )
    if process_set.included():
        context.enlist(wrapped, name, process_set)
    return wrapped


def _adasum(
    optimizer: torch.optim.Optimizer,
    named: Named | None,
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> AdasumOptimizer:
    if compression is not Compression.none:
        warnings.warn("op=Adasum: updates travel as they are, without compression", stacklevel=3)
    _checked_passes(passes)
    if context.group.formation is not None:
        raise UnsupportedError("op=Adasum is not supported where ranks can be replaced (--on-loss): use hvd.Average")
    names = ParameterSource(optimizer, None, named).names()
    group, name = _place(process_set, "AdasumOptimizer")
    wrapped = AdasumOptimizer(optimizer, _Names(names), group=group.control, initial=None, name=name)
    fill_missing_gradients(wrapped)
    return wrapped


class _Names(torch.nn.Module):
    """A module with nothing but named parameters, for ``AdasumOptimizer``."""

    def __init__(self, names: NamedParameters) -> None:
        super().__init__()
        self._names = names

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the names and parameters that were given."""
        return ((name, parameter) for parameter, names in self._names.items() for name in names)


def _place(process_set: ProcessSet, kind: str) -> tuple[Group, str]:
    """Return the group of an optimizer, and its name in the group."""
    if process_set.included() is False:
        group = context.group
        return group.subgroup([group.rank]), kind
    members = context.declared(process_set)
    return members.group, members.name(kind)


def _checked_passes(passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(f"backward_passes_per_step is a number from 1, not {passes!r}")
    return passes


def _check_hints(num_groups: object, groups: object) -> None:
    if not isinstance(num_groups, int) or num_groups < 0:
        raise ConfigurationError(f"num_groups is a number from 0, not {num_groups!r}")
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list | tuple) or not all(isinstance(each, list | tuple) for each in groups):
        raise ConfigurationError("groups is a number from 0, or a list of lists of parameters")


def _checked_names(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer
) -> Named:
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in named):
        raise ConfigurationError(
            "named_parameters is a sequence of tuples (name, parameter), such as model.named_parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ConfigurationError(f"names in named_parameters must be unique; found more than once: {', '.join(twice)}")
    known = {parameter for _, parameter in named}
    held = [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]
    unnamed = [str(tuple(parameter.shape)) for parameter in held if parameter not in known]
    if unnamed:
        raise ConfigurationError(
            f"named_parameters names only some of the optimizer's parameters; missing are those of shape "
            f"{', '.join(unnamed[:5])}"
        )
    return named
