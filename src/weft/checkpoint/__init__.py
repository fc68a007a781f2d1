"""Checkpoints: sharded safetensors and an index that any layout reads.

Open `index.py` first.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
