"""Processes that die, freeze, leave or disagree: what the others are told, and how soon."""

import re
import signal
import time

import pytest

CRASH_S, SILENCE_S = 1.0, 3.0
"""What is promised: from the event to the error on every survivor."""

# Works until somebody is lost, tries again, closes, ends.
UNTIL_LOST = """
group = tr.init(timeout_s=30)
say("ready")
moment = hear()
try:
    if moment == "busy":
        big, said = torch.ones(16 << 20), False
        while True:
            before = group.statistics().bytes_received
            work = group.allreduce(big, name="big")
            while group.statistics().bytes_received < before + (24 << 20) and not work.done():
                time.sleep(0.001)
            if not said:
                say("there")
            said = True
            work.wait()
    group.allreduce(torch.ones(1000), name="small").wait()
    say("there")
    hear()
    while True:
        group.allreduce(torch.ones(1000), name="small").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank, text=str(error))
attempt("next", group.allreduce, torch.ones(3), name="next")
attempt("barrier", group.barrier, timeout_s=5)
begin = time.monotonic()
group.close()
say("closed", seconds=time.monotonic() - begin)
"""


def lose(workers, victim, moment, number):
    """Bring the job to the moment and send the victim a signal; returns when that was."""
    for worker in workers:
        worker.read("ready")
    for worker in workers:
        if moment != "start" or worker.rank != victim:
            worker.tell(moment)
    if moment != "start":
        for worker in workers:
            worker.read("there")
    since = workers[victim].send(number)
    if moment == "idle":
        for worker in workers:
            if worker.rank != victim:
                worker.tell()
    return since


def check_survivors(survivors, victim, since, limit_s):
    """Every survivor's pending and next calls name the victim in time, and it ends cleanly and soon."""
    for worker in survivors:
        lost = worker.read("lost")
        print(f"rank {worker.rank} knew after {lost['at'] - since:.3f} s: {lost['text']}")
        assert lost["rank"] == victim
        assert lost["at"] - since < limit_s
        for call in ("next", "barrier"):
            answer = worker.read(call)
            assert (answer["error"], answer["rank"]) == ("PeerLost", victim)
            assert answer["seconds"] < 1.0
        assert worker.read("closed")["seconds"] < 2.0
    for worker in survivors:
        assert worker.wait(5) == 0
        assert "Traceback" not in worker.errors()


@pytest.mark.alone
@pytest.mark.faults("F1", "F17")
@pytest.mark.parametrize("moment", ["busy", "idle", "start"])
def test_a_killed_rank_is_named_on_every_survivor_within_a_second(fleet, moment):
    workers = fleet.start(4, UNTIL_LOST)
    since = lose(workers, 2, moment, signal.SIGKILL)
    check_survivors([worker for worker in workers if worker.rank != 2], 2, since, CRASH_S)
    assert workers[2].wait() == -signal.SIGKILL


@pytest.mark.alone
@pytest.mark.faults("F1", "F19")
def test_ranks_without_a_connection_to_the_killed_one_name_it_too(fleet):
    workers = fleet.start(8, UNTIL_LOST)  # in a group of 8, ranks three apart never talk to each other
    since = lose(workers, 5, "idle", signal.SIGKILL)
    check_survivors([worker for worker in workers if worker.rank != 5], 5, since, CRASH_S)


@pytest.mark.alone
@pytest.mark.faults("F2", "F18")
@pytest.mark.parametrize("moment", ["busy", "idle"])
def test_a_stopped_rank_is_named_within_three_seconds_and_learns_of_it_when_continued(fleet, moment):
    workers = fleet.start(4, UNTIL_LOST)
    since = lose(workers, 1, moment, signal.SIGSTOP)
    check_survivors([worker for worker in workers if worker.rank != 1], 1, since, SILENCE_S)
    since = workers[1].send(signal.SIGCONT)
    workers[1].tell()
    lost = workers[1].read("lost")
    assert lost["rank"] in (0, 2, 3)
    assert lost["at"] - since < CRASH_S
    assert workers[1].wait(10) == 0


