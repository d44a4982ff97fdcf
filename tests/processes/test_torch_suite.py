"""Some of PyTorch's own tests at world size 2; ``make torch-suite`` runs all that gloo passes, at 2, 3 and 4."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "torch_suite"

#: Hooks and ``no_sync``, objects, receives from any rank, sparse tensors.
#: Each of these tests starts two processes, so that a few must do here.
SOME = [
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_object_default_pg",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.fixture(scope="module")
def runner():
    pytest.importorskip("expecttest", reason="PyTorch's tests need it")
    spec = importlib.util.spec_from_file_location("torch_suite_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_of_what_gloo_passes(runner):
    assert set(SOME) <= set(runner.gloo_passes(2))
    outcomes = runner.run_suite("totalreduce", 2, SOME, quiet=True)
    assert {name: status for name, (status, _) in outcomes.items() if status != "passed"} == {}
    assert set(outcomes) == set(SOME)


def test_the_lists_are_of_tests_that_exist(runner):
    sizes = {size: len(runner.gloo_passes(size)) for size in runner.WORLD_SIZES}
    assert sizes == {2: 90, 3: 90, 4: 93}
