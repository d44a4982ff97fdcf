"""A Slurm of one's own: munged, slurmctld and two slurmd on this machine, for as long as a test runs.

The two nodes are called by addresses of the loopback interface, so that their names resolve everywhere. Nothing is
written outside the given folder; the system's own Slurm, if there is one, is neither used nor disturbed.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time

from totalreduce.launch.workers import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "salloc", "srun", "scontrol", "sinfo", "squeue", "scancel")
NODES = ("127.0.0.1", "127.0.0.2")
START_S = 30.0
STOP_S = 10.0

#: How long a job that is requeued waits before it starts again.
REQUEUE_S = 5

# The job ids are random, because the port of the rendezvous follows from them.
CONFIGURATION = """\
ClusterName=site
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_s}
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
FirstJobId={first_job_id}
KillWait=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def find(program):
    """Its path, also where the daemons' folder is not in PATH."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def missing():
    """Why there can be no Slurm here, or None."""
    absent = [program for program in (*DAEMONS, *COMMANDS) if find(program) is None]
    return f"no {', '.join(absent)} (Debian's packages slurm-wlm and munge have them)" if absent else None


class SlurmError(Exception):
    """A daemon did not start; the message has the end of what it said."""


class SlurmSite:
    """Two nodes of eight processors each, whatever the machine has."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """End the jobs, then the daemons, each by its process id."""
        if len(self._daemons) == len(NODES) + 2:
            self._ask("scancel", "--full", "--user", pwd.getpwuid(os.geteuid()).pw_name)
            self._until(lambda: not self._ask("squeue", "--noheader"), STOP_S)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def wait(self, job, timeout_s=60.0):
        """How a batch job ended: ``COMPLETED``, ``FAILED``, ... (``sbatch --wait`` looks after 2, 10, 42 seconds)."""
        states = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
        state = "PENDING"

        def has_ended():
            nonlocal state
            words = self._ask("scontrol", "--oneliner", "show", "job", job)
            state = next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "PENDING")
            return state not in states

        self._until(has_ended, timeout_s)
        return state

    def command(self, program, *arguments):
        """Run a command of Slurm's; return what it prints."""
        done = self._run_command(program, *map(str, arguments))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _start(self):
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        nodes = [f"NodeName={name} NodeAddr={name} Port={free_port()} CPUs=8" for name in NODES]
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                port=free_port(),
                user=pwd.getpwuid(os.geteuid()).pw_name,
                folder=folder,
                requeue_s=REQUEUE_S,
                first_job_id=1000 + secrets.randbelow(1_000_000),
                nodes="\n".join(nodes),
            )
        )
        files = {
            "key": "key",
            "socket": "munge.socket",
            "pid": "munged.pid",
            "log": "munged.log",
            "seed": "munged.seed",
        }
        options = [f"--{name if name == 'socket' else f'{name}-file'}={folder / file}" for name, file in files.items()]
        # --force: pytest's folders are closed to other users, and nobody else is to use this munged.
        self._run("munged", "--foreground", "--force", *options)
        self._await("munged", (folder / "munge.socket").exists)
        self._run("slurmctld", "-D")
        for name in NODES:
            self._run("slurmd", "-D", "-N", name)
        self._await("Slurm", lambda: self._ask("sinfo", "--noheader", "--Node", "--format=%t") == ["idle"] * len(NODES))

    def _run(self, program, *arguments):
        # If the tests are killed, the daemons go with them.
        command = ["setpriv", "--pdeathsig", "TERM", find(program), *arguments]
        with open(self.folder / f"output-{len(self._daemons)}", "wb") as output:
            daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **self.environment}
            )
        self._daemons.append(daemon)

    def _ask(self, program, *arguments):
        """The words a command prints; none while slurmctld does not answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._run_command(program, *arguments).stdout.split()
        return []

    def _run_command(self, program, *arguments):
        return subprocess.run(
            [find(program), *arguments],
            capture_output=True,
            text=True,
            timeout=STOP_S,
            env={**os.environ, **self.environment},
            check=False,
        )

    def _await(self, what, is_there):
        if not self._until(is_there, START_S):
            said = [path.read_text(errors="replace")[-500:] for path in sorted(self.folder.glob("output-*"))]
            raise SlurmError(f"{what} does not start here: {' | '.join(said)}")

    def _until(self, condition, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                return False
            time.sleep(0.05)
        return True
