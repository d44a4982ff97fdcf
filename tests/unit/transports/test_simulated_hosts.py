"""Simulated hosts: threads share cores evenly, and messages share network cards."""

import pytest

from totalreduce.foundation.header import HEADER_BYTES
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.testing.simulation import SimulatedCluster, TimedSubmission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork
from totalreduce.transports.simulated_hosts import HostModel, Processor, SimulatedHosts

CARD = 1e6  # bytes in a second


def network_of(ranks, *, traced=False, latency_s=0.0, **model):
    model = {"host_of_rank": range(ranks), "card_bytes_per_s": CARD} | model
    return SimulatedNetwork(
        ranks, default=LinkModel(latency_s=latency_s), traced=traced, hosts=HostModel(**model), carries=False
    )


def ends(network, *works):
    """Run to the end; return when each of these actions was called."""
    found = {}
    for number, work in enumerate(works):
        work(lambda number=number: found.setdefault(number, network.now))
    while network.step():
        pass
    return [found[number] for number in range(len(works))]


def test_threads_beyond_the_cores_run_slower_until_others_have_ended():
    network = SimulatedNetwork(1)
    processor = Processor(network, 2)
    # Three threads get two thirds of a core each until the first one has had its second, after 1.5; the others have two
    # seconds left, a core each.
    took = ends(network, *(lambda action, s=s: processor.run(s, action) for s in (1.0, 3.0, 3.0)))
    assert took == pytest.approx([1.5, 3.5, 3.5])


def test_a_thread_that_comes_later_slows_those_that_run():
    network = SimulatedNetwork(1)
    processor = Processor(network, 1)
    took = ends(
        network,
        lambda action: processor.run(2.0, action),
        lambda action: network.at(1.0, lambda: processor.run(0.5, action)),
    )
    assert took == pytest.approx([2.5, 2.0])


def test_a_thread_does_one_thing_after_the_other():
    network = SimulatedNetwork(2)
    hosts = SimulatedHosts(network, HostModel(host_of_rank=(0, 1), card_bytes_per_s=CARD, cores=8))
    took = ends(network, *(lambda action: hosts.move(0, 1.0, action) for _ in range(3)))
    assert took == pytest.approx([1.0, 2.0, 3.0])
    assert hosts.moved_s() == pytest.approx([3.0, 0.0])


@pytest.mark.parametrize(("shared", "expected"), [(False, 1.0), (True, 4.0)])
def test_emulated_hosts_share_the_cores_of_one_machine(shared, expected):
    network = SimulatedNetwork(4)
    model = HostModel(host_of_rank=range(4), card_bytes_per_s=CARD, cores=1, shared_cores=shared)
    hosts = SimulatedHosts(network, model)
    took = ends(network, *(lambda action, rank=rank: hosts.compute(rank, 1.0, action) for rank in range(4)))
    assert took == pytest.approx([expected] * 4)


def test_a_thread_that_wakes_up_waits_where_all_cores_are_busy():
    network = SimulatedNetwork(1)
    model = HostModel(host_of_rank=(0,), card_bytes_per_s=CARD, cores=1, wake_s=0.25)
    hosts = SimulatedHosts(network, model)
    took = ends(
        network,
        lambda action: hosts.move(0, 0.5, action),  # alone: at once
        lambda action: network.at(1.0, lambda: hosts.compute(0, 1.0, action)),
        # Half a second of one of two threads; the second one follows without waking up.
        lambda action: network.at(1.0, lambda: hosts.move(0, 0.25, action)),
        lambda action: network.at(1.0, lambda: hosts.move(0, 0.25, action)),
    )
    assert took == pytest.approx([0.5, 2.5, 1.75, 2.25])


def test_messages_of_several_hosts_wait_for_the_card_of_their_receiver():
    network = SimulatedNetwork(3)
    hosts = SimulatedHosts(network, HostModel(host_of_rank=range(3), card_bytes_per_s=CARD))

    def send(source):
        def work(action):
            hosts.send(source, 0, 500_000, lambda: hosts.receive(source, 0, 500_000, action))

        return work

    # Each leaves its own card after half a second; the receiver's card carries one after the other.
    assert ends(network, send(1), send(2)) == pytest.approx([0.5, 1.0])
    assert hosts.card_s() == pytest.approx([1.0, 0.5, 0.5])
    assert hosts.card_bytes() == [1_000_000, 500_000, 500_000]


