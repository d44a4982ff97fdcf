"""Which schedule carries out an operation, and where the bytes of its messages are.

This is decided once for each signature and kept with each name. So the first operation of a new name costs little more
than an operation of a known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from totalreduce.engine.early import BoundedTable
from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.names import NameRecord, NameTable
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.partition import PIECE_BYTES_MIN, exchange_window
from totalreduce.foundation.types import PAIRWISE, Algorithm, DType, OpKind, Signature, root_number
from totalreduce.schedules import program_for, spec_of
from totalreduce.schedules.actions import Program, translate
from totalreduce.schedules.select import LinkModel, Selector
from totalreduce.schedules.spec import ScheduleSpec

__all__ = ["Planner"]

#: The signature, the ranks, the bytes of every buffer and the root of the schedule.
_LayoutKey = tuple[Signature, tuple[int, ...], tuple[int, ...], int]
#: Layouts that are kept for new names. A name that is in use keeps its own one.
_LAYOUTS_MAX = 512
#: How much longer segments and the shortest lanes are on links of at least this bandwidth: segments of 1 MiB from 0.5
#: Gbit/s, of 2 MiB from 2 Gbit/s, so that one holds the wire for 17 ms at most (512 KiB: 8 ms), in which only other
#: large operations wait. Measured, processor time per rank: 64 MiB on 8 hosts at 1 Gbit/s, 512 KiB: 148 ms, 1 MiB: 123;
#: on 4 hosts at 5 Gbit/s, 1 MiB: 106 ms, 2 MiB: 100. With 2 MiB at 1 Gbit/s, or with lanes of at least 512 KiB, the
#: replayed step of the gpt trace takes 336 ms instead of 305, because what is urgent there is large, too.
_LONGER = ((250e6, 4), (62.5e6, 2))
#: On the same links, how much longer the segments of very large chunks are (2 MiB). At 1 Gbit/s one holds the wire as
#: long as two others would, which only an operation that is as large does (64 MiB on 8 hosts). Measured with that:
#: processor time per rank 117 ms with segments of 1 MiB, 99 ms with 2 MiB.
_LONGEST = 4
#: How many segments of a block may be under way between two ranks.
_SEGMENTS_AHEAD = 3


class Planner:
    """Makes the layouts of operations.

    Attributes:
        selector: Chooses the schedule of operations that do not name one. The ranks may agree on other link speeds than
            its default ones (``use_links``).
    """

    __slots__ = ("_config", "_everybody", "_given_config", "_layouts", "_names", "_rank", "selector")

    def __init__(
        self, rank: int, hosts: Sequence[int], names: NameTable, config: EngineConfig, *, shared_memory: bool
    ) -> None:
        """Begin with the default link speeds.

        ``hosts``: for each rank, a number that is equal for ranks of one host. ``shared_memory``: whether ranks of one
        host send through shared memory. Both are equal on all ranks.
        """
        self._rank, self._names = rank, names
        self._config = self._given_config = config
        self._everybody = tuple(range(len(hosts)))
        self._layouts: BoundedTable[_LayoutKey, OperationLayout] = BoundedTable(_LAYOUTS_MAX)
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
            layout = record.layout = self._layout(signature, record.text, ranks, sizes)
        return layout

    def use_links(self, links: LinkModel) -> None:
        """Choose schedules, and the length of segments, by these link speeds from now on.

        All ranks call this with equal numbers, while no operation is in flight. Ranks that share memory keep the given
        length, for which the memory was cut.
        """
        old, config = self.selector, self._given_config
        self.selector = Selector(links, old.hosts, old.overrides, old.shared_memory)
        factor = next((factor for bytes_per_s, factor in _LONGER if links.bytes_per_s >= bytes_per_s), 1)
        if factor > 1 and len(set(old.hosts)) == len(old.hosts):
            config = replace(
                config,
                segment_bytes=factor * config.segment_bytes,
                segment_bytes_min=factor * config.segment_bytes_min,
            )
        self._config = config
        self._layouts = BoundedTable(_LAYOUTS_MAX)
        for record in self._names:
            record.layout = None

    def _layout(self, signature: Signature, name: str, ranks: tuple[int, ...], sizes: Sequence[int]) -> OperationLayout:
        """Return the layout that operations of other names have, or make it."""
        spec = self._spec(signature, ranks)
        root = root_number(name) % len(ranks) if spec.spreads_roots else signature.root
        key = (signature, ranks, tuple(sizes), root)
        layout = self._layouts.get(key)
        if layout is None:
            program = self._program(spec, signature.kind, root, ranks)
            config, given = self._config, self._given_config
            # A rank sends to one after the other, so that short messages overlap better. Measured with 64 MiB of
            # bfloat16 on 8 hosts at 1 Gbit/s, medians: 256 KiB 1,083 and 1,099 ms, 1 MiB 1,165 and 1,448.
            if spec.name == Algorithm.DIRECT and signature.kind not in PAIRWISE:
                config = given
            longest_bytes = _LONGEST * given.segment_bytes if config is not given else 0
            layout = self._layouts[key] = OperationLayout(
                signature,
                program,
                ranks,
                sizes,
                config,
                longest_bytes=longest_bytes,
                piece_bytes=self._piece_bytes(signature, ranks),
            )
        return layout

    def _piece_bytes(self, signature: Signature, ranks: tuple[int, ...]) -> int:
        """Return the length of the segments of large blocks; 0: that of others.

        Between ranks that share no memory, the relay carries an exchange of blocks out. It limits what is under way
        (``exchange_window``) to several segments of each block.
        """
        selector = self.selector
        if signature.kind is not OpKind.ALLTOALL or len(set(selector.hosts_of(ranks))) < len(ranks) or len(ranks) < 2:
            return 0
        window = exchange_window(selector.links.bytes_per_s, len(ranks) - 1)
        return max(PIECE_BYTES_MIN, window // _SEGMENTS_AHEAD)

    def _spec(self, signature: Signature, ranks: tuple[int, ...]) -> ScheduleSpec:
        """Choose the schedule. The choice depends only on values that are equal on all ranks."""
        algorithm = signature.algorithm
        if algorithm == Algorithm.AUTO:
            num_bytes = signature.num_elements * signature.dtype.itemsize
            algorithm = self.selector.choose(signature.kind, num_bytes, ranks, self._widening(signature, ranks))
        return spec_of(signature.kind, algorithm)

    def _widening(self, signature: Signature, ranks: tuple[int, ...]) -> int:
        """Return how many bytes an unfinished sum that travels has for each byte of an element."""
        is_wide = signature.dtype.is_half and self._config.half_accumulation == "float32" and len(ranks) > 2
        if not is_wide or signature.kind not in (OpKind.ALLREDUCE, OpKind.REDUCE_SCATTER):
            return 1
        return DType.FLOAT32.itemsize // signature.dtype.itemsize

    def _program(self, spec: ScheduleSpec, kind: OpKind, root: int, ranks: tuple[int, ...]) -> Program:
        """Compile the schedule for this rank."""
        hosts = self.selector.hosts_of(ranks) if spec.by_hosts else ()
        program = program_for(kind, spec.name, ranks.index(self._rank), len(ranks), root, hosts)
        return program if ranks == self._everybody else translate(program, ranks)
