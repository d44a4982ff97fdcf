"""Jobs on machines on which nothing can be compiled: dense gradients need no such code, the rest says what it needs."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import totalreduce

ROOT = Path(__file__).parents[2]

#: The reason in the warning, by what is wrong.
MACHINES = {
    "numba does not fit": "ImportError: needs another Python",
    "llvmlite is missing": "ModuleNotFoundError: No module named 'llvmlite'",
    "NUMBA_DISABLE_JIT": "NUMBA_DISABLE_JIT is set",
}
PROGRAM = """
import sys, torch, totalreduce as tr
group = tr.init()
torch.manual_seed(group.rank)
model = torch.nn.Linear(4, 1)
sparse = {"sync": tr.OkTopk(density=0.5), "feedback": tr.ErrorFeedback(elements_min=1)}
settings = sparse if "sparse" in sys.argv else {}
optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model, group=group, **settings)
with torch.no_grad():
    model.weight.fill_(1.0)
model(torch.full((1, 4), 1.0 + group.rank)).sum().backward()
optimizer.step()
print("weights", model.weight.flatten().tolist(), flush=True)
"""


def run(tmp_path, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program, env = tmp_path / "program.py", {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program.write_text(PROGRAM)
    if machine == "NUMBA_DISABLE_JIT":
        env[machine] = "1"
    else:
        package = tmp_path / "lib" / machine.split(maxsplit=1)[0]
        package.mkdir(parents=True)
        error = MACHINES[machine].split(": ", 1)
        (package / "__init__.py").write_text(f"raise {error[0]}({error[1]!r})\n")
        env["PYTHONPATH"] = str(package.parent)
    command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)


@pytest.mark.parametrize(
    "machine", [next(iter(MACHINES)), *(pytest.param(each, marks=pytest.mark.slow) for each in [*MACHINES][1:])]
)
def test_dense_training_runs_with_one_warning(tmp_path, machine: str) -> None:
    made = run(tmp_path, machine)
    assert made.returncode == 0, made.stderr
    assert sorted(made.stdout.splitlines()) == [f"[{rank}] weights {[0.625] * 4}" for rank in range(2)]
    warnings = [line for line in made.stderr.splitlines() if "compiled code" in line]
    assert len(warnings) == 1, made.stderr
    assert "ranks of one host exchange tensors by messages" in warnings[0]
    assert warnings[0].endswith(MACHINES[machine])


def test_sparse_training_says_what_is_missing(tmp_path) -> None:
    made = run(tmp_path, "numba does not fit", "sparse")
    assert made.returncode == 1
    assert (
        "need Numba, which compiles their kernels, and it cannot be used here: ImportError: needs another"
        in made.stderr
    )


#: Both ways of large tensors: the lane's pieces, and the relay's messages.
SHIPPED = """
import sys, torch, totalreduce as tr
from totalreduce.kernels import exchange, relay
group = tr.init(sys.argv[1])
value = torch.arange(2.0**20) * (1 + group.rank)
for _ in range(3):
    result = value.clone()
    group.allreduce(result, name="value").wait()
assert torch.equal(result, 3 * torch.arange(2.0**20))
loaded = {module.load().level for module in (exchange, relay) if module.load.cache_info().currsize}
print("level", *loaded, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("ld") is None, reason="code is shipped for x86-64, and ld links it"
)
def test_code_of_the_package_needs_no_numba_and_leaves_no_files(tmp_path) -> None:
    package, program = tmp_path / "lib" / "totalreduce", tmp_path / "program.py"
    shutil.copytree(totalreduce.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, str(ROOT / "tools" / "ship_code.py"), str(package / "kernels" / "shipped"), "x86-64"]
    subprocess.run(build, check=True, timeout=300)
    for name in ("numba", "llvmlite"):
        (package.parent / f"{name}.py").write_text("raise ImportError('there is none')\n")
    program.write_text(SHIPPED)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package.parent)}
    for transport in ("shm", "tcp"):
        command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", str(program), transport]
        made = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
        assert made.returncode == 0, made.stderr
        assert sorted(made.stdout.splitlines()) == [f"[{rank}] level x86-64" for rank in range(2)]
        assert "compile" not in made.stderr
    assert not (tmp_path / ".cache").exists()
