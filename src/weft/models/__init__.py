"""Models that run files and scripts name, as in `build = "weft.models:decoder"`.

They are defined in `weft/nn/models/`, and imported when they are first used.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
