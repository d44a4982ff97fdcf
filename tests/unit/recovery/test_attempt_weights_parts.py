"""Parameters and states of optimizers that are put back, with copies of them and without."""

from collections.abc import Callable

import pytest
import torch

from totalreduce.recovery.state import State
from totalreduce.recovery.watch import Watch
from totalreduce.recovery.weights import KeptWeights


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(30, 10)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight.requires_grad_(False)


class Case:
    """A model with Adam, which has made a step, averages of its weights, and what was noted of both."""

    def __init__(self, *, copies: bool = False, copies_states: bool = False, **options: object) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.first.parameters(), lr=0.1, **options)
        self.step()
        self.averages = {name: each.detach() + 1 for name, each in self.model.named_parameters()}
        self.kept = KeptWeights(State(model=self.model, optimizer=self.optimizer))
        self.kept.note(copies=copies, copies_states=copies_states)
        self.objects = dict(self.model.named_parameters())
        self.before = self.seen()

    def step(self) -> None:
        self.model.first(torch.ones(1, 30)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seen(self) -> dict[str, object]:
        states = self.optimizer.state_dict()["state"]
        return {
            **{name: each.tolist() for name, each in self.model.named_parameters()},
            "state": {
                (index, key): value.tolist() if isinstance(value, torch.Tensor) else value
                for index, entry in states.items()
                for key, value in entry.items()
            },
        }


@torch.no_grad()
def in_place(case: Case) -> None:
    for name, each in case.model.named_parameters():
        each.copy_(case.averages[name])


def through_data(case: Case) -> None:
    for name, each in case.model.named_parameters():
        each.data.copy_(case.averages[name])


def other_memory(case: Case) -> None:
    for name, each in case.model.named_parameters():
        each.data = case.averages[name]


def other_objects(case: Case) -> None:
    for module in (case.model.first, case.model.second):
        module.weight = torch.nn.Parameter(torch.zeros_like(module.weight))


def new_entries(case: Case) -> None:
    """As SAM does in its first step."""
    for each in case.model.first.parameters():
        case.optimizer.state[each]["old_p"] = each.detach().clone()
    case.optimizer.state[case.model.second.weight]["old_p"] = torch.ones(1)


def cleared(case: Case) -> None:
    case.optimizer.state.clear()


def replaced_entries(case: Case) -> None:
    for entry in case.optimizer.state.values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        del entry["exp_avg_sq"]


def loaded(case: Case) -> None:
    case.optimizer.load_state_dict({**case.optimizer.state_dict(), "state": {}})


def entries_in_place(case: Case) -> None:
    for entry in case.optimizer.state.values():
        entry["exp_avg"].zero_()


def a_step(case: Case) -> None:
    case.step()


WITHOUT_COPIES = [other_memory, other_objects, new_entries, cleared, replaced_entries, loaded]
WEIGHTS = [in_place, through_data]
STATES = [entries_in_place, a_step]


@pytest.mark.parametrize("change", WITHOUT_COPIES)
def test_what_is_undone_without_copies(change: Callable[[Case], None]) -> None:
    case = Case()
    assert case.kept.changed() == ""
    averages = {name: each.clone() for name, each in case.averages.items()}
    change(case)
    assert case.kept.changed()
    assert case.kept.restore() == ""
    assert case.seen() == case.before
    assert dict(case.model.named_parameters()) == case.objects
    assert all(torch.equal(each, averages[name]) for name, each in case.averages.items())
    case.kept.note(copies=False, copies_states=False)
    assert case.kept.changed() == ""


@pytest.mark.parametrize("change", [*WITHOUT_COPIES, *WEIGHTS, *STATES])
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_with_copies_everything_is_undone(change: Callable[[Case], None], options: dict[str, object]) -> None:
    case = Case(copies=True, copies_states=True, **options)
    for _ in range(2):  # a block that is undone is repeated
        change(case)
        assert case.kept.changed()
        assert case.kept.restore() == ""
        assert case.seen() == case.before
        case.kept.note(copies=True, copies_states=True)
    case.step()
    assert case.seen() != case.before


@pytest.mark.parametrize("change", WEIGHTS)
def test_without_a_copy_the_parameter_is_named_unless_it_was_put_back(change: Callable[[Case], None]) -> None:
    case = Case()
    change(case)
    assert case.kept.changed() == "the parameter 'first.weight'"
    assert case.kept.differs()
    assert case.kept.restore() == "the parameter 'first.weight'"
    case = Case()
    trained = {name: each.detach().clone() for name, each in case.model.named_parameters()}
    change(case)
    case.averages = trained
    change(case)
    assert not case.kept.differs()
    assert case.kept.restore() == ""
    assert case.seen() == case.before


def test_a_parameter_that_was_changed_once_was_not_put_back() -> None:
    """Although none of the elements that are compared has changed."""
    case = Case()
    with torch.no_grad():
        case.model.first.weight[0, 1] = 7.0
    assert not case.kept.differs()
    assert case.kept.restore(is_strict=True) == "the parameter 'first.weight'"


def test_without_a_copy_a_state_that_was_changed_in_place_is_an_error() -> None:
    case = Case(copies=True)
    entries_in_place(case)
    assert case.kept.changed() == "the state of an optimizer"
    assert case.kept.restore() == "the state of an optimizer"


def test_copies_are_given_back_and_their_memory_is_used_again() -> None:
    case = Case(copies=True, copies_states=True)
    assert case.kept.num_bytes == 4 * (3 * 310 + 2 + 16)
    copies = case.kept._copies
    case.kept.note(copies=True, copies_states=False)
    assert all(one is other for one, other in zip(copies, case.kept._copies, strict=True))
    assert not case.kept.has_copies
    case.kept.forget_copies()
    in_place(case)
    assert case.kept.restore() == "the parameter 'first.weight'"


def with_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


TENSORS = {
    "one element": lambda: torch.tensor(3.0),
    "a hundred": lambda: torch.zeros(100),
    "transposed": lambda: torch.zeros(4, 5).t(),
    "channels last": lambda: torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.zeros(1).expand(7),
    "every other": lambda: torch.zeros(10, 10)[::2, ::3],
    "overlapping": lambda: torch.zeros(6).unfold(0, 2, 1),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(3, dtype=torch.complex128).conj().imag,
    "float8": lambda: torch.zeros(5).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([False, True]),
    "bfloat16": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "not a number": lambda: torch.full((3,), float("nan")),
    "inference": with_inference_mode,
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_change_that_is_not_counted_is_seen(kind: str) -> None:
    tensors = [torch.zeros(0), TENSORS[kind](), torch.ones(2)]
    watch = Watch(tensors)
    assert not watch.has_changed
    first = tensors[1].data
    while first.dim():
        first = first[0]
    with torch.inference_mode():
        first.fill_(1)
    assert watch.has_changed
    assert watch.differing() == [1]
    assert 1 in watch.changed()
    watch.note()
    assert not watch.has_changed
    assert watch.changed() == []


def test_a_change_of_all_elements_of_a_large_tensor_is_seen_and_one_that_was_put_back_is_known() -> None:
    tensor = torch.randn(1000)
    watch = Watch([tensor])
    tensor.add_(1)
    assert watch.differing() == [0]
    watch.note()
    tensor[1] = 1.0  # none of the elements that are compared
    assert (watch.has_changed, watch.changed(), watch.changed_once(), watch.differing()) == (True, [0], [0], [])
    tensor[1] = 2.0
    assert (watch.has_changed, watch.changed(), watch.changed_once(), watch.differing()) == (True, [0], [], [])
