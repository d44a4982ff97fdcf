"""``Watch``: tells whether tensors have changed, without copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from totalreduce.tensors.modes import outside_inference_mode

__all__ = ["Watch"]

#: The most elements of a tensor that are compared.
_SAMPLE = 64
#: The integers in place of elements of so many bytes: their comparison is one of bits, and NaN equals itself.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class Watch:
    """Some tensors, and what they were when ``note`` was called.

    Torch counts the changes of a tensor (``_version``), but not those through ``.data``, by the kernels of batch
    normalisation, or by the fused kernels of an optimizer. So up to 64 elements of each tensor are compared, too. They
    also tell a change that was put back from one that was not.
    """

    @outside_inference_mode
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors as they are. The watch is of no use when a tensor has got other memory."""
        self._tensors = list(tensors)
        self._counted = [each for each in self._tensors if not each.is_inference()]  # others have no count
        #: By device and size of the elements: views of the elements that are compared, and the index of their tensor.
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(self._tensors):
            view = _sample_of(tensor)
            if view.numel():
                groups.setdefault((view.device, view.dtype), []).append((index, view))
        self._views = [[view for _, view in group] for group in groups.values()]
        self._indices = [[index for index, _ in group] for group in groups.values()]
        self._rows = [_row_for(views) for views in self._views]
        self._now = [torch.empty_like(row) for row in self._rows]
        self.note()

    def note(self) -> None:
        """Note the tensors as they are now."""
        self._versions = [tensor._version for tensor in self._counted]
        for views, row in zip(self._views, self._rows, strict=True):
            torch.cat(views, out=row)

    @property
    def has_changed(self) -> bool:
        """Whether a tensor has changed since ``note``, or was changed and put back."""
        return [tensor._version for tensor in self._counted] != self._versions or self._differs()

    def changed(self) -> list[int]:
        """Return the indices of the tensors that have changed since ``note``, or were changed and put back."""
        versions = dict(zip(map(id, self._counted), self._versions, strict=True))
        found = set(self.differing())
        found |= {
            index
            for index, tensor in enumerate(self._tensors)
            if id(tensor) in versions and tensor._version != versions[id(tensor)]
        }
        return sorted(found)

    def changed_once(self) -> list[int]:
        """Return the indices of the tensors that have one change more than at ``note``, so that nothing put it back."""
        pairs = zip(self._counted, self._versions, strict=True)
        ids = {id(tensor) for tensor, version in pairs if tensor._version == version + 1}
        return [index for index, tensor in enumerate(self._tensors) if id(tensor) in ids]

    def differing(self) -> list[int]:
        """Return the indices of the tensors whose compared elements are others than at ``note``."""
        if not self._differs():
            return []
        found = []
        for indices, views, row, now in zip(self._indices, self._views, self._rows, self._now, strict=True):
            lengths = [view.numel() for view in views]
            parts = zip(indices, torch.split(row, lengths), torch.split(now, lengths), strict=True)
            found += [index for index, before, after in parts if not torch.equal(before, after)]
        return sorted(found)

    def _differs(self) -> bool:
        """Whether compared elements are others than at ``note``. They are in ``_now`` after this."""
        for views, now in zip(self._views, self._now, strict=True):
            torch.cat(views, out=now)
        return not all(map(torch.equal, self._rows, self._now))


def _row_for(views: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(view.numel() for view in views), dtype=views[0].dtype, device=views[0].device)


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of one dimension of at most 64 elements that are spread over a tensor, as integers."""
    whole = tensor.detach()
    if whole.is_conj():
        whole = whole.conj()  # the bits in memory
    if whole.is_neg():
        whole = torch._neg_view(whole)
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    for dim, stride in enumerate(whole.stride()):
        if stride == 0:
            whole = whole.narrow(dim, 0, min(1, whole.shape[dim]))
    whole = whole.permute(sorted(range(whole.dim()), key=whole.stride, reverse=True))
    if whole.is_contiguous():
        flat = whole.reshape(-1)
    else:  # elements along the longest dimension
        longest = max(range(whole.dim()), key=lambda dim: whole.shape[dim])
        for dim in reversed(range(whole.dim())):
            if dim != longest:
                whole = whole.select(dim, 0)
        flat = whole
    return flat.view(_INTEGERS[flat.element_size()])[:: max(1, -(-flat.numel() // _SAMPLE))]
