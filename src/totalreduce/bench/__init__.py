"""``totalreduce bench``: every figure the project claims comes from one of these commands.

The commands are listed in ``app.py``. A benchmark is a function that ``command.benchmark`` makes a command; its
options are a record. ``launching.run_benchmark`` starts a worker for each rank and returns a record from each;
figures are records, too. A benchmark returns a ``report.Report``, which is printed and saved in one place. The
worker's side is in ``NAME_worker.py``.

An option that makes no sense is a ``ConfigurationError`` before anything starts (exit code 2); a rank that fails and
a result that is wrong are a ``BenchmarkFailedError`` (exit code 1), and there is no figure.
"""
