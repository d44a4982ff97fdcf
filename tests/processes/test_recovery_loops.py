"""What a training loop may do in a recoverable job: killed ranks are replaced, and no bit changes."""

import json
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "loops.py"


def run(folder: Path, loop: str, deaths: str = "", num_workers: int = 2, **options) -> Run:
    arguments = [loop, *(["--die", deaths] if deaths else [])]
    made = Run(folder, num_workers, *arguments, program=PROGRAM, **{"on_loss": "replace", **options})
    assert made.result.exit_code == 0, made.result.errors
    return made


def compare(folder: Path, loop: str, deaths: str) -> tuple[Run, Run]:
    """Return a run without faults and one with them, whose ends are equal."""
    plain, disturbed = run(folder / "plain", loop), run(folder / "disturbed", loop, deaths)
    assert len(disturbed.epochs()) == 1 + len(deaths.split(","))
    assert disturbed.finals == plain.finals
    assert len({final["digest"] for final in plain.finals}) == 1
    return plain, disturbed


@pytest.mark.parametrize("loop", ["parts", pytest.param("parts sparse", marks=pytest.mark.slow)])
def test_a_step_with_several_optimizers(tmp_path: Path, warm_python, loop: str) -> None:
    """Rank 1 dies in the second part of a step, and rank 0 in the first part, when its vote has passed."""
    plain, disturbed = compare(tmp_path, loop, "1:5:backward,0:10:updated")
    assert [event["version"] for event in disturbed.epochs()] == [0, 5, 11]
    assert [final["version"] for final in plain.finals] == [40, 40]
    assert bool(plain.finals[0]["residuals"]) == (loop == "parts sparse")


LOOPS = {
    "clipping": "1:4:synchronized,0:7:backward",
    "scaler": "1:4:backward,0:7:updated",
    "accumulation": "1:4:between,0:7:backward",
    "passes": "1:4:between,0:7:backward",
    "no_sync": "1:4:between,0:7:backward",
    "iterations": "1:4:backward,0:7:updated",
    "compiled": "1:4:backward,0:7:updated",
    "stream": "1:4:backward,0:12:updated",
    "stream workers": "1:4:backward,0:12:updated",
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_no_bit_changes(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The learning rate is scheduled in the block in all of them."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if loop != "compiled":  # the compiler starts processes of its own, and waits for them in a forked one
        request.getfixturevalue("warm_python")
    plain, _ = compare(tmp_path, loop, LOOPS[loop])
    final = plain.finals[0]
    assert final["version"] == (18 if loop == "compiled" else 20)
    assert final["lr"] == pytest.approx([1e-2 * 0.8 ** (final["version"] // 4)])
    if loop == "scaler":
        assert final["skipped"] == 4
        assert final["scale"] != 2.0**10


def used_samples(made: Run, epoch: int, part: str | None = None) -> list[int]:
    """Return the samples of all steps that have taken effect in an epoch."""
    lines = [line for path in made.folder.glob("samples-*.jsonl") for line in path.read_text().splitlines()]
    steps = [step for step in map(json.loads, lines) if step["epoch"] == epoch and step.get("part") == part]
    return [sample for step in steps for sample in step["samples"]]


@pytest.mark.parametrize("loop", ["stream workers", pytest.param("parts", marks=pytest.mark.slow)])
def test_without_a_lost_rank_no_sample_is_lost_or_used_twice(tmp_path: Path, warm_python, loop: str) -> None:
    """One rank dies in its forward pass; with parts, when the first part of the step has taken effect."""
    made = run(tmp_path / "run", loop, "1:3:forward,0:7:backward", 4, on_loss="shrink", restarts=0)
    assert [(event["version"], len(event["members"])) for event in made.epochs()] == [(0, 4), (3, 3), (7, 2)]
    for part in ("discriminator", "generator") if loop == "parts" else (None,):
        for epoch in range(2):
            assert sorted(used_samples(made, epoch, part)) == list(range(150)), (part, epoch)
    assert len({final["digest"] for final in made.finals}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("options['engine'] = tr.EngineConfig()", "'engine: given' here, and 'engine: default' in the job"),
        ("options['links'] = 'off'", "'links: off' here, and 'links: auto' in the job"),
        ("os.environ['TOTALREDUCE_JOB_KEY'] = 'ab' * 32", "'fingerprint of the key: 24c16ee8' here, and 'fingerprint"),
        ("os.environ['TOTALREDUCE_MIN_RANKS'] = '9'", "--min-ranks must be from 1 to the number of workers, 2, not 9"),
    ],
)
def test_a_newcomer_with_other_settings_is_refused_and_the_job_goes_on(tmp_path, warm_python, change, message) -> None:
    """The first replacement of rank 1 has other settings than the job; the next one has the right ones."""
    program = tmp_path / "program.py"
    source = PROGRAM.read_text().replace(
        "    group = tr.init()\n",
        "    options = {}\n"
        "    if os.environ.get('TOTALREDUCE_INCARNATION') == '1':\n"
        f"        {change}\n"
        "    group = tr.init(**options)\n",
    )
    program.write_text(source)
    made = Run(tmp_path / "run", 2, "clipping", "--die", "1:4:backward", program=program, on_loss="replace")
    assert made.result.exit_code == 0, made.result.errors
    assert [final["version"] for final in made.finals] == [20, 20]
    assert [event["incarnation"] for event in made.events if event["event"] == "started"] == [0, 0, 1, 2]
    assert message in made.result.errors[1], made.result.errors
