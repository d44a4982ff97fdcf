"""``totalreduce run`` on several hosts: a shell that only drops the host, and an sshd on loopback."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shells import Sshd, fake_shell
from tests.processes.recovery_runs import Run

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.ending import Escalation
from totalreduce.launch.hosts import HostPool, parse_hosts
from totalreduce.launch.local import run_workers
from totalreduce.launch.placement import HostOptions, Placement
from totalreduce.launch.remote import RemoteWorker
from totalreduce.launch.workers import Start, free_port
from totalreduce.observe.board import Board
from totalreduce.observe.figures import RankFigures


@pytest.fixture
def shell(tmp_path):
    folder = tmp_path / "shell"
    folder.mkdir()
    return fake_shell(folder)


@pytest.fixture
def sshd(tmp_path):
    folder = tmp_path / "sshd"
    folder.mkdir()
    made = Sshd(folder, free_port())
    yield made
    made.close()


@pytest.fixture
def launched():
    """Starts ``totalreduce run``; whatever remains at the end is killed."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "totalreduce", "run", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts the tests in the background makes them ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def listed(text, shell, **options):
    return HostOptions(hosts=parse_hosts(text), shell=shell, **options)


def of_script(tmp_path, text):
    path = tmp_path / "worker.py"
    path.write_text(f"import json, os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return [sys.executable, str(path)]


def await_end(pids, timeout_s=20.0):
    give_up_at = time.monotonic() + timeout_s
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < give_up_at, f"{running} still run"
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------------------------------------------- without an sshd


def test_workers_of_other_hosts_have_their_variables_and_the_key_is_on_no_command_line(tmp_path, shell):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "HOME", "MINE"]
    argv = of_script(
        tmp_path,
        f"""
key = os.environ["TOTALREDUCE_JOB_KEY"].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: words = open(f"/proc/{{pid}}/cmdline", "rb").read()
    except OSError: continue
    assert key not in words, words
print(json.dumps([os.environ.get(name) for name in {names}]), os.getcwd())
print("error", rank, file=sys.stderr)""",
    )
    hosts = listed("127.0.0.2:2,127.0.0.3:4,localhost:1", shell)
    environment = {**os.environ, "MINE": "x" * 100_000, "HOME": "/home/of-launcher"}
    result = run_workers(argv, num_workers=7, where=hosts, output="capture", environment=environment, timeout_s=60.0)
    assert result.exit_code == 0, result.errors
    rows = [json.loads(text.rpartition(" ")[0]) for text in result.output]
    assert [row[:5] for row in rows] == [
        *(["0", "7", "0", "2", "0"], ["1", "7", "1", "2", "0"], ["2", "7", "0", "4", "1"], ["3", "7", "1", "4", "1"]),
        *(["4", "7", "2", "4", "1"], ["5", "7", "3", "4", "1"], ["6", "7", "0", "1", "2"]),
    ]
    assert {row[5] for row in rows} == {"127.0.0.2"}, "rank 0's host"
    homes = ["/home/of-127.0.0.2"] * 2 + ["/home/of-127.0.0.3"] * 4 + ["/home/of-launcher"]
    assert [row[6] for row in rows] == homes
    assert {row[7] for row in rows} == {"x" * 100_000}
    assert {text.rpartition(" ")[2].strip() for text in result.output} == {os.getcwd()}
    assert result.errors == [f"error {rank}\n" for rank in range(7)]
    assert [worker.host for worker in result.workers] == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 4 + ["localhost"]


