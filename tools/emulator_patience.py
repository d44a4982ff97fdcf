"""A plugin of pytest for an emulator, where all takes ten times as long (``run_on_arm.py``): longer deadlines."""

from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.tensors.work import Work
from totalreduce.testing import ranks

#: By how much the deadlines of operations are longer, also those that a test names.
_FACTOR = 30.0

_checked, _wait = EngineConfig.__post_init__, Work.wait


def _check(config: EngineConfig) -> None:
    """Check a configuration, and lengthen its deadline."""
    _checked(config)
    object.__setattr__(config, "timeout_s", config.timeout_s * _FACTOR)


def _wait_longer(work: Work, timeout_s: float | None = None) -> object:
    """Wait for an operation; ``None`` is the deadline of the configuration, which is longer already."""
    return _wait(work, None if timeout_s is None else timeout_s * _FACTOR)


EngineConfig.__post_init__ = _check
Work.wait = _wait_longer
TcpConfig.__init__.__kwdefaults__["silence_s"] = 120.0
ranks.run_ranks.__kwdefaults__["timeout_s"] = 1500.0
