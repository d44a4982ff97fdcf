"""Trains with DistributedDataParallel and ``tr.ddp_hook`` over ``tr.attempts``; ranks kill themselves where --die says.

Two buckets, whose order DDP changes after its first pass. Files: ``final-RANK.json``.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
from totalreduce.recovery.vote import Vote

METHODS = {
    "topka": tr.TopkA(density=0.1),
    "oktopk": tr.OkTopk(density=0.1, threshold_interval=3, partition_interval=5),
    "powersgd": tr.PowerSGD(rank=1),
}
NUM_STEPS = 10


def digest(tensors) -> str:
    text = json.dumps({name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in tensors.items()})
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--behind", type=int, default=-1, help="rank 0 learns in this step's vote that rank 1 is lost")
    parser.add_argument("--overflow", type=int, default=-1, help="the step that a GradScaler leaves out")
    parser.add_argument("--accumulate", type=int, default=1, help="the number of batches of a step")
    parser.add_argument("--die", default="", help="SEAT.INCARNATION:VERSION:PLACE[,...]")
    arguments = parser.parse_args()
    seat, incarnation = os.environ["RANK"], os.environ.get("TOTALREDUCE_INCARNATION", "0")
    deaths = [death.split(":") for death in arguments.die.split(",") if death]
    mine = {(int(version), place) for who, version, place in deaths if who == f"{seat}.{incarnation}"}

    torch.manual_seed(7)
    module = torch.nn.Sequential(
        *(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2))
    ).to(getattr(torch, arguments.dtype))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100, enabled=arguments.overflow >= 0)
    state = tr.State(model=module, optimizer=optimizer, scaler=scaler)
    snapshots = tr.Snapshots(arguments.snapshots, every=5) if arguments.snapshots else None

    def die_at(place: str) -> None:
        if (state.version, place) in mine:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    if seat == "0" and incarnation == "0":
        end = Vote.end

        def late(vote: Vote) -> int:
            ballot = end(vote)
            if state.version == arguments.behind:
                raise tr.PeerLost(1, "as if this rank had noticed the loss of rank 1 before the result")
            return ballot

        Vote.end = late

    for attempt in tr.attempts(state, replicas=arguments.replicas, snapshots=snapshots):
        with attempt:
            model = DistributedDataParallel(module, bucket_cap_mb=0.002)
            feedback = tr.ErrorFeedback(elements_min=1, momentum=0.5)
            hook_state, hook = tr.ddp_hook(METHODS[arguments.method], feedback=feedback, grad_scaler=scaler)
            model.register_comm_hook(hook_state, hook)
            for step in range(state.steps, NUM_STEPS):
                rows = torch.randn(8, 16).to(module[0].weight.dtype)
                die_at("forward")
                loss = (model(rows).float() - rows[:, :2].float()).square().mean()
                if step == arguments.overflow:
                    loss = loss + module[4].bias.sum() * float("inf")
                scaler.scale(loss).backward()
                die_at("backward")
                if (step + 1) % arguments.accumulate == 0:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    die_at("updated")
                attempt.commit()
                if snapshots is not None:
                    snapshots.wait()
            saved = hook_state.state_dict(model)
            rank = dist.get_rank()
    final = {
        "digest": digest({name: each.float() for name, each in module.state_dict().items()}),
        "residuals": digest(saved["residuals"]),
        "velocities": digest(saved["velocities"]),
        "sessions": [sorted((key, str(value)) for key, value in session.items()) for session in saved["sessions"]],
        "steps": [state.version, saved["steps"], saved["skipped_steps"]],
        "norm": hook_state.residual_norm(),
    }
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
