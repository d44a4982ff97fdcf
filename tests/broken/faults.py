"""Deliberately wrong transports, schedules and selectors. The conformance suite must reject every one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Frame, Header
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp
from totalreduce.schedules import program_for
from totalreduce.schedules.actions import Action, Mode, Program, Receive, Send, compile_program
from totalreduce.schedules.select import Selector
from totalreduce.transports.base import Transport
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.simulated import SimulatedNetwork

Message = tuple[bytes, bytes]


class Fault:
    """Sees every data message with a body between two ranks; the fifth one it can use is its victim.

    Attributes:
        once: There is one victim; else all from the fifth one on are.
    """

    once = True

    def __init__(self) -> None:
        self.seen = 0
        self.fired = False

    def __call__(self, message: Message) -> list[Message]:
        header = Header.unpack(message[0])
        if (self.fired and self.once) or header.frame is not Frame.DATA or not message[1]:
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
    """What comes twice does no harm where the operation has ended meanwhile: so more than one must."""

    once = False

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
        network.queues[0, 1].messages = Tampering(fault)
        return [network.transport(rank) for rank in range(world_size)]

    return make


def tamper_simulated(fault: Fault) -> Callable[[SimulatedNetwork], None]:
    """The same for a simulated network."""

    def prepare(network: SimulatedNetwork) -> None:
        for links in network._links:
            links[0, 1].inbox = Tampering(fault)

    return prepare


# ------------------------------------------------------------------------------------------------------------- leases


class Loan:
    """A body that lies in memory of the transport. This one is right; the others are not."""

    may_be_kept = True

    def __init__(self, body: bytes, before: bytes) -> None:
        self._lent = self.lent(body, before)
        self._memory = bytearray(self._lent)
        self.body = memoryview(self._memory)
        self.taken = self.written = False
        self.released = 0

    def lent(self, body: bytes, before: bytes) -> bytes:
        return body

    def refused(self, view: memoryview, body: bytes) -> None:
        """The endpoint wants a copy."""
        view[:] = body

    def handed_over(self) -> None:
        """The endpoint has been told, and has taken the loan."""

    def release(self) -> None:
        self.released += 1
        self.written = self._memory != self._lent
        self._memory[:] = b"\xa5" * len(self._memory)  # whoever reads it now reads garbage


class LoanUsedAgain(Loan):
    """Its memory is used for the next message before it was given back."""

    def handed_over(self) -> None:
        self._memory[:] = b"\xa5" * len(self._memory)


class LoanOfAnother(Loan):
    """The memory of the message before, if that was equally long."""

    def lent(self, body: bytes, before: bytes) -> bytes:
        return before if len(before) == len(body) else body


class LoanNotCopied(Loan):
    """Who does not take the loan gets nothing."""

    def refused(self, view: memoryview, body: bytes) -> None:
        pass


class Lending:
    """``SimulatedNetwork._deliver`` of a network that lends bodies."""

    def __init__(self, kind: type[Loan]) -> None:
        self.kind = kind
        self.loans: list[Loan] = []
        self.before = b""

    def deliver(self, network: SimulatedNetwork, source: int, target: int, *, bulk: bool = False) -> None:
        link, endpoint = network._link(source, target, bulk=bulk), network._endpoints[target]
        while link.inbox and endpoint.may_receive():
            packed, body = link.inbox.popleft()
            header = Header.unpack(packed)
            # Control frames are read at once, right or not, whoever lends them.
            loan = (self.kind if header.frame is Frame.DATA else Loan)(body, self.before)
            self.before = body
            try:
                delivery = endpoint.accept(source, header, loan)
                loan.taken = delivery.lease is loan
                if not loan.taken:
                    loan.refused(delivery.view, body)
                else:
                    self.loans.append(loan)
                endpoint.delivered(delivery)
                if loan.taken:
                    loan.handed_over()
            except ProtocolError as error:
                network._end(target, source, f"protocol violation: {error}")
                return
        if not link.inbox:
            network._unread[target].discard((source, bulk))
        for peer in sorted(endpoint.ready_peers()):
            network._start(target, peer)


# --------------------------------------------------------------------------------------------------------- schedules

#: Changes one rank's actions: (actions, rank, world size, root).
Change = Callable[[list[Action], int, int, int], list[Action]]


def changed(kind: OpKind, algorithm: Algorithm, change: Change, **settings: bool) -> Callable[..., Program]:
    """``program_for`` with one schedule changed, on groups of three ranks and more."""

    def programs(
        of: OpKind, by: Algorithm, rank: int, world_size: int, root: int = 0, hosts: tuple[int, ...] = ()
    ) -> Program:
        program = program_for(of, by, rank, world_size, root, hosts)
        if (of, by) != (kind, algorithm) or world_size < 3:
            return program
        actions = change(list(program.actions), rank, world_size, root)
        # What may come at any time is found again: it depends on the other actions.
        plain = (replace(a, anytime=False) if isinstance(a, Receive) else a for a in actions)
        return compile_program(
            plain,
            program.num_chunks,
            chunking=program.chunking,
            partial_sums=program.partial_sums,
            preserves=settings.get("preserves", program.preserves),
            span_max=program.span_max,
        )

    return programs


def skips_last_step(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    return actions[:-2]


def counts_twice(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    return [
        replace(action, mode=Mode.COMBINE_LAST)
        if isinstance(action, Receive) and action.mode is Mode.REPLACE
        else action
        for action in actions
    ]


def replaces_instead_of_adding(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    return [
        replace(action, mode=Mode.REPLACE) if isinstance(action, Receive) and action.step == 0 else action
        for action in actions
    ]


def wrong_chunk(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    *others, last = actions
    return [*others, replace(last, chunk=(last.chunk + 1) % world_size)]


def nothing_at_all(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """A barrier that lets through; a collective that leaves everything as it was."""
    return []


def forgets_a_pair(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """Ranks 1 and 2 have nothing to say to each other."""
    pair = {1: 2, 2: 1}
    return [action for action in actions if rank not in pair or action.peer != pair[rank]]


def forgets_partial_sums(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """Every contribution is added to this rank's own, and what was added before is lost."""
    return [replace(action, onto_partial=False) if isinstance(action, Receive) else action for action in actions]


