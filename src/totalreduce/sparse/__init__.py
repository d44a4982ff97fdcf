"""What to send when not everything: methods that choose, code and exchange gradients, and give back what they kept.

A *method* is a set of settings (``OkTopk``). Its *session* is one bucket's state on one rank: it accumulates a gradient
onto a residual, and its ``exchange`` is a generator that yields ``actions`` and is given their replies. It knows no
group, thread or clock: ``group_driver`` carries the actions out on a ``Group``, ``c10d_driver`` on any process group of
torch, and ``totalreduce.testing`` on ranks of its own, up to a thousand of them.
"""
