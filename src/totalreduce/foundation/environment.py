"""The environment, read in this file and nowhere else."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from totalreduce.foundation import checks
from totalreduce.foundation.config import Tls
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.foundation.world import World, world_from

__all__ = [
    "OWN_VARIABLES",
    "Settings",
    "World",
    "cache_folder",
    "current",
    "is_debugging",
    "read_job_key",
    "read_settings",
    "read_world",
    "runtime_folders",
    "settings_of_numba",
    "users_path",
    "words_to_complete",
    "working_folder",
]

_COMPUTE_MODES = ("auto", "thread", "inline")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_WITHOUT_EFFECT_ON_CODE = frozenset({"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"})
#: The longest file with a key that is read.
_KEY_BYTES_MAX = 64 * 1024
_TLS_NAMES = ("TOTALREDUCE_TLS_CERT", "TOTALREDUCE_TLS_KEY", "TOTALREDUCE_TLS_CA")


#: The fields of ``Settings`` in which ranks may differ. All others are compared when a group forms.
OWN_VARIABLES = frozenset(
    (
        *("timeout_s", "timeline", "address", "interface", "compute", "log_level", "log_format", "live", "warnings"),
        *("relay", "process_reads"),  # each rank says what it does
        *("keeper", "incarnation"),  # the launcher's store may have several addresses
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings in ``TOTALREDUCE_*`` variables; ``None`` where a variable is not set."""

    timeout_s: float | None = None  #: Deadline of a wait that names none.
    timeline: Path | None = None  #: Path of the timeline to write.
    address: str | None = None  #: Address to advertise to the other ranks.
    interface: str | None = None  #: Network interface whose address to advertise.
    peer_timeout_s: float | None = None  #: Silence after which a peer counts as lost.
    compute: str | None = None  #: Whether additions have their own thread: ``auto``, ``thread`` or ``inline``.
    #: The cost of messages: ``auto``, ``measure``, ``off``, or a file with the numbers (``groups.probe``).
    links: str | None = None
    log_level: str | None = None  #: ``debug``, ``info``, ``warning`` or ``error``.
    log_format: str | None = None  #: ``text`` or ``json``.
    live: Path | None = None  #: The folder into which ranks write their figures; ``None``: no figures are written.
    fast_lane: bool | None = None  #: Whether ranks of one host exchange tensors without messages.
    relay: bool | None = None  #: Whether a compiled function moves the messages of large operations over TCP.
    inner: str | None = None  #: The library inside each host: ``nccl`` or ``gloo``; ``None``: the engine alone.
    process_reads: bool | None = None  #: Whether ranks of one host may read each other's process memory.
    tls: Tls | None = None  #: Certificate, key and authority of the TCP transport.
    on_loss: str | None = None  #: What happens when a rank is lost: ``replace`` or ``shrink``. ``None``: the job ends.
    keeper: tuple[str, int] | None = None  #: Address and port of the store that outlives the ranks, with ``on_loss``.
    incarnation: int = 0  #: How often the launcher has started this rank before, with ``on_loss``.
    min_ranks: int = 1  #: The smallest number of ranks that go on, with ``on_loss``.
    #: The ranks with which the job begins, with ``on_loss``; ``None``: all ranks.
    begin_ranks: tuple[int, ...] | None = None
    servers: int = 0  #: The number of ranks, the last ones, that only serve a parameter server.
    warnings: tuple[str, ...] = ()  #: Sentences to log once: unknown variables, a key that others can read.


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name}={text!r} is not a positive number of seconds")
    return value


