"""Groups over MPI: every test starts its ranks with ``mpirun``."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

#: The interpreter itself, whatever the fixture ``warm_python`` puts in its place during a test.
COLD_PYTHON = sys.executable
MPIRUN = Path(sys.executable).with_name("mpirun")
COLLECTIVES = Path(__file__).with_name("programs") / "collectives.py"
FOREIGN = ("TOTALREDUCE_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
BEGIN = """
import os, sys, time
import torch, totalreduce as tr
torch.set_num_threads(1)

def say(*words):
    os.write(1, (" ".join(str(word) for word in words) + "\\n").encode())  # whole lines: mpirun merges the ranks'
"""

pytestmark = [
    pytest.mark.skipif(
        not MPIRUN.exists(), reason="no mpirun beside this Python (`pip install mpi4py mpich` puts one there)"
    ),
    pytest.mark.usefixtures("warm_python"),
]


def mpirun(world_size, *command, python=None, timeout_s=110, **variables):
    """Run a job on ``python`` or ``sys.executable``; its exit code, all lines in alphabetical order, and its errors."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    job = [MPIRUN, "-n", str(world_size), python or sys.executable, *command]
    done = subprocess.run(job, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


def lines(world_size, source, *, python=None, **variables):
    """What the ranks of a job that ends well say."""
    code, said, errors = mpirun(world_size, "-c", BEGIN + textwrap.dedent(source), python=python, **variables)
    assert code == 0, errors
    assert "Traceback" not in errors
    return said


@pytest.mark.parametrize(
    "world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4, 5, 7, 8))]
)
def test_every_case_of_the_conformance_suite(world_size):
    code, said, errors = mpirun(world_size, str(COLLECTIVES), "mpi")
    assert code == 0, errors
    assert len(said) == world_size
    assert all(int(line.removeprefix("compared ")) >= 150 for line in said)


@pytest.mark.parametrize(("level", "warnings"), [("serialized", 0), ("funneled", 2)])
def test_an_mpi_that_not_every_thread_may_call(level, warnings):
    """Two groups at once; what is funnelled says so on every rank, once per group."""
    code, said, errors = mpirun(
        2,
        "-c",
        BEGIN
        + textwrap.dedent(
            """
            from mpi4py import MPI
            groups = [tr.init("mpi", timeout_s=30), tr.init("mpi", name="second", timeout_s=30)]
            tensors = [torch.full((size,), groups[0].rank + 1.0) for size in (10, 300_000)]
            for group in groups:
                for work in [group.allreduce(tensor) for tensor in tensors]:
                    work.wait()
            for group in groups:
                group.close(0.5)
            say(MPI.Query_thread(), *(tensor[-1].item() for tensor in tensors))
            """
        ),
        MPI4PY_RC_THREAD_LEVEL=level,
    )
    assert code == 0, errors
    assert said == [f"{2 if level == 'serialized' else 1} 6.0 6.0"] * 2
    assert errors.count("messages move only while that thread waits") == 2 * warnings


def test_a_group_after_a_refused_one_does_not_disturb_the_programs_own_messages():
    """Settings that differ are an error on every rank. A second group works, while the program sends and receives on
    COMM_WORLD, with our tags, and calls its collectives.
    """
    said = lines(
        3,
        """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        engine = tr.EngineConfig(eager_bytes=1024 * (1 + (world.rank == 2)))
        try:
            tr.init("mpi", timeout_s=30, engine=engine)
        except tr.ConfigurationError as error:
            say(error)
        group = tr.init("mpi", timeout_s=30)
        ours = torch.full((300_000,), group.rank + 1.0)
        work = group.allreduce(ours)
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        for tag in (1, 2):
            got = bytearray(64)
            sent = bytes([group.rank]) * 64
            world.Sendrecv([sent, MPI.BYTE], right, tag, [got, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)
            assert got == bytes([left]) * 64, got
        assert world.allreduce(group.rank) == 3
        work.wait()
        group.close()
        assert world.allreduce(group.rank) == 3
        say(ours[0].item(), ours[-1].item(), group.world_size)
        """,
    )
    assert said[:3] == ["6.0 6.0 3"] * 3
    assert len(said) == 6
    assert all(line.startswith("eager_bytes is 1024 on rank 0 and 2048 on rank 2") for line in said[3:])


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_within_the_time_out():
    said = lines(
        2,
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 0:
            try:
                tr.init("mpi", timeout_s=1)
            except tr.RendezvousError as error:
                say(error)
            MPI.COMM_WORLD.send("enough", 1)
        else:
            MPI.COMM_WORLD.recv()
        os._exit(0)  # MPI cannot be finalised in good order any more
        """,
        python=COLD_PYTHON,  # to mpirun, a stub whose process did not finalise MPI has crashed
    )
    assert len(said) == 1
    assert said[0].startswith("rank 0: not every rank of MPI's COMM_WORLD came to init within 1 s")


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        ("bytes(range(64))", "not a totalreduce header"),
        pytest.param("bytes(7)", "a message of 7 bytes", marks=pytest.mark.slow),
        pytest.param("bytes(9000)", "MPI says", marks=pytest.mark.slow),
    ],
)
def test_nonsense_is_the_loss_of_its_sender_on_both_sides(garbage, reason):
    said = lines(
        2,
        f"""
        from mpi4py import MPI
        group = tr.init("mpi", timeout_s=30)
        group.barrier()
        if group.rank == 0:
            communicator = group._runner.transport._wire._communicator.handle
            communicator.Send([{garbage}, MPI.BYTE], 1, 1)
        try:
            while True:
                group.allreduce(torch.ones(10)).wait()
        except tr.PeerLost as error:
            say(group.rank, error)
        MPI.COMM_WORLD.Barrier()
        os._exit(0)
        """,
        python=COLD_PYTHON,  # to mpirun, a stub whose process did not finalise MPI has crashed
    )
    assert said[0].startswith("0 rank 1 is lost"), said
    assert said[1].startswith("1 rank 0 is lost"), said
    assert reason in said[1]


def test_a_frozen_rank_is_lost():
    code, said, _ = mpirun(
        2,
        "-c",
        BEGIN
        + textwrap.dedent(
            """
            import signal
            group = tr.init("mpi", timeout_s=30)
            pids = torch.zeros(2, dtype=torch.int64)
            pids[group.rank] = os.getpid()
            group.allreduce(pids).wait()
            if group.rank == 0:
                os.kill(pids[1], signal.SIGSTOP)
            try:
                while True:
                    group.allreduce(torch.ones(300_000)).wait()
            except tr.PeerLost as error:
                say(error)
            group.close()
            os.kill(pids[1], signal.SIGKILL)  # mpirun ends the job
            """
        ),
        TOTALREDUCE_PEER_TIMEOUT_S="3",
    )
    assert code != 0
    assert sum(line.startswith("rank 1 is lost: silent for") for line in said) == 1, said


def test_a_killed_rank_ends_the_job():
    """As every MPI program; the launcher does it."""
    code, _, _ = mpirun(
        3,
        "-c",
        BEGIN
        + textwrap.dedent(
            """
            group = tr.init("mpi", timeout_s=30)
            group.barrier()
            if group.rank == 1:
                os.kill(os.getpid(), 9)
            while True:
                group.allreduce(torch.ones(1000)).wait()
            """
        ),
    )
    assert code != 0


def test_a_group_that_nobody_closes_ends_with_the_program():
    said = lines(
        2,
        """
        group = tr.init("mpi", timeout_s=30)
        tensor = torch.full((300_000,), group.rank + 1.0)
        group.allreduce(tensor).wait()
        say(tensor[-1].item())
        """,
    )
    assert said == ["3.0"] * 2


def test_a_launcher_that_is_not_mpis_is_an_error():
    """mpirun of another MPI than mpi4py's: every process is alone, and believes that it is rank 0."""
    code, said, errors = mpirun(
        1,
        "-c",
        BEGIN
        + textwrap.dedent(
            """
            try:
                tr.init("mpi")
            except tr.ConfigurationError as error:
                say(error)
            """
        ),
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_SIZE="4",
    )
    assert code == 0, errors
    assert said[0].startswith("MPI says that this process is alone, openmpi that it is one of 4")


@pytest.mark.slow
@pytest.mark.parametrize("forks", [3, 200])
def test_forked_children_end_without_ending_mpi(forks):
    """Their copy of mpi4py must not call ``MPI_Finalize``, which would abort through the parent's pipe to mpirun."""
    said = lines(
        2,
        f"""
        group = tr.init("mpi", timeout_s=60)
        lived_s = []
        for turn in range({forks}):
            tensor = torch.full((500_000,), float(group.rank + turn))
            work = group.allreduce(tensor, name="w")
            pid = os.fork()
            if pid == 0:
                try:
                    group.allreduce(torch.ones(3))
                except tr.GroupClosed as error:
                    sys.exit(3 if "forked from it" in str(error) else 4)
            work.wait()
            begin = time.monotonic()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            lived_s.append(time.monotonic() - begin)
            assert bool((tensor == 2 * turn + 1).all())
        say("right", *group.allreduce(torch.ones(2)).wait().tolist(), max(lived_s) < 5)
        """,
    )
    assert said == ["right 2.0 2.0 True"] * 2
