"""What torch calls when it is imported (the entry point in ``torch.backends``).

If it failed, ``import torch`` would fail. So it lies outside of the package ``totalreduce``, whose import is an error
on other systems than Linux, and does nothing there.
"""

from __future__ import annotations

import sys

__all__ = ["install"]


def install() -> None:
    """Have torch know the back end ``totalreduce``, where the library can run."""
    if sys.platform.startswith("linux") and sys.maxsize > 2**32:
        from totalreduce.c10d import registration

        registration.install()