def test_a_folder_has_on_other_hosts_the_name_that_the_user_gave_it(tmp_path, shell, monkeypatch):
    """The folder behind a link, such as an automounted home, may have another name there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    argv = of_script(tmp_path, "print(os.environ['PWD'], os.path.samefile('.', os.environ['PWD']))")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PWD", str(tmp_path / "home"))
    result = run_workers(argv, num_workers=1, where=listed("127.0.0.2", shell), output="capture", timeout_s=60.0)
    assert (result.exit_code, result.output) == (0, [f"{tmp_path}/home True\n"]), result.errors


def test_exit_codes_signals_and_hosts_of_failures(tmp_path, shell, launched):
    argv = of_script(
        tmp_path, "time.sleep(float(sys.argv[1]) if sys.argv[1:] else rank * 9)\nos.kill(os.getpid(), signal.SIGSEGV)"
    )
    result = run_workers(
        argv,
        num_workers=2,
        where=listed("127.0.0.2,127.0.0.3", shell),
        output="capture",
        escalation=Escalation(0.1, 5.0),
    )
    assert (result.exit_code, result.first_failure.host, result.first_failure.signal) == (139, "127.0.0.2", "SIGSEGV")
    assert result.workers[1].signal == "SIGTERM"
    Path(shell[0]).with_name("down-127.0.0.3").touch()
    process = launched("-H", "127.0.0.2,127.0.0.3", "--remote-shell", shell[0], argv[1], "60")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 255
    assert "2 workers on 127.0.0.2:1, 127.0.0.3:1; they reach this host at 127.0.0.1 (route to 127.0.0.2" in errors
    assert "rank 1 on 127.0.0.3 failed first: exit code 255" in errors
    assert "totalreduce:   ssh: connect to host 127.0.0.3: No route to host" in errors


def test_mistakes_of_hosts_are_errors(tmp_path, shell):
    argv = of_script(tmp_path, "")
    with pytest.raises(ConfigurationError, match="5 workers need as many slots, and the hosts have 4"):
        run_workers(argv, num_workers=5, where=listed("a:2,b:2", shell))
    with pytest.raises(ConfigurationError, match="cannot start '/absent'"):
        run_workers(argv, num_workers=1, where=listed("127.0.0.2", ("/absent",)), output="capture")
    argv = ["/absent"]
    result = run_workers(argv, num_workers=1, where=listed("127.0.0.2", shell), output="capture")
    assert result.exit_code == 127
    assert "a worker cannot be started on" in result.errors[0]
    assert "cannot start '/absent'" in result.errors[0]


DAEMON = """
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
try:
    open(sys.argv[1] + f"/{rank}", "w").write(f"{os.getpid()} {child.pid}")
    while True: time.sleep(0.05)
