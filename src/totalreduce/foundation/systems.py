"""The systems on which the library runs: Linux, with a Python of 64 bits.

``totalreduce/__init__.py`` imports this module before all others, of which some need what only Linux has.
"""

from __future__ import annotations

import sys

__all__ = ["why_not"]

_NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin on Windows"}
_WINDOWS = "use WSL2 (`wsl --install`, then install and run totalreduce in its Linux)"
_OTHERS = "use a Linux machine, a virtual machine or a container with Linux"


def why_not(platform: str, largest_index: int) -> str | None:
    """Return in one sentence why the library cannot run on a system; ``None`` if it can."""
    if not platform.startswith("linux"):
        name = _NAMES.get(platform, platform)
        return f"totalreduce needs Linux, and this is {name}: {_WINDOWS if 'Windows' in name else _OTHERS}"
    if largest_index < 2**32:
        return "totalreduce needs a Python of 64 bits, and this one has 32: install a 64-bit Python on a 64-bit Linux"
    return None


_reason = why_not(sys.platform, sys.maxsize)
if _reason is not None:
    raise ImportError(_reason)
