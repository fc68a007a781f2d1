"""Datasets that run files and scripts name, as in `build = "weft.data:stdlib"`.

They are defined in `weft/train/data.py` and `weft/train/conversations.py`, and imported when they
are first used.
"""

from lazy_loader import attach

NAMES = ["Dataset", "Images", "Loader", "Text", "collate", "hf", "shapes", "stdlib", "text"]

CHAT = ["Chat", "chat"]

__getattr__, __dir__, __all__ = attach(
    "weft.train", submod_attrs={"data": NAMES, "conversations": CHAT}
)
