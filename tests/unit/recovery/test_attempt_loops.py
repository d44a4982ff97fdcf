"""Attempts without processes: which errors are losses, and what ends a loop."""

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from totalreduce.c10d.attempts import attempts
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.foundation.types import ReduceOp
from totalreduce.recovery import runs as module
from totalreduce.recovery.attempts import Attempt, Attempts, Keepers
from totalreduce.recovery.copies import ShardCopies
from totalreduce.recovery.epochs import Epochs
from totalreduce.recovery.runs import Runs
from totalreduce.recovery.sampler import ElasticSampler
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State
from totalreduce.recovery.wishes import Wish


def make_state(**values) -> State:
    model = torch.nn.Linear(2, 1)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **values)


class Control:
    """A control group of one rank whose barrier loses a rank where it is told to."""

    def __init__(self, *losses: bool) -> None:
        self._losses = list(losses)
        self.wish_of_others, self.num_agreements = 0, 0

    def allreduce(self, tensor: torch.Tensor, *, name: str, op: ReduceOp):
        assert (name, op) == ("recovery/wish", ReduceOp.MAX)
        self.num_agreements += 1
        tensor.clamp_(min=self.wish_of_others)
        return SimpleNamespace(wait=lambda: None)

    def allgather_object(self, value: int) -> list[int]:
        return [value]

    def barrier(self) -> None:
        if self._losses and self._losses.pop(0):
            raise PeerLost(1, "gone")


def group_of(*losses: bool):
    return SimpleNamespace(rank=0, world_size=1, control=Control(*losses))


def attempt_of(state: State, *, recoverable: bool = True) -> Attempt:
    policy = SimpleNamespace(on_loss="replace")
    assembly = SimpleNamespace(policy=policy, begin=lambda: None) if recoverable else None
    return Attempt(state, group_of(), assembly, 0, Keepers())


def test_only_the_loss_of_a_rank_ends_an_attempt_without_an_error() -> None:
    lost = attempt_of(make_state())
    with lost:
        try:
            raise PeerLost(1, "gone")
        except PeerLost as cause:
            raise RuntimeError("as torch.distributed says it") from cause
    assert lost.is_lost
    assert not lost.is_complete
    assert lost.error is not None
    assert lost.error.rank == 1
    with pytest.raises(ValueError, match="wrong"), attempt_of(make_state()):
        raise ValueError("wrong")
    with pytest.raises(PeerLost), attempt_of(make_state(), recoverable=False):
        raise PeerLost(1, "gone")


def test_a_loss_is_looked_for_in_errors_that_cause_each_other() -> None:
    """As with ``raise error from error``: the search must end."""
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(RuntimeError, match="first"), attempt_of(make_state()):
        raise first


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_an_error_that_the_program_makes_of_a_loss_is_its_own(error: type[BaseException]) -> None:
    def body() -> None:
        with attempt_of(make_state()):
            try:
                raise PeerLost(1, "gone")
            except PeerLost as cause:
                if error is ValueError:
                    raise error("has hidden the loss") from None
                raise error("ends the program") from cause

    with pytest.raises(error):
        body()


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_job_that_the_others_have_ended(monkeypatch: pytest.MonkeyPatch, is_complete: bool) -> None:
    """A rank that had come to its end has ended, too. One that had not has lost its part of the job."""
    formed = iter([group_of(True), None])

    def enter(epochs: Epochs) -> bool:
        epochs._group = next(formed)
        return epochs._group is not None

    monkeypatch.setenv("TOTALREDUCE_ON_LOSS", "replace")
    assembly = SimpleNamespace(check_program=lambda *_: None, finish=lambda: None, policy=None, suspect=lambda _: None)
    monkeypatch.setattr(module, "open_assembly", lambda *_: assembly)
    monkeypatch.setattr(Epochs, "enter", enter)
    groups = SimpleNamespace(form=group_of, leave=lambda _: None)
    loop = iter(Runs(Attempts(make_state()), groups, 1.0, ""))
    with next(loop) as attempt:
        if not is_complete:
            raise PeerLost(1, "gone")
    assert attempt.is_complete is is_complete
    if is_complete:
        assert list(loop) == []
    else:
        with pytest.raises(RecoveryError, match="this rank has not"):
            next(loop)


