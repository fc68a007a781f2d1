"""Starting the processes of a run, and joining those that a launcher has started."""
