"""The state of a strategy with servers: after ``finish``, the state of the torch optimizers of all servers.

When all workers have finished, no gradient waits, all ranks have the same parameters, and servers begin to count anew.
What is left are the optimizers of the servers, each of which has the state of its parameters. Together they are the
state of one torch optimizer with all parameters, which any number of ranks can share out again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["check_state", "cut", "joined", "load_entries", "numbers_of", "saved", "state_of"]


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, int]:
    """Return the number of each parameter, as in the optimizer's ``state_dict``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {parameter: number for number, parameter in enumerate(parameters)}


def saved(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of one parameter, in host memory."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in entry.items()
    }


def cut(entry: Mapping[str, Any], parameter: torch.Tensor, begin: int, end: int) -> dict[str, Any]:
    """Return a copy of the state of a part of a parameter, whose tensors are contiguous.

    Tensors in ``entry`` of the shape of the parameter have an element for each one of it.
    """
    shape = parameter.shape if end - begin == parameter.numel() else (end - begin,)
    return {
        key: value.reshape(-1)[begin:end].clone().view(shape)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else copy.deepcopy(value)
        for key, value in entry.items()
    }


def joined(parts: Mapping[int, Mapping[str, Any]], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter from those of its parts; what is no tensor of their shape is that of the first.

    Tensors of the shape of the parameter have the order of its elements in memory, as those of its optimizer have.
    ``parts``: by the first element of each part; one part alone is the whole parameter.
    """
    begins = sorted(parts)
    first = parts[begins[0]]
    shape = parameter.shape if len(begins) == 1 else (begins[1],)
    found = dict(first)
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            elements = torch.cat([parts[begin][key].reshape(-1) for begin in begins])
            found[key] = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device="cpu")
            found[key].copy_(elements.view(parameter.shape))
    return found


def state_of(name: str, optimizer: torch.optim.Optimizer, entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``strategy_steps.state()`` returns, from the states of parameters by number; nothing is copied."""
    return {"strategy": name, "kind": type(optimizer).__qualname__, "optimizer": dict(sorted(entries.items()))}


def check_state(state: object, name: str, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the entries of a state by the number of the parameter.

    Raises:
        ConfigurationError: It is the state of another strategy, of another optimizer, or of another model.
    """
    advice = "load what strategy_steps.state() has returned with the same sync=, optimizer and model"
    of = state.get("strategy") if isinstance(state, Mapping) else None
    if of != name:
        raise ConfigurationError(f"the state is not that of {name!r} but of {of!r}: {advice}")
    assert isinstance(state, Mapping)
    kind, entries = state.get("kind"), state.get("optimizer")
    if kind != type(optimizer).__qualname__ or not isinstance(entries, Mapping):
        raise ConfigurationError(
            f"the state is of {kind}, and the optimizer is {type(optimizer).__qualname__}: {advice}"
        )
    shapes = {number: parameter.shape for parameter, number in numbers_of(optimizer).items()}
    for number, entry in entries.items():
        if number not in shapes or not isinstance(entry, Mapping):
            raise ConfigurationError(
                f"the state has an entry {number!r}, and there are {len(shapes)} parameters: {advice}"
            )
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != shapes[number]:
                raise ConfigurationError(
                    f"{key!r} of parameter {number} has the shape {list(value.shape)} in the state, and the parameter "
                    f"{list(shapes[number])}: {advice}"
                )
    return {number: dict(entry) for number, entry in entries.items()}


def load_entries(optimizer: torch.optim.Optimizer, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Give the optimizer the state of its parameters. Its hyper-parameters stay."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": copy.deepcopy(dict(entries)), "param_groups": settings})