def test_a_body_outside_of_the_attempt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOTALREDUCE_ON_LOSS", raising=False)
    monkeypatch.setattr(Attempts, "level", lambda *_, **__: None)
    groups = SimpleNamespace(form=group_of)
    with pytest.raises(ConfigurationError, match="with attempt"):
        for _ in Runs(Attempts(make_state()), groups, 1.0, ""):
            pass


def test_a_sharded_state_is_synchronized_once_and_before_the_loop() -> None:
    with pytest.raises(ConfigurationError, match=r"tr\.attempts takes a state, or copies="):
        next(attempts())
    with pytest.raises(ConfigurationError, match=r"tr\.attempts takes a state, or copies="):
        next(attempts(make_state(), copies=ShardCopies()))
    with pytest.raises(ConfigurationError, match=r"tr\.attempts\(state\) does it by itself"):
        attempt_of(make_state()).synchronize(make_state())
    attempt = Attempt(None, group_of(), None, 0, Keepers(copies=ShardCopies()))
    with pytest.raises(ConfigurationError, match=r"call attempt\.synchronize"):
        attempt.commit()
    attempt = Attempt(make_state(), group_of(), None, 0, Keepers(copies=ShardCopies()))
    with pytest.raises(ConfigurationError, match="called once"):
        attempt.synchronize(make_state())


def test_a_model_is_built_from_the_same_random_numbers_in_every_attempt() -> None:
    drawn = []
    for rank in range(2):
        group = SimpleNamespace(rank=rank, world_size=2, control=Control())
        with Attempt(None, group, None, rank, Keepers(3, copies=ShardCopies())):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_a_loop_over_batches_commits_each_step() -> None:
    sampler = ElasticSampler(10, 4, seed=1)
    state = make_state(sampler=sampler)
    loader = torch.utils.data.DataLoader(range(10), batch_sampler=sampler)
    attempt = attempt_of(state)
    used = []
    for batch in attempt.batches(loader):
        used += batch.tolist()
        attempt.commit()
    assert sorted(used) == list(range(10))
    assert state.steps == state.version == 3
    with pytest.raises(ConfigurationError, match="batch_sampler is the sampler"):
        next(attempt.batches([1, 2]))
    sampler.set_epoch(1)
    with pytest.raises(ConfigurationError, match=r"attempt\.commit"):
        list(attempt.batches(loader))


def test_worker_processes_of_a_loader_begin_with_signals_blocked_that_the_program_handles() -> None:
    blocked = []

    class Loader(torch.utils.data.DataLoader):
        def __iter__(self):
            blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))  # which a worker process would inherit
            return super().__iter__()

    sampler = ElasticSampler(4, 4)
    attempt = attempt_of(make_state(sampler=sampler))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for _ in attempt.batches(Loader(range(4), batch_sampler=sampler)):
            assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            attempt.commit()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [signal.SIGUSR1 in each for each in blocked] == [True]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_signal_of_one_rank_ends_the_loops_of_all(tmp_path: Path, is_told: bool) -> None:
    """The version after the step with the signal is on disk, whether this rank got the signal or another one."""
    sampler = ElasticSampler(40, 4, seed=1)
    state = make_state(sampler=sampler)
    snapshots = Snapshots(tmp_path, every=1000, on_signal=signal.SIGUSR1)
    attempt = Attempt(state, group_of(), None, 0, Keepers(snapshots=snapshots))
    loader = torch.utils.data.DataLoader(list(range(40)), batch_sampler=sampler)
    snapshots.watch()
    try:
        with attempt:
            for _ in attempt.epochs(3):
                for _ in attempt.batches(loader):
                    if state.version == 2:
                        if is_told:
                            os.kill(os.getpid(), signal.SIGUSR1)
                        else:
                            attempt.group.control.wish_of_others = Wish.END
                    attempt.commit()
    finally:
        snapshots.release()
    assert (attempt.preempted, state.version, snapshots.latest()) == (True, 3, 3)
    assert attempt.group.control.num_agreements == 3
    assert (sampler.epoch, sampler.cursor) == (0, 12)


