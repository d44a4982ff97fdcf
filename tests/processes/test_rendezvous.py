"""Jobs that cannot be formed: every rank says why, in time."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest

import totalreduce as tr
from totalreduce.launch.arrivals import this_process

JOIN = """
def join():
    engine = tr.EngineConfig(eager_bytes=int(os.environ["EAGER"]))
    tr.init(timeout_s=float(os.environ["PATIENCE_S"]), engine=engine).close()

attempt("join", join)
"""


def start(fleet, num_workers, *, by_rank=None, patience_s=3.0, **variables):
    return fleet.start(num_workers, JOIN, by_rank=by_rank, PATIENCE_S=str(patience_s), EAGER="65536", **variables)


def test_all_ranks_join(fleet):
    for worker in start(fleet, 3):
        assert worker.read("join")["error"] is None
        assert worker.wait() == 0


@pytest.mark.faults("F13")
@pytest.mark.parametrize("odd", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_wrong_key_is_an_error_on_every_rank_that_names_the_key(fleet, odd):
    for worker in start(fleet, 4, by_rank={odd: {"TOTALREDUCE_JOB_KEY": "00" * 32}}):
        answer = worker.read("join")
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert "key" in answer["text"].lower()
        assert answer["seconds"] < 8.0


@pytest.mark.parametrize("without", [0, 2])
def test_a_key_on_some_ranks_only_is_an_error_on_every_rank(fleet, without):
    for worker in start(fleet, 3, by_rank={without: {"TOTALREDUCE_JOB_KEY": None}}):
        answer = worker.read("join")
        assert answer["error"] == "ConfigurationError", (worker.rank, answer)
        assert "job key is" in answer["text"]
        assert "TOTALREDUCE_JOB_KEY" in answer["text"]
        assert answer["seconds"] < 6.0


def test_without_a_key_rank_0_makes_one_and_says_how_safe_that_is(fleet):
    workers = start(fleet, 2, TOTALREDUCE_JOB_KEY=None)
    for worker in workers:
        assert worker.read("join")["error"] is None
        worker.wait()
    assert "as safe as its store at 127.0.0.1" in workers[0].errors()
    assert "store" not in workers[1].errors()


def test_a_guessable_key_is_refused(fleet):
    for worker in start(fleet, 2, TOTALREDUCE_JOB_KEY="secret"):
        answer = worker.read("join")
        assert "AuthenticationError" in answer["kinds"] or "RendezvousError" in answer["kinds"]
        assert "key" in answer["text"].lower()


@pytest.mark.faults("F13")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"EAGER": "4096"}, "eager_bytes is 65536 on rank 0 and 4096 on rank 1"),
        ({"TOTALREDUCE_PEER_TIMEOUT_S": "30"}, "silence_s is 2.0 on rank 0 and 30.0 on rank 1"),
    ],
)
def test_different_settings_are_an_error_on_every_rank(fleet, variables, message):
    for worker in start(fleet, 3, by_rank={1: variables}):
        answer = worker.read("join")
        assert answer["error"] == "ConfigurationError", (worker.rank, answer)
        assert message in answer["text"]
        assert answer["seconds"] < 6.0


@pytest.mark.faults("F9")
@pytest.mark.parametrize("missing", [(1, 3), pytest.param((2,), marks=pytest.mark.slow)])
def test_missing_ranks_are_named_by_every_rank_in_time(fleet, missing):
    stays_away = {rank: {"WORLD_SIZE": "1", "RANK": "0"} for rank in missing}
    for worker in start(fleet, 4, by_rank=stays_away, patience_s=2.5):
        answer = worker.read("join")
        if worker.rank in missing:
            continue
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert f"rank(s) {', '.join(map(str, missing))} did not come" in answer["text"]
        assert answer["seconds"] < 7.5


def test_a_rank_0_that_never_comes_is_named(fleet):
    workers = start(fleet, 3, by_rank={0: {"WORLD_SIZE": "1"}}, patience_s=2.0)
    for worker in workers[1:]:
        answer = worker.read("join")
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert "cannot reach the store at 127.0.0.1" in answer["text"]
        assert "rank 0" in answer["text"]
        assert answer["seconds"] < 8.0


@pytest.mark.slow
def test_a_port_that_somebody_else_has_is_named(fleet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        workers = start(fleet, 2, MASTER_PORT=port, patience_s=2.0)
        for worker in workers:
            answer = worker.read("join")
            assert answer["error"] == "RendezvousError", (worker.rank, answer)
            assert f"127.0.0.1:{port}" in answer["text"]
            assert "MASTER_PORT" in answer["text"]
            assert answer["seconds"] < 8.0


def test_a_rank_that_dies_before_the_others_are_there_is_reported_in_time(fleet):
    workers = fleet.start(
        3,
        """
        if rank == 2:
            from totalreduce.launch import bootstrap
            def die(*_): os._exit(9)
            bootstrap._meet = die
        attempt("join", tr.init, timeout_s=4)
        """,
    )
    for worker in workers[:2]:
        answer = worker.read("join")
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert "rank 2 is lost" in answer["text"]
        assert "TOTALREDUCE_JOB_KEY" in answer["text"]  # who was never met may have left because of somebody's key
        assert answer["seconds"] < 8.5
    assert workers[2].wait() == 9


def refusals(workers, *, within_s=5.0):
    """The errors of all ranks, which came soon."""
    answers = [worker.read("join") for worker in workers]
    for answer in answers:
        assert answer["error"] == "ConfigurationError", answer
        assert answer["seconds"] < within_s
    return [answer["text"] for answer in answers]


KEY = "00112233445566778899aabbccddeeff"


@pytest.mark.faults("F12")
@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        (KEY, (2, 3)),
        (None, (3, 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((KEY, (3, 2)), (None, (2, 3)))),
    ],
)
def test_different_world_sizes_are_named_before_anything_else(fleet, key, sizes):
    by_rank = {rank: {"WORLD_SIZE": str(size)} for rank, size in enumerate(sizes)}
    workers = start(fleet, 2, by_rank=by_rank, patience_s=20.0, TOTALREDUCE_JOB_KEY=key)
    wanted = f"rank 1 was started with world size {sizes[1]}, rank 0 with {sizes[0]}. "
    for text in refusals(workers):
        assert text.startswith(wanted)
        assert "WORLD_SIZE" in text


@pytest.mark.slow
def test_a_rank_beyond_the_others_world_size_is_told(fleet):
    workers = start(fleet, 3, by_rank={2: {"WORLD_SIZE": "7", "RANK": "5"}}, patience_s=20.0)
    # Ranks 0 and 1 wait for a rank 2 that does not come.
    assert {text.split(". ")[0] for text in refusals(workers)} == {
        "rank 5 was started with world size 7, rank 0 with 3"
    }


@pytest.mark.faults("F12")
@pytest.mark.parametrize("number", [1, 0])
def test_two_processes_of_one_rank_are_named_on_every_rank(fleet, number):
    workers = start(fleet, 3, by_rank={2: {"RANK": str(number), "LOCAL_RANK": str(number)}}, patience_s=20.0)
    for text in refusals(workers, within_s=7.0):
        assert f"two processes are rank {number}: " in text
        assert f"process {workers[number].pid} on" in text
        assert f"process {workers[2].pid} on" in text


@pytest.mark.faults("F12")
def test_two_processes_of_one_rank_that_come_at_the_same_moment_are_named(fleet):
    """The second one comes when the first one has begun to announce itself in the store, and has not ended."""
    slow = """
    from totalreduce.launch import rendezvous
    announce = rendezvous._announce
    def announce_slowly(*arguments):
        say("announces")
        hear()
        announce(*arguments)
    if os.environ["LOCAL_RANK"] == "1":
        rendezvous._announce = announce_slowly
    """
    source = textwrap.dedent(slow) + JOIN
    _, first, second = workers = fleet.start(
        3, source, by_rank={2: {"RANK": "1", "LOCAL_RANK": "1"}}, PATIENCE_S="20.0", EAGER="65536"
    )
    for worker in (first, second):
        worker.read("announces")
    for worker in (first, second):
        worker.tell()
    assert all("two processes are rank 1: " in text for text in refusals(workers, within_s=7.0))


@pytest.mark.slow
def test_three_processes_of_one_rank_are_named_too(fleet):
    same = {"RANK": "1", "LOCAL_RANK": "1"}
    workers = start(fleet, 4, by_rank={2: same, 3: same}, patience_s=20.0)
    assert all("two processes are rank 1: " in text for text in refusals(workers))


@pytest.mark.faults("F12")
def test_ranks_of_two_jobs_at_one_port_are_named(fleet):
    by_rank = {rank: {"TOTALREDUCE_JOB_ID": name} for rank, name in enumerate(["blue", "red", "blue"])}
    workers = start(fleet, 3, by_rank=by_rank, patience_s=20.0)
    for text in refusals(workers):
        assert f"rank 1 (process {workers[1].pid} on" in text
        assert "to job 'red'" in text.replace("belongs ", "")
        assert "to job 'blue'" in text
        assert "MASTER_PORT" in text


@pytest.mark.faults("F12")
def test_different_versions_are_named(fleet):
    older = "from totalreduce.launch import arrivals\nif rank == 1:\n    arrivals.VERSION = '0.0.7'\n"
    workers = fleet.start(3, older + JOIN, PATIENCE_S="20", EAGER="65536")
    for text in refusals(workers):
        assert text.startswith(f"rank 1 runs totalreduce 0.0.7, rank 0 {tr.__version__}. ")


def test_a_process_that_comes_after_the_others_have_met_does_not_disturb_them(fleet):
    """Nor is it left with the question whether the others were started."""
    source = """
    if rank == 2:
        os.environ.update(RANK="1", WORLD_SIZE="2")
        hear()
        attempt("late", tr.init, timeout_s=5)
    else:
        group = tr.init(timeout_s=20)
        say("met")
        hear()
        value = torch.ones(3)
        group.allreduce(value).wait()
        say("done", value=value[0].item())
    """
    first, second, late = fleet.start(3, source, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", by_rank={2: {"LOCAL_RANK": "1"}})
    for worker in (first, second):
        worker.read("met")
    late.tell()
    answer = late.read("late")
    assert answer["error"] == "RendezvousError"
    assert f"process {second.pid} on" in answer["text"]
    assert "was rank 1 before this process" in answer["text"]
    for worker in (first, second):
        worker.tell()
    for worker in (first, second):
        assert worker.read("done")["value"] == 2.0


LOADS = """
from totalreduce.kernels import exchange, relay

