"""The programs of docs/parameter-server.md and docs/parameter-server-snapshots.md, as they stand there."""

import re
import sys
from pathlib import Path

from totalreduce.launch.local import run_workers

DOCS = Path(__file__).parents[2] / "docs"


def programs(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(tmp_path, program, ranks):
    path = tmp_path / "train.py"
    path.write_text(program)
    result = run_workers([sys.executable, str(path)], num_workers=ranks, output="capture", timeout_s=100)
    assert result.exit_code == 0, [worker.last_errors for worker in result.workers]
    return "".join(result.output)


def test_a_linear_model_is_learned(warm_python, tmp_path):
    [error] = re.findall(r"mean error of a weight: (\d\.\d\d)", run(tmp_path, programs("parameter-server.md")[0], 2))
    assert float(error) < 0.1


def test_a_dense_vector_is_added_up_and_a_snapshot_is_restored(warm_python, tmp_path):
    [snapshots] = programs("parameter-server-snapshots.md")
    output = run(tmp_path, programs("parameter-server.md")[1] + snapshots, 2)
    assert re.findall(r"(True|False) Counter\((.*)\)", output) == [("True", "{0: 8}")] * 2
    assert output.count("the restored workers are at step 10\n") == 2
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["version-000000010"]