def combines_a_rank_twice(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """Rank 0 is sent the contribution of its left neighbour again."""
    left, step = world_size - 1, 1000
    if rank == left:
        return [*actions, Send(0, step, 0)]
    if rank == 0:
        last = actions.pop()
        assert isinstance(last, Receive)
        return [*actions, Receive(left, step, 0, Mode.COMBINE, onto_partial=True), last]
    return actions


def swaps_two_blocks(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """On rank 0 the blocks of ranks 1 and 2 change places as they come in."""
    swapped = {1: 2, 2: 1, world_size + 1: world_size + 2, world_size + 2: world_size + 1}
    return [
        replace(action, chunk=swapped.get(action.chunk, action.chunk))
        if rank == 0 and isinstance(action, Receive)
        else action
        for action in actions
    ]


def gives_another_ranks_block(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    sends = [action for action in actions if isinstance(action, Send)]
    if len(sends) < 2:
        return actions
    chunks = [action.chunk for action in sends]
    return [replace(send, chunk=chunk) for send, chunk in zip(sends, chunks[1:] + chunks[:1], strict=True)]


def loses_a_subtree(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """The children of a binomial tree that have nothing to add but themselves are not asked."""
    position = (rank - root) % world_size
    if position % 2:
        return []
    return [action for action in actions if not (isinstance(action, Receive) and not action.partial)]


def stops_before_spreading(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """Of the two trees the second is not gone down again."""
    return [action for action in actions if action.step != 3]


def keeps_the_wrong_half(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """What is given and what is kept change places in the first exchange, on all ranks alike."""
    exchanged = [action.chunk for action in actions if action.step == 2]
    if len(exchanged) != 2:
        return actions
    other = dict(zip(exchanged, exchanged[::-1], strict=True))
    return [replace(a, chunk=other[a.chunk]) if a.step == 2 else a for a in actions]


def unchanged(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    return actions


def forgets_the_root(actions: list[Action], rank: int, world_size: int, root: int) -> list[Action]:
    """A broadcast whose tail gets nothing: the last rank of the chain is forgotten."""
    position, last = (rank - root) % world_size, world_size - 1
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if position == last:
        return []
    return [action for action in actions if position != last - 1 or action.peer != right or left == right]


# ---------------------------------------------------------------------------------------------------------- selectors


def quarrelling_selectors(*choices: dict[OpKind, Algorithm]) -> Callable[..., Selector]:
    """Selectors that choose differently on every rank, as if the links had been measured by everybody for himself."""
    numbers: Iterator[int] = count()

    def make(links: object, hosts: tuple[int, ...], overrides: object, shared_memory: bool) -> Selector:
        mine = choices[next(numbers) % len(choices)]
        return Selector(links, hosts, mine, shared_memory)

    return make
