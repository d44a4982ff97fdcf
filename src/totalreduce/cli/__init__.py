"""The ``totalreduce`` command: one file per subcommand."""
