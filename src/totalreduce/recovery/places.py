"""``Places``: where the modules of a model have their parameters or buffers, and which tensors these are.

A program may put another tensor into a place, register or remove one, or give a tensor other memory (``.data = ...``).
All of that can be put back without a copy of any value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any, Literal, final

import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.groups.encoding import tensor_problem

__all__ = ["Places"]

#: What a dictionary returns for a name that it lacks: a place that is there may have ``None``.
_ABSENT: Any = object()


@final
class Places:
    """The parameters, or the buffers, of all modules of a model.

    Attributes:
        named: The tensors that ``look`` has found last, by the name of their first place.
    """

    def __init__(self, model: torch.nn.Module, kind: Literal["parameters", "buffers"]) -> None:
        """Look for the first time. Raises what ``look`` does."""
        self._kind = kind
        self._modules = [
            (f"{name}." if name else "", module, getattr(module, f"_{kind}")) for name, module in model.named_modules()
        ]
        self._by_prefix = {prefix: (module, tensors) for prefix, module, tensors in self._modules}
        self._dicts = [tensors for _, _, tensors in self._modules]
        self._note()

    def _note(self) -> None:
        named = self.live()
        for name, tensor in named:
            problem = tensor_problem(tensor)
            if problem is not None:
                what = f"the {self._kind.removesuffix('s')} {name!r} {problem}"
                raise UnsupportedError(
                    f"{what}. Recovery copies the tensors of a model: one that never changes can be a plain attribute"
                )
        self.named = named
        self._places = [(tensors, key) for tensors in self._dicts for key in tensors]
        self._held = [tensors[key] for tensors, key in self._places]
        self._tensors = [tensor for _, tensor in self.named]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._shapes = [tensor.shape for tensor in self._tensors]
        #: Tensors that share the memory, with the shape and strides of now.
        self._memories = [tensor.detach() for tensor in self._tensors]

    def live(self) -> list[tuple[str, torch.Tensor]]:
        """Return what ``named_parameters()`` or ``named_buffers()`` of the model returns, in less time."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, _, tensors in self._modules:
            for key, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (prefix + key, tensor))
        return list(found.values())

    def look(self) -> bool:
        """Note which tensors there are, with which memory; return whether these are others than at the last call.

        Raises:
            UnsupportedError: A tensor cannot be copied byte by byte, for example one that is sparse.
        """
        if self._are_same():
            return False
        self._note()
        return True

    def moved(self) -> str:
        """Return the name of a tensor that has another place, memory or shape than noted; "" if none has."""
        if self._are_same():
            return ""
        now = dict(self.live())
        for (name, tensor), address, shape in zip(self.named, self._addresses, self._shapes, strict=True):
            if now.get(name) is not tensor or tensor.data_ptr() != address or tensor.shape != shape:
                return name
        return next((name for name in now if name not in dict(self.named)), self.named[0][0] if self.named else "")

    def _are_same(self) -> bool:
        # Lists are compared at once: it is a third of the time of a loop, and this is done several times in each block.
        return (
            sum(map(len, self._dicts)) == len(self._places)
            and all(map(operator.is_, [tensors.get(key, _ABSENT) for tensors, key in self._places], self._held))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and [tensor.shape for tensor in self._tensors] == self._shapes
        )

    def put_back(self) -> None:
        """Put the noted tensors back into their places, with the noted memory. No value changes."""
        if self._are_same():
            return
        noted: dict[int, dict[str, Any]] = {}
        for (tensors, key), held in zip(self._places, self._held, strict=True):
            noted.setdefault(id(tensors), {})[key] = held
        for _, module, tensors in self._modules:
            wanted = noted.get(id(tensors), {})
            if tensors.keys() != wanted.keys() or any(tensors[key] is not wanted[key] for key in wanted):
                for key in wanted:
                    vars(module).pop(key, None)  # an attribute that the program has set in place of the tensor
                tensors.clear()
                tensors.update(wanted)
        for tensor, address, shape, memory in zip(
            self._tensors, self._addresses, self._shapes, self._memories, strict=True
        ):
            if tensor.data_ptr() != address or tensor.shape != shape:
                tensor.data = memory

    # ------------------------------------------------------------------------------------------- buffers that are set

    def entries(self) -> Iterator[tuple[str, torch.Tensor | None, bool]]:
        """Yield, of each buffer's place: its name, its tensor, and whether ``state_dict()`` of the model has it."""
        for prefix, module, tensors in self._modules:
            for key, tensor in tensors.items():
                yield prefix + key, tensor, key not in module._non_persistent_buffers_set

    def get(self, name: str) -> torch.Tensor | None:
        """Return the tensor of a place; ``None`` if there is none."""
        found = self._find(name)
        return None if found is None else found[1].get(found[2])

    def obstacle(self, name: str) -> str:
        """Say why there cannot be a buffer of a name; "" if there can."""
        found = self._find(name)
        if found is None:
            return f"this process's model has no module {name.rpartition('.')[0]!r}"
        module, _, key = found
        is_taken = key in module._parameters or key in module._modules
        return "this process's model has a parameter or a module of this name" if is_taken else ""

    def loads_plainly(self, name: str) -> bool:
        """Whether the module of a place loads each entry of its state into the buffer or parameter of that name."""
        found = self._find(name)
        if found is None or name.endswith("_extra_state"):
            return False
        module, tensors, key = found
        is_plain = type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict
        return key in tensors or (is_plain and not module._load_state_dict_pre_hooks)

    def device_of(self, name: str) -> torch.device:
        """Return the device of a place: of its tensor, or of the first one of its module, or of the model."""
        found = self._find(name)
        assert found is not None
        module, tensors, key = found
        if tensors.get(key) is not None:
            return torch.device(tensors[key].device)
        root = self._modules[0][1]
        first = next((each for part in (module, root) for each in (*part.parameters(), *part.buffers())), None)
        return torch.device("cpu") if first is None else first.device

    def set(self, name: str, tensor: torch.Tensor | None, *, is_persistent: bool | None = None) -> None:
        """Set a place of a buffer. ``is_persistent``: by default as it is, and no for a new place."""
        found = self._find(name)
        assert found is not None
        module, tensors, key = found
        if is_persistent is None:
            is_persistent = key in tensors and key not in module._non_persistent_buffers_set
        vars(module).pop(key, None)
        tensors[key] = tensor
        (module._non_persistent_buffers_set.discard if is_persistent else module._non_persistent_buffers_set.add)(key)

    def exchange(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Put a tensor into all places of another one."""
        for tensors in self._dicts:
            for key, tensor in tensors.items():
                if tensor is before:
                    tensors[key] = after

    def remove_others(self, names: Collection[str]) -> None:
        """Remove all places that have other names than these."""
        for prefix, _, tensors in self._modules:
            for key in [key for key in tensors if prefix + key not in names]:
                del tensors[key]

    def _find(self, name: str) -> tuple[torch.nn.Module, dict[str, Any], str] | None:
        """Return the module, its dictionary and the key of a name; ``None`` if there is no such module."""
        path, dot, key = name.rpartition(".")
        found = self._by_prefix.get(path + dot)
        return None if found is None else (*found, key)
