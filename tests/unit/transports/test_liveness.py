"""Heartbeats that are due, silence that is too long, and time in which this process did not run."""

import pytest

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports.liveness import Liveness, Pulse

CONFIG = TcpConfig(heartbeat_s=0.5, silence_s=2.0)


def test_a_silent_peer_is_lost_and_one_that_speaks_is_not() -> None:
    liveness, silent, speaking = Liveness(CONFIG, 10.0), Pulse(10.0), Pulse(10.0)
    for quarter in range(1, 8):
        now = 10 + quarter / 4
        liveness.look([silent, speaking], now)
        assert liveness.due_at == now + 0.25
        speaking.heard_at = now
        assert liveness.verdict(silent, now) is None
    liveness.look([silent, speaking], 12.0)  # there is no other look within the two seconds
    assert liveness.verdict(silent, 12.0, extra_s=0.25) is None
    assert liveness.verdict(silent, 12.0) == (
        "silent for 2.0 s (stopped, frozen or cut off from the network; if its host was only busy, raise "
        "TOTALREDUCE_PEER_TIMEOUT_S)"
    )
    assert liveness.verdict(speaking, 12.0) is None


def test_the_allowed_silence_is_not_much_shorter_than_the_limit() -> None:
    config = TcpConfig(heartbeat_s=1.5, silence_s=2.0)
    liveness, pulse = Liveness(config, 0.0), Pulse(0.0)
    assert liveness.verdict(pulse, 1.79) is None
    assert liveness.verdict(pulse, 1.81) is not None


@pytest.mark.parametrize(("away", "lost"), [(0.9, True), (1.1, False), (500.0, False)])
def test_time_in_which_this_process_did_not_run_is_nobodys_silence(away: float, lost: bool) -> None:
    liveness, pulse = Liveness(CONFIG, 0.0), Pulse(0.0)
    for quarter in range(1, 7):
        liveness.look([pulse], quarter / 4)
    now = 1.5 + away
    liveness.look([pulse], now)
    assert (liveness.verdict(pulse, now) is not None) == lost
    assert pulse.heard_at <= now


def test_heartbeats_leave_where_nothing_else_does() -> None:
    liveness, pulse = Liveness(CONFIG, 0.0), Pulse(0.0)
    assert not liveness.is_beat_due(pulse, 0.49)
    assert liveness.is_beat_due(pulse, 0.5)
    assert not liveness.is_beat_due(pulse, 0.9)
    pulse.spoke_at = 1.0  # data has left
    assert not liveness.is_beat_due(pulse, 1.4)
    assert liveness.is_beat_due(pulse, 1.5)


ENDED = "its connection ended"


@pytest.mark.parametrize(("away", "told"), [(1.4, False), (1.6, True), (50.0, True)])
def test_the_end_of_a_connection_after_a_pause_of_this_process_names_the_pause(away: float, told: bool) -> None:
    liveness = Liveness(CONFIG, 0.0)
    liveness.look([], 1.0)
    now = 1.0 + away
    before = liveness.explain_end(ENDED, now)  # the end is noticed before the next look
    for quarter in range(8):
        liveness.look([], now + quarter / 4)
    after = liveness.explain_end(ENDED, now + 1.75)
    expected = ENDED
    if told:
        expected = (
            f"{ENDED}; before that, this process itself sent no heartbeat for {away:.1f} s, because it was stopped or "
            "got no processor time, so the other rank may have given it up; if its host was only busy, raise "
            "TOTALREDUCE_PEER_TIMEOUT_S"
        )
    assert (before, after) == (expected, expected)


def test_a_pause_long_ago_does_not_explain_the_end_of_a_connection() -> None:
    liveness = Liveness(CONFIG, 0.0)
    liveness.look([], 5.0)
    for quarter in range(1, 10):
        liveness.look([], 5.0 + quarter / 4)
    assert liveness.explain_end(ENDED, 7.1) == ENDED
