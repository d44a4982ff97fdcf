"""Batch normalisation over the joint batch of all ranks.

In training a layer costs one small collective in forward and one in backward. Both block, because the next layer needs
the result, so they have the most urgent priority. The operations are named after the layer, so that layers of different
widths never meet under one name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

_PRIORITY = -1
#: The use of the layer in the backward pass, as the rank knows it in the forward pass.
_NO_BACKWARD, _PARAMETERS_ONLY, _INPUT_TOO = 0.0, 1.0, 2.0
#: Classes whose layers can be replaced. A subclass may do more, which would be lost.
_CONVERTIBLE = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of inputs (N, C, ...) whose statistics are those of all ranks' batches together.

    Parameters and buffers are ``torch.nn.BatchNorm2d``'s, and so is the state dict. Batches may differ in size, and be
    empty on some ranks, but every rank must run the layer's forward and backward passes equally often. As in torch, the
    gradients of weight and bias are this rank's share: they are summed with all other gradients.

    Every rank describes its values by their count, mean and sum of squared deviations (M2), which are combined as in
    Chan, Golub, LeVeque, "Algorithms for computing the sample variance" (The American Statistician, 1983). A sum of
    squares would lose the variance where the mean is large. The statistics are sent and combined in float64, because
    float32 cannot count beyond 2**24.

    In evaluation mode, and in a group of one, it is torch's layer and does not communicate.

    The statistics are copied to the CPU to be sent. Arguments that are not listed are those of
    ``torch.nn.BatchNorm2d``.

    Args:
        dtype: The dtype of parameters and buffers. Inputs may be float16, bfloat16, float32 or float64; half types are
            computed in float32.
        group: The ranks.
        name: Prefix of the operations' names; equal on all ranks, different for each layer.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group,
        name: str,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group, self.name = group, name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise. Collective in training mode.

        Args:
            inputs: Shape (N, C) or (N, C, ...), a floating type; N may be 0.

        Returns:
            The same shape and dtype.

        Raises:
            ConfigurationError: The shape or dtype is wrong; or, on every rank, all batches together have one value per
                channel, or some ranks run without gradients while others will wait for them in backward.
            DeadlineExceededError: Another rank did not come in time.
            PeerLost: A rank is gone.
        """
        if not self.training or self.group.world_size == 1:
            return super().forward(inputs)
        self._check_input_dim(inputs)
        mean, squares, count, reduce = self._gather_statistics(inputs, self._use(inputs))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if count > 0:
            self._update_running_statistics(mean, squares / (count - 1))
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        mean = mean.to(inputs.device, dtype)
        variance = (squares / max(count, 1.0)).to(inputs.device, dtype)
        return _Normalise.apply(  # type: ignore[no-any-return, no-untyped-call]
            inputs, self.weight, self.bias, mean, variance, count, self.eps, reduce
        )

    def _check_input_dim(self, inputs: torch.Tensor) -> None:
        if inputs.dim() < 2 or inputs.shape[1] != self.num_features:
            raise ConfigurationError(
                f"layer {self.name!r} has {self.num_features} channels: its inputs have shape "
                f"(N, {self.num_features}, ...), not {tuple(inputs.shape)}"
            )
        if not inputs.is_floating_point():
            raise ConfigurationError(f"layer {self.name!r}: inputs are of a floating type, not {inputs.dtype}")

    @torch.no_grad()
    def _gather_statistics(
        self, inputs: torch.Tensor, use: float
    ) -> tuple[torch.Tensor, torch.Tensor, float, Callable[[torch.Tensor], torch.Tensor] | None]:
        """Return mean and M2 (float64 on the CPU) and count of all values, and the sum over ranks for backward."""
        count = inputs.numel() // self.num_features
        packed = torch.zeros(2 + 2 * self.num_features, dtype=torch.float64, device="cpu")
        packed[0], packed[1] = count, use
        if count:
            packed[2:] = torch.cat(_mean_and_squares(inputs, count)).cpu()
        gathered = torch.empty(self.group.world_size, packed.numel(), dtype=torch.float64, device="cpu")
        self.group.control.allgather(gathered, packed, name=f"{self.name}.statistics", priority=_PRIORITY).wait()
        counts, uses = gathered[:, :1], gathered[:, 1]
        means, squares = gathered[:, 2:].chunk(2, dim=1)
        total = float(counts.sum())
        if total == 1:
            raise ConfigurationError(
                f"layer {self.name!r}: all ranks together have one value per channel, which has no variance. "
                "Train with larger batches, or call eval()."
            )
        mean = (counts * means).sum(0) / max(total, 1.0)
        squares = (squares + counts * (means - mean).square()).sum(0)
        return mean, squares, total, self._sum_over_ranks if self._backward_communicates(uses.tolist()) else None

    def _use(self, inputs: torch.Tensor) -> float:
        if not torch.is_grad_enabled():
            return _NO_BACKWARD
        if inputs.requires_grad:
            return _INPUT_TOO
        return _PARAMETERS_ONLY if any(each.requires_grad for each in self.parameters()) else _NO_BACKWARD

    def _backward_communicates(self, uses: list[float]) -> bool:
        """Whether backward communicates: only gradients of inputs depend on other ranks. All ranks decide alike."""
        if max(uses) < _INPUT_TOO:
            return False
        absent = [rank for rank, use in enumerate(uses) if use == _NO_BACKWARD]
        if absent:
            raise ConfigurationError(
                f"layer {self.name!r} runs without gradients on rank(s) {absent}, while others need its input's "
                "gradient and would wait for them in backward. Use no_grad() and freeze parameters on all ranks alike."
            )
        return True

    def _sum_over_ranks(self, packed: torch.Tensor) -> torch.Tensor:
        on_cpu = packed.to(
            "cpu", torch.float64, copy=True
        )  # a copy: the rank's own sums are the gradients of weight and bias
        self.group.control.allreduce(on_cpu, name=f"{self.name}.gradients", priority=_PRIORITY).wait()
        return on_cpu

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1.0 - weight).add_(value.to(running), alpha=weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy the layer, which shares the group with the copy: averages of a model's weights are made of copies."""
        memo[id(self.group)] = self.group
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"layer {self.name!r} cannot be pickled, for its group cannot: save the model's state_dict()")


