"""What every operation needs of its tensors: their element types, their memory, and the handle that returns them.

Invariant: this floor submits no operation; ``native/`` and ``groups/`` do.
"""
