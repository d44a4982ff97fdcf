"""Train with Lightning.

totalreduce run -n 2 examples/lightning_fit.py --model gpt
torchrun --nproc-per-node 2 examples/lightning_fit.py --backend gloo
"""

import os

import pytorch_lightning as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_tasks import Record, loss_of, make_task, parse_options

import totalreduce  # noqa: F401  (brings the strategy)

options = parse_options(__doc__)
task = make_task(options)
record = Record()


class Module(lightning.LightningModule):
    """The model, and what a step is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.model

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return loss_of(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.optimizer(self.model.parameters())

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: object) -> None:
        record.step(outputs["loss"])

    def on_train_end(self) -> None:
        record.finish(options)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp" if options.backend == "gloo" else options.backend,  # "totalreduce": DDP on that back end
    max_steps=options.steps,
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(task.data, batch_size=options.batch, shuffle=True, drop_last=True))
