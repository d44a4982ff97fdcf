"""How many pictures a second a network learns from, through Horovod's interface: only the import differs.

totalreduce run -n 2 examples/horovod_synthetic.py --fp16-allreduce
torchrun --nproc-per-node 2 examples/horovod_synthetic.py --use-adasum
"""

import argparse
import math
import statistics
import timeit

import torch
from torch.nn import functional
from torch_tasks import CLASSES, SmallResNet

import totalreduce.horovod as hvd  # was: import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine updates by Adasum")
    parser.add_argument("--width", type=int, default=32, help="of the network")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--num-warmup-batches", type=int, default=2)
    parser.add_argument("--num-batches-per-iter", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # every rank its own pictures
    model = SmallResNet(args.width)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, 3, 32, 32)
    target = torch.arange(args.batch_size) % CLASSES

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def log(line: str) -> None:
        if hvd.rank() == 0:
            print(line, flush=True)

    def average(loss: float) -> float:
        return float(hvd.allreduce(torch.tensor(loss), name="loss").item())

    log(f"batch size {args.batch_size}, {hvd.size()} ranks; loss {average(step()):.4f} at first")
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"iter {number + 1}: {rates[-1]:.1f} pictures/s per rank")
    log(f"loss {average(step()):.4f} at last")
    confidence = 1.96 * statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    mean = statistics.mean(rates)
    log(f"pictures/s per rank: {mean:.1f} +- {confidence:.1f}; on all: {hvd.size() * mean:.1f}")
    norms = hvd.allgather_object(sum(parameter.double().square().sum().item() for parameter in model.parameters()))
    log(f"parameters are {'equal' if len(set(norms)) == 1 else 'DIFFERENT'} on all {hvd.size()} ranks")


if __name__ == "__main__":
    main()
