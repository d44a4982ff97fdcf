"""Optimizers and models that a ``tr.State`` refuses when it is made, in words that say what to use."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.recovery.refusals import check_whole
from totalreduce.recovery.state import State

#: Torch's module of these optimizers uses parts of torch that are deprecated, and FSDP1 warns of a single rank.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching"),
]


def torchs() -> ModuleType:
    return importlib.import_module("torch.distributed.optim")


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def averager() -> object:
    module = importlib.import_module("torch.distributed.algorithms.model_averaging.averagers")
    return module.PeriodicModelAverager(period=4)


OPTIMIZERS: dict[str, tuple[Callable[[torch.nn.Module], torch.optim.Optimizer], str]] = {
    "zero": (
        lambda model: torchs().ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        r"ZeroRedundancyOptimizer: .*Use the optimizer itself, or shard the model with FSDP2 .*ShardCopies",
    ),
    "post-local SGD": (
        lambda model: torchs().PostLocalSGDOptimizer(sgd(model), averager()),
        r"PostLocalSGDOptimizer, .*Use tr\.recoverable with tr\.DistributedOptimizer\(\.\.\., sync=tr\.PostLocalSGD",
    ),
    "named": (
        lambda model: torchs()._NamedOptimizer(model.named_parameters(), torch.optim.SGD, module=model, lr=0.1),
        "_NamedOptimizer, whose state has names in place of numbers",
    ),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), "does not support LBFGS"),
}


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_cannot_be_recovered_is_refused(kind: str) -> None:
    make, words = OPTIMIZERS[kind]
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=words):
        State(model=model, optimizer={"only": make(model)})


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    torchs()._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(
        ConfigurationError, match=r"'weight' has an optimizer that steps in backward\(\) .*after backward"
    ):
        State(model=model, optimizer=sgd(model))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("is_part", [False, True])
def test_a_model_with_a_wrapper_of_one_group_is_refused(is_part: bool) -> None:
    for wrap, words in (
        (DistributedDataParallel, r"needs the module itself, not DistributedDataParallel: model\.module"),
        (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            r"\(FSDP1\), .*FSDP2 .*ShardCopies",
        ),
    ):
        model = wrap(torch.nn.Linear(2, 2))
        whole = torch.nn.ModuleDict({"generator": model}) if is_part else model
        with pytest.raises(ConfigurationError, match=words):
            State(model=whole, optimizer=sgd(whole))


def test_a_scripted_module_is_refused() -> None:
    model = torch.jit.script(torch.nn.Linear(2, 2))
    with pytest.raises(
        ConfigurationError, match=r"torch\.jit\.script: use the module itself, compiled by torch\.compile"
    ):
        State(model=model, optimizer=sgd(model))


@pytest.mark.usefixtures("_group")
def test_sharded_parameters_need_copies() -> None:
    model = torch.nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    State(model=model, optimizer=sgd(model))  # for tr.attempts(copies=...)
    with pytest.raises(
        ConfigurationError, match=r"'weight' is sharded, and tr\.attempts\(state\) needs whole parameters"
    ):
        check_whole(model, "tr.attempts(state)")
