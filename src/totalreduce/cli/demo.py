"""``totalreduce demo``: train a small GPT on local workers, then alone, and compare.

This process only starts workers and draws: it imports no torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from totalreduce.cli.demo_compare import compare
from totalreduce.cli.demo_setup import DemoSettings, ProgressListener, built_in_text, read_text
from totalreduce.cli.report import write_document
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.local import RunResult, run_workers
from totalreduce.observe.merge import merge_timelines
from totalreduce.observe.progress import TrainingProgress

__all__ = ["demo"]

_TIMEOUT_S_PER_STEP = 5.0
_STARTING_S = 120.0
_DEFAULT_STEPS = 250


def demo(
    *,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A UTF-8 text to learn.", show_default="Python's help()"),
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=64, help="Worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Training steps.")] = _DEFAULT_STEPS,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure.")] = None,
    timeline: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the timelines go.")] = Path(
        "totalreduce-timeline"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0,
) -> None:
    """Train a small GPT on local worker processes, then in one process, and compare the two.

    Both begin with the same weights and see the same batches: the one process takes all workers' rows.
    Fails (exit code 1) if the losses differ by more than 0.0001.

    [bold]Examples[/bold]

    totalreduce demo
    totalreduce demo --text book.txt --ranks 2 --steps 1000
    """
    console = Console()
    corpus = built_in_text() if text is None else read_text(text)
    _check_folders(timeline, json_file)
    with tempfile.TemporaryDirectory(prefix="totalreduce-demo-") as folder:
        (Path(folder) / "text.txt").write_text(corpus, "utf-8", newline="")
        settings = DemoSettings(
            folder=folder,
            num_ranks=ranks,
            distributed=True,
            num_steps=steps,
            seed=seed,
            # A world of one takes the path for that of its only file.
            timeline=str(timeline if ranks > 1 else timeline / "rank0.json"),
        )
        console.print(_introduction(settings, corpus, "Python's help texts" if text is None else str(text)))
        distributed = _train(settings, console)
        (single,) = _train(replace(settings, distributed=False, timeline=None), console)
    trace = merge_timelines([timeline / f"rank{rank}.json" for rank in range(ranks)], timeline / "timeline.json")
    comparison = compare(distributed, single, settings)
    console.print(comparison.table(ranks))
    _print_sample(console, distributed[0])
    console.print(f"Timeline: {trace}", soft_wrap=True)
    console.print("Open it at https://ui.perfetto.dev (Open trace file).")
    problem = comparison.problem()
    if json_file is not None:
        document: dict[str, object] = {"settings": asdict(settings), "comparison": asdict(comparison)}
        document |= {"timeline": str(trace), "passed": problem is None}
        document |= {"distributed": distributed, "single": single}
        write_document(json_file, document)
    if problem is not None:
        typer.echo(f"totalreduce demo: {problem}", err=True)
        raise typer.Exit(1)


def _train(settings: DemoSettings, console: Console) -> list[dict[str, Any]]:
    """Run one training to its end, with its progress on the console; the ranks' results."""
    num_workers = settings.num_ranks if settings.distributed else 1
    settings_path = Path(settings.folder) / "settings.json"
    settings.save(settings_path)
    command = [sys.executable, "-m", "totalreduce.cli.demo_worker", str(settings_path)]
    label = f"{num_workers} workers" if settings.distributed else "1 process"
    # OpenMP threads that spin while they wait make a step 40 times slower where others need the cores, too.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **current()}
    timeout_s = _STARTING_S + _TIMEOUT_S_PER_STEP * settings.num_steps
    with (
        TrainingProgress(label, settings.num_steps, console) as progress,
        ProgressListener(settings.folder, progress.update),
    ):
        outcome = run_workers(
            command, num_workers=num_workers, environment=environment, output="capture", timeout_s=timeout_s
        )
    if outcome.exit_code != 0:
        _explain_failure(outcome, timeout_s)
        raise typer.Exit(outcome.exit_code)
    return [json.loads(settings.result_path(rank).read_text("utf-8")) for rank in range(num_workers)]


def _explain_failure(outcome: RunResult, timeout_s: float) -> None:
    failure = outcome.first_failure
    if outcome.interrupted_by is not None:
        typer.echo(f"totalreduce demo: stopped by {outcome.interrupted_by}", err=True)
    elif outcome.timed_out:
        typer.echo(f"totalreduce demo: not done after {timeout_s:.0f} s; stopped", err=True)
    elif failure is not None:
        typer.echo("\n".join(outcome.errors[failure.rank].splitlines()[-20:]), err=True)
        typer.echo(f"totalreduce demo: worker {failure.rank} failed first: {failure.describe()}", err=True)


def _check_folders(timeline: Path, json_file: Path | None) -> None:
    """Better now than after a minute of training."""
    try:
        timeline.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--timeline: cannot make the folder {timeline}: {error.strerror}") from error
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise ConfigurationError(f"--json: cannot write {json_file}; its folder must exist")


def _introduction(settings: DemoSettings, text: str, source: str) -> Text:
    batch = settings.num_ranks * settings.batch_per_rank
    return Text(
        f"A GPT of {settings.num_layers} layers, width {settings.width}, learns {source}: {len(text):,} "
        f"characters, {len(set(text))} of them different; {settings.num_steps} steps of {batch} x "
        f"{settings.context} characters."
    )


def _print_sample(console: Console, result: dict[str, Any]) -> None:
    sample = Text("What it has learnt to write: ")
    sample.append(_printable(result["prompt"].lstrip()), style="bold")
    sample.append(_printable(result["sample"].rstrip()), style="italic")
    console.print(sample, highlight=False)


def _printable(text: str) -> str:
    """A text file may hold control sequences; they are not for the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
