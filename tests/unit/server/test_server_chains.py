"""Which servers hold a shard, what they pass on to each other, and who gets a shard from whom."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from totalreduce.foundation.errors import ProtocolError, RecoveryError
from totalreduce.server.client import Client
from totalreduce.server.clocks import FINISHED, Bounded, Consistency, Eventual, Sequential
from totalreduce.server.handover import Plan, Standing
from totalreduce.server.layout import Layout
from totalreduce.server.messages import Form, Header, Kind, Message, Spec, mark_of
from totalreduce.server.optimizers import Adam
from totalreduce.server.placement import chains_of
from totalreduce.server.requests import Call
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard
from totalreduce.server.table import Table

SPEC = Spec(100, 1, np.dtype(np.float32), table=5)
LAYOUT = Layout(100, [0])


# ---------------------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 8])
def test_all_servers_head_equally_many_shards(num_servers: int) -> None:
    servers = [3 * index for index in range(num_servers)]
    chains = chains_of(range(4 * num_servers), servers, servers, 2)
    assert sorted(chain[0] for chain in chains.values()) == sorted(servers * 4)
    assert all(len(set(chain)) == min(2, num_servers) for chain in chains.values())


def test_a_lost_server_is_replaced_by_those_behind_it_and_nothing_else_moves() -> None:
    servers, shards = list(range(6)), range(60)
    before = chains_of(shards, servers, servers, 2)
    after = chains_of(shards, servers, [0, 1, 2, 4, 5], 2)
    heirs = set()
    for shard in shards:
        if 3 not in before[shard]:
            assert after[shard] == before[shard]
        elif before[shard][0] == 3:
            assert after[shard][0] == before[shard][1]
            heirs.add(after[shard][0])
    assert len(heirs) >= 4  # the shards of a lost server are spread
    assert chains_of(shards, servers, [], 2)[0] == ()


# -------------------------------------------------------------------------------------------------------------- chains


class Chain:
    """A shard that three servers hold; their messages wait until they are delivered."""

    def __init__(self, rule: Consistency | None = None) -> None:
        self.servers = [Server(seat) for seat in range(3)]
        for server in self.servers:
            table = Table(LAYOUT, 0, width=1, dtype=SPEC.dtype, optimizer=Adam(0.1))
            shard = Shard(server.rank, table, SPEC, rule or Eventual(), 2)
            server.begin_epoch({0: (0, 1, 2)}, {0: shard})
        self.clients = [Client(worker, LAYOUT, SPEC, {0: 0}) for worker in (0, 1)]
        self.between: list[tuple[int, int, Message]] = []

    def send(self, worker: int) -> None:
        for _, message in self.clients[worker].outgoing():
            self.between += [(0, *sent) for sent in self.servers[0].take(worker, message)]

    def deliver(self, count: int = 1) -> None:
        """Deliver all answers, and the next messages between servers."""
        while True:
            for source, target, message in [each for each in self.between if is_answer(each[2])]:
                self.clients[target].answer(source, message)
            self.between = [each for each in self.between if not is_answer(each[2])]
            if not self.between or not count:
                return
            count -= 1
            source, target, message = self.between.pop(0)
            self.between += [(target, *sent) for sent in self.servers[target].take(source, message)]

    def tables(self) -> list[bytes]:
        return [server.shards[0].table.values.tobytes() for server in self.servers]


def is_answer(message: Message) -> bool:
    return not (message.header.kind.is_request or message.header.kind is Kind.REPLICATED)


def test_a_push_is_done_when_the_whole_chain_has_carried_it_out() -> None:
    chain = Chain()
    client, out = chain.clients[0], np.zeros(100, np.float32)
    push = client.on_range(Kind.PUSH, 0, 100, np.arange(100, dtype=np.float32), None)
    pull = client.on_range(Kind.PULL, 0, 100, None, out)
    chain.send(0)
    for confirmed in range(4):  # to the second server, to the third one, and back
        chain.deliver(0)
        assert pull.is_done  # a pull is answered by the head alone
        assert not push.is_done, confirmed
        chain.deliver(1)
    chain.deliver(0)
    assert push.is_done
    assert out[5] != 0
    assert len(set(chain.tables())) == 1


def test_requests_are_carried_out_in_the_same_order_and_lists_are_passed_on_once() -> None:
    chain, keys = Chain(), np.array([3, 50, 99])
    calls = []
    for step in range(3):
        for worker, client in enumerate(chain.clients):
            values = np.full(3, worker + step + 1, np.float32)
            calls.append(client.on_keys(Kind.PUSH, keys, values, None))
            chain.send(worker)
    passed = [message.header.form for _, _, message in chain.between]
    assert passed == [Form.LIST, *[Form.DIGEST] * 5]
    chain.deliver(100)
    assert all(call.is_done for call in calls)
    assert len(set(chain.tables())) == 1
    assert [server.version for server in chain.servers] == [6, 0, 0]  # of shards that they head


def test_a_request_that_comes_again_waits_for_the_chain_too() -> None:
    chain = Chain()
    client = chain.clients[0]
    call = client.on_keys(Kind.PUSH, np.array([3]), np.ones(1, np.float32), None)
    chain.send(0)
    client.resend(0)
    chain.send(0)
    assert [target for _, target, _ in chain.between] == [1]
    chain.deliver(100)
    assert call.is_done
    assert chain.servers[0].version == 1


def test_messages_that_no_correct_rank_sends() -> None:
    chain = Chain()
    push = Message(
        Header(Kind.PUSH, Form.RANGE, mark=0, number=0, end=100, value_bytes=400), None, np.ones(100, np.float32)
    )
    passed_on = replace(push, header=replace(push.header, origin=0))
    wrong = [
        (1, 0, push, "of which rank 1 is not the head"),
        (0, 1, passed_on, "rank 1 passes on a change of shard 0, and is not before rank 0"),
        (1, 2, passed_on, "rank 2 passes on a change of shard 0, and is not before rank 1"),
        (1, 0, replace(push, header=replace(push.header, shard=7)), "about shard 7, which this rank has not"),
        (0, 1, Message(Header(Kind.REPLICATED, origin=0, mark=4)), "confirms a change that was not passed on"),
        (1, 0, replace(push, header=replace(push.header, origin=0, form=Form.DIGEST, end=1)), "cannot be carried out"),
        (1, 0, replace(push, header=replace(push.header, origin=9)), "worker 9 of 2"),
    ]
    for target, source, message, text in wrong:
        with pytest.raises(ProtocolError, match=text):
            chain.servers[target].take(source, message)
    with pytest.raises(ProtocolError, match="worker 9 of 2"):
        chain.servers[0].take(9, push)
    assert all(not server.shards[0].table.values.any() for server in chain.servers)


def test_a_step_ends_when_all_earlier_requests_were_answered() -> None:
    """With ``steps_are_atomic``: else one shard could know of the end of a step, and another lack its pushes."""
    layout = Layout(100, [0, 1])
    client = Client(0, layout, SPEC, {0: 0, 1: 1}, steps_are_atomic=True)
    client.on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None)
    client.advance()
    client.on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None)
    sent = client.outgoing()
    assert [message.header.kind for _, message in sent] == [Kind.PUSH, Kind.PUSH]
    for shard, message in sent:
        assert client.outgoing() == []
        client.answer(shard, Message(Header(Kind.DONE, shard=shard, number=message.header.number)))
    kinds = [message.header.kind for _, message in client.outgoing()]
    assert kinds == [Kind.CLOCK, Kind.PUSH, Kind.CLOCK, Kind.PUSH]


def test_the_state_of_a_shard_goes_over_with_what_waits_for_the_end_of_the_step() -> None:
    chain = Chain(Sequential(buffer_bytes=1000))
    for worker, client in enumerate(chain.clients):
        client.on_keys(Kind.PUSH, np.arange(40), np.full(40, worker + 1, np.float32), None)
        client.on_range(Kind.PUSH, 5, 65, np.full(60, worker + 3, np.float32), None)
        chain.send(worker)
        refused = client.on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None)
        chain.send(worker)
        chain.deliver(100)
        assert refused.error is not None
    old = chain.servers[0].shards[0]
    table = Table(LAYOUT, 0, width=1, dtype=SPEC.dtype, optimizer=Adam(0.1))
    new = Shard(1, table, SPEC, Sequential(buffer_bytes=1000), 2)
    new.load_state(copy.deepcopy(old.state()))
    for shard in (old, new):
        assert not shard.table.values.any()
        shard.settle([1, 1])
        assert shard.all_clocks == [1, 1]
    assert old.table.values.any()
    assert new.table.values.tobytes() == old.table.values.tobytes() == chain_end(chain)
    with pytest.raises(ProtocolError, match="another shape or type"):
        new.load_state({**old.state(), "values": np.zeros(7, np.float32)})


def chain_end(chain: Chain) -> bytes:
    """End the step on the last server of the chain, too."""
    chain.servers[2].shards[0].settle([1, 1])
    return chain.tables()[2]


# ------------------------------------------------------------------------------------------------------------ handover


def standing(seat: int, epoch: int, *, base: int = 0, ready: bool = True, **places: dict[int, int]) -> Standing:
    """``places``: by the name of a shard (``s0``): by epoch, the place."""
    shards = {int(name[1:]): where for name, where in places.items()}
    return Standing((seat, 0), epoch, base, ready, ((0, 0), (1, 0), (2, 0)), shards)


def test_the_source_is_the_first_of_the_old_chain_that_is_left() -> None:
    standings = [standing(1, 4, s0={4: 1}, s1={4: 0}), standing(2, 4, s0={4: 2}), Standing((0, 1))]
    plan = Plan.make(5, standings, {0: (0, 1, 2), 1: (1, 2)})
    assert plan.base == 4
    assert (plan.handovers[0].source, plan.handovers[0].behind, plan.handovers[0].fresh) == (1, (2,), (0,))
    assert (plan.handovers[1].source, plan.handovers[1].behind, plan.handovers[1].fresh) == (1, (), (2,))


def test_an_epoch_in_which_a_member_was_not_ready_is_void() -> None:
    standings = [
        standing(0, 5, base=4, s0={4: 1, 5: 0}),
        standing(1, 5, base=4, ready=False, s0={4: 0}),
        standing(2, 5, base=4),
    ]
    plan = Plan.make(6, standings, {0: (0, 1)})
    assert (plan.base, plan.handovers[0].source) == (4, 1)
    # The member that was not ready is lost. The epoch may have served requests, as far as the others know.
    plan = Plan.make(6, [standings[0], standings[2]], {0: (0, 2)})
    assert (plan.base, plan.handovers[0].source, plan.handovers[0].fresh) == (5, 0, (2,))
    # A process that was no member of the epoch says nothing about it.
    assert Plan.make(6, [standings[0], standings[2], Standing((1, 1))], {0: (0,)}).base == 5


def test_a_job_that_has_not_begun_makes_its_shards() -> None:
    plan = Plan.make(1, [Standing((0, 0)), Standing((1, 0))], {0: (1, 0)})
    assert (plan.base, plan.handovers[0].source) == (0, None)
    void = Plan.make(2, [standing(0, 1, s0={1: 0}), standing(1, 1, ready=False)], {0: (0,)})
    assert void.base == 0


def test_lost_shards_are_an_error_and_not_a_new_begin() -> None:
    with pytest.raises(RecoveryError, match="all servers of 1 of 2 shards are lost"):
        Plan.make(5, [standing(0, 4, s0={4: 0}), Standing((1, 1))], {0: (0, 1), 1: (1, 0)})
    with pytest.raises(RecoveryError, match="lost"):
        Plan.make(5, [standing(0, 4)], {0: ()})


def test_a_standing_comes_back() -> None:
    one = standing(1, 4, s3={4: 1})
    assert Standing.read(one.describe()) == one


def test_pulls_wait_for_the_worker_and_meetings_for_all() -> None:
    chain = Chain(Bounded(1))
    fast, slow = chain.clients
    fast.advance()
    pull = fast.on_range(Kind.PULL, 0, 1, None, np.zeros(1, np.float32))
    meeting = fast.meet()
    chain.send(0)
    chain.deliver(100)
    assert pull.is_done
    assert not meeting.is_done
    assert fast.slow_workers() == {1: 0}
    slow.advance()
    chain.send(1)
    chain.deliver(100)
    assert meeting.is_done


def test_a_worker_that_is_run_again_pushes_before_its_steps_what_counts_already() -> None:
    """The mark is that of the first step, in which the lost process has pushed it; the step's own pushes begin anew."""
    first, again = (Client(0, LAYOUT, SPEC, {0: 0}) for _ in range(2))
    ones = np.ones(100, np.float32)
    marks = {}
    for name, client, clock in (("first", first, 0), ("again", again, 2)):
        client.begin_epoch({0: 0}, clock)
        client.on_range(Kind.PUSH, 0, 100, ones, None)
        client.begin_steps()
        client.on_range(Kind.PUSH, 0, 100, ones, None)
        marks[name] = [message.header.mark for _, message in client.outgoing()]
    assert marks == {"first": [mark_of(0, 0), mark_of(0, 1)], "again": [mark_of(0, 0), mark_of(2, 0)]}


