"""Files with pictures, which ``--plot`` writes; needs matplotlib (``pip install totalreduce[plot]``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from totalreduce.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["require_matplotlib", "save_figure"]

_FORMATS = (".png", ".svg", ".pdf")
_DPI = 150


def require_matplotlib(path: Path) -> None:
    """Check that a picture can be drawn, before the work is done of which it is made. Raises ``ConfigurationError``."""
    if path.suffix not in _FORMATS:
        raise ConfigurationError(f"--plot writes {', '.join(_FORMATS)}, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install 'totalreduce[plot]', or leave --plot out")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; SVG without the time of its making, so that equal pictures are equal files.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with mpl.rc_context({"svg.hashsalt": "totalreduce", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=_DPI, metadata=metadata)
    except OSError as error:
        raise ConfigurationError(f"cannot write --plot {path}: {error.strerror}") from error
