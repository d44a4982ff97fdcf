"""The examples for users of Horovod, unmodified: they learn, and their ranks stay equal."""

import gzip
import re
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

SOURCE = """
import runpy
sys.argv = {argv!r}
sys.path.insert(0, {folder!r})
sys.stdout = open(f"{out}.{{rank}}", "w")
runpy.run_path({argv!r}[0], run_name="__main__")
"""


def run(fleet, tmp_path, example, ranks, *options):
    """What each rank has printed."""
    argv, out = [str(EXAMPLES / f"{example}.py"), *map(str, options)], tmp_path / example
    workers = fleet.start(ranks, SOURCE.format(argv=argv, folder=str(EXAMPLES), out=out))
    for worker in workers:
        assert worker.wait(90) == 0, worker.errors()
        assert "Traceback" not in worker.errors()
    return [Path(f"{out}.{rank}").read_text() for rank in range(ranks)]


def check(texts, pattern):
    """The loss has fallen, the parameters are equal, and rank 0 says so."""
    losses = [float(loss) for loss in re.findall(pattern, texts[0])]
    assert len(losses) >= 2
    assert losses[-1] < 0.95 * losses[0], losses
    assert f"parameters are equal on all {len(texts)} ranks" in texts[0]
    assert not any(texts[1:])


DIGITS = ("--examples", 600, "--batch-size", 8, "--epochs", 3, "--momentum", 0.8)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--use-adasum", "--lr", 0.04),
        pytest.param(("--fp16-allreduce", "--gradient-predivide-factor", 2.0), marks=pytest.mark.slow),
    ],
)
def test_digits_are_learnt(fleet, tmp_path, options):
    check(run(fleet, tmp_path, "horovod_mnist", 2, *DIGITS, *options), r"train loss ([\d.]+)")


@pytest.mark.parametrize(
    "options",
    [(), *(pytest.param((option,), marks=pytest.mark.slow) for option in ("--fp16-allreduce", "--use-adasum"))],
)
def test_pictures_a_second(fleet, tmp_path, options):
    texts = run(fleet, tmp_path, "horovod_synthetic", 2, "--width", 4, *options)
    check(texts, r"loss ([\d.]+) at")
    assert re.search(r"pictures/s per rank: [\d.]+ \+- [\d.]+; on all: [\d.]+", texts[0])


def idx(tensor, magic):
    header = b"".join(number.to_bytes(4, "big") for number in (magic, *tensor.shape))
    return header + tensor.numpy().tobytes()


def test_digits_come_from_idx_files(fleet, tmp_path):
    labels = torch.arange(400) % 2
    images = (labels[:, None, None] * 200).expand(-1, 28, 28).to(torch.uint8).contiguous()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images, 2051)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels.to(torch.uint8), 2049))
    texts = run(fleet, tmp_path, "horovod_mnist", 2, "--data-dir", tmp_path, "--epochs", 3)
    assert "accuracy 100.0%" in texts[0]


def test_missing_files_are_named(fleet, tmp_path):
    source = SOURCE.format(
        argv=[str(EXAMPLES / "horovod_mnist.py"), "--data-dir", str(tmp_path)], folder=str(EXAMPLES), out=tmp_path / "x"
    )
    (worker,) = fleet.start(1, source)
    assert worker.wait(30) == 1
    assert f"no *images*-ubyte(.gz) in {tmp_path}" in worker.errors()
