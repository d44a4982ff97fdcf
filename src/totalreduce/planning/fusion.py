"""How the layers of a trace become messages: as DistributedOptimizer does it, and as DDP does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from totalreduce.pytorch.buckets import ParameterSpec, plan_buckets

DDP_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
DDP_BUCKET_BYTES = 25 << 20  # bucket_cap_mb of DistributedDataParallel
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Message:
    """Layers that travel together, as one slice of the flat gradient."""

    layers: tuple[int, ...]  #: Their indices in forward order, ascending.
    begin: int  #: First element of the slice.
    end: int  #: One past the last element.

    @property
    def priority(self) -> int:
        """The smallest forward index: the layer that is needed first decides for all."""
        return self.layers[0]


def optimizer_messages(elements: Sequence[int], bucket_bytes: int) -> list[Message]:
    """As ``DistributedOptimizer`` plans: by the very same function, each layer taken for a parameter."""
    parameters = [
        ParameterSpec(str(index), (), (count,), (1,), "float32", count, _ELEMENT_BYTES)
        for index, count in enumerate(elements)
    ]
    return _lay_out([list(bucket.members) for bucket in plan_buckets(parameters, bucket_bytes)], elements)


def ddp_messages(elements: Sequence[int]) -> list[Message]:
    """As DDP rebuilds its buckets: in the order of readiness, each closed once it has *reached* its limit."""
    groups: list[list[int]] = [[]]
    used, limit = 0, DDP_FIRST_BUCKET_BYTES
    for index in reversed(range(len(elements))):
        groups[-1].append(index)
        used += elements[index] * _ELEMENT_BYTES
        if used >= limit:
            groups.append([])
            used, limit = 0, DDP_BUCKET_BYTES
    return _lay_out([group for group in groups if group], elements)


def _lay_out(groups: Iterable[list[int]], elements: Sequence[int]) -> list[Message]:
    messages: list[Message] = []
    begin = 0
    for group in groups:
        end = begin + sum(elements[index] for index in group)
        messages.append(Message(tuple(sorted(group)), begin, end))
        begin = end
    return messages
