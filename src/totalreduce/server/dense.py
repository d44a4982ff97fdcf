"""A dense model on a parameter server: ``DistributedOptimizer(sync=tr.ParameterServer(...))``.

The parameters lie in rows of the table (``rows``), and nothing but gradients and values travels. What the servers keep,
and what they do with what is pushed, depends on who has the optimizer, and on whether steps are synchronous:

* on servers: gradients are pushed, values pulled. In synchronous steps the mean of all gradients is one update;
* on workers, in synchronous steps: gradients are pushed, their mean is pulled, and every worker updates its parameters
  (the division of work of BytePS: Jiang et al., OSDI 2020). The servers keep nothing from one step to the next;
* on workers, in other steps: a worker takes a step with its own gradients, and pushes the change of its parameters
  (Ho et al., NIPS 2013).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch

from totalreduce.codecs.codec import Codec, check_codec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch.deferred import DeferredUpdates
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.pytorch.round import RoundGuard
from totalreduce.pytorch.stepping import StrategySteps
from totalreduce.server.arriving import ArrivingBuckets, await_all
from totalreduce.server.clocks import Consistency, Sequential
from totalreduce.server.connecting import connect
from totalreduce.server.connection import Connection, ServerStatistics
from totalreduce.server.early import EarlyBuckets
from totalreduce.server.optimizers import Optimizer, Replace, Sum
from totalreduce.server.pushing import ModelPushes
from totalreduce.server.rows import WIDTH, ModelRows
from totalreduce.server.served_steps import SynchronousSteps, observations
from totalreduce.server.torch_rule import Torch
from totalreduce.strategies.strategy import Strategy, TrainingOfRank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["AllreduceSteps", "ParameterServer", "ServerSteps"]

_SEQUENTIAL = Sequential()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer(Strategy):
    """Settings of training with a parameter server that has the model.

    Attributes:
        consistency: ``tr.ps.Sequential()``: synchronous steps. ``tr.ps.Bounded(n)``: a rank is at most n steps ahead of
            the slowest one; 0 is synchronous. ``tr.ps.Eventual()``: no rank waits.
        optimizer: ``"server"``: servers update the parameters, with the rule and the settings of the torch optimizer.
            ``"worker"``: each rank runs its torch optimizer.
        codec: Encodes what is pushed, with error feedback; float32 only. ``None``: it is sent as it is.
        replicas: The number of servers that hold each part; see ``tr.ps.connect``.
        servers: The ranks that have the parameters, as in ``tr.ps.connect``: by default those that only serve
            (``totalreduce run --servers``), or all.
        shards: The number of parts of the parameters; by default as many as servers.
        restore: A folder in which ``strategy_steps.save`` has written: parameters and the state of servers are those of
            its last snapshot.
        overlap: Whether gradients are pushed during the backward pass, where gradients are pushed at all. Servers keep
            them until the step, and without a codec the results have the same bits. But a gradient that has left counts
            as it was if it is then changed without torch noticing: through ``.data``, a NumPy view or a foreign kernel.
            ``None``: in synchronous steps alone. In others it takes more memory of servers: for each worker as much as
            the parameters.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "parameter_server"
    can_defer: ClassVar[bool] = True
    can_sum: ClassVar[bool] = False
    can_form_group: ClassVar[bool] = True

    consistency: Consistency = _SEQUENTIAL
    optimizer: Literal["server", "worker"] = "server"
    codec: Codec | None = None
    replicas: int = 1
    servers: Sequence[int] | None = None
    shards: int | None = None
    restore: str | Path | None = None
    overlap: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.consistency, Consistency):
            raise ConfigurationError(f"consistency is a rule of tr.ps, as tr.ps.Bounded(4), not {self.consistency!r}")
        checks.one_of("optimizer", self.optimizer, ("server", "worker"))
        check_codec(self.codec)
        checks.integer_fields(self, "replicas", minimum=1)
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ConfigurationError(f"overlap is True, False or None, not {self.overlap!r}")
        # The ranks compare settings as JSON values.
        object.__setattr__(self, "servers", None if self.servers is None else tuple(self.servers))
        object.__setattr__(self, "restore", None if self.restore is None else str(self.restore))
        if self.restore is not None and self.optimizer == "worker" and self.consistency.bound == 0:
            raise ConfigurationError(
                "optimizer='worker' with synchronous steps leaves nothing on servers that could be restored: load the "
                "states of model and torch optimizer"
            )

    def recovery_obstacle(self) -> str:
        """Return that servers have the state."""
        return (
            "its servers have state that no other rank has. Leave tr.recoverable out: with --on-loss and replicas=2 "
            "the servers outlive losses (docs/strategies-parameter-server.md)"
        )

    def steps(self, training: TrainingOfRank) -> StrategySteps:
        """Return the steps of this rank. Collective.

        Synchronous steps without a codec, with a server on each rank, are those of the synchronous optimizer: its
        allreduce moves as many bytes.
        """
        group = training.group
        if group.formation is not None:
            if self.optimizer == "worker" and self.consistency.bound == 0:
                raise ConfigurationError(
                    "with --on-loss, tr.ParameterServer(optimizer='worker') needs tr.ps.Bounded(1) or more: in "
                    "synchronous steps servers have no parameters for a worker that takes the place of a lost one"
                )
            return ServerSteps(self, training)
        is_plain = self.codec is None and self.servers is None and self.restore is None
        if self.is_synchronous(group.world_size) and is_plain and group.with_servers is None:
            return AllreduceSteps(self, training.optimizer)
        return ServerSteps(self, training)

    def is_synchronous(self, world_size: int) -> bool:
        """Whether no rank may be ahead of another one."""
        return world_size == 1 or self.consistency.bound == 0


