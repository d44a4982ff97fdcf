"""``totalreduce run`` with real processes: output, failures, signals, nothing left behind."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shells import fake_shell

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.version import VERSION
from totalreduce.launch import workers
from totalreduce.launch.ending import Escalation
from totalreduce.launch.local import run_workers
from totalreduce.launch.programs import send_to_program

FOREIGN = ("TOTALREDUCE_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "OMP_NUM")


def _heed_signals():
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def environment():
    return {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}


@pytest.fixture
def launcher(environment):
    """Starts ``totalreduce run`` with its output in pipes; whatever remains at the end is killed."""
    started = []

    def start(*arguments, **extra):
        process = subprocess.Popen(
            [sys.executable, "-m", "totalreduce", "run", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | extra,
            # A shell that starts the tests in the background makes them ignore SIGINT, nohup SIGHUP.
            preexec_fn=_heed_signals,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "worker.py"
        path.write_text(f"import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
        return path

    return write


def finish(process, timeout_s=30):
    output, errors = process.communicate(timeout=timeout_s)
    return process.returncode, output, errors


def read_lines(process, count):
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def is_gone(pid, timeout_s=10.0):
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor)):
        return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_every_line_carries_its_rank_and_stays_on_its_stream(launcher, script):
    path = script("print('out', sys.argv[1:], flush=True)\nprint('err', file=sys.stderr)")
    code, output, errors = finish(launcher("-n", 3, path, "-n", "5", "--output", "x", "--", "--help"))
    assert code == 0
    arguments = ["-n", "5", "--output", "x", "--", "--help"]
    assert sorted(output.splitlines()) == [f"[{rank}] out {arguments}" for rank in range(3)]
    assert sorted(line for line in errors.splitlines() if line[0] == "[") == ["[0] err", "[1] err", "[2] err"]
    assert errors.count("OMP_NUM_THREADS=") == 1


def test_a_prompt_is_shown_before_its_line_ends(launcher, script, tmp_path):
    path = script(
        f"""
sys.stdout.write("answer? "); sys.stdout.flush()
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.02)
print("yes")"""
    )
    process = launcher("-n", 1, path)
    assert process.stdout.read(12) == "[0] answer? "
    (tmp_path / "go").touch()
    assert finish(process)[:2] == (0, "yes\n")


def test_worker_variables(script, environment):
    names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
    ]
    names += [
        "TOTALREDUCE_JOB_ID",
        "TOTALREDUCE_JOB_KEY",
        "OMP_NUM_THREADS",
        "THP_MEM_ALLOC_ENABLE",
        "TORCHELASTIC_RUN_ID",
        "SECRET_X",
    ]
    names += ["TOTALREDUCE_RANK"]
    path = script(f"import json; print(json.dumps([os.environ.get(name) for name in {names}]))")
    stale = {"TORCHELASTIC_RUN_ID": "old", "TOTALREDUCE_RANK": "7", "RANK": "9", "SECRET_X": "kept"}
    result = run_workers([sys.executable, str(path)], num_workers=2, environment=environment | stale, output="capture")
    first, second = (dict(zip(names, json.loads(text), strict=True)) for text in result.output)
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
    assert (first["TORCHELASTIC_RUN_ID"], first["TOTALREDUCE_RANK"], first["SECRET_X"]) == (
        None,
        None,
        "kept",
    )
    assert re.fullmatch("[0-9a-f]{64}", first["TOTALREDUCE_JOB_KEY"])
    assert int(first["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert first["THP_MEM_ALLOC_ENABLE"] == "1"


def test_the_users_key_is_kept_and_no_key_is_on_a_command_line(script, environment):
    path = script(
        """
key = os.environ["TOTALREDUCE_JOB_KEY"].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: words = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError: continue
    assert key not in words, words
print(key.decode())"""
    )
    command = [sys.executable, str(path)]
    made = run_workers(command, num_workers=1, environment=environment, output="capture")
    assert made.exit_code == 0, made.errors
    given = environment | {"TOTALREDUCE_JOB_KEY": "my own key"}
    kept = run_workers(command, num_workers=1, environment=given, output="capture")
    assert kept.output == ["my own key\n"]


def test_the_first_failure_is_named_and_its_code_passed_on(launcher, script):
    path = script(
        """
