"""The states of elastic training: what the ranks commit, go back to, and give to new ranks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.encoding import encode
from totalreduce.horovod.context import context
from totalreduce.horovod.elastic.sampler import ElasticSampler
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.pytorch.wrapper import OptimizerWrapper
from totalreduce.recovery.places import Places
from totalreduce.recovery.runs import Run
from totalreduce.recovery.sharing import send_state
from totalreduce.recovery.state import Stateful, load_object
from totalreduce.recovery.trained import Trained
from totalreduce.tensors.modes import write

__all__ = [
    "ElasticRun",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "Progress",
    "State",
    "TorchState",
    "progress_of",
    "train_as_latest",
]


class HostsUpdatedInterrupt(RuntimeError):
    """Processes join: ``commit`` and ``check_host_updates`` raise it on all ranks, in the same call.

    ``hvd.elastic.run`` catches it, and calls the function again with the new ranks. Nothing is rolled back.
    """


@final
class ElasticRun(Run):
    """One call of a function with ``hvd.elastic.run``."""

    @property
    def interruption(self) -> type[BaseException]:
        """The exception that ends the call because processes join."""
        return HostsUpdatedInterrupt


@dataclass(slots=True)
class Progress:
    """How far the state of this rank is, and where it gets a later one."""

    #: The version of the state, as it is. Commits raise it, and so does an interrupt, because the state may be later
    #: than the last commit then.
    version: int = 0
    committed: int = 0  #: The version of the last commit, to which ``restore`` goes back.
    source: int = 0  #: The rank with the latest state when the present group was formed.
    #: The call of the function that is under way; ``None`` outside of ``hvd.elastic.run``.
    run: ElasticRun | None = None

    def commit(self) -> None:
        """Note that the state was committed."""
        self.version += 1
        self.committed = self.version
        if self.run is not None:
            self.run.note_step()

    def level(self, version: int) -> None:
        """Note that all ranks have the state of a version, and have committed it."""
        self.version = self.committed = version


class State(ABC):
    """What a function with ``hvd.elastic.run`` works on: the base of states of the program's own.

    A subclass defines ``save``, ``restore`` and ``sync``. A rank that was just started may be rank 0, so ``sync`` uses
    ``broadcast_latest`` and not ``hvd.broadcast_object``::

        class Tokens(hvd.elastic.State):
            def save(self): self.saved = self.tokens
            def restore(self): self.tokens = self.saved
            def sync(self): self.tokens = self.saved = self.broadcast_latest(self.tokens)
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:  # noqa: ARG002
        """Begin without a commit. The arguments are Horovod's, and have no effect."""
        self._progress = Progress()
        self._reset_callbacks: list[Callable[[], Any]] = []

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory. Called by ``commit``."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy of the last ``save`` or ``sync``."""

    @abstractmethod
    def sync(self) -> None:
        """Begin with the state of the rank whose state is the latest. Collective. Called before the function."""

    def commit(self) -> None:
        """Keep a copy of the state in memory, to which ranks go back after a loss. On all ranks, after the same step.

        If ranks differ by one commit after a loss, all begin with the state of a rank that has the later one.

        Raises:
            HostsUpdatedInterrupt: Processes want to join (``totalreduce run --on-loss shrink``); on all ranks.
            PeerLost: A rank is lost.
            ConfigurationError: A value cannot be sent to other ranks.
        """
        self.save()
        self._progress.commit()
        self._look_for_newcomers()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if processes want to join. On all ranks, after the same step."""
        run = self._progress.run
        if run is not None and run.takes_newcomers:
            self._share_records()
        self._look_for_newcomers()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called after each change of the ranks, before ``sync``: on all ranks, new ones, too."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions of ``register_reset_callbacks``."""
        for callback in self._reset_callbacks:
            callback()

    @final
    def broadcast_latest(self, value: Any) -> Any:
        """Return the value of the rank whose state is the latest, on every rank. Collective; for ``sync``.

        Args:
            value: This rank's value, of the types that ``hvd.broadcast_object`` sends.
        """
        return context.group.broadcast_object(value, root=self._progress.source)

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one item in a line."""
        return f"state: {type(self).__qualname__}"

    def _share_records(self) -> None:
        """Tell all ranks which samples each has used. Collective if the state has samplers; this one has none."""
        return

    def _train_as_latest(self) -> None:
        """Train the parameters that the rank with the latest state trains. Collective, before gradients are planned."""
        return

    def _look_for_newcomers(self) -> None:
        progress = self._progress
        if progress.run is not None and progress.run.has_newcomers():
            progress.version += 1
            raise HostsUpdatedInterrupt("other processes want to join: the function is called again with them")


def progress_of(state: State) -> Progress:
    """Return how far a state is. Attributes of a state are the program's, so it has no property for this."""
    return state._progress


