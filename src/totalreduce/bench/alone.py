"""Run a script whose DistributedDataParallel exchanges no gradients: what a step takes without any communication.

``python -m totalreduce.bench.alone SCRIPT ARGUMENT...`` runs a script as ``python SCRIPT ARGUMENT...`` does, but every
backward pass in it behaves as under ``DistributedDataParallel.no_sync()``. The replicas drift apart, so its losses mean
nothing. No back end can be faster than its steps.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

__all__ = ["main"]


class _Never:
    """The attribute by which DistributedDataParallel knows whether to exchange gradients: always false."""

    def __init__(self) -> None:
        self.was_set = False

    def __get__(self, instance: object, owner: type) -> bool:
        return False

    def __set__(self, instance: object, value: bool) -> None:
        self.was_set = True


def main() -> None:
    """Run the script that the command line names.

    Raises:
        SystemExit: The script has made no DistributedDataParallel, so its steps may contain communication.
    """
    script, never = sys.argv[1], _Never()
    DistributedDataParallel.require_backward_grad_sync = never  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)  # as for a script that Python runs itself
    runpy.run_path(script, run_name="__main__")
    if not never.was_set:
        sys.exit(f"{script} uses no DistributedDataParallel: --alone cannot switch its exchange off")


if __name__ == "__main__":
    main()
