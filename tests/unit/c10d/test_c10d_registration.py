"""The back end's name is known to torch.distributed, whichever is imported first, and torch is not imported for it."""

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import totalreduce
from totalreduce.c10d import registration
from totalreduce.c10d.calls import reduction_of
from totalreduce.c10d.work import as_torch_error
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost
from totalreduce.foundation.types import ReduceOp


def python(code):
    """Run in a fresh interpreter; what it prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.split()


def test_registered_when_torch_is_imported_afterwards():
    code = """
import sys, totalreduce
def watches(): return sum(getattr(finder, "name", "").startswith("torch.") for finder in sys.meta_path)
totalreduce.c10d.registration.install()
print("torch" in sys.modules, watches())
import inspect, torch.distributed as dist
home = dist.distributed_c10d
print(watches(), "totalreduce" in dist.Backend.backend_list, dist.monitored_barrier is home.monitored_barrier)
print(type(home.__loader__).__name__, home.__spec__.loader is home.__loader__)
print("def init_process_group" in inspect.getsource(home), "totalreduce.c10d.backend" in sys.modules)
"""
    said = python(code)
    assert said[:2] == ["False", "1"]
    assert said[2:5] == ["0", "True", "True"]
    assert said[5:7] == ["SourceFileLoader", "True"]
    assert said[7:] == ["True", "False"]


def test_an_installed_package_registers_when_torch_is_imported(tmp_path):
    settings = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    points = settings["project"]["entry-points"]["torch.backends"]
    installed = tmp_path / "totalreduce-0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: totalreduce\nVersion: 0.0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    code = f"""
import sys
sys.path[:0] = {[str(tmp_path), str(Path(totalreduce.__path__[0]).parent)]!r}
import torch.distributed as dist
print("totalreduce" in dist.Backend.backend_list, "totalreduce.c10d.backend" in sys.modules)
"""
    assert python(code) == ["True", "False"]


def test_registered_at_once_when_torch_is_there():
    # As in this process: torch.distributed was imported by this module, before or after totalreduce.
    assert dist.Backend("totalreduce") == dist.Backend.TOTALREDUCE == "totalreduce"
    assert dist.Backend.backend_capability["totalreduce"] == ["cpu", "cuda"]
    finders, barrier = list(sys.meta_path), dist.monitored_barrier
    registration.install()
    assert sys.meta_path == finders
    assert dist.monitored_barrier is barrier


def test_the_defaults_of_devices_stay_torchs():
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


def test_monitored_barrier_of_other_back_ends_is_torchs():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  (brings the back end called fake)

            dist.monitored_barrier()
            with pytest.raises((ValueError, RuntimeError), match=r"only implemented for GLOO|only GLOO supports"):
                dist.monitored_barrier(dist.new_group(backend="fake"))
    finally:
        dist.destroy_process_group()


def test_errors_in_torchs_words():
    lost = PeerLost(2, "killed")
    error = as_torch_error(lost, "totalreduce:all_reduce")
    assert isinstance(error, dist.DistBackendError)
    assert str(error) == "rank 2 is lost: killed"
    assert error.rank == 2
    assert error.__cause__ is lost
    late = as_torch_error(DeadlineExceededError("rank 0 waited"), "totalreduce:barrier")
    assert str(late) == "totalreduce:barrier: Timed out (rank 0 waited)"
    wrong, foreign = ConfigurationError("no"), KeyError("x")
    assert as_torch_error(wrong) is wrong
    assert as_torch_error(foreign) is foreign


def test_reductions():
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
        assert reduction_of(getattr(dist.ReduceOp, name)) == (ReduceOp[name], None)
        assert reduction_of(dist.ReduceOp(getattr(dist.ReduceOp, name))) == (ReduceOp[name], None)
    assert reduction_of(dist._make_nccl_premul_sum(0.5)) == (ReduceOp.SUM, 0.5)
    assert reduction_of(dist._make_nccl_premul_sum(torch.tensor([0.25]))) == (ReduceOp.SUM, torch.tensor(0.25))
    with pytest.raises(ValueError, match="PREMUL_SUM has no factor"):
        reduction_of(dist.ReduceOp.PREMUL_SUM)
    with pytest.raises(ValueError, match=r"Cannot use ReduceOp\.NEW"):
        reduction_of(SimpleNamespace(op=SimpleNamespace(name="NEW", value=99)))


def test_frameworks_learn_the_name_when_they_are_imported():
    code = """
import sys, types
import totalreduce
from totalreduce.c10d import frameworks

class Registry(dict):
    def register(self, name, strategy, **options):
        self[name] = strategy, options

strategies = types.ModuleType("strategies")
strategies.StrategyRegistry, strategies.DDPStrategy = Registry(), "DDP"
frameworks._lightning(strategies)
frameworks._lightning(strategies)
print(len(strategies.StrategyRegistry), strategies.StrategyRegistry["totalreduce"][1]["process_group_backend"])
frameworks._lightning(types.ModuleType("of another version"))
frameworks._accelerate(types.ModuleType("of another version"))

class PartialState:
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", ("cpu", cpu, backend)

state = types.SimpleNamespace(PartialState=PartialState)
frameworks._accelerate(state)
wrapped = PartialState._prepare_backend
frameworks._accelerate(state)
print(PartialState._prepare_backend is wrapped)
print(PartialState()._prepare_backend(True, False, "totalreduce") == ("totalreduce", ("cpu", True, None)))
print(PartialState()._prepare_backend(True, backend="mpi") == ("gloo", ("cpu", True, "mpi")))
"""
    assert python(code) == ["1", "totalreduce", "True", "True", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["totalreduce", "the framework"])
def test_the_names_are_known_to_lightning_and_accelerate(first):
    lines = ["import pytorch_lightning.strategies, accelerate.state", "import totalreduce"]
    code = """
import pytorch_lightning, lightning_fabric.strategies
strategy = pytorch_lightning.Trainer(strategy="totalreduce", accelerator="cpu", logger=False).strategy
print(type(strategy).__name__, strategy.process_group_backend)
print("totalreduce" in lightning_fabric.strategies.STRATEGY_REGISTRY)
print(accelerate.state.PartialState._prepare_backend(None, True, False, "totalreduce")[0])
"""
    said = python("\n".join([*(lines[::-1] if first == "totalreduce" else lines), code]))
    assert said == ["DDPStrategy", "totalreduce", "True", "totalreduce"]
