"""The sum rule: what is applied and what the ranks keep back are, together, the gradients of the steps that were taken.

For all methods and codecs, memory layouts, dtypes, and ways to leave a step out.
"""

from __future__ import annotations

import pytest
import torch

import totalreduce as tr
from totalreduce.codecs.codecs import CODECS
from totalreduce.groups.group import Group
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.session import Method
from totalreduce.testing import run_ranks

#: What happens to a step. All but "step" leave it out.
STEPS = ["step", "optimizer.zero_grad", "step", "model.zero_grad", "step", "in place", "step", "overflow", "step"]
CODEC_SETTINGS = {"threshold": {"threshold": 0.5}, "topk": {"density": 0.1}}
SYNCS: dict[str, Method] = {
    **{name: METHODS[name](density=0.1) for name in METHODS if name not in ("dense", "coded", "powersgd")},
    "dense": METHODS["dense"](),
    "powersgd": tr.PowerSGD(rank=2),
    **{f"coded-{name}": tr.Coded(codec=CODECS[name](**CODEC_SETTINGS.get(name, {}))) for name in CODECS},
}


class Layouts(torch.nn.Module):
    """Parameters whose elements lie in different orders in memory, and one whose gradient is expanded."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(24, 40, dtype=dtype))
        self.columns = torch.nn.Parameter(torch.zeros(40, 24, dtype=dtype).t())
        kernels = torch.zeros(6, 4, 5, 5, dtype=dtype)
        self.channels_last = torch.nn.Parameter(kernels.to(memory_format=torch.channels_last))
        self.inverted = torch.nn.Parameter(torch.zeros(5, 5, 4, 6, dtype=dtype).permute(3, 2, 1, 0))
        self.expanded = torch.nn.Parameter(torch.zeros(16, 20, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(7, dtype=dtype))  # one dimension: it is not compressed

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        terms = [self.expanded.sum() * torch.randn((), generator=generator).to(self.expanded.dtype), self.bias.sum()]
        for parameter in (self.rows, self.columns, self.channels_last, self.inverted):
            terms.append((parameter * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)).sum())
        return torch.stack([term.float() for term in terms]).sum()


def summed(tensors: list[torch.Tensor], group: Group) -> torch.Tensor:
    """The sum over the ranks in float64, in the order of the parameters' logical elements."""
    total = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
    return group.allreduce(total).wait()


def train(group: Group, sync: Method, dtype: torch.dtype, momentum: float = 0.0) -> tuple[float, float]:
    """The error of the sum rule, and the norm of all gradients. Velocities are kept apart, so they have a rule."""
    model = Layouts(dtype)
    compressed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    scales = dtype is not torch.float16  # GradScaler refuses gradients in float16
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6, backoff_factor=0.5, enabled=scales)
    feedback = ErrorFeedback(elements_min=0, bucket_elements=1500)
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, feedback=feedback, grad_scaler=scaler)
    generator = torch.Generator().manual_seed(group.rank)
    total = applied = torch.zeros(sum(parameter.numel() for parameter in compressed), dtype=torch.float64)
    for kind in STEPS:
        state = generator.get_state()
        own = torch.autograd.grad(model(generator), compressed)
        generator.set_state(state)
        loss = model(generator)
        if kind == "overflow" and group.rank == 0:
            loss = loss + (model.bias * torch.inf).sum()  # the bias is reduced as it is, and the step is left out
        scaler.scale(loss).backward()
        if kind == "optimizer.zero_grad":
            optimizer.zero_grad()
        elif kind == "model.zero_grad":
            model.zero_grad()
        elif kind == "in place":
            model.zero_grad(set_to_none=False)
        else:
            scaler.unscale_(optimizer)
            grads = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in compressed]
            if scales or kind == "step":
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if kind == "step":
                total = total + summed(list(own), group)
                applied = applied + torch.cat([grad.double().reshape(-1) for grad in grads]) * group.world_size
    residual = summed([optimizer.residuals[name] for name, each in model.named_parameters() if each.dim() > 1], group)
    optimizer.close()
    return float((applied + residual - total).norm()), float(total.norm())


def combinations() -> list[object]:
    """All in ``make soak``; in ``make test`` the half types with four methods that treat elements differently."""
    found = []
    for name in SYNCS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            is_long = dtype is not torch.float32 and name not in ("oktopk", "powersgd", "coded-int8", "dense")
            marks = [pytest.mark.slow] if is_long else []
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype)[6:]}"))
    return found


@pytest.mark.parametrize(("name", "dtype"), combinations())
def test_what_is_applied_and_what_is_kept_add_up_to_the_gradients(name: str, dtype: torch.dtype) -> None:
    for error, norm in run_ranks(2, lambda group: train(group, SYNCS[name], dtype)):
        assert norm > 10
        assert error <= 1e-6 * norm


@pytest.mark.parametrize("world_size", [1, 3])
def test_powersgd_finds_the_rank_of_a_matrix_in_every_memory_layout(world_size: int) -> None:
    """Gradients of rank one are applied exactly from the second step on, whichever way their memory is ordered."""
    column, row = torch.arange(1.0, 21).unsqueeze(1), torch.sin(torch.arange(60.0)).unsqueeze(0)
    matrix = column @ row
    kernels = matrix.view(20, 3, 4, 5)
    layouts = {
        "rows": torch.zeros(20, 60),
        "columns": torch.zeros(60, 20).t(),
        "channels last": torch.zeros(20, 3, 4, 5).to(memory_format=torch.channels_last),
        "inverted": torch.zeros(5, 4, 3, 20).permute(3, 2, 1, 0),
        "first dimension innermost": torch.zeros(3, 4, 5, 20).permute(3, 0, 1, 2),
    }

    def body(group: Group) -> dict[str, float]:
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(each.clone()) for name, each in layouts.items()})
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            group=group,
            sync=tr.PowerSGD(rank=1),
            feedback=ErrorFeedback(elements_min=0),
        )
        for _ in range(3):
            before = {name: each.detach().clone() for name, each in model.items()}
            optimizer.zero_grad()
            sum((each * (matrix if each.dim() == 2 else kernels)).sum() for each in model.values()).backward()
            optimizer.step()
        steps = {name: (before[name] - each.detach()).reshape(20, 60) for name, each in model.items()}
        return {name: float((step - matrix).norm() / matrix.norm()) for name, step in steps.items()}

    for errors in run_ranks(world_size, body):
        assert all(error < 1e-5 for error in errors.values()), errors