for module in (exchange, relay):
    module.load.cache_clear()
group = tr.init({transport!r}, timeout_s=20)
say("met", loaded=[module.load.cache_info().currsize for module in (exchange, relay)])
group.close()
"""


@pytest.mark.parametrize(("transport", "loaded"), [("auto", [1, 0]), ("shm", [1, 0]), ("tcp", [0, 1])])
def test_ranks_load_the_code_that_they_can_use_and_no_other(fleet, transport, loaded):
    """Also if the launcher does not say how many ranks a host has: a rank then takes itself for the only one."""
    workers = fleet.start(2, LOADS.format(transport=transport), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    assert [worker.read("met")["loaded"] for worker in workers] == [loaded] * 2


COMPILES = """
import logging
from totalreduce.kernels import exchange, relay

if rank == 0:
    class Heard(logging.Handler):
        def emit(self, record):
            if "compile code" in record.getMessage():
                say("log", text=record.getMessage())
    logging.getLogger("totalreduce").addHandler(Heard())
    logging.getLogger("totalreduce").setLevel("INFO")
else:
    module = {module}
    load = module.load
    def compiles():
        module.load = load
        say("compiles")
        hear()
        return load()
    module.load = compiles
group = tr.init({transport!r}, timeout_s=20)
value = torch.ones(3)
group.allreduce(value).wait()
say("sum", value=value.tolist())
"""


@pytest.mark.parametrize(("transport", "module"), [("auto", "exchange"), ("tcp", "relay")])
def test_ranks_wait_for_one_that_compiles_before_they_connect(fleet, transport, module):
    """Connected peers would wait for an answer for ``connect_timeout_s`` only."""
    workers = fleet.start(2, COMPILES.format(transport=transport, module=module))
    workers[1].read("compiles")
    said = workers[0].read("log")["text"]
    assert said == "waiting for rank(s) 1 to compile code, once on a machine"  # two seconds after it has come
    workers[1].tell()
    assert [worker.read("sum")["value"] for worker in workers] == [[2.0] * 3] * 2


def test_the_time_out_ends_the_wait_for_a_rank_that_compiles(fleet):
    source = COMPILES.format(transport="tcp", module="relay").partition("group = ")[0]
    source += 'attempt("join", tr.init, "tcp", timeout_s=3)\n'
    workers = fleet.start(2, source)
    workers[1].read("compiles")
    said = json.loads(workers[0].read_line())
    error = workers[0].read("join") if said["event"] == "log" else said
    assert error["error"] == "RendezvousError"
    assert "the time-out has ended the wait for rank(s) 1 to compile code" in error["text"]
    workers[1].tell()
    assert workers[1].read("join")["error"] == "RendezvousError"


def test_a_process_is_itself_and_no_other(warm_python):
    program = "from totalreduce.launch.arrivals import this_process; print(this_process())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert this_process() == this_process() != other.stdout.strip()