if rank == 2:
    print("no such layer", file=sys.stderr); sys.exit(3)
signal.pause()"""
    )
    code, _, errors = finish(launcher("-n", 3, path))
    assert code == 3
    assert "rank 2 failed first: exit code 3" in errors
    assert "totalreduce:   no such layer" in errors
    assert "rank 0 killed by SIGTERM; rank 1 killed by SIGTERM" in errors


def test_the_first_line_of_the_end_has_the_error_however_much_is_written_after_it(launcher, script):
    """Neither the errors of the other ranks, nor what the rank writes while it ends, hide it."""
    path = script(
        """
import atexit
atexit.register(lambda: [print("cleanup", number, file=sys.stderr) for number in range(50)])
if rank == 1: raise ValueError("bad data")
time.sleep(0.2)
raise RuntimeError("rank 1 is lost: it has closed the group")"""
    )
    code, _, errors = finish(launcher("-n", 3, path))
    assert code == 1
    place = rf'{re.escape(str(path))}:\d+ \(if rank == 1: raise ValueError\("bad data"\)\)'
    assert re.search(
        rf"^totalreduce: rank 1 failed first at {place}: ValueError: bad data\n"
        rf"totalreduce:   {place}\n"
        r"totalreduce:   exit code 1 after \d+\.\d s$",
        errors,
        re.M,
    )


def test_a_worker_that_the_kernel_has_killed_for_want_of_memory(script, monkeypatch):
    path = script("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)")
    counts = iter([7, 7, 8])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(counts))
    result = run_workers([sys.executable, str(path)], num_workers=2, output="capture", escalation=Escalation(0.0, 5.0))
    assert result.first_failure.describe() == "killed by SIGKILL, probably by the kernel, because memory was short"
    assert [worker.is_out_of_memory for worker in result.workers] == [False, True]
    assert [worker.was_stopped for worker in result.workers] == [True, False]


def test_the_count_of_processes_that_the_kernel_has_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_VMSTAT", tmp_path / "vmstat")
    assert workers.oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 12\npgfault 3\n")
    assert workers.oom_kills() == 12


def test_with_recovery_each_loss_is_said_with_its_error_and_the_end_has_that_of_the_last_process(launcher, script):
    path = script("raise ValueError(f\"bad data {os.environ['TOTALREDUCE_INCARNATION']}\")")
    code, _, errors = finish(launcher("-n", 1, "--on-loss", "replace", "--restarts", 1, path))
    said = [line.removeprefix("totalreduce: ") for line in errors.splitlines() if line.startswith("totalreduce: ")]
    assert code == 1
    assert said[:3] == [
        "rank 0 failed with exit code 1: ValueError: bad data 0",
        "rank 0 is started again (0 restarts left)",
        "rank 0 failed with exit code 1: ValueError: bad data 1",
    ]
    source = """raise ValueError(f"bad data {os.environ['TOTALREDUCE_INCARNATION']}")"""
    place = next(line for line in said if "failed first" in line)
    assert re.fullmatch(rf"rank 0 failed first at .*:\d+ \({re.escape(source)}\): ValueError: bad data 1", place)
    assert not any("bad data 0" in line for line in said[3:]), "that was another process"


@pytest.mark.parametrize(("bad_ranks", "num_restarts"), [("1", 1), ("01", 0)])
def test_an_error_of_the_program_costs_at_most_one_restart(launcher, script, bad_ranks, num_restarts):
    """A second start, or all ranks, fail at the same place by the same error: more starts would do so, too."""
    path = script(
        f"""
def step(): raise ValueError("bad data of a rank %d" % rank)
if str(rank) in "{bad_ranks}": step()
signal.pause()"""
    )
    code, _, errors = finish(launcher("-n", 2, "--on-loss", "replace", path))
    assert code == 1
    who = "ranks 0 and 1" if num_restarts == 0 else "rank 1"
    assert f"totalreduce: {who} failed first at {path}:" in errors
    assert "RecoveryError" not in errors
    assert errors.count("is started again") == num_restarts
    assert errors.count("That is the program's error: ") == 1


def test_a_killed_worker_and_survivors_that_print_their_own_error(launcher, script, tmp_path):
    path = script(
        f"""
