"""The log of a rank: lines of JSON for programs that collect the logs of many ranks, and lines that hold no rank up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from datetime import UTC, datetime
from typing import IO, Any, final

from totalreduce.observe.reporting import ReportWriter

__all__ = ["JsonFormatter", "ReportHandler"]

#: How long a line waits for a reader of the log that reads nothing, and how many bytes then wait in memory.
_WAIT_S, _BYTES_MAX = 1.0, 1 << 20

#: The attributes that every record has. A record's other attributes come from ``extra``.
_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


@final
class JsonFormatter(logging.Formatter):
    """Formats a log record as one line with a JSON object.

    It has ``time`` (ISO 8601, UTC), ``level``, ``area`` (the part of the library, such as ``transports``), ``logger``,
    ``message``, ``rank``, ``host`` and ``pid``; ``error`` with the traceback, if the record has one; and what the
    caller has passed as ``extra``.
    """

    def __init__(self, rank: int | None = None) -> None:
        """``rank``: the rank of this process, if it has one."""
        super().__init__()
        self._process = {"rank": rank, "host": socket.gethostname()}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line break."""
        areas = record.name.split(".")
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "area": areas[1] if areas[0] == "totalreduce" and len(areas) > 1 else areas[0],
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            "pid": os.getpid(),
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        document |= {key: value for key, value in vars(record).items() if key not in _STANDARD and key not in document}
        return json.dumps(document, default=str)


@final
class ReportHandler(logging.Handler):
    """Writes log records to a stream. No fault of it raises an error, and a reader that reads nothing blocks no thread.

    A line may come from the thread that moves messages: other ranks would take a rank for lost that waits for a
    terminal or a pipe. What the stream does not take within a second waits in memory; too much of it is lost.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        """``stream``: such as ``sys.stderr``, which is ``None`` if it is closed."""
        super().__init__()
        self._writer = ReportWriter("the log", stream, lambda _: None, wait_s=_WAIT_S, bytes_max=_BYTES_MAX)
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._writer.forget()
        self._writer.write(line.encode("utf-8", "backslashreplace") + b"\n")

    def flush(self) -> None:
        """Write what the stream takes now."""
        with self.lock or contextlib.nullcontext():
            self._writer.flush()

    def close(self) -> None:
        """Write what waits, and wait for the reader as long as it reads."""
        with self.lock or contextlib.nullcontext():
            if os.getpid() == self._pid:
                self._writer.close()
        super().close()
