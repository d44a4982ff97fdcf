"""Log records as lines of JSON, for programs that collect the logs of many ranks."""

from __future__ import annotations

import json
import logging
import os
import socket
from datetime import UTC, datetime
from typing import Any, final

__all__ = ["JsonFormatter"]

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