dying = {str(tmp_path / "dying")!r}
if rank == 1:
    open(dying, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(dying): time.sleep(0.01)
time.sleep(2)
print("rank 1 is lost", file=sys.stderr); sys.exit(1)"""
    )
    summary = tmp_path / "summary.json"
    code, _, errors = finish(launcher("-n", 3, "--json", summary, path))
    assert code == 137
    assert "rank 1 failed first: killed by SIGKILL" in errors
    assert {"[0] rank 1 is lost", "[2] rank 1 is lost"} <= set(errors.splitlines())
    document = json.loads(summary.read_text())
    assert [worker["exit_code"] for worker in document["workers"]] == [1, 137, 1]
    assert document["first_failure"]["rank"] == 1
    assert document["first_failure"]["signal"] == "SIGKILL"
    assert document["workers"][0]["seconds"] >= max(0.5, document["workers"][1]["seconds"])
    assert (document["exit_code"], document["world_size"]) == (137, 3)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(script, tmp_path):
    path = script(
        f"""
ready = {str(tmp_path / "ready")!r}
if rank == 0:
    while not os.path.exists(ready): time.sleep(0.01)
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(ready, "w").close()
while True: signal.pause()"""
    )
    begin = time.monotonic()
    result = run_workers([sys.executable, path], num_workers=2, output="capture", escalation=Escalation(0.5, 0.5))
    assert (result.exit_code, result.workers[1].signal) == (5, "SIGKILL")
    assert 1.0 <= time.monotonic() - begin < 20.0


READY = "print(os.getpid(), flush=True)\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_stops_the_workers(launcher, script, number, code):
    process = launcher("-n", 2, script(READY + "signal.pause()"))
    pids = [int(line.split()[1]) for line in read_lines(process, 2)]
    process.send_signal(number)
    result, _, errors = finish(process)
    assert result == code
    assert f"stopped by {number.name}" in errors
    assert "failed first" not in errors
    assert all(is_gone(pid) for pid in pids)


def test_a_signal_of_a_batch_system_reaches_the_workers_and_the_run_goes_on(launcher, script):
    # A blocked signal is kept until sigwait() takes it; signal.pause() would miss one that comes before it.
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    take = "for _ in range(2): signal.sigwait([signal.SIGUSR1]); print('told', flush=True)\n"
    process = launcher("-n", 2, script(block + READY + take + "sys.exit(rank)"))
    read_lines(process, 2)
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        assert sorted(read_lines(process, 2)) == ["[0] told", "[1] told"]
    code, _, errors = finish(process)
    assert code == 1
    assert "stopped by" not in errors


#: A program with a child of every kind, which says after each signal which of them still answer.
WITH_CHILDREN = """
import multiprocessing

def echo(connection):
    for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, signal.SIG_DFL)
    while True: connection.send(connection.recv())

def answers(connection):
    try: connection.send("?"); return connection.recv() == "?"
    except (EOFError, ConnectionError): return False

