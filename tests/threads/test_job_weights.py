"""Blocks that change weights before their vote, with ranks as threads: what they change is undone after a loss."""

import logging

import pytest
import torch
from lossy_jobs import Losses, lossy

import totalreduce as tr
from totalreduce.foundation.errors import RecoveryError
from totalreduce.testing import run_ranks


class Training:
    """A model of one layer, its averages, and a job."""

    def __init__(self, group, losses: Losses, sync=None, **options: object) -> None:
        self.group, self.losses = group, losses
        self.model = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for each in self.model.parameters():
                each.copy_(torch.linspace(-0.5, 0.6, each.numel()).view_as(each))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, **options)
        self.optimizer = tr.DistributedOptimizer(self.inner, self.model, group=group, sync=sync)
        self.state = tr.State(model=self.model, optimizer=self.optimizer, seen=0)
        self.averages = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def backward(self, step: int) -> None:
        self.model(torch.full((2, 4), 1.0 + step + self.group.rank)).square().mean().backward()

    def average(self) -> None:
        for name, each in self.model.named_parameters():
            self.averages[name].lerp_(each.detach(), 0.5)

    def end(self) -> dict[str, object]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


def perturb(training: Training, step: int) -> None:
    """The first step of SAM: what it changes is put back before the second one."""
    for each in training.model.parameters():
        each.grad = None
    training.losses.at(step, "before")
    with torch.no_grad():
        for each in training.model.parameters():
            training.inner.state[each]["old_p"] = each.detach().clone()
            each.add_(0.05 * each.sign())
    training.losses.at(step, "perturbed")
    training.backward(step)
    training.losses.at(step, "second backward")
    with torch.no_grad():
        for each in training.model.parameters():
            each.copy_(training.inner.state[each]["old_p"])
    training.losses.at(step, "put back")


def train(group, losses: Losses, *, num_steps=6, first=0, by=perturb, **options):
    """Train; the steps from ``first`` on change weights before the vote. Return what there is at the end."""
    training = Training(group, losses, **options)
    with lossy(training.state, losses) as job:
        for step in job.steps(num_steps):
            with job.step():
                if step >= first:
                    by(training, step)
                else:
                    training.backward(step)
                training.optimizer.step()
                if step >= first:
                    for each in training.model.parameters():
                        training.inner.state[each].pop("old_p", None)
    return training.end()


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(each, second[name]) for name, each in first.items())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"sync": tr.LocalSGD(period=2)}])
def test_a_step_with_a_perturbation_is_undone(options: dict[str, object]) -> None:
    """SAM: also in the first step of all, and in a step of a strategy that ends with an exchange."""
    places = ("before", "perturbed", "second backward", "put back", "vote")
    where = [(step, place) for step in (1, 3) for place in places]
    if "sync" not in options:
        where += [(0, "perturbed"), (0, "vote"), (2, "second backward")]
    [undisturbed] = run_ranks(1, lambda group: train(group, Losses(), **options))
    [disturbed] = run_ranks(1, lambda group: train(group, Losses(*where), **options))
    assert equal(disturbed, undisturbed)


def test_the_first_step_that_changes_weights_is_an_error_and_the_next_one_is_undone(caplog) -> None:
    """Steps before it have been without such a change, so that there is no copy."""
    caplog.set_level(logging.INFO, logger="totalreduce")

    def body(group, *places):
        return train(group, Losses(*places), first=2)

    [undisturbed] = run_ranks(1, body)
    words = [record.getMessage() for record in caplog.records if "before its vote" in record.getMessage()]
    assert len(words) == 1
    assert "version 2: a step has changed the parameter 'weight' before its vote" in words[0]
    with pytest.raises(
        RecoveryError, match="version 2: a rank was lost in a step that had changed the parameter 'weight'"
    ):
        run_ranks(1, lambda group: body(group, (2, "perturbed")))
    for places in [((2, "before"),), ((2, "put back"),), ((3, "perturbed"), (3, "vote")), ((5, "second backward"),)]:
        [disturbed] = run_ranks(1, lambda group, places=places: body(group, *places))
        assert equal(disturbed, undisturbed)


def test_steps_that_change_no_weights_keep_no_copies_but_the_first() -> None:
    def body(group):
        training = Training(group, Losses())
        copies = []
        with lossy(training.state, training.losses) as job:
            for step in job.steps(3):
                with job.step():
                    copies.append(job._blocks._weights._kept.has_copies)
                    training.backward(step)
                    training.optimizer.step()
                assert not job._blocks._weights._kept.has_copies
            for _ in range(2):  # also after an evaluation that has changed nothing
                for _ in job.once("evaluation"):
                    with job.step():
                        copies.append(job._blocks._weights._kept._copies is not None)
                assert job._blocks._weights._kept._copies is None
                training.state._done.clear()  # as in the next epoch
        return copies

    assert run_ranks(1, body) == [[True, False, False, True, True]]


