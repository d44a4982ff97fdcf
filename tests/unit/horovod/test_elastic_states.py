"""``hvd.elastic`` in one process: the sampler under losses and joins, commits, and what is refused."""

import contextlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import totalreduce.horovod as hvd
from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.horovod.elastic import running
from totalreduce.horovod.elastic import sampler as sampler_module
from totalreduce.horovod.elastic.state import progress_of

# ------------------------------------------------------------------------------------------------------- the sampler


class World:
    """The group of the rank that a sampler is made for or reset on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = SimpleNamespace(rank=0, world_size=1)
        monkeypatch.setattr(sampler_module, "context", self)

    def place(self, rank: int, size: int) -> None:
        self.group = SimpleNamespace(rank=rank, world_size=size)

    def ranks(self, size: int, num_samples: int, **options) -> list[hvd.elastic.ElasticSampler]:
        samplers = []
        for rank in range(size):
            self.place(rank, size)
            samplers.append(hvd.elastic.ElasticSampler(range(num_samples), **options))
        return samplers


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def commit(samplers: list[hvd.elastic.ElasticSampler]) -> None:
    """Tell each rank what the others have recorded, as a state's commit does."""
    gathered = [each.records() for each in samplers]
    for rank, each in enumerate(samplers):
        for other, records in enumerate(gathered):
            if other != rank:
                each.take(records)
        each.forget_records()


@pytest.mark.parametrize("seed", range(40))
def test_over_any_schedule_no_sample_is_lost_or_used_twice(world: World, seed: int) -> None:
    """Ranks leave and join between any two steps; after a loss the steps since the last commit do not count."""
    draw = random.Random(seed)
    num_samples, batch_size, num_epochs = draw.randint(20, 90), draw.randint(1, 5), 3
    knows = draw.random() < 0.5
    options = {"shuffle": draw.random() < 0.7, "seed": seed, "batch_size": batch_size if knows else None}
    size = draw.randint(1, 5)
    samplers = world.ranks(size, num_samples, **options)
    saved, used, used_since = samplers[0].snapshot(), [], []  # what is used until the last commit, and since

    def begin(new_size: int, snapshot) -> None:
        nonlocal size, samplers
        size, samplers = new_size, world.ranks(new_size, num_samples, **options)
        for rank, each in enumerate(samplers):
            world.place(rank, size)
            each.load_snapshot(snapshot)

    def keep() -> None:
        nonlocal saved
        commit(samplers)
        assert len({(each.epoch, *sorted(each.processed_indices)) for each in samplers}) == 1
        saved = samplers[0].snapshot()
        used.extend(used_since)
        used_since.clear()

    left_at_end = []
    while samplers[0].epoch < num_epochs:
        batches = [list(DataLoader(range(num_samples), batch_size, sampler=each)) for each in samplers]
        assert len({len(each) for each in batches}) == 1  # all ranks take the same number of steps
        assert sorted(index for each in samplers for index in each) == sorted(samplers[0].remaining_indices)
        for number in range(len(batches[0])):
            for each, mine in zip(samplers, batches, strict=True):
                each.record_batch(number, len(mine[number]) if draw.random() < 0.5 else batch_size)
                used_since += mine[number].tolist()
            if draw.random() < 0.4:
                keep()
            event = draw.random()
            if event < 0.1:  # a loss: the others go back to the last commit
                used_since.clear()
                begin(max(1, size - 1), saved)
                break
            if event < 0.2:  # processes join: nothing is undone
                keep()
                begin(size + draw.randint(0, 2), saved)
                break
        else:
            left_at_end = list(samplers[0]._left_out)
            assert len(left_at_end) < size
            epoch = samplers[0].epoch + 1
            for rank, each in enumerate(samplers):
                world.place(rank, size)
                each.set_epoch(epoch)
            keep()
    counts = Counter(used)
    counts.update(left_at_end)
    assert counts == dict.fromkeys(range(num_samples), num_epochs)


