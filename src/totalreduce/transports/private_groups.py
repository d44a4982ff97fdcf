"""Private process groups of ``torch.distributed``: how they are made and given back, and how torch's errors read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch.distributed as dist

from totalreduce.foundation.errors import RendezvousError

__all__ = ["ENDED", "destroy", "forming_a_group", "reason"]

#: What gloo raises when a connection has ended, and torch when the program has destroyed its process group.
ENDED: Final = (RuntimeError, ValueError)


@contextlib.contextmanager
def forming_a_group() -> Iterator[None]:
    """Say in the library's own words that torch could not make a private group.

    Raises:
        RendezvousError: Torch could not.
    """
    try:
        yield
    except RuntimeError as error:
        raise RendezvousError(f"torch.distributed cannot make a private group: {reason(error)}") from error


def destroy(group: dist.ProcessGroup) -> None:
    """Give a private group back; a program that has destroyed its own process group has done so already."""
    with contextlib.suppress(*ENDED):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def reason(error: Exception) -> str:
    """The first line, without the place in gloo's source and its good wishes."""
    line = (str(error).splitlines() or [""])[0]
    return line.split("] ", 1)[-1].split(" This is typically caused", 1)[0][:300]
