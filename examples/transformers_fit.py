"""Train with the Trainer of Hugging Face's Transformers.

totalreduce run -n 2 examples/transformers_fit.py --model gpt
torchrun --nproc-per-node 2 examples/transformers_fit.py --model gpt --backend gloo
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from real_data import VOCABULARY
from torch_tasks import CONTEXT, Record, make_task, parse_options
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import totalreduce  # noqa: F401  (brings the back end)

options = parse_options(__doc__)
record = Record()


class Losses(TrainerCallback):
    """Records the loss of every step, which the Trainer averages over the ranks."""

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            record.step(torch.tensor(logs["loss"]))


def collate(examples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as the model takes it; it shifts the labels itself."""
    tokens = torch.stack([inputs for inputs, _ in examples])
    return {"input_ids": tokens, "labels": tokens}


task = make_task(options)  # of which only the data are used
config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=CONTEXT,
    n_embd=options.width or 256,
    n_layer=options.layers,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config).to(getattr(torch, options.dtype))  # random weights: nothing is downloaded
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend=options.backend,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        dataloader_drop_last=True,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=task.data, callbacks=[Losses()])
    trainer.train()
record.finish(options)
dist.destroy_process_group()
