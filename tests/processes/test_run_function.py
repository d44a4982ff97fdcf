"""``tr.run``: functions of scripts and of notebooks, as several workers; results, output, errors, interruptions."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import totalreduce as tr

NOTEBOOK = [
    """
import totalreduce as tr

FACTOR = 10

def work(offset):
    import os
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
    return FACTOR * int(os.environ["RANK"]) + offset

print(tr.run(work, 2, args=(3,)))
""",
    """
def fail():
    import os
    if os.environ["RANK"] == "1":
        raise KeyError("no such layer")

try:
    tr.run(fail, 2)
except tr.WorkerFailedError as error:
    print(error)
""",
]


def described():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "torch" in sys.modules


def test_results_come_by_rank(capfd):
    def work(first, *, second):
        print("line of", os.environ["RANK"])
        return described(), first + second

    assert tr.run(work, 3, args=(1,), kwargs={"second": 2}) == [((rank, 3, False), 3) for rank in range(3)]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{rank}] line of {rank}" for rank in range(3)]


def test_a_function_of_a_module_finds_the_import_path_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_caller.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import module_of_the_caller

    assert tr.run(module_of_the_caller.twice, 2, args=("ab",)) == ["abab", "abab"]


def test_the_ranks_are_one_group():
    def summed(value):
        import torch

        import totalreduce as tr

        torch.set_num_threads(1)
        with tr.init() as group:
            tensor = torch.full((3,), value * (1.0 + group.rank))
            group.allreduce(tensor).wait()
            return tensor.tolist()

    assert tr.run(summed, 2, args=(10.0,)) == [[30.0] * 3] * 2


def test_an_error_has_the_rank_and_the_lines_of_the_function():
    def fails():
        if os.environ["RANK"] == "1":
            raise ValueError("the line of the user")

    with pytest.raises(tr.WorkerFailedError) as caught:
        tr.run(fails, 2)
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert str(error).splitlines()[0] == "rank 1 failed: ValueError: the line of the user"
    lines = error.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith(", in fails")  # no frame of the library comes first
    assert lines[2].strip() == 'raise ValueError("the line of the user")'


@pytest.mark.parametrize(
    ("end", "message", "exit_code"),
    [
        (lambda: sys.exit(3), "rank 0 failed: exit code 3", 3),
        (lambda: os._exit(0), "rank 0 failed: its process has ended (exit code 0) before the function returned", 0),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "rank 0 failed: killed by SIGSEGV", 139),
        (threading.Lock, "rank 0 failed: TypeError: cannot pickle '_thread.lock' object", 1),
    ],
    ids=["exit", "silent exit", "signal", "result"],
)
def test_workers_that_return_nothing(end, message, exit_code):
    with pytest.raises(tr.WorkerFailedError) as caught:
        tr.run(end, 1)
    assert str(caught.value).splitlines()[0] == message
    assert caught.value.exit_code == exit_code


def test_a_time_out_ends_the_workers():
    with pytest.raises(tr.DeadlineExceededError, match=r"has not returned on all ranks within 0.3 s \(timeout_s\)"):
        tr.run(signal.pause, 2, timeout_s=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.py", 2), "takes a function and a number of workers, not 'train.py'"),
        ((len, 0), "the number of workers must be at least 1, not 0"),
        ((len, "2"), "the number of workers must be a whole number, not '2'"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(tr.ConfigurationError, match=message):
        tr.run(*arguments)


def test_what_cannot_be_copied_is_named():
    lock = threading.Lock()

    def train():
        return lock

    with pytest.raises(tr.ConfigurationError, match=r"train, its arguments, or a global .*lock.*within the function"):
        tr.run(train, 2)


INTERRUPTED = """
import os, signal, sys, time
import totalreduce as tr

def wait(folder):
    open(os.path.join(folder, os.environ["RANK"]), "w").write(str(os.getpid()))
    signal.pause()

try:
    tr.run(wait, 2, args=(sys.argv[1],))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interruption_ends_the_workers(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("interrupted\n", 0)
    for file in files:
        assert not Path(f"/proc/{file.read_text()}").exists()


@pytest.mark.timeout(120)
# Jupyter's client finds its loop of events by a deprecated function.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_functions_of_the_cells_of_a_notebook(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in NOTEBOOK])
    nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    first, second = (
        "".join(output["text"] for output in cell["outputs"] if output["name"] == "stdout") for cell in notebook.cells
    )
    *printed, result = first.splitlines()
    assert sorted(printed) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert result == "[3, 13]"
    assert second.splitlines()[0] == "rank 1 failed: KeyError: 'no such layer'"
    assert '    raise KeyError("no such layer")' in second.splitlines()  # the line of the cell, which no file has
