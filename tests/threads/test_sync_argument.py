"""What may be passed as ``sync=`` to DistributedOptimizer, and to ``tr.ddp_hook``."""

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.sync_argument import settings_of
from totalreduce.sparse.methods import METHODS
from totalreduce.strategies.strategies import STRATEGIES
from totalreduce.testing import run_ranks

#: Strategies whose settings have no defaults.
WITHOUT_DEFAULTS = {"post_local_sgd": "start", "strom": "threshold", "soft_sync": "n", "quorum": "n"}


@pytest.mark.parametrize("name", [*METHODS, *STRATEGIES])
def test_a_name_and_a_class_mean_the_defaults(name: str) -> None:
    made = (METHODS if name in METHODS else STRATEGIES)[name]
    if name in WITHOUT_DEFAULTS:
        for given, said in ((name, repr(name)), (made, f"the class {made.__name__}")):
            with pytest.raises(ConfigurationError) as caught:
                settings_of(given)
            assert str(caught.value) == (
                f"sync={said} needs settings that have no default ('{WITHOUT_DEFAULTS[name]}'): "
                f"write sync=tr.{made.__name__}(...)"
            )
    else:
        assert settings_of(name) == settings_of(made) == made()
        assert settings_of(settings := made()) is settings


def test_auto_is_a_name_too() -> None:
    assert settings_of("auto") == settings_of(tr.Auto) == tr.Auto()
    assert settings_of(None) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("oktopck", "sync='oktopck' is not known (did you mean 'oktopk'?): there are dense, topka,"),
        (0.01, "sync= takes tr.OkTopk(density=0.01), tr.PowerSGD(rank=4) or tr.DiLoCo(period=100), not 0.01"),
        (dict, "not the class dict"),
        (tr.ErrorFeedback(), "not ErrorFeedback("),
    ],
)
def test_what_is_neither_is_refused_with_what_to_write(given: object, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings_of(given)
    assert words in str(caught.value)


def test_an_optimizer_takes_names() -> None:
    def body(group):
        model = torch.nn.Linear(200, 100)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = tr.DistributedOptimizer(inner, model, group=group, sync="oktopk")
        assert not hasattr(plain, "strategy_steps")
        with pytest.raises(ConfigurationError, match="has no strategy"):
            plain.strategy_steps  # noqa: B018
        plain.close()
        optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=tr.DiLoCo)
        assert optimizer.local_steps is optimizer.strategy_steps  # the older name
        return optimizer.strategy_steps.strategy

    assert run_ranks(2, body) == [tr.DiLoCo()] * 2
