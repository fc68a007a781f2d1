"""Models that run files and scripts name, as in `build = "weft.models:decoder"`.

They are defined in `weft/nn/models/`, and imported when they are first used.
"""

from lazy_loader import attach

NAMES = ["convnet", "decoder"]

__getattr__, __dir__, __all__ = attach("weft.nn", submod_attrs={"models": NAMES})