@final
class AllreduceSteps(SynchronousSteps):
    """Synchronous steps in which nothing speaks for servers: they are those of the synchronous optimizer."""

    @property
    def steps_taken(self) -> int:
        """The number of steps."""
        return self.staleness[0]

    def statistics(self) -> ServerStatistics:
        """Return the staleness; nothing was sent to servers."""
        return ServerStatistics(0, 0, Counter(self.staleness), 0.0, 0, 0, 0, 0)

    def save(self, folder: str | Path) -> None:
        """Raise ``ConfigurationError``: servers have nothing."""
        raise ConfigurationError(
            f"nothing is written to {folder}: these steps are those of the synchronous optimizer, and no server has "
            "anything. Save the states of model and torch optimizer, or name the servers: "
            "tr.ParameterServer(servers=range(group.world_size))"
        )


@final
@never_compiled
class ServerSteps(StrategySteps):
    """A model on a parameter server: the part of one rank.

    With ``overlap="iterations"`` (``take``), a step asks for each bucket by itself, in the order in which forward
    needs them. Servers answer in this order, so that the first layers compute while later ones are on the way.

    Attributes:
        strategy: The settings.
        is_interrupted: Whether a call of ``step`` ran out of time, and must be repeated.
        arriving: The buckets for which a step that ends early has asked.
    """

    sees_gradients = True
    strategy: ParameterServer

    def __init__(self, strategy: ParameterServer, training: TrainingOfRank) -> None:
        """Begin. Collective.

        Raises:
            ConfigurationError: The ranks do not begin with the same parameters; or a server cannot run this torch
                optimizer, or the codec cannot encode parameters of this type.
            RecoveryError: The snapshot cannot be restored.
        """
        optimizer: torch.optim.Optimizer = training.optimizer
        parameters, group = training.parameters, training.group
        self.strategy, self._group, self._name = strategy, group, training.name
        self.is_interrupted = False
        self._loss: Any = None
        replica = ModelReplica(parameters, optimizer)
        self._in_job = group.formation is not None
        if not self._in_job:  # otherwise each worker takes over what the servers have
            check_equal(replica, strategy.name, group, training.name)
        rows = ModelRows(parameters, replica.dtype)
        self._ends_early = False  #: Whether the step that was submitted last asks for each bucket by itself.
        #: Whether this rank is in a part of a step that must not run twice: its requests, or those of a bucket, and the
        #: step of the torch optimizer.
        self._is_unrepeatable = False
        # The number of ranks has no part in it: what servers keep depends on this, and a snapshot is restored with any
        # number of ranks.
        is_synchronous, on_server = strategy.consistency.bound == 0, strategy.optimizer == "server"
        client = self._connect(strategy, rows, optimizer, keeps_values=on_server or not is_synchronous)
        self._client, self._pulled = client, rows.empty()
        self._pushes = pushes = ModelPushes(
            *(rows, optimizer, client),
            is_synchronous=is_synchronous,
            on_server=on_server,
            is_coded=strategy.codec is not None,
            num_ranks=group.world_size,
        )
        flags = None if pushes.keeps_values else pushes.flags
        self.arriving: ArrivingBuckets = ArrivingBuckets(rows, self._pulled, flags, self._once)
        self._finals: list[Work] = []  #: The operations of ``finish``.
        self._last_clock: int | None = None  #: The clock when ``finish`` was called, which ends it.
        self._has_finished = False

    def _connect(
        self, strategy: ParameterServer, rows: ModelRows, inner: torch.optim.Optimizer, *, keeps_values: bool
    ) -> Connection:
        """Connect, and begin with the parameters of rank 0, or with those that the servers have."""
        values = rows.empty()
        rule: Optimizer
        if strategy.optimizer == "server":
            rule = Torch.like(inner)
        elif isinstance(inner, torch.optim.LBFGS | torch.optim.SparseAdam):
            raise ConfigurationError(f"tr.ParameterServer does not support {type(inner).__name__}")
        else:
            rule = Sum() if keeps_values else Replace()
        consistency = strategy.consistency
        if consistency.bound == 0:
            room = consistency.buffer_bytes if isinstance(consistency, Sequential) else 0
            consistency = Sequential(buffer_bytes=max(room, 2 * values.nbytes, 1), combine="mean")
        client = connect(
            self._group,
            num_keys=max(1, rows.count + -(-len(rows.parameters) // WIDTH)),
            width=WIDTH,
            dtype=str(values.dtype),
            optimizer=rule,
            consistency=consistency,
            servers=strategy.servers,
            shards=strategy.shards,
            replicas=strategy.replicas,
            codec=strategy.codec,
            restore=strategy.restore,
        )
        if client.step == 0:
            if self._group.rank == 0 and keeps_values:
                rows.read(values)
                client.assign(slice(0, rows.count), values).wait()
            client.clock()
        if client.step <= 1:  # 1, too, for one that takes the place of a rank which was lost before it met the others
            client.meet()  # the parameters are there
        client.begin_steps()
        if client.step > 1 or self._in_job or strategy.restore is not None:
            client.pull_range(0, rows.count, values).wait()
            rows.write(values, rows.numbers)
        return client

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push what this rank has computed, and take over what the servers have; return the closure's loss.

        Raises:
            SlowWorkersError: The rule holds this rank back until others go on; they do not within the group's
                ``timeout_s``. Repeat the call: it waits on, and pushes nothing a second time.
            DeadlineExceededError: A server does not answer in time; likewise.
            ConfigurationError: The settings of the torch optimizer have changed, which servers cannot follow; or a
                gradient cannot be encoded; or ``finish`` was called. Nothing is sent. Or an earlier call was
                interrupted while it sent requests, or in the step of the torch optimizer: it must not be repeated.
            RefusedError: A server has refused a push.
            PeerLost: A rank is lost.
        """
        if not self.is_interrupted:
            self._begin()
            if closure is not None and self._pushes.takes_gradients:
                with torch.enable_grad():
                    self._loss = closure()
                closure = None
            with self._once():
                self._push_step(closure)
                self._submit_end()
        self._end_step()
        loss, self._loss = self._loss, None
        return loss

    def _begin(self) -> None:
        """Begin a step that is no repetition: what the last one has asked for is taken over."""
        self.arriving.settle()
        self.arriving.drain()
        self._check_open()

    def _push_step(self, closure: Callable[[], Any] | None) -> None:
        """Push this rank's part of a step."""
        if self._pushes.takes_gradients:
            self._pushes.push_gradients()
        else:
            self._loss = self._pushes.push_own_step(closure)

    # --------------------------------------------------------------------------------------------- steps that end early

    def take(
        self,
        closure: Callable[[], Any] | None,
        guard: RoundGuard | None,
        deferred: DeferredUpdates,
        flush: Callable[[], None],
    ) -> Any:
        """Take a step; if its updates can be deferred, only up to the point where this rank would wait.

        Errors as of ``step``. A repetition goes on with the interrupted step, and waits if that was to wait.
        """
        del guard
        if closure is not None or not deferred.possible:
            return self.step(closure)
        if self.is_interrupted and not self._ends_early:
            self._end_step()
            return None
        if not self.is_interrupted:
            self._begin()
            with self._once():
                self._push_step(None)
                self._submit_end(deferred.priorities, flush)
        self._check_repeatable()
        if self.arriving.is_waiting:
            deferred.begin(flush)
        self.is_interrupted = False
        return None

    # -------------------------------------------------------------------------------------------------- parts of steps

    def stepped(self) -> None:
        """Count a step that was left out on this rank: nothing is pushed for it. Errors as of ``step``."""
        if not self.is_interrupted:
            self._begin()
            with self._once():
                self._pushes.push_nothing()
                self._submit_end()
        self._end_step()

    def _check_repeatable(self) -> None:
        """Raise ``ConfigurationError`` if a part of a step that must not run twice was interrupted."""
        if self._is_unrepeatable:
            raise ConfigurationError(
                "an earlier step() or backward() was interrupted while it sent requests to servers or took the step of "
                "the torch optimizer, and how much of this was done is not known. Close this optimizer and go on from "
                "a snapshot or a checkpoint"
            )

    @contextmanager
    def _once(self) -> Iterator[None]:
        """Refuse to go on after an interruption between requests that belong together, or in the inner step.

        How much was done is not known then, so a repetition could push, or update parameters, twice. Of a call that
        raises an ordinary error, it is assumed that it has changed nothing: what is inside can be repeated if no
        request was made before this call.
        """
        self._check_repeatable()
        self._is_unrepeatable, num_tickets = True, len(self._pushes.tickets)
        try:
            yield
        except Exception:  # other exceptions, as KeyboardInterrupt, come at any place
            self._is_unrepeatable = len(self._pushes.tickets) > num_tickets
            raise
        self._is_unrepeatable = False

    def use_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        """See ``StrategySteps``: these buckets are pushed during backward, if gradients are pushed at all."""
        self.arriving.buckets_members = [tuple(members) for members in buckets]
        overlaps = self.strategy.consistency.bound == 0 if self.strategy.overlap is None else self.strategy.overlap
        pushes = self._pushes
        if overlaps and pushes.takes_gradients and pushes.early is None:
            pushes.early = EarlyBuckets(buckets, pushes.rows.parameters, is_fixed=self._in_job)

    def ready(self, number: int) -> None:
        """See ``StrategySteps``: push the buckets that are complete; servers keep them until the step."""
        if self._pushes.early is None or self._has_finished or self._last_clock is not None:
            return
        with self._once():
            self._pushes.ready(number)

    def _check_open(self) -> None:
        if self._last_clock is not None or self._has_finished:
            raise ConfigurationError("strategy_steps.finish() was called, so the servers take no more gradients")
        if self._pushes.has_other_settings:
            raise ConfigurationError(
                "the settings of the torch optimizer have changed, and servers have those of the begin, except the "
                "learning rate: use tr.ParameterServer(optimizer='worker')"
            )

    def _submit_end(self, priorities: Mapping[int, int] | None = None, flush: Callable[[], None] | None = None) -> None:
        """End the step, and ask for what the servers have then: all at once, or each bucket by itself.

        ``priorities``, ``flush``: those of ``take``, if the step ends early.
        """
        client, pulled, pushes = self._client, self._pulled, self._pushes
        if pushes.early is not None:
            pushes.early.end_step()
        pushes.tickets.append(client.clock())
        if not pushes.keeps_values:
            pushes.tickets.append(client.pull(pushes.flag_keys, pushes.flags))
        if priorities is None or flush is None:
            pushes.tickets.append(client.pull_range(0, len(pulled), pulled))
        else:
            self.arriving.pull(
                priorities,
                lambda begin, end: client.pull_range(begin, end, pulled[begin:end]),
                pushes.tickets,
                flush,
            )
        # Not before: a repetition waits for tickets, so that it must have them.
        self._ends_early = priorities is not None
        self.is_interrupted, self._is_unrepeatable = True, False

    def _end_step(self) -> None:
        """Wait for all answers, and take over what has come."""
        self._check_repeatable()
        if self._ends_early:
            self.arriving.settle()
            if not self.arriving.is_waiting:
                self.is_interrupted = False
                return
            self.arriving.drain()  # it was interrupted before its updates were deferred, so that none was made
        await_all(self._pushes.tickets)
        rows = self._pushes.rows
        if self._pushes.keeps_values:
            rows.write(self._pulled, rows.numbers)
            self._pushes.inner._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn: no step was taken
            self.is_interrupted = False
            return
        for parameter, gradient in zip(rows.parameters, self.arriving.gradients(rows.numbers), strict=True):
            parameter.grad = gradient
        with self._once():
            self._pushes.inner.step()
            self.is_interrupted = False  # here: a repetition must not take the step again

    # ------------------------------------------------------------------------------------------------------ and beyond

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""
        return self._pushes.rows.holds(parameters)

    def finish(self) -> None:
        """Wait until all ranks have called this, and take over the final parameters. Collective.

        Ranks may have taken different numbers of steps, except with ``--on-loss``. Afterwards all have the same
        parameters.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: Another rank has not called this within the group's ``timeout_s``. Repeat the call.
            ConfigurationError: A call of ``step`` ran out of time and must be repeated first.
        """
        if self._has_finished:
            return
        if self.is_interrupted:
            raise ConfigurationError("the last step() was interrupted: repeat it until it returns")
        self.arriving.settle()
        if self._in_job:
            self._client.meet()
            self._client.pull_range(0, self._pushes.rows.count, self._pulled).wait()
        else:
            self._finish_together()
        self._pushes.rows.write(self._pulled, self._pushes.rows.numbers)
        self._has_finished = True
        # So a program that ends without close() leaves when the others need nothing of it any more.
        self._client.finish()

    def _finish_together(self) -> None:
        """Get the final values in a job in which no rank is replaced."""
        group, client = self._group, self._client
        if self._last_clock is None:
            clock = client.step
            client.retire()
            self._last_clock = clock
        if not self._finals:
            most = torch.tensor([self._last_clock * group.world_size + group.rank], dtype=torch.int64, device="cpu")
            self._finals.append(group.control.allreduce(most, name=f"{self._name}.finished", op=ReduceOp.MAX))
        last = int(self._finals[0].wait()) % group.world_size
        if self._pushes.keeps_values:
            client.pull_range(0, self._pushes.rows.count, self._pulled).wait()
        else:
            if len(self._finals) == 1:
                self._pushes.rows.read(self._pulled)
                name, values = f"{self._name}.last", torch.from_numpy(self._pulled)
                self._finals.append(group.control.broadcast(values, root=last, name=name, async_op=True))
            self._finals[1].wait()

    def save(self, folder: str | Path) -> None:
        """Write a snapshot of parameters and the servers' state, between two steps. Collective.

        Errors as of ``tr.ps.Connection.save``.

        Raises:
            ConfigurationError: The servers keep nothing from step to step: save model and torch optimizer. Or a call of
                ``step`` ran out of time, or ``finish`` was called.
        """
        if not self._pushes.keeps_values:
            raise ConfigurationError(
                "optimizer='worker' with synchronous steps leaves nothing on servers: save the states of model and "
                "torch optimizer"
            )
        if self._has_finished:
            raise ConfigurationError("strategy_steps.finish() was called: call save() before it")
        if self.is_interrupted:
            raise ConfigurationError("the last step() was interrupted: repeat it until it returns")
        if self._pushes.early is not None and self._pushes.early.have_left:
            raise ConfigurationError(
                "backward() has pushed gradients that no step() has used: call step() before save()"
            )
        self.arriving.settle()
        self._client.save(folder)

    @property
    def early_buckets(self) -> int:
        """The number of buckets of this rank that were pushed during backward."""
        return 0 if self._pushes.early is None else self._pushes.early.num_early

    @property
    def withdrawn_steps(self) -> int:
        """The number of steps whose gradients were pushed twice, because they had changed after backward."""
        return 0 if self._pushes.early is None else self._pushes.early.num_withdrawn

    @property
    def steps_taken(self) -> int:
        """The number of steps of this rank, with those before the snapshot that was restored.

        With ``--on-loss``: also those of a lost worker in whose place this process is.
        """
        return (self._client.step if self._last_clock is None else self._last_clock) - 1

    @property
    def staleness(self) -> Counter[int]:
        """By how many steps the slowest rank was behind when this rank's pulls were answered."""
        return self._client.statistics().staleness

    @property
    def waited_s(self) -> float:
        """The seconds for which this rank has waited for servers."""
        return self._client.statistics().waiting_s

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and the staleness of what was pulled. Any thread."""
        staleness = self.staleness
        return {"strategy": self.strategy.name, **observations(staleness, max(staleness, default=0))}

    def statistics(self) -> ServerStatistics:
        """Return numbers of this rank: bytes, staleness, waiting."""
        return self._client.statistics()

    def close(self) -> None:
        """End the connection. After ``finish`` this waits for the other ranks; without it, they cannot go on."""
        if self._has_finished:
            self._client.close()
        else:
            self._client.end()
