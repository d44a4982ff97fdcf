"""The device of an operation on this rank, where the ranks have agreed on the kind of device only.

Ranks compare the kind ("cuda"), because the index differs between the ranks of one host. The index is that
of this rank's tensors; on a rank that has joined and submits no more, that of the tensors before.
"""

from __future__ import annotations

from typing import final

import torch

__all__ = ["Devices"]


@final
class Devices:
    """The devices of this rank, one of each kind.

    Args:
        default: Where the library works if this rank has submitted no tensor of that kind yet.
    """

    def __init__(self, default: torch.device) -> None:
        """See the class."""
        self._by_kind = {default.type: default}

    def note(self, device: torch.device) -> None:
        """Note that a tensor of this rank is on ``device``."""
        self._by_kind[device.type] = device

    def of(self, kind: str) -> torch.device:
        """This rank's device of a kind."""
        return self._by_kind.get(kind) or torch.device(kind)
