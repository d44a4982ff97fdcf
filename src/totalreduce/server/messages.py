"""What workers and servers send to each other: a header, and with some messages keys and values.

Keys and values may follow their header, which says their sizes. So a receiver knows them before it
takes memory, and has compared them with the largest sizes that there are. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, final

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels.arrays import Array

__all__ = [
    "HEADER",
    "LISTS_BYTES_MAX",
    "NO_DIGEST",
    "NO_RATE",
    "WINDOW",
    "Form",
    "Header",
    "Kind",
    "Lru",
    "Message",
    "Spec",
    "digest_of",
    "list_bytes",
    "mark_of",
]

_VERSION: Final = 5
#: A request and an answer have at most so many bytes of keys, and of values, unless one key has more. A server answers
#: when a request has come as a whole, but small requests cost more processor time. Measured: push_pull of 64 MiB by 4
#: workers and 4 servers in eight processes on two cores. At 250 Mbit/s: 2.57 s by 1 MiB, 2.42 s by 512 and by 256 KiB;
#: at 1 Gbit/s: 0.70 to 0.83 s by 1 MiB and by 512 KiB, 0.88 to 1.0 s by 256 KiB.
_PIECE_BYTES_MAX: Final = 512 * 1024
#: In place of a learning rate: that of the optimizer.
NO_RATE: Final = -1.0
#: The number of requests of a worker that a server may have to answer.
WINDOW: Final = 32
#: The bytes of lists of keys that a server knows, and that a client expects it to know.
LISTS_BYTES_MAX: Final = 64 * 1024 * 1024
#: A step of a worker has fewer than 2^32 pushes to shards.
_INDEX_BITS: Final = 32
#: What a list takes besides its rows, about.
_LIST_OVERHEAD: Final = 512
#: The longest text or list of workers in an answer, in bytes.
_NOTE_BYTES_MAX: Final = 1024

#: Version, kind, form, flags, table, shard, origin, number, previous, mark, clock, begin, end, bytes of values, digest,
#: rate.
HEADER = struct.Struct("<HBBBIiiqqqqqqQ16sd")
#: The flags of a header.
_CODED: Final = 1
_HELD: Final = 2


class Kind(IntEnum):
    """What a message is."""

    PUSH = 1
    PULL = 2
    PUSH_PULL = 3  #: A push and then a pull, which sees the push unless the rule is ``Sequential``.
    CLOCK = 4  #: The worker goes on to the next step.
    FINISH = 5  #: The worker sends no more requests.
    MEET = 6  #: The worker waits for all workers to come to its clock.
    ASSIGN = 7  #: Sets values, without the optimizer and without a codec.
    SAVE = 8  #: The shard is to be written to disk, as it is when all workers have come to their requests of this kind.
    WITHDRAW = 9  #: Drops what the worker has pushed to be held in this step.
    DONE = 10  #: The answer to any of these, with the values of a pull.
    #: The server does not know this list of keys. The worker sends this request and all later ones again.
    UNKNOWN_LIST = 11
    WAITING = 12  #: The request waits for workers, which are listed with their clocks.
    REFUSED = 13  #: Nothing of the request was applied; a text says why.
    GOODBYE = 14  #: The rank sends nothing more.
    REPLICATED = 15  #: The next server of a chain, and all behind it, have carried out what was passed on.

    @property
    def pushes(self) -> bool:
        """Whether such a request has values of keys."""
        return self in (Kind.PUSH, Kind.PUSH_PULL, Kind.ASSIGN)

    @property
    def pulls(self) -> bool:
        """Whether the answer to such a request has values."""
        return self in (Kind.PULL, Kind.PUSH_PULL)

    @property
    def is_request(self) -> bool:
        """Whether a worker sends it to a server."""
        return self <= Kind.WITHDRAW


class Form(IntEnum):
    """How a request says which keys it is about."""

    NOTHING = 0
    RANGE = 1  #: Those of ``[begin, end)`` that the server has.
    LIST = 2  #: A list of ``end`` keys follows.
    DIGEST = 3  #: A list of ``end`` keys that the server has been sent before.


#: The digest of a message that is about no list of keys.
NO_DIGEST: Final = bytes(16)


@final
@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message.

    Attributes:
        kind: What the message is.
        form: How it says which keys it is about.
        shard: The shard that it is about.
        origin: The worker whose request a server has carried out, and passes on to the next server of the shard's
            chain; or whose request was replicated. -1: a worker sends its own request, or is answered.
        number: The number of the request, or of the request that is answered. A worker numbers all of its requests.
        previous: The number of the worker's previous request to the same shard; -1: there is none.
        mark: Of requests that change something: when in its program the worker has made it (``mark_of``). A process
            that runs a step again, because the worker was lost, gives the same marks. -1: the request changes nothing.
        clock: Of a request: the worker's clock, of ``CLOCK`` the new one. Of an answer: the slowest worker's.
        begin: The first key of a range. Of an answer: the number of updates of the server's table.
        end: The end of a range, or the number of listed keys.
        value_bytes: The size of values, code, text or list of workers, in bytes.
        digest: Of the list of keys.
        lr: The learning rate of a push; ``NO_RATE``: that of the optimizer.
        is_coded: Whether the values of a push are a code.
        is_held: Whether a push counts only when the worker's step ends, and can be withdrawn until then.
    """

    kind: Kind
    form: Form = Form.NOTHING
    shard: int = 0
    origin: int = -1
    number: int = -1
    previous: int = -1
    mark: int = -1
    clock: int = 0
    begin: int = 0
    end: int = 0
    value_bytes: int = 0
    digest: bytes = NO_DIGEST
    lr: float = NO_RATE
    is_coded: bool = False
    is_held: bool = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message.

    Attributes:
        header: The header.
        keys: The list of keys, if there is one.
        values: One-dimensional: values of the table's type; or uint8: code, text or list of workers. ``None``: nothing.
        room: Of a request that is to be sent: one-dimensional memory for the values of the answer, if there is some.
    """

    header: Header
    keys: Array | None = None
    values: Array | None = None
    room: Array | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the message in bytes."""
        keys = 0 if self.keys is None else self.keys.nbytes
        return HEADER.size + keys + (0 if self.values is None else self.values.nbytes)