except KeyboardInterrupt: print("saved", flush=True); sys.exit(0)
"""


def pids_of(folder, count, process):
    give_up_at = time.monotonic() + 60
    while True:
        files = [path.read_text().split() for path in folder.iterdir()]
        if len(files) == count and all(len(pids) == 2 for pids in files):
            return [int(pids[0]) for pids in files], [int(pids[1]) for pids in files]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_ctrl_c_reaches_the_workers_of_other_hosts(tmp_path, shell, launched):
    folder = tmp_path / "pids"
    folder.mkdir()
    argv = of_script(tmp_path, DAEMON)
    process = launched("-H", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", shell[0], argv[1], folder)
    workers, daemons = pids_of(folder, 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, sorted(output.splitlines())) == (130, ["[0] saved", "[1] saved"])
    await_end(workers)
    for daemon in daemons:  # as on one host: what a worker detaches lives on, unless the launcher is killed
        os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["shell", "sshd"])
def test_without_launcher_and_guard_nothing_runs_on_any_host(tmp_path, kind, request, launched):
    """The guard would find the processes, because the hosts of this test are this one."""
    made = request.getfixturevalue(kind)
    shell = made if kind == "shell" else made.shell
    folder = tmp_path / "pids"
    folder.mkdir()
    argv = of_script(tmp_path, DAEMON)
    process = launched("-H", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", " ".join(shell), argv[1], folder)
    workers, daemons = pids_of(folder, 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (guard,) = [int(pid) for pid in children if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guard, signal.SIGKILL)
    process.kill()
    await_end([*workers, *daemons])


def started_worker(tmp_path, shell, text, live="0"):
    command = of_script(tmp_path, text)
    environment = {**os.environ, "RANK": "0", "TOTALREDUCE_JOB_ID": "test", "TOTALREDUCE_LIVE": str(live)}
    options = {"host": "127.0.0.2", "shell": shell, "python": sys.executable, "num_local": 1}
    return RemoteWorker(Start(0, command, environment), **options)


def await_end_of(worker, each_time=lambda: None):
    """Read standard error byte by byte until a worker has ended; return what is shown of it."""
    errors, give_up_at = b"", time.monotonic() + 20
    os.set_blocking(worker.process.stderr.fileno(), False)
    while not worker.poll(time.monotonic()):
        assert time.monotonic() < give_up_at
        with contextlib.suppress(BlockingIOError):
            errors += worker.shown(os.read(worker.process.stderr.fileno(), 1), is_error=True)
        each_time()
        time.sleep(0.001)
    while data := os.read(worker.process.stderr.fileno(), 1):  # what the worker wrote just before its end
        errors += worker.shown(data, is_error=True)
    worker.finish(time.monotonic())
    worker.process.stdout.close()
    worker.process.stderr.close()
    return errors


def test_few_connections_to_a_host_are_on_the_way_at_the_same_time(tmp_path):
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\nexec sleep 1000\n")
    shell.chmod(0o755)
    hosts = listed("localhost:20,127.0.0.2:10,127.0.0.3:1", (str(shell),))
    common = {"TOTALREDUCE_JOB_ID": "test"}
    placement = Placement(HostPool(hosts.hosts), ["true"], common, num_local=1, options=hosts)
    for seat in range(31):
        placement.queue(seat)
    first = placement.take_startable()
    assert first == [*range(28), 30]
    assert placement.waiting == [28, 29]
    workers = [placement.start(seat, None, (subprocess.PIPE, subprocess.PIPE)) for seat in first[-3:]]
    assert placement.take_startable() == [28, 29]
    placement.waiting = [*range(20, 30)]
    assert placement.take_startable() == [*range(20, 26)], "two of 127.0.0.2 are on the way"
    assert placement.withdraw("127.0.0.2") == [26, 27, 28, 29]
    for worker in workers:
        worker.finish(time.monotonic())
        worker.process.stdout.close()
        worker.process.stderr.close()


def test_a_stopped_worker_of_another_host_is_killed_there(tmp_path, shell):
    worker = started_worker(tmp_path, shell, "os.kill(os.getpid(), signal.SIGSTOP)")

    def ask():
        if not worker.is_starting:
            assert not worker.end_if_stopped(), "the launcher does not know"

    await_end_of(worker, ask)
    assert (worker.result(()).signal, worker.has_lost_host) == ("SIGKILL", False)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("sys.exit(-1)", 1, None),  # 255 would mean that the connection is lost
        ("os.kill(os.getpid(), signal.SIGRTMIN + 2)", 128 + signal.SIGRTMIN + 2, f"signal {signal.SIGRTMIN + 2}"),
    ],
)
def test_the_end_of_a_program_is_no_end_of_the_connection(tmp_path, shell, text, code, name):
    worker = started_worker(tmp_path, shell, text)
    await_end_of(worker)
    assert (worker.result(()).exit_code, worker.result(()).signal, worker.has_lost_host) == (code, name, False)


def test_a_line_that_a_signal_handler_sends_while_another_one_is_written_is_whole(tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\nexec cat >{taken}\n")
    shell.chmod(0o755)
    worker = started_worker(tmp_path, (str(shell),), "")
    write, numbers = os.write, iter([signal.SIGUSR2, signal.SIGHUP])

    def write_a_part(descriptor, data):
        count = write(descriptor, data[:7])
        number = next(numbers, None)
        if number is not None:
            worker.send(number)  # as a signal handler would
        return count

    monkeypatch.setattr(os, "write", write_a_part)
    worker.send(signal.SIGUSR1)
    worker.poll(time.monotonic())
    worker.process.stdin.close()
    await_end_of(worker)
    lines = [json.loads(line) for line in taken.read_bytes().splitlines()]
    assert lines[1:] == [{"signal": number} for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)]


def test_the_word_that_a_worker_was_started_is_not_shown(tmp_path, shell):
    worker = started_worker(tmp_path, shell, "print('\\0', 'error', file=sys.stderr, flush=True); time.sleep(0.3)")
    assert await_end_of(worker) == b"\0 error\n"
    assert (worker.result(()).exit_code, worker.has_lost_host) == (0, False)


def test_figures_between_the_errors_of_a_worker_are_not_shown(tmp_path, shell):
    """A line of figures in the middle of an error; a word that is no document; one that never ends; zero bytes."""
    folder = tmp_path / "board"
    folder.mkdir()
    figures = RankFigures(
        **dict.fromkeys(("seat", "rank", "world_size", "pid", "epoch", "incarnation", "step"), 3),
        **dict.fromkeys(("step_s", "compute_s", "exposed_s", "since_step_s", "hidden_share"), 0.5),
        **dict.fromkeys(("bytes_sent", "bytes_received", "sent_per_s", "received_per_s"), 7),
        host="node3",
    ).encode()
    parts = [b"err", b"\0totalreduce: figures ", figures, b"\nor\0\0totalreduce: figures {}\n", b"\0totalreduce: fig\n"]
    endless = b"\0totalreduce: figures " + b"x" * 17_000
    worker = started_worker(tmp_path, shell, "signal.pause()", live=folder)
    worker.shown(b"\0totalreduce: started\n", is_error=True)
    data = b"".join(parts)
    shown = b"".join(worker.shown(data[at : at + 1], is_error=True) for at in range(len(data)))
    shown += worker.shown(endless, is_error=True)
    worker.finish(time.monotonic())
    worker.process.stdout.close()
    worker.process.stderr.close()
    assert shown == b"error\0\0totalreduce: fig\n" + endless
    assert [path.name for path in folder.iterdir()] == ["rank3.json"]
    assert Board(folder).read_figures()[3].figures.host == "node3"


@pytest.mark.parametrize("num_bytes", [0, 1 << 20], ids=["", "nor reads its output"])
def test_a_worker_ends_when_the_launcher_says_nothing_any_more(tmp_path, num_bytes):
    program = "import os, totalreduce.launch.remote as r; r._SILENCE_S = 2.0; os._exit(r.main())"
    command = of_script(
        tmp_path, f"print(os.getpid(), flush=True); print('x' * {num_bytes}, flush=True); signal.pause()"
    )
    order = {"command": command, "folder": "/", "environment": {"RANK": "0"}, "has_input": False, "num_local": 1}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as remote:
        remote.stdin.write(json.dumps({**order, "mark": "x" * 16}).encode() + b"\n")
        remote.stdin.flush()
        pid = int(remote.stdout.readline())
        assert remote.wait(20) == 255
        await_end([pid])


def test_the_output_of_a_worker_that_has_ended_is_complete_although_it_is_read_slowly(tmp_path):
    program = "import os, totalreduce.launch.remote as r; r._DRAIN_S = 0.05; os._exit(r.main())"
    command = of_script(tmp_path, "os.write(1, b'x' * 200_000 + b'end')")
    order = {"command": command, "folder": "/", "environment": {"RANK": "0"}, "has_input": False, "num_local": 1}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as remote:
        remote.stdin.write(json.dumps({**order, "mark": "x" * 16}).encode() + b"\n")
        remote.stdin.flush()
        output = b""
        while data := os.read(remote.stdout.fileno(), 4096):
            output += data
            time.sleep(0.01)
        assert output == b"x" * 200_000 + b"end"
        assert remote.wait(20) == 0


# ---------------------------------------------------------------------------------------------------------- memberships


@pytest.fixture
def hosts_of(zygote, warm_python, shell):
    def make(text, file=None):
        return listed(text, shell, file=file, python=str(zygote.python))

    return make


def test_a_job_grows_and_shrinks_with_its_file_of_hosts(tmp_path, hosts_of):
    """Two ranks become four; then the first host leaves, rank 0 with it, and one of its seats moves to a free slot."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.2:2\n")

    def follow(event):
        if event["event"] == "epoch" and event["epoch"] == 1:
            file.write_text("127.0.0.2:2\n127.0.0.3:2\n")
        if event["event"] == "epoch" and len(event["members"]) == 4:
            file.write_text("127.0.0.3:3\n")

    run = Run(
        tmp_path / "run",
        2,
        *("--sizes", "1:4,2:3", "--epochs", "3", "--samples", "200", "--pause", "0.02"),
        hosts=hosts_of("127.0.0.2:2", file),
        on_event=follow,
        on_loss="shrink",
        restarts=0,
        max_ranks=4,
    )
    assert run.result.exit_code == 0, run.result.errors
    sizes = [len(event["members"]) for event in run.epochs()]
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 4, 3)
    members = [(member["seat"], member["incarnation"]) for member in run.epochs()[-1]["members"]]
    assert {(2, 0), (3, 0)} < set(members) < {(0, 1), (1, 1), (2, 0), (3, 0)}
    kinds = [(event["event"], event["host"]) for event in run.events if event["event"].startswith("host")]
    added = ("host added", "127.0.0.3")
    assert kinds == [added, added, ("host removed", "127.0.0.2")]
    ended = [(event["rank"], event["exit_code"]) for event in run.events if event["event"] == "ended"]
    assert sorted(ended[:2]) == [(0, 137), (1, 137)]
    assert [code for _, code in ended[2:]] == [0, 0, 0]
    assert len(run.finals) == 3
    assert len({final["digest"] for final in run.finals}) == 1
    assert {final["world_size"] for final in run.finals} == {3}
    for epoch in range(3):
        # Ranks 0 and 1 are killed where their host leaves. Their last step may count, and not be in their logs.
        used = [sample for (of, _), samples in run.blocks().items() if of == epoch for sample in samples]
        assert len(used) == len(set(used))
        assert len(set(range(200)) - set(used)) <= 16


