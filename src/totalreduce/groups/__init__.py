"""The group of ranks that users see: its methods take tensors and return ``Work``. There is no global state.

Invariant: this floor knows tensors but no ``nn.Module``, and no transport by name.
"""