@pytest.mark.alone
@pytest.mark.faults("F18")
def test_a_pause_shorter_than_the_limit_costs_nothing_but_time(fleet):
    workers = fleet.start(
        3,
        """
        group = tr.init(timeout_s=30)
        say("ready")
        for step in range(400):
            value = torch.full((1000,), float(rank + step))
            group.allreduce(value, name="x").wait()
            assert value.tolist() == [3.0 * step + 3] * 1000, step
            if step == 100:
                say("there")
                hear()
        say("done", lost=str(group._runner.engine.members.lost))
        """,
    )
    for worker in workers:
        worker.read("ready")
    for worker in workers:
        worker.read("there")
    workers[1].send(signal.SIGSTOP)
    for worker in workers:
        worker.tell()
    with pytest.raises(AssertionError, match="said nothing"):
        workers[0].read("done", timeout_s=1.2)  # nobody gets on meanwhile
    workers[1].send(signal.SIGCONT)
    for worker in workers:
        assert worker.read("done")["lost"] == "None"
        assert worker.wait() == 0


LEAVE = """
group = tr.init(timeout_s=30)
group.barrier()
say("ready")
way = hear()
if rank == 1:
    say("leaving")
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise RuntimeError("a bug of the user's")
    if way == "kernel":
        os._exit(4)
    if way == "close":
        group.close()
        time.sleep(0.01)
        sys.exit(0)
attempt("lost", lambda: group.allreduce(torch.ones(1000), name="pending").wait())
attempt("next", group.allreduce, torch.ones(3), name="next")
sys.exit(0)
"""


@pytest.mark.faults("F3")
@pytest.mark.parametrize(("way", "exit_code"), [("exit", 3), ("raise", 1), ("kernel", 4), ("close", 0)])
def test_a_rank_that_leaves_while_it_is_needed_is_named(fleet, way, exit_code):
    workers = fleet.start(3, LEAVE)
    for worker in workers:
        worker.read("ready")
    workers[0].tell(way)
    workers[2].tell(way)
    workers[1].tell(way)
    since = workers[1].read("leaving")["at"]
    for worker in (workers[0], workers[2]):
        for call in ("lost", "next"):
            answer = worker.read(call)
            assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
            assert answer["at"] - since < SILENCE_S
            if way in ("exit", "raise", "close"):
                assert "it has closed the group" in answer["text"]
        assert worker.wait(5) == 0
    assert workers[1].wait(5) == exit_code
    assert ("a bug of the user's" in workers[1].errors()) == (way == "raise")


@pytest.mark.parametrize("num_bytes", [1000, 8 << 20])
def test_a_broadcast_to_a_rank_that_has_left_fails_at_the_root(fleet, num_bytes):
    workers = fleet.start(
        2,
        f"""
        group = tr.init(timeout_s=20)
        if rank == 1:
            group.close()
            say("gone")
            hear()
        else:
            say("ready")
            hear()
            attempt("lost", group.broadcast, torch.ones({num_bytes}, dtype=torch.uint8), root=0)
        """,
    )
    workers[0].read("ready")
    workers[1].read("gone")
    workers[0].tell()
    answer = workers[0].read("lost")
    assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
    assert answer["seconds"] < SILENCE_S


def test_a_broadcast_under_way_to_a_rank_that_leaves_fails_at_the_root(fleet):
    workers = fleet.start(
        2,
        """
        group = tr.init(timeout_s=20)
        say("ready")
        if rank == 1:
            hear()
            group.close()
        else:
            work = group.broadcast(torch.ones(8 << 20, dtype=torch.uint8), root=0, async_op=True)
            say("submitted")
            attempt("lost", work.wait)
        """,
    )
    workers[0].read("ready")
    workers[0].read("submitted")
    workers[1].read("ready")
    workers[1].tell()
    answer = workers[0].read("lost")
    assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
    assert answer["seconds"] < SILENCE_S


