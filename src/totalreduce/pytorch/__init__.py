"""Training with PyTorch. The lowest floor that knows ``nn.Module`` and ``torch.optim``.

Invariant: this floor speaks to other ranks through ``Group`` only, and in ``ddp_hook`` through DDP's process group.
"""
