"""``State``: everything that a block of the program changes, as one unit that is undone, sent and compared."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.encoding import encode
from totalreduce.pytorch.initial import sha256_of
from totalreduce.pytorch.local_steps import LocalSteps
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.recovery.buffers import BufferRow, KeptBuffers, follow_state_dict
from totalreduce.recovery.dealing import Dealer
from totalreduce.recovery.refusals import check_model, check_optimizers
from totalreduce.recovery.sampler import ElasticSampler
from totalreduce.recovery.stream import ElasticStream
from totalreduce.recovery.trained import KeptTrained, Trained, of_optimizer
from totalreduce.tensors.values import set_values

__all__ = ["State", "Stateful", "load_object"]

#: Names of attributes that the program cannot use for its values.
_FIELDS = ("model", "optimizer", "optimizers", "sampler", "version", "steps")
#: The types whose values cannot change, so that they need no copy.
_FIXED = frozenset((int, float, str, bool, bytes, complex, type(None)))


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be read and set."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any:
        """Set the object to a state."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a block may change before its vote, as it was when the block began."""

    values: dict[str, Any]  #: The plain values.
    objects: dict[str, Any]  #: The ``state_dict`` of each object: of schedulers, of a ``GradScaler``.
    trained: KeptTrained  #: Which parameters were trained, and by which groups of the optimizers.
    settings: list[dict[str, Any]]  #: The hyper-parameters of all optimizers, by group.
    sampler: dict[str, int] | None  #: The ``state_dict`` of the sampler or stream, or nothing.
    counts: tuple[int, int]  #: The version and the number of steps.


def _copy_of(value: Any) -> Any:
    """Return a deep copy. Of plain values, of which hyper-parameters consist, it takes a third of ``deepcopy``'s time.

    Unlike ``deepcopy`` it makes two copies of a list that has two places in a value, as a process that gets the value
    from another one does.
    """
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is dict:
        return {key: _copy_of(each) for key, each in value.items()}
    if kind is list:
        return [_copy_of(each) for each in value]
    if kind is tuple:
        return tuple([_copy_of(each) for each in value])
    return copy.deepcopy(value)


