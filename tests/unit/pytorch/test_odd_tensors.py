"""Tensors of a model of an odd kind: a state undoes and sends them, or refuses them by name before the job begins."""

from collections.abc import Callable

import pytest
import torch

import totalreduce.horovod as hvd
from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.encoding import decode, encode
from totalreduce.pytorch.broadcast import broadcast_parameters
from totalreduce.recovery.state import State
from totalreduce.tensors.values import set_values
from totalreduce.testing import run_ranks

LARGE = 70_000  #: More elements than a buffer has that is copied in every block.


def in_inference_mode(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(*shape)


HELD: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(4),
    "large and expanded": lambda: torch.ones(1).expand(LARGE),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "large and conjugate": lambda: torch.full((LARGE,), 1 + 2j).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "inference": lambda: in_inference_mode(3),
    "large inference": lambda: in_inference_mode(LARGE),
    "float8": lambda: torch.ones(3).to(torch.float8_e5m2),
    "overlapping": lambda: torch.ones(4).unfold(0, 2, 1),
    "with gradient": lambda: torch.ones(3, requires_grad=True),
    "transposed": lambda: torch.ones(3, 2).t(),
    "scalar": lambda: torch.tensor(1.0),
    "large": lambda: torch.ones(LARGE),
}
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "has layout torch.sparse_coo; use .to_dense"),
    "compressed rows": (lambda: torch.eye(2).to_sparse_csr(), "has layout torch.sparse_csr"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantised"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
    "meta": (lambda: torch.empty(3, device="meta"), r"is on meta and has no values; use \.to_empty"),
    "bits": (lambda: torch.empty(3, dtype=torch.bits8), "has dtype torch.bits8"),
    "a lazy module's": (lambda: torch.nn.parameter.UninitializedBuffer(), "is not initialised yet: run a forward pass"),
}
IGNORED = "ignore:.*(nested tensors is in prototype|quantiz|TypedStorage|Sparse CSR)"


class Model(torch.nn.Module):
    def __init__(self, odd: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("odd", odd)

    def state(self, **values: object) -> State:
        return State(model=self, optimizer=torch.optim.SGD([self.weight], lr=0.1), **values)


def sent(state: State) -> dict[str, object]:
    """Return what another process gets of a state."""
    document, tensors = encode(state.shared())
    return decode(document, [each.detach().resolve_conj().resolve_neg().clone() for each in tensors])


@pytest.mark.parametrize("kind", HELD)
def test_an_odd_buffer_is_undone_and_sent(kind: str) -> None:
    model = Model(HELD[kind]())
    state = model.state()
    object_before, before = model.odd, model.odd.detach().clone()
    state.keep()
    model.odd = torch.zeros(7)
    state.restore()
    assert model.odd is object_before
    set_values(model.odd, torch.zeros_like(before))
    row = state.buffer_row()
    assert torch.equal(row.look().read(row.copy())["odd"], torch.zeros_like(before))
    own, shared = dict(state.own_buffers()), sent(state)
    assert torch.equal(own["odd"], torch.zeros_like(before))
    state.restore()
    assert torch.equal(model.odd, before)
    other = Model(HELD[kind]())
    other_state = other.state()
    other_state.load_shared(shared)
    assert torch.equal(other.odd, torch.zeros_like(before))
    other_state.load_own_buffers({"odd": before.resolve_conj().resolve_neg()})
    assert torch.equal(other.odd, before)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings(IGNORED)
def test_an_odd_buffer_is_refused_by_name_before_the_job_begins(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=f"the buffer 'odd' {words}"):
        Model(make()).state()
    model = Model()
    state = model.state()
    model.odd = make()
    with pytest.raises(UnsupportedError, match=f"the buffer 'odd' {words}"):
        state.keep()


@pytest.mark.parametrize("kind", ["expanded", "complex", "inference", "float8"])
def test_an_odd_parameter_is_sent_and_compared(kind: str) -> None:
    def made(factor: float) -> State:
        model = Model()
        model.odd_one = torch.nn.Parameter(HELD[kind](), requires_grad=False)
        set_values(model.odd_one, torch.full(model.odd_one.shape, factor))
        return model.state()

    source, target = made(0.5), made(2.0)
    assert source.digests() != target.digests()
    target.load_shared(sent(source))
    assert source.digests() == target.digests()
    assert torch.equal(target.model.odd_one, source.model.odd_one)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("kind", ["sparse", "quantised", "meta"])
def test_an_odd_parameter_is_refused_by_name(kind: str) -> None:
    make, words = REFUSED[kind]
    model = Model()
    model.odd_one = torch.nn.Parameter(make(), requires_grad=False)
    with pytest.raises(UnsupportedError, match=f"the parameter 'odd_one' {words}"):
        model.state()
    lazy = torch.nn.LazyLinear(2)
    with pytest.raises(UnsupportedError, match="the parameter 'weight' is not initialised yet"):
        State(model=lazy, optimizer=torch.optim.SGD(lazy.parameters(), lr=0.1))


class Odd(torch.optim.SGD):
    """An optimizer that makes a state of a chosen kind in its first step."""

    make: Callable[[], object]

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = self.make()


@pytest.mark.parametrize("kind", ["sparse", "an object"])
def test_an_odd_state_of_an_optimizer_is_refused_by_name_after_the_first_step(kind: str) -> None:
    model = Model()
    optimizer = Odd(model.parameters(), lr=0.1)
    optimizer.make = object if kind == "an object" else REFUSED[kind][0]
    state = State(model=model, optimizer={"main": optimizer})
    state.count("an evaluation")
    optimizer.step()
    with pytest.raises(ConfigurationError, match="the optimizer 'main' has a state 'odd' of weight that other ranks"):
        state.check_first_step()
    with pytest.raises(ConfigurationError, match="has a state 'odd' of weight"):
        State(model=model, optimizer={"main": optimizer})


def test_an_expanded_state_of_an_optimizer_is_sent() -> None:
    def made(factor: float) -> State:
        model = Model()
        optimizer = Odd(model.parameters(), lr=0.1)
        optimizer.make = lambda: torch.full((1,), factor).expand(2)
        optimizer.step()
        return State(model=model, optimizer=optimizer)

    source, target = made(0.5), made(2.0)
    target.load_shared(sent(source))
    assert target.optimizer.state[target.model.weight]["odd"].tolist() == [0.5, 0.5]
    assert source.digests() == target.digests()


def test_a_hyper_parameter_that_cannot_be_sent_is_refused_by_name() -> None:
    model = Model()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "schedule": print}], lr=0.1)
    with pytest.raises(
        ConfigurationError, match="the optimizer has a hyper-parameter 'schedule' in group 0 that other"
    ):
        State(model=model, optimizer=optimizer)


# -------------------------------------------------------------------------- buffers that get other shapes, come and go