if __name__ == "__main__":
    told, children, pids = [], {}, [os.getpid()]
    for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, lambda number, _: told.append(number))
    for kind in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(kind)
        children[kind], theirs = context.Pipe()
        child = context.Process(target=echo, args=(theirs,), daemon=True); child.start(); theirs.close()
        assert answers(children[kind]); pids.append(child.pid)
    print(*pids, flush=True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        while number not in told: time.sleep(0.01)
        print(signal.Signals(number).name, [kind for kind in children if answers(children[kind])], flush=True)
    sys.exit(75)"""


can_emulate = os.geteuid() == 0 and shutil.which("tc", path=f"{os.defpath}:/usr/sbin:/sbin") is not None
needs_hosts = pytest.mark.skipif(not can_emulate, reason="emulated hosts need root and iproute2")


@pytest.mark.parametrize(
    "started",
    ["by the launcher", "by a shell script", "on another host", pytest.param("in an emulated host", marks=needs_hosts)],
)
def test_signals_reach_the_program_and_not_the_processes_that_it_has_started(launcher, script, tmp_path, started):
    """Workers of a ``DataLoader`` would die by them: those that are spawned by SIGUSR1, and forked ones by SIGTERM."""
    path, options = script(WITH_CHILDREN), []
    if started == "by a shell script":
        shell = tmp_path / "train.sh"
        shell.write_text(f"#!/bin/sh\ntrap 'echo trapped' USR1\n{sys.executable} {path}\nexit $?\n")
        shell.chmod(0o755)
        path, options = shell, ["--no-python"]
    elif started == "on another host":
        options = ["-H", "127.0.0.2:1", "--remote-shell", *fake_shell(tmp_path)]
    elif started == "in an emulated host":
        options = ["--emulate-hosts", 1]
    process = launcher("-n", 1, *options, path)
    pids = [int(pid) for pid in read_lines(process, 1)[0].split()[1:]]
    for name in ("SIGUSR1", "SIGTERM"):
        process.send_signal(signal.Signals[name])
        assert read_lines(process, 1) == [f"[0] {name} ['fork', 'spawn', 'forkserver']"]
    code, output, _ = finish(process)
    # A shell runs its trap when the program that it waits for has ended.
    assert (code, output) == (143, "[0] trapped\n" if started == "by a shell script" else "")
    assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)


def test_all_processes_of_a_group_without_a_python_process_get_a_signal():
    """As if a terminal had sent it: the shell alone would leave what it waits for behind."""
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        child = int(shell.stdout.readline())
        send_to_program(shell.pid, signal.SIGUSR1)
        assert shell.wait(20) == -signal.SIGUSR1
        assert is_gone(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate(timeout=20)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("started", ["here", "on another host"])
def test_a_suspended_launcher_suspends_all_processes_of_its_workers(launcher, script, tmp_path, started):
    path = script(
        f"""
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid, flush=True)
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.02)"""
    )
    options = [] if started == "here" else ["-H", "127.0.0.2:1", "--remote-shell", *fake_shell(tmp_path)]
    process = launcher("-n", 1, *options, path)
    pids = [process.pid, *map(int, read_lines(process, 1)[0].split()[1:])]
    for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
        process.send_signal(number)
        give_up_at = time.monotonic() + 20
        while any((state_of(pid) == "T") != stopped for pid in pids):
            assert time.monotonic() < give_up_at, [state_of(pid) for pid in pids]
            time.sleep(0.01)
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0


def test_workers_may_save_their_work_on_ctrl_c(launcher, script):
    body = "print(os.getpid(), flush=True)\n    while True: time.sleep(0.05)"
    path = script(f"try:\n    {body}\nexcept KeyboardInterrupt: print('saved'); sys.exit(0)")
    process = launcher("-n", 2, path)
    read_lines(process, 2)
    process.send_signal(signal.SIGINT)
    code, output, _ = finish(process)
    assert code == 130
    assert sorted(output.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_second_ctrl_c_kills_at_once(launcher, script):
    handler = "lambda *_: os.write(1, b'no\\n')"  # print() must not be called within print()
    ignore = f"for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, {handler})\n"
    process = launcher("-n", 1, "--grace", 60, script(ignore + READY + "while True: time.sleep(0.05)"))
    pid = int(read_lines(process, 1)[0].split()[1])
    process.send_signal(signal.SIGINT)
    assert read_lines(process, 1) == ["[0] no"]
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert time.monotonic() - begin < 10
    assert is_gone(pid)


def test_a_worker_that_a_real_time_signal_ends_has_failed(script):
    """Python has names for the first and the last of these signals only."""
    path = script("os.kill(os.getpid(), signal.SIGRTMIN + 3)")
    number = signal.SIGRTMIN + 3
    result = run_workers([sys.executable, str(path)], num_workers=1, output="capture")
    assert (result.exit_code, result.first_failure.signal) == (128 + number, f"signal {number}")
    assert result.first_failure.describe() == f"killed by signal {number}"


def test_what_a_worker_left_in_its_group_is_killed_and_not_waited_for(script):
    path = script("child = subprocess.Popen(['sleep', '1000'])\nprint(child.pid)")
    begin = time.monotonic()
    result = run_workers([sys.executable, path], num_workers=1, output="capture")
    assert (result.exit_code, time.monotonic() - begin < 20) == (0, True)
    assert is_gone(int(result.output[0]))


def test_a_daemon_that_holds_the_pipe_is_not_waited_for_and_lives_on(script):
    path = script("child = subprocess.Popen(['sleep', '30'], start_new_session=True)\nprint(child.pid)")
    begin = time.monotonic()
    result = run_workers([sys.executable, path], num_workers=1, output="capture")
    assert time.monotonic() - begin < 20
    daemon = int(result.output[0])
    os.kill(daemon, 0)
    os.kill(daemon, signal.SIGKILL)


def test_nothing_survives_a_sigkilled_launcher(launcher, script):
    path = script(
        """
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
signal.pause()"""
    )
    process = launcher("-n", 2, path)
    pids = [int(word) for line in read_lines(process, 2) for word in line.split()[1:]]
    assert len(pids) == 4
    process.kill()
    assert all(is_gone(pid) for pid in pids)


def test_a_killed_guard_does_no_harm(launcher, script):
    process = launcher("-n", 1, script(READY + "signal.pause()"))
    worker = int(read_lines(process, 1)[0].split()[1])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (guard,) = (int(pid) for pid in children if int(pid) != worker)
    os.kill(guard, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert is_gone(worker)


def test_output_of_rank_0_alone(launcher, script):
    path = script("print('hello from', rank)\nif rank: print('quiet', file=sys.stderr); sys.exit(4)\ntime.sleep(0.3)")
    code, output, errors = finish(launcher("-n", 2, "--output", "rank0", path))
    assert (code, output) == (4, "hello from 0\n")
    assert "rank 1 failed first" in errors
    assert "totalreduce:   quiet" in errors


def test_output_in_files(launcher, script, tmp_path):
    path = script("print('out', rank, flush=True)\nprint('err', file=sys.stderr)\nif rank: sys.exit(2)")
    code, output, errors = finish(launcher("-n", 2, "--output", tmp_path / "logs", path))
    assert (code, output) == (2, "")
    assert (tmp_path / "logs" / "rank0.log").read_text() == "out 0\nerr\n"
    assert (tmp_path / "logs" / "rank1.log").read_text() == "out 1\nerr\n"
    assert "totalreduce:   err" in errors


def test_a_timeout_ends_the_run(script):
    result = run_workers([sys.executable, script("signal.pause()")], num_workers=2, output="capture", timeout_s=0.3)
    assert (result.exit_code, result.timed_out, result.first_failure) == (124, True, None)


def test_output_of_many_bytes_is_complete(script):
    result = run_workers([sys.executable, script("print('x' * 3_000_000)")], num_workers=2, output="capture")
    assert [len(text) for text in result.output] == [3_000_001] * 2


def test_modules_and_executables(launcher, tmp_path, environment):
    (tmp_path / "job.py").write_text("import sys; print('module', sys.argv[1:])")
    module = launcher("-n", 1, "-m", "job", "-m", PYTHONPATH=f"{tmp_path}:{environment.get('PYTHONPATH', '')}")
    assert finish(module)[:2] == (0, "[0] module ['-m']\n")
    program = launcher("-n", 1, "--no-python", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert finish(program)[:2] == (0, "[0] 0 of 1\n")


def test_runs_outside_the_main_thread(script):
    results = []
    command = [sys.executable, str(script("print(rank)"))]
    thread = threading.Thread(target=lambda: results.append(run_workers(command, num_workers=2, output="capture")))
    thread.start()
    thread.join(30)
    assert results[0].output == ["0\n", "1\n"]


def test_mistakes_are_one_line(launcher):
    code, _, errors = finish(launcher("-n", 2, "absent.py"))
    assert (code, errors.count("\n")) == (2, 1)
    assert "no such file: absent.py" in errors
    code, _, errors = finish(launcher("-n", 2, "absent.py", TOTALREDUCE_DEBUG="1"))
    assert "Traceback" in errors
    with pytest.raises(ConfigurationError, match="at least 1"):
        run_workers(["true"], num_workers=0)
    with pytest.raises(ConfigurationError, match="cannot start '/absent'"):
        run_workers(["/absent"], num_workers=2, output="capture")


@pytest.mark.parametrize("limit", [7, 12])
def test_too_many_open_files_of_the_launcher_are_one_line_that_names_the_limit(environment, script, limit):
    command = f"ulimit -n {limit}; exec {sys.executable} -m totalreduce run -n 4 {script('')}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert f"too many open files (EMFILE): this process may have {limit} (RLIMIT_NOFILE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "bench", "demo", "doctor", "timeline"])
def test_the_launcher_does_without_torch(command):
    code = f"import sys; from totalreduce.cli.main import build; build(['{command}']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "False\n"


def test_version():
    done = subprocess.run([sys.executable, "-m", "totalreduce", "--version"], capture_output=True, timeout=30)
    assert done.stdout.decode() == f"totalreduce {VERSION}\n"


@pytest.mark.parametrize(
    "late",
    [
        ["-n2"],
        *(
            pytest.param(late, marks=pytest.mark.slow)
            for late in (["-n", "2"], ["--num-workers=2"], ["--emulate-hosts", "2"])
        ),
    ],
)
def test_options_of_the_launcher_after_the_script_are_noticed(launcher, script, late):
    path = script("print(len(sys.argv), os.environ['WORLD_SIZE'])")
    code, _, errors = finish(launcher(path, *late))
    assert code == 0
    assert f"started one worker: {late[0]!r} comes after {path} and belongs to the script" in errors
    _, _, errors = finish(launcher("-n", 1, path, *late))
    assert "started one worker" not in errors


def test_a_rank_that_failed_first_but_ended_last_is_named(launcher, script):
    path = script(
        """
