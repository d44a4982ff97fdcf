"""``Checkpoint``: the values that a program of ``tr.replayed`` saves at the end of each round."""

from __future__ import annotations

import argparse
import hashlib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, packed_bytes, unpack

__all__ = ["Checkpoint", "Saved"]

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """The values of a checkpoint as they were when it was made."""

    shared: dict[str, torch.Tensor]  #: By name the packed values that are equal on all ranks.
    own: torch.Tensor | None  #: The packed values of this rank; ``None`` if ranks have none.

    def describe(self) -> dict[str, str]:
        """Return by name a hash of each value that is equal on all ranks."""
        return {
            f"value {name}": hashlib.blake2b(packed.numpy().data, digest_size=_DIGEST_BYTES).hexdigest()
            for name, packed in self.shared.items()
        }


@final
class Checkpoint:
    """The values of a program that outlive its processes, for ``tr.replayed``.

    The values are attributes, and the program may set them. They are of the types that the object collectives send
    (docs/collectives.md): tensors, NumPy arrays, numbers, texts, and lists, tuples and dictionaries of these::

        state = tr.Checkpoint(centres=centres, inertia=[], local={"assigned": assigned})
        state.inertia.append(0.5)
        state.centres = new_centres

    Values are equal on all ranks when the program calls ``job.checkpoint()``, but for those in ``local``. A set has no
    order that is equal in all processes: keep a sorted list. Tensors and arrays are contiguous: a new process gets them
    so, and for other strides some functions of torch and NumPy add in another order. A new process gets a tensor on the
    device of the tensor that it has built in the same place. All values that are equal on all
    ranks take 1 GiB at most, and so do the local ones.
    """

    if TYPE_CHECKING:  # the program's values are attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *, local: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Collect the values. Nothing is copied.

        Args:
            local: Values that each rank has for itself.
            values: Values that are equal on all ranks.

        Raises:
            ConfigurationError: A name is taken, there is no value, or a value cannot be saved.
        """
        own = dict(local or {})
        for name in (*values, *own):
            if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
                raise ConfigurationError(f"tr.Checkpoint cannot hold a value of the name {name!r}: choose another one")
        twice = sorted(values.keys() & own.keys())
        if twice:
            raise ConfigurationError(f"tr.Checkpoint has two values of the name {twice[0]!r}: one of them in local")
        if not values and not own:
            raise ConfigurationError("tr.Checkpoint needs a value: name what your rounds change")
        object.__setattr__(self, "_shared", tuple(values))
        object.__setattr__(self, "_own", tuple(own))
        for name, value in {**values, **own}.items():
            setattr(self, name, value)
        self.save()  # refuses what cannot be saved, before the job begins

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value. Raises ``ConfigurationError``."""
        if name not in self._shared and name not in self._own:
            raise ConfigurationError(
                f"this tr.Checkpoint has no value {name!r}, so it would not be saved. Give it to tr.Checkpoint(...); "
                f"its values are {', '.join((*self._shared, *self._own))}"
            )
        object.__setattr__(self, name, value)

    @property
    def has_local(self) -> bool:
        """Whether ranks have values for themselves."""
        return bool(self._own)

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one part in a line."""
        lines = [f"value {name}: {type(getattr(self, name)).__qualname__}" for name in self._shared]
        return "\n".join([*lines, *(f"local value {name}" for name in self._own)])

    def save(self) -> Saved:
        """Return a copy of the values.

        Raises:
            ConfigurationError: A value is of a type that cannot be saved, or has a tensor that is not contiguous. Or
                the values are larger than 1 GiB together.
        """
        shared = {name: self._pack(name, getattr(self, name)) for name in self._shared}
        total = packed_bytes(shared)
        if total > PACKED_BYTES_MAX:  # a new process gets them in one message
            raise ConfigurationError(
                f"tr.Checkpoint cannot save its values: together they take {total} bytes, and the limit is "
                f"{PACKED_BYTES_MAX}. Values that a process can compute again need not be saved"
            )
        own = self._pack("local", {name: getattr(self, name) for name in self._own}) if self._own else None
        return Saved(shared, own)

    def load(self, saved: Saved) -> None:
        """Set the values to those that ``save`` has returned, in this or in another process."""
        found = {name: unpack(saved.shared[name]) for name in self._shared}
        if saved.own is not None:
            found |= unpack(saved.own)
        for name, value in found.items():
            setattr(self, name, _on_devices_of(getattr(self, name, None), value))

    @staticmethod
    def _pack(name: str, value: Any) -> torch.Tensor:
        try:
            packed = pack(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"tr.Checkpoint cannot save {name!r}: {error}") from error
        strides = _strides_in(value)
        if strides is not None:
            raise ConfigurationError(
                f"tr.Checkpoint cannot save {name!r}: it has a tensor or array with the strides {strides}, and a new "
                "process would get it without them, so that its results could have other bits. Make it contiguous: "
                "tensor.contiguous(), numpy.ascontiguousarray(array)"
            )
        return packed


def _on_devices_of(present: Any, value: Any) -> Any:
    """Return a nested value with its tensors on the devices of those that a present value has in their places."""
    if isinstance(value, torch.Tensor):
        return value.to(present.device) if isinstance(present, torch.Tensor) else value
    if type(value) is dict and isinstance(present, Mapping):
        return {key: _on_devices_of(present.get(key), each) for key, each in value.items()}
    if type(value) in (list, tuple) and isinstance(present, list | tuple) and present:
        # A list grows in training: what it has more is where its last tensor is.
        return type(value)(
            _on_devices_of(present[min(index, len(present) - 1)], each) for index, each in enumerate(value)
        )
    return value


def _strides_in(value: Any) -> tuple[int, ...] | None:
    """Return the strides of a tensor or array in a nested value that is not contiguous; ``None``: all are."""
    if isinstance(value, torch.Tensor):
        return None if value.is_contiguous() else tuple(value.stride())
    if isinstance(value, np.ndarray):
        return None if value.flags.c_contiguous else value.strides
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = list(vars(value).values())
    if isinstance(value, list | tuple):
        return next((found for found in map(_strides_in, value) if found is not None), None)
    return None
