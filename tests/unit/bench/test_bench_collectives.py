"""``bench collectives``: what must cross a host's link, who takes part, and from samples to figures."""

import json
import socket
import threading
import time

import pytest

from totalreduce.bench import mpi_launching
from totalreduce.bench.arithmetic import bus_factor_of, wire_bytes
from totalreduce.bench.collectives import (
    CollectiveRow,
    CollectivesSamples,
    Contestant,
    contestants,
    parse_kinds,
    summarise,
)
from totalreduce.bench.command import make_setting
from totalreduce.bench.launching import Setting
from totalreduce.bench.mpi_rank import MpiRank
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.foundation.types import OpKind
from totalreduce.schedules import algorithms_of

EIGHT = tuple(range(8))
TWO_BY_FOUR = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "eight", "two_by_four", "uneven"),
    [
        # Of 1000 bytes: 8 hosts of one rank, 2 hosts of 4 ranks, and hosts of 3 and 1 ranks, the root on the larger.
        (OpKind.ALLREDUCE, 1750, 1000, 1000),
        (OpKind.BROADCAST, 1000, 1000, 1000),
        (OpKind.REDUCE, 1000, 1000, 1000),
        (OpKind.ALLGATHER, 875, 500, 750),  # uneven: the small host must receive three blocks
        (OpKind.REDUCE_SCATTER, 875, 500, 750),
        (OpKind.GATHER, 875, 500, 250),
        (OpKind.SCATTER, 875, 500, 250),
        (OpKind.ALLTOALL, 875, 2000, 750),  # nothing can be combined: 4 ranks times 4 blocks of an eighth
        (OpKind.SEND_RECV, 1000, 1000, 1000),
        (OpKind.BARRIER, 0, 0, 0),
    ],
)
def test_what_must_cross_the_busiest_link(kind, eight, two_by_four, uneven):
    assert wire_bytes(kind, 1000, EIGHT) == eight
    assert wire_bytes(kind, 1000, TWO_BY_FOUR) == two_by_four
    assert wire_bytes(kind, 1000, (0, 0, 0, 1)) == uneven
    assert wire_bytes(kind, 1000, (0, 0, 0)) == 0


def test_a_message_inside_a_host_crosses_no_link():
    assert wire_bytes(OpKind.SEND_RECV, 1000, (0, 1, 0)) == 0
    assert wire_bytes(OpKind.GATHER, 1000, (0, 0, 0, 1), root=3) == 750


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factor_of(OpKind.ALLREDUCE, 8) == 1.75
    assert bus_factor_of(OpKind.BROADCAST, 8) == bus_factor_of(OpKind.REDUCE, 8) == 1
    for kind in (OpKind.ALLGATHER, OpKind.REDUCE_SCATTER, OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER):
        assert bus_factor_of(kind, 8) == 0.875


def test_every_schedule_there_is_takes_turns_and_no_other():
    names = [algorithm.name.lower() for algorithm in algorithms_of(OpKind.ALLREDUCE)]
    every = contestants(OpKind.ALLREDUCE, ["totalreduce", "gloo"], "all")
    assert every[0] == Contestant("totalreduce", "auto")
    assert every[-1] == Contestant("gloo", "auto")
    assert sorted(one.schedule for one in every[1:-1]) == sorted(names)
    assert contestants(OpKind.BROADCAST, ["totalreduce"], "chain,ring") == [
        Contestant("totalreduce", "auto"),
        Contestant("totalreduce", "chain"),
    ]
    assert contestants(OpKind.ALLTOALL, ["totalreduce", "mpich"], "all") == [
        Contestant("totalreduce", "auto"),
        Contestant("mpich", "auto"),
    ]
    with pytest.raises(ConfigurationError, match="not butterfly"):
        contestants(OpKind.ALLREDUCE, ["totalreduce"], "butterfly")


def test_collectives_are_chosen_by_name():
    assert parse_kinds("allgather, reduce") == [OpKind.ALLGATHER, OpKind.REDUCE]
    assert len(parse_kinds("all")) == len(OpKind) - 1  # all but the barrier
    with pytest.raises(ConfigurationError, match="not allsum"):
        parse_kinds("allsum")


