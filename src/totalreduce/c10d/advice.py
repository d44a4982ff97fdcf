"""What an error adds that only this process knows: what torch's own code compares or copies with a collective."""

from __future__ import annotations

import re
import sys
from types import FrameType

from totalreduce.foundation.errors import MismatchError

__all__ = ["ddp_advice"]

#: Where torch compares models and copies their states.
_FILE = "/torch/distributed/utils.py"
_COMPARES, _COPIES = "_verify_param_shape_across_processes", "_sync_params_and_buffers"
#: What DistributedDataParallel compares: extents and strides of all parameters.
_SIZES = re.compile(r"broadcast\(root=\d+\) of int64\[(\d+)\]")


def ddp_advice(error: BaseException) -> str:
    """Return what it means that a collective fails with ``error`` which DistributedDataParallel calls; else "".

    Called in the thread that waits for the collective.
    """
    caller = _caller(sys._getframe())
    if caller == _COMPARES:
        return (
            "DistributedDataParallel compares the models of all ranks here, and they differ"
            f"{_difference(error)}. Build the same model on every rank: compare "
            "[(name, tuple(p.shape)) for name, p in model.named_parameters()]."
        )
    if caller == _COPIES:
        return (
            "DistributedDataParallel copies the parameters and buffers of one rank to all others here. A rank that "
            "does something else has another model, or has left the constructor with an error: see its output."
        )
    return ""


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_name in (_COMPARES, _COPIES) and code.co_filename.replace("\\", "/").endswith(_FILE):
            return code.co_name
        frame = frame.f_back
    return ""


def _difference(error: BaseException) -> str:
    """Return in which way the models differ, as far as the error shows it."""
    if not isinstance(error, MismatchError):
        return ""
    sizes = [_SIZES.fullmatch(value) for value in error.values]
    if not all(sizes):
        return ""
    said = (
        f"those of rank {rank} have {int(size[1]) // 2}" for rank, size in zip(error.ranks, sizes, strict=True) if size
    )
    return f": the parameters, taken together, have other numbers of dimensions: {', '.join(said)}"