def train_as_latest(state: State) -> None:
    """Have a state train the parameters that the rank with the latest state trains. Collective."""
    state._train_as_latest()


class ObjectState(State):
    """A state of values, which are attributes of it.

    Objects with ``state_dict()`` and ``load_state_dict()`` (modules, optimizers, learning rate schedulers,
    ``GradScaler``, ``ElasticSampler``) are values, too. All others are plain values, of the types that
    ``hvd.broadcast_object`` sends, and the program may set them.
    """

    if TYPE_CHECKING:  # the program's values are attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        """Keep a copy of the values.

        Args:
            bcast_object: Horovod's; no effect.
            get_rank: Horovod's; no effect.
            values: The values by name.

        Raises:
            ConfigurationError: A name is taken, or a value is of a type that cannot be sent.
        """
        super().__init__(bcast_object, get_rank)
        taken = sorted(name for name in values if name.startswith("_") or hasattr(type(self), name))
        if taken:
            raise ConfigurationError(f"an elastic state cannot hold a value of the name {taken[0]!r}: choose another")
        self._names: tuple[str, ...] = ()
        self._saved: dict[str, Any] = {}
        self._saved_trained: dict[str, Any] = {}
        self._places: dict[str, tuple[torch.nn.Module, Places]] = {}  #: Of the parameters of each module.
        for name, value in values.items():
            setattr(self, name, value)
        self._names = tuple(values)
        encode({name: _captured(getattr(self, name)) for name in self._names})  # refuses what cannot be sent
        self._keep()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A copy of an object that takes the place of another one is kept at once."""
        super().__setattr__(name, value)
        if not name.startswith("_") and name in self._names and isinstance(value, Stateful):
            self._saved[name] = _copied(_captured(value))
            self._saved_trained = _copied(self._trained().document())

    def save(self) -> None:
        """Keep a copy of all values in memory. Collective if there are samplers: all ranks learn what each has used.

        Raises:
            ConfigurationError: A plain value cannot be sent to other ranks.
            PeerLost: A rank is lost; no copy was made.
        """
        self._share_records()
        self._keep()

    def restore(self) -> None:
        """Set all values to those of the last ``save`` or ``sync``, and drop the gradients.

        If the program has put other tensors or memory (``.data = ...``) in the place of parameters, such as averages,
        the parameters come back. The tensors that were put in are not written to.
        """
        for name, (module, places) in self._places.items():
            if getattr(self, name) is module:
                places.put_back()
        self._load(_copied(self._saved), _copied(self._saved_trained))

    def sync(self) -> None:
        """Begin with the values of the rank whose state is the latest. Collective. Gradients are dropped."""
        self._share_records()
        group, source = context.group, self._progress.source
        send_state(_Sent(self), group, source, [rank for rank in range(group.world_size) if rank != source])
        self._drop_gradients()
        for sampler in self._samplers():
            sampler.reset()
        self._keep()

    def describe(self) -> str:
        """Return the names and kinds of the values, and of tensors dtype and shape."""
        return "\n".join([super().describe(), *(line for name in self._names for line in self._describe(name))])

    def _describe(self, name: str) -> list[str]:
        value = getattr(self, name)
        if isinstance(value, ElasticSampler):
            return [f"{name}: {value.describe()}"]
        if isinstance(value, DistributedOptimizer):
            return [f"{name}: {value.kind} with {value.describe()}"]
        if isinstance(value, torch.nn.Module):
            tensors = [(key, each) for key, each in value.state_dict().items() if isinstance(each, torch.Tensor)]
            return [f"{name}.{key}: {each.dtype}{list(each.shape)}" for key, each in tensors]
        return [f"{name}: {type(value).__qualname__ if isinstance(value, Stateful) else 'a value'}"]

    def _trained(self) -> Trained:
        """Return what is known of the models and of the optimizers whose parameters they have."""
        values = {name: getattr(self, name) for name in self._names}
        models = {name: each for name, each in values.items() if isinstance(each, torch.nn.Module)}
        known = {parameter for model in models.values() for parameter in model.parameters()}
        optimizers = {}
        for name, each in values.items():
            inner = each.wrapped if isinstance(each, OptimizerWrapper) else each
            if isinstance(inner, torch.optim.Optimizer) and all(
                parameter in known for group in inner.param_groups for parameter in group["params"]
            ):
                optimizers[name] = inner
        return Trained(models, optimizers)

    def _train_as_latest(self) -> None:
        trained = self._trained()
        trained.adopt(self.broadcast_latest(trained.document()))

    def _share_records(self) -> None:
        samplers, group = self._samplers(), context.formed_group
        if not samplers or group is None:
            return
        gathered = group.control.allgather_object([sampler.records() for sampler in samplers])
        for index, sampler in enumerate(samplers):
            for rank, records in enumerate(gathered):
                if rank != group.rank:
                    sampler.take(records[index])
            sampler.forget_records()

    def _samplers(self) -> list[ElasticSampler]:
        values = (getattr(self, name) for name in self._names)
        return [value for value in values if isinstance(value, ElasticSampler)]

    def _keep(self) -> None:
        values = {name: _captured(getattr(self, name)) for name in self._names}
        plain = {name: value for name, value in values.items() if not isinstance(getattr(self, name), Stateful)}
        encode(plain)  # refuses what cannot be sent, before another rank waits for it
        self._note_places()
        self._saved, self._saved_trained = _copied(values, self._saved), _copied(self._trained().document())

    def _note_places(self) -> None:
        """Note which tensors are the parameters of the modules, and where their memory is."""
        for name in self._names:
            module = getattr(self, name)
            if isinstance(module, torch.nn.Module):
                known, places = self._places.get(name, (None, None))
                if known is not module or places is None:
                    self._places[name] = module, Places(module, "parameters")
                else:
                    places.look()

    def _load(self, values: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
        """Set all values, and what is trained; the arguments are not used by anybody else."""
        self._trained().adopt(trained)
        for name, value in values.items():
            target = getattr(self, name)
            if isinstance(target, ElasticSampler):
                target.load_snapshot(value)
            elif isinstance(target, Stateful):
                load_object(target, value)
            else:
                setattr(self, name, value)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Gradients are no part of the state, so the function begins without any."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                for parameter in value.parameters():
                    parameter.grad = None


class TorchState(ObjectState):
    """The state of a training loop in PyTorch.

    ::

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    Further models, optimizers and samplers are values like others (see ``ObjectState``).
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        """Keep a copy of the model, the optimizer's state, and the values. Raises what ``ObjectState`` does."""
        super().__init__(model=model, optimizer=optimizer, **values)


@final
@dataclass(frozen=True, slots=True)
class _Sent:
    """The values of a state as they travel between ranks (``sharing.Shared``)."""

    state: ObjectState

    def shared(self) -> dict[str, Any]:
        values = {name: _captured(getattr(self.state, name)) for name in self.state._names}
        return {"values": values, "trained": self.state._trained().document()}

    def load_shared(self, shared: Mapping[str, Any], /) -> None:
        self.state._load(shared["values"], shared["trained"])


def _captured(value: Any) -> Any:
    """Return a value as plain values and tensors, which are not copied."""
    if isinstance(value, ElasticSampler):
        return value.snapshot()
    if isinstance(value, torch.nn.Module):
        return {
            key: each.detach() if isinstance(each, torch.Tensor) else each for key, each in value.state_dict().items()
        }
    return value.state_dict() if isinstance(value, Stateful) else value


def _copied(value: Any, known: Any = None) -> Any:
    """Return a copy of a nested value. Tensors are copied into those of ``known`` where these have the same shape."""
    if isinstance(value, torch.Tensor):
        if _is_alike(value, known):
            write(known, value.detach())
            return known
        return value.detach().clone()
    if type(value) is dict:
        of_key = known if type(known) is dict else {}
        return {key: _copied(each, of_key.get(key)) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        others = known if type(known) is type(value) and len(known) == len(value) else [None] * len(value)
        return type(value)(map(_copied, value, others))
    return copy.deepcopy(value)


def _is_alike(value: torch.Tensor, known: Any) -> bool:
    return (
        isinstance(known, torch.Tensor)
        and (known.shape, known.dtype, known.device) == (value.shape, value.dtype, value.device)
        and known.layout is value.layout is torch.strided
    )
