"""Messages between ranks: order, tags, receives from anybody, what happens when somebody leaves or is lost."""

import contextlib
import threading

import pytest
import torch

import totalreduce as tr
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups
from totalreduce.transports.inproc import InprocNetwork

TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", "tcp"])
SMALL = tr.EngineConfig(timeout_s=30.0, segment_bytes=1024, segment_bytes_min=256, eager_bytes=2048)


@TRANSPORTS
def test_a_ring_of_messages(transport: str) -> None:
    def body(group: tr.Group) -> list[float]:
        size, rank = group.world_size, group.rank
        token = torch.full((5000,), float(rank))
        got = torch.empty(5000)
        for _ in range(size):
            sent = group.send(token, dst=(rank + 1) % size)
            work = group.recv(got, src=(rank - 1) % size)
            assert work.wait() is got
            assert work.source == (rank - 1) % size
            sent.wait()
            assert sent.source == rank
            token.copy_(got)
        return token.unique().tolist()

    assert run_ranks(4, body, transport=transport, engine=SMALL) == [[0.0], [1.0], [2.0], [3.0]]


@TRANSPORTS
def test_tags_keep_messages_apart_and_each_tag_keeps_its_order(transport: str) -> None:
    def body(group: tr.Group) -> list[list[int]] | None:
        if group.rank == 0:
            works = [group.send(torch.tensor([10 * tag + n]), dst=1, tag=tag) for n in range(5) for tag in (7, -1, 0)]
            for work in works:
                work.wait()
            return None
        got = {tag: [torch.empty(1, dtype=torch.int64) for _ in range(5)] for tag in (0, 7, -1)}
        for tag, tensors in got.items():
            for work in [group.recv(tensor, src=0, tag=tag) for tensor in tensors]:
                work.wait()
        return [[tensor.item() for tensor in got[tag]] for tag in (0, 7, -1)]

    expected = [[10 * tag + n for n in range(5)] for tag in (0, 7, -1)]
    assert run_ranks(2, body, transport=transport)[1] == expected


@TRANSPORTS
def test_a_receive_from_anybody_keeps_the_order_of_every_sender(transport: str) -> None:
    """Small ones float, large ones wait to be asked for: both find the receiver."""

    def body(group: tr.Group) -> dict[int, list[float]] | None:
        if group.rank:
            works = [
                group.send(torch.full((3000,), float(10 * group.rank + n)), dst=0, priority=3 - n) for n in range(3)
            ]
            for work in works:
                work.wait()
            return None
        seen: dict[int, list[float]] = {rank: [] for rank in range(1, group.world_size)}
        tensors = [torch.empty(3000) for _ in range(3 * (group.world_size - 1))]
        for tensor, work in zip(tensors, [group.recv(each, src=None) for each in tensors], strict=True):
            assert work.wait() is tensor
            seen[work.source].append(tensor.unique().item())
        return seen

    for engine in (SMALL, tr.EngineConfig(timeout_s=30.0)):
        seen = run_ranks(4, body, transport=transport, engine=engine)[0]
        assert seen == {rank: [10.0 * rank, 10.0 * rank + 1, 10.0 * rank + 2] for rank in (1, 2, 3)}


def test_the_source_is_not_known_before_the_message_is_there() -> None:
    first, second = make_groups(2)
    with first, second:
        work = first.recv(torch.empty(1), src=None)
        assert work.source is None
        assert not work.done()
        second.send(torch.ones(1), dst=0)
        assert work.wait(timeout_s=20).tolist() == [1.0]
        assert work.source == 1
        collective, _ = (group.allreduce(torch.ones(1)) for group in (first, second))
        collective.wait()
        assert collective.source is None


def test_a_deadline_says_that_nobody_has_sent() -> None:
    first, second = make_groups(2)
    with first, second:
        tensor = torch.zeros(1)
        work = first.recv(tensor, src=None)
        with pytest.raises(tr.DeadlineExceededError, match="a message from any rank with tag 0': no rank has sent one"):
            work.wait(timeout_s=0.1)
        second.send(torch.ones(1), dst=0)
        assert work.wait(timeout_s=20).item() == 1.0


@TRANSPORTS
@pytest.mark.parametrize("anybody", [False, True])
def test_lengths_and_types_that_differ(anybody: bool, transport: str) -> None:
    wrong = [torch.empty(2), torch.empty(3, dtype=torch.int32), torch.empty(100_000)]

    def body(group: tr.Group) -> list[str]:
        messages = []
        for odd in wrong:
            if group.rank == 0:
                work = group.send(torch.ones(3), dst=1, tag=5)
            else:
                work = group.recv(odd, src=None if anybody else 0, tag=5)
            try:
                work.wait(timeout_s=20)
            except tr.MismatchError as error:
                messages.append(str(error))
        if group.rank == 0:
            group.send(torch.full((3,), 7.0), dst=1, tag=5).wait()
        else:
            assert group.recv(torch.empty(3), src=0, tag=5).wait(timeout_s=20).tolist() == [7.0] * 3
        group.barrier()
        return messages

    received = run_ranks(2, body, transport=transport)[1]
    assert len(received) == 3
    for message, shown in zip(received, ("float32[2]", "int32[3]", "float32[100000]"), strict=True):
        assert "rank 0 submitted send_recv of float32[3]" in message
        assert f"rank 1 submitted send_recv of {shown}" in message


def test_closing_ends_a_receive_from_anybody() -> None:
    first, second = make_groups(2)
    work = first.recv(torch.empty(1), src=None)
    closing = threading.Thread(target=first.close)
    closing.start()
    with pytest.raises(tr.GroupClosed, match="closed with a receive pending"):
        work.wait(timeout_s=20)
    closing.join(20)
    with pytest.raises(tr.GroupClosed):
        first.recv(torch.empty(1), src=None)
    second.close()


@TRANSPORTS
def test_a_receive_from_anybody_ends_when_everybody_has_left(transport: str) -> None:
    def body(group: tr.Group) -> int | None:
        if group.rank:
            group.send(torch.full((1,), float(group.rank)), dst=0).wait()
            group.close()
            return None
        tensors = [torch.empty(1) for _ in range(2)]
        for work in [group.recv(tensor, src=None) for tensor in tensors]:
            work.wait(timeout_s=20)
        assert sorted(tensor.item() for tensor in tensors) == [1.0, 2.0]
        with pytest.raises(tr.PeerLost) as caught:
            group.recv(torch.empty(1), src=None).wait(timeout_s=20)
        return caught.value.rank

    assert run_ranks(3, body, transport=transport)[0] in (1, 2)


@pytest.mark.parametrize("src", [None, 1, 2])
def test_a_loss_ends_every_receive(src: int | None) -> None:
    """Somebody's death is no reason to wait for the others: the group has failed."""
    networks = []

    def transports(world_size: int):
        networks.append(InprocNetwork(world_size))
        return [networks[0].transport(rank) for rank in range(world_size)]

    groups = make_groups(3, transport=transports)
    work = groups[0].recv(torch.empty(1), src=src)
    networks[0].kill(2, "it was killed")
    with pytest.raises(tr.PeerLost, match="rank 2 is lost") as caught:
        work.wait(timeout_s=20)
    assert caught.value.rank == 2
    for group in groups:
        group.close(1.0)


@TRANSPORTS
@pytest.mark.parametrize("count", [1, 300_000])
def test_who_sends_to_a_rank_that_has_left(count: int, transport: str) -> None:
    """What fits into the allowance is gone; what waits to be asked for fails, with the rank's name."""
    left = threading.Event()

    def body(group: tr.Group) -> BaseException | None:
        group.barrier()
        if group.rank == 1:
            group.close()
            left.set()
            return None
        tensor = torch.ones(count)
        work = group.send(tensor, dst=1)
        assert left.wait(20)
        with contextlib.suppress(tr.PeerLost):
            work.wait(timeout_s=20)
        return work.exception()

    error = run_ranks(2, body, transport=transport, engine=SMALL)[0]
    assert error is not None or count == 1
    assert error is None or error.rank == 1
