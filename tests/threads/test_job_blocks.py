"""Blocks of a recoverable job with ranks as threads: several optimizers, and loops that are refused."""

import functools
import itertools
import shutil
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.testing import run_ranks

WORLD_SIZES = [1, 2, 3]


def modules():
    made = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        for module in made:
            module.weight.copy_(torch.arange(1.0, 1 + module.weight.numel()).view_as(module.weight) / 10)
    return made


def loss_of(first, second, batch, part):
    """Through the first module, and the second one on its output; in part "first" both get gradients."""
    hidden = first(batch[:, None].expand(-1, 4) * torch.tensor([0.1, 0.2, 0.3, 0.4]))
    return (second(hidden.detach() if part == "second" else hidden) * torch.tensor([1.0, 2.0])).sum()


class Pair:
    """A generator and a discriminator, whose gradients are linear in the inputs; and their state."""

    def __init__(self, group, **options) -> None:
        self.group = group
        self.first, self.second = modules()
        self.model = torch.nn.ModuleDict({"first": self.first, "second": self.second})
        make = {
            "first": lambda: torch.optim.SGD(self.first.parameters(), lr=0.1),
            "second": lambda: torch.optim.SGD(self.second.parameters(), lr=0.1),
        }
        self.optimizers = {
            name: tr.DistributedOptimizer(make[name](), self.model[name], group=group, name=name, **options)
            for name in make
        }

    def state(self, num_samples=12, batch=2) -> tr.State:
        sampler = tr.ElasticSampler(num_samples, batch, shuffle=False)
        self.loader = DataLoader(torch.arange(float(num_samples)), batch_sampler=sampler)
        return tr.State(model=self.model, optimizer=self.optimizers, sampler=sampler)

    def loss(self, batch, part):
        return loss_of(self.first, self.second, batch, part)


