"""``hvd.elastic`` with real processes that are killed: bits, samples, members, errors."""

import collections
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

from totalreduce.launch.local import run_workers

PROGRAM = Path(__file__).parent / "programs" / "horovod_elastic.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_elastic.py"
PAGE = Path(__file__).parents[2] / "docs" / "horovod-elastic.md"


@pytest.fixture(autouse=True)
def _warm(warm_python) -> None:
    """Start all workers from the zygote."""


def run(folder: Path, num_workers: int, *arguments: str, **options) -> Run:
    return Run(folder, num_workers, *arguments, program=PROGRAM, **options)


def without_resets(final: dict) -> dict:
    return {key: value for key, value in final.items() if key != "resets"}


def calls(run: Run, seat: int, incarnation: int = 0) -> list[dict]:
    lines = (run.folder / f"calls-{seat}-{incarnation}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples(run: Run) -> dict[int, list[int]]:
    """Return by epoch the samples of the commits that took effect.

    After a loss a commit may come again, with other members: the last ones count.
    """
    commits: dict[object, dict[int, list[dict]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in run.folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            commit = json.loads(line)
            commits[commit["commit"]][commit["members"]].append(commit)
    found: dict[int, list[int]] = collections.defaultdict(list)
    for by_members in commits.values():
        for commit in by_members[max(by_members)]:
            for epoch, sample in commit["samples"]:
                found[epoch].append(sample)
    return found


def test_replaced_ranks_change_no_bit(tmp_path: Path) -> None:
    """Rank 1 dies before it sends gradients, rank 2 when the others may have the step, and rank 0 after that."""
    plain = run(tmp_path / "plain", 3, "--commit-every", "2", on_loss="replace")
    deaths = "1:5:forward,2:9:updated,0:14:backward"
    disturbed = run(tmp_path / "disturbed", 3, "--commit-every", "2", "--die", deaths, on_loss="replace", spares=1)
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert [len(event["members"]) for event in disturbed.epochs()] == [3, 3, 3, 3]
    assert list(map(without_resets, disturbed.finals)) == list(map(without_resets, plain.finals))
    assert len({final["digest"] for final in plain.finals}) == 1
    assert [final["step"] for final in plain.finals] == [final["returned"] for final in plain.finals] == [20, 20, 20]
    assert plain.finals[0]["totals"] == [3.0, 3.0]
    assert plain.finals[0]["resets"] == []
    assert [final["resets"] for final in disturbed.finals] == [[3], [3, 3, 3], [3, 3]]
    assert sorted(samples(plain)[0]) == sorted(samples(disturbed)[0]) == list(range(240))
    assert sorted(samples(plain)[1]) == sorted(samples(disturbed)[1]) == list(range(240))
    # Each call begins with the last commit, on the new ranks, too: steps 4, 8 and 14 after the losses.
    assert [call["step"] for call in calls(disturbed, 0)] == [0, 4, 8]
    assert [call["step"] for call in calls(disturbed, 0, 1)] == [14]
    assert [call["step"] for call in calls(disturbed, 1, 1)] == [4, 8, 14]


def test_models_on_an_accelerator_have_the_bits_of_the_cpu_after_a_loss(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ on the path, which compiles the fake accelerator")
    arguments = ("--samples", "64", "--epochs", "1", "--commit-every", "2")
    plain = run(tmp_path / "plain", 2, *arguments)
    disturbed = run(tmp_path / "on", 2, *arguments, "--device", "fake", "--die", "1:2:updated", on_loss="replace")
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert len(disturbed.epochs()) == 2
    assert list(map(without_resets, disturbed.finals)) == list(map(without_resets, plain.finals))


def test_all_begin_with_the_latest_commit_when_rank_0_is_new(tmp_path: Path) -> None:
    """Rank 0 dies; rank 1 learns of it before its commit, and rank 2 after its own."""
    plain = run(tmp_path / "plain", 3, "--no-sampler", "--epochs", "1", on_loss="replace")
    arguments = ["--no-sampler", "--epochs", "1", "--die", "0:6:updated", "--behind", "1:6"]
    disturbed = run(tmp_path / "disturbed", 3, *arguments, on_loss="replace")
    assert disturbed.result.exit_code == 0, disturbed.result.errors
    assert [call["step"] for call in calls(disturbed, 0, 1)] == [7]
    assert [call["step"] for call in calls(disturbed, 1)] == [call["step"] for call in calls(disturbed, 2)] == [0, 7]
    assert list(map(without_resets, disturbed.finals)) == list(map(without_resets, plain.finals))


@pytest.mark.slow
def test_with_fewer_ranks_and_newcomers_every_sample_is_used_once(tmp_path: Path) -> None:
    """Four ranks, then three and two; the processes that were started again join until step 7."""
    deaths = "1:2:forward,0:4:updated"
    arguments = ["--know-batch", "--samples", "250", "--commit-every", "3", "--die", deaths, "--hold", "4"]
    found = run(tmp_path / "run", 4, *arguments, "--hold-at", "7", on_loss="shrink", min_ranks=2)
    assert found.result.exit_code == 0, found.result.errors
    sizes = [len(event["members"]) for event in found.epochs()]
    assert sizes[0] == sizes[-1] == 4
    assert len(found.finals) == 4
    assert len({json.dumps(without_resets(final)) for final in found.finals}) == 1
    assert found.finals[0]["sizes"] == [4, 4, 4, 4]
    # Fewer samples than ranks may be left for the next epoch, where they come first.
    used = samples(found)
    counts = collections.Counter([*used[0], *used[1]])
    assert set(counts) == set(range(250))
    assert max(counts.values()) == 2
    assert 500 - counts.total() < 4
    assert len(used[0]) > 246
    # After an interrupt nothing is done again, although the last commit was earlier.
    history = calls(found, 3)
    interrupts = [place for place, call in enumerate(history) if "interrupted_at" in call]
    assert interrupts or min(sizes) == 4  # newcomers may be so quick that they take the places of lost ranks
    assert [history[place + 1]["step"] for place in interrupts] == [
        history[place]["interrupted_at"] for place in interrupts
    ]
    assert history[-1]["size"] == 4


@pytest.mark.slow
def test_an_error_of_the_program_is_not_repeated(tmp_path: Path) -> None:
    found = run(tmp_path / "run", 2, "--fail", on_loss="replace")
    assert found.result.exit_code == 0, found.result.errors
    assert "ValueError: a mistake of the program" in found.result.errors[1]
    assert len(calls(found, 1)) == 1
    assert [call["step"] for call in calls(found, 0)] == [0, 3]
    assert len(found.finals) == 2
    assert len({final["digest"] for final in found.finals}) == 1


@pytest.mark.slow
def test_too_few_ranks_are_an_error_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTALREDUCE_TIMEOUT_S", "4")
    arguments = ["--die", "1:2:forward", "--absent"]
    found = run(tmp_path / "run", 3, *arguments, on_loss="shrink", min_ranks=3, restarts=1)
    assert found.result.exit_code == 1
    for rank in (0, 2):
        assert (
            "RecoveryError: membership 2 needs 3 ranks, and 2 have come within 4 s. Missing: rank 1"
            in (found.result.errors[rank])
        )
    assert found.finals == []


def test_without_the_launcher_the_same_loop_runs_and_a_loss_is_an_error(tmp_path: Path) -> None:
    finals = {}
    for name, arguments in (("plain", []), ("killed", ["--die", "1:3:forward"])):
        folder = tmp_path / name
        folder.mkdir()
        argv = [sys.executable, str(PROGRAM), str(folder), *arguments]
        result = run_workers(argv, num_workers=2, output="capture", timeout_s=60.0)
        finals[name] = [json.loads(path.read_text()) for path in sorted(folder.glob("final-*"))]
        if name == "plain":
            assert result.exit_code == 0, result.errors
        else:
            assert result.exit_code == 128 + signal.SIGKILL
            assert "PeerLost: rank 1 is lost" in result.errors[0]
    assert finals["killed"] == []
    assert [final["step"] for final in finals["plain"]] == [30, 30]
    assert finals["plain"][0] == finals["plain"][1]


DEADLY = """
import os, signal

class Deadly:
    \"\"\"A data set whose hundredth sample kills the first process of a seat.\"\"\"

    def __init__(self, samples, seat):
        self.samples, self.reads = samples, 0
        self.is_deadly = (os.environ["RANK"], os.environ["TOTALREDUCE_INCARNATION"]) == (seat, "0")

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        if self.is_deadly and self.reads == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.samples[index]
"""


def test_the_example_goes_on_when_a_worker_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{DEADLY}\n"
        "import runpy, sys\n"
        f"sys.argv = [{str(EXAMPLE)!r}, '--examples', '600', '--batch-size', '8', '--batches-per-commit', '5']\n"
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        "import horovod_mnist\n"
        "load = horovod_mnist.load_digits\n"
        "horovod_mnist.load_digits = lambda folder, count: Deadly(load(folder, count), '1')\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    found = Run(tmp_path / "run", 2, program=program, on_loss="replace")
    assert found.result.exit_code == 0, found.result.errors
    assert [event["version"] for event in found.epochs()] == [0, 2]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) on 2 ranks", found.result.output[0])]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "parameters are equal on all 2 ranks" in found.result.output[0]


def test_the_program_of_the_documentation_runs(tmp_path: Path) -> None:
    """Rank 0 dies in the fourth batch of the first epoch; the others finish, with the learning rate of two ranks."""
    [text] = re.findall(r"```python\n(import torch, [^`]*@hvd\.elastic\.run[^`]*)```", PAGE.read_text())
    program = tmp_path / "program.py"
    assert text.count("model = torch.nn.Linear(4, 3)\n") == 1
    text = text.replace("model = torch", "dataset = Deadly(dataset, '0')\nmodel = torch")
    program.write_text(
        f"{DEADLY}\n"
        f"{text}\n"
        "weights = hvd.allgather_object(model.weight.detach())\n"
        "assert all(torch.equal(each, weights[0]) for each in weights)\n"
        "print(len(weights), hvd.rank(), state.epoch, sampler.epoch, optimizer.param_groups[0]['lr'])\n"
    )
    found = Run(tmp_path / "run", 3, program=program, on_loss="shrink", restarts=0)
    assert found.result.exit_code == 0, found.result.errors
    assert [found.result.output[seat] for seat in (1, 2)] == ["2 0 9 10 0.02\n", "2 1 9 10 0.02\n"]


RETRAINED = """
import hashlib, json, os, signal, sys
from pathlib import Path
import torch
import totalreduce.horovod as hvd

hvd.init()
me = os.environ["RANK"] + "." + os.environ.get("TOTALREDUCE_INCARNATION", "0")
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
model[:2].requires_grad_(False)
optimizer = torch.optim.AdamW(model[1:].parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.step < 9:
        if state.step == 3:
            model[1].requires_grad_(True)
            optimizer.replan()
        if state.step == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.3})
        if f"{me}:{state.step}" in sys.argv[2].split(","):
            os.kill(os.getpid(), signal.SIGKILL)
        rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * state.step + hvd.rank()))
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
values = [each.detach().numpy().tobytes() for each in model.parameters()]
values += [entry["exp_avg"].numpy().tobytes() for entry in optimizer.state_dict()["state"].values()]
final = {"digest": hashlib.sha256(b"".join(values)).hexdigest(), "step": state.step}
final |= {"groups": [len(group["params"]) for group in optimizer.param_groups]}
Path(sys.argv[1], f"final-{hvd.rank()}.json").write_text(json.dumps(final))
"""


@pytest.mark.slow
def test_what_is_trained_belongs_to_the_state(tmp_path: Path) -> None:
    """Ranks are lost when the others have unfrozen a layer or added a group since their last commit, and later."""
    program = tmp_path / "program.py"
    program.write_text(RETRAINED)
    plain = Run(tmp_path / "plain", 2, "", program=program, on_loss="replace")
    deaths = "1.0:3,0.0:4,1.1:5,0.1:7"
    disturbed = Run(tmp_path / "disturbed", 2, deaths, program=program, on_loss="replace")
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert len(disturbed.epochs()) == 5
    assert disturbed.finals == plain.finals
    assert [(final["step"], final["groups"]) for final in plain.finals] == [(9, [4, 2])] * 2
    assert len({final["digest"] for final in plain.finals}) == 1