def test_without_signals_a_step_has_no_agreement(tmp_path: Path) -> None:
    attempt = Attempt(make_state(), group_of(), None, 0, Keepers(snapshots=Snapshots(tmp_path, every=1000)))
    with attempt:
        attempt.commit()
    assert attempt.group.control.num_agreements == 0


def test_a_step_that_is_repeated_finds_buffers_and_values_as_they_were_after_the_last_commit() -> None:
    """Running statistics, values and the scheduler of a lost step must not count twice."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, total=0)
    attempts = Attempts(state, verify=False)

    def forward() -> None:
        model(torch.randn(4, 2))
        state.total += 1
        optimizer.step()  # without gradients
        scheduler.step()

    def seen() -> dict[str, object]:
        return {
            **{name: buffer.tolist() for name, buffer in model.named_buffers()},
            "total": state.total,
            "lr": optimizer.param_groups[0]["lr"],
            "version": state.version,
        }

    group = group_of()
    attempts.level(group, has_state=False, decision=None)
    begin = seen()
    with contextlib.suppress(PeerLost), attempts.begin(group, None, 0):
        forward()
        raise PeerLost(1, "gone")  # in the first step
    attempts.level(group, has_state=True, decision=None)
    assert seen() == begin
    second = attempts.begin(group, None, 1)
    with contextlib.suppress(PeerLost), second:
        forward()
        second.commit()
        assert state.total == 1
        after_step = seen()
        assert (after_step["1.num_batches_tracked"], after_step["version"]) == (1, 1)
        forward()
        raise PeerLost(1, "gone")  # in the second step
    attempts.level(group, has_state=True, decision=None)
    assert seen() == after_step


@pytest.mark.parametrize(
    "place",
    ["totalreduce.recovery.attempts.compare_states", "totalreduce.recovery.hook_states.HookStates.enter"],
)
def test_a_loss_while_an_attempt_is_levelled_keeps_the_buffers_that_came_from_another_rank(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The rank has then the parameters of the other rank, and must not get its own old buffers again."""
    model = torch.nn.BatchNorm1d(2)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    attempts = Attempts(state)
    monkeypatch.setattr("totalreduce.recovery.attempts.compare_states", lambda *_: None)
    attempts.level(group_of(), has_state=False, decision=None)
    with attempts.begin(group_of(), None, 0) as attempt:
        attempt.commit()

    def send_state(*_: object) -> None:
        model.running_mean.fill_(3.0)

    def lose(*_: object, **__: object) -> None:
        raise PeerLost(1, "gone")

    with monkeypatch.context() as patch:
        patch.setattr("totalreduce.recovery.attempts.send_state", send_state)
        patch.setattr(place, lose)
        with pytest.raises(PeerLost):
            attempts.level(group_of(), has_state=True, decision=None)
    monkeypatch.setattr("totalreduce.recovery.attempts.send_state", lambda *_: None)
    attempts.level(group_of(), has_state=True, decision=None)
    assert model.running_mean.tolist() == [3.0, 3.0]


def test_a_grad_scaler_that_is_switched_off_goes_back_with_the_others() -> None:
    """As ``GradScaler(enabled=use_amp)`` in a program for machines with and without a GPU."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = make_state(scaler=scaler, total=1)
    state.keep()
    state.total = 2
    state.restore()
    assert (state.total, scaler.state_dict()) == (1, {})
