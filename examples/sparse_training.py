"""Train a model by sparse methods, strategies, or what they are compared with, from several seeds.

totalreduce run -n 4 examples/sparse_training.py --model cnn --method oktopk --density 0.01
totalreduce run -n 4 examples/sparse_training.py --model lstm --method dense --seeds 3
totalreduce run -n 4 examples/sparse_training.py --model gpt --method oktopk --door ddp
totalreduce run -n 4 examples/sparse_training.py --model cnn --method local_sgd,diloco:period=50:codec=int8
totalreduce run -n 4 examples/sparse_training.py --model logistic --width 10000000 --method async --slow 3
totalreduce run -n 4 examples/sparse_training.py --method parameter_server:consistency=bounded:tau=4,async_gossip
totalreduce run -n 4 --emulate-hosts 4 examples/sparse_training.py --model cnn --method powersgd --door ddp --turns 5
"""

import argparse
import importlib
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sparse_tasks import OPTIMIZERS, TASKS, Task, evaluate, loss_of, make_task
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
from totalreduce.planning.contestants import Contestant, make_strategy, parse_contestant, strategies, takes_own_steps
from totalreduce.sparse.methods import METHODS

STRATEGIES = tuple(strategies())
TOPK = tuple(name for name in METHODS if name not in ("dense", "powersgd", "coded"))
#: Hooks of DDP.
HOOKS = ("fp16", "post-local")
#: Strategies of torchft, which is no dependency of totalreduce.
TORCHFT = ("torchft-local_sgd", "torchft-diloco")
TORCHFT_TIMEOUT = timedelta(minutes=10)
#: Between two averages of torch's post-local SGD and of torchft.
TORCH_PERIOD = 16
MOMENTUM = 0.9
WARMUP = 0.05
#: How long a backward pass takes, in times of the forward pass.
BACKWARD = 2
#: Steps of a turn, if the method does the same in every step.
TURN_STEPS = 2
#: Plain steps before PowerSGD's hook compresses: when training, and when only time is measured.
PLAIN_STEPS, PLAIN_STEPS_TIMED = 10, 2


