"""What the library does with tensors beneath modes of torch: inference, and modes that see operators."""

import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from totalreduce.tensors.modes import outside_inference_mode, version_of, write, writing


class Seen(TorchDispatchMode):
    """Notes every operator that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def of_inference_mode(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(*shape)


def test_results_are_written_in_every_mode_and_thread() -> None:
    normal, leaf, inference = torch.zeros(3, 2).t(), torch.zeros(2, 3, requires_grad=True), of_inference_mode(3, 2).t()
    thread = threading.Thread(target=lambda: [write(each, torch.ones(2, 3)) for each in (normal, leaf, inference)])
    thread.start()
    thread.join()
    assert all(each.sum() == 6 for each in (normal, leaf, inference))
    with torch.inference_mode():
        for each in (normal, leaf, inference):
            write(each, torch.full((2, 3), 2.0))
    assert all(each.sum() == 12 for each in (normal, leaf, inference))
    assert (version_of(normal), version_of(leaf), version_of(inference)) == (2, 2, 0)


def test_a_parameter_that_consists_of_other_tensors_is_written_through_the_dispatcher() -> None:
    """As the ``DTensor`` of FSDP2: it has no memory of its own."""
    parts = torch.zeros(2, 3), torch.zeros(2, 3)
    parameter = torch.nn.Parameter(TwoTensor(*parts))
    write(parameter, TwoTensor(torch.ones(2, 3), torch.full((2, 3), 2.0)))
    assert [float(part.mean()) for part in (parameter.a, parameter.b)] == [1.0, 2.0]


def test_tensors_of_both_kinds_are_changed_in_one_call() -> None:
    tensors = [torch.zeros(2), of_inference_mode(2)]
    with writing(*tensors):
        torch._foreach_add_(tensors, 1.0)
    assert [each.tolist() for each in tensors] == [[1.0, 1.0]] * 2


def test_a_write_is_not_seen_by_modes() -> None:
    target = torch.zeros(3, 2).t()
    with Seen() as mode:
        write(target, torch.ones(2, 3).neg_())
    assert mode.names == ["aten.ones.default", "aten.neg_.default"]
    assert target.sum() == -6


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_is_made_outside_of_inference_mode_can_be_changed_and_has_no_gradient(mode) -> None:
    weight = torch.ones(2, requires_grad=True)

    @outside_inference_mode
    def make() -> tuple[torch.Tensor, bool]:
        return torch.zeros(2), (weight * 2).requires_grad

    with mode():
        made, has_gradient = make()
    made.add_(1)
    assert has_gradient == (mode is torch.enable_grad)  # this decorator changes nothing but inference mode
