"""Which device an operation of a native library works on. A ``torch.device`` can be made without a GPU."""

import torch

from totalreduce.native.packing import Devices


def test_the_index_is_that_of_the_tensors_of_this_rank() -> None:
    devices = Devices(torch.device("cpu"))
    assert devices.of("cpu") == torch.device("cpu")
    devices.note(torch.device("cuda", 3))
    assert devices.of("cuda") == torch.device("cuda", 3)
    assert devices.of("cpu") == torch.device("cpu")


def test_a_rank_that_has_submitted_nothing_uses_the_device_of_the_library() -> None:
    assert Devices(torch.device("cuda", 1)).of("cuda") == torch.device("cuda", 1)
    assert Devices(torch.device("cuda", 1)).of("cpu") == torch.device("cpu")
