"""A rank that submits 50 tensors a step in its own random order, with random delays, and leaves some out.

Prints one JSON line: a digest of every result of every step, and statistics. The data depends on ``--seed`` only;
orders and delays also on ``--chaos``, so two runs with different chaos must print the same digest.
"""

import argparse
import hashlib
import json
import random
import time

import torch

import totalreduce as tr

NUM_TENSORS = 50
FLOATING_BYTES = 256 * 1024


def contribution(seed: int, step: int, index: int, rank: int, count: int) -> torch.Tensor:
    """Integers in float64, so that sums are exact; every element of every rank differs."""
    base = (step * 131 + index * 17 + seed) % 1009
    return (torch.arange(count, dtype=torch.float64) * 64 + rank * 7 + base) * 3


def takes_part(seed: int, step: int, index: int, rank: int) -> bool:
    """Whether ``rank`` submits the tensor in this step; about one in ten is left out."""
    return random.Random(f"{seed}/{step}/{index}/{rank}").random() > 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes_of = random.Random(args.seed)
    sizes = [sizes_of.choice([0, 1, 3, 64, 257, 1000, 4099, 20011]) for _ in range(NUM_TENSORS)]
    config = tr.EngineConfig(segment_bytes=16 * 1024, eager_bytes=32 * 1024, floating_bytes_max=FLOATING_BYTES)
    digest = hashlib.sha256()
    with tr.init(engine=config, timeout_s=120, tcp=tr.TcpConfig(silence_s=20)) as group:
        world = range(group.world_size)
        plan = group.plan(
            "p", [tr.TensorSpec(f"t{i}", (n,), torch.float64) for i, n in enumerate(sizes)], op=tr.ReduceOp.SUM
        )
        chaos = random.Random(f"{args.chaos}/{group.rank}")
        for number in range(args.steps):
            order = list(range(NUM_TENSORS))
            chaos.shuffle(order)
            step = plan.step()
            for index in order:
                if chaos.random() < 0.1:
                    time.sleep(chaos.random() * args.delay_ms / 1000)
                if takes_part(args.seed, number, index, group.rank):
                    step.submit(f"t{index}", contribution(args.seed, number, index, group.rank, sizes[index]))
            results = step.finish()
            for index, count in enumerate(sizes):
                expected = torch.zeros(count, dtype=torch.float64)
                for rank in world:
                    if takes_part(args.seed, number, index, rank):
                        expected += contribution(args.seed, number, index, rank, count)
                result = results[f"t{index}"]
                if not torch.equal(result, expected):
                    raise SystemExit(f"rank {group.rank}, step {number}, t{index}: {result[:4]} is not {expected[:4]}")
                digest.update(result.numpy().tobytes())
        group.barrier()
        numbers = group.statistics().as_dict()
    print(json.dumps({"digest": digest.hexdigest(), "bound": FLOATING_BYTES, **numbers}), flush=True)


main()
