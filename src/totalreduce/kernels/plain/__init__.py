"""The kernels in NumPy, for machines on which Numba cannot be used: ``plain.x`` has those of the module ``kernels.x``.

They take the same arguments, which are documented there, and write the same bits, because ranks with and without
compiled code may be in one job. They take more time and, for a part of the elements at a time, more memory.
"""