PUSHES = """
import sys, time
from pathlib import Path
import torch
import totalreduce as tr

stop, ones, out, served = Path(sys.argv[1]) / "stop", torch.ones(1000), torch.empty(1000), []
with tr.ps.connect(tr.init(), num_keys=1000, replicas=2) as client:
    while not stop.exists() or served[-1:] != [[3, 4]]:
        client.push_range(0, 1000, ones).wait()
        client.clock()
        servers = sorted({queue.server for queue in client._client._queues.values()})
        served += [servers] if servers not in served[-1:] else []
        time.sleep(0.01)
    client.meet()
    client.pull_range(0, 1000, out).wait()
    print(client.step, out.unique().tolist(), served)
"""


def run_with_a_server(folder, program, hosts, follow, **options):
    """Run two workers and a server, and take in others."""
    run = Run(
        folder,
        2,
        num_servers=1,
        program=program,
        hosts=hosts,
        on_event=follow,
        on_loss="shrink",
        restarts=0,
        **options,
    )
    assert run.result.exit_code == 0, run.result.errors
    return run, [[member["seat"] for member in event["members"]] for event in run.epochs()]


@pytest.mark.slow
def test_servers_come_and_go_with_the_file_of_hosts(tmp_path, hosts_of):
    """One server becomes three; then the host of the first one leaves. No push is lost, and none counts twice."""
    file, program, folder = tmp_path / "hosts", tmp_path / "train.py", tmp_path / "run"
    program.write_text(PUSHES)
    workers, first, further = "127.0.0.2:2\n", "127.0.0.3:1\n", "127.0.0.4:2\n"
    file.write_text(workers + first)

    def follow(event):
        if event["event"] != "epoch":
            return
        seats = [member["seat"] for member in event["members"]]
        if event["epoch"] == 1:
            file.write_text(workers + first + further)
        if seats == [0, 1, 2, 3, 4]:
            file.write_text(workers + further)
        if seats == [0, 1, 3, 4]:
            threading.Timer(1.0, (folder / "stop").touch).start()

    run, seats = run_with_a_server(folder, program, hosts_of("127.0.0.2:2,127.0.0.3:1", file), follow, max_servers=3)
    ends = [output.split(" ", 1) for output in run.result.output[:2]]
    total = float(sum(int(steps) for steps, _ in ends))
    assert any(rest.startswith(f"[{total}] ") for _, rest in ends), ends
    for _, rest in ends:
        served = json.loads(rest.split(" ", 1)[1])
        assert served[-1] == [3, 4]
    assert seats[0] == [0, 1, 2]
    assert [0, 1, 2, 3, 4] in seats
    assert seats[-1] == [0, 1, 3, 4]


