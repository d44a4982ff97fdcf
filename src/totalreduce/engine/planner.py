"""Which schedule carries out an operation, and where the bytes of its messages are: decided once for each name."""

from __future__ import annotations

from collections.abc import Sequence

from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.names import NameRecord, NameTable
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import Algorithm, Signature
from totalreduce.schedules import program_for, spec_of
from totalreduce.schedules.actions import Program, translate
from totalreduce.schedules.select import LinkModel, Selector

__all__ = ["Planner"]


class Planner:
    """Makes the layouts of operations.

    Attributes:
        selector: Chooses the schedule of operations that do not name one. The ranks may agree on other link speeds than
            its default ones (``use_links``).
    """

    __slots__ = ("_config", "_everybody", "_names", "_rank", "selector")

    def __init__(
        self, rank: int, hosts: Sequence[int], names: NameTable, config: EngineConfig, *, shared_memory: bool
    ) -> None:
        """Begin with the default link speeds.

        ``hosts``: for each rank, a number that is equal for ranks of one host. ``shared_memory``: whether ranks of one
        host send through shared memory. Both are equal on all ranks.
        """
        self._rank, self._names, self._config = rank, names, config
        self._everybody = tuple(range(len(hosts)))
        self.selector = Selector(LinkModel(), tuple(hosts), config.schedules, shared_memory)

    def layout(
        self, record: NameRecord, signature: Signature, ranks: tuple[int, ...], buffers: Sequence[memoryview | None]
    ) -> OperationLayout:
        """Return the layout of an operation: that of the previous one of the name, if nothing has changed.

        Training reduces the same tensors in every step, so this is the usual case.
        """
        sizes = [0 if buffer is None else len(buffer) for buffer in buffers]
        layout = record.layout
        if layout is None or layout.signature != signature or layout.sizes != sizes or layout.ranks != ranks:
            program = self._program(signature, record.op_id, ranks)
            layout = record.layout = OperationLayout(signature, program, ranks, sizes, self._config)
        return layout

    def use_links(self, links: LinkModel) -> None:
        """Choose schedules by these link speeds from now on.

        All ranks call this with equal numbers, while no operation is in flight.
        """
        old = self.selector
        self.selector = Selector(links, old.hosts, old.overrides, old.shared_memory)
        for record in self._names:
            record.layout = None

    def _program(self, signature: Signature, op_id: int, ranks: tuple[int, ...]) -> Program:
        """Compile the schedule. The choice depends only on values that are equal on all ranks."""
        kind, size, root = signature.kind, len(ranks), signature.root
        algorithm = signature.algorithm
        if algorithm == Algorithm.AUTO:
            num_bytes = signature.num_elements * signature.dtype.itemsize
            algorithm = self.selector.choose(kind, num_bytes, ranks)
        spec = spec_of(kind, algorithm)
        if spec.spreads_roots:
            root = op_id % size
        hosts = self.selector.hosts_of(ranks) if spec.by_hosts else ()
        program = program_for(kind, algorithm, ranks.index(self._rank), size, root, hosts)
        return program if ranks == self._everybody else translate(program, ranks)
