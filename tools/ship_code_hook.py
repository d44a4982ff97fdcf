"""A hook of hatchling: wheels carry the compiled functions that ``tools/ship_code.py`` leaves in build/shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedCodeHook(BuildHookInterface):
    """Adds the folder of compiled functions to a wheel, if there is one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the folder's files; an installation for developers (``editable``) has none."""
        folder = Path(self.root, "build", "shipped")
        if version != "editable" and folder.is_dir():
            build_data["force_include"][str(folder)] = "totalreduce/kernels/shipped"
