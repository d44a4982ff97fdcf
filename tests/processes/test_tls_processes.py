"""``tr.init`` with certificates, real processes: jobs, losses, and ranks whose files are wrong."""

import dataclasses
import signal
import time

import pytest

from totalreduce.foundation.config import Tls

WORK = """
group = tr.init("tcp", timeout_s=30)
value = torch.arange(100_000, dtype=torch.float64) * (rank + 1)
group.allreduce(value, name="x").wait()
say("sum", last=value[-1].item(), refused=group.statistics().refused_connections)
hear()
try:
    while True:
        group.allreduce(torch.ones(300_000), name="y").wait()
except tr.PeerLost as error:
    say("lost", rank=error.rank, text=str(error))
group.close()
"""


def variables(tls):
    return {
        "TOTALREDUCE_TLS_CERT": str(tls.cert),
        "TOTALREDUCE_TLS_KEY": str(tls.key),
        "TOTALREDUCE_TLS_CA": str(tls.ca),
    }


def by_rank(files):
    return {rank: variables(tls) for rank, tls in enumerate(files)}


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 6.0)])
def test_a_job_over_tls_and_the_loss_of_a_rank(fleet, rank_tls, number, limit_s):
    workers = fleet.start(3, WORK, by_rank=by_rank(rank_tls[:3]))
    for worker in workers:
        facts = worker.read("sum")
        assert (facts["last"], facts["refused"]) == (99_999 * 6.0, 0)
    for worker in workers:
        worker.tell()
    time.sleep(0.2)
    since = workers[1].send(number)
    for worker in (workers[0], workers[2]):
        lost = worker.read("lost")
        assert lost["rank"] == 1
        assert lost["at"] - since < limit_s
        assert worker.wait() == 0
        assert "Traceback" not in worker.errors()


def test_a_rank_that_leaves_is_no_error_for_those_who_need_it_no_more(fleet, rank_tls):
    source = """
    with tr.init("tcp", timeout_s=30, tls=tr.Tls(*os.environ["FILES"].split(":"))) as group:
        value = torch.full((5000,), rank + 1.0)
        group.allreduce(value, name="x").wait()
        say("sum", last=value[-1].item())
    """
    files = {rank: {"FILES": f"{tls.cert}:{tls.key}:{tls.ca}"} for rank, tls in enumerate(rank_tls[:4])}
    workers = fleet.start(4, source, by_rank=files)
    assert [worker.read("sum")["last"] for worker in workers] == [10.0] * 4
    for worker in workers:
        assert worker.wait() == 0
        assert worker.errors() == "" or worker.rank == 0  # rank 0 says where it listens


INIT = """
attempt("init", tr.init, "tcp", timeout_s=20)
"""


def ends(fleet, files):
    """How ``init`` ended on every rank."""
    workers = fleet.start(len(files), INIT, by_rank={rank: variables(tls) for rank, tls in enumerate(files) if tls})
    answers = [worker.read("init") for worker in workers]
    for worker in workers:
        assert worker.wait() == 0
        assert "Traceback" not in worker.errors()
    return answers


def test_a_rank_with_a_foreign_certificate_is_named_to_the_others(fleet, authorities, rank_tls):
    foreign = authorities.issue("alien", "foreign", trusts="foreign")
    answers = ends(fleet, [rank_tls[0], rank_tls[1], foreign])
    assert [answer["error"] for answer in answers] == ["RendezvousError"] * 3
    for answer in answers[:2]:
        assert "rank 2 is lost: the certificate of rank 2 at 127.0.0.1:" in answer["text"]
        assert f"was not signed by CA {rank_tls[0].ca}" in answer["text"]
    assert max(answer["seconds"] for answer in answers) < 15


def test_a_rank_that_holds_a_certificate_of_nobody_says_so_itself(fleet, authorities, rank_tls):
    wrong = dataclasses.replace(authorities.issue("odd", "foreign"), ca=rank_tls[0].ca)
    answers = ends(fleet, [rank_tls[0], wrong])
    assert answers[1]["error"] == "ConfigurationError"
    assert f"this rank's own certificate {wrong.cert} was not signed by CA {wrong.ca}" in answers[1]["text"]
    assert answers[0]["error"] == "RendezvousError"
    assert max(answer["seconds"] for answer in answers) < 15


def test_tls_on_some_ranks_only_is_noticed_at_the_rendezvous(fleet, rank_tls):
    answers = ends(fleet, [rank_tls[0], None])
    assert [answer["error"] for answer in answers] == ["ConfigurationError"] * 2
    assert all("TLS" in answer["text"] for answer in answers)


def test_files_that_do_not_exist(fleet, tmp_path):
    missing = Tls(tmp_path / "a.pem", tmp_path / "a.key", tmp_path / "ca.pem")
    answers = ends(fleet, [missing, missing])
    assert [answer["error"] for answer in answers] == ["ConfigurationError"] * 2
    assert all("a.pem: No such file" in answer["text"] for answer in answers)


LOADS = """
from totalreduce.kernels import exchange, relay

for module in (exchange, relay):
    module.load.cache_clear()
group = tr.init("tcp", timeout_s=30)
say("met", loaded=[module.load.cache_info().currsize for module in (exchange, relay)])
group.close()
"""


def test_the_relay_is_not_loaded_over_tls_because_it_carries_no_encrypted_messages(fleet, rank_tls):
    workers = fleet.start(2, LOADS, by_rank=by_rank(rank_tls[:2]))
    assert [worker.read("met")["loaded"] for worker in workers] == [[0, 0]] * 2