@final
@dataclass(frozen=True)
class Spec:
    """What both ends know of a table.

    Attributes:
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        width: The number of values of a key.
        dtype: The type of the values.
        codec: Encodes what is pushed; ``None``: nothing does.
        table: A number that distinguishes this table from others with other settings.
        piece_bytes: A request and an answer have at most so many bytes of keys, and of values, unless one key has more.
    """

    num_keys: int
    width: int
    dtype: np.dtype[Any]
    codec: Codec | None = None
    table: int = 0
    piece_bytes: int = _PIECE_BYTES_MAX

    @cached_property
    def key_dtype(self) -> np.dtype[Any]:
        """The type of the keys in messages."""
        return np.dtype(np.int32 if self.num_keys <= 1 << 31 else np.int64)

    @cached_property
    def keys_max(self) -> int:
        """The number of keys that a request may be about."""
        return max(1, self.piece_bytes // max(self.width * self.dtype.itemsize, self.key_dtype.itemsize))

    @cached_property
    def value_bytes_max(self) -> int:
        """The largest size of values, code, text or list of workers, in bytes."""
        count = self.keys_max * self.width
        code = 0 if self.codec is None else self.codec.bytes_max(count)
        return max(count * self.dtype.itemsize, code, _NOTE_BYTES_MAX)

    def encode(self, header: Header) -> bytes:
        """Return a header as bytes."""
        return HEADER.pack(
            _VERSION,
            header.kind,
            header.form,
            _CODED * header.is_coded + _HELD * header.is_held,
            self.table,
            header.shard,
            header.origin,
            header.number,
            header.previous,
            header.mark,
            header.clock,
            header.begin,
            header.end,
            header.value_bytes,
            header.digest,
            header.lr,
        )

    def decode(self, data: bytes | bytearray | memoryview) -> Header:
        """Return the header that another rank has sent.

        Raises:
            ProtocolError: It is no header of a message about this table, or its sizes are larger than allowed.
        """
        if len(data) != HEADER.size:
            raise ProtocolError(f"a header has {len(data)} bytes where {HEADER.size} are expected")
        version, kind_number, form_number, flags, table, *fields = HEADER.unpack(data)
        if version != _VERSION:
            raise ProtocolError(f"a message of version {version} where version {_VERSION} is expected")
        if table != self.table:
            raise ProtocolError(
                f"a message about table {table:#x}, which has other settings than table {self.table:#x}"
            )
        try:
            kind, form = Kind(kind_number), Form(form_number)
        except ValueError as error:
            raise ProtocolError(f"a message of an unknown kind or form: {error}") from None
        if flags & ~(_CODED | _HELD):
            raise ProtocolError(f"a header with the flags {flags:#x}")
        fields += (bool(flags & _CODED), bool(flags & _HELD))
        header = Header(kind, form, *fields)
        self._check(header)
        return header

    def key_bytes(self, header: Header) -> int:
        """Return the size of the list of keys that follows a header, in bytes."""
        return header.end * self.key_dtype.itemsize if header.form is Form.LIST else 0

    def value_dtype(self, header: Header) -> np.dtype[Any]:
        """Return the type of the values that follow a header."""
        is_text = header.kind is Kind.SAVE or header.kind > Kind.DONE
        return np.dtype(np.uint8) if is_text or header.is_coded else self.dtype

    def _check(self, header: Header) -> None:
        kind, form, begin, end, size = header.kind, header.form, header.begin, header.end, header.value_bytes
        if (kind.pushes or kind.pulls) != (form is not Form.NOTHING):
            raise ProtocolError(f"a message of kind {kind.name} cannot have keys of form {form.name}")
        if form is Form.RANGE and not 0 <= begin < end <= self.num_keys:
            raise ProtocolError(f"a range from {begin} to {end} of {self.num_keys} keys")
        if form in (Form.LIST, Form.DIGEST):
            if not 1 <= end <= self.keys_max:
                raise ProtocolError(f"a list of {end} keys, where 1 to {self.keys_max} are allowed")
            expected = end * self.width * self.dtype.itemsize if kind.pushes else 0
            if size != expected and not header.is_coded:
                raise ProtocolError(f"{size} bytes of values for {end} keys, where {expected} are expected")
        updates = kind in (Kind.PUSH, Kind.PUSH_PULL)
        if (header.is_coded and not (updates and self.codec is not None)) or (header.is_held and not updates):
            raise ProtocolError(f"a message of kind {kind.name} cannot have a code, or values that are held")
        has_values = kind.pushes or kind in (Kind.SAVE, Kind.DONE, Kind.WAITING, Kind.REFUSED)
        if size > (self.value_bytes_max if has_values else 0) or size % self.value_dtype(header).itemsize:
            raise ProtocolError(f"{size} bytes of values in a message of kind {kind.name}")
        if not (header.lr == NO_RATE or 0 <= header.lr < math.inf):
            raise ProtocolError(f"a message with a learning rate of {header.lr}")
        if (header.kind.is_request and header.number < 0) or header.clock < 0:
            raise ProtocolError(f"a request with number {header.number} and clock {header.clock}")
        marked = (Kind.CLOCK, Kind.FINISH, Kind.SAVE, Kind.WITHDRAW)
        if (kind.pushes or kind in marked) and header.mark < 0:
            raise ProtocolError(f"a request of kind {kind.name} without a mark")


def mark_of(clock: int, index: int) -> int:
    """Return the mark of a worker's push with this index among those of its step; of the clock: with index -1."""
    return (clock << _INDEX_BITS) + index


_Value = TypeVar("_Value")


@final
class Lru(Generic[_Value]):
    """Values by digest of a list of keys; the least recently used are dropped beyond a total size."""

    def __init__(self, size_max: int) -> None:
        """``size_max``: the total size, in the unit of ``put``."""
        self._entries: OrderedDict[bytes, tuple[_Value, int]] = OrderedDict()
        self._size_max, self._size = size_max, 0

    def get(self, digest: bytes) -> _Value | None:
        """Return a value; ``None`` if there is none."""
        found = self._entries.get(digest)
        if found is None:
            return None
        self._entries.move_to_end(digest)
        return found[0]

    def put(self, digest: bytes, value: _Value, size: int) -> None:
        """Keep a value."""
        self.drop(digest)
        self._entries[digest] = value, size
        self._size += size
        while self._size > self._size_max:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._size -= dropped

    def drop(self, digest: bytes) -> None:
        """Drop a value, if it is there."""
        found = self._entries.pop(digest, None)
        if found is not None:
            self._size -= found[1]


def list_bytes(count: int) -> int:
    """Return the size for which a list of so many keys counts, in bytes."""
    return 8 * count + _LIST_OVERHEAD


def digest_of(keys: Array) -> bytes:
    """Return the digest of a contiguous list of keys, of the type that they have in messages."""
    return hashlib.blake2b(keys.data, digest_size=16).digest()
