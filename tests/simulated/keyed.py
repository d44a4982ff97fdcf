"""Workers and servers of a parameter server in virtual time: delays, losses, and what every pull must have seen."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from random import Random

import numpy as np

from totalreduce.codecs.codec import Codec
from totalreduce.foundation.errors import RefusedError
from totalreduce.server.client import Call, Client
from totalreduce.server.clocks import Consistency
from totalreduce.server.layout import Layout
from totalreduce.server.messages import Kind, Message, Spec
from totalreduce.server.optimizers import Optimizer, Sum
from totalreduce.server.server import Server
from totalreduce.server.table import Table

NUM_KEYS = 40


class World:
    """Workers that pull, push and go on, and their servers.

    A worker pushes ones into the column of its rank, so that a pull shows which pushes of which worker it has seen.
    ``lost``: the share of the messages that is lost; a worker sends again what was not answered for some time.
    ``codec``: of pushes to ranges; then only sums in the end are compared, with what the workers have not sent.
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
    ) -> None:
        self.rule, self.random, self.steps, self.lost = rule, Random(seed), steps, lost
        self.num_workers, self.fractions = num_workers, fractions
        self.layout = Layout(NUM_KEYS, servers)
        self.spec = Spec(NUM_KEYS, num_workers, np.dtype(np.float32 if codec else np.float64), codec)
        self.servers = {
            rank: Server(
                *(rank, self.table_of(rank, optimizer or Sum()), self.spec, rule, num_workers),
            )
            for rank in servers
        }
        self.clients = [Client(worker, self.layout, self.spec) for worker in range(num_workers)]
        #: By worker and step: how often each key was pushed before this step.
        self.pushed = [[np.zeros(NUM_KEYS)] for _ in range(num_workers)]
        self.events: list[tuple[float, int, object]] = []
        self.order, self.now = 0, 0.0
        self.free_at: dict[tuple[int, int], float] = {}
        self.violations: list[str] = []
        self.pulls: list[np.ndarray] = []
        self.finished = self.refused = 0
        self.waiting: dict[int, tuple[Iterator[Call | float], Call]] = {}
        self.clocks_seen = {rank: np.zeros(num_workers, np.int64) for rank in servers}
        choose = Random(seed % 7)  # few lists of keys, so that digests are used
        self.lists = [np.array(sorted(choose.sample(range(NUM_KEYS), choose.randint(1, 20)))) for _ in range(4)]

    def table_of(self, rank: int, optimizer: Optimizer) -> Table:
        return Table(self.layout, rank, width=self.num_workers, dtype=self.spec.dtype, optimizer=optimizer)

    def at(self, delay: float, event: object) -> None:
        heapq.heappush(self.events, (self.now + delay, self.order, event))
        self.order += 1

    def run(self) -> World:
        for worker in range(self.num_workers):
            self.at(self.random.random(), ("step", worker, self.program(worker), None))
            if self.lost:
                self.at(3.0, ("resend", worker))
        while self.events and not (self.finished == self.num_workers and self.quiet()):
            self.now, _, event = heapq.heappop(self.events)
            assert self.now < 10_000, "the workers do not come to an end"
            getattr(self, f"on_{event[0]}")(*event[1:])
            if event[0] == "request":
                self.watch_clocks()
        assert self.finished == self.num_workers, f"{self.finished} of {self.num_workers} workers have finished"
        return self

    def quiet(self) -> bool:
        return not any(lane.unanswered for client in self.clients for lane in client._lanes.values())

    def watch_clocks(self) -> None:
        for rank, server in self.servers.items():
            clocks = np.array([server.clocks.of(worker) for worker in range(self.num_workers)])
            if (clocks < self.clocks_seen[rank]).any():
                self.violations.append("a clock went back")
            self.clocks_seen[rank] = clocks

    # ------------------------------------------------------------------------------------------------------- workers

    def program(self, worker: int) -> Iterator[Call | float]:
        """A worker: yields calls that it waits for, and times that it takes to compute."""
        client, random = self.clients[worker], Random(self.random.random())
        slow = 4.0 if worker == self.num_workers - 1 else 1.0
        for step in range(self.steps):
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
                    self.check_pull(worker, step, keys, out, counts)
            self.pushed[worker].append(counts)
            client.advance()
        yield client.finish()
        self.finished += 1

    @property
    def may_refuse(self) -> bool:
        """A refusal is of a request. With one server each call is one, so none is refused in part."""
        return self.rule.in_steps and len(self.servers) == 1

    def check_pull(
        self, worker: int, step: int, keys: np.ndarray, out: np.ndarray, own: np.ndarray | None = None
    ) -> None:
        """Check what a pull returns; ``own``: what this worker has pushed before it, also in this step."""
        if self.fractions or self.spec.codec is not None:
            return
        if own is not None and not self.rule.in_steps and (out[:, worker] != own[keys]).any():
            self.violations.append(f"worker {worker} in step {step} does not see what it has pushed before")
        bound = self.rule.bound
        for other in range(self.num_workers):
            seen, history = out[:, other], self.pushed[other]
            least = 0 if bound is None else max(0, step - bound)
            if other == worker:
                least = step
            if len(history) <= least or (seen < history[least][keys]).any():
                self.violations.append(f"worker {worker} in step {step} has not seen step {least} of {other}")
            if self.rule.in_steps and len(history) > step and (seen != history[step][keys]).any():
                self.violations.append(f"worker {worker} in step {step} sees another step of {other}")

    def on_step(self, worker: int, program: Iterator[Call | float], waits_for: Call | None) -> None:
        while waits_for is None or waits_for.is_done:
            if waits_for is not None and waits_for.error is not None and not isinstance(waits_for.error, RefusedError):
                raise waits_for.error
            waits_for = next(program, 0)
            self.flush(worker)
            if waits_for == 0:
                return
            if isinstance(waits_for, float):
                self.at(waits_for, ("step", worker, program, None))
                return
        self.waiting[worker] = program, waits_for

    def on_resend(self, worker: int) -> None:
        for server in self.servers:
            self.clients[worker].resend(server)
        self.flush(worker)
        if self.finished < self.num_workers or not self.quiet():
            self.at(3.0, ("resend", worker))

    # ------------------------------------------------------------------------------------------------------ messages

    def flush(self, worker: int) -> None:
        for server, message in self.clients[worker].outgoing():
            self.send(worker, server, message, "request")

    def send(self, source: int, target: int, message: Message, event: str) -> None:
        """One pair's messages stay in order; any of them may be lost."""
        if self.random.random() < self.lost:
            return
        header = self.spec.decode(self.spec.encode(message.header))
        copied = Message(header, *(None if a is None else a.copy() for a in (message.keys, message.values)))
        pair = (source, target, event)
        arrival = max(self.free_at.get(pair, 0.0), self.now + self.random.random())
        self.free_at[pair] = arrival
        self.at(arrival - self.now, (event, source, target, copied))

    def on_request(self, worker: int, server: int, message: Message) -> None:
        for target, answer in self.servers[server].take(worker, message):
            self.send(server, target, answer, "answer")

    def on_answer(self, server: int, worker: int, message: Message) -> None:
        self.clients[worker].answer(server, message)
        self.flush(worker)
        if worker in self.waiting and self.waiting[worker][1].is_done:
            self.on_step(worker, *self.waiting.pop(worker))

    # --------------------------------------------------------------------------------------------------------- ends

    def values(self) -> np.ndarray:
        """The table in the end."""
        out = np.zeros((NUM_KEYS, self.num_workers))
        for rank, server in self.servers.items():
            for key in range(NUM_KEYS):
                rows = server.table.find_range(key, key + 1)
                if rows.count:
                    assert self.layout.owners[np.searchsorted(self.layout.begins, key, side="right") - 1] == rank
                    out[key] = server.table.pull(rows)
        return out

    def wrong_sums(self) -> bool:
        """Whether a push was lost or applied twice."""
        pushed, found = np.stack([history[-1] for history in self.pushed], axis=1), self.values()
        if self.spec.codec is None:
            return bool((found != pushed).any())
        found += sum(client._residual.values for client in self.clients)
        return bool((np.abs(found - pushed) > 1e-3).any())