def result(seconds, goodput=9.5e8):
    contestants = [Contestant("totalreduce", "auto"), Contestant("totalreduce", "direct"), Contestant("gloo", "auto")]
    expected_s = {"ring": 2e-5, "direct": 3e-5}
    return CollectivesSamples(
        [goodput], [CollectiveRow("allgather", 1000, 250, contestants, seconds, [[]] * 3, [[]] * 3, expected_s)]
    )


def test_the_slowest_rank_counts_and_the_share_is_of_the_collectives_own_limit():
    results = [
        result([[1e-5, 2e-5, 4e-5], [1e-5] * 3, [4e-5] * 3]),
        result([[2e-5, 1e-5, 3e-5], [3e-5] * 3, [6e-5, 4e-5, 8e-5]]),
    ]
    chosen, direct, gloo = summarise(results, (0, 1), 1e9)
    assert (chosen.seconds.median, chosen.seconds.high) == (2e-5, 4e-5)
    assert (chosen.chosen, chosen.expected_s, chosen.gain) == ("ring", 2e-5, None)
    # Half of 1000 bytes at 1 Gbit/s: 4 µs.
    assert chosen.share_of_rate == pytest.approx(0.2)
    assert chosen.share_of_tcp == pytest.approx(0.2 / 0.95)
    assert chosen.algorithm_bytes_per_s == pytest.approx(5e7)
    assert chosen.bus_bytes_per_s == pytest.approx(2.5e7)
    assert (direct.chosen, direct.expected_s) == ("direct", 3e-5)
    assert direct.gain.median == pytest.approx(1.5)  # rounds: 3/2, 3/2, 3/4
    assert (gloo.chosen, gloo.expected_s) == ("", None)
    assert gloo.gain.median == pytest.approx(2.0)  # 6/2, 4/2, 8/4
    on_one_host = summarise(results, (0, 0), None)
    assert [figure.share_of_rate for figure in on_one_host] == [None] * 3
    assert [figure.share_of_tcp for figure in on_one_host] == [None] * 3


# ------------------------------------------------------------------------------------------------------------- settings


def test_hosts_have_blocks_of_ranks():
    assert Setting(ranks=8, hosts=2).host_of_rank == TWO_BY_FOUR
    assert Setting(ranks=3).host_of_rank == (0, 0, 0)


