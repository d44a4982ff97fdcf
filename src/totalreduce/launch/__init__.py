"""Starting the ranks of a job, and connecting them with each other."""