if rank == 0:
    sys.exit("totalreduce.foundation.errors.PeerLost: rank 1 is lost: it has closed the group after ValueError")
time.sleep(0.5)
sys.exit("ValueError: bad data")"""
    )
    code, _, errors = finish(launcher("-n", 2, path))
    assert code == 1
    assert "rank 1 failed first: exit code 1" in errors
    assert "totalreduce:   ValueError: bad data" in errors


def test_a_launcher_on_each_machine_as_with_torchrun(launcher, script):
    path = script(
        "names = 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT', "
        "'TOTALREDUCE_JOB_ID'\nprint(*(os.environ[name] for name in names), 'TOTALREDUCE_JOB_KEY' in os.environ)"
    )
    endpoint = "127.0.0.1:21999"  # nothing listens: the script makes no group
    jobs = [
        # With underscores, as many scripts for torchrun have them.
        launcher("--nproc_per_node=2", "--nnodes", 2, "--node_rank", number, "--rdzv-endpoint", endpoint, path)
        for number in range(2)
    ]
    for number, job in enumerate(jobs):
        code, output, errors = finish(job)
        assert code == 0, errors
        rest = f"{number} 127.0.0.1 21999 run@{endpoint} False"
        assert sorted(output.splitlines()) == [f"[{2 * number + local}] 4 {local} 2 {rest}" for local in range(2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-n", 2, "--nproc-per-node", 2), "-n and --nproc-per-node exclude each other"),
        (("--nproc-per-node", "gpu"), "--nproc-per-node is a number of workers, at least 1, not 'gpu'"),
        (
            ("-n", 4, "--nnodes", 2, "--node-rank", 0, "--master-addr", "a"),
            "write --nproc-per-node instead",
        ),
        (("--rdzv-endpoint", "a:1", "--on-loss", "replace"), "--on-loss does not go with --nnodes"),
    ],
)
def test_mistakes_with_options_of_torchrun(launcher, script, options, message):
    code, _, errors = finish(launcher(*options, script("pass")))
    assert code == 2
    assert message in errors
