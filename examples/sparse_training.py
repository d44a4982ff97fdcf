"""Train one of three models by a sparse method, a strategy, or what they are compared with, from several seeds.

totalreduce run -n 4 examples/sparse_training.py --model cnn --method oktopk --density 0.01
totalreduce run -n 4 examples/sparse_training.py --model lstm --method dense --seeds 3
totalreduce run -n 4 examples/sparse_training.py --model gpt --method oktopk --door ddp
totalreduce run -n 4 examples/sparse_training.py --model cnn --method diloco --period 50
totalreduce run -n 4 --emulate-hosts 4 examples/sparse_training.py --model cnn --method powersgd --door ddp
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sparse_tasks import TASKS, Task, evaluate, loss_of, make_task
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
from totalreduce.codecs.codecs import CODECS
from totalreduce.sparse.methods import METHODS
from totalreduce.strategies.strategies import STRATEGIES

TOPK = tuple(name for name in METHODS if name not in ("dense", "powersgd", "coded"))
MOMENTUM = 0.9
WARMUP = 0.05
#: Strategies with servers.
SERVED = ("async", "stale_synchronous", "soft_sync", "quorum", "eager")
#: The part of the steps after which post-local SGD has no synchronous ones any more.
LOCAL_AFTER = 0.25
#: How long forward and backward take, in times of forward.
FORWARD_AND_BACKWARD = 3


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
    parser.add_argument("--method", choices=("alone", *METHODS, *STRATEGIES, "post-local", "fp16"), default="oktopk")
    parser.add_argument("--door", choices=("optimizer", "ddp"), default="optimizer", help="ddp: hooks of DDP over gloo")
    parser.add_argument("--period", type=int, default=16, help="steps of a strategy between two exchanges")
    parser.add_argument("--overlap", type=int, default=0, help="steps beside an exchange of diloco or gossip")
    parser.add_argument("--codec", choices=tuple(CODECS), help="of a strategy's exchanges, or of coded")
    parser.add_argument("--threshold", type=float, default=3e-4, help="of strom: the change that it sends")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that is sent")
    parser.add_argument("--density-warmup", type=float, help="part of the steps with more than that")
    parser.add_argument(
        "--momentum", choices=("optimizer", "correction"), help="correction: before a sparse method selects, not after"
    )
    parser.add_argument("--flush-every", type=int, default=0, help="steps between two that send everything kept back")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stop-after", type=int, help="steps, of a schedule for --steps")
    parser.add_argument("--seeds", type=int, default=1, help="one training after the other, from seed 0")
    parser.add_argument("--batch", type=int, help="examples per rank and step")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("--learning-rate", type=float, help="the largest one")
    parser.add_argument("--evaluations", type=int, default=20, help="how often the model is looked at")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times longer a step of the last rank takes")
    parser.add_argument("--json", type=Path, help="rank 0 writes losses and times to this file")
    options = parser.parse_args()
    if options.door == "optimizer" and options.method in ("fp16", "post-local"):
        parser.error(f"{options.method} is a hook: --door ddp")
    if options.door == "ddp" and options.method in STRATEGIES:
        parser.error(f"{options.method} is a strategy: --door optimizer")
    return options


def make_method(options: argparse.Namespace, task: Task, world_size: int) -> Any:
    codec = {} if options.codec is None else {"codec": CODECS[options.codec]()}
    if options.method == "post_local_sgd":
        then = tr.LocalSGD(period=options.period, **codec)
        return tr.PostLocalSGD(start=round(LOCAL_AFTER * options.steps), then=then)
    if options.method == "gossip":
        return tr.Gossip(overlap=options.overlap)
    if options.method == "strom":
        return tr.Strom(threshold=options.threshold, overlap=options.overlap)
    if options.method == "soft_sync":
        return tr.SoftSync(n=1)
    if options.method == "quorum":
        return tr.Quorum(n=world_size - 1, grace_s=0.01)
    if options.method in SERVED:
        return STRATEGIES[options.method]()
    if options.method == "diloco":
        return tr.DiLoCo(period=options.period, overlap=options.overlap, **codec)
    if options.method in STRATEGIES:
        return STRATEGIES[options.method](period=options.period, **codec)
    if options.method == "coded":
        return tr.Coded(**codec)
    if options.method not in TOPK:
        return METHODS[options.method]()
    warmup = task.density_warmup if options.density_warmup is None else options.density_warmup
    warmup_steps = round(warmup * options.steps)
    return METHODS[options.method](density=options.density, warmup_steps=warmup_steps)


def make_replica(options: argparse.Namespace, task: Task, group: tr.Group | None, seed: int) -> Replica:
    """A model, equal on all ranks for equal seeds, and its optimizer."""
    torch.manual_seed(seed)
    model = task.build(options.width or task.width)
    corrects = (options.momentum or task.momentum) == "correction" and options.method in TOPK
    feedback = tr.ErrorFeedback(momentum=MOMENTUM if corrects else 0.0)
    groups = [{"params": list(model.parameters()), "momentum": MOMENTUM}]
    if corrects:
        groups = feedback.param_groups(model.parameters())
    optimizer = task.optimizer(groups, options.learning_rate or task.learning_rate)
    warmup = max(1, round(WARMUP * options.steps))

    def factor(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * step / options.steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if options.method == "alone":
        return Replica(model, optimizer, schedule, _nothing, _nothing, _nothing)
    if group is None:
        replica = DistributedDataParallel(model, bucket_cap_mb=1024 if options.method == "powersgd" else None)
        if options.method == "fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif options.method == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif options.method == "post-local":
            return _post_local(options, replica, optimizer, schedule)
        elif options.method != "dense":
            replica.register_comm_hook(*tr.ddp_hook(make_method(options, task, dist.get_world_size())))
        return Replica(replica, optimizer, schedule, _nothing, _nothing, _nothing)
    method = None if options.method == "dense" else make_method(options, task, group.world_size)
    wrapped = tr.DistributedOptimizer(optimizer, model, group=group, sync=method, feedback=feedback, name=f"seed{seed}")
    flush = _nothing if options.method in STRATEGIES else wrapped.flush_residuals
    finish = wrapped.local_steps.finish if options.method in SERVED and group.world_size > 1 else _nothing
    return Replica(model, wrapped, schedule, flush, finish, wrapped.close)


def _post_local(
    options: argparse.Namespace,
    replica: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Replica:
    """Torch's own post-local SGD: a hook that stops reducing, and an optimizer that averages parameters."""
    start = round(LOCAL_AFTER * options.steps)
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=start, post_local_gradient_allreduce=False
    )
    replica.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=options.period, warmup_steps=start)
    return Replica(replica, PostLocalSGDOptimizer(optimizer, averager), schedule, _nothing, _nothing, _nothing)


