"""A group of ranks as the user sees it: tensors in, work handles out. Nothing here is global.

Invariant: this floor knows tensors but no ``nn.Module``, and no transport by name.
"""
