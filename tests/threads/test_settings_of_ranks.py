"""Settings in which ranks may differ, and those that are compared when a group forms."""

import random
from dataclasses import fields

import pytest
import torch

from totalreduce.foundation.config import OWN_SETTINGS, EngineConfig
from totalreduce.launch.bootstrap import _wire_settings
from totalreduce.testing import run_ranks

#: Other values than the default ones.
OTHERS = {
    "scheduling": ("priority", "fifo"),
    "starvation_limit": (1, 3, 64),
    "scratch_segments": (1, 2, 16),
    "stall_warning_s": (0.0, 10.0),
    "timeout_s": (20.0, 30.0),
}


def test_every_setting_is_compared_or_a_ranks_own() -> None:
    compared = _wire_settings("auto", None, EngineConfig(), None, "auto", "auto").keys()
    for field in fields(EngineConfig):
        assert (field.name in compared) != (field.name in OWN_SETTINGS), field.name
    assert OTHERS.keys() == OWN_SETTINGS
    assert EngineConfig(bulk_bytes=7).wire_settings()["bulk_bytes"] == 7


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
    expected = [[world_size * (world_size + 1) / 2]] * 12
    assert run_ranks(world_size, body, transport=transport, engine=engines) == [expected] * world_size
