"""Which launcher started this process, and what the TOTALREDUCE_* variables say."""

import os
import sys

import pytest
from typer.testing import CliRunner

from totalreduce.cli import run
from totalreduce.cli.main import build
from totalreduce.foundation.environment import (
    is_debugging,
    read_job_key,
    read_settings,
    read_world,
    users_path,
    working_folder,
)
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.world import expand_counts, expand_hostlist
from totalreduce.launch.placement import HostOptions

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-4851@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def test_nothing_set_is_a_world_of_one():
    world = read_world({"PATH": "/bin"})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert (world.master_address, world.launcher, world.job_id) == ("127.0.0.1", "single", "")


def test_torchrun_with_its_own_store():
    world = read_world(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.master_address, world.master_port) == ("node7", 29500)
    assert (world.launcher, world.job_id, world.store_is_served) == ("torchrun", "abc", True)


def test_own_launcher_uses_torchrun_variables_without_a_served_store():
    env = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
    world = read_world({**env, "TOTALREDUCE_JOB_ID": "run-1"})
    assert (world.launcher, world.job_id, world.store_is_served) == ("totalreduce", "run-1", False)


def test_openmpi_on_one_host_meets_on_loopback_at_a_port_of_the_job():
    world = read_world(OPENMPI)
    assert (world.rank, world.world_size, world.launcher) == (1, 2, "openmpi")
    assert world.master_address == "127.0.0.1"
    assert 20_000 <= world.master_port < 32_000
    assert world.master_port == read_world({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"}).master_port
    assert world.master_port != read_world({**OPENMPI, "PMIX_NAMESPACE": "other"}).master_port


@pytest.mark.parametrize(
    ("env", "local_size", "remedy"),
    [
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -x MASTER_ADDR"),
        (MPICH, "MPI_LOCALNRANKS", "-genv MASTER"),
    ],
)
def test_mpi_over_several_hosts_needs_an_address(env, local_size, remedy):
    env = {**env, local_size: "1", local_size.replace("SIZE", "RANK").replace("NRANKS", "RANKID"): "0"}
    with pytest.raises(ConfigurationError, match=remedy):
        read_world(env)
    assert read_world({**env, "MASTER_ADDR": "first"}).master_address == "first"


def test_mpich():
    world = read_world(MPICH)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (2, 3, 2, 3)
    assert world.launcher == "mpich"


def test_slurm_step_takes_the_first_host_of_the_step():
    world = read_world(SLURM)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 7, 1, 2)
    assert (world.master_address, world.launcher, world.job_id) == ("gpu08", "slurm", "77.0")
    last = read_world({**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"})
    assert last.local_world_size == 1
    assert last.master_port == world.master_port


def test_slurm_on_one_host_meets_on_loopback():
    env = {**SLURM, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert read_world(env).master_address == "127.0.0.1"


def test_slurm_batch_shell_is_not_a_task():
    assert read_world({**SLURM, "SLURM_STEP_ID": ""}).world_size == 1


def test_step_variables_win_over_those_of_the_job():
    env = {**SLURM, "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "other[1-8]", "SLURM_STEP_NUM_TASKS": "7"}
    assert (read_world(env).world_size, read_world(env).master_address) == (7, "gpu08")


def test_precedence():
    everything = {**SLURM, **MPICH, **OPENMPI, **TORCHRUN}
    own = {"TOTALREDUCE_RANK": "0", "TOTALREDUCE_WORLD_SIZE": "9"}
    assert read_world({**everything, **own}).launcher == "manual"
    assert read_world(everything).launcher == "torchrun"
    assert read_world({**SLURM, **MPICH, **OPENMPI}).launcher == "openmpi"
    assert read_world({**SLURM, **MPICH}).launcher == "mpich"
    pmi_of_slurm = {"PMI_RANK": "5", "PMI_SIZE": "7"}
    assert read_world({**SLURM, **pmi_of_slurm}).launcher == "slurm"


def test_world_size_exported_by_a_batch_script_is_checked_against_the_launcher():
    assert read_world({**SLURM, "WORLD_SIZE": "7"}).launcher == "slurm"
    with pytest.raises(ConfigurationError, match="WORLD_SIZE=8, but slurm started 7"):
        read_world({**SLURM, "WORLD_SIZE": "8"})


def test_started_by_hand_without_local_ranks():
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    here, there = read_world(env), read_world({**env, "MASTER_ADDR": "10.0.0.1"})
    assert (here.local_rank, here.local_world_size) == (1, 2)
    assert (there.local_rank, there.local_world_size) == (0, 1)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"TOTALREDUCE_WORLD_SIZE": "2"}, "TOTALREDUCE_RANK"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be smaller than WORLD_SIZE=2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK is missing"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is larger"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({**SLURM, "SLURM_NODEID": "9"}, "SLURM_NODEID=9"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "tasks per host"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "host list"),
    ],
)
def test_contradictions_name_the_variable(env, names):
    with pytest.raises(ConfigurationError) as failure:
        read_world(env)
    assert names in str(failure.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node", ["node"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[9-11],b,c2", ["a9", "a10", "a11", "b", "c2"]),
        ("r[0-1]n[00,02]x", ["r0n00x", "r0n02x", "r1n00x", "r1n02x"]),
        ("c-1.example.org,c-2", ["c-1.example.org", "c-2"]),
    ],
)
def test_hostlists(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[3-1]", "n[a]", "n[]", "n[1", "n1]", "a,,b", "n[0-99999999]", "[0-999]" * 3])
def test_what_is_no_hostlist(text):
    with pytest.raises(ConfigurationError, match="host list"):
        expand_hostlist(text)


def test_task_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigurationError):
        expand_counts("2(x999999999)")


