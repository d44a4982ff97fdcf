"""Deliberately wrong transports and schedules. The conformance suite must reject every one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.types import DType, OpKind, ReduceOp
from totalreduce.schedules import program_for, star_program_for
from totalreduce.schedules.actions import Mode, Program, Receive, Schedule, Send, compile_program
from totalreduce.transports.base import Transport
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.simulated import SimulatedNetwork

Message = tuple[bytes, bytes]


class Fault:
    """Sees every data message with a body between two ranks; the fifth one it can use is its victim."""

    def __init__(self) -> None:
        self.seen = 0
        self.fired = False

    def __call__(self, message: Message) -> list[Message]:
        header = Header.unpack(message[0])
        if self.fired or header.frame is not Frame.DATA or not message[1]:
            return [message]
        self.seen += 1
        return self.tamper(header, message) if self.seen >= 5 else [message]

    def tamper(self, header: Header, message: Message) -> list[Message]:
        raise NotImplementedError


class Honest(Fault):
    def tamper(self, header: Header, message: Message) -> list[Message]:
        self.fired = True
        return [message]


class Drops(Fault):
    def tamper(self, header: Header, message: Message) -> list[Message]:
        self.fired = True
        return []


class Duplicates(Fault):
    def tamper(self, header: Header, message: Message) -> list[Message]:
        self.fired = True
        return [message, message]


class CorruptsOneByte(Fault):
    """Of a sum: a minimum may well survive it."""

    def tamper(self, header: Header, message: Message) -> list[Message]:
        if header.signature[1] == DType.BOOL or header.signature[2] != ReduceOp.SUM:
            return [message]
        self.fired = True
        body = bytearray(message[1])
        body[-1] ^= 1
        return [(message[0], bytes(body))]


class DeliversToWrongLane(Fault):
    def tamper(self, header: Header, message: Message) -> list[Message]:
        if header.lane == 0:
            return [message]
        self.fired = True
        header.lane -= 1
        return [(header.pack(), message[1])]


class SwapsTwoBodies(Fault):
    """Of two messages of equal length and type that follow each other, each gets the other's body."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: tuple[Header, Message] | None = None

    def tamper(self, header: Header, message: Message) -> list[Message]:
        if self.waiting is None:
            self.waiting = (header, message)
            return []
        first_header, first = self.waiting
        self.waiting = None
        alike = len(first[1]) == len(message[1]) and first_header.signature == header.signature
        if not alike or first[1] == message[1]:
            return [first, message]
        self.fired = True
        return [(first[0], message[1]), (message[0], first[1])]


class Tampering(deque[Message]):
    """What a link holds, with a fault at its entrance."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def append(self, message: Message) -> None:
        for each in self.fault(message):
            super().append(each)


def tampered_inproc(fault: Fault) -> Callable[[int], Sequence[Transport]]:
    """In-process transports whose link from rank 0 to rank 1 has a fault."""

    def make(world_size: int) -> Sequence[Transport]:
        network = InprocNetwork(world_size)
        network.links[0, 1].messages = Tampering(fault)
        return [network.transport(rank) for rank in range(world_size)]

    return make


def tamper_simulated(fault: Fault) -> Callable[[SimulatedNetwork], None]:
    """The same for a simulated network."""

    def prepare(network: SimulatedNetwork) -> None:
        network._links[0, 1].inbox = Tampering(fault)

    return prepare


# --------------------------------------------------------------------------------------------------------- schedules


def skips_last_step(rank: int, world_size: int) -> Schedule:
    yield from list(_ring(rank, world_size))[:-2]


def counts_twice(rank: int, world_size: int) -> Schedule:
    for action in _ring(rank, world_size):
        if isinstance(action, Receive) and action.mode is Mode.REPLACE:
            yield Receive(action.peer, action.step, action.chunk, Mode.COMBINE_LAST)
        else:
            yield action


def replaces_instead_of_adding(rank: int, world_size: int) -> Schedule:
    for action in _ring(rank, world_size):
        if isinstance(action, Receive) and action.step == 0:
            yield Receive(action.peer, action.step, action.chunk, Mode.REPLACE)
        else:
            yield action


def wrong_chunk(rank: int, world_size: int) -> Schedule:
    for action in _ring(rank, world_size):
        if isinstance(action, Receive) and action.step == 2 * (world_size - 1) - 1:
            yield Receive(action.peer, action.step, (action.chunk + 1) % world_size)
        else:
            yield action


def barrier_that_lets_through(rank: int, world_size: int) -> Schedule:
    yield from ()


def broadcast_without_tail(rank: int, world_size: int, root: int) -> Schedule:
    """The last rank of the chain is forgotten."""
    position, last = (rank - root) % world_size, world_size - 2
    if 0 < position <= last:
        yield Receive((rank - 1) % world_size, position - 1, 0)
    if position < last:
        yield Send((rank + 1) % world_size, position, 0)


def star_that_forgets_one(rank: int, world_size: int, root: int) -> Program:
    """The root replaces its partial sum where it should go on adding to it."""
    actions = star_program_for(rank, world_size, root).actions
    forgetful = (replace(a, onto_partial=False) if isinstance(a, Receive) else a for a in actions)
    return compile_program(forgetful, 1, partial_sums=True)


def _ring(rank: int, world_size: int) -> Schedule:
    yield from program_for(OpKind.ALLREDUCE, rank, world_size, 0).actions


def with_allreduce(schedule: Callable[[int, int], Schedule]) -> Callable[..., Program]:
    """``program_for`` with another allreduce."""

    def programs(kind: OpKind, rank: int, world_size: int, root: int) -> Program:
        if kind is OpKind.ALLREDUCE and world_size > 1:
            return compile_program(schedule(rank, world_size), world_size)
        return program_for(kind, rank, world_size, root)

    return programs


def with_barrier(schedule: Callable[[int, int], Schedule]) -> Callable[..., Program]:
    """``program_for`` with another barrier."""

    def programs(kind: OpKind, rank: int, world_size: int, root: int) -> Program:
        if kind is OpKind.BARRIER:
            return compile_program(schedule(rank, world_size), 1)
        return program_for(kind, rank, world_size, root)

    return programs


def with_broadcast(schedule: Callable[[int, int, int], Schedule]) -> Callable[..., Program]:
    """``program_for`` with another broadcast."""

    def programs(kind: OpKind, rank: int, world_size: int, root: int) -> Program:
        if kind is OpKind.BROADCAST:
            return compile_program(schedule(rank, world_size, root), 1)
        return program_for(kind, rank, world_size, root)

    return programs
