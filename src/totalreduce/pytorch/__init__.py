"""Floor 6: training with PyTorch. The only floor that knows ``nn.Module`` and ``torch.optim``.

Invariant: this floor speaks to other ranks through ``Group`` only.
"""
