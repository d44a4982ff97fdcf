"""The shared-memory transport under real engines, ranks as threads: conformance, pressure, mixed with TCP."""

import secrets
import threading

import pytest
import torch
from shared_hosts import hosts_of, two_per_host

from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.errors import GroupClosed, PeerLost
from totalreduce.groups.group import Group
from totalreduce.pytorch.broadcast import broadcast_parameters
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.testing import check_transport, run_ranks
from totalreduce.testing.ranks import make_groups
from totalreduce.transports import shm, shm_memory
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity


def tight(world_size: int) -> list[Transport]:
    """Hardly any memory: every ring and every pool is full at some time, and bodies travel in parts."""
    identity = JobIdentity(secrets.token_bytes(32), "test", 0)
    doors = [shm.listen() for _ in range(world_size)]
    names = [name for _, name in doors]
    return [
        shm.ShmTransport(rank, names, door, identity, TcpConfig(), max_body_bytes=4096, pool_bytes=4 * 4096)
        for rank, (door, _) in enumerate(doors)
    ]


@pytest.mark.parametrize("world_size", [1, 2])  # all sizes: `make soak`, test_conformance.py
def test_conformance(world_size: int) -> None:
    assert check_transport("shm", world_sizes=(world_size,)) >= 100 * world_size


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4, 5, 7, 8))]
)
def test_conformance_of_tensors_in_shared_memory(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits into an entry, so all segments are lent; where more are out than can be, they are staged."""
    monkeypatch.setattr(shm_memory, "_INLINE_BYTES_MIN", 8)
    monkeypatch.setattr(shm_memory, "_INLINE_BYTES_MAX", 8)
    assert check_transport("shm", world_sizes=(world_size,), shared_memory=True) >= 100 * world_size


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_conformance_across_hosts(world_size: int) -> None:
    assert check_transport(two_per_host, world_sizes=(world_size,)) >= 100 * world_size


@pytest.mark.parametrize("compute", ["inline", "thread"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_large_tensors_through_hardly_any_memory(world_size: int, compute: str) -> None:
    config = EngineConfig(segment_bytes=64 * 1024, scratch_segments=2, timeout_s=60)

    def body(group: Group) -> None:
        for turn in range(3):
            tensors = [torch.arange(70_001, dtype=torch.float64) + group.rank + turn + place for place in range(4)]
            works = [group.allreduce(tensor, name=f"t{place}") for place, tensor in enumerate(tensors)]
            for place, work in enumerate(works):
                work.wait()
                expected = torch.arange(70_001, dtype=torch.float64) + turn + place
                ranks = sum(range(group.world_size))
                assert torch.equal(tensors[place], expected * group.world_size + ranks)

    run_ranks(world_size, body, transport=tight, engine=config, compute=compute)  # type: ignore[arg-type]


def test_kept_leases_of_all_peers_do_not_stop_anybody() -> None:
    """Ranks that begin in turn: what floats is copied, what waits keeps at most half of every pool."""
    config = EngineConfig(segment_bytes=32 * 1024, scratch_segments=2, timeout_s=60)

    def body(group: Group) -> list[float]:
        tensors = [torch.full((50_000,), float(group.rank + place)) for place in range(6)]
        order = range(6) if group.rank % 2 else reversed(range(6))
        works = [group.allreduce(tensors[place], name=f"t{place}") for place in order]
        for work in works:
            work.wait()
        return [float(tensor[-1]) for tensor in tensors]

    results = run_ranks(4, body, transport="shm", engine=config)
    assert results == [[6.0 + 4 * place for place in range(6)]] * 4


def test_a_waiting_rank_is_woken_by_a_submission_of_its_own_thread() -> None:
    def body(group: Group) -> bool:
        late = torch.ones(100)

        def submit() -> None:
            group.allreduce(late, name="late").wait()

        thread = threading.Thread(target=submit)
        first = group.allreduce(torch.ones(10), name="early")
        thread.start()
        first.wait()
        thread.join(20)
        return bool((late == group.world_size).all())

    assert run_ranks(3, body, transport="shm") == [True] * 3


@pytest.mark.parametrize("transport", ["shm", two_per_host], ids=["shm", "routed"])
def test_a_rank_that_leaves_is_named(transport: object) -> None:
    groups = make_groups(4, transport=transport)  # type: ignore[arg-type]
    ready = threading.Barrier(4)
    seen: dict[int, int] = {}

    def work(group: Group) -> None:
        group.allreduce(torch.ones(5), name="first").wait()
        ready.wait(20)
        if group.rank == 2:
            group.close(2.0)
            return
        try:
            group.allreduce(torch.ones(5), name="second").wait()
        except PeerLost as error:
            seen[group.rank] = error.rank
        group.close(2.0)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {0: 2, 1: 2, 3: 2}


def test_a_routed_rank_knows_its_neighbours_and_counts_both_ways() -> None:
    links = hosts_of(2, 4)
    groups = make_groups(4, transport=lambda _: links)
    assert [link.ranks_per_host for link in links] == [2] * 4
    threads = [threading.Thread(target=group.barrier) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # The barrier of four talks to the ranks one and two further; one of the four neighbours is on the same host.
    assert [rank ^ 1 in link.connected_peers() for rank, link in enumerate(links)] == [True] * 4
    assert [(rank + 2) % 4 in link.connected_peers() for rank, link in enumerate(links)] == [True] * 4
    assert all(link.counters.connections >= 2 for link in links)
    closers = [threading.Thread(target=group.close, args=(2.0,)) for group in groups]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)


def lies_in_shared_memory(group: Group, tensor: torch.Tensor) -> bool:
    transport = group._runner.transport
    assert isinstance(transport, shm.ShmTransport)
    return transport._outbox.arena.offset_of(memoryview(tensor.detach().view(torch.uint8).numpy())) > 0


def test_tensors_of_a_group_in_shared_memory() -> None:
    def body(group: Group) -> None:
        assert group.shares_memory
        tensor = group.empty(3, 40_000, dtype=torch.bfloat16)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 40_000), torch.bfloat16, True)
        assert lies_in_shared_memory(group, tensor)
        for turn in range(5):  # into the memory from which the others have just read
            tensor.fill_(group.rank + turn)
            group.allreduce(tensor).wait()
            assert (tensor == 3 + 3 * turn).all()
            group.broadcast(tensor[1], root=turn % 3)
            group.allreduce(tensor[:, ::2], name="strided").wait()
            assert (tensor[:, 1::2] == 3 + 3 * turn).all()
            assert (tensor[:, ::2] == 9 + 9 * turn).all()
        assert group.empty(0).shape == (0,)
        assert group.empty().shape == ()
        group.barrier()

    run_ranks(3, body, transport="shm")


def test_an_operation_is_done_when_the_others_have_read_its_tensor() -> None:
    def body(group: Group) -> None:
        tensor = group.empty(100_000).fill_(5.0)
        usual = torch.full((100_000,), 5.0)
        if group.rank == 0:
            work = group.broadcast(tensor, root=0, name="lent", async_op=True)
            group.broadcast(usual, root=0, name="staged", async_op=True).wait()
            group.recv(torch.empty(1), src=1).wait()
            assert not work.done()  # the other rank has the message, and has not submitted anything
            group.send(torch.zeros(1), dst=1).wait()
            work.wait()
            tensor.zero_()
        else:
            group.broadcast(usual, root=0, name="staged")
            group.send(torch.zeros(1), dst=0).wait()
            group.recv(torch.empty(1), src=0).wait()
            received = torch.zeros(100_000)
            group.broadcast(received, root=0, name="lent")
            assert (received == 5.0).all()

    run_ranks(2, body, transport="shm")


def test_without_shared_memory_it_is_usual_memory() -> None:
    def body(group: Group) -> torch.Tensor:
        assert not group.shares_memory
        return group.empty(2, 3, dtype=torch.int8)

    for tensor in run_ranks(2, body, transport="tcp"):
        assert (tensor.shape, tensor.dtype) == ((2, 3), torch.int8)


def test_a_closed_group_makes_no_tensors() -> None:
    def body(group: Group) -> None:
        tensor = group.empty(10).fill_(1.0)
        group.close()
        assert not group.shares_memory
        with pytest.raises(GroupClosed, match="is closed"):
            group.empty(10)
        assert tensor.sum() == 10  # what there was, stays

    run_ranks(2, body, transport="shm")


def test_the_optimizers_gradients_are_not_staged() -> None:
    def body(group: Group) -> None:
        model = torch.nn.Linear(100, 200)
        broadcast_parameters(model, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        model(torch.full((1, 100), float(group.rank))).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert lies_in_shared_memory(group, model.weight.grad)
        assert (model.weight.grad == 1.0).all()  # the mean of 0, 1 and 2
        flags = 2 + 1 + 3 + 2  # present, changed, joined, first and again
        assert model.weight.grad.untyped_storage().nbytes() == 4 * (100 * 200 + 200 + flags)
        optimizer.close()

    run_ranks(3, body, transport="shm")