def in_place(training: Training, weights) -> None:
    with torch.no_grad():
        for name, each in training.model.named_parameters():
            each.copy_(weights[name])


def through_data(training: Training, weights) -> None:
    for name, each in training.model.named_parameters():
        each.data.copy_(weights[name])


def other_memory(training: Training, weights) -> None:
    for name, each in training.model.named_parameters():
        each.data = weights[name]


def other_objects(training: Training, weights) -> None:
    for name in weights:
        setattr(training.model, name, torch.nn.Parameter(weights[name]))


@pytest.mark.parametrize("put", [in_place, through_data, other_memory, other_objects])
def test_an_evaluation_with_other_weights_is_undone(put) -> None:
    """A rank is lost in an evaluation, when the averages are in: in the first one and in the second."""

    def body(group, *places):
        training = Training(group, Losses(*places))
        outputs = []
        with lossy(training.state, training.losses) as job:
            for end in (2, 4):
                for step in job.steps(end):
                    with job.step():
                        training.backward(step)
                        training.optimizer.step()
                    training.average()
                averages = {name: each.clone() for name, each in training.averages.items()}
                for _ in job.once(f"evaluation {end}"):
                    with job.step():
                        outputs.append(evaluate(training, put))
                assert equal(training.averages, averages)
        return training.end(), outputs[-1], training.state.seen

    def evaluate(training, put):
        trained = dict(training.model.named_parameters())
        if put is other_memory:
            trained = {name: each.detach() for name, each in trained.items()}
        elif put is not other_objects:
            trained = {name: each.detach().clone() for name, each in trained.items()}
        put(training, training.averages)
        output = training.model(torch.ones(1, 4)).detach()
        training.losses.at(training.state.version, "evaluation")
        training.group.allreduce(torch.ones(1)).wait()
        if put is other_objects:
            for name, each in trained.items():
                setattr(training.model, name, each)
        else:
            put(training, trained)
        training.state.seen += 1
        return output

    [(undisturbed, output, seen)] = run_ranks(1, body)
    [(disturbed, same, also)] = run_ranks(1, lambda group: body(group, (2, "evaluation"), (5, "evaluation")))
    assert equal(disturbed, undisturbed)
    assert torch.equal(output, same)
    assert seen == also == 2


def test_only_the_part_of_a_step_that_changes_weights_has_copies() -> None:
    def body(group, *places):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 3), "b": torch.nn.Linear(3, 2)})
        with torch.no_grad():
            for number, each in enumerate(model.parameters()):
                each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each) + number)
        optimizers = {
            name: tr.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each, group=group, name=name)
            for name, each in model.items()
        }
        sampler = tr.ElasticSampler(12, 3, shuffle=False)
        loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_sampler=sampler)
        state, losses, copies = tr.State(model=model, optimizer=optimizers, sampler=sampler), Losses(*places), []
        with lossy(state, losses) as job:
            for _ in job.epochs(1):
                for part, batch in job.parts(loader, ("a", "b")):
                    with job.step():
                        copies.append(job._blocks._weights._kept.has_copies)
                        if part == "b":
                            with torch.no_grad():
                                model["a"].weight.clamp_(-0.5, 0.5)
                        losses.at(state.version, "changed")
                        model["b"](model["a"](batch[:, None].expand(-1, 4))).sum().backward()
                        optimizers[part].step()
        return {name: each.detach().clone() for name, each in model.named_parameters()}, copies

    [(undisturbed, copies)] = run_ranks(1, body)
    assert copies == [True, True, False, True] + [False, True] * 2
    places = [(1, "changed"), (2, "changed"), (3, "changed"), (3, "vote"), (6, "changed")]
    [(disturbed, _)] = run_ranks(1, lambda group: body(group, *places))
    assert equal(disturbed, undisturbed)


def test_a_block_whose_vote_is_in_synchronize_is_undone() -> None:
    def body(group, *places):
        training = Training(group, Losses(*places))
        with lossy(training.state, training.losses) as job:
            for step in job.steps(3):
                with job.step():
                    with torch.no_grad():
                        training.model.weight.mul_(1.1)
                    training.backward(step)
                    training.losses.at(step, "backward")
                    training.optimizer.synchronize()
                    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
                    training.optimizer.step()
        return training.end()

    [undisturbed] = run_ranks(1, body)
    [disturbed] = run_ranks(1, lambda group: body(group, (0, "backward"), (1, "vote"), (2, "backward")))
    assert equal(disturbed, undisturbed)
