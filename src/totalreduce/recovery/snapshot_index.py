"""Reads the tensors of a part of a snapshot. Whoever can write to its folder can have no code run by that.

The index of a checkpoint of ``torch.distributed.checkpoint`` (``.metadata``) is a pickle, which names what is called,
and may name anything. So only the classes of an index are found, and torch reads the tensors with
``weights_only=True``.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, final

import torch

from totalreduce.foundation.named_files import reading

__all__ = ["tensors_in"]

_INDEX_FILE = ".metadata"
#: What the pickle of an index names, besides dtypes.
_IN_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}


@final
class _IndexReader(pickle.Unpickler):
    """Loads the index of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of an index, or a dtype."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _IN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index of a snapshot does")


def tensors_in(path: Path, files: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of ``torch.distributed.checkpoint``, whose files have so many bytes.

    Raises:
        pickle.UnpicklingError: The index has something else in it, names other files, or says that the tensors are
            longer than the files.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with reading(path / _INDEX_FILE) as file:
        index = _IndexReader(file).load()
    reader = FileSystemReader(path)
    reader.read_metadata = lambda *_, **__: index  # type: ignore[method-assign]  # torch's would load any pickle
    entries = {
        key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    length = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values())
    if length > sum(files.values()):
        raise pickle.UnpicklingError(f"its index has tensors of {length:,} bytes, which its files do not have")
    for place in index.storage_data.values():
        if place.relative_path not in files:
            raise pickle.UnpicklingError(f"its index names the file {place.relative_path}, which is not of this part")
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for key, entry in entries.items()
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors
