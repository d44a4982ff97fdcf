"""Attempts whose ranks are lost when other weights are in, or between two optimizers' steps, with ranks as threads."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.recovery.attempts import Attempts
from totalreduce.recovery.membership import Decision, Member
from totalreduce.testing import run_ranks


class Program:
    """A program for ``tr.attempts``: one or two layers, each with an optimizer."""

    def __init__(self, group, num_optimizers: int = 1, **options: object) -> None:
        self.group = group
        self.model = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)])
        with torch.no_grad():
            for each in self.model.parameters():  # each rank begins with others
                each.copy_(torch.linspace(-0.5, 0.5 + group.rank, each.numel()).view_as(each))
        parts = [list(self.model.parameters())] if num_optimizers == 1 else [list(e.parameters()) for e in self.model]
        self.optimizers = {
            str(number): torch.optim.SGD(part, lr=0.1, momentum=0.9) for number, part in enumerate(parts)
        }
        self.state = tr.State(model=self.model, optimizer=self.optimizers, **options)
        self.attempts = Attempts(self.state, SimpleNamespace(), timeout_s=10.0)
        self.epoch = 0

    @contextlib.contextmanager
    def attempt(self):
        """Run an attempt that a loss may end."""
        self.epoch += 1
        members = tuple(Member(seat, 0, has_state=False) for seat in range(self.group.world_size))
        decision = Decision(self.epoch, members, self.state.version)
        self.attempts.level(self.group, has_state=self.epoch > 1, decision=decision)
        policy = SimpleNamespace(on_loss="replace")
        assembly = SimpleNamespace(policy=policy, begin=lambda: None, finish=lambda: None)
        with self.attempts.begin(self.group, assembly, self.epoch) as attempt:
            yield attempt

    def backward(self) -> None:
        """Compute the gradients of all ranks, by a collective."""
        step = self.state.version
        self.model[1](self.model[0](torch.full((1, 4), 1.0 + step))).square().sum().backward()
        for each in self.model.parameters():
            if each.grad is not None:
                self.group.allreduce(each.grad, op=tr.ReduceOp.AVG).wait()

    def step(self, attempt) -> None:
        self.backward()
        for each in self.optimizers.values():
            each.step()
            each.zero_grad()
        attempt.commit()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


def equal(first, second) -> bool:
    return all(torch.equal(each, second[name]) for name, each in first.items())


def put_in_place(program: Program, weights) -> None:
    with torch.no_grad():
        for name, each in program.model.named_parameters():
            each.copy_(weights[name])


def put_memory(program: Program, weights) -> None:
    for name, each in program.model.named_parameters():
        each.data = weights[name]


LOST = PeerLost(7, "gone")


def evaluate(program: Program, put, *, has_finally: bool) -> None:
    """Evaluate with averages of the weights, which are zeros here, and lose a rank."""
    trained = program.weights() if put is put_in_place else dict(program.model.named_parameters())
    if put is put_memory:
        trained = {name: each.detach() for name, each in trained.items()}
    averages = {name: torch.zeros_like(each) for name, each in trained.items()}
    put(program, averages)
    if not has_finally:
        raise LOST
    try:
        raise LOST
    finally:
        put(program, trained)


@pytest.mark.parametrize(("put", "has_finally"), [(put_in_place, True), (put_memory, True), (put_memory, False)])
def test_averages_that_are_taken_out_are_no_weights_of_the_job(put, has_finally: bool) -> None:
    """Other memory in the place of a parameter is taken out by the library."""

    def body(group):
        program = Program(group)
        with program.attempt() as attempt:
            for _ in range(2):
                program.step(attempt)
            trained = program.weights()
            evaluate(program, put, has_finally=has_finally)
        with program.attempt() as attempt:
            assert equal(program.weights(), trained)
            program.step(attempt)
        return program.weights(), program.state.version

    (first, version), (second, _) = run_ranks(2, body)
    assert equal(first, second)
    assert version == 3


@pytest.mark.parametrize("num_later", [0, 1])
def test_a_rank_with_averages_gets_the_weights_of_one_without(num_later: int) -> None:
    """Also if it has taken a step that the other one has not: the step is taken again."""

    def body(group):
        program = Program(group)
        with program.attempt() as attempt:
            for _ in range(2):
                program.step(attempt)
            trained = program.weights()
            if group.rank == 0:
                for _ in range(num_later):
                    for each in program.model.parameters():
                        each.grad = torch.ones_like(each)
                    program.optimizers["0"].step()
                    program.optimizers["0"].zero_grad()
                    attempt.commit()
                evaluate(program, put_in_place, has_finally=False)
            raise LOST
        with program.attempt():
            return equal(program.weights(), trained), program.state.version

    assert run_ranks(2, body) == [(True, 2)] * 2


def test_without_a_rank_that_has_the_weights_of_its_commit_every_rank_says_so() -> None:
    def body(group):
        program = Program(group)
        with program.attempt() as attempt:
            program.step(attempt)
            evaluate(program, put_in_place, has_finally=False)
        with pytest.raises(RecoveryError) as caught, program.attempt():
            pass
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "the program had changed the parameter '0.weight' since the last commit (rank 0)" in message
        assert "in a `finally:`" in message


def play(program: Program, attempt, *, at: tuple[int, str] = (-1, "")) -> None:
    """Step one optimizer after the other, each with gradients of its own."""

    def die(place: str) -> None:
        if (program.state.version, place) == at:
            raise LOST

    while program.state.version < 4:
        for number, each in enumerate(program.optimizers.values()):
            program.backward()
            die(f"backward {number}")
            each.step()
            for other in program.optimizers.values():
                other.zero_grad()
        die("stepped")
        attempt.commit()


@pytest.mark.parametrize("place", [(0, "backward 1"), (2, "backward 1"), (2, "stepped"), (3, "backward 0")])
def test_a_step_of_one_optimizer_is_undone_if_a_rank_is_lost_before_that_of_another(place, caplog) -> None:
    caplog.set_level(logging.INFO, logger="totalreduce")

    def body(group, at):
        program = Program(group, num_optimizers=2)
        with program.attempt() as attempt:
            play(program, attempt, at=at)
        if at[0] >= 0:
            with program.attempt() as attempt:
                play(program, attempt)
        return program.weights()

    undisturbed, _ = run_ranks(2, lambda group: body(group, (-1, "")))
    logged = [
        each.getMessage() for each in caplog.records if "optimizer.step() and attempt.commit()" in each.getMessage()
    ]
    assert len(logged) == 1
    for weights in run_ranks(2, lambda group: body(group, place)):
        assert equal(weights, undisturbed)


def test_steps_without_a_collective_between_keep_no_copies() -> None:
    def body(group):
        seen = []
        for num_optimizers in (1, 2):
            program = Program(group, num_optimizers)
            with program.attempt() as attempt:
                seen.append(program.attempts._weights._kept.has_copies)
                for _ in range(2):
                    program.step(attempt)
                    seen.append(program.attempts._weights._kept.has_copies)
        return seen

    assert run_ranks(1, body) == [[False, False, False, True, False, False]]


def test_collectives_between_the_step_and_the_commit_make_copies_from_the_next_commit_on() -> None:
    def body(group):
        program, copies = Program(group), []
        with program.attempt() as attempt:
            for step in range(4):
                program.backward()
                program.optimizers["0"].step()
                program.optimizers["0"].zero_grad()
                trained = program.weights()
                group.allreduce(torch.ones(1)).wait()
                if step == 3:
                    raise LOST
                attempt.commit()
                committed = program.weights()
                copies.append(program.attempts._weights._kept.has_copies)
        with program.attempt():
            assert copies == [True] * 3
            assert not equal(committed, trained)
            return equal(program.weights(), committed)

    assert run_ranks(2, body) == [True] * 2


# ------------------------------------------------------------------------------------- commits with gradients


def gradients(program: Program, value: float = 1.0) -> None:
    for each in program.model.parameters():
        each.grad = torch.full_like(each, value) if each.grad is None else each.grad.add_(value)


def accumulate(program: Program, attempt) -> None:
    gradients(program)
    attempt.commit()
    gradients(program)
    program.optimizers["0"].step()


def accumulate_after_steps_that_left_theirs(program: Program, attempt) -> None:
    gradients(program)
    program.optimizers["0"].step()
    attempt.commit()
    gradients(program)
    attempt.commit()


def sparse_gradients(program: Program, attempt) -> None:
    table = program.model[0].weight
    table.grad = torch.ones_like(table).to_sparse()
    attempt.commit()


@pytest.mark.parametrize("steps", [accumulate, accumulate_after_steps_that_left_theirs, sparse_gradients])
@pytest.mark.parametrize("can_be_replaced", [True, False])
def test_a_commit_with_gradients_that_no_step_has_used_is_refused(steps, can_be_replaced: bool) -> None:
    def body(group):
        program, finished = Program(group), []

        def run() -> None:
            with program.attempt() as attempt:
                attempt._assembly.finish = lambda: finished.append("yes")
                if not can_be_replaced:
                    attempt._assembly = None
                steps(program, attempt)

        with pytest.raises(ConfigurationError) as caught:
            run()
        assert finished == ["yes"] * can_be_replaced
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "no optimizer has taken a step since the last commit" in message
        assert "call backward() several times with parts of one batch" in message


def zero_at_the_begin(program: Program, attempt) -> None:
    for _ in range(2):
        program.optimizers["0"].zero_grad()
        gradients(program)
        program.optimizers["0"].step()
        attempt.commit()
    attempt.commit()  # after an evaluation
    attempt.commit()


def zeros(program: Program, attempt) -> None:
    gradients(program)
    program.optimizers["0"].zero_grad(set_to_none=False)
    attempt.commit()


def without_gradients(program: Program, attempt) -> None:
    attempt.commit()


def a_scaler_that_leaves_a_step_out(program: Program, attempt) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    gradients(program, float("inf"))
    before = program.weights()
    scaler.step(program.optimizers["0"])
    scaler.update()
    attempt.commit()
    assert equal(program.weights(), before)


def gradients_of_another_optimizer(program: Program, attempt) -> None:
    gradients(program)
    program.optimizers["0"].step()
    program.optimizers["0"].zero_grad()
    assert program.model[1].weight.grad is not None
    attempt.commit()


def an_optimizer_within(program: Program, attempt) -> None:
    """As that of SAM, which the state does not know."""
    gradients(program)
    program.optimizers["0"].within.step()
    attempt.commit()


def by_hand(program: Program, attempt) -> None:
    gradients(program)
    with torch.no_grad():
        for each in program.model.parameters():
            each -= 0.1 * each.grad
    attempt.commit()


@pytest.mark.parametrize(
    "steps",
    [
        zero_at_the_begin,
        zeros,
        without_gradients,
        a_scaler_that_leaves_a_step_out,
        gradients_of_another_optimizer,
        an_optimizer_within,
        by_hand,
    ],
)
def test_a_commit_whose_gradients_were_used_or_do_not_count_is_accepted(steps) -> None:
    def body(group):
        num_optimizers = 2 if steps is gradients_of_another_optimizer else 1
        program = Program(group, num_optimizers)
        program.optimizers["0"].within = torch.optim.SGD(program.model.parameters(), lr=0.0)
        with program.attempt() as attempt:
            steps(program, attempt)
        return program.state.version

    assert all(run_ranks(2, body))


def test_sharded_gradients_are_finite_if_they_are_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler leaves a step out on all ranks, if a single rank has an element that is not finite."""

    def body(group, value):
        program = Program(group)
        with program.attempt() as attempt:
            committed = []
            attempt._copies = SimpleNamespace(commit=committed.append)
            attempt._weights = None
            gradients(program, value if group.rank == 1 else 1.0)
            attempt.commit()
            return len(committed)

    assert run_ranks(2, lambda group: body(group, float("nan"))) == [1, 1]
    with pytest.raises(ConfigurationError, match="no optimizer has taken a step"):
        run_ranks(2, lambda group: body(group, 1.0))
