"""Agreement on an order, for libraries that need one: NCCL, gloo, MPI.

``negotiator.py`` is the protocol of one rank, a plain object; ``cache.py``, ``table.py``, ``fusion.py`` and
``stall.py`` are its parts, ``requests.py`` and ``messages.py`` what travels.
"""