def test_a_message_takes_processor_time_of_both_ranks_and_none_of_the_card_on_one_host():
    network = SimulatedNetwork(2)
    model = HostModel(host_of_rank=(0, 0), card_bytes_per_s=CARD, message_s=0.25, byte_s=1e-6)
    hosts = SimulatedHosts(network, model)
    [took] = ends(
        network,
        lambda action: hosts.send(0, 1, 500_000, lambda: hosts.receive(0, 1, 500_000, action)),
    )
    assert took == pytest.approx(2 * (0.25 + 0.5))
    assert hosts.card_bytes() == [0]


@pytest.mark.parametrize(("ranks_per_host", "crossings"), [(1, 2 * 3 / 4), (2, 2 * 3 / 4), (4, 0)])
def test_an_allreduce_takes_as_long_as_the_cards_need(ranks_per_host, crossings):
    """A ring over hosts in blocks crosses each card once in each direction, whatever the number of ranks there."""
    size = 4 << 20
    network = network_of(4, host_of_rank=[rank // ranks_per_host for rank in range(4)])
    cluster = SimulatedCluster(network, validates=False, reduce_bytes_per_s=1e18)
    signature = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (size // 4,), algorithm="ring")
    memory = memoryview(bytearray(size))
    for rank in range(4):
        cluster.submit(rank, TimedSubmission("one", signature, [memory]))
    cluster.run()
    took = max(rank[0].done_at_s for rank in cluster.submissions)
    # Not shorter; and longer by one message at most, before which a rank has nothing to send.
    assert crossings * size / CARD <= took <= crossings * size / CARD + 0.55 * bool(crossings) + 1e-3


def test_bodies_that_are_not_carried_leave_memory_alone_and_take_their_time():
    size = 1 << 20
    network = network_of(2, traced=True)
    cluster = SimulatedCluster(network, validates=False)
    signature = Signature(OpKind.BROADCAST, DType.UINT8, ReduceOp.NONE, 0, (size,))
    memories = [memoryview(bytearray([value]) * size) for value in (1, 2)]
    for rank, memory in enumerate(memories):
        cluster.submit(rank, TimedSubmission("one", signature, [memory]))
    cluster.run()
    assert set(memories[1][:1000]) == {2}
    arrived = [num_bytes for _, what, rank, _, num_bytes in network.trace if what == "arrived" and rank == 1]
    assert sum(arrived) >= size + HEADER_BYTES
    assert cluster.submissions[1][0].done_at_s > size / CARD


def test_cores_that_several_training_threads_share_lose_a_part_of_their_time():
    network = SimulatedNetwork(1)
    processor = Processor(network, 1, sharing_loss=0.2)
    # Two threads share 0.8 of a core until both have had a second. A thread that does not train costs nothing more.
    took = ends(network, *(lambda action: processor.train(1.0, action) for _ in range(2)))
    assert took == pytest.approx([2.5, 2.5])
    network = SimulatedNetwork(1)
    processor = Processor(network, 1, sharing_loss=0.2)
    took = ends(network, lambda action: processor.train(1.0, action), lambda action: processor.run(1.0, action))
    assert took == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(("training", "expected"), [(1, 0.25), (2, 0.5), (3, 0.75)])
def test_a_thread_waits_the_longer_the_more_threads_train_on_its_core(training, expected):
    network = SimulatedNetwork(1)
    processor = Processor(network, 1, wake_s=0.25, crowded_wake_s=0.5)
    assert processor.wake_s == 0.0
    for _ in range(training):
        processor.train(1.0, lambda: None)
    assert processor.wake_s == pytest.approx(expected)


def test_what_a_message_costs_beside_its_thread_slows_training_and_not_the_message():
    def took(**beside):
        model = HostModel(host_of_rank=(0, 1), card_bytes_per_s=CARD, cores=1, message_s=0.1, **beside)
        network = SimulatedNetwork(2)
        hosts = SimulatedHosts(network, model)
        works = [lambda action: hosts.send(0, 1, 1000, action), lambda action: hosts.compute(0, 1.0, action)]
        return ends(network, *works)

    # The message has half of the core, or a third of it, for a tenth of a second; then its card takes a millisecond.
    assert took() == pytest.approx([0.201, 1.1])
    assert took(beside_message_s=0.2, beside_byte_s=1e-4) == pytest.approx([0.301, 1.4])
