"""Train a small network to read digits, through Horovod's elastic interface: only the import differs.

totalreduce run -n 4 --on-loss replace examples/horovod_elastic.py    # kill a worker: another one takes its place
totalreduce run -n 4 --on-loss shrink examples/horovod_elastic.py     # the others go on; it joins when it is back
totalreduce run -n 4 examples/horovod_elastic.py                      # the same program, where a loss ends the job
"""

import argparse

import torch
from horovod_mnist import Net, load_digits
from torch.nn import functional
from torch.utils.data import DataLoader

import totalreduce.horovod as hvd  # was: import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=8000, help="at most")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02, help="per rank")
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--batches-per-commit", type=int, default=10)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    dataset = load_digits(None, args.examples)
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, args.epochs):  # noqa: B020  (as in Horovod's documentation)
            state.model.train()
            for batch, (images, labels) in enumerate(loader):
                state.optimizer.zero_grad()
                loss = functional.cross_entropy(state.model(images), labels)
                loss.backward()
                state.optimizer.step()
                state.sampler.record_batch(batch, len(labels))
                if (batch + 1) % args.batches_per_commit == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            average = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {average:.4f} on {hvd.size()} ranks", flush=True)
            state.sampler.set_epoch(state.epoch + 1)
        state.epoch = args.epochs  # a rank that begins here again has nothing left to do
        state.commit()

    def on_state_reset() -> None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.lr * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)

    norms = hvd.allgather_object(sum(parameter.double().square().sum().item() for parameter in model.parameters()))
    if hvd.rank() == 0:
        print(f"parameters are {'equal' if len(set(norms)) == 1 else 'DIFFERENT'} on all {hvd.size()} ranks")


if __name__ == "__main__":
    main()
