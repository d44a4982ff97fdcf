"""Train a small network to read digits, through Horovod's interface: only the import differs.

totalreduce run -n 2 examples/horovod_mnist.py --data-dir mnist     # a folder with MNIST's idx files
torchrun --nproc-per-node 2 examples/horovod_mnist.py               # scikit-learn's digits
"""

import argparse
import gzip
from pathlib import Path

import torch
from real_data import digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import totalreduce.horovod as hvd  # was: import horovod.torch as hvd

MAGIC_IMAGES, MAGIC_LABELS = 2051, 2049


def read_idx(folder: Path, kind: str, magic: int) -> Tensor:
    """The first idx file of a kind in a folder, packed or not; ``uint8[count, ...]``."""
    found = sorted(path for path in folder.glob(f"*{kind}*-ubyte*") if path.suffix in ("", ".gz"))
    found.sort(key=lambda path: not path.name.startswith("train"))
    if not found:
        raise SystemExit(f"no *{kind}*-ubyte(.gz) in {folder}: put MNIST's idx files there, or leave --data-dir out")
    content = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    dimensions = content[3]
    header = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1 + dimensions)]
    if header[0] != magic:
        raise SystemExit(f"{found[0]} is no idx file of {kind}")
    return torch.frombuffer(bytearray(content[4 * len(header) :]), dtype=torch.uint8).view(header[1:])


def load_digits(folder: Path | None, count: int) -> TensorDataset:
    """At most ``count`` digits of idx files, or scikit-learn's: ``float[count, 1, 28, 28]``, and their values."""
    if folder is None:
        pictures, values = digits()
        return TensorDataset(functional.interpolate(pictures[:count], size=(28, 28)), values[:count])
    images = read_idx(folder, "images", MAGIC_IMAGES)[:count]
    labels = read_idx(folder, "labels", MAGIC_LABELS)[:count]
    return TensorDataset(images[:, None].float() / 255.0 - 0.13, labels.long())


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.third, self.fourth = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """``float[batch, 1, 28, 28]`` to logits, ``float[batch, 10]``."""
        hidden = functional.relu(functional.max_pool2d(self.first(images), 2))
        hidden = functional.relu(functional.max_pool2d(self.second(hidden), 2))
        return self.fourth(functional.relu(self.third(hidden.flatten(1))))


def metric_average(value: float, name: str) -> float:
    """The average over all ranks."""
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int) -> float:
    """One epoch; returns the average loss over all ranks."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    average = metric_average(sum(losses) / len(losses), "train_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: train loss {average:.4f}", flush=True)
    return average


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, sampler: DistributedSampler) -> None:
    """Loss and accuracy over all ranks' parts of the test data."""
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        logits = model(images)
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
    loss = metric_average(loss / len(sampler), "avg_loss")
    accuracy = metric_average(correct / len(sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test loss {loss:.4f}, accuracy {accuracy:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with idx files, else scikit-learn's digits")
    parser.add_argument("--examples", type=int, default=8000, help="for training and testing together, at most")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine updates by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + hvd.rank())  # every rank its own: the parameters are broadcast below

    data = load_digits(args.data_dir, args.examples)
    held_back = max(1, len(data) // 5)
    train_data = TensorDataset(*(tensor[held_back:] for tensor in data.tensors))
    test_data = TensorDataset(*(tensor[:held_back] for tensor in data.tensors))
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_data, batch_size=500, sampler=test_sampler)

    model = Net()
    # The joint batch is larger by the number of ranks, so the steps may be, too; Adasum does without.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        train(model, optimizer, train_loader, epoch)
        test(model, test_loader, test_sampler)

    norms = hvd.allgather_object(sum(parameter.double().square().sum().item() for parameter in model.parameters()))
    if hvd.rank() == 0:
        print(f"parameters are {'equal' if len(set(norms)) == 1 else 'DIFFERENT'} on all {hvd.size()} ranks")


if __name__ == "__main__":
    main()
