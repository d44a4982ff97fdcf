"""Trains with ``hvd.elastic``; ranks kill themselves where --die says so, and write what they did to a folder.

Files: ``final-RANK.json``; ``samples-SEAT-INCARNATION.jsonl`` with one line for each commit, with the samples since
the commit before; ``calls-SEAT-INCARNATION.jsonl`` with one line for each call of the function, and for each interrupt.
"""

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import totalreduce as tr
import totalreduce.horovod as hvd
from totalreduce.horovod.context import context


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--commit-every", type=int, default=1)
    parser.add_argument("--know-batch", action="store_true", help="the sampler knows the batch size")
    parser.add_argument("--hold", type=int, default=0, help="wait for so many ranks")
    parser.add_argument("--hold-at", type=int, default=0, help="the step at which the ranks wait for others")
    parser.add_argument("--die", default="", help="SEAT:STEP:PLACE[,...], by the first incarnation of the seat")
    parser.add_argument("--behind", default="", help="SEAT:STEP: this rank notices a loss before it commits")
    parser.add_argument("--no-sampler", action="store_true", help="the batches depend on the step, and epochs have ten")
    parser.add_argument("--fail", action="store_true", help="rank 1 raises a ValueError in step 3")
    parser.add_argument("--absent", action="store_true", help="processes that are started again do not come")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        sys.path.append(str(Path(__file__).parents[2] / "helpers"))
        importlib.import_module("fake_accelerator").load()

    if arguments.absent and os.environ.get("TOTALREDUCE_INCARNATION", "0") != "0":
        time.sleep(60)
    hvd.init()
    seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
    deaths = [death.split(":") for death in arguments.die.split(",") if death and incarnation == 0]
    mine = {(int(step), place) for where, step, place in deaths if int(where) == seat}
    log = (arguments.folder / f"samples-{seat}-{incarnation}.jsonl").open("w", buffering=1)
    calls = (arguments.folder / f"calls-{seat}-{incarnation}.jsonl").open("w", buffering=1)

    inputs = torch.randn(arguments.samples, 16, generator=torch.Generator().manual_seed(1))
    dataset = [(index, row, row.sum()) for index, row in enumerate(inputs)]
    torch.manual_seed(7 + seat)  # the first sync makes the parameters equal
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    sampler = hvd.elastic.ElasticSampler(dataset, seed=3, batch_size=arguments.batch if arguments.know_batch else None)
    loader = DataLoader(dataset, batch_size=arguments.batch, sampler=sampler)
    resets = []

    def die_at(place: str) -> None:
        if (state.step, place) in mine:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def batches():
        """Return the batches of the rest of the epoch."""
        if not arguments.no_sampler:
            return loader
        chosen = [(step * hvd.size() + hvd.rank()) * 8 % (arguments.samples - 8) for step in range(state.step, 10)]
        return [(torch.arange(at, at + 8), inputs[at : at + 8], inputs[at : at + 8].sum(1)) for at in chosen]

    @hvd.elastic.run
    def train(state):
        call = {"size": hvd.size(), "step": state.step, "epoch": state.epoch}
        calls.write(json.dumps(call) + "\n")
        used = []

        def note(commit):
            """Write the samples since the last commit with their epochs; ``members`` is the number of the group."""
            members = context.group.operations.runner.engine.outbox.epoch
            log.write(json.dumps({"commit": commit, "members": members, "samples": used}) + "\n")
            used.clear()

        try:
            while state.epoch < arguments.epochs:
                train_epoch(state, used, note)
        except hvd.elastic.HostsUpdatedInterrupt:
            note(f"{state.commits} and until step {state.step}")
            calls.write(json.dumps({**call, "interrupted_at": state.step}) + "\n")
            raise
        return state.step

    def train_epoch(state, used, note):
        for batch, (indices, rows, targets) in enumerate(batches()):
            while state.step == arguments.hold_at and hvd.size() < arguments.hold:
                time.sleep(0.05)
                state.check_host_updates()
            optimizer.zero_grad()
            die_at("forward")
            if arguments.fail and (seat, incarnation, state.step) == (1, 0, 3):
                raise ValueError("a mistake of the program")
            loss = torch.nn.functional.mse_loss(
                model(rows.to(arguments.device)).squeeze(1), targets.to(arguments.device)
            )
            loss.backward()
            die_at("backward")
            optimizer.step()
            scheduler.step()
            die_at("updated")
            sampler.record_batch(batch, len(indices))
            if f"{seat}:{state.step}" == arguments.behind and incarnation == 0:
                arguments.behind = ""
                raise tr.PeerLost(0, "as if this rank had noticed the loss of rank 0 before its commit")
            state.step += 1
            used += [(state.epoch, index) for index in indices.tolist()]
            if state.step % arguments.commit_every:
                state.check_host_updates()
                continue
            state.commits += 1
            state.commit()
            note(state.commits)
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="total")
        state.totals.append(total.item())
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commits += 1
        state.commit()
        note(state.commits)

    values = {} if arguments.no_sampler else {"sampler": sampler}
    state = hvd.elastic.TorchState(
        model, optimizer, scheduler=scheduler, epoch=0, step=0, commits=0, totals=[], **values
    )
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    returned = train(state)
    sizes = hvd.allgather_object(hvd.size())
    text = json.dumps(
        [hashlib.sha256(each.detach().cpu().numpy().tobytes()).hexdigest() for each in model.parameters()]
    )
    moments = [entry["exp_avg"].double().sum().item() for entry in optimizer.state_dict()["state"].values()]
    final = {"digest": text, "moments": moments, "step": state.step, "returned": returned, "totals": state.totals}
    final |= {"lr": scheduler.get_last_lr(), "sizes": sizes, "resets": resets}
    (arguments.folder / f"final-{hvd.rank()}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
