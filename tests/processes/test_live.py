"""Jobs of real processes, seen from outside: the folder of the job, ``totalreduce top``, and the page in a browser."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shells import fake_shell
from typer.testing import CliRunner

from totalreduce.cli.main import build
from totalreduce.launch.hosts import parse_hosts
from totalreduce.launch.live import LiveJob
from totalreduce.launch.local import run_workers
from totalreduce.launch.placement import HostOptions
from totalreduce.launch.workers import free_port
from totalreduce.observe import board as boards
from totalreduce.observe.board import find_boards
from totalreduce.observe.dashboard import Dashboard
from totalreduce.observe.view import JobView

PROGRAM = Path(__file__).parent / "programs" / "live.py"
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path, monkeypatch):
    """Other jobs of this user are not seen, and what a job leaves behind is."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))  # for launchers in processes of their own
    monkeypatch.setattr(boards, "runtime_folders", lambda: [folder / "totalreduce"])
    yield
    assert list((folder / "totalreduce").iterdir()) == []


def await_view(board, condition):
    """Return the first view that meets a condition, while all ranks run."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        view = JobView.read(board, time.time())
        if condition(view):
            return view
        assert time.monotonic() < give_up_at, view
        assert not view.faults["lost"], view
        time.sleep(0.05)


class Job:
    """The program as a job in a thread of this process, until the end of the ``with`` block."""

    def __init__(self, folder, num_workers=2, **options):
        self._stop, self.result = folder / "stop", None
        self.live = LiveJob()
        command = [str(options.pop("python", sys.executable)), str(PROGRAM), str(self._stop)]
        arguments = {
            "num_workers": num_workers,
            "output": "capture",
            "timeout_s": PATIENCE_S,
            "live": self.live,
            **options,
        }
        self._thread = threading.Thread(target=self._run, args=(command, arguments))

    def _run(self, command, arguments):
        self.result = run_workers(command, **arguments)

    def __enter__(self):
        self._thread.start()
        return self.live.board

    def __exit__(self, *_):
        self._stop.touch()
        self._thread.join()
        self.live.__exit__()


def test_figures_of_ranks_reach_the_folder_and_top(tmp_path, warm_python):
    job = Job(tmp_path)
    with job as board:
        view = await_view(board, lambda view: all(row.step > 5 for row in view.ranks) and len(view.ranks) == 2)
        shown = CliRunner().invoke(build(["top"]), ["top", "--json"])
        named = CliRunner().invoke(build(["top"]), ["top", view.job[:-3], "--once"], env={"COLUMNS": "120"})
        with pytest.raises(Exception, match="0 running jobs have an id that begins with 'other'"):
            CliRunner().invoke(build(["top"]), ["top", "other"], catch_exceptions=False)
    assert job.result.exit_code == 0, job.result.errors
    assert [(row.state, row.rank, row.pid) for row in view.ranks] == [
        ("running", 0, view.ranks[0].pid),
        ("running", 1, view.ranks[1].pid),
    ]
    assert view.ranks[0].pid != view.ranks[1].pid
    assert view.step_s == pytest.approx(view.compute_s + view.exposed_s)
    assert view.step_s > 0
    assert view.training["model"]["method"] == "oktopk"
    assert str(PROGRAM) in view.command
    document = json.loads(shown.stdout)
    assert (document["job"], document["world_size"], len(document["ranks"])) == (view.job, 2, 2)
    assert "2 of 2 ranks" in named.stdout
    with pytest.raises(Exception, match="no job"):
        CliRunner().invoke(build(["top"]), ["top"], catch_exceptions=False)


def test_figures_of_other_hosts_come_with_their_output(tmp_path, zygote):
    folder = tmp_path / "shell"
    folder.mkdir()
    python = str(zygote.python)
    hosts = HostOptions(
        hosts=parse_hosts("127.0.0.2:1,127.0.0.3:1"), shell=fake_shell(folder), python=python, address="127.0.0.1"
    )
    job = Job(tmp_path, where=hosts, python=python)
    with job as board:
        view = await_view(board, lambda view: all(row.step > 5 for row in view.ranks) and len(view.ranks) == 2)
        assert sorted(path.name for path in board.path.glob("rank*")) == ["rank0.json", "rank1.json"]
        # Each program on another host has a folder of its own, from which it passes figures on.
        assert len(list(board.path.parent.iterdir())) == 3
        assert find_boards()[0].path == board.path
    assert [(row.host, row.state) for row in view.ranks] == [("127.0.0.2", "running"), ("127.0.0.3", "running")]
    assert job.result.exit_code == 0
    assert not any("figures" in text for text in job.result.errors)


# --------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here (package chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(browser):
    """A tab of which requests to other sites and errors of the script fail the test."""
    context = browser.new_context()
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if "//127.0.0.1:" not in request.url else None)
    page.set_default_timeout(PATIENCE_S * 1e3)
    yield page
    context.close()
    assert [problem for problem in problems if problem != "data:,"] == []


def await_in(tab, condition):
    """Return when an expression holds in a page, whose policy forbids Playwright's own function for this."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not tab.evaluate(condition):
        assert time.monotonic() < give_up_at, condition
        tab.wait_for_timeout(50)


