"""The optimizers of torch that treat each element by itself.

Any part of a parameter can be updated alone by such an optimizer, with the same result. So several servers can each
have a part.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["ELEMENTWISE", "is_elementwise"]

#: The names of their classes in ``torch.optim``.
ELEMENTWISE: Final = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to treat each element by itself. A subclass is not."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__)
