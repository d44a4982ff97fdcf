"""Traces of models that a user's script defines, for ``totalreduce plan --script``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from totalreduce.bench.recording import record_model
from totalreduce.bench.traces import Trace
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["trace_script"]

_STEPS = 10


def trace_script(text: str) -> Trace:
    """Return the trace of the model that ``FILE.py:FUNCTION`` returns, trained for a few steps in this process.

    The function takes no arguments. It returns the model and a function without arguments that returns the model's loss
    on a batch.

    Raises:
        ConfigurationError: There is no such file or function, or it returns something else.
    """
    path_text, colon, name = text.rpartition(":")
    path = Path(path_text)
    if not colon or not path.is_file():
        raise ConfigurationError(f"--script takes FILE.py:FUNCTION, and the file must exist; not {text!r}")
    model, loss = _called(_function(path, name), text)
    source = f"totalreduce plan --script {path.name}:{name}: torch {torch.__version__}, SGD"
    return record_model(model, lambda _: _loss(loss, text), num_steps=_STEPS, name=path.stem, source=source)


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script, which may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{path} has no function {name!r}")
    return function


def _called(function: Callable[[], Any], text: str) -> tuple[nn.Module, Callable[[], Any]]:
    found = function()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module) and callable(found[1])):
        raise ConfigurationError(f"{text} must return a model and a function that returns its loss, not {found!r}")
    return found


def _loss(function: Callable[[], Any], text: str) -> torch.Tensor:
    loss = function()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigurationError(f"the second function of {text} must return a loss, a tensor of one element")
    return loss