STEPS = """
import sys, time
from pathlib import Path
import torch
import totalreduce as tr

stop, ones, out, seen = Path(sys.argv[1]) / "stop", torch.ones(1000), torch.empty(1000), []
with tr.ps.connect(tr.init(), num_keys=1000, replicas=2, consistency=tr.ps.Sequential()) as client:
    begin, step = client.step, 0
    for step in client.steps(10**9):
        client.pull_range(0, 1000, out).wait()
        seen.append(int(out[0]))
        assert (out == out[0]).all()
        client.push_range(0, 1000, ones)
        if out[0] >= 1e6:
            break
        if stop.exists() and step % 10 == 0:
            client.push_range(0, 1000, torch.full((1000,), 1e6))
        time.sleep(0.01)
    print(begin, seen[0], sorted({after - before for before, after in zip(seen, seen[1:]) if after < 1e6}))
"""


@pytest.mark.slow
def test_workers_come_with_the_file_of_hosts_and_steps_become_those_of_three(tmp_path, hosts_of):
    """Steps of two workers do not wait for the third one before it has come; then it begins where the others are."""
    file, program, folder = tmp_path / "hosts", tmp_path / "train.py", tmp_path / "run"
    program.write_text(STEPS)
    hosts, further = "127.0.0.2:2\n127.0.0.3:1\n", "127.0.0.4:2\n"
    file.write_text(hosts)

    def follow(event):
        if event["event"] != "epoch":
            return
        seats = [member["seat"] for member in event["members"]]
        if event["epoch"] == 1:
            threading.Timer(0.5, lambda: file.write_text(hosts + further)).start()
        if seats == [0, 1, 2, 3, 4]:
            threading.Timer(1.0, (folder / "stop").touch).start()

    at_first = hosts_of("127.0.0.2:2,127.0.0.3:1", file)
    run, seats = run_with_a_server(folder, program, at_first, follow, max_ranks=3, max_servers=2)
    assert seats[0] == [0, 1, 3]
    assert [0, 1, 2, 3, 4] in seats
    (*first, third) = [[json.loads(word) for word in output.split(" ", 2)] for output in run.result.output[:3]]
    assert [(begin, value, jumps) for begin, value, jumps in first] == [(0, 0, [2, 3])] * 2
    begin, value, jumps = third
    assert begin > 0
    assert value == 2 * begin
    assert jumps == [3]


