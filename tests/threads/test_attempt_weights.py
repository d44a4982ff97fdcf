"""Attempts whose ranks are lost when other weights are in, or between two optimizers' steps, with ranks as threads."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.errors import PeerLost, RecoveryError
from totalreduce.recovery.attempts import Attempts
from totalreduce.recovery.membership import Decision, Member
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.wishes import Wish
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
        self.attempts = Attempts(self.state)
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


def accumulate(program: Program, attempt, *, num_batches: int, lost_at: int = -1) -> list[int]:
    """Step after every third batch, with commits after all of them; return the versions that are to be on disk."""
    written: list[int] = []
    attempt._snapshots = SimpleNamespace(is_due=Snapshots("folder", every=2).is_due, on_signal=None)
    attempt._write = lambda: written.append(program.state.version)
    while program.state.version < num_batches:
        program.state.total += program.state.version
        program.backward()
        if program.state.version == lost_at:
            raise LOST
        if program.state.version % 3 == 2:
            program.optimizers["0"].step()
            program.optimizers["0"].zero_grad()
        attempt.commit()
    return written


@pytest.mark.parametrize("num_lost_at", [3, 4, 5])
def test_a_loss_in_the_middle_of_an_accumulation_undoes_it_back_to_the_last_step(num_lost_at: int) -> None:
    def body(group, *, lost_at: int):
        program = Program(group, total=0)
        if lost_at >= 0:
            with program.attempt() as attempt:
                accumulate(program, attempt, num_batches=9, lost_at=lost_at)
        with program.attempt() as attempt:
            begin = program.state.version, program.state.steps, program.state.total
            written = accumulate(program, attempt, num_batches=9)
        return program.weights(), program.state.total, begin, written

    for plain, disturbed in zip(
        run_ranks(2, lambda group: body(group, lost_at=-1)),
        run_ranks(2, lambda group: body(group, lost_at=num_lost_at)),
        strict=True,
    ):
        assert equal(plain[0], disturbed[0])
        assert disturbed[1] == plain[1] == sum(range(9))
        assert disturbed[2] == (3, 3, 0 + 1 + 2)
        assert (plain[3], disturbed[3]) == ([3, 6, 9], [6, 9])  # 2, 4 and 8 have gradients that would be missing


def test_after_the_last_batch_a_rank_without_the_step_gets_it_from_one_that_has_taken_it() -> None:
    """Rank 0 is lost in its third batch, when the step of rank 1 has ended."""

    def body(group):
        program = Program(group, total=0)
        with program.attempt() as attempt:
            accumulate(program, attempt, num_batches=2)
            program.backward()
            if group.rank:
                program.optimizers["0"].step()
                program.optimizers["0"].zero_grad()
                attempt.commit()
            raise LOST
        with program.attempt():
            return program.weights(), program.state.version

    (first, version), (second, _) = run_ranks(2, body)
    assert equal(first, second)
    assert version == 3


def test_what_ends_attempts_and_loops_waits_for_the_step() -> None:
    """Processes that wait to join, and a signal of the snapshots."""

    def body(group):
        program, ended = Program(group, total=0), []
        for wish in (Wish.MEMBERS, Wish.END):
            with program.attempt() as attempt:
                attempt._wish_of_all = lambda wish=wish: wish
                attempt._snapshots = SimpleNamespace(is_due=lambda *_: False, write_last=lambda version, _: None)
                while not attempt.preempted:
                    program.backward()
                    if program.state.version % 3 == 2:
                        program.optimizers["0"].step()
                        program.optimizers["0"].zero_grad()
                    attempt.commit()
            ended.append(program.state.version)
        return ended

    assert run_ranks(1, body) == [[3, 6]]


def sparse_gradients(program: Program) -> None:
    table = program.model[0].weight
    table.grad = torch.ones_like(table).to_sparse()


@pytest.mark.parametrize(("make", "has_step"), [(gradients, False), (gradients, True), (sparse_gradients, False)])
@pytest.mark.parametrize("can_be_replaced", [True, False])
def test_gradients_that_no_step_has_used_make_a_commit_provisional(make, has_step: bool, can_be_replaced: bool) -> None:
    """Also after a step that has left its gradients, to which others are added."""

    def body(group):
        program, provisional = Program(group), []
        with program.attempt() as attempt:
            if not can_be_replaced:
                attempt._assembly = None
            for number in range(3):
                make(program)
                if number == 0 and has_step:
                    program.optimizers["0"].step()
                provisional.append(attempt._is_provisional())
                attempt.commit()
        return provisional

    assert run_ranks(2, body) == [[not has_step, True, True]] * 2


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
    program.optimizers["0"].zero_grad()
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
def test_a_commit_whose_gradients_were_used_or_do_not_count_is_final(steps) -> None:
    def body(group):
        num_optimizers = 2 if steps is gradients_of_another_optimizer else 1
        program = Program(group, num_optimizers)
        program.optimizers["0"].within = torch.optim.SGD(program.model.parameters(), lr=0.0)
        with program.attempt() as attempt:
            steps(program, attempt)
            return program.state.version, attempt._version

    assert all(0 < version == final for version, final in run_ranks(2, body))


def test_sharded_gradients_wait_on_all_ranks_if_they_do_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group):
        program = Program(group)
        with program.attempt() as attempt:
            committed = []
            attempt._copies = SimpleNamespace(commit=lambda state, since: committed.append((since, state.version)))
            attempt._weights = None
            gradients(program, 1.0 if group.rank == 1 else 0.0)
            attempt.commit()
            attempt.commit()
            program.optimizers["0"].step()
            attempt.commit()
            return committed

    assert run_ranks(2, body) == [[(0, 3)]] * 2
