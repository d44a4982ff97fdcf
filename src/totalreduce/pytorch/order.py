"""The order in which the forward pass uses the parameters, as hooks that run before modules see it.

The order gives buckets their priority. With ``overlap="iterations"`` it also says for which buckets a module waits: for
those of its own parameters, and for those of descendants that are not called as modules but read by it, as
``nn.MultiheadAttention`` reads ``out_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from totalreduce.pytorch.hooks import HookHandles, WeakHook

__all__ = ["ForwardOrder"]


class ForwardOrder:
    """The modules that ran, in the order of first calls; ``parameters`` has the index of each planned parameter."""

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
        #: The modules that own planned parameters, and all modules above them.
        self.relevant: tuple[torch.nn.Module, ...] = tuple(relevant.values())
        self._hooks = HookHandles()

    def watch(self) -> None:
        """Record the modules that run from now on, until ``unwatch``."""
        self._hooks.before_forward(self.relevant, WeakHook(self.record))

    def unwatch(self) -> None:
        """Remove the hooks of ``watch``."""
        self._hooks.remove()

    @property
    def seen(self) -> bool:
        """Whether a module has run."""
        return bool(self._first_call)

    def record(self, module: torch.nn.Module, *_: object) -> None:
        """Note that the module is about to run."""
        self._first_call.setdefault(id(module), len(self._first_call))

    def readers(self, index: int) -> list[torch.nn.Module]:
        """Return the modules that read a parameter: of each owner and the modules above it the nearest that ran.

        The list is empty where no module around the parameter has run.
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
        """Return the priority of each bucket: its rank in the order of first use, from 0.

        Buckets whose parameters no module read come last, the later registered ones later.
        """
        unread = len(self._first_call)
        first_use = []
        for position, bucket in enumerate(members):
            calls = [self._first_call[id(reader)] for index in bucket for reader in self.readers(index)]
            first_use.append((min(calls, default=unread), -position))
        ranking = sorted(range(len(members)), key=first_use.__getitem__)
        return {bucket: priority for priority, bucket in enumerate(ranking)}

    def reads(self) -> dict[int, set[int]]:
        """Return the indices of the parameters that each module may read, by ``id(module)``.

        A parameter that no module is known to read may be read by every module.
        """
        reads: dict[int, set[int]] = {id(module): set() for module in self.relevant}
        for index in self._owners:
            for module in self.readers(index) or self.relevant:
                reads[id(module)].add(index)
        return reads

    def waits(self, members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Return the indices of the buckets that each module needs before it runs, by ``id(module)``.

        Every module waits for a bucket that has a parameter which no module is known to read.
        """
        return {
            module: [bucket for bucket, parameters in enumerate(members) if not indices.isdisjoint(parameters)]
            for module, indices in self.reads().items()
        }


def _ancestry(path: str) -> list[str]:
    """Return the paths of a module and of those above it: ``a.b.c`` → ``["a.b.c", "a.b", "a", ""]``."""
    paths = [path]
    while path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths
