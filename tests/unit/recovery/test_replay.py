"""The rules of replay, and the values of a checkpoint, as plain objects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from totalreduce.foundation.checks import NAME_BYTES_MAX
from totalreduce.foundation.errors import ConfigurationError, RecoveryError, ReplayMismatchError
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.groups.encoding import pack
from totalreduce.recovery.checkpoint import Checkpoint
from totalreduce.recovery.replay import Call, Entry, ReplayLog, Standing, Versions, plan_parcels
from totalreduce.recovery.replayed import _pack_entries, _unpack_entries


def call_of(kind=OpKind.ALLREDUCE, dtype=DType.FLOAT32, reduction=ReduceOp.SUM, root=0, shape=(2, 3), name="") -> Call:
    return Call(Signature(kind, dtype, reduction, root, shape), name)


def log_of(rank=0, size=4, copies=5, bytes_max=1 << 20) -> ReplayLog[str]:
    return ReplayLog(rank, size, result_copies=copies, bytes_max=bytes_max)


# -------------------------------------------------------------------------------------------------------------- the log


@pytest.mark.parametrize(("size", "copies", "period"), [(12, 3, 4), (12, 5, 2), (13, 3, 4), (4, 5, 1), (7, 1, 7)])
def test_the_last_result_is_on_every_rank_and_older_ones_on_enough_ranks(size, copies, period) -> None:
    logs = [log_of(rank, size, copies) for rank in range(size)]
    for number in range(20):
        for log in logs:
            log.append(call_of(), f"result {number}")
        holders = [{rank for rank in range(size) if each in logs[rank].held} for each in range(number + 1)]
        assert holders[number] == set(range(size))
        for older in range(number):
            assert holders[older] == {rank for rank in range(size) if rank % period == older % period}
            assert len(holders[older]) >= copies or size < copies


def test_replayed_calls_get_the_results_in_order() -> None:
    log = log_of()
    log.install({number: Entry(call_of(), f"result {number}") for number in range(3)})
    assert [log.answer(call_of()) for _ in range(4)] == ["result 0", "result 1", "result 2", None]
    assert (log.position, log.is_replaying, log.held) == (3, False, (0, 1, 2))
    log.begin(7)
    assert (log.version, log.position, log.held) == (7, 0, ())


OTHERS = [
    call_of(kind=OpKind.BROADCAST),
    call_of(dtype=DType.INT32),
    call_of(reduction=ReduceOp.MAX),
    call_of(root=1),
    call_of(shape=(3, 2)),
    call_of(shape=(6,)),
    call_of(name="other"),
]


@pytest.mark.parametrize("other", OTHERS, ids=Call.describe)
def test_a_replayed_call_is_compared_in_all_that_describes_it(other: Call) -> None:
    """All of them have results of the same size, which is all that Rabit compared."""
    log = log_of()
    log.install({0: Entry(call_of(), "result")})
    with pytest.raises(ReplayMismatchError) as caught:
        log.answer(other)
    assert log.position == 0
    assert (caught.value.version, caught.value.position, caught.value.tensor) == (0, 0, "call 0 after version 0")
    [difference] = caught.value.differences
    assert f"the job has made the call {call_of().describe()}," in difference
    assert difference.endswith(f"makes {other.describe()}")


def test_a_checkpoint_where_the_job_has_made_a_call_is_a_mismatch() -> None:
    log = log_of()
    log.check_no_call("a checkpoint")
    log.install({0: Entry(call_of(), "result")})
    with pytest.raises(ReplayMismatchError, match=r"allreduce\(sum\) of float32\[2, 3\], and .* makes a checkpoint"):
        log.check_no_call("a checkpoint")


def test_results_have_a_bound_that_is_the_same_for_replayed_ones() -> None:
    call = call_of(shape=(1000,))  # 4000 bytes, and 512 for the entry
    live, new = log_of(bytes_max=3 * 4512), log_of(bytes_max=3 * 4512)
    for _ in range(3):
        live.check_room(call)
        live.append(call, "result")
    new.install(live.entries(range(3)))
    while new.answer(call) is not None:
        pass
    for log in (live, new):
        with pytest.raises(
            ConfigurationError, match=r"take 18048 bytes, and log_bytes is 13536\. Call job\.checkpoint"
        ):
            log.check_room(call)
        log.begin(1)
        log.check_room(call)
    gathered = call_of(kind=OpKind.ALLGATHER, reduction=ReduceOp.NONE, shape=(1000,))
    with pytest.raises(ConfigurationError, match="take 16512 bytes"):
        live.check_room(gathered)


# --------------------------------------------------------------------------------------------------------- the versions


def test_a_vote_that_has_passed_anywhere_counts_for_ranks_that_were_in_it() -> None:
    versions = Versions("first")
    versions.prepare("second")
    assert not versions.decided(0)
    versions.is_in_vote = True
    assert versions.decided(1)
    assert (versions.version, versions.state, versions.is_in_vote) == (1, "second", False)
    versions.prepare("third")
    versions.is_in_vote = True
    assert not versions.decided(1)
    assert (versions.version, versions.state, versions.is_in_vote) == (1, "second", False)
    with pytest.raises(RecoveryError, match="this rank has version 1 of the state, and the others have 2"):
        versions.decided(2)


# ---------------------------------------------------------------------------------------------- who sends what to whom


def test_a_new_rank_gets_state_own_values_and_results_and_one_behind_the_last_result() -> None:
    standings = [
        Standing(True, 3, (0, 2), (2, 3)),
        Standing(False, 0, (), ()),
        Standing(True, 2, (0, 1), (0, 1)),
        Standing(True, 3, (1, 2), (1, 2)),
    ]
    parcels = plan_parcels(standings, 5, with_own=True)
    found = {(each.kind, each.numbers): (each.route.sources, set(each.requesters)) for each in parcels}
    # The tree is 0 - 1, 0 - 2, 1 - 3.
    assert found == {
        ("state", ()): ((None, 0, None, None), {1}),
        ("own", (1,)): ((None, 3, None, None), {1}),
        ("results", (0,)): ((None, 0, None, None), {1}),
        ("results", (1,)): ((None, 3, None, None), {1}),
        ("results", (2,)): ((None, 0, 0, None), {1, 2}),
    }


def test_a_job_that_begins_has_the_state_of_one_rank() -> None:
    new = Standing(False, 0, (), ())
    [parcel] = plan_parcels([Standing(True, 0, (), ()), new, new], 0, with_own=True)
    assert (parcel.kind, parcel.requesters) == ("state", {1, 2})


def test_what_nobody_has_any_more_is_an_error() -> None:
    new, old = Standing(False, 0, (), ()), Standing(True, 2, (1,), ())
    with pytest.raises(RecoveryError, match=r"all ranks that had the result of call 0 are lost.*larger result_copies"):
        plan_parcels([old, new], 0, with_own=False)
    with pytest.raises(RecoveryError, match=r"local values of rank 1 are lost with it.*larger local_replicas"):
        plan_parcels([Standing(True, 0, (), ()), new], 3, with_own=True)


def test_many_results_travel_in_parcels_that_can_be_packed() -> None:
    """Their descriptions, with names that JSON makes six times as long, must not exceed the limit of a document."""
    call = call_of(shape=(1,) * 64, name="\x01" * NAME_BYTES_MAX)
    held = tuple(range(5000))
    parcels = plan_parcels([Standing(True, 5000, held, ()), Standing(False, 0, (), ())], 3, with_own=False)
    results = [parcel for parcel in parcels if parcel.kind == "results"]
    assert [number for parcel in results for number in parcel.numbers] == list(held)
    assert max(len(parcel.numbers) for parcel in results) == 2048
    entries = dict.fromkeys(results[0].numbers, Entry(call, torch.zeros((1,) * 64)))
    packed = _pack_entries(entries)
    assert int(packed[:8].view(torch.int64)) < 24 * 1024 * 1024 * 3 / 4
    assert _unpack_entries(packed)[7].call == call


def test_names_count_as_bytes_of_the_log() -> None:
    log = log_of(bytes_max=512 + 24 + 10)
    log.check_room(call_of(name="é" * 5))
    with pytest.raises(ConfigurationError, match="take 547 bytes"):
        log.check_room(call_of(name="é" * 5 + "a"))


# ------------------------------------------------------------------------------------------------------- the values


def test_values_come_back_bit_by_bit_and_are_copies() -> None:
    weights = torch.tensor([1.5, float("nan"), -0.0])
    state = Checkpoint(weights=weights, counts=np.arange(3), words=["a"], local={"rest": {"x": (1, 2)}})
    saved = state.save()
    weights += 1
    state.words.append("b")
    state.rest = None
    other = Checkpoint(weights=None, counts=0, words=[], local={"rest": 0})
    other.load(saved)
    assert (
        other.weights.view(torch.int32).tolist() == torch.tensor([1.5, float("nan"), -0.0]).view(torch.int32).tolist()
    )
    assert (other.counts.tolist(), other.words, other.rest) == ([0, 1, 2], ["a"], {"x": (1, 2)})
    assert other.save().describe() == saved.describe() != state.save().describe()
    assert list(saved.describe()) == ["value weights", "value counts", "value words"]
    assert state.describe() == "value weights: Tensor\nvalue counts: ndarray\nvalue words: list\nlocal value rest"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs a value"),
        ({"save": 1}, "a value of the name 'save'"),
        ({"_x": 1}, "a value of the name '_x'"),
        ({"x": 1, "local": {"x": 2}}, "two values of the name 'x'"),
        ({"x": object()}, "cannot save 'x'"),
        ({"local": {"x": object()}}, "cannot save 'local'"),
        ({"x": torch.zeros(2, 3).t()}, r"cannot save 'x': it has a tensor or array with the strides \(1, 3\)"),
        ({"x": [{"y": (1, np.zeros((2, 3)).T)}]}, r"cannot save 'x': .* strides \(8, 24\).*numpy\.ascontiguousarray"),
        ({"local": {"x": SimpleNamespace(y=torch.zeros(4)[::2])}}, r"cannot save 'local': .* strides \(2,\)"),
    ],
)
def test_values_that_cannot_be_saved_are_refused(values, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(**values)


def test_values_that_are_too_large_together_are_refused_when_they_are_saved(monkeypatch) -> None:
    """Each of them is small enough; a new process gets all of them in one message."""
    limit = pack({name: pack(torch.zeros(1000)) for name in "ab"}).numel()
    state = Checkpoint(a=torch.zeros(1000), b=torch.zeros(1000))
    monkeypatch.setattr("totalreduce.recovery.checkpoint.PACKED_BYTES_MAX", limit)
    state.save()
    monkeypatch.setattr("totalreduce.recovery.checkpoint.PACKED_BYTES_MAX", limit - 1)
    with pytest.raises(ConfigurationError, match=f"together they take {limit} bytes, and the limit is {limit - 1}"):
        state.save()


def test_a_value_that_would_not_be_saved_is_refused() -> None:
    state = Checkpoint(centres=1, local={"mine": 2})
    with pytest.raises(ConfigurationError, match=r"no value 'centers', .* its values are centres, mine"):
        state.centers = 2