def expected(world_size, num_samples=12, batch=2):
    """What one process gets that computes the shares of all ranks, and steps one optimizer after the other."""
    first, second = modules()
    samplers = [tr.ElasticSampler(num_samples, batch, shuffle=False) for _ in range(world_size)]
    for rank, sampler in enumerate(samplers):
        sampler.place(rank, world_size)
    for shares in zip(*map(list, samplers), strict=True):
        for part, module in (("second", second), ("first", first)):
            losses = [loss_of(first, second, torch.tensor(share, dtype=torch.float32), part) for share in shares]
            [gradient] = torch.autograd.grad(sum(losses) / world_size, module.weight)
            with torch.no_grad():
                module.weight -= 0.1 * gradient
    return first.weight.detach(), second.weight.detach()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_part_steps_its_optimizer_and_gradients_of_the_others_do_not_count(world_size, is_quiet) -> None:
    """Rank 0 keeps the gradients of the other optimizer at home, so that only some ranks have them in flight."""

    def body(group):
        pair = Pair(group)
        state = pair.state()
        order = []
        with tr.recoverable(state) as job:
            for _ in job.epochs(1):
                for part, batch in job.parts(pair.loader, ("second", "first")):
                    order.append(part)
                    other = pair.optimizers["second" if part == "first" else "first"]
                    with job.step():
                        if is_quiet and group.rank == 0:
                            with other.no_sync():
                                pair.loss(batch, part).backward()
                        else:
                            pair.loss(batch, part).backward()
                        pair.optimizers[part].step()
        assert all(parameter.grad is None for parameter in pair.model.parameters())
        assert (state.version, state.steps, state.sampler.cursor) == (len(order), len(order), 12)
        return order, pair.first.weight.detach(), pair.second.weight.detach()

    first, second = expected(world_size)
    for order, one, other in run_ranks(world_size, body):
        assert order == ["second", "first"] * (12 // (2 * world_size))
        assert torch.allclose(one, first, rtol=1e-5)
        assert torch.allclose(other, second, rtol=1e-5)


@pytest.mark.parametrize("sync", [None, "topka"])
def test_gradients_of_another_optimizer_leave_no_trace(sync) -> None:
    """Parameters and residuals are those of a job in which these gradients were not computed."""

    def body(group, is_frozen):
        feedback = tr.ErrorFeedback(elements_min=1, momentum=0.5)
        sparse = {"sync": tr.TopkA(density=0.4), "feedback": feedback} if sync else {"bucket_bytes": 8}
        pair = Pair(group, **sparse)
        seen = []
        with tr.recoverable(pair.state(num_samples=24)) as job:
            for part, batch in job.parts(pair.loader, ("second", "first")):
                with job.step():
                    pair.second.requires_grad_(part == "second" or not is_frozen)
                    if part == "first" or group.rank != 1:
                        pair.loss(batch + group.rank, part).backward()
                    pair.optimizers[part].step()
                tensors = [each.detach().clone() for each in pair.model.parameters()]
                seen.append(tensors + [each.clone() for each in pair.optimizers["second"].residuals.values()])
        return seen

    of_ranks, wanted = (run_ranks(2, lambda group, frozen=frozen: body(group, frozen)) for frozen in (False, True))
    for here, there in zip(itertools.chain(*of_ranks), itertools.chain(*wanted), strict=True):
        assert all(one.equal(other) for one, other in zip(here, there, strict=True))
    assert len(of_ranks[0]) == 12
    assert not sync or any(tensors[-1].any() for tensors in of_ranks[0]), "there are residuals"


def test_ranks_without_samples_step_what_the_others_step() -> None:
    def body(group):
        pair = Pair(group)
        with tr.recoverable(pair.state(num_samples=2)) as job:
            parts = []
            for part, batch in job.parts(pair.loader, ("second", "first")):
                parts.append(part)
                with job.step():
                    pair.loss(batch, part).backward()
                    pair.optimizers[part].step()
        return parts, job.state.version, pair.first.weight.detach(), pair.second.weight.detach()

    first, second = expected_without_samples()
    results = run_ranks(3, body)
    assert [parts for parts, *_ in results] == [["second", "first"]] * 3
    for _, version, one, other in results:
        assert version == 2
        assert torch.allclose(one, first)
        assert torch.allclose(other, second)


def expected_without_samples():
    """One step over the samples 0 and 1, divided by three ranks."""
    first, second = modules()
    for part, module in (("second", second), ("first", first)):
        [gradient] = torch.autograd.grad(loss_of(first, second, torch.arange(2.0), part) / 3, module.weight)
        with torch.no_grad():
            module.weight -= 0.1 * gradient
    return first.weight.detach(), second.weight.detach()


def test_a_job_goes_on_from_the_disk_with_another_plan_than_its_optimizers_were_made_with(tmp_path) -> None:
    """Without the launcher, too, where they have plans before the job begins. The second layer was unfrozen before."""

    def body(group, num_steps):
        model = torch.nn.Sequential(*modules())
        model[1].requires_grad_(False)
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        snapshots = tr.Snapshots(tmp_path, every=1)
        with tr.recoverable(tr.State(model=model, optimizer=optimizer), snapshots=snapshots) as job:
            for step in job.steps(num_steps):
                with job.step():
                    if step == 1:
                        model[1].requires_grad_(True)
                        optimizer.replan()
                    model(torch.full((1, 4), 1.0 + group.rank + step)).sum().backward()
                    optimizer.step()
                snapshots.wait()
                group.barrier()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = run_ranks(2, lambda group: body(group, 5))
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    run_ranks(2, lambda group: body(group, 3))
    again = run_ranks(2, lambda group: body(group, 5))
    for mine, theirs in zip(itertools.chain(*again), itertools.chain(*alone), strict=True):
        assert torch.equal(mine, theirs)


# ----------------------------------------------------------------------------------------------- loops that are refused


def refusal(use, world_size=1, **options):
    """Run a loop body in a job of a pair; return the messages of the errors of all ranks."""

    def body(group):
        pair = Pair(group, **options)
        state = pair.state()
        with pytest.raises(ConfigurationError) as caught, tr.recoverable(state) as job:
            use(job, pair, group.rank)
        return str(caught.value)

    return run_ranks(world_size, body)


def test_ranks_that_step_different_optimizers_are_told() -> None:
    def use(job, pair, rank):
        for _, batch in job.parts(pair.loader, ("a", "b")):
            with job.step():
                pair.loss(batch, "first").backward()
                pair.optimizers["first" if rank == 0 else "second"].step()

    for rank, message in enumerate(refusal(use, 2)):
        assert "the ranks step different optimizers in one block: 'first', 'second'" in message
        assert f"this rank steps the optimizer {'second' if rank else 'first'!r}" in message


def test_a_rank_without_a_step_is_told_what_the_others_step() -> None:
    def use(job, pair, rank):
        for _ in job.steps(1):
            with job.step():
                if rank == 0:
                    pair.loss(torch.ones(1), "first").backward()
                    pair.optimizers["first"].step()

    def body(group):
        pair = Pair(group)
        try:
            with tr.recoverable(pair.state()) as job:
                use(job, pair, group.rank)
        except tr.TotalReduceError as error:
            return type(error).__name__, str(error)
        return None

    _, other = run_ranks(2, body)
    assert other == (
        "ConfigurationError",
        "this block steps no optimizer, and on other ranks it steps the optimizer 'first'",
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_steps_in_one_block_are_refused(world_size) -> None:
    def use(job, pair, rank):
        for batch in job.batches(pair.loader):
            with job.step():
                pair.loss(batch, "first").backward()
                pair.optimizers["first"].step()
                pair.optimizers["second"].step()

    for message in refusal(use, world_size):
        assert "job.parts" in message


def test_two_blocks_in_one_body_are_refused() -> None:
    def use(job, pair, rank):
        for batch in job.batches(pair.loader):
            for name in ("first", "second"):
                with job.step():
                    pair.loss(batch, name).backward()
                    pair.optimizers[name].step()

    [message] = refusal(use)
    assert "the only one in the body of a loop" in message
    assert "job.parts" in message


def test_a_block_outside_of_a_loop_is_refused() -> None:
    def use(job, pair, rank):
        with job.step():
            pair.optimizers["first"].step()

    [message] = refusal(use)
    assert "in the body of a loop over job.batches" in message


def test_gradients_without_a_step_are_refused() -> None:
    def use(job, pair, rank):
        for number, batch in enumerate(job.batches(pair.loader)):
            with job.step():
                pair.loss(batch, "first").backward()
                if number % 2:
                    pair.optimizers["first"].step()

    for message in refusal(use, 2):
        assert "ended with gradients and without optimizer.step()" in message
        assert "call backward() several times in one block" in message


def test_a_closure_is_refused() -> None:
    def use(job, pair, rank):
        for batch in job.batches(pair.loader):
            with job.step():
                pair.optimizers["first"].step(functools.partial(pair.loss, batch, "first"))

    [message] = refusal(use)
    assert "tr.recoverable does not support step(closure)" in message
    assert "call backward() and then step()" in message


@pytest.mark.parametrize("names", [(), "ab", ("a", "a")])
def test_parts_need_different_names(names) -> None:
    [message] = refusal(lambda job, pair, rank: next(job.parts(pair.loader, names)))
    assert f"different names of the parts of a step, not {names!r}" in message


def test_a_step_that_has_begun_with_more_parts_is_not_ended_with_fewer() -> None:
    def use(job, pair, rank):
        job.state.sampler.load_state_dict({"epoch": 0, "cursor": 2, "part": 2, "begun": 4})
        next(job.parts(pair.loader, ("a", "b")))

    [message] = refusal(use)
    assert "2 parts of the present step have taken effect, and job.parts gives a step 2" in message


def test_optimizers_of_different_groups_are_refused() -> None:
    def body(group):
        pair = Pair(group)
        other = group.subgroup([0, 1], name="other")
        second = torch.nn.Linear(3, 2)
        pair.model["third"] = second
        pair.optimizers["third"] = tr.DistributedOptimizer(
            torch.optim.SGD(second.parameters(), lr=0.1), second, group=other, name="third"
        )
        with pytest.raises(ConfigurationError) as caught:
            tr.recoverable(pair.state())
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "all optimizers of a tr.State use one group" in message
        assert "that of 'first' has 2 ranks, and that of 'third' is another one, with 2 ranks" in message


def test_a_data_set_that_differs_between_ranks_is_refused() -> None:
    """The vote compares the numbers of samples, where ranks can be replaced."""
    from totalreduce.recovery.membership import Decision, Member
    from totalreduce.recovery.optimizers import Optimizers
    from totalreduce.recovery.replicas import OwnState

    def body(group):
        own = OwnState(Pair(group).state(), Optimizers(Pair(group).optimizers), 0)
        members = tuple(Member(seat, 0, False) for seat in range(2))
        own.restore(Decision(1, members, 0), has_state=False)
        own.vote.begin(group.rank, 8)
        assert own.vote.end() == 1
        own.vote.begin(0, 8 - group.rank)
        with pytest.raises(ConfigurationError) as caught:
            own.vote.end()
        return str(caught.value)

    for rank, message in enumerate(run_ranks(2, body)):
        assert "7 samples on some rank and 8 on another one" in message
        assert f"on rank {rank} it has {8 - rank}" in message


@pytest.mark.parametrize(
    ("sync", "num_synchronous"),
    [(tr.LocalSGD(period=3), 0), (tr.PostLocalSGD(start=4, then=tr.LocalSGD(period=2)), 4)],
)
def test_the_steps_of_a_strategy_are_those_without_a_job_and_call_no_collective(sync, num_synchronous: int) -> None:
    """Except its synchronous steps, which have collectives like those without a strategy."""

    def body(group):
        def made(name):
            first, _ = modules()
            inner = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
            return first, tr.DistributedOptimizer(inner, first, group=group, sync=sync, name=name)

        model, optimizer = made("in a job")
        state, refused = tr.State(model=model, optimizer=optimizer), []
        with tr.recoverable(state) as job:
            for step in job.steps(7):
                with job.step():
                    if step < num_synchronous:
                        group.allreduce(torch.ones(1)).wait()
                    else:
                        with pytest.raises(ConfigurationError, match=r"calls no collective.*job\.once"):
                            group.allreduce(torch.ones(1))
                        refused.append(step)
                    model(torch.full((1, 4), 1.0 + group.rank + step)).sum().backward()
                    optimizer.step()
            for _ in job.once("a sum"):
                with job.step():
                    total = group.allreduce(torch.ones(1)).wait()
        plain, alone = made("without one")
        for step in range(7):
            alone.zero_grad()
            plain(torch.full((1, 4), 1.0 + group.rank + step)).sum().backward()
            alone.step()
        assert torch.equal(model.weight, plain.weight)
        assert refused == list(range(num_synchronous, 7))
        assert float(total) == group.world_size
        return model.weight.detach().clone()

    weights = run_ranks(2, body)
    assert not torch.equal(*weights)  # the seventh step was local


@pytest.mark.parametrize(
    ("sync", "why"),
    [
        (tr.PostLocalSGD(start=3, then=tr.LocalSGD(period=1)), "use sync=None"),
        (tr.LocalSGD(period=1), "use sync=None"),
        (tr.Async(), "its servers have state"),
    ],
)
def test_strategies_that_cannot_be_recovered_are_refused(sync, why) -> None:
    def body(group):
        first, _ = modules()
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), first, group=group, sync=sync)
        with pytest.raises(ConfigurationError, match=f"does not support sync='{sync.name}': .*{why}"):
            tr.recoverable(tr.State(model=first, optimizer=optimizer))

    run_ranks(1, body)


