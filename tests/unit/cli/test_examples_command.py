"""``totalreduce examples``: every example is listed and copied, and nothing of the user's is overwritten."""

import ast
import os
import re

import pytest
from pages import ROOT

from totalreduce.cli.examples import example_files, examples_folder, summary
from totalreduce.cli.main import main

EXAMPLES = ROOT / "examples"


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["examples", *words])
    return end.value.code


def test_every_example_says_what_it_is(capsys):
    assert examples_folder() == EXAMPLES
    assert run() == 0
    lines = " ".join(capsys.readouterr().out.split())
    for path in example_files(EXAMPLES):
        assert len(summary(path)) > 5, path
        assert f"{path.relative_to(EXAMPLES)} {summary(path)}" in lines
    assert "torch_ddp.py Train with DistributedDataParallel." in lines
    assert "slurm.sh Train under Slurm, one rank per task." in lines


def test_examples_import_nothing_that_is_only_the_command_line_s():
    for path in EXAMPLES.glob("*.py"):
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        assert not [name for name in names if name.startswith("totalreduce.cli")], path


def test_examples_train_on_real_data():
    """Two draw their data: one counts pictures per second, and the other has a million keys with known weights."""
    drawn = {path.name for path in EXAMPLES.glob("*.py") if re.search(r"= torch\.randn?\(", path.read_text())}
    assert drawn == {"horovod_synthetic.py", "sparse_tasks.py"}


def test_examples_are_copied_with_the_packages_among_them(tmp_path, capsys):
    for _ in range(2):  # the second time they are there already
        assert run("--copy", str(tmp_path / "mine")) == 0
    assert "the first lines of each say what it is, and of a program how it is run" in capsys.readouterr().out
    copies = example_files(tmp_path / "mine")
    assert [path.relative_to(tmp_path / "mine") for path in copies] == [
        path.relative_to(EXAMPLES) for path in example_files(EXAMPLES)
    ]
    pairs = zip(copies, example_files(EXAMPLES), strict=True)
    assert all(copy.read_bytes() == original.read_bytes() for copy, original in pairs)
    assert os.access(tmp_path / "mine" / "slurm.sh", os.X_OK)


def test_a_file_of_the_users_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "train_gpt.py").write_text("mine")
    assert run("--copy", str(tmp_path)) == 2
    assert "train_gpt.py is there already, with another content" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt.py"]
    assert (tmp_path / "train_gpt.py").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("--copy", str(tmp_path / "file" / "folder")) == 2
    assert "cannot write into" in capsys.readouterr().err
