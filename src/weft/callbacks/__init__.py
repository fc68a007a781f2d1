"""Callbacks of a run, for `[train] callbacks` and for loops of your own (docs/watching.md).

They are defined in `weft/train`, and imported when they are first used.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