@pytest.mark.parametrize("sync", [tr.LocalSGD(period=3), tr.PostLocalSGD(start=9, then=tr.LocalSGD(period=2))])
def test_what_a_strategy_has_begun_with_cannot_be_frozen(sync) -> None:
    """A process in the place of a lost rank could not train the same parameters. The next block says so."""

    def body(group):
        model = torch.nn.Sequential(*modules())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync)
        done = []

        def train():
            with tr.recoverable(tr.State(model=model, optimizer=optimizer)) as job:
                for step in job.steps(4):
                    if step == 2:
                        model[0].requires_grad_(False)
                    with job.step():
                        model(torch.ones(1, 4)).sum().backward()
                        optimizer.step()
                    done.append(step)

        with pytest.raises(ConfigurationError, match=r"1 of them were frozen since.*set their learning rate to 0"):
            train()
        assert done == [0, 1]

    run_ranks(2, body)


def test_after_compressed_gradients_have_left_a_block_makes_no_new_plan() -> None:
    """They would go back to the residuals before the vote, and that could not be undone."""

    def use(job, pair, rank):
        for step in job.steps(3):
            with job.step():
                pair.loss(torch.ones(1), "first").backward()
                if step == 1:
                    pair.optimizers["first"].replan()
                pair.optimizers["first"].step()

    options = {"sync": tr.TopkA(density=0.4), "feedback": tr.ErrorFeedback(elements_min=1)}
    for message in refusal(use, 2, **options):
        assert "call replan() and add_param_group() before backward(), or in a block of their own (job.once)" in message


