"""Ranks that train by a strategy and are killed: bits of replaced ranks, steps of ranks that nobody replaces."""

import json
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run
from tests.processes.test_recovery import without_epochs


@pytest.fixture(autouse=True)
def _warm(warm_python) -> None:
    """Processes need no imports."""


def run(folder: Path, sync: str, deaths: str = "", num_workers: int = 3, **options) -> Run:
    arguments = ["--sync", sync, "--norm", "--optimizer", "momentum", *options.pop("more", [])]
    arguments += ["--die", deaths] if deaths else []
    made = Run(folder, num_workers, *arguments, **{"on_loss": "replace", **options})
    assert made.result.exit_code == 0, made.result.errors
    return made


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("sync", "versions"),
    [
        pytest.param("local_sgd", [0, 7, 11, 13], marks=slow),
        pytest.param("local_sgd, int8", [0, 5, 11, 13], marks=slow),
        pytest.param("diloco", [0, 5, 11, 13], marks=slow),
        ("diloco, overlap", [0, 6, 10, 13]),
        pytest.param("diloco, progress", [0, 6, 10, 13], marks=slow),
        pytest.param("slowmo", [0, 5, 11, 13], marks=slow),
        pytest.param("easgd", [0, 5, 11, 13], marks=slow),
        pytest.param("gossip", [0, 5, 11, 13], marks=slow),
        pytest.param("gossip, overlap", [0, 5, 10, 13], marks=slow),
        pytest.param("gossip, long overlap", [0, 6, 10, 13], marks=slow),
        pytest.param("strom", [0, 5, 10, 13], marks=slow),
        pytest.param("strom, overlap", [0, 5, 10, 13], marks=slow),
    ],
)
def test_replaced_ranks_change_no_bit(tmp_path: Path, sync: str, versions: list[int]) -> None:
    """Rank 1 dies within a period, rank 2 after a step, and rank 0 in an evaluation.

    The others learn of it in the step that ends with the next exchange, or in the evaluation.
    """
    plain = run(tmp_path / "plain", sync)
    disturbed = run(tmp_path / "disturbed", sync, "1:5:forward,2:9:updated,0:13:once")
    assert [event["version"] for event in disturbed.epochs()] == versions
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))
    assert len({final["digest"] for final in plain.finals}) == 3  # ranks end with parameters of their own
    assert plain.finals[0]["losses"] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("deaths", "versions"),
    [
        ("1:5:forward,2:6:forward,0:8:forward", [0, 5, 6, 9]),
        # Ranks 0 and 1 die one shortly after the other, so perhaps there is one epoch less.
        pytest.param("0:5:updated,1:6:backward,2:6:updated", [0, 6, 9], marks=slow),
    ],
)
def test_ranks_that_die_around_the_last_synchronous_step_change_no_bit(
    tmp_path: Path, deaths: str, versions: list[int]
) -> None:
    """Six steps are synchronous. Their state is that of any rank; the seventh step makes the first copies."""
    plain = run(tmp_path / "plain", "post_local_sgd")
    disturbed = run(tmp_path / "disturbed", "post_local_sgd", deaths)
    assert sorted({event["version"] for event in disturbed.epochs()}) == versions
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))
    assert len({final["digest"] for final in plain.finals}) == 3


@slow
@pytest.mark.parametrize("sync", ["diloco", "diloco, overlap"])
@pytest.mark.parametrize(
    "deaths", ["1:0:forward", "1:6:forward,2:6:backward", "0:7:backward,2:5:forward", "1:26:forward"]
)
def test_ranks_that_die_at_other_times_change_no_bit(tmp_path: Path, sync: str, deaths: str) -> None:
    """Before the first exchange; two at once; two in different steps of a period; after the last exchange."""
    plain = run(tmp_path / "plain", sync, num_workers=4)
    disturbed = run(tmp_path / "disturbed", sync, deaths, num_workers=4, more=["--replicas", "2"])
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))


