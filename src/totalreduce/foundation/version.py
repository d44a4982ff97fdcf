"""The version of this library.

A build writes it into ``_version.py``: the latest tag of git (``pyproject.toml`` says how). In a source tree that was
never built or installed, it is that of no release.
"""

from __future__ import annotations

__all__ = ["VERSION"]

try:
    from totalreduce.foundation._version import VERSION
except ImportError:
    VERSION = "0.1.0.dev0"
