"""A sequence shared by several ranks at run time."""