def _ranks(name: str, text: str) -> tuple[int, ...]:
    """Read ranges of ranks, both ends included: ``0-3,6-7``."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return tuple(rank for first, last in ends for rank in range(first, last + 1))
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is no list of ranges of ranks, such as 0-3,6-7") from None


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigurationError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() not in allowed:
            nearest = checks.did_you_mean(text, allowed)
            raise ConfigurationError(f"{name}={text!r} is none of {', '.join(allowed)}{nearest}")
        return text.lower()

    return parse


def _address_and_port(name: str, text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{name}={text!r} is not an address and a port, such as 10.0.0.1:29500")
    return address, int(port)


def _live_folder(name: str, text: str) -> Path | None:
    if text == "0":
        return None
    if not Path(text).is_absolute():
        raise ConfigurationError(f"{name}={text!r} is neither 0 nor the absolute path of a folder")
    return Path(text)


def _whole_number(minimum: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise ConfigurationError(f"{name}={text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


#: The variable that a spare process has until it has a seat.
SPARE = "TOTALREDUCE_SPARE"
#: The variable that names the processes of one worker on another host, so that all of them can be ended.
REMOTE_WORKER = "TOTALREDUCE_REMOTE_WORKER"
#: The variable with the folder into which the ranks of a job write their figures.
LIVE = "TOTALREDUCE_LIVE"
#: By variable: the field of ``Settings``, and the function that reads its value.
_SETTINGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "TOTALREDUCE_TIMEOUT_S": ("timeout_s", _seconds),
    "TOTALREDUCE_TIMELINE": ("timeline", lambda _, text: Path(text)),
    "TOTALREDUCE_ADDRESS": ("address", lambda _, text: text),
    "TOTALREDUCE_INTERFACE": ("interface", lambda _, text: text),
    "TOTALREDUCE_PEER_TIMEOUT_S": ("peer_timeout_s", _seconds),
    "TOTALREDUCE_COMPUTE": ("compute", _one_of(*_COMPUTE_MODES)),
    "TOTALREDUCE_LINKS": ("links", lambda _, text: text),
    "TOTALREDUCE_LOG": ("log_level", _one_of(*_LOG_LEVELS)),
    "TOTALREDUCE_LOG_FORMAT": ("log_format", _one_of("text", "json")),
    LIVE: ("live", _live_folder),
    "TOTALREDUCE_FAST_LANE": ("fast_lane", _switch),
    "TOTALREDUCE_RELAY": ("relay", _switch),
    "TOTALREDUCE_INNER": ("inner", _one_of("nccl", "gloo")),
    "TOTALREDUCE_PROCESS_READS": ("process_reads", _switch),
    "TOTALREDUCE_ON_LOSS": ("on_loss", _one_of("replace", "shrink")),
    "TOTALREDUCE_KEEPER": ("keeper", _address_and_port),
    "TOTALREDUCE_INCARNATION": ("incarnation", _whole_number(0)),
    "TOTALREDUCE_MIN_RANKS": ("min_ranks", _whole_number(1)),
    "TOTALREDUCE_BEGIN_RANKS": ("begin_ranks", _ranks),
    "TOTALREDUCE_SERVERS": ("servers", _whole_number(0)),
}
#: Every variable of the library (``docs/reference/environment.md``). ``world.py`` reads those of ranks and hosts.
_KNOWN_NAMES = frozenset(
    (
        *(*_SETTINGS, *_TLS_NAMES, "TOTALREDUCE_DEBUG", SPARE, REMOTE_WORKER),
        *(f"TOTALREDUCE_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_ID")),
        *(f"TOTALREDUCE_{name}" for name in ("MASTER_ADDRESS", "MASTER_PORT", "JOB_KEY", "JOB_KEY_FILE")),
    )
)


def current() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def read_world(env: Mapping[str, str] | None = None) -> World:
    """Return the rank of this process, the world size, and the address of rank 0.

    Args:
        env: The variables; by default those of this process. An empty variable counts as absent.

    Raises:
        ConfigurationError: Variables contradict each other, are no numbers, or one of a pair is missing; or the job
            spans several hosts and no variable names the host of rank 0.
    """
    return world_from(_present(env))


def read_job_key(env: Mapping[str, str] | None = None) -> bytes | None:
    """Return the key by which ranks prove that they belong to one job; ``None`` if there is none.

    ``TOTALREDUCE_JOB_KEY`` goes before ``TOTALREDUCE_JOB_KEY_FILE``. Either holds hexadecimal digits or any text; white
    space around it does not count. Raises ``ConfigurationError``.
    """
    env = _present(env)
    if "TOTALREDUCE_JOB_KEY" in env:
        return _decode_key(env["TOTALREDUCE_JOB_KEY"].encode())
    if "TOTALREDUCE_JOB_KEY_FILE" not in env:
        return None
    path = Path(env["TOTALREDUCE_JOB_KEY_FILE"])
    try:
        content = read_named(path, _KEY_BYTES_MAX, is_trusted=True).strip()
    except OSError as error:
        raise ConfigurationError(
            f"TOTALREDUCE_JOB_KEY_FILE={path}: {error.strerror}. It must be readable on every host."
        ) from error
    if not content:
        raise ConfigurationError(f"TOTALREDUCE_JOB_KEY_FILE={path} is empty. Fill it with `openssl rand -hex 32`.")
    return _decode_key(content)


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment; explicit arguments go before them. Raises ``ConfigurationError``."""
    env = _present(env)
    values = {field: parse(name, env[name]) for name, (field, parse) in _SETTINGS.items() if name in env}
    return Settings(**values, tls=_tls(env), warnings=(*_unknown_names(env), *_key_warnings(env)))


