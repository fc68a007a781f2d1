"""Datasets that run files and scripts name, as in `build = "weft.data:stdlib"`.

They are defined in `weft/train/data.py` and `weft/train/conversations.py`, and imported when they
are first used.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
