"""The settings of a plan of gradients, of which tests change one or two."""

from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.planning import PlanSettings

DENSE = PlanSettings(
    initial="broadcast",
    buffers="broadcast",
    optimizer="SGD",
    op=ReduceOp.AVG,
    bucket_bytes=4096,
    overlap="backward",
    on_missing="zero",
    compression="none",
    gradient_predivide_factor=1.0,
    backward_passes_per_step=1,
    sparse="dense",
    join_divisor="world",
    sync=None,
    strategy=None,
    feedback=ErrorFeedback(),
)
