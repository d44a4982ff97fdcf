"""In new processes the back end is known to torch.distributed, whichever is imported first."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import totalreduce


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
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
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


def test_the_compiler_is_not_imported():
    code = """
import sys, torch.distributed as dist, totalreduce
dist.init_process_group("totalreduce", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(dist.distributed_c10d.torch.ones(1))
dist.destroy_process_group()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"]


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, totalreduce; totalreduce.PeerLost; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
