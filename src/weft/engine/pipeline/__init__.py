"""One rank of a pipeline at run time: actions in order, messages, split backward, weight
versions."""
