"""Sparse methods: they select, encode and exchange a part of the gradients, and keep the rest as residuals.

A *method* is a set of settings (``OkTopk``). Its *session* is the state of one bucket on one rank: it adds the residual
to a gradient and selects elements, and its ``exchange`` is a generator that yields ``actions`` and is sent their
replies. A session knows no group, thread or clock: ``group_driver`` carries the actions out on a ``Group``,
``c10d_driver`` on any process group of torch, and ``totalreduce.testing`` on up to a thousand ranks in one process.
"""
