"""Which calls of ``DistributedOptimizer`` may be made while another one is interrupted."""

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.joining import Joining
from totalreduce.pytorch.round import Phase
from totalreduce.pytorch.unfinished import Call, ClosureLoss, ComparingPlans, EndingPlan, Unfinished

RESUMED = {EndingPlan: Call.PLAN, Joining: Call.JOIN, ClosureLoss: Call.STEP_WITH_CLOSURE}


@pytest.mark.parametrize("kind", [EndingPlan, ComparingPlans, ClosureLoss, Joining])
def test_an_interrupted_call_permits_its_repetition_and_no_step_without_it(kind: type[Unfinished]) -> None:
    interrupted = kind.__new__(kind)
    if kind in RESUMED:
        interrupted.check(RESUMED[kind])
    for call in {Call.STEP, *RESUMED.values()} - {RESUMED.get(kind)}:
        with pytest.raises(ConfigurationError) as caught:
            interrupted.check(call)
        assert str(caught.value) == kind.advice


def test_only_a_closure_needs_the_gradients_that_zero_grad_resets() -> None:
    kinds = [kind for kind in (EndingPlan, ComparingPlans, ClosureLoss, Joining) if Call.ZERO_GRAD not in kind.permits]
    assert kinds == [ClosureLoss]


@pytest.mark.parametrize("phase", [Phase.CLOSED, Phase.SYNCHRONISED])
def test_backward_closes_the_optimizer_only_if_it_has_changed_reduced_gradients(phase: Phase) -> None:
    closed: list[bool] = []
    with pytest.raises(ConfigurationError, match="is closed" if phase is Phase.SYNCHRONISED else "Repeat that call"):
        ClosureLoss(1.0).refuse_gradient(phase, lambda: closed.append(True))
    assert closed == [True] * (phase is Phase.SYNCHRONISED)
