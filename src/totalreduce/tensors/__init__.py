"""The tensors of operations: their element types, their memory while in flight, and the handle that returns them.

Invariant: this floor submits no operation; ``native/`` and ``groups/`` do.
"""
