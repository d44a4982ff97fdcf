"""What training takes of memory beside gloo's DDP: the proportional set sizes of all ranks, again and again."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "training_memory.py"
RANKS = 4


def shared_out_kib(pid):
    """The memory of a process; of a page that several processes have, each has a part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Pss: +(\d+)", text, re.MULTILINE).group(1))


def train(door, model, zeros):
    """The largest memory of all ranks at one moment of a training, in MiB for each rank; and the seconds of a step."""
    command = [sys.executable, "-m", "totalreduce", "run", "-n", str(RANKS), "--", PROGRAM, door, model, zeros]
    most, pids = 0, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        output = []
        reading = threading.Thread(target=lambda: output.extend(job.stdout))
        reading.start()
        while job.poll() is None:
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", "".join(output))]
            with contextlib.suppress(OSError, AttributeError):  # a rank is about to end
                most = max(most, sum(map(shared_out_kib, pids)))
            time.sleep(0.05)
        reading.join()
    text = "".join(output)
    assert job.returncode == 0, text
    assert len(pids) == RANKS, text
    step_s = float(re.search(r"step_s ([\d.]+)", text).group(1))
    return most / 1024 / RANKS, step_s


DENSE = """
import sys, torch, totalreduce as tr
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
with tr.init("{transport}", timeout_s=60) as group:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = tr.DistributedOptimizer(inner, group=group, named_parameters=model.named_parameters())
    model(torch.full((1, 4), 1.0 + group.rank)).sum().backward()
    optimizer.step()
    print(group.rank, "numba" in sys.modules, "gradient", model.weight.grad[0, 0].item())
"""


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_dense_gradients_do_not_load_numba(tmp_path, transport):
    """Numba takes 15 MiB of each process. Compiled code that is kept does not need it."""
    script = tmp_path / "dense.py"
    script.write_text(DENSE.format(transport=transport))
    command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", "--", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{rank} False gradient 1.5" in done.stdout for rank in range(2)), done.stdout


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("zeros", ["none", "zeros", "clipped"])
# The library itself is some 25 MiB more than gloo, and the back end has 25 MiB of shared memory: 1.03 to 1.05 times as
# much with the compiled code of a wheel. Without that, LLVM's library loads the code, which takes 15 MiB more.
@pytest.mark.parametrize(("model", "limit"), [("linear", 1.06), ("transformer", 1.06), ("narrow", 1.06)])
def test_a_rank_takes_as_much_memory_as_with_gloo(model, limit, zeros):
    sizes = {}
    for door in ("gloo", "totalreduce", "optimizer"):
        sizes[door], step_s = train(door, model, zeros)
        print(f"{model}, {zeros}: {door} {sizes[door]:.0f} MiB for each rank at most, {step_s:.2f} s for a step")
    assert sizes["totalreduce"] <= limit * sizes["gloo"]
    assert sizes["optimizer"] <= limit * sizes["gloo"]