def test_with_the_batch_size_every_sample_is_used_in_its_epoch(world: World) -> None:
    """23 samples, 4 ranks, batches of 4: three ranks have six samples, and one has five. Each has two batches."""
    samplers = world.ranks(4, 23, batch_size=4)
    assert [len(each) for each in samplers] == [6, 6, 6, 5]
    assert sorted(index for each in samplers for index in each) == list(range(23))
    # 18 samples: a rank with one more would have a second batch, so two samples are left.
    samplers = world.ranks(4, 18, batch_size=4)
    assert [len(each) for each in samplers] == [4, 4, 4, 4]
    left = sorted(set(range(18)) - {index for each in samplers for index in each})
    for rank, each in enumerate(samplers):
        world.place(rank, 4)
        each.record_batch(0, 4)
        each.set_epoch(1)
    assert sorted(samplers[0].remaining_indices) == sorted([*range(18), *left])
    assert [samplers[0].indices[0], samplers[1].indices[0]] == samplers[0].state_dict()["carried"]


def test_the_order_is_that_of_torch(world: World) -> None:
    world.place(1, 3)
    mine = hvd.elastic.ElasticSampler(range(30), seed=5)
    mine.set_epoch(2)
    torchs = torch.utils.data.DistributedSampler(range(30), num_replicas=3, rank=1, seed=5)
    torchs.set_epoch(2)
    assert list(mine) == list(torchs)
    assert list(hvd.elastic.ElasticSampler(range(7), shuffle=False)) == [1, 4]


def test_what_is_recorded(world: World) -> None:
    world.place(1, 2)
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    sampler.record_batch(0, 4)
    assert sampler.processed_indices == {1, 3, 5, 7}
    sampler.record_batch(0, 4)  # again
    sampler.record_batch(2, 2)  # the last batch has two samples, and begins after two batches of four
    assert sampler.processed_indices == {1, 3, 5, 7, 17, 19}
    assert sampler.records() == [0, 1, 3, 5, 7, 17, 19]
    sampler.record_indices([9, 2])
    assert sampler.processed_indices == {1, 2, 3, 5, 7, 9, 17, 19}
    sampler.set_epoch(0)  # the present one, of which a part is done
    assert list(sampler) == [*range(1, 20, 2)]
    state = sampler.state_dict()
    world.place(0, 3)
    other = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    other.load_state_dict(state)
    assert other.remaining_indices == [0, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16, 18]
    assert list(other) == [0, 8, 12, 15]
    other.load_state_dict({"epoch": 3, "processed_indices": set()})  # Horovod's
    assert (other.epoch, len(other)) == (3, 6)
    other.set_epoch(4)  # nothing of epoch 3 is recorded, so nothing of it is left for this one
    assert other.state_dict()["carried"] == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hvd.elastic.ElasticSampler(iter([1])), "with a length"),
        (lambda: hvd.elastic.ElasticSampler([]), "number of samples"),
        (lambda: hvd.elastic.ElasticSampler(range(3), batch_size=0), "batch_size"),
        (lambda: hvd.elastic.ElasticSampler(range(3)).record_batch(-1, 2), "batch_idx"),
        (lambda: hvd.elastic.ElasticSampler(range(3)).record_indices([3]), "none of index 3"),
        (lambda: hvd.elastic.ElasticSampler(range(3)).load_state_dict({"epoch": 0, "processed_indices": {5}}), "than"),
    ],
)
@pytest.mark.usefixtures("world")
def test_samplers_refuse_what_makes_no_sense(call, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        call()


# --------------------------------------------------------------------------------------------------------- the state


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """A job of this process alone, which the launcher does not recover."""
    monkeypatch.delenv("TOTALREDUCE_ON_LOSS", raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("alone")
def test_restore_goes_back_to_the_last_commit() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, losses=[])
    step(model, optimizer)
    scheduler.step()
    sampler.record_batch(0, 4)
    state.epoch, state.losses = 1, [0.5]
    state.commit()
    kept = {name: each.clone() for name, each in model.state_dict().items()}
    moments = [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]
    for _ in range(2):
        step(model, optimizer)
        scheduler.step()
        sampler.record_batch(1, 4)
        state.epoch = 2
        state.losses.append(0.25)
        state.restore()
        assert all(torch.equal(each, kept[name]) for name, each in model.state_dict().items())
        again = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        assert all(map(torch.equal, again, moments))
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.05
        assert (state.epoch, state.losses, sampler.processed_indices) == (1, [0.5], {0, 1, 2, 3})
        assert list(sampler) == [4, 5, 6, 7, 8, 9]
        assert all(parameter.grad is None for parameter in model.parameters())
    other = torch.nn.Linear(3, 1)
    state.model = other  # kept at once, as with Horovod
    before = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.add_(1.0)
    state.restore()
    assert torch.equal(other.weight, before)


@pytest.mark.usefixtures("alone")
def test_a_function_runs_once_with_its_arguments_and_raises_its_errors() -> None:
    state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, batch=3)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @hvd.elastic.run
    def train(state, first, *, second):
        """A docstring."""
        state.batch += 1
        state.check_host_updates()
        state.commit()
        return first, second, hvd.size(), hvd.rank()

    assert train(state, 1, second=2) == (1, 2, 1, 0)
    assert train(state, 1, second=2) == (1, 2, 1, 0)
    assert (state.batch, resets, train.__doc__) == (5, [], "A docstring.")
    state.on_reset()
    assert resets == [1]
    for error in (ValueError("wrong"), hvd.HorovodInternalError("wrong"), PeerLost(1, "gone")):

        @hvd.elastic.run
        def fail(state, error=error):
            state.batch = 0
            raise error

        with pytest.raises(type(error)):
            fail(state)
        state.restore()
        assert state.batch == 5
    with pytest.raises(ConfigurationError, match="is a state, such as"):
        train(None, 1, second=2)


