"""Train with Accelerate.

totalreduce run -n 2 examples/accelerate_fit.py --model gpt
torchrun --nproc-per-node 2 examples/accelerate_fit.py --backend gloo
"""

import itertools

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader
from torch_tasks import Record, loss_of, make_task, parse_options

import totalreduce  # noqa: F401  (brings the back end)

options = parse_options(__doc__)
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=options.backend)])

task = make_task(options)
loader = DataLoader(task.data, batch_size=options.batch, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(task.model, task.optimizer(task.model.parameters()), loader)

record = Record()
epochs = itertools.chain.from_iterable(itertools.repeat(loader))
for inputs, targets in itertools.islice(epochs, options.steps):
    loss = loss_of(model(inputs), targets)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    record.step(loss)
record.finish(options)
accelerator.end_training()  # ends the process group too
