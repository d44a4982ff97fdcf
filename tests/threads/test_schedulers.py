"""All learning rate schedulers of torch in a recoverable job: losses and new processes change no rate and no weight."""

import inspect
from collections.abc import Callable

import pytest
import torch
from lossy_jobs import Losses, lossy
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import totalreduce as tr
from totalreduce.groups.encoding import decode, encode
from totalreduce.testing import run_ranks

NUM_STEPS = 12


def shrink(epoch: int) -> float:
    return 0.9**epoch


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, shrink),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda epoch: 1 - 0.01 * epoch),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3, gamma=0.5),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 7], gamma=0.5),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, factor=0.5, total_iters=6),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, start_factor=0.2, total_iters=8),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, gamma=0.8),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=5, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=NUM_STEPS + 2),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.1, total_iters=4), schedulers.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.CosineAnnealingLR(optimizer, T_max=6)],
        milestones=[4],
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.02, anneal_epochs=6),
}


def test_these_are_all_schedulers() -> None:
    found = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


class Training:
    """A model with momentum, and a scheduler of its optimizer."""

    def __init__(self, group, kind: str) -> None:
        self.model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for each in self.model.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.05}]
        self.inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.optimizer = tr.DistributedOptimizer(self.inner, self.model, group=group, name=f"{id(self)}")
        self.scheduler = SCHEDULERS[kind](self.inner)
        self.state = tr.State(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.rates: list[list[float]] = []

    def run(self, losses: Losses, until: int = NUM_STEPS) -> None:
        """Take steps, with the scheduler in blocks of its own, and lose a rank before or after the scheduler's."""
        with lossy(self.state, losses) as job:
            for end in range(self.state.steps + 1, until + 1):
                for step in job.steps(end):
                    with job.step():
                        losses.at(step, "begin")
                        self.model(torch.full((1, 3), 1.0 + step)).square().mean().backward()
                        self.optimizer.step()
                for _ in job.once(f"schedule {end}"):
                    with job.step():
                        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
                            self.scheduler.step(1.0 + (end % 4))
                        else:
                            self.scheduler.step()
                        losses.at(end, "scheduled")
                self.rates.append([group["lr"] for group in self.inner.param_groups])

    def end(self):
        return self.rates, [each.tolist() for each in self.model.parameters()], self.scheduler.get_last_lr()


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR uses what torch deprecates
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_losses_and_new_processes_change_no_rate(kind: str) -> None:
    def body(group):
        undisturbed = Training(group, kind)
        undisturbed.run(Losses())
        assert len({tuple(rates) for rates in undisturbed.rates}) > 1
        disturbed = Training(group, kind)
        # A version counts steps and blocks of job.once: the scheduler's block after step 3 begins with version 5.
        disturbed.run(Losses((1, "scheduled"), (3, "begin"), (5, "scheduled"), (6, "scheduled")), until=6)
        replaced = Training(group, kind)
        document, tensors = encode(disturbed.state.shared())
        replaced.state.load_shared(decode(document, [each.detach().clone() for each in tensors]))
        replaced.rates = disturbed.rates
        replaced.run(Losses((8, "scheduled"), (11, "begin")))
        assert replaced.end() == undisturbed.end()

    run_ranks(1, body)