class _Normalise(torch.autograd.Function):
    """Normalise by statistics that depend on the inputs of all ranks.

    The formulas are those of Ioffe and Szegedy, "Batch normalization" (2015), with sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        eps: float,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """``mean`` and ``variance``: shape (C,), in the dtype that is computed in."""
        ctx.save_for_backward(inputs, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.reduce = count, reduce
        weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        # With given statistics torch's own kernel needs one pass, also for half types with statistics in float32.
        return functional.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of inputs, weight and bias; autograd casts them to their tensors' dtypes."""
        inputs, weight, mean, inverse_std = ctx.saved_tensors
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        dims = _all_but_channels(inputs)
        grad_outputs = grad_outputs.to(mean.dtype)
        centred = inputs.to(mean.dtype) - mean.view(shape)
        local = torch.stack([grad_outputs.sum(dims), (grad_outputs * centred).sum(dims)])
        grad_inputs = None
        if ctx.reduce is not None:
            means = (ctx.reduce(local) / max(ctx.count, 1.0)).to(mean)
            if ctx.needs_input_grad[0]:
                scale = inverse_std if weight is None else inverse_std * weight
                slope = means[1] * inverse_std.square()
                grad_inputs = centred.mul_(-slope.view(shape)).add_(grad_outputs).sub_(means[0].view(shape))
                grad_inputs.mul_(scale.view(shape))
        grad_weight = local[1] * inverse_std if ctx.needs_input_grad[1] else None
        grad_bias = local[0] if ctx.needs_input_grad[2] else None
        return grad_inputs, grad_weight, grad_bias, None, None, None, None, None


def convert_sync_batchnorm(module: torch.nn.Module, group: Group, *, name: str = "model") -> torch.nn.Module:
    """Replace every ``BatchNorm1d``, ``2d``, ``3d`` and ``torch.nn.SyncBatchNorm`` in a module. Purely local.

    The new layers hold the same parameters and buffers, so an optimizer made before goes on; hooks on the replaced
    layers are lost, so wrap the model afterwards. Each layer is named after its path in the module.

    Args:
        module: Changed in place.
        group: The ranks.
        name: Prefix of the operations' names; different for each model that shares a group.

    Returns:
        The module; or the new layer, if the module is a batch norm itself.

    Raises:
        ConfigurationError: A layer is a batch norm of another class, which may do more than normalise, or a lazy layer
            that is not initialised yet. Then no layer is replaced.
    """
    replacements: dict[torch.nn.Module, SyncBatchNorm] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            replacements[layer] = _converted(layer, group, f"{name}.{path}" if path else name)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if path and layer in replacements:
            parent, _, leaf = path.rpartition(".")
            module.get_submodule(parent).add_module(leaf, replacements[layer])
    return replacements.get(module, module)


def _converted(layer: _BatchNorm, group: Group, name: str) -> SyncBatchNorm:
    if type(layer) not in _CONVERTIBLE:
        raise ConfigurationError(
            f"{name!r} is a {type(layer).__name__}, which may do more than its base class: put a SyncBatchNorm in its "
            "place yourself. A lazy one becomes convertible with its first forward pass."
        )
    converted = SyncBatchNorm(
        layer.num_features,
        layer.eps,
        layer.momentum,
        layer.affine,
        layer.track_running_stats,
        device="meta",  # its own tensors are replaced at once
        group=group,
        name=name,
    )
    converted.weight, converted.bias = layer.weight, layer.bias
    converted.running_mean, converted.running_var = layer.running_mean, layer.running_var
    converted.num_batches_tracked = layer.num_batches_tracked
    converted.training = layer.training
    return converted


def _mean_and_squares(inputs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and M2 of every channel, in float32 or float64, by the corrected two-pass algorithm (same paper).

    ``torch.var_mean`` is as exact, but over these dimensions it takes a CPU four to eight times as long.
    """
    dims = _all_but_channels(inputs)
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rest = centred.sum(dims)  # 0 but for the rounding of the mean
    squares = centred.square_().sum(dims) - rest.square() / count
    return mean.flatten() + rest / count, squares.clamp_(min=0.0)


def _all_but_channels(inputs: torch.Tensor) -> list[int]:
    return [0, *range(2, inputs.dim())]