def test_job_key_in_the_environment():
    assert read_job_key({}) is None
    assert read_job_key({"TOTALREDUCE_JOB_KEY": "00ff" * 8}) == bytes.fromhex("00ff" * 8)
    assert read_job_key({"TOTALREDUCE_JOB_KEY": "correct horse"}) == b"correct horse"


def test_job_key_file(tmp_path):
    path = tmp_path / "key"
    env = {"TOTALREDUCE_JOB_KEY_FILE": str(path)}
    with pytest.raises(ConfigurationError, match="No such file"):
        read_job_key(env)
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_job_key(env)
    path.write_text("ab" * 16 + "\n")
    path.chmod(0o644)
    assert read_job_key(env) == b"\xab" * 16
    assert "chmod 600" in read_settings(env).warnings[0]
    path.chmod(0o600)
    assert read_settings(env).warnings == ()


def test_settings():
    settings = read_settings(
        env := {
            "TOTALREDUCE_TIMEOUT_S": "2.5",
            "TOTALREDUCE_TIMELINE": "out.json",
            "TOTALREDUCE_ADDRESS": "10.0.0.2",
            "TOTALREDUCE_INTERFACE": "eth1",
            "TOTALREDUCE_PEER_TIMEOUT_S": "4",
            "TOTALREDUCE_COMPUTE": "inline",
            "TOTALREDUCE_LOG": "INFO",
            "TOTALREDUCE_DEBUG": "1",
            "TOTALREDUCE_TIMEOUT": "3",
        }
    )
    assert (settings.timeout_s, settings.peer_timeout_s, str(settings.timeline)) == (2.5, 4.0, "out.json")
    assert (settings.address, settings.interface, settings.log_level) == ("10.0.0.2", "eth1", "info")
    assert settings.compute == "inline"
    assert is_debugging(env) is True
    assert is_debugging({}) is False
    assert len(settings.warnings) == 1
    assert "TOTALREDUCE_TIMEOUT " in settings.warnings[0]
    assert "(did you mean 'TOTALREDUCE_TIMEOUT_S'?)" in settings.warnings[0]
    assert read_settings({}).warnings == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOTALREDUCE_TIMEOUT_S", "soon"),
        ("TOTALREDUCE_TIMEOUT_S", "0"),
        ("TOTALREDUCE_PEER_TIMEOUT_S", "nan"),
        ("TOTALREDUCE_PEER_TIMEOUT_S", "inf"),
        ("TOTALREDUCE_COMPUTE", "quickly"),
        ("TOTALREDUCE_LOG", "loud"),
    ],
)
def test_settings_that_make_no_sense(name, value):
    with pytest.raises(ConfigurationError, match=name):
        read_settings({name: value})


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """A folder ``real/user/job`` in which this process is, and the link ``home`` to ``real``, through which it came."""
    folder = tmp_path / "real" / "user" / "job"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder.parent / "python").touch()
    (tmp_path / "real" / "outside").touch()
    (tmp_path / "home").symlink_to("real")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(tmp_path / "home" / "user" / "job"))
    return tmp_path


def test_the_present_folder_has_the_name_that_the_user_gave_it(linked):
    assert working_folder() == f"{linked}/home/user/job"


@pytest.mark.parametrize(
    "named", ["", "home/user/job", "{}/home", "{}/home/./user/job", "{}/absent", "{}/home/user/job/../job"]
)
def test_a_name_that_is_not_that_of_the_present_folder_is_not_used(linked, monkeypatch, named):
    monkeypatch.setenv("PWD", named.format(linked))
    assert working_folder() == f"{linked}/real/user/job"
    assert users_path(f"{linked}/real/user/job/bin/python") == f"{linked}/real/user/job/bin/python"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("real/user/job/bin/python", "home/user/job/bin/python"),
        ("real/user/job/../job/bin/python", "home/user/job/../job/bin/python"),
        ("real/user/python", "home/user/python"),
        ("real/outside", "home/outside"),
        ("real/user/job2/python", "real/user/job2/python"),  # there is none
        ("home/user/job/bin/python", "home/user/job/bin/python"),
    ],
)
def test_a_path_below_the_present_folder_or_beside_it_has_the_users_name(linked, path, expected):
    assert users_path(f"{linked}/{path}") == f"{linked}/{expected}"
    assert users_path("/usr/bin/env") == "/usr/bin/env"


def test_other_hosts_run_the_python_of_this_one_by_the_users_name(linked, monkeypatch):
    monkeypatch.setattr(sys, "executable", f"{linked}/real/user/job/bin/python")
    assert HostOptions(hosts=()).python == f"{linked}/home/user/job/bin/python"


def test_the_command_names_the_python_of_other_hosts_in_the_same_way(linked, monkeypatch):
    def note(*_, where, **__):
        named.append(where.python)
        raise ConfigurationError("nothing is started")

    named = []
    (linked / "real" / "user" / "job" / "train.py").touch()
    monkeypatch.setattr(sys, "executable", f"{linked}/real/user/job/bin/python")
    monkeypatch.setattr(run, "run_workers", note)
    for options in ([], ["--remote-python", f"{linked}/real/outside"]):
        CliRunner().invoke(build(["run"]), ["run", "-H", "127.0.0.2:1", *options, "train.py"])
    assert named == [f"{linked}/home/user/job/bin/python", f"{linked}/real/outside"]


def test_a_folder_that_was_removed_is_an_error(linked):
    (linked / "real" / "gone").mkdir()
    os.chdir(linked / "real" / "gone")
    (linked / "real" / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="the present folder was removed"):
        users_path("/usr/bin/env")
