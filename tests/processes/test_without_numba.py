"""Jobs on machines on which nothing can be compiled: everything works without, and one warning says so."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import totalreduce

ROOT = Path(__file__).parents[2]

PROGRAM = Path(__file__).with_name("programs") / "every_door.py"
#: The end of the reason in the warning, by what is wrong.
MACHINES = {
    "numba does not fit": "ImportError: needs another Python",
    "llvmlite is missing": "ModuleNotFoundError: No module named 'llvmlite'",
    "NUMBA_DISABLE_JIT": "NUMBA_DISABLE_JIT is set",
    "full disk": "(No space left on device (ENOSPC)); XDG_CACHE_HOME can name another folder",
    "read-only disk": "(Read-only file system (EROFS)); XDG_CACHE_HOME can name another folder",
}
#: Where this user's code was compiled before.
CACHES = {name: value for name, value in os.environ.items() if name == "XDG_CACHE_HOME"}


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # On a loaded machine a rank that is silent for two seconds is not dead.
    own = {"OMP_NUM_THREADS": "1", "TOTALREDUCE_PEER_TIMEOUT_S": "30"}
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), **own, **variables}
    command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)


def digests(made: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the digest of results by door, which is that of both ranks."""
    assert made.returncode == 0, made.stderr
    by_rank = [
        dict(line[4:].split(maxsplit=1)[::-1] for line in made.stdout.splitlines() if line.startswith(f"[{rank}] "))
        for rank in range(2)
    ]
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) == 24
    return by_rank[0]


def test_ranks_with_and_without_numba_compute_the_same() -> None:
    made = run(Path.home(), str(PROGRAM), "1", **CACHES)
    digests(made)
    [warning] = [line for line in made.stderr.splitlines() if "no compiled code" in line]
    assert "because rank 1 (one of 1) has no compiled code: NUMBA_DISABLE_JIT is set" in warning


@pytest.mark.slow
def test_results_are_those_of_compiled_code() -> None:
    compiled, neither = (digests(run(Path.home(), str(PROGRAM), *ranks, **CACHES)) for ranks in ((), ("0", "1")))
    assert [door for door in compiled if compiled[door] != neither[door]] == ["Coded(codec=OneBit(block=512))"]


@pytest.mark.parametrize(
    "machine", [next(iter(MACHINES)), *(pytest.param(each, marks=pytest.mark.slow) for each in [*MACHINES][1:])]
)
def test_every_door_works_with_one_warning(tmp_path, small_disk, machine: str) -> None:
    home, variables = tmp_path, {}
    if machine == "NUMBA_DISABLE_JIT":
        variables[machine] = "1"
    elif machine.endswith("disk"):
        home = small_disk(64)
        if machine == "read-only disk":
            subprocess.run(["mount", "-o", "remount,ro", home], check=True, timeout=20)
    else:
        package = tmp_path / "lib" / machine.split(maxsplit=1)[0]
        package.mkdir(parents=True)
        error = MACHINES[machine].split(": ", 1)
        (package / "__init__.py").write_text(f"raise {error[0]}({error[1]!r})\n")
        variables["PYTHONPATH"] = str(package.parent)
    made = run(home, str(PROGRAM), **variables)
    digests(made)
    said = [line for line in made.stderr.splitlines() if "no compiled code" in line]
    assert "ranks of one host exchange tensors by messages" in said[0]
    assert said[0].endswith(MACHINES[machine])
    assert [line.split("compute with NumPy")[0] for line in said[1:]] in (
        [],
        ["[0] totalreduce: sparse methods, codecs and the parameter server "],
    ), "the second one is information"
    assert "compiled in" not in made.stderr
    assert not [*home.rglob("*.o"), *home.rglob("*.nb?")]


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
