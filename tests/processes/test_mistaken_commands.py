"""Mistakes in commands and in the environment: the first line of the error says what is wrong, and what to do.

``docs/mistakes.md`` has the same lists, and a test compares them.
"""

import re
import socket
import subprocess
import sys

import pytest
from pages import quoted, table_below

import totalreduce as tr
from totalreduce.cli.main import main

#: The mistake as the page shows it, and the first line of standard error; "…" stands for any text.
COMMANDS = [
    ("totalreduce train.py", "No such command 'train.py'. To start a script: totalreduce run train.py."),
    ("totalreduce rnu train.py", "No such command 'rnu'. Did you mean 'run'?"),
    ("totalreduce run -n 2", "Missing argument 'script'."),
    ("totalreduce run -n 2 trian.py", "no such file: trian.py (did you mean 'train.py'?)."),
    ("totalreduce run -n 2 folder", "folder is a folder without a __main__.py: name the script in it"),
    ("totalreduce run -n 2 job.sh", "job.sh is no Python script: start it with --no-python, as ./job.sh"),
    ("totalreduce run -n 2 python train.py",
     "python is no Python script: leave it out, train.py is started with the Python of totalreduce. To …"),
    ("totalreduce run -m train.py", "-m takes the name of a module, not of a file: totalreduce run train.py"),
    ("totalreduce run -n two train.py", "Invalid value for '-n' / '--num-workers': …"),
    ("totalreduce run -n 0 train.py", "Invalid value for '-n' / '--num-workers': …"),
    ("totalreduce run --num-worker 2 train.py", "No such option: --num-worker …--num-workers…"),
    ("totalreduce run --lr 0.1 train.py", "No such option: --lr…. An option of the script comes after the script."),
    ("totalreduce run --on-loss replce train.py", "Invalid value for '--on-loss': …'replce' is not one of …"),
    ("totalreduce run -H node0:x train.py", "--hosts: 'node0:x' is no host with a number of slots, such as node0:4"),
    ("totalreduce run --hosts-file hosts train.py",
     "hosts, line 2: 'node1 four' is no host with a number of slots. Write node0:4 or node0 slots=4"),
    ("totalreduce run --emulate-hosts 2 --emulate-rate 1gb train.py",
     "a rate is a number with kbit, mbit or gbit, such as 1gbit, not '1gb'"),
    ("totalreduce run -H node0:2 --emulate-hosts 2 train.py",
     "a run has emulated hosts (--emulate-hosts) or a list of hosts, and not both"),
    ("totalreduce bench alreduce", "No such command 'alreduce'. Did you mean 'allreduce'?"),
]  # fmt: skip

#: The same for variables of the environment, with which rank 1 of 2 ranks calls ``tr.init()``.
VARIABLES = [
    ("RANK=2", "RANK=2 must be smaller than WORLD_SIZE=2"),
    ("WORLD_SIZE=two", "WORLD_SIZE='two' is not a number of 0 or more"),
    ("MASTER_PORT=99999", "MASTER_PORT=99999 is not a port from 1 to 65535"),
    ("MASTER_ADDR=127.0.0.2", "rank 1 cannot reach the store at 127.0.0.2:…: nobody listens at port … of 127.0.0.2"),
    ("MASTER_ADDR=nod0", "rank 1 cannot reach the store at nod0:…: this host does not know the name 'nod0'"),
    ("RANK=0", "rank 0 cannot serve the store at 127.0.0.1:…: another program uses port … of this host"),
    ("TOTALREDUCE_TIMEOUT_S=soon", "TOTALREDUCE_TIMEOUT_S='soon' is not a positive number of seconds"),
    ("TOTALREDUCE_LOG=dbug", "TOTALREDUCE_LOG='dbug' is none of debug, info, warning, error (did you mean 'debug'?)"),
]


def test_without_the_package_of_benchmarks_an_error_and_the_help_say_how_to_get_it():
    """``totalreduce`` with no entry points, as from a wheel alone."""
    program = (
        "import importlib.metadata as m, sys; m.entry_points = lambda **_: []; "
        "from totalreduce.cli.main import main; main(sys.argv[1:])"
    )
    sentence = "are in a second package: `pip install ./benchmarks` in a copy of the repository adds them."
    for words, code in (["bench", "faults"], 2), (["bench", "--help"], 0):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert sentence in " ".join((done.stdout + done.stderr).split())


def matches(first_line, text):
    return re.match(".*".join(re.escape(part) for part in first_line.split("…")), text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the commands are given."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("rates = {}\nrate = rates['lr']\n")
    (tmp_path / "job.sh").write_text("python train.py\n")
    (tmp_path / "hosts").write_text("node0:4\nnode1 four\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("command", "first_line"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_the_first_line_of_a_command_says_what_is_wrong(command, first_line, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(command.split()[1:])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert matches(f"totalreduce: {first_line}", said[0]), said


def test_a_command_without_a_subcommand_shows_its_help(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench"])
    assert "Usage:" in capsys.readouterr().out


def test_a_command_that_ends_by_a_code_keeps_it(folder, capsys):
    """The launcher ends with the code of the worker that failed."""
    (folder / "train.py").write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(SystemExit, match="7"):
        main(["run", "train.py"])
    assert "rank 0 failed first: exit code 7" in capsys.readouterr().err


def test_the_summary_of_a_failed_run_begins_with_the_users_own_line(folder):
    command = [sys.executable, "-m", "totalreduce", "run", "-n", "2", "train.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    notes = [line for line in ended.stderr.splitlines() if line.startswith("totalreduce: ") and "OMP_NUM" not in line]
    assert re.match(
        r"totalreduce: rank(s 0 and 1| \d) failed first at train.py:2 \(rate = rates\['lr'\]\): KeyError: 'lr'",
        notes[0],
    ), ended.stderr


@pytest.mark.parametrize(("variable", "first_line"), VARIABLES, ids=[variable for variable, _ in VARIABLES])
def test_the_first_line_of_init_says_which_variable_is_wrong(variable, first_line, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        usual = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**usual, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(*variable.split("="))
        if variable == "MASTER_ADDR=nod0":
            unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(unknown))
        timeout_s = None if variable.startswith("TOTALREDUCE_TIMEOUT_S") else 0.3
        with pytest.raises(tr.TotalReduceError) as caught:
            tr.init(timeout_s=timeout_s)
    assert matches(first_line, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("heading", "mistakes"),
    [("In a command", COMMANDS), ("In the environment", VARIABLES)],
    ids=["command", "environment"],
)
def test_the_page_has_these_mistakes(heading, mistakes):
    rows = table_below("docs/mistakes.md", heading)
    assert [row[:2] for row in rows] == [(quoted(mistake), quoted(first_line)) for mistake, first_line in mistakes]
    assert all(instead for *_, instead in rows)
