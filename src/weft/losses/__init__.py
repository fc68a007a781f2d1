"""Losses that run files and scripts name, as in `loss = "weft.losses:next_token"`.

They are defined in `weft/nn/losses.py`, and imported when they are first used.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