@pytest.mark.faults("F16")
@pytest.mark.parametrize("overlap", ["backward", "iterations"])
def test_an_optimizer_step_raises_the_loss_as_itself(fleet, overlap):
    workers = fleet.start(
        3,
        f"""
        group = tr.init(timeout_s=30)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = tr.DistributedOptimizer(plain, model, group=group, overlap={overlap!r})

        def train():
            for step in range(100_000):
                optimizer.zero_grad()
                model(torch.ones(8, 64)).sum().backward()
                optimizer.step()
                if step == 5:
                    say("there")

        attempt("lost", train)
        """,
    )
    for worker in workers:
        worker.read("there")
    since = workers[2].send(signal.SIGKILL)
    for worker in workers[:2]:
        answer = worker.read("lost")
        assert (answer["error"], answer["rank"]) == ("PeerLost", 2)
        assert answer["at"] - since < SILENCE_S
        assert worker.wait(5) == 0


@pytest.mark.alone
@pytest.mark.faults("F6", "F22")
def test_a_deadline_names_the_operation_and_the_rank_that_keeps_it(fleet):
    workers = fleet.start(
        3,
        """
        group = tr.init(timeout_s=30)
        value = torch.full((1000,), float(rank))
        if rank == 1:
            say("ready")
            hear()
            group.allreduce(value, name="late").wait()
            hear()
            group.barrier()
        else:
            work = group.allreduce(value, name="late")
            attempt("deadline", work.wait, timeout_s=0.5)
            say("asked", done=work.done())
            attempt("came", work.wait)
            attempt("barrier", group.barrier, timeout_s=0.5)
        say("value", value=value.unique().tolist())
        """,
    )
    workers[1].read("ready")
    others = (workers[0], workers[2])
    for worker in others:
        answer = worker.read("deadline")
        assert {"DeadlineExceededError", "TimeoutError"} <= set(answer["kinds"])
        assert "'late'" in answer["text"]
        assert re.search(r"never submitted by rank\(s\) (0, )?1\b", answer["text"])  # rank 0 may be late, too
        assert 0.5 <= answer["seconds"] < 3.0
        assert worker.read("asked")["done"] is False
    workers[1].tell()
    for worker in others:
        assert worker.read("came")["error"] is None
        answer = worker.read("barrier")
        assert answer["error"] == "DeadlineExceededError"
        assert re.search(r"never submitted by rank\(s\) (0, )?1\b", answer["text"])
        assert worker.read("value")["value"] == [3.0]


@pytest.mark.faults("F7")
def test_ctrl_c_in_a_wait_ends_the_process_and_the_others_are_told(fleet):
    workers = fleet.start(
        3,
        """
        group = tr.init(timeout_s=30)
        say("ready")
        hear()
        work = group.allreduce(torch.ones(1000), name="never" if rank == 1 else "other")
        say("waiting")
        if rank == 1:
            work.wait()
        attempt("lost", work.wait)
        """,
    )
    for worker in workers:
        worker.read("ready")
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.read("waiting")
    since = workers[1].send(signal.SIGINT)
    for worker in (workers[0], workers[2]):
        answer = worker.read("lost")
        assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
        assert answer["at"] - since < SILENCE_S, f"rank {worker.rank}: {answer['text']}\n{workers[1].errors()}"
    assert workers[1].wait() != 0
    assert workers[1].errors().rstrip().endswith("KeyboardInterrupt")


@pytest.mark.faults("F21")
def test_a_stall_is_reported_on_every_rank_with_rank_and_tensor(fleet):
    workers = fleet.start(
        3,
        """
        group = tr.init(timeout_s=30, engine=tr.EngineConfig(stall_warning_s=0.3))
        say("ready")
        if rank != 1:
            group.allreduce(torch.ones(1000), name="layer4.weight").wait()
        else:
            while not group.statistics().stalls:
                time.sleep(0.01)
            say("knows")
            hear()
            group.allreduce(torch.ones(1000), name="layer4.weight").wait()
        group.barrier()
        say("done", stalls=group.statistics().stalls)
        """,
    )
    for worker in workers:
        worker.read("ready")
    workers[1].read("knows", timeout_s=5)
    deadline = time.monotonic() + 10
    wanted = "never submitted by rank(s) 1"  # the first reports may name a rank that is late, too
    while any(wanted not in worker.errors() for worker in workers):
        time.sleep(0.02)
        assert time.monotonic() < deadline
    workers[1].tell()
    for worker in workers:
        assert worker.read("done")["stalls"] >= 1
        assert worker.wait() == 0
        line = next(line for line in worker.errors().splitlines() if "stalled" in line and wanted in line)
        assert f"rank {worker.rank}" in line
        assert "'layer4.weight'" in line
        assert "never submitted by rank(s) 1" in line


