"""Records of the benchmarks as JSON and back."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from totalreduce.bench.records import from_document, to_document
from totalreduce.foundation.types import OpKind


@dataclass(frozen=True)
class Inner:
    pairs: list[tuple[float, int]]


@dataclass(frozen=True)
class Outer:
    path: Path
    inner: dict[str, Inner]
    kind: OpKind
    hosts: tuple[int, ...] = ()
    rate: float | None = None
    more: Inner | None = None
    names: list[str] = field(default_factory=list)


def test_records_come_back_as_they_were():
    outer = Outer(
        Path("/tmp"), {"a": Inner([(1.0, 2)]), "b": Inner([])}, OpKind.REDUCE, (0, 0, 1), 1.5, Inner([]), ["x"]
    )
    assert from_document(Outer, json.loads(json.dumps(to_document(outer)))) == outer


def test_what_a_document_lacks_has_its_default_and_what_it_has_too_much_is_left_out():
    document = {"path": "p", "inner": {}, "kind": "allreduce", "rate": 3, "unknown": [1]}
    found = from_document(Outer, document)
    assert found == Outer(Path("p"), {}, OpKind.ALLREDUCE, rate=3.0)
    assert isinstance(found.rate, float)