def test_a_strategy_beside_another_optimizer_is_refused() -> None:
    def body(group):
        with pytest.raises(ConfigurationError, match="has one optimizer"):
            tr.recoverable(Pair(group, sync=tr.LocalSGD(period=2)).state())

    run_ranks(1, body)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_scheduler_whose_length_was_computed_before_the_job_ends_with_it(world_size, drop_last, monkeypatch) -> None:
    """``len(loader)`` is the same before ``tr.recoverable``, when only the launcher knows the number of ranks."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", world_size), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))

    def body(group):
        model = torch.nn.Linear(1, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tr.DistributedOptimizer(inner, model, group=group)
        sampler = tr.ElasticSampler(47, 4, drop_last=drop_last)
        loader = DataLoader(torch.ones(47, 1), batch_sampler=sampler)
        lengths = [len(loader)]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 1.0, total_steps=2 * len(loader) + 1)
        state = tr.State(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler)
        with tr.recoverable(state) as job:
            for _ in job.epochs(2):
                for inputs in job.batches(loader):
                    lengths.append(len(loader))
                    with job.step():
                        model(inputs).square().mean().backward()
                        optimizer.step()
                        scheduler.step()
        return set(lengths), state.version, inner.param_groups[0]["lr"], scheduler._schedule_phases[-1]

    # The first step of a scheduler is the one of its constructor.
    num_steps = {1: 11, 2: 5, 3: 3}[world_size] + (not drop_last)
    for lengths, version, rate, last_phase in run_ranks(world_size, body):
        assert lengths == {num_steps}
        assert version == 2 * num_steps
        assert rate == pytest.approx(1.0 / 25 / 1e4, rel=1e-6), "the last rate of the cycle"
        assert last_phase["end_step"] == 2 * num_steps


def test_worker_processes_of_a_loader_begin_with_signals_blocked_that_the_program_handles():
    class Loader(DataLoader):
        def __iter__(self):
            blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))  # which a worker process would inherit
            return super().__iter__()

    def body(group):
        model = torch.nn.Linear(1, 1)
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        sampler = tr.ElasticSampler(4, 4)
        with tr.recoverable(tr.State(model=model, optimizer=optimizer, sampler=sampler)) as job:
            for inputs in job.batches(Loader(torch.ones(4, 1), batch_sampler=sampler)):
                assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
                with job.step():
                    model(inputs).sum().backward()
                    optimizer.step()

    blocked = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        run_ranks(1, body)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [signal.SIGUSR1 in each for each in blocked] == [True]


def test_a_rank_without_a_sample_does_what_the_others_do_and_its_gradients_do_not_count():
    """It clips, steps the scheduler and takes part in collectives, so that parameters and learning rates stay equal."""
    samples = torch.arange(1.0, 4.0)

    def body(group):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        sampler = tr.ElasticSampler(3, batch_size=1, shuffle=False)
        loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
        state = tr.State(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler)
        counted = []
        with tr.recoverable(state) as job:
            for _ in job.epochs(3):
                for inputs in job.batches(loader):
                    with job.step():
                        counted.append((job.batch_counts, inputs.tolist()))
                        group.allreduce(torch.ones(1), name="metric").wait()
                        (model(inputs.unsqueeze(1)) * group.world_size).mean().backward()
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)
                        optimizer.step()
                        scheduler.step()
        return model.weight.item(), scheduler.get_last_lr(), counted

    ranks = run_ranks(4, body)
    # The gradient is 1 + 2 + 3, clipped to 0.8.
    assert [weight for weight, _, _ in ranks] == [pytest.approx(1.0 - 0.8 * (0.1 + 0.05 + 0.025))] * 4
    assert [rate for _, rate, _ in ranks] == [[0.1 / 8]] * 4
    assert [counted[0] for _, _, counted in ranks] == [(True, [1.0]), (True, [2.0]), (True, [3.0]), (False, [1.0])]