def test_the_seat_of_a_host_that_cannot_be_reached_moves_to_another_one(tmp_path, shell, hosts_of):
    Path(shell[0]).with_name("down-127.0.0.3").touch()
    hosts = hosts_of("127.0.0.2:1,127.0.0.3:1,127.0.0.4:1")
    run = Run(tmp_path / "run", 2, "--epochs", "1", hosts=hosts, on_loss="replace", restarts=0)
    assert run.result.exit_code == 0, run.result.errors
    (event,) = [event for event in run.events if event["event"] == "host blacklisted"]
    assert (event["host"], event["seconds"], event["is_reached"]) == ("127.0.0.3", 10.0, False)
    assert event["last_errors"] == ["ssh: connect to host 127.0.0.3: No route to host"]
    started = [(event["rank"], event["host"]) for event in run.events if event["event"] == "started"]
    assert started == [(0, "127.0.0.2"), (1, "127.0.0.3"), (1, "127.0.0.4")]
    assert len({final["digest"] for final in run.finals}) == 1


@pytest.mark.slow
def test_a_spare_of_the_same_host_replaces_a_lost_rank(tmp_path, hosts_of):
    hosts = hosts_of("127.0.0.2:1,127.0.0.3:1")
    arguments = ["--die", "1:20:forward", "--pause", "0.05"]
    run = Run(tmp_path / "run", 2, *arguments, hosts=hosts, on_loss="replace", spares=1)
    assert run.result.exit_code == 0, run.result.errors
    started = [event for event in run.events if event["event"] == "started"]
    assert [(event["rank"], event["host"], event["was_spare"]) for event in started] == [
        (0, "127.0.0.2", False),
        (1, "127.0.0.3", False),
        (1, "127.0.0.3", True),
    ]
    assert [final["version"] for final in run.finals] == [40, 40]
    assert len({final["digest"] for final in run.finals}) == 1


