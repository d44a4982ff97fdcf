"""``totalreduce doctor``: what it finds in real jobs, what it warns of, and the file that it stores."""

import json
import re

import pytest
from typer.testing import CliRunner

from totalreduce.cli.doctor import choices_of, warnings_of, way_between
from totalreduce.cli.main import build
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.probe import read_links
from totalreduce.launch.emulate import EmulatedNetwork
from totalreduce.schedules.select import LinkModel


def run(*arguments, exit_code=0):
    found = CliRunner().invoke(build(["doctor"]), ["doctor", *map(str, arguments)])
    assert found.exit_code == exit_code, found.output
    return found


def test_a_local_job_is_examined_and_its_links_are_stored(tmp_path, warm_python):
    out, links = tmp_path / "out.json", tmp_path / "links.json"
    found = run("-n", 3, "--json", out, "--store", links)
    document = json.loads(out.read_text())
    assert document["survey"]["hosts"] == [0, 0, 0]
    assert len(document["ranks"]) == 3
    assert {mine["way"] for mine in document["ranks"]} <= {"shm", "tcp"}
    assert all(mine["mtu"] > 0 and mine["interface"] for mine in document["ranks"])
    assert document["links"]["local_latency_s"] == max(document["survey"]["local_latency_s"]) > 0
    assert document["links"]["local_bytes_per_s"] == min(document["survey"]["local_bytes_per_s"]) > 0
    stored = read_links(links)
    assert stored.local_latency_s == document["links"]["local_latency_s"]
    assert stored.bytes_per_s == LinkModel().bytes_per_s  # nothing between hosts to measure
    assert "inside a host" in found.stdout
    assert "between hosts:" not in found.stdout
    assert f"TOTALREDUCE_LINKS={links}" in found.stdout
    assert set(document["choices"]) == {"allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"}


def test_compiled_code_is_shown_and_cleared(tmp_path, monkeypatch, warm_python):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "totalreduce" / "compiled"
    kernels = folder / "0123.kernels"
    kernels.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (kernels / "select.nbi").write_bytes(bytes(1_500_000))
    (folder / "exchange.o").write_bytes(bytes(500_000))
    assert run("--clear-code").stdout == f"removed: 2 files, 2.0 MB in {folder}\n"
    assert list(folder.iterdir()) == []
    assert run("--clear-code").stdout == f"removed: 0 files, 0.0 MB in {folder}\n"
    folder.chmod(0o777)
    assert "others may write to the folder" in str(run("--clear-code", exit_code=1).exception)
    folder.rmdir()
    assert run("--clear-code").stdout == "removed: none yet; the first job compiles it\n"


def test_within_a_job_rank_0_speaks_for_all(fleet, tmp_path):
    out = tmp_path / "out.json"
    source = f"""
        import sys
        from totalreduce.cli.main import main
        main(["doctor", "--transport", "tcp", "--json", {str(out)!r}])
    """
    workers = fleet.start(2, source)
    assert [worker.wait(60.0) for worker in workers] == [0, 0]
    document = json.loads(out.read_text())
    assert [mine["way"] for mine in document["ranks"]] == ["tcp", "tcp"]
    assert not document["shared_memory"]
    assert document["choices"]["allreduce"][-1]["schedule"] != "direct"  # as these ranks would choose
    assert document["launcher"] == "totalreduce"


def test_what_makes_no_sense_is_refused(monkeypatch, tmp_path):
    def complaint(*arguments):
        found = CliRunner().invoke(build(["doctor"]), ["doctor", *arguments])
        assert isinstance(found.exception, ConfigurationError)
        return str(found.exception)

    assert "spread evenly" in complaint("-n", "3", "--emulate-hosts", "2")
    monkeypatch.setenv("TOTALREDUCE_RANK", "0")
    monkeypatch.setenv("TOTALREDUCE_WORLD_SIZE", "2")
    monkeypatch.setenv("TOTALREDUCE_MASTER_ADDRESS", "127.0.0.1")
    assert "this job has several ranks already" in complaint("-n", "3")


@pytest.mark.slow
def test_workers_that_cannot_be_examined_end_it():
    found = run("-n", 1, "--transport", "torch", exit_code=2)
    assert "rank 0: transport 'torch' works with torch.distributed" in found.output
    assert "Traceback" not in found.output


