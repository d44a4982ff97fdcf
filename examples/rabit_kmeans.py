"""K-means on several ranks, in Rabit's loop: a rank that is killed is replaced, and the result has the same bits.

    totalreduce run -n 4 --on-loss replace examples/rabit_kmeans.py

Each rank has its own part of the points. A round assigns them to the nearest centres, adds up the points of each centre
over all ranks, and saves the new centres.
"""

import argparse
import hashlib

import torch

import totalreduce as tr

FEATURES = 4


def points_of(rank: int, count: int) -> torch.Tensor:
    """Return this rank's part of the data: a program would read it from a file."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000, help="of each rank")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    group = tr.init()
    points = points_of(group.rank, arguments.points)
    # All ranks begin with the values of rank 0, but for local values.
    state = tr.Checkpoint(
        centres=points[: arguments.clusters].clone(),
        history=[],
        local={"assigned": torch.zeros(arguments.points, dtype=torch.int64)},
    )
    with tr.replayed(state, group) as job:
        for _ in range(job.version, arguments.rounds):
            distances = torch.cdist(points, state.centres)
            nearest = distances.argmin(dim=1)
            moved = (nearest != state.assigned).sum()
            sums = torch.zeros(arguments.clusters, FEATURES + 1, dtype=torch.float64)
            sums.index_add_(0, nearest, torch.cat([points, torch.ones(len(points), 1, dtype=torch.float64)], dim=1))

            job.allreduce(sums, name="sums")
            job.allreduce(moved, name="moved")
            state.centres = sums[:, :FEATURES] / sums[:, FEATURES:].clamp(min=1.0)
            state.assigned = nearest
            state.history.append(int(moved))
            job.checkpoint()

        digest = hashlib.sha256(state.centres.numpy().tobytes()).hexdigest()[:16]
        everywhere = job.allgather(torch.bincount(state.assigned, minlength=arguments.clusters), name="counts")
        if group.rank == 0:
            print(f"centres {digest}, {int(everywhere.sum())} points, moved {state.history[-1]} in the last round")


if __name__ == "__main__":
    main()
