"""How the layers of a trace become messages: as DistributedOptimizer does it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from totalreduce.pytorch.buckets import ParameterSpec, plan_buckets

ELEMENT_BYTES = 4


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
        ParameterSpec(str(index), (), (count,), (1,), "float32", count, ELEMENT_BYTES)
        for index, count in enumerate(elements)
    ]
    return lay_out([list(bucket.members) for bucket in plan_buckets(parameters, bucket_bytes)], elements)


def lay_out(groups: Iterable[list[int]], elements: Sequence[int]) -> list[Message]:
    """Return the messages of groups of layers, one after the other in the flat gradient."""
    messages: list[Message] = []
    begin = 0
    for group in groups:
        end = begin + sum(elements[index] for index in group)
        messages.append(Message(tuple(sorted(group)), begin, end))
        begin = end
    return messages
