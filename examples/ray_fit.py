"""Train with Ray Train.

python examples/ray_fit.py --model gpt
WORKERS=8 python examples/ray_fit.py --model gpt --backend gloo
"""

import argparse
import os
import tempfile

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.utils.data import DataLoader, DistributedSampler
from torch_tasks import Record, batches, loss_of, make_task, parse_options

import totalreduce  # noqa: F401  (brings the back end; torch finds it by itself where the package is installed)


def train(options: argparse.Namespace) -> None:
    """Train on one worker, whose process group Ray has made."""
    task = make_task(options)
    model = prepare_model(task.model)  # DistributedDataParallel, if there are several workers
    optimizer = task.optimizer(model.parameters())
    sampler = DistributedSampler(task.data, seed=2)
    loader = DataLoader(task.data, batch_size=options.batch, sampler=sampler, drop_last=True)
    record = Record()
    for inputs, targets in batches(loader, sampler, options.steps):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.step(loss)
    record.finish(options)


if __name__ == "__main__":
    options = parse_options(__doc__)
    if options.json is not None:
        options.json = options.json.resolve()  # workers run in another folder
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config=options,
            torch_config=TorchConfig(backend=options.backend),
            scaling_config=ray.train.ScalingConfig(num_workers=int(os.environ.get("WORKERS", "2"))),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        trainer.fit()