def test_peers_and_ranks_as_options_say_them():
    setting = make_setting(
        None, 2, "1gbit", ["gloo, fifo", "gloo"], 3, ranks_per_host=4, mpirun=["mpich=/opt/mpirun"], transport="tcp"
    )
    assert (setting.ranks, setting.hosts, setting.transport) == (8, 2, "tcp")
    assert setting.peers == ["totalreduce", "gloo", "fifo"]
    assert {name: str(path) for name, path in setting.mpirun.items()} == {"mpich": "/opt/mpirun"}
    assert make_setting(None, 0, "1gbit", ["openmpi,mpich"], 3).mpi_peers == ["openmpi", "mpich"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ranks_per_host": 2}, "goes with --emulate-hosts"),
        ({"ranks": 5, "emulate_hosts": 2, "ranks_per_host": 2}, "are not --ranks 5"),
        ({"mpirun": ["/opt/mpirun"]}, "openmpi=PATH"),
        ({"mpirun": ["lam=/opt/mpirun"]}, "openmpi or mpich, not lam"),
        ({"emulate_hosts": 2, "against": ["mpich"]}, "one host only"),
        ({"against": ["nccl"]}, "gloo, fifo, openmpi, mpich, not nccl"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        make_setting(**options)


# ------------------------------------------------------------------------------------------------------------------ MPI


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_launcher_is_known_by_what_it_says_of_itself(tmp_path):
    openmpi = script(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    assert mpi_launching._launcher("openmpi", openmpi) == openmpi
    for place in (openmpi, tmp_path / "nothing"):
        with pytest.raises(ConfigurationError, match=r"is no mpirun of it.*pip install mpich mpi4py"):
            mpi_launching._launcher("mpich", place)


def test_the_python_beside_the_launcher_goes_first(tmp_path, monkeypatch):
    python = script(tmp_path / "python3", "echo 'MPICH Version:      5.0.2'")
    assert mpi_launching._python("mpich", tmp_path / "mpirun") == str(python)
    monkeypatch.setattr(mpi_launching.sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(ConfigurationError, match=r"python3 has mpi4py over MPICH .*5\.0\.2\. .*install mpi4py"):
        mpi_launching._python("openmpi", tmp_path / "mpirun")
    script(python, "exit 1")
    with pytest.raises(ConfigurationError, match="python3 has not both mpi4py and NumPy"):
        mpi_launching._python("mpich", tmp_path / "mpirun")


def test_an_mpi_job_that_ends_early_says_why_and_one_that_does_not_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi_launching, "_python", lambda *_: "python")
    monkeypatch.setattr(mpi_launching, "_END_S", 0.2)
    failing = script(
        tmp_path / "mpirun", 'case $1 in --version) echo HYDRA;; *) echo "no slots for $2" >&2; exit 3;; esac'
    )
    with mpi_launching.mpi_jobs(["mpich"], {"mpich": failing}, 7, tmp_path):
        ended = tmp_path / "mpich.ended"
        for _ in range(500):
            if ended.exists() and ended.read_text():
                break
            time.sleep(0.01)
        assert mpi_launching.explain(tmp_path, "mpich") == "mpirun ended with exit code 3: no slots for 7"
    ended.unlink()
    staying = script(tmp_path / "stay", "case $1 in --version) echo HYDRA;; *) exec sleep 60;; esac")
    with mpi_launching.mpi_jobs(["mpich"], {"mpich": staying}, 2, tmp_path):
        assert mpi_launching.explain(tmp_path, "mpich") is None


def answering(folder, hello, *answers):
    """A thread that is rank 3 of an MPI job: says hello, then answers what it is asked; returns what that was."""
    asked = []

    def body():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "mpich.3"))
            with connection.makefile("rw") as stream:
                print(json.dumps(hello), file=stream, flush=True)
                for answer in answers:
                    asked.append(json.loads(stream.readline()))
                    print(json.dumps(answer), file=stream, flush=True)

    thread = threading.Thread(target=body)
    thread.start()
    return asked, thread


def test_a_sample_is_asked_for_and_an_error_there_is_one_here(tmp_path):
    rank = MpiRank(tmp_path, "mpich", 3)
    hello = {"rank": 3, "size": 4, "version": "MPICH Version: 5.0"}
    asked, thread = answering(tmp_path, hello, {"seconds": 0.25}, {"error": "ValueError: a wrong result"})
    rank.meet(4)
    assert rank.sample("allgather", 12, 5, "float32") == 0.25
    assert asked == [{"kind": "allgather", "count": 12, "times": 5, "dtype": "float32"}]
    with pytest.raises(TotalReduceError, match=r"mpich's rank 3: ValueError: a wrong result"):
        rank.sample("allgather", 12, 5, "float32")
    thread.join()
    (tmp_path / "mpich.errors").write_text("killed")
    (tmp_path / "mpich.ended").write_text("137")
    with pytest.raises(TotalReduceError, match="mpich's rank 3: mpirun ended with exit code 137: killed"):
        rank.sample("allgather", 12, 5, "float32")
    rank.close()


@pytest.mark.parametrize("hello", [{"size": 4, "version": "Open MPI v5.0"}, {"size": 1, "version": "MPICH 5.0"}])
def test_an_mpi4py_of_another_mpi_is_found_out(tmp_path, hello):
    rank = MpiRank(tmp_path, "mpich", 3)
    _, thread = answering(tmp_path, {"rank": 0, **hello})
    with pytest.raises(TotalReduceError, match="its mpi4py belongs to another MPI"):
        rank.meet(4)
    thread.join()


def test_an_mpi_that_does_not_come_says_why(tmp_path):
    (tmp_path / "mpich.errors").write_text("no such host")
    (tmp_path / "mpich.ended").write_text("1")
    with pytest.raises(TotalReduceError, match=r"mpich's rank 3: mpirun ended with exit code 1: no such host"):
        MpiRank(tmp_path, "mpich", 3).meet(4)
