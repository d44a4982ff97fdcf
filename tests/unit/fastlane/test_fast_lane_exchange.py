"""The fast lane's exchange, by ranks that are threads: compiled functions that run at the same time."""

import itertools
import os
import threading

import numpy as np
import pytest
from process_reads import skip_without_process_reads

from totalreduce.fastlane.board import BoardLayout
from totalreduce.kernels import element_types, exchange
from totalreduce.kernels.exchange import ENTRY, HEAD, PEER

BOARD = BoardLayout(64)
ARENA = BOARD.end
KEY, ITERATION, SIGNATURE = 12345, 7, 99


def align(size):
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Host:
    """The memories of some ranks: a sleep word, the board, and one tensor that others can read."""

    def __init__(self, ranks, tensor_bytes):
        self.memories = [align(BOARD.end + tensor_bytes) for _ in range(ranks)]

    def block(
        self,
        rank,
        tensor,
        order,
        *,
        lanes=1,
        whole=False,
        entry=0,
        stage=0,
        shared=False,
        read=False,
        divisor=1,
        signature=SIGNATURE,
    ):
        ranks, itemsize = len(self.memories), tensor.itemsize
        block = np.zeros(exchange.block_words(ranks), np.int64)
        piece = BOARD.piece_bytes(ranks) // itemsize
        part = -(-(-(-tensor.size // lanes) // 1) // ranks)
        lane_rounds = max(1, -(-part // piece))
        BOARD.fill(block, ranks, part * itemsize if lane_rounds * lanes == 1 else None)
        block[HEAD.ranks], block[HEAD.me] = ranks, rank
        block[HEAD.adds] = block[HEAD.gathers] = block[HEAD.is_cut] = 1
        block[HEAD.kind] = element_types.FLOAT32 if itemsize == 4 else element_types.FLOAT64
        block[HEAD.itemsize] = itemsize
        block[HEAD.reduction], block[HEAD.divisor] = element_types.SUM, divisor
        block[HEAD.count], block[HEAD.lanes], block[HEAD.is_whole] = tensor.size, lanes, whole
        block[HEAD.piece] = piece
        block[HEAD.lane_rounds], block[HEAD.rounds] = lane_rounds, lane_rounds * lanes
        block[HEAD.tensor] = tensor.ctypes.data
        self.sums = np.zeros(exchange.COUNTED, tensor.dtype)
        block[HEAD.sums] = self.sums.ctypes.data
        block[HEAD.key], block[HEAD.iteration], block[HEAD.signature] = KEY, ITERATION, signature
        block[HEAD.home], block[HEAD.turns] = 5, 64
        memory = self.memories[rank].ctypes.data
        block[HEAD.entry] = memory + BOARD.entry(5 + entry)
        block[HEAD.source] = ARENA if shared else -tensor.ctypes.data if read else 0
        block[HEAD.stage] = 0 if shared or read else BOARD.stage(stage)
        self.fetched = np.zeros(ranks * BOARD.piece_bytes(ranks), np.uint8)
        block[HEAD.fetched] = self.fetched.ctypes.data
        for part, ranks_in_order in enumerate(order):
            at = exchange.ORDER + part * ranks
            block[at : at + ranks] = ranks_in_order
        for peer, other in enumerate(self.memories):
            at = exchange.ORDER + ranks * ranks + peer * PEER.num_words
            block[at + PEER.memory], block[at + PEER.length] = other.ctypes.data, len(other)
            block[at + PEER.sleep] = other.ctypes.data
            block[at + PEER.process] = os.getpid()
        return block, (self.sums, self.fetched)

    def shared_tensor(self, rank, count, dtype):
        return self.memories[rank][ARENA : ARENA + count * np.dtype(dtype).itemsize].view(dtype)


def run(blocks):
    """Advance all blocks to their ends, each in a thread of its own."""
    code, statuses = exchange.load(), [None] * len(blocks)

    def body(rank):
        blocks[rank][HEAD.address], blocks[rank][HEAD.yield_ns] = blocks[rank].ctypes.data, 100_000
        while (status := code.function(exchange.ADVANCE, blocks[rank].ctypes.data, 0, 0)) == exchange.PENDING:
            pass
        statuses[rank] = status

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(blocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [exchange.DONE] * len(blocks)


def chains(ranks):
    return [[(part - distance) % ranks for distance in range(ranks)] for part in range(ranks)]


def expected(tensors, lanes, divisor=1):
    """One lane after the other, one part after the other, in the order of ``chains``."""
    ranks, result = len(tensors), np.empty_like(tensors[0])
    for lane in _cuts(np.arange(tensors[0].size), lanes):
        for part, indices in enumerate(_cuts(lane, ranks)):
            order = chains(ranks)[part]
            total = tensors[order[0]][indices]
            for rank in order[1:]:
                total = total + tensors[rank][indices]
            result[indices] = total / total.dtype.type(divisor) if divisor != 1 else total
    return result


def _cuts(indices, parts):
    size, larger = divmod(len(indices), parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [indices[a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("where", ["small", "whole", "round", "pieces", "shared", "read", "mixed"])
def test_the_sum_is_that_of_the_order(ranks, where, dtype):
    if where in ("read", "mixed"):
        skip_without_process_reads()
    count, lanes = {"small": (1001, 2), "whole": (30_001, 2), "round": (30_001, 1)}.get(where, (300_003, 3))
    whole, itemsize = where in ("small", "whole"), np.dtype(dtype).itemsize
    one_round = (ranks + 1) * (-(-count // ranks) * itemsize + 64)
    stages = BOARD.classes(2 * count * itemsize if whole else one_round if where == "round" else 1 << 21)[0]
    random = np.random.default_rng(ranks)
    host, blocks, tensors, keep = Host(ranks, count * 8), [], [], []
    for rank in range(ranks):
        values = random.standard_normal(count).astype(dtype)
        shared = where == "shared" or (where == "mixed" and rank % 3 == 0)
        read = where == "read" or (where == "mixed" and rank % 3 == 1)
        tensor = host.shared_tensor(rank, count, dtype) if shared else values.copy()
        tensor[:] = values
        tensors.append((tensor, values))
        block, sums = host.block(
            rank,
            tensor,
            chains(ranks),
            lanes=lanes,
            whole=whole,
            entry=rank % 4,
            stage=stages.first + rank % (stages.stop - stages.first),
            shared=shared,
            read=read,
            divisor=ranks,
        )
        blocks.append(block)
        keep.append(sums)
    run(blocks)
    assert where != "round" or all(block[HEAD.rounds] == 1 for block in blocks)
    right = expected([values for _, values in tensors], lanes, ranks)
    for tensor, _ in tensors:
        assert np.array_equal(tensor, right)


def test_an_entry_names_its_operation_in_one_word():
    """A rank that reads two words may find one of each of two operations that have the entry one after the other."""
    host, tensor, code = Host(2, 0), np.zeros(4, np.float32), exchange.load()
    block, _sums = host.block(0, tensor, chains(2), whole=True)
    block[HEAD.address] = block.ctypes.data
    entry = host.memories[0][BOARD.entry(5) :][: exchange.ENTRY_BYTES].view(np.int64)
    seen = []
    for key, iteration in [(KEY, 7), (KEY + 1, 7), (KEY, 8), (KEY + 1, 8), (-KEY, 1 << 40)]:
        block[HEAD.key] = key
        code.function(exchange.RESTART, block.ctypes.data, iteration, block[HEAD.entry])
        seen.append(entry.copy())
    for one, other in itertools.combinations(seen, 2):
        assert np.flatnonzero(one != other).tolist() == [ENTRY.operation // 8]
    code.function(exchange.WITHDRAW, block.ctypes.data, 0, 0)
    assert entry[ENTRY.operation // 8] == 0


def test_what_cannot_be_read_is_no_progress_and_no_result():
    """A peer whose memory has gone has failed, or has ended: the engine learns of it by itself."""
    count = 300_000
    host, code = Host(2, 0), exchange.load()
    tensors = [np.full(count, rank + 1, np.float32) for rank in range(2)]
    made = [host.block(rank, tensor, chains(2), read=True) for rank, tensor in enumerate(tensors)]
    for block, _ in made:
        block[HEAD.address], block[HEAD.turns] = block.ctypes.data, 64
    first, second = made[0][0], made[1][0]
    first[HEAD.source] = -4096  # never mapped
    assert code.function(exchange.ADVANCE, first.ctypes.data, 0, 0) == exchange.PENDING
    for _ in range(3):
        assert code.function(exchange.ADVANCE, second.ctypes.data, 0, 0) == exchange.PENDING
    assert second[HEAD.found] == 1
    assert second[HEAD.reduced] == second[HEAD.copied] == 0
    assert not code.function(exchange.HAS_CHANGED, second.ctypes.data, 0, 0)
    assert np.array_equal(tensors[1], np.full(count, 2, np.float32))


def test_a_rank_that_reads_no_process_refuses_a_peer_that_says_it_can():
    host, code = Host(2, 0), exchange.load()
    made = [host.block(rank, np.ones(300_000, np.float32), chains(2), read=True) for rank in range(2)]
    for block, _ in made:
        block[HEAD.address] = block.ctypes.data
    second, at = made[1][0], exchange.ORDER + 4
    second[at + PEER.process] = 0
    code.function(exchange.ADVANCE, made[0][0].ctypes.data, 0, 0)
    assert code.function(exchange.ADVANCE, second.ctypes.data, 0, 0) == exchange.VIOLATION
    assert second[HEAD.culprit] == 0


@pytest.mark.parametrize("where", ["shared", "read"])
def test_a_result_of_a_rank_that_has_failed_is_not_taken(where):
    """Rank 0 has its result and fails, and its program changes the tensor before rank 1 has copied the other half."""
    if where == "read":
        skip_without_process_reads()
    count, code = 300_000, exchange.load()
    host = Host(2, count * 4)
    tensors = [host.shared_tensor(rank, count, np.float32) for rank in range(2)]
    if where == "read":
        tensors = [np.empty(count, np.float32) for _ in range(2)]
    made = []
    for rank, tensor in enumerate(tensors):
        tensor[:] = rank + 1
        made.append(host.block(rank, tensor, chains(2), shared=where == "shared", read=where == "read"))
    (first, _), (second, _) = made
    for block in (first, second):
        block[HEAD.address] = block.ctypes.data

    def advance(block, turns):
        block[HEAD.turns] = turns
        return code.function(exchange.ADVANCE, block.ctypes.data, 0, 0)

    advance(first, 0)
    advance(second, 1)  # reduces and copies one piece
    while first[HEAD.reduced] < first[HEAD.rounds]:
        advance(first, 1)
    copied = second[HEAD.copied]
    assert code.function(exchange.HAS_ENDED, second.ctypes.data, 0, 0) == 0
    code.function(exchange.MARK_FAILED, first.ctypes.data, ITERATION, int(first[HEAD.entry]))
    tensors[0][:] = 1000.0
    for _ in range(10):
        assert advance(second, 64) == exchange.PENDING
    assert second[HEAD.copied] == copied < second[HEAD.rounds]
    assert code.function(exchange.HAS_ENDED, second.ctypes.data, 0, 0) == 0  # so its departure is a loss


@pytest.mark.parametrize(
    ("where", "is_announced"),
    [("whole", False), ("round", False), ("round", True), ("pieces", False), ("pieces", True)],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_stages_after_it_has_failed_is_not_taken(where, is_announced, ranks):
    """Rank 0 fails and its program changes the tensor, while the thread that moves messages stages and adds it."""
    count, code = {"whole": 3000, "round": 30_000, "pieces": 300_000}[where], exchange.load()
    size = {"whole": 2 * count * 4, "round": (ranks + 1) * (count // ranks * 4 + 64), "pieces": 1 << 21}[where]
    stage = BOARD.classes(size)[0].first
    host, tensors = Host(ranks, 0), [np.full(count, rank + 1, np.float32) for rank in range(ranks)]
    made = [
        host.block(rank, tensor, chains(ranks), whole=where == "whole", stage=stage)
        for rank, tensor in enumerate(tensors)
    ]
    first, *others = [block for block, _ in made]
    assert first[HEAD.rounds] == 1 or where == "pieces"

    def advance(block, turns):
        block[HEAD.address], block[HEAD.turns] = block.ctypes.data, turns
        return code.function(exchange.ADVANCE, block.ctypes.data, 0, 0)

    if is_announced:
        advance(first, 0)
    for turns in (0, 1):  # they announce the operation, and stage their first pieces
        assert {advance(block, turns) for block in others} <= {exchange.PENDING}
    code.function(exchange.MARK_FAILED, first.ctypes.data, ITERATION, int(first[HEAD.entry]))
    tensors[0][:] = 1000.0
    for _ in range(3):
        advance(first, 64)
        assert [advance(block, 64) for block in others] == [exchange.PENDING] * len(others)
    assert [int(block[HEAD.copied]) for block in others] == [0] * len(others)
    for block in others:
        assert not code.function(exchange.HAS_CHANGED, block.ctypes.data, 0, 0)  # so the thread may sleep


def test_a_rank_whose_process_is_still_read_is_needed():
    count, code = 300_000, exchange.load()
    host, tensors = Host(2, 0), [np.full(count, rank + 1, np.float32) for rank in range(2)]
    (first, _), (second, _) = (host.block(rank, tensor, chains(2), read=True) for rank, tensor in enumerate(tensors))
    for block in (first, second):
        block[HEAD.address], block[HEAD.turns] = block.ctypes.data, 64
        code.function(exchange.ADVANCE, block.ctypes.data, 0, 0)
    second[HEAD.turns] = 0
    entry = host.memories[0][BOARD.entry(5) :][: exchange.ENTRY_BYTES].view(np.int64)
    entry[ENTRY.copied // 8] = second[HEAD.rounds]  # as if rank 0 had copied everything
    assert second[HEAD.copied] < second[HEAD.rounds]
    assert code.function(exchange.HAS_ENDED, second.ctypes.data, 0, 0) == 0
    second[HEAD.copied] = second[HEAD.rounds]
    assert code.function(exchange.HAS_ENDED, second.ctypes.data, 0, 0) == 1


def test_a_thread_that_comes_while_a_block_is_used_again_takes_nothing_of_the_operation_before():
    """Between ``FastLane.repeat`` and ``RESTART`` the block still has words of the operation that has ended."""
    host, tensor, code = Host(2, 0), np.ones(4, np.float32), exchange.load()
    blocks = [host.block(rank, tensor, chains(2), whole=True)[0] for rank in range(2)]
    for block in blocks:
        block[HEAD.address] = block.ctypes.data
    first, second = blocks
    code.function(exchange.ADVANCE, second.ctypes.data, 0, 0)
    assert code.function(exchange.ADVANCE, first.ctypes.data, 0, 0) == exchange.DONE
    code.function(exchange.ADVANCE, second.ctypes.data, 0, 0)
    assert code.function(exchange.HAS_ENDED, first.ctypes.data, 1, 0) == 1
    first[HEAD.announced] = first[HEAD.found] = 0  # as ``repeat`` does it
    peer = exchange.ORDER + 4 + PEER.num_words
    assert code.function(exchange.LOOK, first.ctypes.data, 0, 0) == exchange.PENDING
    assert first[HEAD.found] == 0
    assert code.function(exchange.HAS_ENDED, first.ctypes.data, 1, 0) == 0  # of the next one the peer is needed
    # The operation fails before it is announced: the mark is in its own entry, and not in that of the one before.
    entry, old = (host.memories[0][BOARD.entry(number) :][: exchange.ENTRY_BYTES].view(np.int64) for number in (6, 5))
    code.function(exchange.MARK_FAILED, first.ctypes.data, ITERATION + 1, entry.ctypes.data)
    code.function(exchange.RESTART, first.ctypes.data, ITERATION + 1, entry.ctypes.data)
    assert entry[ENTRY.failed // 8] == entry[ENTRY.operation // 8] != 0
    assert old[ENTRY.failed // 8] == 0
    assert first[peer + PEER.entry] == 0  # the peer has announced no such operation


def test_of_two_threads_that_look_at_the_same_time_the_greater_number_stays():
    host, tensor, code = Host(3, 0), np.ones(4, np.float32), exchange.load()
    block, _sums = host.block(0, tensor, chains(3), whole=True)
    block[HEAD.address], block[HEAD.announced] = block.ctypes.data, 1
    block[HEAD.found] = 2  # another thread has found both peers, which this one does not see yet
    assert code.function(exchange.LOOK, block.ctypes.data, 0, 0) == exchange.PENDING
    assert block[HEAD.found] == 2