def working_folder() -> str:
    """Return the present folder by the user's name for it. Raises ``ConfigurationError``.

    The kernel's name has no symbolic links; the user's, which shells keep in ``PWD``, has those that the user went
    through. On other hosts the same folder may have the user's name only, for instance with automounted homes.
    """
    try:
        physical = os.getcwd()
    except OSError as error:
        raise ConfigurationError("the present folder was removed: go to one that exists") from error
    named = os.environ.get("PWD", "")
    if not os.path.isabs(named) or {".", ".."}.intersection(named.split("/")) or not _is_same_file(named, physical):
        return physical
    return named


def users_path(path: str) -> str:
    """Return an absolute path in which the present folder, or one above it, has the user's name (``working_folder``).

    Python's name of its executable has the kernel's names, if the user has started it by a relative path.
    """
    named, physical = working_folder(), os.getcwd()
    while physical != named:
        if path.startswith(f"{physical}/") and _is_same_file(found := named + path.removeprefix(physical), path):
            return found
        if os.path.basename(physical) != os.path.basename(named):
            break
        physical, named = os.path.dirname(physical), os.path.dirname(named)
    return path


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def cache_folder() -> Path | None:
    """Return the folder in which this user keeps files that can be made again; ``None`` if there is no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "totalreduce"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "totalreduce" if home.is_dir() else None


def settings_of_numba() -> list[str]:
    """Return the variables of Numba that can change the code that it makes, each as ``NAME=VALUE``."""
    found = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    return sorted(f"{name}={value}" for name, value in found.items() if name not in _WITHOUT_EFFECT_ON_CODE)


def runtime_folders() -> list[Path]:
    """Return the places where this user may keep files of running processes, the best one first."""
    given, own = os.environ.get("XDG_RUNTIME_DIR"), f"totalreduce-{os.getuid()}"
    folders = [Path("/dev/shm") / own, Path(tempfile.gettempdir()) / own]  # noqa: S108  (`Board` checks the owner)
    # The specification of XDG_RUNTIME_DIR has relative paths ignored: they would name another folder in each process.
    return [Path(given) / "totalreduce", *folders] if given and Path(given).is_absolute() else folders


def is_debugging(env: Mapping[str, str] | None = None) -> bool:
    """Whether ``TOTALREDUCE_DEBUG`` asks for tracebacks on the command line."""
    return _present(env).get("TOTALREDUCE_DEBUG", "0").lower() not in ("0", "false", "no")


def words_to_complete(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the words after ``totalreduce`` of a command line that a shell asks to complete; else an empty list."""
    env = _present(env)
    if "_TOTALREDUCE_COMPLETE" not in env:
        return []
    line = env.get("_TYPER_COMPLETE_ARGS", env.get("COMP_WORDS", ""))
    return line.split()[1:]


def _present(env: Mapping[str, str] | None) -> dict[str, str]:
    source = current() if env is None else env
    return {name: value.strip() for name, value in source.items() if value.strip()}


def _tls(env: Mapping[str, str]) -> Tls | None:
    missing = [name for name in _TLS_NAMES if name not in env]
    if len(missing) == len(_TLS_NAMES):
        return None
    if missing:
        raise ConfigurationError(f"TLS needs {', '.join(_TLS_NAMES)}; not set: {' and '.join(missing)}")
    return Tls(*(Path(env[name]) for name in _TLS_NAMES))


def _decode_key(content: bytes) -> bytes:
    if re.fullmatch(rb"([0-9a-fA-F]{2}){8,}", content):
        return bytes.fromhex(content.decode())
    return content


def _unknown_names(env: Mapping[str, str]) -> list[str]:
    sentences = []
    for name in sorted(env):
        if name.startswith("TOTALREDUCE_") and name not in _KNOWN_NAMES:
            nearest = checks.did_you_mean(name, sorted(_KNOWN_NAMES))
            sentences.append(f"{name} is not a variable of this library and is ignored{nearest}")
    return sentences


def _key_warnings(env: Mapping[str, str]) -> list[str]:
    name = env.get("TOTALREDUCE_JOB_KEY_FILE")
    if name is None or "TOTALREDUCE_JOB_KEY" in env:
        return []
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return []  # read_job_key raises an error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return [f"the job key {name} can be read by other users: `chmod 600 {name}`."]
    return []
