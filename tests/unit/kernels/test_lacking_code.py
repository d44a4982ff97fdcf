"""What is said, and by whom, when ranks of a job have no compiled code."""

import logging

import pytest

from totalreduce.kernels import machine_code
from totalreduce.launch import transports

ALL, NONE = "\n", "no Numba\nno Numba"
LANE = "ranks of one host exchange tensors by messages"
MOVING = "Python moves large messages between hosts"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([ALL, ALL], ""),
        (["", ""], ""),
        (
            [NONE, NONE],
            f"{LANE} and {MOVING}, which is slower, because rank 0 (one of 2) has no compiled code: no Numba",
        ),
        ([ALL, "full disk\n"], f"{LANE}, which is slower, because rank 1 (one of 1) has no compiled code: full disk"),
        ([ALL, "\nstopped"], f"{MOVING}, which is slower, because rank 1 (one of 1) has no compiled code: stopped"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_once_for_all_ranks(texts, expected, rank, monkeypatch, caplog) -> None:
    monkeypatch.setattr(machine_code, "_said", set())
    caplog.set_level(logging.INFO)
    lane_lacks = transports._lack_code(texts, rank)
    assert lane_lacks == (LANE in expected)
    assert caplog.messages == [expected] * bool(expected)
    assert [record.levelno for record in caplog.records] == [logging.INFO if rank else logging.WARNING] * bool(expected)
    machine_code.warn("kernels are those of NumPy")
    assert caplog.records[-1].levelno == (logging.INFO if expected else logging.WARNING)
