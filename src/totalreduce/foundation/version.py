"""The version of this library, the same as in ``pyproject.toml``."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