def test_a_process_in_place_of_a_worker_that_had_finished_changes_nothing() -> None:
    chain = Chain(Bounded(0))
    worker = chain.clients[0]
    chain.servers[0].shards[0].settle([FINISHED, 0])
    worker.begin_epoch({0: 0}, FINISHED)
    out, ones = np.full(100, 7, np.float32), np.ones(100, np.float32)
    assert worker.on_range(Kind.PUSH, 0, 100, ones, None).is_done
    assert worker.advance().is_done
    calls = [worker.on_range(Kind.PUSH_PULL, 0, 100, ones, out), worker.meet(), worker.finish()]
    chain.send(0)
    chain.deliver(100)
    assert all(call.is_done for call in calls)
    assert not out.any()


@pytest.mark.parametrize(("num_shards", "of_each"), [(1, 16), (4, 4), (8, 2), (16, 1), (32, 1)])
def test_shards_have_equal_shares_of_the_bytes_under_way(num_shards: int, of_each: int) -> None:
    spec = Spec(1 << 24, 1, np.dtype(np.float32))
    client = Client(0, Layout(spec.num_keys, range(num_shards)), spec, dict.fromkeys(range(num_shards), 0))
    client.on_range(Kind.PULL, 0, spec.num_keys, None, np.empty(spec.num_keys, np.float32))
    sent = Counter(message.header.shard for _, message in client.outgoing())
    # 64 MiB in all are asked for, in requests of 512 KiB; 8 MiB are under way, and at least one request to each shard.
    assert sent == dict.fromkeys(range(num_shards), of_each)
    assert all(len(queue.unsent) == 128 // num_shards - of_each for queue in client._queues.values())


@pytest.mark.parametrize("steps_are_atomic", [False, True])
def test_the_last_shard_has_all_bytes_under_way(steps_are_atomic: bool) -> None:
    """Although the end of the step waits, for the other shards too, until everything else was answered."""
    spec, layout = Spec(1 << 24, 1, np.dtype(np.float32)), Layout(1 << 24, range(2))
    client = Client(0, layout, spec, {0: 0, 1: 0}, steps_are_atomic=steps_are_atomic)
    client.on_range(Kind.PULL, 0, spec.num_keys, None, np.empty(spec.num_keys, np.float32))
    if steps_are_atomic:
        client.advance()
    under_way: Counter[int] = Counter()
    while sent := client.outgoing():
        for _, message in sent:
            header = message.header
            under_way[header.shard] += 1
            if header.shard == 0:
                values = np.zeros(header.end - header.begin, np.float32)  # of a range with other shards' keys in it
                values = values[: client._queues[0].unanswered[header.number].places.count]
                answer = Header(Kind.DONE, shard=0, number=header.number, value_bytes=values.nbytes)
                client.answer(0, Message(answer, None, values))
    assert under_way == {0: 64, 1: 16}


# ----------------------------------------------------------------------------------------------------------- snapshots


def asked(client: Client) -> Call:
    return client.save(lambda mark: np.frombuffer(f"mark {mark}".encode(), np.uint8))


def test_a_refused_snapshot_is_refused_again_by_the_next_head() -> None:
    """The head is lost when the second server knows of one request; the other worker and a successor hear the same."""
    chain = Chain()
    for client in chain.clients:
        client.advance()
    for worker in (0, 1):
        chain.send(worker)
    chain.deliver(20)
    first, other = (asked(client) for client in chain.clients)
    for worker in (0, 1):
        chain.send(worker)
    chain.deliver(1)  # the first worker's refusal comes to the second server, and no further
    assert not first.is_done
    new = chain.servers[1]
    state = copy.deepcopy(new.shards[0].state())
    shard = Shard(1, new.shards[0].table, SPEC, Eventual(), 2)
    shard.load_state(state)
    new.begin_epoch({0: (1,)}, {0: shard})
    successor = Client(0, LAYOUT, SPEC, {0: 1})
    successor.begin_epoch({0: 1}, 1)
    again = asked(successor)
    chain.clients[1].begin_epoch({0: 1}, 1)
    for worker, client in ((0, successor), (1, chain.clients[1])):
        for _, message in client.outgoing():
            for target, answer in new.take(worker, message):
                (successor, chain.clients[1])[target].answer(1, answer)
    for call in (again, other):
        assert call.is_done
        assert "writes no snapshots" in str(call.error)


def test_a_process_in_the_place_of_a_finished_worker_has_nothing_to_save() -> None:
    client = Client(0, LAYOUT, SPEC, {0: 0})
    client.begin_epoch({0: 0}, FINISHED)
    assert asked(client).is_done
    assert client.outgoing() == []