@dataclass(frozen=True)
class Replica:
    """What a rank trains, and how it keeps in step with the others.

    Attributes:
        module: To be called with inputs.
        optimizer: Its ``step`` applies gradients that are averages over ranks.
        schedule: Sets the learning rate.
        flush: Has the next step send everything.
        finish: Gives all ranks the same parameters after the last step.
        close: Ends communication for this model.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    flush: Callable[[], None]
    finish: Callable[[], None]
    close: Callable[[], None]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(TASKS), default="cnn")
    parser.add_argument(
        "--method",
        default="oktopk",
        help="names separated by commas, each with settings, as diloco:period=50:codec=int8",
    )
    parser.add_argument("--door", choices=("optimizer", "ddp"), default="optimizer", help="ddp: hooks of DDP over gloo")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="that of the model if not given")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that is sent")
    parser.add_argument("--density-warmup", type=float, help="part of the steps with more than that")
    parser.add_argument(
        "--momentum", choices=("optimizer", "correction"), help="correction: before a sparse method selects, not after"
    )
    parser.add_argument("--flush-every", type=int, default=0, help="steps between two that send everything kept back")
    parser.add_argument("--local-after", type=float, default=0.25, help="part of the steps in which post-local waits")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stop-after", type=int, help="steps, of a schedule for --steps")
    parser.add_argument("--seeds", type=int, default=1, help="one training after the other")
    parser.add_argument("--first-seed", type=int, default=0, help="that of the first training")
    parser.add_argument("--batch", type=int, help="examples per rank and step")
    parser.add_argument("--width", type=int, help="of the model; the number of keys of logistic")
    parser.add_argument("--learning-rate", type=float, help="the largest one")
    parser.add_argument("--evaluations", type=int, default=20, help="how often the model is looked at")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a forward pass takes at least")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times longer a step of the last rank takes")
    parser.add_argument(
        "--turns", type=int, default=0, help="measure time only: turns of the method, and of steps without others"
    )
    parser.add_argument("--turns-s", type=float, default=math.inf, help="begin no turn after so many seconds")
    parser.add_argument("--interface", help="count the bytes that this network interface of rank 0 sends")
    parser.add_argument("--json", type=Path, help="rank 0 writes losses and times to this file")
    options = parser.parse_args()
    options.methods = [parse_contestant(text) for text in options.method.split(",")]
    known = ("alone", *METHODS, *STRATEGIES, *HOOKS, *TORCHFT)
    for method in options.methods:
        if method.name not in known:
            parser.error(f"{method.name} is none of {', '.join(known)}")
        if options.door == "optimizer" and method.name in (*HOOKS, *TORCHFT):
            parser.error(f"{method.name} needs --door ddp")
        if options.door == "ddp" and method.name in STRATEGIES:
            parser.error(f"{method.name} is a strategy: --door optimizer")
    return options


def period_of(method: Contestant) -> int:
    """Return the number of steps after which the method does the same again."""
    if method.name in ("post-local", *TORCHFT):
        return method.settings.get("period", TORCH_PERIOD)
    if method.name not in STRATEGIES:
        return 1
    strategy = make_strategy(method)
    return getattr(getattr(strategy, "then", strategy), "period", 1)


def make_method(options: argparse.Namespace, method: Contestant, task: Task) -> Any:
    settings = dict(method.settings)
    if method.name == "post_local_sgd":
        return make_strategy(replace(method, settings={"start": local_start(options), **settings}))
    if method.name in STRATEGIES:
        return make_strategy(method)
    if method.name in TOPK:
        kind = OPTIMIZERS[options.optimizer or task.optimizer]
        warmup = kind.density_warmup if options.density_warmup is None else options.density_warmup
        settings = {"density": options.density, "warmup_steps": round(warmup * options.steps), **settings}
    return METHODS[method.name](**settings)


def local_start(options: argparse.Namespace) -> int:
    """Return the number of steps after which post-local SGD has no synchronous ones any more."""
    return 0 if options.turns else round(options.local_after * options.steps)


def make_replica(
    options: argparse.Namespace, method: Contestant, task: Task, group: tr.Group | None, seed: int
) -> Replica:
    """A model, equal on all ranks for equal seeds, and its optimizer."""
    torch.manual_seed(seed)
    model = task.build(options.width or task.width)
    kind = OPTIMIZERS[options.optimizer or task.optimizer]
    corrects = (options.momentum or kind.momentum) == "correction" and method.name in TOPK
    feedback = tr.ErrorFeedback(momentum=MOMENTUM if corrects else 0.0)
    groups = [{"params": list(model.parameters()), "momentum": MOMENTUM}]
    if corrects:
        groups = feedback.param_groups(model.parameters())
    rate = method.rate * (options.learning_rate or task.learning_rates[kind.name])
    optimizer = kind.make(groups, rate)
    steps = num_steps(options, method, 0 if group is None else group.rank, 1 if group is None else group.world_size)
    warmup = max(1, round(WARMUP * steps))

    def factor(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if method.name == "alone":
        return Replica(model, optimizer, schedule, _nothing, _nothing, _nothing)
    if method.name in TORCHFT:
        return _torchft(method, model, optimizer, schedule, seed)
    if group is None:
        replica = DistributedDataParallel(model, bucket_cap_mb=1024 if method.name == "powersgd" else None)
        if method.name == "fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method.name == "powersgd":
            plain = PLAIN_STEPS_TIMED if options.turns else PLAIN_STEPS
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=plain)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method.name == "post-local":
            return _post_local(local_start(options), method, replica, optimizer, schedule)
        elif method.name != "dense":
            replica.register_comm_hook(*tr.ddp_hook(make_method(options, method, task)))
        return Replica(replica, optimizer, schedule, _nothing, _nothing, _nothing)
    sync = None if method.name == "dense" else make_method(options, method, task)
    name = f"{method.text}, seed {seed}"
    wrapped = tr.DistributedOptimizer(optimizer, model, group=group, sync=sync, feedback=feedback, name=name)
    flush = _nothing if method.name in STRATEGIES else wrapped.flush_residuals
    finish = getattr(wrapped.strategy_steps, "finish", _nothing) if method.name in STRATEGIES else _nothing
    return Replica(model, wrapped, schedule, flush, finish, wrapped.close)


def num_steps(options: argparse.Namespace, method: Contestant, rank: int, world_size: int) -> int:
    """Return the number of steps of a rank's training and learning rates.

    With servers, a slow last rank takes so many fewer steps in the time of the others.
    """
    is_slow = options.slow > 1 and rank == world_size - 1 and takes_own_steps(method, world_size)
    return math.ceil(options.steps / options.slow) if is_slow else options.steps


def _post_local(
    start: int,
    method: Contestant,
    replica: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Replica:
    """Torch's own post-local SGD: a hook that stops reducing, and an optimizer that averages parameters."""
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=start, post_local_gradient_allreduce=False
    )
    replica.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=period_of(method), warmup_steps=start)

    def finish() -> None:
        utils.average_parameters(iter(replica.parameters()), dist.group.WORLD)

    return Replica(replica, PostLocalSGDOptimizer(optimizer, averager), schedule, _nothing, finish, _nothing)


