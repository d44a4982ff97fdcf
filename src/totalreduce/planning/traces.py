"""Traces of a training step: when each layer's gradient is ready and when the next forward pass needs it.

One JSON file per model::

    {"model": "resnet50", "source": "...", "columns": ["ready_s", "needed_s", "elements"],
     "layers": [[0.21411, 0.34721, 9472], ...]}

Layers stand in forward order. Times are seconds since the backward pass produced its first gradient;
``needed_s`` is when the *next* forward pass reaches the layer, so a replayed period is the last layer's
``needed_s``. A trace may have ``step_s``, the seconds of a whole step, and ``shapes``, a list of the shapes of its
parameters for each layer. Pure, no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from totalreduce.foundation.errors import ConfigurationError

ELEMENT_BYTES = 4  # gradients are replayed as float32
_COLUMNS = ["ready_s", "needed_s", "elements"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One message of a training step."""

    ready_s: float  #: When the backward pass has its gradient, in seconds since the first gradient.
    needed_s: float  #: When the next forward pass wants its new weights, on the same clock.
    elements: int  #: Size of the gradient.
    shapes: tuple[tuple[int, ...], ...] = ()  #: The shapes of the layer's parameters; empty if they are not known.


@dataclass(frozen=True, slots=True)
class Trace:
    """The layers of a model in forward order, with where they come from."""

    model: str  #: The model's name.
    source: str  #: Where the trace comes from.
    layers: tuple[Layer, ...]  #: The layers in forward order.
    #: Seconds of a whole step; 0 if the trace does not say. It is longer than ``compute_s`` by what lies between the
    #: last layer's use and the next first gradient.
    step_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """One period without any communication: backward, whatever lies between, forward."""
        return max(layer.needed_s for layer in self.layers)

    @property
    def period_s(self) -> float:
        """Seconds of a whole step without communication, as far as the trace says."""
        return max(self.step_s, self.compute_s)

    @property
    def forward_s(self) -> float:
        """From the first layer's use to the last one's."""
        return self.compute_s - min(layer.needed_s for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Gradient bytes of one step on one rank."""
        return sum(layer.elements for layer in self.layers) * ELEMENT_BYTES

    def scaled(self, *, time: float = 1.0, elements: float = 1.0) -> Trace:
        """The same model on a faster or slower machine, or with fewer or more weights, of no shape, in every layer."""
        layers = tuple(
            Layer(
                layer.ready_s * time,
                layer.needed_s * time,
                max(1, round(layer.elements * elements)),
                layer.shapes if elements == 1.0 else (),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, step_s=self.step_s * time)


def parse_trace(document: Any, where: str) -> Trace:
    """Check a decoded JSON document and build the trace."""
    if not isinstance(document, dict) or document.get("columns") != _COLUMNS:
        raise ConfigurationError(f'{where} is not a trace: it needs "columns": {json.dumps(_COLUMNS)}')
    rows = document.get("layers")
    if not isinstance(rows, list) or not rows:
        raise ConfigurationError(f"{where} has no layers")
    shapes = document.get("shapes", [[] for _ in rows])
    if not isinstance(shapes, list) or len(shapes) != len(rows):
        raise ConfigurationError(f"{where}: shapes has a list of shapes for each of its {len(rows)} layers")
    layers = tuple(_parse_layer(row, shapes[index], f"{where}, layer {index}") for index, row in enumerate(rows))
    if max(layer.ready_s for layer in layers) > min(layer.needed_s for layer in layers):
        raise ConfigurationError(f"{where}: a layer is needed before the backward pass is over")
    step_s = document.get("step_s", 0.0)
    if not isinstance(step_s, int | float) or not 0 <= step_s < math.inf:
        raise ConfigurationError(f"{where}: step_s is a number of seconds, not {step_s!r}")
    return Trace(str(document.get("model", where)), str(document.get("source", "unknown")), layers, float(step_s))


def as_document(trace: Trace) -> dict[str, Any]:
    """Return the document that ``parse_trace`` reads."""
    return {
        "model": trace.model,
        "source": trace.source,
        "order": "forward order of layers; gradients become ready from the last to the first",
        "columns": _COLUMNS,
        "unit": "seconds since the first gradient; needed_s is when the next forward pass wants the layer",
        **({"step_s": trace.step_s} if trace.step_s else {}),
        **({"shapes": [layer.shapes for layer in trace.layers]} if any(layer.shapes for layer in trace.layers) else {}),
        "layers": [[layer.ready_s, layer.needed_s, layer.elements] for layer in trace.layers],
    }


def load_trace(path: Path) -> Trace:
    """Read a trace file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read trace {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return parse_trace(document, str(path))


def shipped_traces() -> dict[str, Path]:
    """Name and file of every trace that comes with the package, made by ``totalreduce bench trace``."""
    folder = Path(str(resources.files("totalreduce.planning") / "traces"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find_traces(names: Sequence[str], directories: Iterable[Path]) -> list[Path]:
    """Files for names (in the directories, then among the shipped ones) and for paths; all if none is named."""
    known = shipped_traces()
    given: dict[str, Path] = {}
    for directory in directories:
        found = sorted(directory.glob("*.json"))
        if not found:
            raise ConfigurationError(f"there is no *.json trace in {directory}")
        given.update({path.stem: path for path in found})
    if not names:
        return list((given or known).values())
    known.update(given)
    return [_find(name, known) for name in names]


def _find(name: str, known: dict[str, Path]) -> Path:
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    raise ConfigurationError(f"no trace {name!r}: give a file, or one of {', '.join(known)}")


def _parse_layer(row: Any, shapes: Any, where: str) -> Layer:
    try:
        ready_s, needed_s, elements = row
        sides = tuple(tuple(int(side) for side in shape) for shape in shapes)
        layer = Layer(float(ready_s), float(needed_s), int(elements), sides)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where}: expected [ready_s, needed_s, elements], not {row!r}") from error
    if not 0 <= layer.ready_s <= layer.needed_s or layer.needed_s == 0 or layer.elements < 1:
        raise ConfigurationError(f"{where}: needs 0 <= ready_s <= needed_s and at least one element, not {row!r}")
    if sides and sum(math.prod(shape) for shape in sides) != layer.elements:
        raise ConfigurationError(f"{where}: parameters of the shapes {shapes!r} do not have {layer.elements} elements")
    return layer
