"""The progress of the demo, from a worker to the launcher."""

from pathlib import Path

from totalreduce.cli.demo_setup import ProgressListener, ProgressSender, TrainingReport


def test_progress_arrives_in_a_folder_whose_path_is_longer_than_that_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    seen: list[TrainingReport] = []
    report = TrainingReport(**dict.fromkeys(TrainingReport.__dataclass_fields__, 1))
    sender = ProgressSender(str(folder))
    with ProgressListener(str(folder), seen.append):
        sender.send(report)
    sender.close()
    assert seen == [report]
    assert not list(folder.iterdir())