def _torchft(
    method: Contestant,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    seed: int,
) -> Replica:
    """The strategies of torchft: each rank is a replica group, and rank 0 has the lighthouse that names the members."""
    torchft = importlib.import_module("torchft")
    strategies = importlib.import_module("torchft.local_sgd")
    with socket.socket(type=socket.SOCK_DGRAM) as probe:  # sends nothing, and knows this rank's address
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address = probe.getsockname()[0]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lighthouse, where = None, [""]
    if rank == 0:
        lighthouse = importlib.import_module("torchft.coordination").LighthouseServer(
            bind="[::]:0", min_replicas=world_size, join_timeout_ms=1000
        )
        where[0] = f"http://{address}:{lighthouse.address().rpartition(':')[2]}"
    dist.broadcast_object_list(where)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world_size,
        use_async_quorum=False,
        timeout=TORCHFT_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=where[0],
        replica_id=f"{seed}-{rank}",
        hostname=address,
        init_sync=False,
    )
    if method.name == "torchft-local_sgd":
        context = strategies.LocalSGD(manager, model, optimizer, sync_every=period_of(method))
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        context = strategies.DiLoCo(manager, [model], optimizer, outer, sync_every=period_of(method))
    context.__enter__()
    servers = [store, lighthouse]  # which end when nothing refers to them

    def close() -> None:
        context.__exit__(None, None, None)
        dist.barrier()
        manager.shutdown(wait=False)
        servers.clear()

    return Replica(model, optimizer, schedule, _nothing, _nothing, close)


@dataclass
class Steps:
    """The steps of one replica on this rank.

    Attributes:
        replica: What is trained.
        draw: The generator of its batches.
        seconds: Of every step.
    """

    options: argparse.Namespace
    task: Task
    replica: Replica
    draw: torch.Generator
    slow: float
    seconds: list[float] = field(default_factory=list)

    def take(self, count: int) -> None:
        """Take steps: in each the forward pass lasts ``step_ms`` at least, and the whole ``slow`` times as long."""
        options, replica = self.options, self.replica
        for _ in range(count):
            begin = time.perf_counter()
            inputs, targets = self.task.draw(options.batch or self.task.batch, self.draw)
            loss = loss_of(replica.module(inputs), targets)
            taken = time.perf_counter() - begin
            # Before backward, in which DDP waits for other ranks.
            backward = BACKWARD * taken
            sleep_s = self.slow * (max(taken, options.step_ms / 1000) + backward) - backward - taken
            if sleep_s > 0:
                time.sleep(sleep_s)
            replica.optimizer.zero_grad()
            if options.flush_every and (len(self.seconds) + 1) % options.flush_every == 0:
                replica.flush()
            loss.backward()
            replica.optimizer.step()
            replica.schedule.step()
            self.seconds.append(time.perf_counter() - begin)


