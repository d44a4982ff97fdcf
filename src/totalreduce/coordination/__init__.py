"""The agreement of ranks on one order of operations, for libraries that need one: NCCL, gloo, MPI.

``negotiator.py`` is the protocol of one rank; its docstring lists its parts. ``requests.py`` and ``messages.py`` have
the form of messages. ``fusion.py`` decides which operations share one call of the library.
"""
