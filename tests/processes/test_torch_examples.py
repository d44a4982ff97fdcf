"""The examples for torch.distributed, Lightning, Accelerate and Transformers, on our back end and on gloo.

An example runs unmodified: in a process of its own, as ``__main__``, with its own command line.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SOURCE = """
import runpy
sys.argv = {argv!r}
sys.path.insert(0, {folder!r})
runpy.run_path({argv!r}[0], run_name="__main__")
"""
TINY = {
    "cnn": ("--width", "4", "--batch", "4", "--examples", "64"),
    "gpt": ("--width", "32", "--layers", "2", "--batch", "4", "--examples", "64"),
}
NEEDS = {"lightning_fit": "pytorch_lightning", "accelerate_fit": "accelerate", "transformers_fit": "transformers"}
STEPS = 6
row = pytest.mark.tested_with


def train(fleet, tmp_path, example, model, ranks, dtype, backends=("totalreduce", "gloo")):
    """Losses by back end; the jobs run at the same time."""
    jobs = {}
    for backend in backends:
        out = tmp_path / f"{example}-{backend}.json"
        options = ("--backend", backend, "--model", model, "--dtype", dtype, "--steps", str(STEPS), *TINY[model])
        argv = [str(EXAMPLES / f"{example}.py"), *options, "--json", str(out)]
        ends = {"FULL_EXIT": "1"} if backend == "totalreduce" else {}
        jobs[backend] = out, fleet.start(ranks, SOURCE.format(argv=argv, folder=str(EXAMPLES)), **ends)
    losses = {}
    for backend, (out, workers) in jobs.items():
        for worker in workers:
            if backend == "gloo":
                end_gloo(worker, out)
            else:
                assert worker.wait(90) == 0, worker.errors()
        facts = json.loads(out.read_text())
        assert (facts["backend"], facts["model"], facts["world_size"]) == (backend, model, ranks)
        assert len(facts["losses"]) == len(facts["step_s"]) == STEPS
        losses[backend] = facts["losses"]
    return losses


def end_gloo(worker, out):
    """Wait for a worker on gloo. After all work is done gloo may abort or hang in its destructors.

    Seen in torch 2.13: the main thread joins gloo's and holds the interpreter lock, for which gloo's thread waits to
    free the last tensor.
    """
    deadline = time.monotonic() + 90
    while worker.exit_code is None and not out.exists():
        assert time.monotonic() < deadline, worker.errors()
        with contextlib.suppress(AssertionError):
            worker.wait(1)
    with contextlib.suppress(AssertionError):
        worker.wait(10)
    if worker.exit_code is None:
        worker.send(signal.SIGKILL)
        worker.wait()
    assert worker.exit_code in (0, -signal.SIGABRT, -signal.SIGKILL), worker.errors()


@pytest.mark.parametrize(
    ("example", "model", "ranks", "dtype", "tolerance"),
    [
        pytest.param("torch_ddp", "cnn", 2, "float64", 1e-13, marks=row("DistributedDataParallel", "torch")),
        pytest.param("torch_ddp", "cnn", 4, "float64", 1e-13, marks=pytest.mark.slow),
        pytest.param("torch_ddp", "gpt", 4, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("torch_fsdp", "cnn", 2, "float64", 1e-13, marks=row("FSDP2", "torch")),
        pytest.param("torch_fsdp", "gpt", 2, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("lightning_fit", "gpt", 2, "float32", 1e-5, marks=row("Lightning", "pytorch-lightning")),
        pytest.param("accelerate_fit", "cnn", 2, "float64", 1e-13, marks=row("Accelerate", "accelerate")),
        pytest.param("transformers_fit", "gpt", 2, "float32", 1e-5, marks=row("Trainer", "transformers")),
    ],
)
def test_losses_are_those_on_gloo(fleet, tmp_path, example, model, ranks, dtype, tolerance):
    needed = NEEDS.get(example, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if needed != "torch":
        fleet.preload(needed)
    losses = train(fleet, tmp_path, example, model, ranks, dtype)
    assert losses["totalreduce"] == pytest.approx(losses["gloo"], rel=tolerance)
    assert len(set(losses["gloo"])) == STEPS  # something was learnt, or at least other examples were seen


@pytest.mark.slow
def test_slices_are_trained_like_replicas(fleet, tmp_path):
    # The same data in the same order: DDP and FSDP2 differ in where the sums are made, not in what they are.
    replicas, slices = (
        train(fleet, tmp_path, example, "gpt", 3, "float64", backends=("totalreduce",))
        for example in ("torch_ddp", "torch_fsdp")
    )
    assert slices["totalreduce"] == pytest.approx(replicas["totalreduce"], rel=1e-12)


@pytest.mark.slow
@row("Ray Train", "ray")
def test_losses_under_ray_are_those_on_gloo(tmp_path, request):
    pytest.importorskip("ray", reason="ray[train] is not installed")
    losses = {}
    short = tempfile.mkdtemp()
    request.addfinalizer(lambda: shutil.rmtree(short))
    for backend in ("totalreduce", "gloo"):
        out = tmp_path / f"{backend}.json"
        options = ["--backend", backend, "--model", "gpt", "--steps", str(STEPS), *TINY["gpt"], "--json", str(out)]
        # Ray writes a token into the home folder, and the names of its sockets must not be long.
        environment = {**os.environ, "HOME": str(tmp_path), "RAY_TMPDIR": short, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(EXAMPLES / "ray_fit.py"), *options]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        facts = json.loads(out.read_text())
        assert (facts["backend"], facts["world_size"], len(facts["losses"])) == (backend, 2, STEPS)
        losses[backend] = facts["losses"]
    assert losses["totalreduce"] == pytest.approx(losses["gloo"], rel=1e-5)
