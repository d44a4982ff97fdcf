"""Rank, world size and meeting point of this process, from the variables of its launcher.

In order of precedence:

==========  =================================================  ========================================
launcher    rank and size                                      local rank and size
==========  =================================================  ========================================
by hand     ``TOTALREDUCE_RANK``, ``TOTALREDUCE_WORLD_SIZE``   ``TOTALREDUCE_LOCAL_RANK, ..._WORLD_SIZE``
torchrun    ``RANK``, ``WORLD_SIZE`` (`totalreduce run` too)   ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``
Open MPI    ``OMPI_COMM_WORLD_RANK``, ``..._SIZE``             ``OMPI_COMM_WORLD_LOCAL_RANK, ..._SIZE``
MPICH       ``PMI_RANK``, ``PMI_SIZE`` (Intel MPI too)         ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``
Slurm       ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``         ``SLURM_LOCALID``, tasks per node
==========  =================================================  ========================================

Without any of them it is a world of one. The functions are pure; ``environment.py`` supplies the variables.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["World", "expand_counts", "expand_hostlist", "world_from"]

#: The range of ports derived from the job's id: the ports of outgoing connections begin at 32768.
_PORT_FIRST, _PORT_COUNT = 20_000, 12_000
#: A longer Slurm list is a mistake, not a cluster; expanding ``n[0-9999999999]`` would take all memory.
_HOSTS_MAX = 100_000

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class World:
    """The rank of a process among the processes of its job, and their meeting point."""

    rank: int  #: 0 to ``world_size - 1``.
    world_size: int  #: Number of processes of the job.
    local_rank: int  #: Rank among the processes of this host.
    local_world_size: int  #: Number of the job's processes on this host.
    master_address: str  #: Host of rank 0.
    master_port: int  #: Port for the rendezvous on it.
    launcher: str  #: ``manual``, ``totalreduce``, ``torchrun``, ``openmpi``, ``mpich``, ``slurm`` or ``single``.
    job_id: str  #: Equal on all ranks and different between jobs, as far as the launcher has one; may be "".
    #: Whether the launcher serves a ``TCPStore`` at the master port (as torchrun's agent does), so that rank 0 must
    #: connect like the others and not listen.
    store_is_served: bool = False


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job_ids: tuple[str, ...] = ()
    export_command: str = "export {}"


_LAUNCHERS = (
    _Launcher(
        *("manual", "TOTALREDUCE_RANK", "TOTALREDUCE_WORLD_SIZE"),
        *("TOTALREDUCE_LOCAL_RANK", "TOTALREDUCE_LOCAL_WORLD_SIZE"),
    ),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    _Launcher(
        *("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
        "mpirun -x {}",
    ),
    _Launcher(
        *("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
        "mpiexec -genv {}",
    ),
)


def world_from(env: Mapping[str, str]) -> World:
    """Return the world of this process; see :func:`totalreduce.foundation.environment.read_world`.

    ``env``: the variables, none of them empty.
    """
    incomplete: _Launcher | None = None
    for launcher in _LAUNCHERS:
        present = [name for name in (launcher.rank, launcher.size) if name in env]
        if len(present) == 1:
            # Batch scripts often export WORLD_SIZE only and leave the rank to srun: no fault by itself.
            incomplete = incomplete or launcher
        elif present and not _is_slurm_pmi(launcher, env):
            return _checked_against(incomplete, env, _from_launcher(launcher, env))
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return _checked_against(incomplete, env, _from_slurm(env))
    if incomplete:
        there, missing = incomplete.rank, incomplete.size
        if missing in env:
            there, missing = missing, there
        raise ConfigurationError(f"{there} is set but {missing} is not. Set both, or unset {there}.")
    return World(0, 1, 0, 1, _address(env) or "127.0.0.1", _port(env, ""), "single", _job_id(env, ()))


def _from_launcher(launcher: _Launcher, env: Mapping[str, str]) -> World:
    rank, size = _number(env, launcher.rank), _number(env, launcher.size)
    _check_rank(launcher.rank, rank, launcher.size, size)
    address = _address(env)
    local_rank, local_size = _local(launcher, env, rank, size, address)
    if address is None and local_size < size:
        remedy = launcher.export_command.format("MASTER_ADDR=<host of rank 0>")
        raise ConfigurationError(
            f"{size} ranks on several hosts ({local_size} here), and nothing says where rank 0 is: "
            f"set MASTER_ADDR on every rank (`{remedy}`), and MASTER_PORT the same way if you like."
        )
    name = launcher.name
    served = name == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if name == "torchrun" and "TOTALREDUCE_JOB_ID" in env and "TORCHELASTIC_RUN_ID" not in env:
        name = "totalreduce"
    job_id = _job_id(env, launcher.job_ids)
    port = _port(env, job_id)
    return World(rank, size, local_rank, local_size, address or "127.0.0.1", port, name, job_id, served)


def _local(launcher: _Launcher, env: Mapping[str, str], rank: int, size: int, address: str | None) -> tuple[int, int]:
    names = (launcher.local_rank, launcher.local_size)
    missing = [name for name in names if name not in env]
    if len(missing) == 1:
        raise ConfigurationError(f"{missing[0]} is missing: set both of {' and '.join(names)}, or neither.")
    if missing:
        # Started by hand, one process a host, or all on this one: the address is the only thing that tells.
        is_one_host = address is None or address == "localhost" or address.startswith(("127.", "::1"))
        return (rank, size) if is_one_host else (0, 1)
    local_rank, local_size = _number(env, names[0]), _number(env, names[1])
    _check_rank(names[0], local_rank, names[1], local_size)
    if local_size > size:
        raise ConfigurationError(f"{names[1]}={local_size} is larger than {launcher.size}={size}")
    return local_rank, local_size


def _is_slurm_pmi(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    # `srun --mpi=pmi2` speaks PMI too, but only its SLURM_* variables tell the local rank and the hosts.
    return launcher.name == "mpich" and launcher.local_rank not in env and "SLURM_STEP_ID" in env


def _from_slurm(env: Mapping[str, str]) -> World:
    # A plain batch shell has SLURM_PROCID=0 as well; only a step (srun) starts tasks: STEP variables first.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if size_name not in env:
        raise ConfigurationError("SLURM_PROCID is set but SLURM_NTASKS is not. Start with `srun -n <tasks>`.")
    rank, size = _number(env, "SLURM_PROCID"), _number(env, size_name)
    _check_rank("SLURM_PROCID", rank, size_name, size)
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    hosts = expand_hostlist(listed) if listed else []
    local_rank = _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank
    local_size = _slurm_local_size(env, size, len(hosts))
    _check_rank("SLURM_LOCALID", local_rank, "tasks on this host", local_size)
    address = _address(env)
    if address is None and local_size < size:
        if not hosts:
            raise ConfigurationError(
                f"{size} tasks on several hosts and no SLURM_STEP_NODELIST: set MASTER_ADDR before srun."
            )
        address = hosts[0]
    step_id = env["SLURM_STEP_ID"]
    job_id = _job_id(env, ()) or f"{env.get('SLURM_JOB_ID', '')}.{step_id}"
    port = _port(env, job_id)
    return World(rank, size, local_rank, local_size, address or "127.0.0.1", port, "slurm", job_id)


def _slurm_local_size(env: Mapping[str, str], size: int, num_hosts: int) -> int:
    counted = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counted is None:
        return max(1, size // max(1, num_hosts))
    counts = expand_counts(counted)
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    if node >= len(counts):
        raise ConfigurationError(f"SLURM_NODEID={node}, but the tasks per node are {counted!r}")
    return min(counts[node], size)


def _checked_against(incomplete: _Launcher | None, env: Mapping[str, str], world: World) -> World:
    if incomplete and incomplete.size in env and _number(env, incomplete.size) != world.world_size:
        raise ConfigurationError(
            f"{incomplete.size}={env[incomplete.size]}, but {world.launcher} started {world.world_size} "
            f"processes. Unset {incomplete.size} or correct it."
        )
    return world


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise ConfigurationError(f"{name}={env[name]!r} is not a number of 0 or more")
    return int(env[name])


def _check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ConfigurationError(f"{rank_name}={rank} must be smaller than {size_name}={size}")


def _address(env: Mapping[str, str]) -> str | None:
    return env.get("TOTALREDUCE_MASTER_ADDRESS") or env.get("MASTER_ADDR")


def _port(env: Mapping[str, str], job_id: str) -> int:
    for name in ("TOTALREDUCE_MASTER_PORT", "MASTER_PORT"):
        if name in env:
            port = _number(env, name)
            if not 0 < port < 65536:
                raise ConfigurationError(f"{name}={port} is not a port from 1 to 65535")
            return port
    digest = hashlib.blake2b(job_id.encode(), digest_size=4).digest()
    return _PORT_FIRST + int.from_bytes(digest, "little") % _PORT_COUNT


def _job_id(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((env[name] for name in ("TOTALREDUCE_JOB_ID", *names) if name in env), "")


def expand_hostlist(text: str) -> list[str]:
    """Return every host of a Slurm host list, such as ``rack[0-1]n[00-03],login``, in the list's order."""
    hosts: list[str] = []
    for word in _split_outside_brackets(text):
        pieces = _PIECE.findall(word)
        if not word or "".join(f"[{ranges}]" if ranges else literal for ranges, literal in pieces) != word:
            raise ConfigurationError(f"cannot read the host list {text!r} at {word!r}")
        choices = [_expand_ranges(ranges, text) if ranges else [literal] for ranges, literal in pieces]
        total = len(hosts)
        for choice in choices:
            total = max(total, 1) * len(choice)
        if total > _HOSTS_MAX:
            raise ConfigurationError(f"the host list {text!r} names more than {_HOSTS_MAX} hosts")
        hosts.extend("".join(parts) for parts in itertools.product(*choices))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks of each host: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word.strip())
        repeat = int(match[2] or 1) if match else 0
        if match is None or len(counts) + repeat > _HOSTS_MAX:
            raise ConfigurationError(f"cannot read the list of tasks per host {text!r} at {word!r}")
        counts.extend([int(match[1])] * repeat)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    words, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return words


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"cannot read the host list {text!r} at [{ranges}]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _HOSTS_MAX:
            raise ConfigurationError(f"the host list {text!r} has the range {part!r}, empty or too long")
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers
