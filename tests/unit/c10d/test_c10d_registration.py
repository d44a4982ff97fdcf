"""The back end's name is known to torch.distributed, whichever is imported first, and torch is not imported for it."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from totalreduce.c10d import registration
from totalreduce.c10d.calls import reduction_of
from totalreduce.c10d.work import as_torch_error
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost
from totalreduce.foundation.types import ReduceOp


def test_registered_at_once_when_torch_is_there():
    # As in this process: torch.distributed was imported by this module, before or after totalreduce.
    assert dist.Backend("totalreduce") == dist.Backend.TOTALREDUCE == "totalreduce"
    assert dist.Backend.backend_capability["totalreduce"] == ["cpu", "cuda"]
    finders, barrier = list(sys.meta_path), dist.monitored_barrier
    registration.install()
    assert sys.meta_path == finders
    assert dist.monitored_barrier is barrier


def test_the_defaults_of_devices_stay_torchs():
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


def test_monitored_barrier_of_other_back_ends_is_torchs():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  (brings the back end called fake)

            dist.monitored_barrier()
            with pytest.raises((ValueError, RuntimeError), match=r"only implemented for GLOO|only GLOO supports"):
                dist.monitored_barrier(dist.new_group(backend="fake"))
    finally:
        dist.destroy_process_group()


def test_errors_in_torchs_words():
    lost = PeerLost(2, "killed")
    error = as_torch_error(lost, "totalreduce:all_reduce")
    assert isinstance(error, dist.DistBackendError)
    assert str(error) == "rank 2 is lost: killed"
    assert error.rank == 2
    assert error.__cause__ is lost
    late = as_torch_error(DeadlineExceededError("rank 0 waited"), "totalreduce:barrier")
    assert str(late) == "totalreduce:barrier: Timed out (rank 0 waited)"
    wrong, foreign = ConfigurationError("no"), KeyError("x")
    assert as_torch_error(wrong) is wrong
    assert as_torch_error(foreign) is foreign


def test_reductions():
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
        assert reduction_of(getattr(dist.ReduceOp, name)) == (ReduceOp[name], None)
        assert reduction_of(dist.ReduceOp(getattr(dist.ReduceOp, name))) == (ReduceOp[name], None)
    assert reduction_of(dist._make_nccl_premul_sum(0.5)) == (ReduceOp.SUM, 0.5)
    assert reduction_of(dist._make_nccl_premul_sum(torch.tensor([0.25]))) == (ReduceOp.SUM, torch.tensor(0.25))
    with pytest.raises(ValueError, match="PREMUL_SUM has no factor"):
        reduction_of(dist.ReduceOp.PREMUL_SUM)
    with pytest.raises(ValueError, match=r"Cannot use ReduceOp\.NEW"):
        reduction_of(SimpleNamespace(op=SimpleNamespace(name="NEW", value=99)))
