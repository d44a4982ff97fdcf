"""Where the bodies of arriving messages go, and who owns the memory in which they lie.

A body is received into one of these memories. The first that is possible is taken:

* the memory that a channel has named, if the body follows a message of a channel;
* the result itself, if the message replaces bytes that nothing else needs before;
* memory of the transport, which the transport lends (``Lease``), so that nothing is copied;
* memory of its own, if the message must wait for one of another peer: scratch memory that is full of such messages
  would keep the other peer's message from being read;
* a scratch segment;
* floating memory, if the operation was not submitted here yet.

The length of a body is compared with the expected length, or with the sender's share, before memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.engine.control import CONTROL_BYTES_MAX
from totalreduce.engine.counters import Counters
from totalreduce.engine.floating import FloatingMessage, FloatingStore, floating_cost
from totalreduce.engine.layout import Region
from totalreduce.engine.operation import Arrival, Lane, Operation
from totalreduce.engine.outbox import BODY_BYTES
from totalreduce.engine.scratch import ScratchPool
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Flag, Frame, Header
from totalreduce.schedules.actions import Mode, Receive
from totalreduce.transports.base import Lease

__all__ = ["Delivery", "Reception"]


@dataclass(slots=True, eq=False)
class Delivery:
    """Where the body of an incoming message goes.

    Attributes:
        peer: The sender.
        header: The header of the message.
        view: The memory for the body. It may be replaced by another one of the same length while the body arrives.
        operation: The operation that the body belongs to; ``None`` for control frames, floating messages and messages
            that are read and forgotten.
        lane: The lane of that operation.
        index: The index of the receive in the operation's program.
        arrival: What becomes of the body in that lane.
        floating: The floating message, if the body is that of one.
        lease: The transport's memory, if ``view`` is that.
    """

    peer: int
    header: Header
    view: memoryview
    operation: Operation | None = None
    lane: Lane | None = None
    index: int = 0
    arrival: Arrival | None = None
    floating: FloatingMessage | None = None
    lease: Lease | None = None


class Reception:
    """The bodies that are arriving, and the memory for them.

    Attributes:
        floating: Messages whose operation was not submitted here yet.
        scratch: Segments for bodies that are to be added to the result.
        arriving: Deliveries whose body has not arrived completely.
    """

    __slots__ = ("_config", "_counters", "_share", "_sink_bytes_max", "arriving", "floating", "scratch")

    def __init__(self, config: EngineConfig, share: int, counters: Counters) -> None:
        """``share``: the bytes that each peer may have floating here."""
        self._counters = counters
        self._config, self._share = config, share
        self._sink_bytes_max = 4 * config.segment_bytes
        self.floating = FloatingStore(share)
        self.scratch = ScratchPool(config.scratch_segments)
        self.arriving: set[Delivery] = set()

    @property
    def num_bodies(self) -> int:
        """The number of scratch segments and floating messages that are held."""
        return self.scratch.in_use + self.floating.num_held

    def control(self, peer: int, header: Header) -> Delivery:
        """Take the body of a control frame.

        Raises:
            ProtocolError: It is too long.
        """
        if header.body_bytes > CONTROL_BYTES_MAX:
            raise ProtocolError(f"a control frame of {header.body_bytes} bytes from rank {peer}")
        return self._begin(Delivery(peer, header, memoryview(bytearray(header.body_bytes))))

    def channel_body(self, peer: int, header: Header, room: memoryview | None) -> Delivery:
        """Take a part of a body that follows a message of a channel; ``room``: its memory; ``None``: it is forgotten.

        Raises:
            ProtocolError: It is forgotten, and too long.
        """
        if room is None and header.body_bytes > BODY_BYTES:
            raise ProtocolError(f"a part of a body of {header.body_bytes} bytes from rank {peer}")
        view = memoryview(bytearray(header.body_bytes)) if room is None else room
        return self._begin(Delivery(peer, header, view))

    def sink(self, peer: int, header: Header, *, of_this_epoch: bool = True) -> Delivery:
        """Read a body and forget it: its epoch is over, or its operation has failed.

        The allowance that a message of this epoch has used is given back to its sender.

        Raises:
            ProtocolError: It is too long.
        """
        if header.body_bytes > self._sink_bytes_max:
            raise ProtocolError(
                f"a message of {header.body_bytes} bytes from rank {peer}; the limit is {self._sink_bytes_max}"
            )
        self._counters.dropped_messages += 1
        self._counters.dropped_bytes += header.body_bytes
        if of_this_epoch and header.flags & Flag.EAGER and header.frame is Frame.DATA:
            self.floating.allowance.owe(peer, floating_cost(header.body_bytes))
        return self._begin(Delivery(peer, header, memoryview(bytearray(header.body_bytes))))

    def empty(self, peer: int, header: Header) -> Delivery:
        """Take a message without body, on whose header the engine has acted."""
        return self._begin(Delivery(peer, header, memoryview(b"")))

    def float(self, peer: int, header: Header, lease: Lease | None) -> Delivery:
        """Take a message whose operation was not submitted here yet.

        Raises:
            ProtocolError: The message has no allowance or is too long, or the peer has more floating here than its
                share.
        """
        if not header.flags & Flag.EAGER:
            raise ProtocolError(
                f"rank {peer} sent {header.body_bytes} bytes of an operation that was never posted here"
            )
        if header.body_bytes > min(self._sink_bytes_max, self._share):
            raise ProtocolError(f"a floating message of {header.body_bytes} bytes from rank {peer}")
        if lease is not None and not lease.may_be_kept:
            lease = None
        message = self.floating.accept(peer, header, lease)
        self._counters.floating_messages += 1
        return self._begin(Delivery(peer, header, message.body, floating=message, lease=lease))

    def receive(self, peer: int, header: Header, operation: Operation, lease: Lease | None) -> Delivery:
        """Take a message of an active operation.

        Raises:
            ProtocolError: The schedule of the operation has no such message here.
        """
        if header.flags & Flag.EAGER:
            self.floating.allowance.owe(peer, floating_cost(header.body_bytes))
        lane, index, action, region = self.find_receive(operation, peer, header)
        is_next = lane.position == index
        if action.mode is Mode.REPLACE and (is_next or action.anytime):
            arrival = Arrival(None)
            view, lease = operation.segment(region, lane.index), None
        elif lease is not None and (is_next or lease.may_be_kept):
            view = lease.body
            arrival = Arrival(view, lease)
        elif _waits_for_another(operation, lane, index):
            view, lease = memoryview(bytearray(header.body_bytes)), None
            arrival = Arrival(view)
        else:
            segment = self.scratch.take(header.body_bytes)
            view, lease = segment.view, None
            arrival = Arrival(view, segment)
        delivery = Delivery(peer, header, view, operation, lane, index, arrival, None, lease)
        self.arriving.add(delivery)
        return delivery

    @staticmethod
    def find_receive(operation: Operation, peer: int, header: Header) -> tuple[Lane, int, Receive, Region]:
        """Return the receive that a message belongs to, and note that the message has begun to arrive.

        Raises:
            ProtocolError: The schedule of the operation has no such message, or it came before, or its length is wrong.
        """
        index = operation.layout.program.receives.get((peer, header.step))
        if index is None or header.lane >= len(operation.lanes):
            raise ProtocolError(
                f"rank {peer} sent lane {header.lane}, step {header.step} of {operation.name!r}, which its schedule "
                "does not have"
            )
        lane = operation.lanes[header.lane]
        action, region = operation.layout.program.actions[index], lane.regions[index]
        assert isinstance(action, Receive)
        if region is None or header.body_bytes != region.body_bytes:
            raise ProtocolError(
                f"rank {peer} sent {header.body_bytes} bytes for lane {header.lane}, step {header.step} of "
                f"{operation.name!r}; {'none' if region is None else region.body_bytes} are expected"
            )
        if index < lane.position or index in lane.begun:
            raise ProtocolError(f"rank {peer} sent lane {header.lane}, step {header.step} of {operation.name!r} twice")
        lane.begun.add(index)
        return lane, index, action, region

    def abandon(self, operation: Operation) -> None:
        """Release the bodies of an operation that has failed, and let none that still arrives write to its tensor."""
        for delivery in self.arriving:
            if delivery.operation is operation and delivery.arrival is not None and delivery.arrival.buffer is None:
                delivery.view = memoryview(bytearray(len(delivery.view)))
        for lane in operation.lanes:
            for arrival in lane.arrivals.values():
                if not arrival.computing:
                    arrival.release()
            lane.arrivals.clear()

    def forget_bodies(self, channel: int | None) -> None:
        """Let no body that still arrives write to memory of this channel; ``None``: of any channel."""
        for delivery in self.arriving:
            header = delivery.header
            if header.frame is Frame.CHANNEL_BODY and channel in (None, header.operation):
                delivery.view = memoryview(bytearray(len(delivery.view)))

    def forget(self, peer: int) -> None:
        """Release the memory of bodies that a peer whose connection has ended will not complete."""
        for delivery in [delivery for delivery in self.arriving if delivery.peer == peer]:
            self.arriving.discard(delivery)
            if delivery.floating is not None:
                delivery.floating.release()
            elif delivery.arrival is not None:
                delivery.arrival.release()

    def validate(self) -> None:
        """Check that the memory is within its bounds."""
        assert 0 <= self.floating.total_bytes <= self._config.floating_bytes_max
        assert self.scratch.in_use >= 0

    def drop(self, messages: list[FloatingMessage]) -> None:
        """Forget floating messages whose operation has failed. Those that are still arriving are forgotten then."""
        for message in messages:
            message.dropped = True
            if message.complete:
                self._counters.dropped_messages += 1
                self._counters.dropped_bytes += message.header.body_bytes
                message.release()

    def _begin(self, delivery: Delivery) -> Delivery:
        self.arriving.add(delivery)
        return delivery


def _waits_for_another(operation: Operation, lane: Lane, index: int) -> bool:
    """Return whether the message of another peer, which has not arrived, comes before receive ``index``."""
    actions = operation.layout.program.actions
    return any(
        isinstance(action, Receive) and action.peer != actions[index].peer and earlier not in lane.arrivals
        for earlier, action in enumerate(actions[lane.position : index], lane.position)
        if lane.regions[earlier] is not None
    )
