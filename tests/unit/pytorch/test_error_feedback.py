"""What happens to gradients before a sparse method selects from them, against plain arithmetic."""

import math

import pytest
import torch

from totalreduce.pytorch.error_feedback import ErrorFeedback, MomentumCorrection, Residuals

GRADIENTS = [[1.0, -2.0, 0.5], [0.25, 4.0, -1.0], [3.0, 0.0, 8.0]]


def make(momentum: float) -> tuple[Residuals, torch.nn.Parameter]:
    return Residuals(), torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_velocities_of_several_rounds(scale: float) -> None:
    residuals, parameter = make(0.5)
    expected = torch.zeros(3)
    for gradient in GRADIENTS:
        correction = MomentumCorrection(residuals, 0.5)
        flat = torch.tensor(gradient) * scale
        correction.correct(parameter, flat, scale)
        expected = 0.5 * expected + torch.tensor(gradient)
        assert flat.tolist() == expected.tolist()
        correction.pending[parameter][1] = 0.0  # element 1 was applied: factor masking
        correction.commit({*correction.pending})
        expected[1] = 0.0
        assert residuals.velocities[parameter].tolist() == expected.tolist()
        assert correction.pending == {}


def test_a_round_without_a_result_changes_no_velocity() -> None:
    residuals, parameter = make(0.5)
    correction = MomentumCorrection(residuals, 0.5)
    correction.correct(parameter, torch.tensor([1.0, 2.0, 3.0]), 1.0)
    correction.commit({*correction.pending})
    correction.correct(parameter, torch.tensor([math.nan] * 3), 1.0)
    correction.discard()
    assert residuals.velocities[parameter].tolist() == [1.0, 2.0, 3.0]
    flat = torch.zeros(3)
    correction.correct(parameter, flat, 1.0)
    assert flat.tolist() == [0.5, 1.0, 1.5]


def test_two_velocities_take_turns_and_no_more_memory() -> None:
    residuals, parameter = make(0.5)
    correction = MomentumCorrection(residuals, 0.5)
    places = []
    for _ in range(6):
        correction.correct(parameter, torch.ones(3), 1.0)
        correction.commit({*correction.pending})
        places.append(residuals.velocities[parameter].data_ptr())
    assert places == places[:2] * 3
    assert places[0] != places[1]


def test_without_momentum_nothing_happens() -> None:
    residuals, parameter = make(0.0)
    correction = MomentumCorrection(residuals, 0.0)
    flat = torch.tensor([1024.0, 0.0, 1.0])
    correction.correct(parameter, flat, 1024.0)
    assert (flat.tolist(), correction.pending) == ([1024.0, 0.0, 1.0], {})


def test_the_factor_of_clipping() -> None:
    feedback = ErrorFeedback(clip_norm=6.0)
    assert feedback.clip_factor(12.0, 4) == 0.25  # each of four ranks clips to 6 / 2
    assert feedback.clip_factor(3.0, 4) == 1.0
    assert feedback.clip_factor(2.0, 4) == 1.0
    assert feedback.clip_factor(0.0, 4) == 1.0
    assert feedback.clip_factor(math.inf, 4) == 0.0
    assert feedback.clip_factor(math.nan, 4) == 1.0
    assert ErrorFeedback().clip_factor(1e9, 4) == 1.0