@pytest.mark.usefixtures("alone")
def test_a_loss_after_the_end_of_the_job_undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have come to the end and left, and this rank has not heard of the last barrier."""

    class Ended(contextlib.AbstractContextManager):
        error = PeerLost(1, "it has left")

        def __exit__(self, *_) -> None:
            pass

    monkeypatch.setattr(running, "Runs", lambda *_: [Ended()])
    state = hvd.elastic.ObjectState(batch=0)

    @hvd.elastic.run
    def train(state):
        state.batch = 7
        return "end"

    assert train(state) == "end"
    assert state.batch == 7


@pytest.mark.usefixtures("alone")
def test_states_refuse_values_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigurationError, match="'commit'"):
        hvd.elastic.TorchState(commit=1)
    with pytest.raises(ConfigurationError):
        hvd.elastic.TorchState(thing=object())
    state = hvd.elastic.TorchState(thing=1)
    state.thing = object()
    with pytest.raises(ConfigurationError):
        state.commit()
    assert progress_of(state).version == 0


@pytest.mark.usefixtures("alone")
def test_a_state_of_the_programs_own() -> None:
    class Tokens(hvd.elastic.State):
        def __init__(self) -> None:
            super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
            self.tokens = self.saved = 0

        def save(self) -> None:
            self.saved = self.tokens

        def restore(self) -> None:
            self.tokens = self.saved

        def sync(self) -> None:
            self.tokens = self.saved = self.broadcast_latest(self.tokens)

    @hvd.elastic.run
    def train(state):
        state.tokens += 5
        state.commit()
        state.tokens += 1

    state = Tokens()
    train(state)
    state.restore()
    assert state.tokens == 5
    assert progress_of(state).version == 1


# ------------------------------------------------------------------------------------- before the group can be formed


def test_where_ranks_can_be_replaced_collectives_wait_for_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOTALREDUCE_ON_LOSS", "replace")
    with pytest.raises(ConfigurationError, match="takes no process sets"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (1, 3, 1, 3)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # reads and changes the groups
        optimizer.zero_grad(set_to_none=False)
        assert optimizer.param_groups[0]["lr"] == 0.1
        hvd.elastic.TorchState(model, optimizer)
        calls = [
            lambda: hvd.allreduce(torch.ones(1)),
            hvd.barrier,
            lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
            lambda: hvd.allgather_object(1),
            hvd.join,
            optimizer.step,
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match=r"formed by the function with @hvd\.elastic\.run"):
                call()
        with pytest.raises(ConfigurationError, match=r"op=Adasum"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    finally:
        hvd.shutdown()
