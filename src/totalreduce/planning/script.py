"""Traces of models that a user's script defines, for ``totalreduce plan --script``."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.recording import record_model
from totalreduce.planning.traces import Trace

__all__ = ["trace_script"]

_STEPS = 10


def trace_script(text: str, arguments: Sequence[str] = ()) -> Trace:
    """Return the trace of the model that ``FILE.py:FUNCTION`` returns, trained for a few steps in this process.

    The script finds itself and ``arguments`` in ``sys.argv``, not the words of this command. The function takes no
    arguments. It returns the model and a function without arguments that returns the model's loss on a batch. Raises
    ``ConfigurationError``.
    """
    path_text, colon, name = text.rpartition(":")
    path = Path(path_text)
    if not colon or not path.is_file():
        raise ConfigurationError(f"--script takes FILE.py:FUNCTION, and the file must exist; not {text!r}")
    with _as_script(path, arguments):
        model, loss = _called(_function(path, name), text)
        return _trace(path, name, model, loss, text)


def _trace(path: Path, name: str, model: nn.Module, loss: Callable[[], Any], text: str) -> Trace:
    source = f"totalreduce plan --script {path.name}:{name}: torch {torch.__version__}, SGD"
    return record_model(model, lambda _: _loss(loss, text), num_steps=_STEPS, name=path.stem, source=source)


@contextlib.contextmanager
def _as_script(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give a script what Python gives it: its arguments, and its folder first on the path of modules."""
    words, folders = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *folders]
    try:
        yield
    finally:
        sys.argv, sys.path = words, folders


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:  # argparse has printed its usage
        raise ConfigurationError(
            f"{path} ended while it was imported, with exit code {end.code}: its arguments stand after `--`, as in "
            f"`totalreduce plan --script {path.name}:{name} -- --layers 3`"
        ) from None
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
