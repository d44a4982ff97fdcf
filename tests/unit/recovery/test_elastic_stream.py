"""Streams of unknown length: every sample once in an epoch, whatever ranks are lost and join."""

import itertools
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.recovery.sampler import ElasticSampler
from totalreduce.recovery.stream import ElasticStream


class Letters(IterableDataset):
    """Counts from 0; notes the epochs that it was told. Would deal its samples out to workers."""

    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(self.count) if worker is None else range(worker.id, self.count, worker.num_workers))


class Boasting(Letters):
    """Says that it has more than it yields."""

    def __len__(self) -> int:
        return 100


class Seekable:
    """Yields pairs of epoch and index, from any index on."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, []

    def iterate(self, epoch: int, start: int):
        self.calls.append((epoch, start))
        return iter([(epoch, index) for index in range(start, self.count)])


def stream_of(count, batch=4, rank=0, world_size=1, state=None, **options):
    stream = ElasticStream(range(count), batch, collate=list, **options)
    stream.place(rank, world_size)
    stream.load_state_dict(state or {"epoch": 0})
    return stream


def loader_of(stream, **options):
    return DataLoader(stream, batch_size=None, **options)


#: Memberships: the number of ranks, and how many blocks take effect before it changes.
CHANGES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 90),
    batch=st.integers(1, 5),
    num_parts=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    changes=CHANGES,
    with_sampler=st.booleans(),
)
def test_over_all_schedules_every_sample_is_used_once(count, batch, num_parts, num_workers, changes, with_sampler):
    """In each membership some blocks take effect, and one is lost before the ranks change; in the end, none is lost.

    The workers of the loaders are played by generators: worker w makes the steps w, w + W and so on.
    """
    with_sampler &= count > 0
    used = [[] for _ in range(num_parts)]
    state = {"epoch": 3}

    def steps_of(rank, world_size):
        """Make a dealer as a process does that has got the state; return it and its batches."""
        if with_sampler:
            sampler = ElasticSampler(count, batch, seed=1)
            sampler.place(rank, world_size)
            sampler.load_state_dict(state)
            return sampler, sampler.deal(iter(sampler))
        stream = stream_of(count, batch, rank, world_size, state)
        workers = [itertools.islice(stream, worker, None, num_workers) for worker in range(num_workers)]
        in_order = itertools.chain.from_iterable(itertools.zip_longest(*workers))
        return stream, stream.deal(dealt for dealt in in_order if dealt is not None)

    for world_size, num_blocks in [*changes, (changes[0][0], 10_000)]:
        ranks = [steps_of(rank, world_size) for rank in range(world_size)]
        batches = [next(deal, None) for _, deal in ranks]
        for _ in range(num_blocks):
            if batches[0] is None:
                break
            dealers = [dealer for dealer, _ in ranks]
            assert len({dealer.next_total for dealer in dealers}) == 1
            shares = [dealer.next_share for dealer in dealers]
            assert [max(1, share) for share in shares] == list(map(len, batches)), "a rank without one borrows one"
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == dealers[0].next_total
            part = dealers[0].part
            used[part] += [sample for each, share in zip(batches, shares, strict=True) if share for sample in each]
            for dealer in dealers:
                dealer.advance(num_parts)
            state = dealers[0].state_dict()
            if dealers[0].part == 0:
                batches = [next(deal, None) for _, deal in ranks]
        assert len({each is None for each in batches}) == 1, "all ranks come to the end of the epoch together"
        if batches[0] is None:
            assert all(dealer.is_over for dealer, _ in ranks)
    assert [sorted(samples) for samples in used] == [list(range(count))] * num_parts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("count", "batch"), [(100, 8), (64, 8), (17, 2), (9, 3), (5, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_dealt_like_a_data_set_with_a_length(world_size, count, batch, drop_last) -> None:
    for rank in range(world_size):
        stream = stream_of(count, batch, rank, world_size, drop_last=drop_last)
        sampler = ElasticSampler(count, batch, shuffle=False, drop_last=drop_last)
        sampler.place(rank, world_size)
        dealt = [each.batch for each in stream]
        assert dealt == list(sampler)


def test_workers_keep_the_order_of_the_steps_and_read_all_samples() -> None:
    stream = ElasticStream(Letters(50), 4, collate=lambda samples: torch.tensor(samples) * 10)
    stream.place(1, 2)
    stream.load_state_dict({"epoch": 0, "cursor": 5})
    alone, several = ([each.batch.tolist() for each in loader_of(stream, num_workers=count)] for count in (0, 2))
    assert several == alone
    assert alone[0] == [90, 100, 110, 120]
    assert alone[-1][-1] == 490


def test_a_data_set_that_can_seek_is_not_read_from_the_beginning() -> None:
    dataset = Seekable(20)
    stream = ElasticStream(dataset, 3, collate=list)
    stream.load_state_dict({"epoch": 2, "cursor": 13})
    assert next(iter(stream)).batch == [(2, 13), (2, 14), (2, 15)]
    assert dataset.calls == [(2, 13)]


def test_a_data_set_is_told_the_epoch_each_time() -> None:
    dataset = Letters(6)
    stream = ElasticStream(dataset, 3)
    for _ in stream.epochs(2):
        assert [each.tolist() for each in stream.deal(iter(loader_of(stream)))] == [[0, 1, 2], [3, 4, 5]]
    assert dataset.epochs == [0, 1]


def test_the_end_of_an_epoch_is_part_of_the_state() -> None:
    stream = stream_of(5, 4)
    for _ in stream.deal(iter(stream)):
        stream.advance()
    assert (stream.is_over, stream.cursor, stream.next_total) == (True, 5, 0)
    assert stream.has_samples_for(100, 0), "nothing is left that ranks could lack"
    later = stream_of(5, 4, state=stream.state_dict())
    assert later.is_over
    later.set_epoch(1)
    assert (later.is_over, later.cursor) == (False, 0)


def test_the_length_is_the_number_of_steps_taken_when_the_end_was_seen() -> None:
    stream = ElasticStream(Boasting(5), 2, collate=list)
    assert len(stream) == 50
    for _ in stream.deal(iter(stream)):
        stream.advance()
    assert len(stream) == 3


def test_ranks_join_only_while_there_are_samples_for_them() -> None:
    stream = stream_of(13, 2, 0, 2)
    seen = []
    for _ in stream.deal(iter(stream)):
        seen.append((stream.next_total, [stream.has_samples_for(size, 1) for size in (2, 4, 6)]))
        stream.advance()
    assert seen == [(4, [True, True, True]), (4, [True, True, False]), (3, [True, False, False]), (2, [True] * 3)]
    assert not stream_of(13, 2, 0, 2, {"epoch": 0, "begun": 4}).has_samples_for(5, 2)
    assert stream_of(13, 2, 0, 2, {"epoch": 0, "begun": 4}).has_samples_for(4, 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 1, "cursor": 11}, "the data set yields 10 samples in epoch 1 now, and 11 were dealt out before"),
        ({"epoch": 1, "cursor": 8, "begun": 4}, "the data set yields 10 samples in epoch 1 now, and 12 were dealt"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_has_become_shorter_is_an_error(state, message, num_workers) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        list(loader_of(stream_of(10, 2, state=state), num_workers=num_workers))
    # Frames of the error hold torch's iterator. The garbage collector would take its queues first, and wait 5 s for its
    # worker, which then learns no more that it shall end.
    traceback.clear_frames(caught.tb)


@pytest.mark.parametrize(
    ("dataset", "batch", "message"),
    [
        (iter(range(3)), 1, "can be read only once"),
        ((number for number in range(3)), 1, "a generator can be read only once"),
        (5, 1, "needs an iterable data set, not a int"),
        (range(3), 0, "at least 1"),
    ],
)
def test_what_cannot_be_dealt_is_refused(dataset, batch, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ElasticStream(dataset, batch)


def test_loaders_that_would_change_the_batches_are_refused() -> None:
    stream = stream_of(10, 2)
    stream.check_loader("job.batches", loader_of(stream))
    for loader in ([1], loader_of(stream_of(10, 2)), DataLoader(stream, batch_size=2)):
        with pytest.raises(ConfigurationError, match=r"DataLoader\(stream, batch_size=None\)"):
            stream.check_loader("job.batches", loader)
    for options in ({"persistent_workers": True}, {"in_order": False}):
        with pytest.raises(ConfigurationError, match="persistent_workers=False and in_order=True"):
            stream.check_loader("job.batches", loader_of(stream, num_workers=1, **options))


def test_the_default_makes_tensors_of_the_samples() -> None:
    stream = ElasticStream([{"x": float(number)} for number in range(4)], 2)
    [first, _] = list(loader_of(stream))
    assert first.batch["x"].equal(default_collate([{"x": 0.0}, {"x": 1.0}])["x"])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 2), (4, 1), (2, 5)])
def test_the_length_is_the_number_of_steps_of_the_epoch_whenever_it_is_asked_for(kind, drop_last, before, after):
    """It changes with the number of ranks alone, and is then what was taken and what is planned."""
    make = ElasticSampler if kind == "sampler" else stream_of
    dealer = make(101, 3, drop_last=drop_last)
    dealer.place(0, before)
    with_steps_in_parts = 2
    lengths, num_steps = [], 0
    for world_size in (before, after):
        dealer.place(0, world_size)
        lengths.append(len(dealer))
        for _ in dealer.deal(iter(dealer)):
            dealer.advance(with_steps_in_parts)
            assert len(dealer) == lengths[-1], "also between two parts of a step"
            dealer.advance(with_steps_in_parts)
            num_steps += 1
            assert len(dealer) == lengths[-1]
            if world_size == before and num_steps == 5:
                break
    assert len(dealer) == lengths[-1] == num_steps
    assert (lengths[0] == lengths[1]) == (before == after)
    dealer.set_epoch(1)
    assert len(dealer) == len(list(stream_of(101, 3, 0, after, drop_last=drop_last)))


def test_a_stream_of_a_data_set_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(loader_of(ElasticStream(Letters(10), 2)))
    assert len(loader_of(stream_of(10, 2))) == 5