def train(
    options: argparse.Namespace,
    replica: Replica,
    task: Task,
    rank: int,
    seed: int,
    average: Callable[[int], list[float]],
    slow: float,
) -> dict[str, Any]:
    """All steps, each ``slow`` times as long; returns their seconds and what the model was worth from time to time."""
    draw = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    last = options.stop_after or options.steps
    every = max(1, options.steps // options.evaluations)
    seconds, evaluations = [], []
    for step in range(1, last + 1):
        begin = time.perf_counter()
        inputs, targets = task.draw(options.batch or task.batch, draw)
        loss = loss_of(replica.module(inputs), targets)
        if slow > 1:  # before backward, in which DDP waits for other ranks
            time.sleep((slow - 1) * FORWARD_AND_BACKWARD * (time.perf_counter() - begin))
        replica.optimizer.zero_grad()
        if options.flush_every and step % options.flush_every == 0:
            replica.flush()
        loss.backward()
        replica.optimizer.step()
        replica.schedule.step()
        seconds.append(time.perf_counter() - begin)
        if step == last and options.slow <= 1:
            replica.finish()
        if step % every == 0 or step == last:
            loss_now, accuracy = average(step)
            evaluations.append({"step": step, "seconds": sum(seconds), "loss": loss_now, "accuracy": accuracy})
            if rank == 0:
                print(f"seed {seed}, step {step}: loss {loss_now:.4f}, accuracy {accuracy:.2%}, {sum(seconds):.1f} s")
    if options.slow > 1:  # what rank 0 has after its last step, and not what it has when the slow rank has come
        replica.finish()
    return {"seed": seed, "step_s": seconds, "evaluations": evaluations}


def run(options: argparse.Namespace, group: tr.Group | None) -> None:
    """Train from every seed; ``group`` is None behind torch's DDP."""
    rank = dist.get_rank() if group is None else group.rank
    world_size = dist.get_world_size() if group is None else group.world_size
    task = make_task(options.model)
    runs = []
    for seed in range(options.seeds):
        replica = make_replica(options, task, group, seed)

        def average(_step: int, model: nn.Module = replica.module) -> list[float]:
            model = getattr(model, "module", model)
            if options.slow > 1:  # each rank looks at all samples, and waits for nobody
                sums = evaluate(model, task, 0, 1)
            else:
                sums = total(evaluate(model, task, rank, world_size), group)
            return (sums[:2] / sums[2]).tolist()

        before = 0 if group is None else group.statistics().bytes_sent
        run = train(options, replica, task, rank, seed, average, options.slow if rank == world_size - 1 else 1.0)
        run["sent_bytes"] = 0 if group is None else group.statistics().bytes_sent - before
        runs.append(run)
        replica.close()
    if options.json is not None and rank == 0:
        facts = {name: value for name, value in vars(options).items() if name != "json"}
        parameters = sum(parameter.numel() for parameter in replica.module.parameters())
        document = {**facts, "world_size": world_size, "num_parameters": parameters, "runs": runs}
        options.json.write_text(json.dumps(document) + "\n")


def total(sums: Tensor, group: tr.Group | None) -> Tensor:
    """Over all ranks."""
    if group is None:
        dist.all_reduce(sums)
    else:
        group.allreduce(sums, name="evaluation").wait()
    return sums


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
