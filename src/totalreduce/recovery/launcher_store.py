"""The launcher's store, as one process of a job uses it: a connection that is made anew when the store is.

The store has no copy: if the process that serves it (``keeper``) is lost, the launcher starts another one at the same
address, and its store is empty. What has to be in it again is known elsewhere: the launcher knows which processes have
ended, and each rank knows what it has set as *lasting*. Decisions of the store before do not count any more. So that
no epoch has two decisions, a new store begins with epochs whose numbers no process has seen (``first_epoch``).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import Store, TCPStore

from totalreduce.foundation.errors import ProtocolError, RecoveryError

__all__ = ["FIRST_EPOCH", "PREFIX", "VALUE_BYTES_MAX", "LauncherStore", "StoreLost", "connect"]

PREFIX = "totalreduce/recovery"
#: The number of the first epoch that is decided in this store. The keeper sets it before anything else.
FIRST_EPOCH = f"{PREFIX}/first epoch"
#: Longer values in the store are none of this library's.
VALUE_BYTES_MAX = 4 << 20
_NUMBER_DIGITS_MAX = 9
#: How long one attempt to connect anew may take. Nobody listens while the launcher starts the store again.
_ATTEMPT_S = 1.0


class StoreLost(Exception):
    """The connection to the store has ended. ``LauncherStore.reconnect`` may make another one."""


def connect(address: tuple[str, int], timeout_s: float) -> Store:
    """Connect to the store of the keeper. Raises ``RuntimeError`` or ``ValueError``: it cannot be reached in time."""
    return TCPStore(*address, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@final
class LauncherStore:
    """A connection to the launcher's store. One thread uses it.

    Attributes:
        raw: The store of ``torch.distributed`` that is connected now.
        first_epoch: The number of the first epoch that is decided in it.
    """

    def __init__(self, open_store: Callable[[float], Store]) -> None:
        """Connect. Raises ``RecoveryError``.

        Args:
            open_store: Connects within a number of seconds, and returns the store.
        """
        self._open = open_store
        #: What is set in a store that begins anew: always, and where no other process was first.
        self._lasting: dict[str, str] = {}
        self._lasting_first: dict[str, str] = {}
        try:
            self._connect()
        except StoreLost as error:
            raise RecoveryError(str(error)) from error

    @classmethod
    def at(cls, address: tuple[str, int], timeout_s: float) -> LauncherStore:
        """Connect to the keeper at an address and a port. Raises ``RecoveryError``: it cannot be reached in time."""
        is_first = True

        def open_store(attempt_s: float) -> Store:
            nonlocal is_first
            if is_first:
                is_first = False
                return connect(address, timeout_s)
            # Torch logs every attempt that fails, with a trace, so it is asked only when somebody listens.
            socket.create_connection(address, attempt_s).close()
            store = connect(address, attempt_s)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store

        return cls(open_store)

    def reconnect(self) -> bool:
        """Try once to connect anew, and to set the lasting values again; return whether that was possible."""
        try:
            self._connect()
        except StoreLost:
            return False
        return True

    def text(self, key: str) -> str:
        """Return the value of a key; "" if there is none.

        Raises:
            StoreLost: The connection has ended.
            ProtocolError: The value is longer than this library writes any.
        """
        if not self.is_set(key):
            return ""
        value: bytes = self._access(lambda: self.raw.get(key))
        if len(value) > VALUE_BYTES_MAX:
            raise ProtocolError(f"{key!r} in the store is longer than any rank writes it")
        return value.decode(errors="replace")

    def lasting_text(self, key: str) -> str:
        """Do what ``text`` does; the value, if there is one, is set again in a store that begins anew."""
        value = self.text(key)
        if value:
            self._lasting_first[key] = value
        return value

    def is_set(self, key: str) -> bool:
        """Whether the store has a value of a key. Raises ``StoreLost``."""
        return bool(self._access(lambda: self.raw.check([key])))

    def append(self, key: str, text: str) -> None:
        """Append to the value of a key, in one step. Raises ``StoreLost``."""
        self._access(lambda: self.raw.append(key, text))

    def number(self, key: str, increase: int = 0) -> int:
        """Return the number under a key, 0 at first, after adding to it. Raises ``StoreLost``."""
        return int(self._access(lambda: self.raw.add(key, increase)))

    def first(self, key: str, value: str) -> str:
        """Return the value that the first process has set; this one, if none has. Raises ``StoreLost``."""
        text: bytes = self._access(lambda: self.raw.compare_set(key, "", value))
        return text.decode(errors="replace")

    def first_lasting(self, key: str, value: str) -> str:
        """Do what ``first`` does; the value is set again in a store that begins anew. Raises ``StoreLost``."""
        self._lasting_first[key] = self.first(key, value)
        return self._lasting_first[key]

    def set_lasting(self, key: str, value: str) -> None:
        """Set a value, now and in every store that begins anew.

        If the connection has ended, this tries once to make it anew. If that fails, ``reconnect`` sets the value later.
        """
        self._lasting[key] = value
        try:
            self._set(key, value)
        except StoreLost:
            self.reconnect()

    def set_if_connected(self, key: str, value: str) -> None:
        """Set a value if there is a connection; it is lost with the store."""
        with contextlib.suppress(StoreLost):
            self._set(key, value)

    def _connect(self) -> None:
        self.raw = self._access(lambda: self._open(_ATTEMPT_S))
        number: bytes = self._access(lambda: self.raw.get(FIRST_EPOCH))
        if not number.isdigit() or len(number) > _NUMBER_DIGITS_MAX:
            raise ProtocolError(f"the store holds {number[:100]!r} where the number of a membership is expected")
        self.first_epoch = int(number)
        for key, value in self._lasting_first.items():
            self.first(key, value)
        for key, value in self._lasting.items():
            self._set(key, value)

    def _set(self, key: str, value: str) -> None:
        self._access(lambda: self.raw.set(key, value))

    def _access(self, access: Callable[[], Any]) -> Any:
        try:
            return access()
        except (RuntimeError, ValueError, OSError) as error:
            raise StoreLost(f"the store of the launcher cannot be reached: {str(error)[:200]}") from error
