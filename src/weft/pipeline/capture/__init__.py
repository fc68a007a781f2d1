"""One forward of a model, recorded: which modules and functions ran on which tensors."""
