"""Who carries out the operations of Horovod's interface on a machine with an accelerator."""

from __future__ import annotations

import pytest
import torch

from totalreduce.horovod import context


@pytest.mark.parametrize(
    ("config", "on_loss", "expected"),
    [
        ("cuda:nccl", "", True),
        ("cpu:gloo,cuda:nccl", "", True),
        ("cpu:gloo,cuda:gloo", "", False),
        ("cpu:totalreduce,cuda:totalreduce", "", True),
        # Ranks cannot be replaced where torch.distributed carries the operations out.
        ("cpu:totalreduce,cuda:totalreduce", "replace", False),
        ("cpu:totalreduce,cuda:nccl", "replace", True),
        ("cpu:totalreduce", "", False),
    ],
)
def test_a_process_group_that_takes_tensors_on_devices_carries_the_operations_out(
    monkeypatch: pytest.MonkeyPatch, config: str, on_loss: str, expected: bool
) -> None:
    monkeypatch.setenv("TOTALREDUCE_ON_LOSS", on_loss)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    assert context._is_on_accelerators() is expected
