"""K-means of texts on several ranks, in Rabit's loop: a rank that is killed is replaced, with the same bits in the end.

    totalreduce run -n 4 --on-loss replace examples/rabit_kmeans.py

A point is a paragraph of Python's documentation: the share of each character. Each rank has its own part of the
points. A round assigns them to the nearest centres, adds up the points of each centre over all ranks, and saves the
new centres.
"""

import argparse
import hashlib

import torch
from real_data import VOCABULARY, characters, documentation

import totalreduce as tr

SHORTEST = 40


def points_of(group: tr.Group, count: int) -> torch.Tensor:
    """Return this rank's part of the data, at most ``count`` points: ``float64[points, VOCABULARY]``."""
    paragraphs = [text for text in documentation().split("\n\n") if len(text) >= SHORTEST]
    own = paragraphs[group.rank :: group.world_size][:count]
    return torch.stack([characters(text).bincount(minlength=VOCABULARY).double() / len(text) for text in own])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000, help="of each rank, at most")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    group = tr.init()
    points = points_of(group, arguments.points)
    # All ranks begin with the values of rank 0, but for local values.
    state = tr.Checkpoint(
        centres=points[: arguments.clusters].clone(),
        history=[],
        local={"assigned": torch.zeros(len(points), dtype=torch.int64)},
    )
    with tr.replayed(state, group) as job:
        for _ in range(job.version, arguments.rounds):
            distances = torch.cdist(points, state.centres)
            nearest = distances.argmin(dim=1)
            moved = (nearest != state.assigned).sum()
            sums = torch.zeros(arguments.clusters, VOCABULARY + 1, dtype=torch.float64)
            sums.index_add_(0, nearest, torch.cat([points, torch.ones(len(points), 1, dtype=torch.float64)], dim=1))

            job.allreduce(sums, name="sums")
            job.allreduce(moved, name="moved")
            state.centres = sums[:, :-1] / sums[:, -1:].clamp(min=1.0)
            state.assigned = nearest
            state.history.append(int(moved))
            job.checkpoint()

        digest = hashlib.sha256(state.centres.numpy().tobytes()).hexdigest()[:16]
        everywhere = job.allgather(torch.bincount(state.assigned, minlength=arguments.clusters), name="counts")
        if group.rank == 0:
            print(f"centres {digest}, {int(everywhere.sum())} points, moved {state.history[-1]} in the last round")


if __name__ == "__main__":
    main()