@pytest.fixture
def quiet_job():
    """The folder of a job without ranks."""
    with LiveJob() as live:
        live.begin("run-1", ["<b>train.py</b>"], 2)
        yield live.board


def test_the_page_connects_again_by_itself(quiet_job, tab, monkeypatch):
    def lose_connection():
        raise OSError("the connection is lost")

    with Dashboard(quiet_job) as server:
        tab.goto(server.url)
        tab.wait_for_selector("#connection[data-state=live]")
        assert tab.url == f"http://127.0.0.1:{server.port}/"
        assert tab.inner_text("#command") == "<b>train.py</b>"  # as text, not as markup
        with monkeypatch.context() as patch:
            # The stream is cut, and then answers are errors, after which a browser by itself gives up.
            patch.setattr(server.views, "text", lose_connection)
            patch.setattr(server.views, "open_stream", lambda: False)
            tab.wait_for_selector("#connection[data-state=connecting]")
            await_in(tab, "source.readyState === EventSource.CLOSED")
        quiet_job.write_job({"job": "run-1", "command": "another text", "num_ranks": 2})
        tab.wait_for_selector("#connection[data-state=live]")
        assert tab.inner_text("#command") == "another text"
    tab.wait_for_selector("#connection[data-state=over]")


def test_the_page_is_light_or_dark_and_fits_a_narrow_window(quiet_job, tab):
    colours = []
    with Dashboard(quiet_job) as server:
        tab.goto(server.url)
        tab.wait_for_selector("#connection[data-state=live]")
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            colours.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.set_viewport_size({"width": 360, "height": 640})
        overhang = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert colours == ["rgb(246, 247, 249)", "rgb(20, 23, 28)"]
    assert overhang == 0


@pytest.mark.parametrize("on_loss", [pytest.param("replace", marks=pytest.mark.slow), "shrink"])
def test_the_page_shows_a_killed_rank_and_the_members_after_it(tmp_path, zygote, tab, on_loss):
    """Three ranks train on all cores meanwhile, and a second client of the server never reads."""
    port, token = free_port(), "a-token-of-some-length"
    (tmp_path / "token").write_text(token + "\n")
    command = [sys.executable, "-m", "totalreduce", "run", "-n", "3", "--on-loss", on_loss, "--restarts"]
    command += ["1" if on_loss == "replace" else "0", "--dashboard-port", str(port)]
    command += ["--dashboard-token", str(tmp_path / "token"), "--timeout", str(PATIENCE_S), "--no-python"]
    command += [str(zygote.python), str(PROGRAM), str(tmp_path / "stop")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "the dashboard of this job" in line:
                break
        assert line.strip().endswith(f"http://127.0.0.1:{port}/"), line
        lagging = socket.create_connection(("127.0.0.1", port))
        lagging.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        tab.goto(f"http://127.0.0.1:{port}/?token={token}")
        running = "document.querySelectorAll('#ranks tr[data-state=running]').length"
        step = "Number(document.querySelector('.card[data-name=step] b').textContent.replaceAll(',', ''))"
        await_in(tab, f"{running} === 3 && {step} > 10")
        [board] = find_boards()
        os.kill(board.read_figures()[2].figures.pid, signal.SIGKILL)
        tab.wait_for_selector("#events li[data-event=ended]")
        tab.wait_for_selector("#events li[data-event=epoch]")
        assert "rank 2 was killed by SIGKILL" in tab.inner_text("#events")
        assert tab.inner_text("#faults [data-name=lost] dd") == "1"
        survivors = 3 if on_loss == "replace" else 2
        before = tab.evaluate(step)
        await_in(tab, f"{running} === {survivors} && {step} > {before + 5}")
        assert tab.inner_text(".card[data-name=ranks] b") == f"{survivors} of {survivors}"
        assert tab.inner_text(".card[data-name=membership] b") == "2"
        state = tab.get_attribute("#ranks tr[data-seat='2']", "data-state")
        assert state == ("running" if on_loss == "replace" else "lost")
        lagging.close()
        (tmp_path / "stop").touch()
        tab.wait_for_selector("#connection[data-state=over]")
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()
