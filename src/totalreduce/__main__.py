"""``python -m totalreduce``: the ``totalreduce`` command."""

from totalreduce.cli.main import main

main()
