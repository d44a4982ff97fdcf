"""Workers and servers of a parameter server in virtual time: delays, losses, and what every pull must have seen."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.foundation.errors import RefusedError
from totalreduce.server.client import Client
from totalreduce.server.clocks import FINISHED, Consistency
from totalreduce.server.handover import Holdings, Standing
from totalreduce.server.layout import Layout
from totalreduce.server.messages import Kind, Message, Spec
from totalreduce.server.optimizers import Optimizer, Sum
from totalreduce.server.placement import chains_of
from totalreduce.server.requests import Call, PushOptions
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard
from totalreduce.server.table import Table

NUM_KEYS = 40
HELD = PushOptions(is_held=True)


class ProcessLost(Exception):
    """A process is lost while an epoch begins."""


class Process:
    """One process: a worker, a server, or both."""

    def __init__(self, world: World, seat: int, incarnation: int) -> None:
        self.seat, self.incarnation = seat, incarnation
        self.server = Server(seat)
        self.holdings = Holdings((seat, incarnation), self.server, world.spec, world.make_shard(seat))
        self.client: Client | None = None


class World:
    """Workers that pull, push and go on, and their servers.

    A worker pushes ones into the column of its rank, so that a pull shows which pushes of which worker it has seen. A
    worker that is run again makes the same calls in each step.
    ``lost``: the share of the messages that is lost; a worker sends again what was not answered for some time.
    ``codec``: of pushes to ranges; then only sums in the end are compared, with what the workers have not sent.
    ``crashes``: after how many events which seats are lost.
    ``begin_crashes``: in which step of the begin of an epoch, counted in all epochs, which seat is lost.
    ``replaces``: whether the next epoch waits for a process in place of the lost one, or begins without it.
    ``arrivals``: after how many events which workers come that were not there when the job began.
    ``saves``: the steps at whose begin the workers save.
    ``holds``: whether workers withdraw a push in some steps, and hold another one until the step ends.
    """

    def __init__(
        self,
        rule: Consistency,
        seed: int,
        *,
        num_workers: int = 3,
        servers: tuple[int, ...] = (0, 1),
        steps: int = 5,
        lost: float = 0.0,
        optimizer: Optimizer | None = None,
        fractions: bool = False,
        codec: Codec | None = None,
        shards: int | None = None,
        replicas: int = 1,
        crashes: dict[int, tuple[int, ...]] | None = None,
        begin_crashes: dict[int, int] | None = None,
        replaces: bool = True,
        arrivals: dict[int, int] | None = None,
        saves: tuple[int, ...] = (),
        holds: bool = False,
    ) -> None:
        self.rule, self.seed, self.random, self.steps, self.lost = rule, seed, Random(seed), steps, lost
        self.num_workers, self.fractions, self.replicas = num_workers, fractions, replicas
        self.optimizer, self.seats = optimizer or Sum(), servers
        self.layout = Layout(NUM_KEYS, range(len(servers) if shards is None else shards))
        self.spec = Spec(NUM_KEYS, num_workers, np.dtype(np.float32 if codec else np.float64), codec)
        self.crashes, self.begin_crashes, self.replaces = dict(crashes or {}), dict(begin_crashes or {}), replaces
        self.arrivals = dict(arrivals or {})
        self.to_come = set(self.arrivals.values())
        self.is_safe = bool(self.crashes or self.begin_crashes or self.arrivals)
        self.incarnations = dict.fromkeys(sorted({*range(num_workers), *servers}), 0)
        self.processes = {seat: Process(self, seat, 0) for seat in self.incarnations if seat not in self.to_come}
        self.saves, self.holds = saves, holds
        #: By step and shard: the values that were written.
        self.saved: dict[int, dict[int, np.ndarray]] = {}
        #: By step: of each shard, the token with which it was written last.
        self.tokens: dict[int, dict[int, str]] = {}
        self.factor = num_workers if rule.describe().get("combine") == "mean" else 1
        self.plants: list[Callable[[Shard], None]] = []
        #: By worker and step: how often each key was pushed before this step.
        self.pushed = [[np.zeros(NUM_KEYS)] for _ in range(num_workers)]
        self.events: list[tuple[float, int, object]] = []
        self.order, self.now, self.num_events, self.stages = 0, 0.0, 0, 0
        self.free_at: dict[tuple[int, int], float] = {}
        self.cut: set[tuple[int, int]] = set()
        self.violations: list[str] = []
        self.pulls: list[np.ndarray] = []
        self.refused = self.epoch = self.losses = 0
        self.finished: set[int] = set()
        self.absent: set[int] = set()  # lost, and the next epoch has not begun
        self.waiting: dict[int, tuple[Iterator[Call | float], Call]] = {}
        choose = Random(seed % 7)  # few lists of keys, so that digests are used
        self.lists = [np.array(sorted(choose.sample(range(NUM_KEYS), choose.randint(1, 20)))) for _ in range(4)]
        self.begin_epoch()

    @property
    def shards_of_layout(self) -> list[int]:
        return sorted({int(shard) for shard in self.layout.owners})

    @property
    def clients(self) -> list[Client]:
        return [self.processes[worker].client for worker in range(self.num_workers) if worker not in self.to_come]

    @property
    def shards(self) -> dict[int, Shard]:
        """The shards as their heads have them."""
        return {shard: self.processes[head].server.shards[shard] for shard, head in self.heads.items()}

    def table_of(self, shard: int, optimizer: Optimizer) -> Table:
        return Table(self.layout, shard, width=self.num_workers, dtype=self.spec.dtype, optimizer=optimizer)

    def make_shard(self, seat: int) -> Callable[[int], Shard]:
        def make(number: int, _begins: bool = True) -> Shard:
            def write(note: str, clock: int, table: Table) -> None:
                described, token = note.split(", token ")
                assert described == f"step {clock}"
                self.tokens.setdefault(clock, {})[number] = token
                self.saved.setdefault(clock, {})[number] = table.values.copy()

            table = self.table_of(number, self.optimizer)
            shard = Shard(seat, table, self.spec, self.rule, self.num_workers, write=write)
            for plant in self.plants:
                plant(shard)
            return shard

        return make

    def at(self, delay: float, event: object) -> None:
        heapq.heappush(self.events, (self.now + delay, self.order, event))
        self.order += 1

    def run(self) -> World:
        while self.events and not (self.all_finished and self.quiet() and not self.absent):
            self.now, _, event = heapq.heappop(self.events)
            assert self.now < 10_000, "the workers do not come to an end"
            self.num_events += 1
            getattr(self, f"on_{event[0]}")(*event[1:])
            if event[0] == "message":
                self.watch_clocks()
            for seat in self.crashes.pop(self.num_events, ()):
                self.lose(seat)
            if self.num_events in self.arrivals:
                self.come(self.arrivals.pop(self.num_events))
        assert self.all_finished, f"{self.finished} of {self.num_workers} workers have finished"
        return self

    @property
    def all_finished(self) -> bool:
        return len(self.finished | self.to_come) == self.num_workers

    def quiet(self) -> bool:
        idle = all(client is None or not client.awaited_servers for client in self.clients)
        return idle and all(process.server.is_finished for process in self.processes.values())

    def watch_clocks(self) -> None:
        """The clocks of the heads never go back while their epoch lasts."""
        if self.absent:
            return
        for number, shard in self.shards.items():
            clocks = np.array(shard.all_clocks)
            if (clocks < self.clocks_seen[number]).any():
                self.violations.append("a clock went back")
            self.clocks_seen[number] = clocks

    # -------------------------------------------------------------------------------------------------------- epochs

    def lose(self, seat: int) -> None:
        """End a process now; the others notice it later."""
        if seat in self.absent | self.to_come:
            return
        self.losses += 1
        self.absent.add(seat)
        self.waiting.pop(seat, None)
        # To some of the others, nothing of what is under way arrives.
        self.cut |= {(seat, other) for other in self.processes if self.random.random() < 0.5}
        self.at(self.random.random(), ("notice", self.epoch))

    def come(self, seat: int) -> None:
        """Have a process join that was not there when the job began."""
        self.to_come.remove(seat)
        self.processes[seat] = Process(self, seat, 0)
        self.begin_epoch()

    def on_notice(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.begin_epoch()

    def on_join(self, epoch: int) -> None:
        """With ``replaces=False``: processes that were started again come to the others."""
        if epoch == self.epoch:
            self.begin_epoch(joins=True)

    def begin_epoch(self, *, joins: bool = False) -> None:
        """Have the living processes, and new ones, form the next epoch; again if one is lost meanwhile."""
        while True:
            self.epoch += 1
            if self.replaces or joins or self.epoch == 1:
                for seat in self.absent:
                    self.incarnations[seat] += 1
                    self.processes[seat] = Process(self, seat, self.incarnations[seat])
                self.absent = set()
            members = {seat: each for seat, each in self.processes.items() if seat not in self.absent}
            try:
                self.enter(members)
            except ProcessLost:
                continue
            break
        self.free_at, self.cut = {}, set()
        # A clock that the lost head alone has seen may be the earlier one again: the worker sends it once more.
        self.clocks_seen = {number: np.array(shard.all_clocks) for number, shard in self.shards.items()}
        for process in members.values():
            self.begin_client(process)
        for seat in sorted(members):
            if seat < self.num_workers:
                if process_has_no_program(self, seat):
                    self.start_program(seat)
                self.flush(seat)
        if self.absent:
            self.at(2 * self.random.random(), ("join", self.epoch))

    def begin_client(self, process: Process) -> None:
        seat = process.seat
        if seat >= self.num_workers:
            return
        if process.client is None:
            process.client = Client(seat, self.layout, self.spec, self.heads, steps_are_atomic=self.is_safe)
        process.client.begin_epoch(self.heads, self.worker_clocks[seat])

    def step_of_begin(self, seat: int) -> None:
        """A step in the begin of an epoch, after which a process may be lost."""
        self.stages += 1
        lost = self.begin_crashes.get(self.stages)
        if lost is not None and lost not in self.absent | self.to_come:
            self.losses += 1
            self.absent.add(lost)
            self.waiting.pop(lost, None)
            raise ProcessLost(seat)

    def enter(self, members: dict[int, Process]) -> None:
        """What ``Renewal`` does, with a possible loss after each process's part of each stage."""
        everyone = sorted(members)
        standings = [Standing.read(members[seat].holdings.standing().describe()) for seat in everyone]
        chains = chains_of(self.shards_of_layout, self.seats, everyone, self.replicas)
        names = tuple((seat, members[seat].incarnation) for seat in everyone)
        for seat in everyone:
            plan = members[seat].holdings.plan(self.epoch, names, standings, chains)
            self.step_of_begin(seat)
        for shard, handover in plan.handovers.items():
            for seat in handover.behind:
                changes = members[handover.source].holdings.unconfirmed(shard)
                members[seat].holdings.catch_up(shard, [tuple(copied(part) for part in each) for each in changes])
                self.step_of_begin(seat)
        found = [each for seat in everyone for each in members[seat].holdings.clocks()]
        for seat in everyone:
            self.worker_clocks = members[seat].holdings.settle(found)
            self.step_of_begin(seat)
        for shard, handover in plan.handovers.items():
            for seat in handover.fresh:
                state = members[handover.source].holdings.state(shard)
                members[seat].holdings.accept(shard, copied(state))
                self.step_of_begin(seat)
        for seat in everyone:
            members[seat].holdings.get_ready()
            self.step_of_begin(seat)
        self.heads = {shard: chain[0] for shard, chain in plan.chains.items()}
        serving: set[int] = set()
        try:
            for seat in everyone:
                members[seat].holdings.serve()
                serving.add(seat)
                self.step_of_begin(seat)
        except ProcessLost:
            # Those that serve already may carry out requests of each other, which nobody confirms.
            for seat in serving - self.absent:
                self.begin_client(members[seat])
                if members[seat].client is not None:
                    for head, message in members[seat].client.outgoing():
                        if head in serving and head not in self.absent:
                            members[head].server.take(seat, copied_message(self.spec, message))
            raise

    # ------------------------------------------------------------------------------------------------------- workers

    def start_program(self, worker: int) -> None:
        clock = min(self.processes[worker].client.clock, self.steps)
        is_rerun = self.incarnations[worker] > 0
        del self.pushed[worker][clock + 1 :]
        self.pushed[worker] += [np.zeros(NUM_KEYS)] * (clock + 1 - len(self.pushed[worker]))  # of one that has come
        self.at(self.random.random(), ("step", worker, self.incarnations[worker], self.program(worker, is_rerun), None))
        if self.lost:
            self.at(3.0, ("resend", worker))

    def program(self, worker: int, is_rerun: bool) -> Iterator[Call | float]:
        """A worker: yields calls that it waits for, and times that it takes to compute."""
        client = self.processes[worker].client
        client.begin_steps()
        slow = 4.0 if worker == self.num_workers - 1 else 1.0
        for step in range(min(client.clock, self.steps), self.steps):
            if step in self.saves:
                call = client.save(
                    lambda mark, step=step: np.frombuffer(
                        f"step {step}, token {self.token_of(worker, mark)}".encode(), np.uint8
                    )
                )
                if worker % 2:  # others go on at once
                    yield call
            random = Random(f"{self.seed}, worker {worker}, step {step}")
            out = np.full((NUM_KEYS, self.num_workers), np.nan, self.spec.dtype)
            keys = np.arange(NUM_KEYS)
            if random.random() < 0.5:
                yield client.on_range(Kind.PULL, 0, NUM_KEYS, None, out)
            else:
                keys = random.choice(self.lists)
                out = out[: len(keys)].copy()
                yield client.on_keys(Kind.PULL, keys, None, out)
            self.pulls.append(out)
            self.check_pull(worker, step, keys, out)
            yield random.random() * slow
            counts = self.pushed[worker][step].copy()
            if self.holds and random.random() < 0.7:
                everything = np.zeros((NUM_KEYS, self.num_workers), self.spec.dtype)
                everything[:, worker] = 100.0
                client.on_range(Kind.PUSH, 0, NUM_KEYS, everything, None, HELD)
                if random.random() < 0.5:
                    yield random.random()
                client.withdraw()
                keys = random.choice(self.lists)
                held = np.zeros((len(keys), self.num_workers), self.spec.dtype)
                held[:, worker] = 1.0
                client.on_keys(Kind.PUSH, keys, held, None, HELD)
                counts[keys] += 1
            for _ in range(random.randint(1, 3)):
                begin, end = sorted(random.sample(range(NUM_KEYS + 1), 2))
                is_range = random.random() < 0.3
                keys = np.arange(begin, end) if is_range else random.choice(self.lists)
                values = np.zeros((len(keys), self.num_workers), self.spec.dtype)
                values[:, worker] = random.random() if self.fractions else 1.0
                if self.fractions:  # all columns, so that the order of additions shows
                    values[:] = values[:, worker : worker + 1]
                out = np.full_like(values, np.nan) if random.random() < 0.3 else None
                kind = Kind.PUSH if out is None else Kind.PUSH_PULL
                if is_range:
                    call = client.on_range(kind, begin, end, values, out)
                else:
                    call = client.on_keys(kind, keys, values, out)
                if out is not None or random.random() < 0.3 or self.may_refuse:
                    yield call
                if call.error is not None:
                    self.refused += 1
                    continue
                counts[keys] += 1
                if out is not None:
                    self.check_pull(worker, step, keys, out, None if is_rerun else counts)
            self.pushed[worker].append(counts)
            client.advance()
            if random.random() < 0.2:
                yield client.meet()
                self.check_meeting(worker, step)
        yield client.finish()
        self.finished.add(worker)

    def token_of(self, _worker: int, mark: int) -> str:
        """The token of a snapshot, which a worker that is run again must compute again."""
        return str(mark)

    @property
    def may_refuse(self) -> bool:
        """A refusal is of a request. With one server each call is one, so none is refused in part."""
        return self.rule.in_steps and len(self.seats) == 1

    def check_meeting(self, worker: int, step: int) -> None:
        if any(len(history) <= step + 1 for other, history in enumerate(self.pushed) if other not in self.to_come):
            self.violations.append(f"worker {worker} has met others that have not ended step {step}")

    def check_pull(
        self, worker: int, step: int, keys: np.ndarray, out: np.ndarray, own: np.ndarray | None = None
    ) -> None:
        """Check what a pull returns; ``own``: what this worker has pushed before it, also in this step."""
        if self.fractions or self.spec.codec is not None:
            return
        if own is not None and not (self.rule.in_steps or self.holds) and (out[:, worker] != own[keys]).any():
            self.violations.append(f"worker {worker} in step {step} does not see what it has pushed before")
        bound, out = self.rule.bound, out * self.factor
        for other in range(self.num_workers):
            seen, history = out[:, other], self.pushed[other]
            least = 0 if bound is None or other in self.to_come else max(0, step - bound)
            if other == worker:
                least = step
            if len(history) <= least or (seen < history[least][keys]).any():
                self.violations.append(f"worker {worker} in step {step} has not seen step {least} of {other}")
            if self.rule.in_steps and len(history) > step and (seen != history[step][keys]).any():
                self.violations.append(f"worker {worker} in step {step} sees another step of {other}")

    def on_step(self, worker: int, incarnation: int, program: Iterator[Call | float], waits_for: Call | None) -> None:
        if worker in self.absent or incarnation != self.incarnations[worker]:
            return
        while waits_for is None or waits_for.is_done:
            if waits_for is not None and waits_for.error is not None and not isinstance(waits_for.error, RefusedError):
                raise waits_for.error
            waits_for = next(program, 0)
            self.flush(worker)
            if waits_for == 0:
                return
            if isinstance(waits_for, float):
                self.at(waits_for, ("step", worker, incarnation, program, None))
                return
        self.waiting[worker] = program, waits_for

    def on_resend(self, worker: int) -> None:
        for shard in self.shards_of_layout:
            self.processes[worker].client.resend(shard)
        self.flush(worker)
        if not (self.all_finished and self.quiet()):
            self.at(3.0, ("resend", worker))

    # ------------------------------------------------------------------------------------------------------ messages

    def flush(self, worker: int) -> None:
        if worker not in self.absent:
            for server, message in self.processes[worker].client.outgoing():
                self.send(worker, server, message)

    def send(self, source: int, target: int, message: Message) -> None:
        """One pair's messages stay in order; with ``lost``, any of them may be lost."""
        if self.random.random() < self.lost:
            return
        pair = (source, target)
        arrival = max(self.free_at.get(pair, 0.0), self.now + self.random.random())
        self.free_at[pair] = arrival
        self.at(arrival - self.now, ("message", self.epoch, source, target, copied_message(self.spec, message)))

    def on_message(self, epoch: int, source: int, target: int, message: Message) -> None:
        if epoch != self.epoch or target in self.absent or (source, target) in self.cut:
            return
        process, kind = self.processes[target], message.header.kind
        if kind.is_request or kind is Kind.REPLICATED:
            for seat, out in process.server.take(source, message):
                self.send(target, seat, out)
            return
        process.client.answer(source, message)
        self.flush(target)
        if target in self.waiting and self.waiting[target][1].is_done:
            self.on_step(target, process.incarnation, *self.waiting.pop(target))

    # --------------------------------------------------------------------------------------------------------- ends

    def values(self) -> np.ndarray:
        """The table in the end."""
        out = np.zeros((NUM_KEYS, self.num_workers))
        for number, shard in self.shards.items():
            for key in range(NUM_KEYS):
                rows = shard.table.find_range(key, key + 1)
                if rows.count:
                    assert self.layout.owners[np.searchsorted(self.layout.begins, key, side="right") - 1] == number
                    out[key] = shard.table.pull(rows)
        return out

    def wrong_sums(self) -> bool:
        """Whether a push was lost or applied twice."""
        pushed, found = np.stack([history[-1] for history in self.pushed], axis=1), self.values() * self.factor
        if self.spec.codec is None:
            return bool((found != pushed).any())
        found += sum(client._residual.values for client in self.clients)
        return bool((np.abs(found - pushed) > 1e-3).any())

    def wrong_snapshots(self) -> list[str]:
        """The snapshots that lack a push of an earlier step, have one of a later step, lack a shard, or are torn."""
        wrong = []
        for step in self.saves:
            pushed = np.stack([history[step] for history in self.pushed], axis=1)
            if sorted(self.saved.get(step, {})) != self.shards_of_layout:
                wrong.append(f"step {step}, shards {sorted(self.saved.get(step, {}))}")
                continue
            if len(set(self.tokens[step].values())) > 1:
                wrong.append(f"step {step}, tokens {self.tokens[step]}")
            for number, values in self.saved[step].items():
                table = self.table_of(number, Sum())
                keys = table.keys_at(np.arange(len(values) // self.num_workers))
                if (values.reshape(-1, self.num_workers) * self.factor != pushed[keys]).any():
                    wrong.append(f"step {step}, shard {number}")
        return wrong

    def wrong_replicas(self) -> list[str]:
        """The shards whose copies differ from that of the head."""
        wrong = []
        for number, head in self.shards.items():
            for seat, process in self.processes.items():
                other = process.server.shards.get(number)
                if seat in self.absent or other is None:
                    continue
                for mine, theirs in zip(
                    (head.table.values, *head.table.states), (other.table.values, *other.table.states), strict=True
                ):
                    if mine.tobytes() != theirs.tobytes():
                        wrong.append(f"shard {number} on seat {seat}")
                if head.all_clocks != other.all_clocks:
                    wrong.append(f"clocks of shard {number} on seat {seat}")
        return wrong


def process_has_no_program(world: World, seat: int) -> bool:
    """Whether the worker of a seat has just been started."""
    process = world.processes[seat]
    has_none = not hasattr(process, "has_program")
    process.has_program = True
    return has_none and not (process.client.clock == FINISHED and seat in world.finished)


def copied_message(spec: Spec, message: Message) -> Message:
    header = spec.decode(spec.encode(message.header))
    return Message(header, copied(message.keys), copied(message.values))


def copied(value: object) -> object:
    """A copy of what is sent from one process to another."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value