class Job:
    """The ranks, and the trainings of one model.

    Attributes:
        options: The command line's.
        group: The ranks; ``None`` behind torch's DDP.
    """

    def __init__(self, options: argparse.Namespace, group: tr.Group | None) -> None:
        self.options, self.group, self.task = options, group, make_task(options.model)
        self.rank = dist.get_rank() if group is None else group.rank
        self.world_size = dist.get_world_size() if group is None else group.world_size
        self.num_parameters = 0

    def steps(self, method: Contestant, seed: int) -> Steps:
        """Make a replica."""
        replica = make_replica(self.options, method, self.task, self.group, seed)
        self.num_parameters = sum(parameter.numel() for parameter in replica.module.parameters())
        draw = torch.Generator().manual_seed(1_000_003 * (seed + 1) + self.rank)
        slow = self.options.slow if self.rank == self.world_size - 1 else 1.0
        return Steps(self.options, self.task, replica, draw, slow)

    def train(self, method: Contestant, seed: int) -> dict[str, Any]:
        """All steps; returns their seconds, the bytes of an average one, and what the model was worth meanwhile."""
        options, steps = self.options, self.steps(method, seed)
        total = options.stop_after or num_steps(options, method, self.rank, self.world_size)
        every = max(1, options.steps // options.evaluations)
        evaluations = []
        before, sent = self.sent_bytes(), 0
        while (done := len(steps.seconds)) < total:
            steps.take(min(every, total - done))
            done = len(steps.seconds)
            if done == total and options.slow <= 1:
                steps.replica.finish()
            sent += self.sent_bytes() - before
            loss, accuracy = self.evaluate(method, steps.replica.module)
            before = self.sent_bytes()
            evaluations.append({"step": done, "seconds": sum(steps.seconds), "loss": loss, "accuracy": accuracy})
            if self.rank == 0:
                print(
                    f"{method.text}, seed {seed}, step {done}: loss {loss:.4f}, accuracy {accuracy:.2%}, "
                    f"{sum(steps.seconds):.1f} s"
                )
        if options.slow > 1:  # what rank 0 has after its last step, and not what it has when the slow rank has come
            steps.replica.finish()
        steps.replica.close()
        run = {"step_s": steps.seconds, "evaluations": evaluations, "sent_bytes": sent / total}
        return {"method": method.text, "seed": seed, "block": period_of(method), **run}

    def time_turns(self, method: Contestant) -> dict[str, Any]:
        """The seconds of an average step in every turn, with the method and without communication, and its bytes.

        They are those of the slowest rank: in a turn the others wait for it. With servers they are those of rank 0.
        """
        options, steps, alone = self.options, self.steps(method, 0), self.steps(parse_contestant("alone"), 0)
        # When a turn ends, no exchange is under way.
        warmup = (
            period_of(method)
            + method.settings.get("overlap", 0)
            + (PLAIN_STEPS_TIMED if method.name == "powersgd" else 1)
        )
        block = period_of(method) if period_of(method) > 1 else TURN_STEPS
        waits = not takes_own_steps(method, self.world_size)
        turns, sent = [], 0
        begin = time.monotonic()
        for count in (warmup, *[block] * options.turns):
            alone.take(count)
            if waits:
                self.add_up(torch.zeros(1))
            before = self.sent_bytes()
            steps.take(count)
            sent = self.sent_bytes() - before + (sent if len(turns) > 1 else 0)  # not those of the first, untimed turn
            means = [statistics.fmean(each.seconds[-count:]) for each in (steps, alone)]
            facts = torch.tensor([*means, time.monotonic() - begin], dtype=torch.float64)
            step_s, alone_s, elapsed = self.largest(facts).tolist() if waits else facts.tolist()
            turns.append((step_s, alone_s))
            if len(turns) > 1 and elapsed > options.turns_s:
                break
        steps.replica.finish()
        steps.replica.close()
        step_s, alone_s = zip(*turns[1:], strict=True)
        sent_bytes = sent / (block * len(step_s))
        if self.rank == 0:
            own, other = (statistics.median(seconds) * 1000 for seconds in (step_s, alone_s))
            counted = f", {sent_bytes / 1024:.0f} KiB sent" if options.interface is not None else ""
            print(f"{method.text}: {own:.1f} ms for a step, {other:.1f} ms without communication{counted}")
        return {"method": method.text, "seed": 0, "step_s": step_s, "alone_s": alone_s, "sent_bytes": sent_bytes}

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest value of any rank, element by element."""
        by_rank = torch.zeros(self.world_size, len(values), dtype=values.dtype)
        by_rank[self.rank] = values
        return self.add_up(by_rank).amax(dim=0)

    def sent_bytes(self) -> int:
        """What the interface has sent so far."""
        if self.options.interface is None:
            return 0
        lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.strip().startswith(f"{self.options.interface}:"))
        return int(line.partition(":")[2].split()[8])

    def evaluate(self, method: Contestant, module: nn.Module) -> list[float]:
        """Return the mean loss and the accuracy of what was held out."""
        model = getattr(module, "module", module)
        if takes_own_steps(method, self.world_size):  # none waits for another one
            sums = evaluate(model, self.task, 0, 1)
        else:
            sums = self.add_up(evaluate(model, self.task, self.rank, self.world_size))
        return (sums[:2] / sums[2]).tolist()

    def add_up(self, sums: Tensor) -> Tensor:
        """Over all ranks."""
        if self.group is None:
            dist.all_reduce(sums)
        else:
            self.group.allreduce(sums, name="evaluation").wait()
        return sums


def run(options: argparse.Namespace, group: tr.Group | None) -> None:
    """Train by every method from every seed, or measure the time of every method's steps."""
    job = Job(options, group)
    if options.turns:
        runs = [job.time_turns(method) for method in options.methods]
    else:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        runs = [job.train(method, seed) for method in options.methods for seed in seeds]
    if options.json is not None and job.rank == 0:
        facts = {name: value for name, value in vars(options).items() if name not in ("json", "methods")}
        facts |= {"optimizer": options.optimizer or job.task.optimizer, "world_size": job.world_size}
        document = {**facts, "num_parameters": job.num_parameters, "runs": runs}
        options.json.write_text(json.dumps(document) + "\n")


def _nothing() -> None:
    """Nothing is kept back, and nothing was opened."""


if __name__ == "__main__":
    chosen = parse_options()
    torch.set_num_threads(1)
    if chosen.door == "ddp":
        dist.init_process_group("gloo")
        run(chosen, None)
        # torch 2.13 can hang when gloo ends while a thread of its own still frees the last operation's tensors.
        time.sleep(0.5)
        dist.destroy_process_group()
    else:
        with tr.init() as everyone:
            run(chosen, everyone)
