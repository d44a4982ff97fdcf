"""Four steps behind DDP, Lightning, Accelerate or the Trainer, by ``tr.sync_ddp`` with the strategy LocalSGD.

Each rank prints after every step whether the ranks' parameters differ, as a line of JSON.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import totalreduce as tr

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
sync = tr.LocalSGD(period=2)
differ = []


def data():
    """Inputs of this rank: other ones than those of the other rank."""
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def look():
    mine = torch.cat([each.detach().flatten() for each in net.parameters()])
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    differ.append(not torch.equal(all_ranks[0], all_ranks[1]))


def ddp():
    dist.init_process_group("totalreduce")
    model = DistributedDataParallel(net)
    optimizer = tr.sync_ddp(model, sgd, sync)
    for inputs in data().split(8):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        look()
    optimizer.strategy_steps.finish()


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="totalreduce")])
    model, optimizer = accelerator.prepare(net, sgd)
    optimizer.optimizer = tr.sync_ddp(model, optimizer.optimizer, sync)
    for inputs in data().split(8):
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        look()


def lightning():
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return sgd

        def on_train_batch_end(self, *_):
            look()

    class Sync(pytorch_lightning.Callback):
        def on_train_start(self, trainer, module):
            trainer.optimizers = [tr.sync_ddp(trainer.strategy.model, each, sync) for each in trainer.optimizers]

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="totalreduce",
        max_steps=4,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Sync()],
    )
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), DataLoader(TensorDataset(inputs), batch_size=8))


def transformers():
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, inputs):
            return {"loss": self.net(inputs).square().mean()}

    class Sync(TrainerCallback):
        def on_train_begin(self, *_, **__):
            trainer.optimizer.optimizer = tr.sync_ddp(trainer.model_wrapped, trainer.optimizer.optimizer, sync)

        def on_step_end(self, *_, **__):
            look()

    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    examples = [{"inputs": each} for each in inputs]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="totalreduce",
            max_steps=4,
            per_device_train_batch_size=8,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = Trainer(Model(), arguments, train_dataset=examples, optimizers=(sgd, None), callbacks=[Sync()])
        trainer.train()


{"ddp": ddp, "accelerate": accelerate, "lightning": lightning, "transformers": transformers}[sys.argv[1]]()
print(json.dumps(differ), flush=True)
dist.destroy_process_group()
