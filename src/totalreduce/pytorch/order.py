"""In which order the forward pass uses the parameters, as seen by hooks that run before modules.

The order gives buckets their priority. With ``overlap="iterations"`` it also says which module has to wait
for which
buckets: its own parameters, and those of descendants that are not called as modules but read by it, as
``nn.MultiheadAttention`` reads ``out_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

__all__ = ["ForwardOrder"]


class ForwardOrder:
    """Which modules ran, in the order of their first call.

    Args:
        model: The root.
        parameters: Parameter to index in the plan; other parameters are ignored.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[torch.nn.Parameter, int]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._owners: dict[int, list[str]] = {index: [] for index in parameters.values()}
        for path, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter in parameters:
                    self._owners[parameters[parameter]].append(path)
        self._first_call: dict[int, int] = {}
        relevant: dict[int, torch.nn.Module] = {}
        for owners in self._owners.values():
            for owner in owners:
                for path in _ancestry(owner):
                    relevant[id(self._modules[path])] = self._modules[path]
        #: The modules that own planned parameters, and everything above them.
        self.relevant: tuple[torch.nn.Module, ...] = tuple(relevant.values())

    @property
    def seen(self) -> bool:
        """Whether any module ran yet."""
        return bool(self._first_call)

    def record(self, module: torch.nn.Module) -> None:
        """The module is about to run."""
        self._first_call.setdefault(id(module), len(self._first_call))

    def readers(self, index: int) -> list[torch.nn.Module]:
        """Which modules read a parameter: for each owner itself, or the nearest module above it that ran.

        Empty where nothing around the parameter ran so far.
        """
        found: dict[int, torch.nn.Module] = {}
        for owner in self._owners[index]:
            for path in _ancestry(owner):
                module = self._modules[path]
                if id(module) in self._first_call:
                    found[id(module)] = module
                    break
        return list(found.values())

    def bucket_priorities(self, members: Sequence[Sequence[int]]) -> dict[int, int]:
        """Priority of each bucket, given its parameters: its place in the order of first use, 0 first.

        Parameters that nothing read come last, later registered ones later.
        """
        unread = len(self._first_call)
        first_use = []
        for position, bucket in enumerate(members):
            calls = [self._first_call[id(reader)] for index in bucket for reader in self.readers(index)]
            first_use.append((min(calls, default=unread), -position))
        ranking = sorted(range(len(members)), key=first_use.__getitem__)
        return {bucket: priority for priority, bucket in enumerate(ranking)}

    def waits(self, members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Which buckets a module needs before it runs: ``id(module)`` to indices of buckets.

        Where nothing is known to read a parameter, every module waits for its bucket.

        Args:
            members: The parameters of each bucket.
        """
        waits: dict[int, list[int]] = {id(module): [] for module in self.relevant}
        for bucket, parameters in enumerate(members):
            readers = [self.readers(index) for index in parameters]
            reading = {id(module) for modules in readers for module in modules}
            for module, buckets in waits.items():
                if module in reading or not all(readers):
                    buckets.append(bucket)
        return waits


def _ancestry(path: str) -> list[str]:
    """``a.b.c`` → ``["a.b.c", "a.b", "a", ""]``."""
    paths = [path]
    while path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths
