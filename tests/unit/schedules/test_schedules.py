"""Schedules as mathematics: every contribution arrives exactly once where it must, however the ranks interleave.

Bodies are read as late as a transport may read them (when the receiver uses them), and a receive that may be put in
place at any time is put there as soon as it is sent: the harshest reading of the contract "causally free".
"""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.partition import pipeline_pieces
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import (
    algorithms_of,
    chain,
    direct,
    dissemination,
    halving_doubling,
    hierarchical,
    program_for,
    ring,
    star,
    tree,
)
from totalreduce.schedules.actions import (
    NOTHING,
    Chunking,
    Mode,
    Program,
    Receive,
    Send,
    compile_program,
    translate,
)

WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)
#: Numbers of hosts by rank: even, uneven, interleaved, one rank per host, everybody on one.
HOSTS = (
    (0, 0, 1),
    (0, 1, 1),
    (0, 0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 1, 0, 2, 1, 0),
    (0, 0, 0, 0, 1, 1, 1, 1),
    (0, 0, 1, 1, 2, 2, 3, 3),
    (0, 1, 2),
    (5, 5, 5, 5),
    (0, 0, 0, 0, 1),
    (0,) * 6 + (1,) * 5 + (2,) * 6,
)
PLAIN = [
    (kind, algorithm)
    for kind in OpKind
    for algorithm in algorithms_of(kind)
    if kind is not OpKind.SEND_RECV and algorithm is not Algorithm.HIERARCHICAL
]
ROOTED = {OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER}
#: Nobody is done before everybody has begun. In the others a rank that only sends, or only needs the root, may be.
TOGETHER = [
    *((OpKind.ALLREDUCE, algorithm) for algorithm in algorithms_of(OpKind.ALLREDUCE)),
    (OpKind.BROADCAST, Algorithm.CHAIN),
    (OpKind.BARRIER, Algorithm.DISSEMINATION),
    (OpKind.ALLGATHER, Algorithm.RING),
    (OpKind.ALLGATHER, Algorithm.DIRECT),
    (OpKind.REDUCE_SCATTER, Algorithm.RING),
    (OpKind.REDUCE_SCATTER, Algorithm.DIRECT),
    (OpKind.ALLTOALL, Algorithm.DIRECT),
]


def roots_of(kind: OpKind, algorithm: Algorithm, world_size: int) -> range:
    rooted = kind in ROOTED or algorithm is Algorithm.STAR
    return (
        range(world_size) if rooted and world_size <= 9 else range(world_size - 1, world_size) if rooted else range(1)
    )


def programs_of(
    kind: OpKind, algorithm: Algorithm, world_size: int, root: int = 0, hosts: tuple[int, ...] = ()
) -> list[Program]:
    return [program_for(kind, algorithm, rank, world_size, root, hosts) for rank in range(world_size)]


Held = Counter[object]


class Execution:
    """One lane of one operation on all ranks; a chunk is the multiset of the contributions that it holds."""

    def __init__(self, kind: OpKind, programs: list[Program], root: int, *, widened: bool) -> None:
        """``widened``: partial sums are kept apart on all ranks, and not only where the program asks for it."""
        self.programs = programs
        size = len(programs)
        self.result = [
            [initial(kind, rank, chunk, size, root) for chunk in range(programs[rank].num_chunks)]
            for rank in range(size)
        ]
        self.partial = [
            [Counter() for _ in held] if widened or program.preserves else held
            for held, program in zip(self.result, programs, strict=True)
        ]
        self.position = [0] * size
        self.wire: dict[tuple[int, int, int], Send] = {}
        self.placed: set[tuple[int, int]] = set()  #: (rank, index) of receives that were put in place early

    def advance(self, rank: int) -> bool:
        """One action of one rank, if it can be done."""
        actions = self.programs[rank].actions
        if self.position[rank] == len(actions):
            return False
        action = actions[self.position[rank]]
        if isinstance(action, Send):
            slot = (rank, action.peer, action.step)
            assert slot not in self.wire
            self.wire[slot] = action
            self.place_early(*slot)
        elif (rank, self.position[rank]) not in self.placed:
            sent = self.wire.pop((action.peer, rank, action.step), None)
            if sent is None:
                return False
            self.receive(rank, action, sent)
        self.position[rank] += 1
        return True

    def place_early(self, source: int, target: int, step: int) -> None:
        index = self.programs[target].receives[source, step]
        action = self.programs[target].actions[index]
        assert isinstance(action, Receive)
        if action.anytime:
            self.receive(target, action, self.wire.pop((source, target, step)))
            self.placed.add((target, index))

    def receive(self, rank: int, action: Receive, sent: Send) -> None:
        assert (sent.partial, sent.span) == (action.partial, action.span)
        if self.programs[rank].chunking is Chunking.CUT:
            assert sent.chunk == action.chunk
        if action.chunk == NOTHING:
            assert sent.chunk == NOTHING
            return
        for offset in range(action.span):
            self.receive_chunk(rank, action, sent, offset)

    def receive_chunk(self, rank: int, action: Receive, sent: Send, offset: int) -> None:
        body = (self.partial if sent.partial else self.result)[action.peer][sent.chunk + offset]
        chunk = action.chunk + offset
        if action.mode is Mode.REPLACE:
            self.result[rank][chunk] = Counter(body)
            return
        mine = (self.partial if action.onto_partial else self.result)[rank][chunk]
        if action.mode is Mode.COMBINE:
            self.partial[rank][chunk] = mine + body
        else:
            self.result[rank][chunk if action.into is None else action.into + offset] = mine + body

    def run(self, seed: int) -> None:
        generator = random.Random(seed)
        ranks = list(range(len(self.programs)))
        while any(position < len(p.actions) for position, p in zip(self.position, self.programs, strict=True)):
            generator.shuffle(ranks)
            eager = generator.random() < 0.5  # one rank runs as far as it can, or all take turns
            progress = False
            for rank in ranks:
                while self.advance(rank):
                    progress = True
                    if not eager:
                        break
            assert progress, f"deadlock at {self.position}"
        assert not self.wire


def initial(kind: OpKind, rank: int, chunk: int, size: int, root: int) -> Held:
    """What a chunk holds before: contributions are named by who made them, and for whom."""
    match kind:
        case OpKind.ALLGATHER | OpKind.GATHER:
            return Counter([rank] if chunk == rank else [])
        case OpKind.SCATTER:
            return Counter([(root, chunk)] if rank == root else [])
        case OpKind.ALLTOALL:
            return Counter([(rank, chunk)] if chunk < size else [])
        case OpKind.REDUCE_SCATTER:
            return Counter([(rank, chunk)] if chunk < size else [])
        case _:
            return Counter([rank])


def check_outcome(kind: OpKind, execution: Execution, root: int) -> None:
    """Exactly what the collective promises, and nothing else has been touched."""
    size = len(execution.programs)
    everything: Held = Counter(range(size))
    for rank, held in enumerate(execution.result):
        before = [initial(kind, rank, chunk, size, root) for chunk in range(len(held))]
        match kind:
            case OpKind.ALLREDUCE:
                assert held == [everything] * len(held)
            case OpKind.BROADCAST:
                assert held == [Counter([root])]
            case OpKind.REDUCE:
                assert held == ([everything] if rank == root else before)
            case OpKind.BARRIER:
                pass
            case OpKind.ALLGATHER:
                assert held == [Counter([other]) for other in range(size)]
            case OpKind.REDUCE_SCATTER:
                assert held[:size] == before[:size]
                total = Counter((other, rank) for other in range(size)) if size > 1 else Counter()
                assert held[size:] == [total]
            case OpKind.GATHER:
                assert held == ([Counter([other]) for other in range(size)] if rank == root else before)
            case OpKind.SCATTER:
                assert held[rank] == Counter([(root, rank)])
                assert rank == root or held[:rank] + held[rank + 1 :] == before[:rank] + before[rank + 1 :]
            case OpKind.ALLTOALL:
                assert held[:size] == before[:size]
                theirs = [Counter([(other, rank)]) for other in range(size)]
                theirs[rank] = Counter()  # a rank's block for itself is copied before
                assert held[size:] == theirs


# ------------------------------------------------------------------------------------------------------------ outcomes


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "algorithm"), PLAIN, ids=lambda value: value.name.lower())
def test_every_contribution_arrives_exactly_once(
    kind: OpKind, algorithm: Algorithm, world_size: int, widened: bool
) -> None:
    for root in roots_of(kind, algorithm, world_size):
        programs = programs_of(kind, algorithm, world_size, root)
        for seed in range(6 if world_size <= 9 else 2):
            execution = Execution(kind, programs, root, widened=widened)
            execution.run(seed)
            check_outcome(kind, execution, root)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_hierarchical_allreduce_combines_every_contribution_once(hosts: tuple[int, ...], widened: bool) -> None:
    programs = programs_of(OpKind.ALLREDUCE, Algorithm.HIERARCHICAL, len(hosts), 0, hosts)
    for seed in range(10):
        execution = Execution(OpKind.ALLREDUCE, programs, 0, widened=widened)
        execution.run(seed)
        check_outcome(OpKind.ALLREDUCE, execution, 0)


@pytest.mark.parametrize("root", [0, 1])
def test_a_message_goes_from_its_sender_to_the_other(root: int) -> None:
    sender, receiver = (program_for(OpKind.SEND_RECV, Algorithm.DIRECT, rank, 2, root) for rank in (root, 1 - root))
    assert sender.actions == (Send(1 - root, 0, 0),)
    assert receiver.actions == (Receive(root, 0, 0, anytime=True),)


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "algorithm"), PLAIN, ids=lambda value: value.name.lower())
def test_what_is_sent_is_what_is_received(kind: OpKind, algorithm: Algorithm, world_size: int) -> None:
    for root in roots_of(kind, algorithm, world_size):
        check_messages(programs_of(kind, algorithm, world_size, root))


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_what_is_sent_is_what_is_received_between_hosts(hosts: tuple[int, ...]) -> None:
    check_messages(programs_of(OpKind.ALLREDUCE, Algorithm.HIERARCHICAL, len(hosts), 0, hosts))


def check_messages(programs: list[Program]) -> None:
    """Slots are used once, the two ends of every message agree, and all ranks cut the tensor alike."""
    sends: dict[tuple[int, int, int], Send] = {}
    receives: dict[tuple[int, int, int], Receive] = {}
    for rank, program in enumerate(programs):
        assert rank not in program.sources
        assert rank not in program.targets
        for index, action in enumerate(program.actions):
            slot = (rank, action.peer, action.step) if isinstance(action, Send) else (action.peer, rank, action.step)
            table = sends if isinstance(action, Send) else receives
            assert slot not in table
            table[slot] = action
            assert action.chunk == NOTHING or 0 <= action.chunk <= program.num_chunks - action.span
            assert 1 <= action.span <= program.span_max
            if isinstance(action, Receive):
                assert program.receives[action.peer, action.step] == index
        assert len(program.receives) == sum(isinstance(action, Receive) for action in program.actions)
        assert set(program.sources) == {peer for peer, _ in program.receives}
        assert set(program.targets) == {action.peer for action in program.actions if isinstance(action, Send)}
    assert sends.keys() == receives.keys()
    for slot, send in sends.items():
        receive = receives[slot]
        assert (send.partial, send.span) == (receive.partial, receive.span)
        assert (send.chunk == NOTHING) == (receive.chunk == NOTHING)
    shapes = {(p.num_chunks, p.span_max, p.chunking, p.partial_sums) for p in programs}
    assert len(shapes) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "algorithm"), PLAIN, ids=lambda value: value.name.lower())
def test_a_sum_is_finished_exactly_once(kind: OpKind, algorithm: Algorithm, world_size: int) -> None:
    """Or an average would be divided twice, or never, and half types rounded in between."""
    for root in roots_of(kind, algorithm, world_size):
        check_finishing(kind, programs_of(kind, algorithm, world_size, root))


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_a_sum_between_hosts_is_finished_exactly_once(hosts: tuple[int, ...]) -> None:
    check_finishing(OpKind.ALLREDUCE, programs_of(OpKind.ALLREDUCE, Algorithm.HIERARCHICAL, len(hosts), 0, hosts))


def check_finishing(kind: OpKind, programs: list[Program]) -> None:
    finished: Counter[int] = Counter()
    for program in programs:
        for action in program.actions:
            if isinstance(action, Receive) and action.mode is Mode.COMBINE_LAST:
                finished.update(range(action.chunk, action.chunk + action.span))
    size = len(programs)
    if size == 1 or kind not in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER):
        assert not finished
    else:
        num_chunks = size if kind is OpKind.REDUCE_SCATTER else programs[0].num_chunks
        assert finished == Counter(range(num_chunks))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm", algorithms_of(OpKind.REDUCE), ids=lambda value: value.name.lower())
def test_only_the_root_may_keep_sums_in_its_tensor(algorithm: Algorithm, world_size: int) -> None:
    for root in roots_of(OpKind.REDUCE, algorithm, world_size):
        programs = programs_of(OpKind.REDUCE, algorithm, world_size, root)
        assert [rank for rank, program in enumerate(programs) if not program.preserves] == [root]
    scattered = [
        program_for(OpKind.REDUCE_SCATTER, each, 0, world_size).preserves
        for each in algorithms_of(OpKind.REDUCE_SCATTER)
    ]
    assert scattered == [True, True]


# ---------------------------------------------------------------------------------------------------------- being done


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "algorithm"), TOGETHER, ids=lambda value: value.name.lower())
def test_nobody_is_done_before_everybody_has_begun(kind: OpKind, algorithm: Algorithm, world_size: int) -> None:
    """What makes a mismatch an error on every rank, and a barrier a barrier."""
    layouts: list[tuple[int, ...]] = [()]
    if algorithm is Algorithm.HIERARCHICAL:
        layouts = [hosts for hosts in HOSTS if len(hosts) == world_size]
    for hosts in layouts:
        for absent in range(world_size):
            programs = programs_of(kind, algorithm, world_size, world_size // 2, hosts)
            for rank in run_without(kind, programs, absent, world_size // 2):
                pytest.fail(f"rank {rank} is done without rank {absent}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (kind, algorithm)
        for kind in (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER)
        for algorithm in algorithms_of(kind)
    ],
    ids=lambda value: value.name.lower(),
)
def test_the_root_is_not_done_before_everybody_has_begun(kind: OpKind, algorithm: Algorithm, world_size: int) -> None:
    """Of a broadcast because of the consent that runs back."""
    for root in roots_of(kind, algorithm, world_size):
        for absent in range(world_size):
            programs = programs_of(kind, algorithm, world_size, root)
            assert absent == root or root not in run_without(kind, programs, absent, root)


def run_without(kind: OpKind, programs: list[Program], absent: int, root: int) -> list[int]:
    """The ranks that are done although one of them never begins."""
    execution = Execution(kind, programs, root, widened=False)
    present = [rank for rank in range(len(programs)) if rank != absent]
    moving = True
    while moving:
        moving = False
        for rank in present:
            while execution.advance(rank):
                moving = True
    return [rank for rank in present if execution.position[rank] == len(programs[rank].actions)]


def test_an_alltoall_is_throttled() -> None:
    """No rank is more than the window ahead of what it has received, and every rank uses the window."""
    world_size = 2 * direct.WINDOW + 1
    for rank in range(world_size):
        actions = program_for(OpKind.ALLTOALL, Algorithm.DIRECT, rank, world_size).actions
        ahead = list(itertools.accumulate(1 if isinstance(action, Send) else -1 for action in actions))
        assert (min(ahead), max(ahead), ahead[-1]) == (0, direct.WINDOW, 0)


# ------------------------------------------------------------------------------------------------------------- anytime


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_receives_into_what_nobody_has_touched_may_come_at_any_time(world_size: int) -> None:
    def early(kind: OpKind, algorithm: Algorithm, rank: int = 0) -> list[bool]:
        actions = program_for(kind, algorithm, rank, world_size).actions
        return [action.anytime for action in actions if isinstance(action, Receive)]

    others = world_size - 1
    assert early(OpKind.ALLTOALL, Algorithm.DIRECT) == [True] * others
    assert early(OpKind.GATHER, Algorithm.DIRECT) == [True] * others
    assert early(OpKind.ALLGATHER, Algorithm.DIRECT) == [True] * others
    assert early(OpKind.ALLREDUCE, Algorithm.DIRECT) == [False] * others + [True] * others
    assert early(OpKind.BROADCAST, Algorithm.CHAIN, rank=1)[0]
    assert not any(early(OpKind.ALLREDUCE, Algorithm.RING))


def test_what_is_used_before_may_not_come_at_any_time() -> None:
    actions = [Send(1, 0, 0), Receive(1, 0, 0), Receive(1, 1, 1), Receive(1, 2, 1), Receive(1, 3, 3, span=2)]
    actions += [Receive(1, 4, 5, Mode.COMBINE_LAST, into=6), Receive(1, 5, 6), Receive(1, 6, 2, span=2)]
    program = compile_program(iter(actions), 7, span_max=2)
    anytime = [action.anytime for action in program.actions if isinstance(action, Receive)]
    assert anytime == [False, True, False, True, False, False, False]


@pytest.mark.parametrize("anytime", [False, True])
def test_a_receive_that_says_so_wrongly_is_found(anytime: bool) -> None:
    """The tests above can see what they are for: the second message must wait until the first has been added."""
    receiver = [Receive(1, 0, 0, Mode.COMBINE_LAST), Receive(1, 1, 0, anytime=anytime)]
    programs = [compile_program(iter(receiver), 1), compile_program(iter([Send(0, 0, 0), Send(0, 1, 0)]), 1)]
    outcomes = set()
    for seed in range(20):
        execution = Execution(OpKind.ALLREDUCE, programs, 0, widened=False)
        execution.run(seed)
        outcomes.add(tuple(sorted(execution.result[0][0].elements())))
    assert outcomes == ({(1,), (1, 1)} if anytime else {(1,)})


# --------------------------------------------------------------------------------------------------------------- costs


def sent_by(kind: OpKind, algorithm: Algorithm, world_size: int, rank: int) -> float:
    """Share of the tensor (of all blocks together) that a rank sends."""
    program = program_for(kind, algorithm, rank, world_size)
    parts = program.num_chunks if program.chunking is Chunking.CUT else world_size
    return (
        sum(action.span for action in program.actions if isinstance(action, Send) and action.chunk != NOTHING) / parts
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_costs_are_what_the_programs_do(world_size: int) -> None:
    num_bytes, n = 840 * world_size, world_size

    def most_sent(kind: OpKind, algorithm: Algorithm) -> float:
        return max(sent_by(kind, algorithm, n, rank) for rank in range(n)) * num_bytes

    allreduce, rounds = OpKind.ALLREDUCE, math.ceil(math.log2(n))
    assert ring.cost(n, num_bytes).steps == 2 * (n - 1)
    assert ring.cost(n, num_bytes).bytes_sent == pytest.approx(most_sent(allreduce, Algorithm.RING))
    assert star.cost(n, num_bytes).steps == 2
    assert star.cost(n, num_bytes).bytes_sent == 2 * most_sent(allreduce, Algorithm.STAR)  # and receives before
    assert direct.cost(n, num_bytes).bytes_sent == pytest.approx(most_sent(allreduce, Algorithm.DIRECT))
    assert halving_doubling.cost(n, num_bytes).bytes_sent >= most_sent(allreduce, Algorithm.HALVING_DOUBLING) - 1e-6
    assert tree.cost(n, num_bytes, 1000).bytes_sent >= most_sent(allreduce, Algorithm.TREE) * (2 / 3)
    assert tree.cost(n, num_bytes).steps == 2 * (n.bit_length() - 1)
    assert tree.binomial_cost(n, num_bytes).steps == rounds
    assert tree.binomial_cost(n, num_bytes).bytes_sent == most_sent(OpKind.BROADCAST, Algorithm.TREE)
    assert ring.half_cost(n, num_bytes).steps == n - 1
    assert ring.half_cost(n, num_bytes).bytes_sent == pytest.approx(most_sent(OpKind.ALLGATHER, Algorithm.RING))
    assert direct.half_cost(n, num_bytes).bytes_sent == pytest.approx(most_sent(OpKind.ALLTOALL, Algorithm.DIRECT))
    assert chain.cost(n, num_bytes).steps == 2 * (n - 1)
    assert chain.cost(n, num_bytes).bytes_sent == (num_bytes * (n - 1) if n > 1 else 0)
    pieces = 1000 * n
    assert chain.cost(n, num_bytes, pieces).bytes_sent == pytest.approx(num_bytes if n > 1 else 0, rel=0.01)
    assert dissemination.cost(n, 0).steps == rounds
    assert len(program_for(OpKind.BARRIER, Algorithm.DISSEMINATION, 0, n).targets) == rounds


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_costs_of_wide_sums_are_what_the_programs_do(world_size: int) -> None:
    """Unfinished sums are twice as wide, as those of half types are."""
    num_bytes, n = 840.0 * world_size, world_size

    allreduce = OpKind.ALLREDUCE

    def most_sent(kind: OpKind, algorithm: Algorithm) -> float:
        sent = []
        for rank in range(n):
            program = program_for(kind, algorithm, rank, n)
            parts = program.num_chunks if program.chunking is Chunking.CUT else n
            sends = [action for action in program.actions if isinstance(action, Send) and action.chunk != NOTHING]
            sent.append(sum((1 + (action.partial and program.partial_sums)) * action.span for action in sends) / parts)
        return max(sent) * num_bytes

    for schedule, algorithm in ((ring, Algorithm.RING), (direct, Algorithm.DIRECT)):
        wide = schedule.cost(n, num_bytes) if schedule is direct else ring.cost(n, num_bytes, 2)
        assert wide.bytes_sent == pytest.approx(most_sent(allreduce, algorithm))
    assert ring.half_cost(n, num_bytes, 2).bytes_sent == pytest.approx(most_sent(OpKind.REDUCE_SCATTER, Algorithm.RING))
    halved = halving_doubling.cost(n, num_bytes, 2).bytes_sent
    assert halved >= most_sent(allreduce, Algorithm.HALVING_DOUBLING) - 1e-6
    assert tree.cost(n, num_bytes, 1000, 2).bytes_sent >= most_sent(allreduce, Algorithm.TREE) * (2 / 3)


@pytest.mark.parametrize(
    ("hosts", "share"), [((0, 0, 0, 0, 1, 1, 1, 1), 1.0), ((0, 0, 1, 1, 2, 2, 3, 3), 1.5), ((0, 1, 0, 1), 1.0)]
)
def test_a_hosts_link_carries_as_little_as_if_it_were_one_rank(hosts: tuple[int, ...], share: float) -> None:
    assert hierarchical.cost(hosts, 1000).bytes_sent == 1000 * share
    programs = programs_of(OpKind.ALLREDUCE, Algorithm.HIERARCHICAL, len(hosts), 0, hosts)
    crossing: Counter[int] = Counter()
    for rank, program in enumerate(programs):
        for action in program.actions:
            if isinstance(action, Send) and hosts[action.peer] != hosts[rank]:
                crossing[hosts[rank]] += action.span
    assert {count / programs[0].num_chunks for count in crossing.values()} == {share}


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_an_inner_rank_of_one_tree_is_a_leaf_of_the_other(world_size: int) -> None:
    for rank in range(world_size):
        actions = program_for(OpKind.ALLREDUCE, Algorithm.TREE, rank, world_size).actions
        children = [sum(isinstance(action, Receive) and action.step == which for action in actions) for which in (0, 1)]
        assert min(children) == 0 or world_size - 1 in (rank, (rank + 1) % world_size)
        assert max(children) <= 2


def test_pieces_of_a_chain() -> None:
    assert pipeline_pieces(2, 1 << 30, 65536) == 40
    assert pipeline_pieces(10, 1 << 30, 65536) == 320
    assert pipeline_pieces(10, 200_000, 65536) == 3
    assert pipeline_pieces(8, 16 << 20, 65536) == 110  # the root of 6 * 16 MiB / 8 KiB
    assert pipeline_pieces(8, 16 << 10, 64) == 110
    assert pipeline_pieces(10, 0, 65536) == pipeline_pieces(1, 0, 65536) == 1


# ------------------------------------------------------------------------------------------------------------ compiling


def test_ring_neighbours_only() -> None:
    program = program_for(OpKind.ALLREDUCE, Algorithm.RING, 2, 5)
    assert program.sources == (1,)
    assert program.targets == (3,)
    assert len(program.receives) == 8


@pytest.mark.parametrize("kind", [Send, Receive])
def test_a_slot_used_twice_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match=r"slot \(peer, step\) = \(1, 0\) twice"):
        compile_program(iter([kind(1, 0, 0), kind(1, 0, 1)]), 2)


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(
        ConfigurationError, match="reduce has no schedule 'ring'; there is tree, chain, direct, and auto"
    ):
        program_for(OpKind.REDUCE, Algorithm.RING, 0, 4)


@pytest.mark.parametrize("ranks", [(5, 2, 9), (0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(("kind", "algorithm"), PLAIN, ids=lambda value: value.name.lower())
def test_a_subgroups_program_is_the_same_between_other_ranks(
    kind: OpKind, algorithm: Algorithm, ranks: tuple[int, ...]
) -> None:
    for program in programs_of(kind, algorithm, 3, 1):
        translated = translate(program, ranks)
        back = {rank: place for place, rank in enumerate(ranks)}
        assert [dataclasses.replace(a, peer=back[a.peer]) for a in translated.actions] == list(program.actions)
        assert {(back[peer], step): index for (peer, step), index in translated.receives.items()} == program.receives
        assert tuple(back[peer] for peer in translated.sources) == program.sources
        assert tuple(back[peer] for peer in translated.targets) == program.targets
        same = ("num_chunks", "span_max", "chunking", "partial_sums", "preserves")
        assert all(getattr(translated, name) == getattr(program, name) for name in same)