class Caches(torch.nn.Module):
    """Two modules, and buffers of which some are persistent, and two are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(2.0), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", self.first)

    def state(self) -> State:
        return State(model=self, optimizer=torch.optim.SGD(self.parameters(), lr=0.1))


def change_in_place(model: Caches) -> None:
    model.table.data = model.table[:1]
    model.first.resize_(5).fill_(4.0)


def change_places(model: Caches) -> None:
    model.register_buffer("table", torch.arange(9.0).view(3, 3), persistent=False)
    model.inner.register_buffer("cache", torch.ones(2), persistent=False)
    model.inner.register_buffer("statistics", torch.ones(1))
    model.nothing = torch.tensor([True])
    model.first = model.second = torch.full((2,), 7, dtype=torch.int64)


def remove(model: Caches) -> None:
    model.table = None
    del model.first
    model.second = torch.ones(4)
    del model._buffers["nothing"]
    model.nothing = 5  # a plain attribute now


def described(model: Caches) -> dict[str, object]:
    """Return names, values, which names are in ``state_dict()``, and which places have one tensor."""
    named = {name: (each.dtype, each.tolist()) for name, each in model.named_buffers(remove_duplicate=False)}
    ties = {name: id(each) for name, each in model.named_buffers(remove_duplicate=False)}
    same = {(one, other) for one in ties for other in ties if one < other and ties[one] == ties[other]}
    keys = [(name, list(module._buffers)) for name, module in model.named_modules()]
    return {"named": named, "same": same, "keys": keys, "saved": sorted(model.state_dict())}


CHANGES = [change_in_place, change_places, remove]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_changes_the_places_of_buffers_is_undone(change: Callable[[Caches], None]) -> None:
    model = Caches()
    state = model.state()
    model.table.add_(1)
    state.keep()
    before, objects = described(model), dict(model.named_buffers(remove_duplicate=False))
    change(model)
    state.restore()
    assert described(model) == before
    for name, each in model.named_buffers(remove_duplicate=False):
        assert each is objects[name]
    assert model.nothing is None
    change(model)  # the block is repeated
    state.keep()
    after = described(model)
    model.second = torch.ones(9)
    state.restore()
    assert described(model) == after


@pytest.mark.parametrize("change", [*CHANGES, lambda model: None])
@pytest.mark.parametrize("before", [*CHANGES, lambda model: None])
def test_a_new_process_gets_the_buffers_that_there_are(change, before) -> None:
    """Whatever it has at that time: ``before`` is what it has done itself."""
    source, target = Caches(), Caches()
    first, second = source.state(), target.state()
    change(source)
    before(target)
    second.load_shared(sent(first))
    assert described(target)["named"] == described(source)["named"]
    assert described(target)["same"] == described(source)["same"]
    assert described(target)["saved"] == described(source)["saved"]
    second.keep()
    second.restore()
    assert described(target)["named"] == described(source)["named"]


def test_buffers_of_a_module_that_a_process_lacks_are_an_error_and_nothing_changes() -> None:
    source, target = Caches(), Caches()
    source.inner.part = torch.nn.Module()
    state = source.state()
    source.inner.part.register_buffer("cache", torch.ones(2))
    with torch.no_grad():
        source.inner.weight.fill_(3.0)
    before = target.inner.weight.tolist()
    with pytest.raises(ConfigurationError, match=r"buffer 'inner.part.cache', and .* no module 'inner.part'"):
        target.state().load_shared(sent(state))
    assert target.inner.weight.tolist() == before


def test_a_snapshot_of_an_older_library_is_read() -> None:
    """Its layout has the shapes of the buffers, and it does not say where the buffers are."""
    source, target = Caches(), Caches()
    source.first.fill_(4.0)
    shared = sent(source.state())
    del shared["buffers"]
    shared["layout"].insert(2, "buffer first: torch.float32[3]")
    target.state().load_shared(shared)
    assert described(target) == described(source)


def test_a_value_that_is_a_model_follows_its_buffers() -> None:
    """Such as an average of the model, in a state and in ``hvd.elastic``."""
    source, target = Caches(), Caches()
    first, second = Model().state(average=source), Model().state(average=target)
    change_places(source)
    second.load_shared(sent(first))
    assert target.state_dict().keys() == source.state_dict().keys()
    assert all(torch.equal(each, source.state_dict()[name]) for name, each in target.state_dict().items())


def test_commits_of_horovods_elastic_training_follow_persistent_buffers() -> None:
    model = Caches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    change_places(model)
    state.restore()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    change_places(model)
    state.save()
    after = {name: each.clone() for name, each in model.state_dict().items()}
    remove(model)
    del model.nothing
    state.restore()
    assert model.state_dict().keys() == after.keys()
    assert all(torch.equal(each, after[name]) for name, each in model.state_dict().items())


def test_a_restore_of_horovods_elastic_training_does_not_write_to_averages_in_the_place_of_weights() -> None:
    model = Caches()
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained, average = model.inner.weight.detach(), torch.full((2, 2), 7.0)
    weight, values = model.inner.weight, trained.tolist()
    weight.data = average
    model.inner.bias = torch.nn.Parameter(torch.ones(2))
    state.restore()
    assert model.inner.weight is weight
    assert weight.data_ptr() == trained.data_ptr()
    assert weight.tolist() == values
    assert average.tolist() == [[7.0] * 2] * 2


def test_broadcast_parameters_writes_to_tensors_of_inference_mode() -> None:
    def body(group):
        tensor = in_inference_mode(3)
        with torch.inference_mode():
            tensor.fill_(group.rank)
        broadcast_parameters({"t": tensor}, group, root=1)
        return tensor.tolist()

    assert run_ranks(2, body) == [[1.0] * 3] * 2