@pytest.mark.faults("F5")
def test_a_disagreement_is_an_error_everywhere_and_the_group_goes_on(fleet):
    workers = fleet.start(
        3,
        """
        group = tr.init(timeout_s=30)
        odd = rank == 2

        def shape():
            group.allreduce(torch.ones((3, 4) if odd else (4, 3)), name="shape").wait()

        def dtype():
            group.allreduce(torch.ones(5000, dtype=torch.float64 if odd else torch.float32), name="dtype").wait()

        def reduction():
            group.allreduce(torch.ones(7), name="reduction", op=tr.ReduceOp.MAX if odd else tr.ReduceOp.SUM).wait()

        def size():
            group.allreduce(torch.ones(3 << 20 if odd else 2 << 20), name="size").wait()

        def kind():
            if odd:
                group.broadcast(torch.ones(6), root=0, name="kind")
            else:
                group.allreduce(torch.ones(6), name="kind").wait()

        for case in (shape, dtype, reduction, size, kind):
            attempt(case.__name__, case)
            value = torch.full((1000,), float(rank))
            group.allreduce(value, name=case.__name__).wait()
            assert value.tolist() == [3.0] * 1000, case.__name__
        value = torch.arange(100_000, dtype=torch.float64) + rank
        group.allreduce(value, name="after").wait()
        say("sum", value=value.sum().item(), lost=str(group._runner.engine.members.lost))
        group.barrier()
        """,
    )
    wanted = {
        "shape": ("[4, 3]", "[3, 4]"),
        "dtype": ("float32[5000]", "float64[5000]"),
        "reduction": ("sum", "max"),
        "size": ("[2097152]", "[3145728]"),
        "kind": ("allreduce", "broadcast"),
    }
    for worker in workers:
        for case, values in wanted.items():
            answer = worker.read(case)
            assert answer["error"] == "MismatchError", (worker.rank, answer)
            assert f"tensor '{case}'" in answer["text"]
            assert "rank 2" in answer["text"]
            assert all(value in answer["text"] for value in values), answer["text"]
        facts = worker.read("sum")
        assert facts["value"] == 3 * sum(range(100_000)) + 3 * 100_000
        assert facts["lost"] == "None"
        assert worker.wait() == 0


FAILS = """
group = tr.init(timeout_s=30)
if rank == 1:
    if os.environ["WAY"] == "with":
        with group:
            raise ValueError("no such file: batch 17")
    raise ValueError("no such file: batch 17")
attempt("lost", lambda: group.allreduce(torch.ones(10), name="x").wait())
group.close()
"""


@pytest.mark.faults("F3")
@pytest.mark.parametrize("way", ["with", "uncaught"])
def test_the_others_are_told_which_exception_ended_a_rank(fleet, way):
    workers = fleet.start(3, FAILS, WAY=way)
    for worker in (workers[0], workers[2]):
        answer = worker.read("lost")
        assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
        assert "it has closed the group after ValueError: no such file: batch 17" in answer["text"]


@pytest.mark.faults("F20")
def test_a_process_that_holds_the_interpreter_lock_looks_frozen(fleet):
    workers = fleet.start(
        2,
        """
        import ctypes
        group = tr.init("tcp", timeout_s=30)
        group.barrier()
        say("ready")
        if rank == 1:
            hear()
            ctypes.PyDLL(None).sleep(4)  # PyDLL, unlike CDLL, keeps the lock
        else:
            attempt("lost", lambda: group.allreduce(torch.ones(3), name="w").wait())
        group.close()
        """,
        TOTALREDUCE_PEER_TIMEOUT_S="1",
    )
    for worker in workers:
        worker.read("ready")
    begin = time.monotonic()
    workers[1].tell()
    answer = workers[0].read("lost")
    assert (answer["error"], answer["rank"]) == ("PeerLost", 1)
    assert answer["at"] - begin < 2 * SILENCE_S