@slow
@pytest.mark.parametrize(("sync", "version"), [("local_sgd", 7), ("diloco, overlap", 6)])
def test_a_rank_without_a_copy_begins_where_another_one_is(tmp_path: Path, sync: str, version: int) -> None:
    """Its steps since the exchange are lost, as the documentation says: other bits, and no error."""
    plain = run(tmp_path / "plain", sync)
    disturbed = run(tmp_path / "disturbed", sync, "1:6:forward", more=["--replicas", "0"])
    assert [event["version"] for event in disturbed.epochs()] == [0, version]
    assert [final["version"] for final in disturbed.finals] == [final["version"] for final in plain.finals]
    assert disturbed.finals[0]["digest"] != plain.finals[0]["digest"]


@pytest.mark.parametrize(
    ("sync", "version"),
    [
        ("local_sgd", 7),
        *(
            pytest.param(*each, marks=slow)
            for each in [
                ("post_local_sgd", 5),
                ("diloco", 5),
                ("diloco, overlap", 6),
                ("gossip", 5),
                ("gossip, overlap", 5),
                ("gossip, long overlap", 6),
                ("strom, overlap", 5),
            ]
        ),
    ],
)
def test_without_a_lost_rank_the_others_go_on(tmp_path: Path, sync: str, version: int) -> None:
    made = run(tmp_path / "run", sync, "1:5:forward", num_workers=4, on_loss="shrink", restarts=0)
    assert [len(event["members"]) for event in made.epochs()] == [4, 3]
    assert made.epochs()[1]["version"] == version
    assert [final["world_size"] for final in made.finals] == [3, 3, 3]
    for epoch in range(2):
        used = [sample for (of, _), samples in made.blocks().items() if of == epoch for sample in samples]
        # The lost rank has not used its samples of the steps from its death to the exchange.
        unused = 8 * (made.epochs()[1]["version"] - 5) if epoch == 0 else 0
        assert len(used) == len(set(used)) == 300 - unused


@slow
@pytest.mark.parametrize("sync", ["diloco", "diloco, overlap", "post_local_sgd", "gossip, overlap", "strom, overlap"])
def test_a_rank_that_joins_begins_with_the_common_state(tmp_path: Path, sync: str) -> None:
    made = run(tmp_path / "run", sync, "1:3:forward", more=["--hold", "3"], on_loss="shrink", min_ranks=2)
    assert [len(event["members"]) for event in made.epochs()] == [3, 2, 3]
    assert len({final["version"] for final in made.finals}) == 1


@slow
@pytest.mark.parametrize("sync", ["local_sgd", "post_local_sgd"])
def test_a_rank_joins_one_that_has_trained_alone(tmp_path: Path, sync: str) -> None:
    """It begins with the present state, and not with what the other rank had when it was left alone."""
    more = ["--hold", "2"]
    made = run(tmp_path / "run", sync, "1:9:forward", num_workers=2, more=more, on_loss="shrink", min_ranks=1)
    assert [len(event["members"]) for event in made.epochs()] == [2, 1, 2]
    assert len({final["version"] for final in made.finals}) == 1


@slow
@pytest.mark.parametrize("sync", ["diloco", "diloco, overlap", "post_local_sgd", "gossip, overlap", "strom, overlap"])
def test_snapshots_have_the_state_of_each_rank(tmp_path: Path, sync: str) -> None:
    """A job that begins from version 10, in the middle of a period, ends with the bits of the job that has written."""
    folder = tmp_path / "snapshots"
    first = run(tmp_path / "first", sync, more=["--snapshots", str(folder)])
    for version in sorted(folder.glob("version-*")):
        if int(version.name.partition("-")[2]) > 10:
            for path in sorted(version.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            version.rmdir()
    second = run(tmp_path / "second", sync, more=["--snapshots", str(folder)])
    assert list(map(without_epochs, second.finals)) == list(map(without_epochs, first.finals))
    steps = [
        json.loads(line)["version"] for line in (tmp_path / "second" / "samples-0-0.jsonl").read_text().splitlines()
    ]
    assert steps[0] == 10