@final
class State:
    """The state of a job that ``tr.recoverable`` or ``tr.attempts`` keeps on all ranks.

    The model's parameters and buffers, the optimizers' state with residuals, the position in the data, and values
    of the program. Objects with ``state_dict()`` and ``load_state_dict()``, such as learning rate schedulers and a
    ``GradScaler``, are values, too. All others are plain values, of the types that the object collectives send
    (docs/collectives.md); they are attributes that the program may set::

        state = tr.State(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, best=0.0)

    Several models are one, and several optimizers have names::

        model = torch.nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        state = tr.State(model=model, optimizer={"generator": first, "discriminator": second}, sampler=sampler)

    Gradients are no part of it.

    Attributes:
        model: The module; with DistributedDataParallel the module in it.
        optimizer: What the program has passed: an optimizer, or optimizers by name. For ``tr.recoverable`` each is a
            ``DistributedOptimizer``, for ``tr.attempts`` any optimizer of torch.
        optimizers: The optimizers by name. The name of a single one is "".
        sampler: The ``ElasticSampler`` or ``ElasticStream``, or ``None``.
        version: The number of blocks that have taken effect.
        steps: How many of these were steps, of ``job.batches``, ``job.parts`` or ``job.steps``.
    """

    sampler: ElasticSampler | ElasticStream | None

    if TYPE_CHECKING:  # the program's values are attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        sampler: ElasticSampler | ElasticStream | None = None,
        **values: Any,
    ) -> None:
        """Collect the parts. Nothing is copied.

        Raises:
            ConfigurationError: An optimizer is none, or has a parameter that the model has not; the model is wrapped; a
                name is taken; or a value is of a type that cannot be sent.
            UnsupportedError: A parameter or buffer has no values that can be copied byte by byte: it is sparse,
                quantised, nested, on the meta device, or of a lazy module that has not run yet.
        """
        check_model(model)
        self.optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
        self._inners = {name: _inner(name, each) for name, each in self.optimizers.items()}
        if not self.optimizers:
            raise ConfigurationError("tr.State needs an optimizer, and optimizer={} has none")
        if sampler is not None and not isinstance(sampler, Dealer):
            raise ConfigurationError(
                "the sampler of a tr.State is a tr.ElasticSampler or a tr.ElasticStream, not a "
                f"{type(sampler).__name__}"
            )
        taken = sorted(name for name in values if name.startswith("_") or hasattr(type(self), name) or name in _FIELDS)
        if taken:
            raise ConfigurationError(f"tr.State cannot hold a value of the name {taken[0]!r}: choose another one")
        self.model, self.optimizer, self.sampler = model, optimizer, sampler
        self.version = self.steps = 0
        self._done: dict[str, int] = {}  #: By label: the epoch in which a block of ``job.once`` took effect last.
        self._objects = {name: value for name, value in values.items() if isinstance(value, Stateful)}
        self._names = tuple(name for name in values if name not in self._objects)
        check_optimizers(self._inners, model)
        self._buffers = KeptBuffers(model)
        self._trained = Trained({"": model}, self._inners)
        for name, value in values.items():
            setattr(self, name, value)
        self._kept = self._light()
        encode([self._kept.values, self._kept.objects])  # refuses what cannot be sent, before the job begins

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one part in a line."""
        lines = self._layout()
        lines += [
            f"buffer {name}"
            for name, (first, is_persistent) in self._buffers.describe().items()
            if is_persistent and first is not None
        ]
        for name, each in self.optimizers.items():
            if isinstance(each, DistributedOptimizer):
                lines += [f"{name} {each.describe()}".lstrip()]
        lines += [] if self.sampler is None else [self.sampler.describe()]
        return "\n".join(lines)

    def _layout(self, *, shows_groups: bool = False) -> list[str]:
        """Return what must be equal in a process that goes on with this state, one part in a line.

        That is not so of buffers, which may get other shapes, and may be registered or removed, while the job runs, nor
        of the parameters that are trained.
        """
        lines = [f"parameter {name}: {each.dtype}{list(each.shape)}" for name, each in self.model.named_parameters()]
        for name, inner in self._inners.items():
            sizes = [len(group["params"]) for group in inner.param_groups]
            groups = f" with groups of {sizes} parameters" if shows_groups else ""
            lines += [f"optimizer{of_optimizer(name)}: {type(inner).__qualname__}{groups}"]
        lines += [f"value {name}" for name in self._names]
        lines += [f"object {name}: {type(value).__qualname__}" for name, value in self._objects.items()]
        return lines

    def is_done(self, label: str) -> bool:
        """Whether a block of ``job.once(label)`` has taken effect in this epoch of the sampler."""
        return self._done.get(label) == self._epoch

    def check_first_step(self) -> None:
        """Check what the first step has made.

        Raises:
            ConfigurationError: An optimizer has made a state that cannot be sent to other ranks.
        """
        check_optimizers(self._inners, self.model)

    def count(self, label: str | None) -> None:
        """Count a block that has taken effect: a step, or with ``label`` a block of ``job.once``."""
        self.version += 1
        if label is None:
            self.steps += 1
        else:
            self._done[label] = self._epoch

    @property
    def _epoch(self) -> int:
        return 0 if self.sampler is None else self.sampler.epoch

    # ------------------------------------------------------------------------------------------- a block that is undone

    def keep(self) -> None:
        """Remember what a block may change before its vote. Parameters and the optimizer's state change after it."""
        self._kept = self._light()
        self._buffers.keep()

    def restore(self) -> None:
        """Set everything to what it was when ``keep`` was called, and drop the gradients."""
        kept = self._kept
        self._trained.restore(kept.trained)
        for name, value in _copy_of(kept.values).items():
            setattr(self, name, value)
        for name, value in _copy_of(kept.objects).items():
            load_object(self._objects[name], value)
        for group, settings in zip(self._groups(), kept.settings, strict=True):
            group.update(_copy_of(settings))
        if self.sampler is not None and kept.sampler is not None:
            self.sampler.load_state_dict(kept.sampler)
        self.version, self.steps = kept.counts
        self._buffers.restore()
        self.drop_gradients()

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and the tensors of the model's buffers."""
        return self._buffers.named()

    def buffer_row(self) -> BufferRow:
        """Return a layout of the model's buffers in a row of bytes."""
        return self._buffers.row()

    def own_buffers(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers that may differ from rank to rank; ``None`` for those that are no more. Not copied."""
        return self._buffers.own()

    def load_own_buffers(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Set the buffers that ``own_buffers`` has returned in another process."""
        self._buffers.load(tensors)

    def drop_gradients(self) -> None:
        """Set all gradients to ``None``: they are no part of the state, so a block begins without any."""
        for parameter in self._trained.parameters():
            parameter.grad = None

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inners.values() for group in inner.param_groups]

    def _light(self) -> _Kept:
        return _Kept(
            values={name: _copy_of(getattr(self, name)) for name in self._names},
            objects={name: _copy_of(value.state_dict()) for name, value in self._objects.items()},
            trained=self._trained.keep(),
            settings=[{key: _copy_of(group[key]) for key in group if key != "params"} for group in self._groups()],
            sampler=None if self.sampler is None else self.sampler.state_dict(),
            counts=(self.version, self.steps),
        )

    # ----------------------------------------------------------------------------------- a state that comes from others

    def outline(self) -> dict[str, Any]:
        """Return what ``adopt`` needs in another process. It is part of what ``shared`` returns."""
        return {"layout": self._layout(), "trained": self._trained.document()}

    def adopt(self, outline: Mapping[str, Any]) -> bool:
        """Train the parameters that another process trains, by the same groups of the optimizers; see ``Trained``.

        A process does so before it plans gradients; ``load_shared`` does it, too.

        Args:
            outline: What ``outline`` or ``shared`` has returned in another process.

        Returns:
            Whether this process has trained anything else before.

        Raises:
            ConfigurationError: It is the state of another program. Nothing has changed.
        """
        # Snapshots have not always had the former, and had the sizes of groups, and buffers, in the layout instead.
        trained = outline.get("trained")
        layout = [line for line in outline["layout"] if not line.startswith("buffer ")]
        difference = checks.first_difference(layout, self._layout(shows_groups=trained is None))
        if difference is not None:
            raise ConfigurationError(
                f"the state of the job has {difference[0]!r}, and this process's has {difference[1]!r}: start the "
                "program that the state is of"
            )
        return trained is not None and self._trained.adopt(trained)

    def shared(self) -> dict[str, Any]:
        """Return everything that a process needs to begin with this version. Tensors are not copied."""
        light = self._light()
        return {
            **self.outline(),
            "version": self.version,
            "steps": self.steps,
            "done": self._done,
            "model": self._tensors(),
            "buffers": self._buffers.describe(),
            "optimizers": {name: inner.state_dict() for name, inner in self._inners.items()},
            "values": light.values,
            "objects": light.objects,
            "sampler": light.sampler,
            "strategies": {name: each.shared() for name, each in self._strategies().items()},
        }

    def parameters_by_path(self) -> dict[tuple[str | int, ...], torch.Tensor]:
        """Return the parameter to which a tensor, or a dictionary of tensors, of ``shared`` belongs, by its path."""
        found: dict[tuple[str | int, ...], torch.Tensor] = {
            ("model", name): parameter for name, parameter in self.model.named_parameters()
        }
        for name, inner in self._inners.items():
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(parameters):
                found["optimizers", name, "state", index] = parameter
        return found

    def load_shared(self, shared: Mapping[str, Any]) -> None:
        """Begin with what ``shared`` has returned in another process.

        Raises:
            ConfigurationError: It is the state of another program. Nothing has changed.
        """
        self.adopt(shared)
        prefix = "buffer "
        tensors = {name.removeprefix(prefix): each for name, each in shared["model"].items() if name.startswith(prefix)}
        buffers = shared.get("buffers")
        if buffers is None:  # the library has not always written them: there were the same ones in all processes
            buffers, tensors = self._buffers.describe(), dict(self.named_buffers()) | tensors
        self._buffers.check(list(buffers))
        for name, parameter in self.model.named_parameters():
            set_values(parameter, shared["model"][name])
        self._buffers.set_all(buffers, tensors)
        for name, inner in self._inners.items():
            inner.load_state_dict(shared["optimizers"][name])
        for name in self._names:
            setattr(self, name, shared["values"][name])
        for name, value in self._objects.items():
            load_object(value, shared["objects"][name])
        if self.sampler is not None:
            self.sampler.load_state_dict(shared["sampler"])
        for name, each in self._strategies().items():
            if name in shared.get("strategies", {}):
                each.load_shared(shared["strategies"][name])
        self.version, self.steps, self._done = shared["version"], shared["steps"], dict(shared["done"])

    def _strategies(self) -> dict[str, LocalSteps]:
        """Return the steps of the optimizers with a strategy that can be recovered."""
        steps = {
            name: each.strategy_steps
            for name, each in self.optimizers.items()
            if isinstance(each, DistributedOptimizer) and each.strategy is not None
        }
        return {name: each for name, each in steps.items() if isinstance(each, LocalSteps)}

    def digests(self) -> dict[str, str]:
        """Return SHA-256 of each parameter and of each tensor of the optimizer's state. They are equal on all ranks.

        There is also one of which parameters are trained, and by which groups of the optimizers.
        """
        trained = self._trained.document()
        text = json.dumps([trained["frozen"], trained["groups"]])
        digests = {name: sha256_of(tensor) for name, tensor in self._compared()}
        return {**digests, "which parameters are trained": hashlib.sha256(text.encode()).hexdigest()}

    def _compared(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        for name, inner in self._inners.items():
            for index, entry in inner.state_dict()["state"].items():
                for key, value in entry.items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer{of_optimizer(name)} state {index}, {key}", value

    def _tensors(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        named.update((f"buffer {name}", buffer) for name, buffer in self.named_buffers())
        return {name: tensor.detach() for name, tensor in named.items()}


def load_object(target: Any, state: Mapping[str, Any]) -> None:
    """Set an object with ``load_state_dict`` to a state, in the middle of a step."""
    if isinstance(target, torch.nn.Module):
        follow_state_dict(target, state)
    target.load_state_dict(state)
    if isinstance(target, torch.amp.GradScaler) and target.is_enabled():
        # The step may have ended between unscale_() and update(). The scaler refuses a second unscale_(), and its
        # state_dict() does not have that it saw the first one.
        target._per_optimizer_states.clear()


def _inner(name: str, optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch, if the state can have it."""
    inner = optimizer.wrapped if isinstance(optimizer, DistributedOptimizer) else optimizer
    if not isinstance(name, str):
        raise ConfigurationError(f"the names of the optimizers of a tr.State are strings, not {name!r}")
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigurationError(f"tr.State needs an optimizer of torch, not a {type(optimizer).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        raise ConfigurationError(
            "tr.State does not support LBFGS, which changes the parameters several times in one step"
        )
    return inner
