"""Several engines in one thread, messages carried by hand. What the engine's tests share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.computations import Computation
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.runner.endpoint import carry_out

#: Small tensors travel in many segments; by ring and chain, so that a test knows who sends what to whom.
SMALL = EngineConfig(
    segment_bytes=64,
    segment_bytes_min=16,
    lanes_min=2,
    eager_bytes=1024,
    stall_warning_s=5.0,
    schedules={OpKind.ALLREDUCE: Algorithm.RING, OpKind.BROADCAST: Algorithm.CHAIN},
)

Message = tuple[Header, bytes]


def allreduce(
    *shape: int,
    dtype: DType = DType.FLOAT64,
    reduction: ReduceOp = ReduceOp.SUM,
    algorithm: Algorithm = Algorithm.AUTO,
) -> Signature:
    return Signature(OpKind.ALLREDUCE, dtype, reduction, 0, shape, algorithm=algorithm)


def broadcast(*shape: int, root: int, dtype: DType = DType.FLOAT64) -> Signature:
    return Signature(OpKind.BROADCAST, dtype, ReduceOp.NONE, root, shape)


MESSAGE = Signature(OpKind.SEND_RECV, DType.FLOAT64, ReduceOp.NONE, 0, ())
BARRIER = Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,))


class Cluster:
    """``world_size`` engines; nothing moves unless told to."""

    def __init__(self, world_size: int, config: EngineConfig = SMALL, **changes: object) -> None:
        config = replace(config, **changes) if changes else config
        self.config, self.world_size, self.now = config, world_size, 0.0
        self.engines = [Engine(rank, world_size, config) for rank in range(world_size)]
        self.completed: list[list[Operation | AnyReceive]] = [[] for _ in range(world_size)]

    def submit(
        self,
        rank: int,
        name: str | None,
        values: object = (1.0,),
        signature: Signature | None = None,
        priority: int = 0,
    ) -> Operation:
        """Submit ``values`` (float64 unless the signature says otherwise); the result is read by ``values_of``."""
        array = np.asarray(values, np.float64)
        signature = signature or allreduce(*array.shape)
        data = bytearray(array.tobytes())[: signature.num_elements * signature.dtype.itemsize]
        data.extend(bytes(signature.num_elements * signature.dtype.itemsize - len(data)))
        submission = Submission(name, signature, [memoryview(data)], priority=priority)
        operation = self.engines[rank].submit(submission, self.now)
        self.collect(rank)
        return operation

    def send(self, source: int, target: int, values: object, *, tag: int = 0, priority: int = 0) -> Operation:
        """Send float64 ``values``."""
        buffers = [memoryview(bytearray(np.asarray(values, np.float64).tobytes()))]
        return self._message(source, source, target, buffers, tag, priority)

    def receive(self, source: int, target: int, count: int, *, tag: int = 0) -> Operation:
        """Receive ``count`` float64 values, filled with -1 before."""
        return self._message(target, source, target, [_blank(count)], tag, 0)

    def receive_any(self, target: int, count: int, *, tag: int = 0) -> AnyReceive:
        """The same from whoever sends first; what it becomes is in ``completed`` and has it as its owner."""
        candidates = {rank: _message_name(rank, target, tag) for rank in range(self.world_size) if rank != target}
        receive = AnyReceive(candidates, MESSAGE, _blank(count), "", 0, owner=None)
        receive.owner = receive
        self.engines[target].receive_any(receive, self.now)
        self.collect(target)
        return receive

    def _message(
        self, here: int, source: int, target: int, buffers: list[memoryview], tag: int, priority: int
    ) -> Operation:
        name = _message_name(source, target, tag)
        submission = Submission(name, MESSAGE, buffers, ranks=(source, target), repeats=True, priority=priority)
        operation = self.engines[here].submit(submission, self.now)
        self.collect(here)
        return operation

    def blocks(self, rank: int, name: str | None, signature: Signature, counts: Sequence[int | None]) -> Operation:
        """Submit blocks of so many float64 values, filled with -1; ``None`` where this rank has none."""
        buffers = [None if count is None else _blank(count) for count in counts]
        operation = self.engines[rank].submit(Submission(name, signature, buffers), self.now)
        self.collect(rank)
        return operation

    def take(self, source: int, target: int) -> Message | None:
        """Let one message leave."""
        outgoing = self.begin_sending(source, target)
        return self.end_sending(source, outgoing) if outgoing is not None else None

    def begin_sending(self, source: int, target: int) -> OutgoingMessage | None:
        return self.engines[source].next_message(target, self.now)

    def end_sending(self, source: int, outgoing: OutgoingMessage) -> Message:
        body = bytes(outgoing.body) if outgoing.body is not None else b""
        self.engines[source].message_sent(outgoing, self.now)
        self.collect(source)
        return Header.unpack(outgoing.header), body

    def take_data(self, source: int, target: int) -> Message | None:
        """Let messages leave until one is data; the control frames before it are delivered."""
        while (message := self.take(source, target)) is not None and message[0].frame is not Frame.DATA:
            self.give(source, target, message)
        return message

    def give(self, source: int, target: int, message: Message) -> None:
        """Let one message arrive."""
        self.end_receiving(target, self.begin_receiving(source, target, message[0]), message[1])

    def begin_receiving(self, source: int, target: int, header: Header) -> Delivery:
        return self.engines[target].accept(source, header, self.now)

    def end_receiving(self, target: int, delivery: Delivery, body: bytes) -> None:
        delivery.view[:] = body
        self.engines[target].delivered(delivery, self.now)
        self.collect(target)

    def begin_computing(self, rank: int) -> Computation | None:
        return self.engines[rank].computations.take()

    def end_computing(self, rank: int, computation: Computation) -> None:
        carry_out(computation)
        self.engines[rank].computed(computation, 1e-6, self.now)
        self.collect(rank)

    def move(self, source: int, target: int) -> bool:
        """Carry one message, if there is one and the target has room."""
        if not self.engines[target].reception.scratch.available:
            return False
        message = self.take(source, target)
        if message is not None:
            self.give(source, target, message)
        return message is not None

    def compute(self, rank: int) -> bool:
        computation = self.begin_computing(rank)
        if computation is not None:
            self.end_computing(rank, computation)
        return computation is not None

    def run(self) -> None:
        """Carry and compute until nothing is left to do."""
        ranks = range(self.world_size)
        moving = True
        while moving:
            moving = False
            for source in ranks:
                moving |= self.compute(source)
                for target in ranks:
                    moving |= source != target and self.move(source, target)
            self.validate()

    def tick(self, now: float) -> None:
        """Set the clock, tick every engine, carry what that produced."""
        self.now = now
        for engine in self.engines:
            engine.tick(now)
        self.run()

    def validate(self) -> None:
        for engine in self.engines:
            engine.validate()

    def collect(self, rank: int) -> None:
        self.completed[rank] += self.engines[rank].table.pop_completed()


def _blank(count: int) -> memoryview:
    return memoryview(bytearray(np.full(count, -1.0).tobytes()))


def _message_name(source: int, target: int, tag: int) -> str:
    return f"{source} to {target}, tag {tag}"


def drain(cluster: Cluster, source: int, target: int) -> deque[Message]:
    """Everything that may leave now."""
    messages: deque[Message] = deque()
    while (message := cluster.take(source, target)) is not None:
        messages.append(message)
    return messages


def values_of(operation: Operation, block: int = 0) -> list[float]:
    """The result, or one of its blocks, as float64 numbers."""
    return np.frombuffer(operation.buffers[block], np.float64).tolist()