@pytest.mark.slow
def test_a_spare_of_another_host_takes_the_seat_if_the_own_host_is_gone(tmp_path, shell, hosts_of):
    """The second host cannot be reached any more when the spares are started there; later its worker dies, too."""

    def follow(event):
        if event["event"] == "epoch" and event["epoch"] == 1:
            Path(shell[0]).with_name("down-127.0.0.3").touch()

    hosts = hosts_of("127.0.0.2:1,127.0.0.3:1")
    arguments = ["--die", "1:20:forward", "--pause", "0.1"]
    run = Run(tmp_path / "run", 2, *arguments, hosts=hosts, on_event=follow, on_loss="replace", spares=1)
    assert run.result.exit_code == 0, run.result.errors
    started = [event for event in run.events if event["event"] == "started"]
    assert [(event["rank"], event["host"], event["was_spare"]) for event in started[2:]] == [(1, "127.0.0.2", True)]
    assert not [event for event in run.events if event["event"] == "spare ended"]
    places = {path.name: json.loads(path.read_text()) for path in (tmp_path / "run").glob("place-*")}
    assert places == {"place-0-0": [0, 1, 0], "place-1-0": [0, 1, 1], "place-1-1": [1, 2, 0]}
    assert [final["version"] for final in run.finals] == [40, 40]
    assert len({final["digest"] for final in run.finals}) == 1


# -------------------------------------------------------------------------------------------------------- with an sshd


def test_a_lost_connection_ends_the_workers_of_one_host_and_the_others_go_on(tmp_path, sshd, zygote):
    """The host of rank 2 is tried again after its cool-down, so rank 2 may come back before the end."""

    def cut():
        log = tmp_path / "run" / "samples-0-0.jsonl"
        while not log.exists() or log.read_text().count("\n") < 3:
            time.sleep(0.02)
        sshd.cut(2)

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    run = Run(
        tmp_path / "run",
        3,
        *("--epochs", "1", "--samples", "600", "--pause", "0.05"),
        python=zygote.python,  # of the workers; the program that starts them there is a new interpreter
        hosts=listed("127.0.0.2:2,127.0.0.3:1", sshd.shell),
        on_loss="shrink",
        restarts=0,
    )
    cutter.join(10)
    assert run.result.exit_code == 0, run.result.errors
    assert [len(event["members"]) for event in run.epochs()][:2] == [3, 2]
    ended = [(event["rank"], event["exit_code"], event["host"]) for event in run.events if event["event"] == "ended"]
    assert ended[0] == (2, 255, "127.0.0.3")
    assert {(0, 0, "127.0.0.2"), (1, 0, "127.0.0.2")} <= set(ended)
    (event,) = [event for event in run.events if event["event"] == "host blacklisted"]
    assert (event["host"], event["is_reached"]) == ("127.0.0.3", False)
    assert len(run.finals) >= 2
    assert len({final["digest"] for final in run.finals}) == 1
    # The launcher's program kills rank 2 where the connection ends. Its last step may count, and not be in its log.
    used = [sample for samples in run.blocks().values() for sample in samples]
    assert len(used) == len(set(used))
    assert len(set(range(600)) - set(used)) <= 8
