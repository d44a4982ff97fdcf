"""Results of long benchmarks that are kept in a file as they come, so that a stopped command can go on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named, write_named
from totalreduce.foundation.os_errors import describe_error

__all__ = ["KeptResults"]

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1 << 30


@final
class KeptResults:
    """Documents by key. With a file, each one becomes a line of it, and those that it has are known from the beginning.

    Args:
        path: The file; ``None``: nothing outlives the process.

    Raises:
        ConfigurationError: The file cannot be read, or was not written by this class.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self._has_warned = False
        if path is None or not path.exists():
            return
        try:
            lines = read_named(path, _FILE_BYTES_MAX).decode("utf-8").splitlines()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}, in which results are kept: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            try:
                document = json.loads(line)
                self._known[document["key"]] = document["result"]
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):  # the command was stopped while it wrote; this is measured again
                    write_named(path, "".join(f"{each}\n" for each in lines[:-1]))
                    break
                raise ConfigurationError(f"{path}, line {number}, is not a kept result; name another file") from error

    def __contains__(self, key: str) -> bool:
        """Return whether there is a result with this key."""
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        """Return the result with this key."""
        return self._known[key]

    def keep(self, key: str, document: Any) -> None:
        """Keep a result, as JSON has it, and write it to the file. If that fails, a warning says so, once."""
        self._known[key] = document
        if self._path is None:
            return
        try:
            write_named(self._path, json.dumps({"key": key, "result": document}) + "\n", appends=True)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "results cannot be kept in %s: %s. The benchmark goes on; if stopped, it measures them again",
                    self._path,
                    describe_error(error),
                )
