"""``Trained``: which parameters of a model require gradients, and which are in which groups of which optimizers.

A program may change that while it trains: it freezes or unfreezes layers, and adds groups to optimizers. So it is a
part of the state of a job. A process that goes on with the state makes it its own *before* gradients are planned,
because the ranks compare their plans, and another plan of one process would end the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError

__all__ = ["KeptTrained", "Trained", "of_optimizer"]


@dataclass(frozen=True, slots=True)
class KeptTrained:
    """What ``Trained.keep`` has found in this process. Parameters and groups are not copied."""

    #: The groups of each optimizer, and the parameters of each group.
    groups: list[list[tuple[dict[str, Any], list[torch.nn.Parameter]]]]
    #: The parameters of the models: the program may put others in their places for a while.
    parameters: list[torch.nn.Parameter]
    frozen: set[torch.nn.Parameter]  #: Those that required no gradients.


@final
class Trained:
    """Reads and sets which parameters of some models are trained, and by which groups of some optimizers."""

    def __init__(self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Note models and optimizers of torch by name. The name "" of a model is left out of its parameters' names."""
        self._models, self._optimizers = models, optimizers
        #: Where the modules have their parameters: to look for them in every block takes longer than the rest of it.
        self._places = [module._parameters for model in models.values() for module in model.modules()]
        #: The number of parameters in each group when all of them were known to have names.
        self._sizes: list[int] = []

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield all parameters; one that has several places comes several times."""
        for place in self._places:
            for parameter in place.values():
                if parameter is not None:
                    yield parameter

    # ------------------------------------------------------------------------------------------------- in this process

    def keep(self) -> KeptTrained:
        """Return what ``restore`` sets again. Raises ``ConfigurationError``."""
        groups = [[(group, list(group["params"])) for group in each.param_groups] for each in self._optimizers.values()]
        sizes = [len(parameters) for of_one in groups for _, parameters in of_one]
        if sizes != self._sizes:
            self.document()
            self._sizes = sizes
        parameters = [each for place in self._places for each in place.values() if each is not None]
        return KeptTrained(groups, parameters, {each for each in parameters if not each.requires_grad})

    def restore(self, kept: KeptTrained) -> None:
        """Undo all changes since ``keep``: groups that were added or removed, and parameters that were (un)frozen."""
        for optimizer, groups in zip(self._optimizers.values(), kept.groups, strict=True):
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, parameters in groups:
                group["params"] = list(parameters)
            _forget_others(optimizer)
        for parameter in kept.parameters:
            _set_frozen(parameter, is_frozen=parameter in kept.frozen)

    # --------------------------------------------------------------------------------------------- for other processes

    def document(self) -> dict[str, Any]:
        """Return by names what ``adopt`` sets in another process. Hyper-parameters are not copied.

        Raises:
            ConfigurationError: A parameter of an optimizer is in none of the models.
        """
        names = {parameter: name for name, parameter in self._named().items()}
        groups: dict[str, list[list[str]]] = {}
        settings: dict[str, list[dict[str, Any]]] = {}
        for name, optimizer in self._optimizers.items():
            groups[name] = []
            for number, group in enumerate(optimizer.param_groups):
                odd = [list(parameter.shape) for parameter in group["params"] if parameter not in names]
                if odd:
                    raise ConfigurationError(
                        f"optimizer{of_optimizer(name)} has a parameter of shape {odd[0]} in group {number} that is "
                        "not in the model of the tr.State, so it would not be recovered. Several modules are one model "
                        "in a torch.nn.ModuleDict"
                    )
                groups[name].append([names[parameter] for parameter in group["params"]])
            settings[name] = [
                {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
            ]
        frozen = [name for parameter, name in names.items() if not parameter.requires_grad]
        return {"frozen": frozen, "groups": groups, "settings": settings}

    def adopt(self, document: Mapping[str, Any]) -> bool:
        """Train what another process trains, which has returned a document. The values of parameters do not change.

        Groups are added with their hyper-parameters, or removed with the optimizer's state of their parameters.

        Returns:
            Whether this process has trained anything else before.

        Raises:
            ConfigurationError: There is no such parameter, or no such optimizer. Nothing has changed.
        """
        named, mine = self._named(), self.document()
        if all(document[key] == mine[key] for key in ("frozen", "groups")):
            return False
        wanted = {name for groups in document["groups"].values() for group in groups for name in group}
        unknown = sorted(wanted - named.keys())
        if unknown or document["groups"].keys() != mine["groups"].keys():
            what = f"parameter {unknown[0]!r}" if unknown else f"optimizers {sorted(document['groups'])}"
            raise ConfigurationError(
                f"the state of the job trains the {what}, and this process has none: start the program that the state "
                "is of"
            )
        for name, optimizer in self._optimizers.items():
            groups = [[named[each] for each in group] for group in document["groups"][name]]
            if document["groups"][name] != mine["groups"][name]:
                _set_groups(optimizer, groups, document["settings"][name])
        frozen = set(document["frozen"])
        for name, parameter in named.items():
            _set_frozen(parameter, is_frozen=name in frozen)
        return True

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{prefix}.{name}" if prefix else name: parameter
            for prefix, model in self._models.items()
            for name, parameter in model.named_parameters()
        }


def of_optimizer(name: str) -> str:
    """Return how messages name one of several optimizers, after a word."""
    return f" {name}" if name else ""


def _set_groups(
    optimizer: torch.optim.Optimizer, groups: list[list[torch.nn.Parameter]], settings: list[dict[str, Any]]
) -> None:
    """Put parameters into groups. Groups that exist keep their hyper-parameters; ``settings`` are those of new ones."""
    del optimizer.param_groups[len(groups) :]
    for number, (group, parameters) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        group["params"] = parameters
        if "param_names" in group:
            group["param_names"] = settings[number]["param_names"]
    for number in range(len(optimizer.param_groups), len(groups)):
        optimizer.add_param_group({**settings[number], "params": groups[number]})
    _forget_others(optimizer)


def _forget_others(optimizer: torch.optim.Optimizer) -> None:
    """Drop the optimizer's state of parameters that are in none of its groups."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor) and key not in held]:
        del optimizer.state[key]


def _set_frozen(parameter: torch.nn.Parameter, *, is_frozen: bool) -> None:
    if parameter.requires_grad is is_frozen:
        parameter.requires_grad_(not is_frozen)
