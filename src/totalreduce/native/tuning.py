"""Settings of the agreement that fit a native library: measured at start, printed, stored on request, never changed.

The library's allreduce of a few sizes is measured. A straight line through them has two numbers, the cost of
an operation and that of a MiB, and these decide:

* ``fusion_bytes``: so large that the fixed cost is a sixteenth of an operation; larger batches gain little, and hide
  less communication;
* ``cycle_s``: a quarter of the fixed cost: waiting so long for more operations to fuse costs less than one operation.

All ranks take part, and one allreduce gives all of them the slowest rank's times. Numbers are rounded to powers of two,
so that two runs mostly decide alike; a stored file makes that certain. The library chooses its schedules by itself.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.foundation.named_files import read_named, write_named
from totalreduce.foundation.types import ReduceOp
from totalreduce.native.collectives import NativeCollectives
from totalreduce.tensors.streams import is_on_accelerator

__all__ = ["fitting", "measure", "read_settings", "write_settings"]

_log = logging.getLogger(__name__)

_FORMAT = "totalreduce-coordination-1"
_FILE_BYTES_MAX = 64 * 1024
_MIB = 1 << 20
_SIZES = (4 * 1024, _MIB, 8 * _MIB)
_REPETITIONS = 5
_TIMEOUT_S = 60.0
_FUSION_BYTES = (_MIB, 128 * _MIB)
_CYCLE_S = (0.0005, 0.008)


def measure(
    natives: NativeCollectives,
    base: CoordinationConfig,
    *,
    maximise: Callable[[torch.Tensor], object],
    reports: bool,
) -> CoordinationConfig:
    """Measure the library and return ``base`` with settings that fit it. Collective; takes some hundred milliseconds.

    Args:
        natives: The library.
        base: The settings that are not measured.
        maximise: Replaces every element of a tensor by its maximum over the ranks.
        reports: Whether this rank writes the figures to the log.

    Raises:
        TotalReduceError: The library failed.
    """
    seconds = torch.tensor([_median(natives, size) for size in _SIZES], dtype=torch.float64, device="cpu")
    maximise(seconds)
    config = fitting(dict(zip(_SIZES, seconds.tolist(), strict=True)), base)
    if reports:
        figures = ", ".join(f"{s * 1e3:.2f} ms for {size // 1024} KiB" for size, s in zip(_SIZES, seconds, strict=True))
        _log.info(
            "coordination: the library's allreduce takes %s; fusing up to %d MiB, collecting for %.2f ms",
            figures,
            config.fusion_bytes // _MIB,
            config.cycle_s * 1e3,
        )
    return config


def _median(natives: NativeCollectives, num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=natives.device)
    times = []
    for _ in range(_REPETITIONS + 1):
        begin = time.monotonic()
        if not natives.allreduce(tensor, ReduceOp.SUM).wait(_TIMEOUT_S):
            raise TotalReduceError(f"the library's allreduce has not ended within {_TIMEOUT_S:g} s")
        if is_on_accelerator(tensor):
            torch.accelerator.synchronize(tensor.device)
        times.append(time.monotonic() - begin)
    return median(times[1:])  # the first one makes connections


def fitting(seconds: dict[int, float], base: CoordinationConfig) -> CoordinationConfig:
    """From measured times (bytes to seconds) to settings. Pure."""
    sizes = sorted(seconds)
    smallest, largest = sizes[0], sizes[-1]
    fixed_s = seconds[smallest]
    per_byte = max((seconds[largest] - fixed_s) / (largest - smallest), 1e-12)
    return replace(
        base,
        fusion_bytes=round(_power_of_two(16 * fixed_s / per_byte, *_FUSION_BYTES)),
        cycle_s=_power_of_two(fixed_s / 4, *_CYCLE_S),
    )


def _power_of_two(value: float, lowest: float, highest: float) -> float:
    """The nearest of ``lowest`` times a power of two."""
    steps = round(math.log2(max(value, lowest) / lowest))
    return float(min(lowest * 2**steps, highest))


def write_settings(config: CoordinationConfig, path: str | Path) -> None:
    """Store settings, for ``tr.init(coordination=path)``. Raises ``OSError``: the file cannot be written."""
    document = {"format": _FORMAT, "settings": config.shared()}
    write_named(Path(path), json.dumps(document, indent=2) + "\n")


def read_settings(path: str | Path) -> CoordinationConfig:
    """Read what ``write_settings`` has stored. Raises ``ConfigurationError``."""
    try:
        document: Any = json.loads(read_named(Path(path), _FILE_BYTES_MAX))
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {_FORMAT!r}")
        return CoordinationConfig(**document["settings"])
    except OSError as error:
        raise ConfigurationError(f"cannot read the settings of coordination in {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} does not hold settings of coordination: {error}") from error
