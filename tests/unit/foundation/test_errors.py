"""Errors are an API: their tree, their fields, and sentences that say what, where and what to do."""

import inspect
import pickle

import pytest

from totalreduce.foundation import errors
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MismatchError,
    MissingTensorError,
    PeerLost,
    PlanMismatchError,
    SlowWorkersError,
    TotalReduceError,
)

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_one_tree_and_a_docstring_each(error: type[Exception]) -> None:
    assert issubclass(error, TotalReduceError)
    assert len(inspect.getdoc(error) or "") > 30


def test_the_tree_in_the_module_docstring_is_complete() -> None:
    drawn = errors.__doc__ or ""
    assert [name for name in errors.__all__ if name not in drawn] == []


def test_builtin_families() -> None:
    assert issubclass(TotalReduceError, RuntimeError)  # as in torch.distributed and Horovod
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(PlanMismatchError, MismatchError)


def test_mismatch() -> None:
    error = MismatchError("w", (1, 3), ("allreduce(sum) of float32[2]", "allreduce(sum) of float32[3]"))
    assert (error.tensor, error.ranks) == ("w", (1, 3))
    assert error.values == ("allreduce(sum) of float32[2]", "allreduce(sum) of float32[3]")
    assert str(error) == (
        "tensor 'w': rank 1 submitted allreduce(sum) of float32[2]; rank 3 submitted allreduce(sum) of float32[3]. "
        "Submit the same kind, dtype, shape and reduction on every rank."
    )


def test_plan_mismatch() -> None:
    error = PlanMismatchError("model", ("w: rank 0 has 1, rank 2 has 2",))
    assert error.tensor == "model"
    assert error.differences == ("w: rank 0 has 1, rank 2 has 2",)
    assert "  w: rank 0 has 1, rank 2 has 2\n" in str(error)


def test_missing_tensor() -> None:
    error = MissingTensorError("w", (1, 2), 7)
    assert (error.tensor, error.ranks, error.step) == ("w", (1, 2), 7)
    assert "step 7: rank(s) 1, 2 never submitted 'w'" in str(error)


def test_peer_lost() -> None:
    error = PeerLost(3, "silent for 2.1 s")
    assert (error.rank, error.reason) == (3, "silent for 2.1 s")
    assert str(error) == "rank 3 is lost: silent for 2.1 s"


@pytest.mark.parametrize(
    "error",
    [
        PeerLost(3, "silent"),
        MismatchError("w", (0, 1), ("a", "b")),
        MissingTensorError("w", (1,), 2),
        PlanMismatchError("model", ("w differs",)),
        ConfigurationError("timeout_s"),
        DeadlineExceededError("rank 0 waited 3 s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: Exception) -> None:
    """``multiprocessing`` and ``concurrent.futures`` pickle what a worker raises."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_slow_workers() -> None:
    error = SlowWorkersError(5, {3: 1, 1: 2}, 0.5)
    assert (error.clock, error.clocks) == (5, {3: 1, 1: 2})
    assert "at clock 5 has waited 0.5 s for slower workers: rank 1 at clock 2, rank 3 at clock 1. Does" in str(error)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.clocks) == (str(error), error.clocks)