@pytest.mark.hosts
def test_emulated_hosts_are_told_apart(tmp_path):
    try:
        EmulatedNetwork(1)  # made, not entered: it only checks what is needed
    except ConfigurationError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    found = run("--emulate-hosts", 2, "--emulate-rate", "200mbit", "-n", 2, "--json", out)
    document = json.loads(out.read_text())
    assert document["survey"]["hosts"] == [0, 1]
    assert 0.3 * 2.5e7 < document["links"]["bytes_per_s"] < 1.3 * 2.5e7
    assert way_between(document, 0, 1) == "tcp"
    assert "packets of 1500 bytes" in found.stdout
    assert "between hosts:" in found.stdout


# ------------------------------------------------------------------------------------------------------------- findings


def job(hosts, by_rank=None, speeds=None, **facts):
    mine = {
        "name": "node",
        "address": "10.0.0.1",
        "interface": "eth0",
        "mtu": 9000,
        "congestion": "cubic",
        "cores": 16,
        "no_shared_memory": "",
        "tls": True,
        "job_key": True,
        "way": "routed",
        **facts,
    }
    ranks = [{**mine, **(by_rank or {}).get(rank, {})} for rank in range(len(hosts))]
    return {"ranks": ranks, "survey": {"hosts": list(hosts), "bytes_per_s": speeds or [0.0] * len(hosts)}}


def test_a_job_as_it_should_be_has_no_warnings():
    assert warnings_of(job((0, 0, 1, 1), speeds=[1e9, 0.0, 0.9e9, 0.0])) == []


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (job((0, 1), mtu=1500), "every host: eth0 sends packets of 1500 bytes"),
        (job((0, 0), mtu=1500, tls=False, job_key=False), None),  # on one host neither matters
        (job((0, 1), by_rank={1: {"congestion": "bbr"}}), "host 1: congestion control 'bbr'"),
        (job((0, 0), by_rank={0: {"cores": 1}}), "host 0: 1 cores for 2 ranks"),
        (job((0, 1, 1), by_rank={1: {"no_shared_memory": "too small"}}), r"host 1: no shared memory \(too small\)"),
        (job((0, 1), by_rank={1: {"tls": False}}), None),
        (job((0, 1), tls=False), "no TLS"),
        (job((0, 1, 2, 3), speeds=[1e9, 1e9, 6e8, 9e8]), r"host 2 \(node\) receives 4.8 Gbit/s, the others 7.6"),
    ],
)
def test_each_flaw_is_named_once(document, expected):
    found = warnings_of(document)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1

        assert re.search(expected, found[0])


def test_without_a_key_and_without_tls_there_are_two_warnings():
    found = warnings_of(job((0, 1), tls=False, job_key=False))
    assert ["TOTALREDUCE_JOB_KEY" in found[0], "no TLS" in found[1]] == [True, True]


def test_ways_between_pairs():
    document = job((0, 0, 1, 1), by_rank={3: {"no_shared_memory": "no memfd"}})
    assert [way_between(document, 0, other) for other in (1, 2, 3)] == ["shm", "tcp", "tcp"]
    assert way_between(document, 2, 3) == "tcp"
    assert way_between(job((0, 0), way="mpi"), 0, 1) == "mpi"


def test_choices_follow_the_links():
    fast = choices_of((0, 1, 2, 3, 4, 5, 6, 7), LinkModel())
    assert fast["allreduce"][0]["schedule"] == "star"
    assert fast["allreduce"][-1]["schedule"] == "ring"
    # 2 (n - 1) / n * 64 MiB at 1 Gbit/s, and latency
    assert fast["allreduce"][-1]["seconds"] == pytest.approx(0.94, rel=0.02)
    assert {row["schedule"] for row in choices_of((0, 0, 1, 1), LinkModel())["allreduce"][2:]} == {"hierarchical"}
    assert choices_of((0, 0, 0, 0), LinkModel())["allreduce"][-1]["schedule"] == "direct"
    over_tcp = choices_of((0, 0, 0, 0), LinkModel(), shared_memory=False)
    assert over_tcp["allreduce"][-1]["schedule"] == "ring"
