"""Optimizers with parameter groups, and marks for optimizers of your own (docs/optimizers.md).

They are defined in `weft/engine`, and imported when they are first used.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
