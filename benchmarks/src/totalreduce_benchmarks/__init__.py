"""Benchmarks that measure totalreduce itself: more commands of ``totalreduce bench``.

``pyproject.toml`` lists the commands as entry points. A command is made as those of ``totalreduce.bench`` are.
``faults*.py`` and ``ps_faults*.py`` kill ranks of training jobs, ``training.py`` is what ``bench train`` and
``bench strategies`` share, and ``summary.py`` is ``bench report``. The worker's side is in ``NAME_worker.py``.
"""
