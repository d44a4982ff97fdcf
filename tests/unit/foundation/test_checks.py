"""Values of users are checked where they enter: each wrong one is an error that names it, never a crash later."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from plan_settings import DENSE

import totalreduce as tr
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

PLAN = dataclasses.replace(DENSE, optimizer="o", bucket_bytes=1)
SETTINGS = [
    tr.EngineConfig(),
    tr.TcpConfig(),
    tr.CoordinationConfig(),
    tr.ErrorFeedback(bucket_elements=10, clip_norm=1.0),
    tr.OkTopk(),
    tr.TopkA(),
    tr.TopkDSA(),
    tr.GTopk(),
    tr.GaussianK(),
    tr.SharedTopk(),
    tr.PowerSGD(),
    tr.Auto(),
    PLAN,
]
#: Wrong in every whole number, every number and every choice.
WRONG = [math.nan, math.inf, -math.inf, -1, -0.5, "3", b"3", True, [1], None, torch.ones(2)]
WRONG_WHOLE = [*WRONG, 1.5, 16.0, np.float64(2.0)]


def cases():
    for settings in SETTINGS:
        for field in dataclasses.fields(settings):
            kind = field.type.split(" | ")[0].strip()
            optional = field.type.endswith("None")
            if kind in ("int", "float"):
                for value in WRONG_WHOLE if kind == "int" else WRONG:
                    if value is None and optional:
                        continue
                    yield pytest.param(
                        settings, field.name, value, id=f"{type(settings).__name__}.{field.name}={value!r:.12}"
                    )
            elif kind.startswith("Literal"):
                for value in ("", "nonsense", 3, None, math.nan):
                    yield pytest.param(
                        settings, field.name, value, id=f"{type(settings).__name__}.{field.name}={value!r}"
                    )


@pytest.mark.parametrize(("settings", "name", "value"), list(cases()))
def test_settings(settings, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        dataclasses.replace(settings, **{name: value})


def test_numbers_of_other_libraries_become_pythons() -> None:
    """They travel as JSON when the ranks compare their settings."""
    config = tr.EngineConfig(segment_bytes=np.int64(4096), timeout_s=torch.tensor(3.0))
    assert (type(config.segment_bytes), type(config.timeout_s)) == (int, float)
    assert config == tr.EngineConfig(segment_bytes=4096, timeout_s=3.0)


def test_integers() -> None:
    assert checks.integer("n", np.int32(7), minimum=0) == 7
    for value, words in ((7.0, "n must be a whole number, not 7.0"), (-1, "n must be from 0 to 5, not -1")):
        with pytest.raises(ConfigurationError) as caught:
            checks.integer("n", value, minimum=0, maximum=5)
        assert str(caught.value) == words
    with pytest.raises(ConfigurationError, match=r"^n must be at most 5, not 6$"):
        checks.integer("n", 6, maximum=5)


def test_real_numbers() -> None:
    assert checks.real_number("x", torch.tensor(0.5), above=0, below=1) == 0.5
    for value, words in (
        (math.nan, "x must be a finite number of metres, not nan"),
        (0, "x must be positive, not 0"),
        (1, "x must be below 1, not 1"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            checks.real_number("x", value, above=0, below=1, unit="metres")
        assert str(caught.value) == words


NAMES = {
    "a number": (3, r"the name of an operation is a string, not int \(3\)"),
    "bytes": (b"w", r"the name of an operation is a string, not bytes \(b'w'\)"),
    "a list": (["w"], r"a string, not list"),
    "half a character": ("a\ud800b", r"'a\\ud800b' of an operation cannot be encoded as UTF-8: .* at character 1"),
    "long": ("ä" * 600, r"longer than 1024 bytes: 1200"),
}
COLLECTIVES = {
    "allreduce": lambda group, **given: group.allreduce(torch.ones(2), **given),
    "reduce": lambda group, **given: group.reduce(torch.ones(2), **given),
    "broadcast": lambda group, **given: group.broadcast(torch.ones(2), **given),
    "allgather": lambda group, **given: group.allgather([torch.ones(2)], torch.ones(2), **given),
    "reduce_scatter": lambda group, **given: group.reduce_scatter(torch.ones(2), [torch.ones(2)], **given),
    "gather": lambda group, **given: group.gather([torch.ones(2)], torch.ones(2), **given),
    "scatter": lambda group, **given: group.scatter(torch.ones(2), [torch.ones(2)], **given),
    "alltoall": lambda group, **given: group.alltoall([torch.ones(2)], [torch.ones(2)], **given),
}
ARGUMENTS = {
    "priority": [1.5, math.nan, "1", None, True, 2**31, -(2**31) - 1],
    "timeout_s": [0, -1, math.nan, math.inf, 1e10, "3", True],
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_arguments_of_collectives(collective: str) -> None:
    """Each wrong value is an error here, and neither the group nor the name suffers."""
    [group] = make_groups(1)
    call = COLLECTIVES[collective]
    with group:
        for value, words in NAMES.values():
            with pytest.raises(ConfigurationError, match=words):
                call(group, name=value)
        for argument, values in ARGUMENTS.items():
            for value in values:
                with pytest.raises(ConfigurationError, match=argument):
                    call(group, name="w", **{argument: value})
        assert call(group, name="w", priority=np.int64(3), timeout_s=np.float32(2.0)).wait().tolist() is not None
        assert group.statistics().operations == 1


@pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, 1e10, "3"])
def test_waits(timeout_s: object) -> None:
    """Two threads wait: one of them moves messages, the other one looks on."""

    def body(group: tr.Group) -> float:
        if group.rank == 1:
            group.barrier()
        work = group.allreduce(torch.ones(1), name="w")
        if group.rank == 0:
            with pytest.raises(ConfigurationError, match="timeout_s must be"):
                work.wait(timeout_s)
            group.barrier()
        return float(work.wait(30))

    assert run_ranks(2, body) == [2.0, 2.0]


def test_messages_and_subgroups() -> None:
    def body(group: tr.Group) -> None:
        other = 1 - group.rank
        for wrong in (0.0, "1", None, math.nan, True):
            with pytest.raises(ConfigurationError, match="the other rank must be a whole number"):
                group.send(torch.ones(1), dst=wrong)
            with pytest.raises(ConfigurationError, match="tag must be a whole number"):
                group.recv(torch.ones(1), src=other, tag=wrong)
            with pytest.raises(ConfigurationError, match="tag must be a whole number"):
                group.recv(torch.ones(1), src=None, tag=wrong)
            with pytest.raises(ConfigurationError, match="root must be a whole number"):
                group.broadcast(torch.ones(1), root=wrong)
            with pytest.raises(ConfigurationError, match="a rank must be a whole number"):
                group.subgroup([0, wrong])
        with pytest.raises(ConfigurationError, match="name of an operation is a string"):
            group.subgroup([0, 1], name=3)
        with pytest.raises(ConfigurationError, match=r"op='sum' is no reduction: write tr.ReduceOp.SUM; there are"):
            group.allreduce(torch.ones(1), op="sum")
        group.barrier()

    run_ranks(2, body)


def test_names_of_users_and_of_the_library_never_meet() -> None:
    """Whatever the library calls its own operations, a user may call his the same, at the same time."""

    def body(group: tr.Group) -> list[float]:
        names = ["barrier#0", f"message {group.rank} to {1 - group.rank}, tag 0", "unnamed", "p/w", "plan p/digest"]
        mine = ["barrier#0", "message 0 to 1, tag 0", "message 1 to 0, tag 0", *names[2:], "p/presence", "control"]
        tensors = [torch.full((2,), float(place)) for place in range(len(mine))]
        if group.rank == 1:  # behind: what the other rank has sent floats here
            group.barrier()
        works = [group.allreduce(tensor, name=name) for tensor, name in zip(tensors, mine, strict=True)]
        if group.rank == 0:
            group.barrier()
        other = torch.zeros(1)
        messages = [group.send(torch.ones(1), dst=1 - group.rank), group.recv(other, src=1 - group.rank)]
        plan = group.plan("p", [tr.TensorSpec("w", (2,), torch.float32)], op=tr.ReduceOp.SUM, on_missing="error")
        with plan.step() as step:
            step.submit("w", torch.ones(2))
        assert group.broadcast_object({"a": 1}) == {"a": 1}
        for work in (*messages, *works):
            work.wait()
        return [other.item(), *(tensor[0].item() for tensor in tensors)]

    assert run_ranks(2, body) == [[1.0, *(2.0 * place for place in range(8))]] * 2
