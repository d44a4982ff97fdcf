"""Starting processes, and finding each other once started."""
