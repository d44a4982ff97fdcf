"""Jobs that cannot be formed: every rank says why, in time."""

import socket

import pytest

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


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_wrong_key_is_an_error_on_every_rank_that_names_the_key(fleet, odd):
    for worker in start(fleet, 4, by_rank={odd: {"TOTALREDUCE_JOB_KEY": "00" * 32}}):
        answer = worker.read("join")
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert "key" in answer["text"].lower()
        assert answer["seconds"] < 4.0


@pytest.mark.parametrize("without", [0, 2])
def test_a_key_on_some_ranks_only_is_an_error_on_every_rank(fleet, without):
    for worker in start(fleet, 3, by_rank={without: {"TOTALREDUCE_JOB_KEY": None}}):
        answer = worker.read("join")
        assert answer["error"] == "ConfigurationError", (worker.rank, answer)
        assert "job key is" in answer["text"]
        assert "TOTALREDUCE_JOB_KEY" in answer["text"]
        assert answer["seconds"] < 2.0


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


def test_different_settings_are_an_error_on_every_rank(fleet):
    for worker in start(fleet, 3, by_rank={1: {"EAGER": "4096"}}):
        answer = worker.read("join")
        assert answer["error"] == "ConfigurationError", (worker.rank, answer)
        assert "eager_bytes is 65536 on rank 0 and 4096 on rank 1" in answer["text"]
        assert answer["seconds"] < 2.0


@pytest.mark.parametrize("missing", [(2,), (1, 3)])
def test_missing_ranks_are_named_by_every_rank_in_time(fleet, missing):
    stays_away = {rank: {"WORLD_SIZE": "1", "RANK": "0"} for rank in missing}
    for worker in start(fleet, 4, by_rank=stays_away, patience_s=2.5):
        answer = worker.read("join")
        if worker.rank in missing:
            continue
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert f"rank(s) {', '.join(map(str, missing))} did not come" in answer["text"]
        assert answer["seconds"] < 3.5


def test_a_rank_0_that_never_comes_is_named(fleet):
    workers = start(fleet, 3, by_rank={0: {"WORLD_SIZE": "1"}}, patience_s=2.0)
    for worker in workers[1:]:
        answer = worker.read("join")
        assert answer["error"] == "RendezvousError", (worker.rank, answer)
        assert "cannot reach the store at 127.0.0.1" in answer["text"]
        assert "rank 0" in answer["text"]
        assert answer["seconds"] < 4.0


def test_a_port_that_somebody_else_has_is_named(fleet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        workers = start(fleet, 2, MASTER_PORT=port, patience_s=2.0)
        for worker in workers:
            answer = worker.read("join")
            assert answer["error"] == "RendezvousError", (worker.rank, answer)
            assert f"127.0.0.1:{port}" in answer["text"]
            assert "MASTER_PORT" in answer["text"]
            assert answer["seconds"] < 4.0


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
        assert answer["seconds"] < 4.5
    assert workers[2].wait() == 9
