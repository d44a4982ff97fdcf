"""Collectives that another library carries out: NCCL, gloo, UCC or MPI, in an order on which the ranks agree.

``collectives.py`` is the interface of such a library; ``torch_collectives.py`` and ``mpi_collectives.py`` implement it.
``coordinator.py`` is the entry point: it submits operations in any order, has the ranks agree on one order
(``coordination/``), and hands what is ready on all ranks to ``executor.py``. ``planned.py`` starts the reductions of a
plan in the order of the plan, without an agreement in every step.
"""
