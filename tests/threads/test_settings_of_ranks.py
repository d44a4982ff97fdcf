"""Settings in which ranks may differ, and those that are compared when a group forms.

The lists follow from the code: the fields of the settings, the variables of the environment, and the arguments of
``init``. A new one is compared, or it is listed as a rank's own and gets values here with which ranks differ.
"""

import inspect
import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.config import OWN_SETTINGS, OWN_TCP_SETTINGS, EngineConfig, TcpConfig, Tls
from totalreduce.foundation.environment import OWN_VARIABLES, Settings
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.bootstrap import _Arguments, _Wanted
from totalreduce.launch.rendezvous import compare_settings
from totalreduce.testing import run_ranks

#: Other values than the default ones.
OTHERS = {
    "scheduling": ("priority", "fifo"),
    "starvation_limit": (1, 3, 64),
    "scratch_segments": (1, 2, 16),
    "stall_warning_s": (0.0, 10.0),
    "timeout_s": (20.0, 30.0),
}
OTHERS_OF_TCP = {
    "notsent_lowat_bytes": (16_384, 524_288),
    "congestion": (None, "cubic", "reno"),
    "relay": (None, False, True),
    "connect_timeout_s": (20.0, 30.0),
    "handshake_timeout_s": (5.0, 30.0),
    "pending_handshakes_max": (3, 64),
}
TLS = Tls("cert", "key", "ca")
#: Of every field of ``Settings``: another value than the default one.
VARIABLES = {
    "timeout_s": 7.0,
    "timeline": Path("trace"),
    "address": "10.0.0.1",
    "interface": "eth7",
    "peer_timeout_s": 7.0,
    "compute": "thread",
    "links": "measure",
    "log_level": "debug",
    "log_format": "json",
    "live": Path("/live"),
    "fast_lane": False,
    "relay": False,
    "process_reads": True,
    "tls": TLS,
    "on_loss": "shrink",
    "keeper": ("10.0.0.1", 7),
    "incarnation": 3,
    "min_ranks": 2,
    "begin_ranks": (0, 1),
    "servers": 1,
    "inner": "gloo",
    "warnings": ("an unknown variable",),
}
#: Of every argument of ``init`` that is compared: another value than the default one.
ARGUMENTS = {
    "transport": "tcp",
    "engine": EngineConfig(),
    "tcp": TcpConfig(heartbeat_s=0.1),
    "tls": TLS,
    "links": "measure",
    "collectives": "native",
    "coordination": "measure",
    "inner": "nccl",
}
#: The others: groups of other names do not meet, and the store is where they meet.
OWN_ARGUMENTS = {"timeout_s", "timeline", "compute", "name", "store"}


def wire(settings=None, **arguments):
    return _Wanted.of(settings or Settings(), _Arguments(**arguments)).wire()


@pytest.mark.parametrize(
    ("kind", "argument", "own", "others"),
    [(EngineConfig, "engine", OWN_SETTINGS, OTHERS), (TcpConfig, "tcp", OWN_TCP_SETTINGS, OTHERS_OF_TCP)],
)
def test_every_setting_is_compared_or_a_ranks_own(kind, argument, own, others) -> None:
    compared = wire().keys()
    for field in fields(kind):
        assert (field.name in compared) != (field.name in own), field.name
    assert others.keys() == own
    for name, values in others.items():
        assert len({tuple(wire(**{argument: kind(**{name: value})}).items()) for value in values}) == 1, name
    assert wire(engine=EngineConfig(bulk_bytes=7))["bulk_bytes"] == 7
    assert wire(tcp=TcpConfig(silence_s=7))["silence_s"] == 7


def test_every_variable_is_compared_or_a_ranks_own() -> None:
    assert {field.name for field in fields(Settings)} == VARIABLES.keys()
    for name, value in VARIABLES.items():
        assert (wire(Settings(**{name: value})) == wire()) == (name in OWN_VARIABLES), name


def test_every_argument_is_compared_or_a_ranks_own() -> None:
    assert inspect.signature(tr.init).parameters.keys() == ARGUMENTS.keys() | OWN_ARGUMENTS
    for name, value in ARGUMENTS.items():
        assert wire(**{name: value}) != wire(), name
    assert wire(timeout_s=7.0) == wire()


def test_a_heartbeat_that_another_rank_would_take_for_silence_is_refused() -> None:
    """Each rank's settings are valid by themselves; together they declare correct ranks lost."""
    ranks = [wire(), wire(tcp=TcpConfig(heartbeat_s=5.0, silence_s=20.0)), wire()]
    with pytest.raises(ConfigurationError, match=r"heartbeat_s is 0\.25 on rank 0 and 5\.0 on rank 1"):
        compare_settings(ranks)
    with pytest.raises(ConfigurationError, match=r"is 2.0 on rank 0 and 30.0 on rank 1; .* the same TOTALREDUCE_\*"):
        compare_settings([wire(), wire(Settings(peer_timeout_s=30.0))])


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 5))])
def test_results_do_not_depend_on_settings_in_which_ranks_may_differ(world_size: int, transport: str) -> None:
    """Large operations beside small ones, in orders of each rank's own: over TCP the relay has the large ones."""

    def body(group):
        order = random.Random(group.rank).sample(range(12), 12)
        tensors = {number: torch.full((200_000 if number % 3 == 0 else 50,), 1.0 + group.rank) for number in order}
        works = [group.allreduce(tensors[number], name=f"{number}", priority=number % 4) for number in order]
        for work in works:
            work.wait()
        return [tensors[number].unique().tolist() for number in range(12)]

    generator = random.Random(world_size)
    shared = {"segment_bytes": 65_536, "segment_bytes_min": 16_384, "bulk_bytes": 4_096}
    engines = [
        EngineConfig(**shared, **{name: generator.choice(values) for name, values in OTHERS.items()})
        for _ in range(world_size)
    ]
    tcp = [
        TcpConfig(**{name: generator.choice(values) for name, values in OTHERS_OF_TCP.items()})
        for _ in range(world_size)
    ]
    expected = [[world_size * (world_size + 1) / 2]] * 12
    assert run_ranks(world_size, body, transport=transport, engine=engines, tcp=tcp) == [expected] * world_size
