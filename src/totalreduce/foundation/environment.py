"""The environment, read in this file and nowhere else."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from totalreduce.foundation.config import Tls
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.world import World, world_from

__all__ = ["KNOWN_NAMES", "Settings", "World", "current", "read_job_key", "read_settings", "read_world"]

KNOWN_NAMES = frozenset(
    "TOTALREDUCE_" + suffix
    for suffix in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDRESS", "MASTER_PORT", "JOB_ID"),
        *("JOB_KEY", "JOB_KEY_FILE", "TIMEOUT_S", "TIMELINE", "ADDRESS", "INTERFACE", "PEER_TIMEOUT_S", "COMPUTE"),
        "LINKS",
        *("LOG", "DEBUG", "TLS_CERT", "TLS_KEY", "TLS_CA"),
    )
)
"""Every variable of the library's own; documented in ``docs/launching.md``."""

COMPUTE_MODES = ("auto", "thread", "inline")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for by ``TOTALREDUCE_*`` variables; ``None`` where nothing was asked for.

    Attributes:
        timeout_s: Deadline of a wait that names none.
        timeline: Path of the timeline to write.
        address: Address to advertise to the other ranks.
        interface: Network interface whose address to advertise.
        peer_timeout_s: Silence after which a peer counts as lost.
        compute: One of ``COMPUTE_MODES``: whether additions have their own thread.
        links: What messages cost: ``auto``, ``measure``, ``off``, or a file with the numbers (``groups.probe``).
        log_level: One of ``LOG_LEVELS``.
        debug: Whether the command line shows tracebacks.
        tls: Certificate, key and authority of the TCP transport.
        warnings: Sentences to log once: unknown variables, a key that others can read.
    """

    timeout_s: float | None
    timeline: Path | None
    address: str | None
    interface: str | None
    peer_timeout_s: float | None
    compute: str | None
    links: str | None
    log_level: str | None
    debug: bool
    tls: Tls | None
    warnings: tuple[str, ...]


def current() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def read_world(env: Mapping[str, str] | None = None) -> World:
    """Find out rank, size and meeting point of this process.

    Args:
        env: The variables; by default this process's. An empty one counts as absent.

    Raises:
        ConfigurationError: Variables contradict each other, are no numbers, or half of a pair is missing; or
            the job spans several hosts and nothing says where rank 0 is.
    """
    return world_from(_present(env))


def read_job_key(env: Mapping[str, str] | None = None) -> bytes | None:
    """The key by which ranks prove that they belong to one job; ``None`` where none was given.

    ``TOTALREDUCE_JOB_KEY`` wins over ``TOTALREDUCE_JOB_KEY_FILE``. Either holds hexadecimal digits or any
    text; white space around it does not count.

    Raises:
        ConfigurationError: The file cannot be read, or holds nothing.
    """
    env = _present(env)
    if "TOTALREDUCE_JOB_KEY" in env:
        return _decode_key(env["TOTALREDUCE_JOB_KEY"].encode())
    if "TOTALREDUCE_JOB_KEY_FILE" not in env:
        return None
    path = Path(env["TOTALREDUCE_JOB_KEY_FILE"])
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"TOTALREDUCE_JOB_KEY_FILE={path}: {error.strerror}. It must be readable on every host."
        ) from error
    if not content:
        raise ConfigurationError(f"TOTALREDUCE_JOB_KEY_FILE={path} is empty. Fill it with `openssl rand -hex 32`.")
    return _decode_key(content)


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """The settings that the environment may give; explicit arguments go before them.

    Raises:
        ConfigurationError: A variable has a value that makes no sense.
    """
    env = _present(env)
    level = env.get("TOTALREDUCE_LOG")
    if level is not None and level.lower() not in LOG_LEVELS:
        raise ConfigurationError(f"TOTALREDUCE_LOG={level!r} is none of {', '.join(LOG_LEVELS)}")
    compute = env.get("TOTALREDUCE_COMPUTE")
    if compute is not None and compute not in COMPUTE_MODES:
        raise ConfigurationError(f"TOTALREDUCE_COMPUTE={compute!r} is none of {', '.join(COMPUTE_MODES)}")
    timeline = env.get("TOTALREDUCE_TIMELINE")
    return Settings(
        timeout_s=_seconds(env, "TOTALREDUCE_TIMEOUT_S"),
        timeline=Path(timeline) if timeline else None,
        address=env.get("TOTALREDUCE_ADDRESS"),
        interface=env.get("TOTALREDUCE_INTERFACE"),
        peer_timeout_s=_seconds(env, "TOTALREDUCE_PEER_TIMEOUT_S"),
        compute=compute,
        links=env.get("TOTALREDUCE_LINKS"),
        log_level=level.lower() if level else None,
        debug=env.get("TOTALREDUCE_DEBUG", "0").lower() not in ("0", "false", "no"),
        tls=_tls(env),
        warnings=(*_unknown_names(env), *_key_warnings(env)),
    )


def _present(env: Mapping[str, str] | None) -> dict[str, str]:
    source = current() if env is None else env
    return {name: value.strip() for name, value in source.items() if value.strip()}


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    if name not in env:
        return None
    try:
        value = float(env[name])
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name}={env[name]!r} is not a positive number of seconds")
    return value


def _tls(env: Mapping[str, str]) -> Tls | None:
    names = ("TOTALREDUCE_TLS_CERT", "TOTALREDUCE_TLS_KEY", "TOTALREDUCE_TLS_CA")
    missing = [name for name in names if name not in env]
    if len(missing) == len(names):
        return None
    if missing:
        raise ConfigurationError(f"TLS needs {', '.join(names)}; not set: {' and '.join(missing)}")
    return Tls(*(Path(env[name]) for name in names))


def _decode_key(content: bytes) -> bytes:
    if re.fullmatch(rb"([0-9a-fA-F]{2}){8,}", content):
        return bytes.fromhex(content.decode())
    return content


def _unknown_names(env: Mapping[str, str]) -> list[str]:
    sentences = []
    for name in sorted(env):
        if name.startswith("TOTALREDUCE_") and name not in KNOWN_NAMES:
            nearest = difflib.get_close_matches(name, sorted(KNOWN_NAMES), n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            sentences.append(f"{name} is not a variable of this library and is ignored.{hint}")
    return sentences


def _key_warnings(env: Mapping[str, str]) -> list[str]:
    name = env.get("TOTALREDUCE_JOB_KEY_FILE")
    if name is None or "TOTALREDUCE_JOB_KEY" in env:
        return []
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return []  # read_job_key says it better, as an error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return [f"the job key {name} can be read by other users: `chmod 600 {name}`."]
    return []
