"""Checkpoints: sharded safetensors and an index that any layout reads.

Open `index.py` first.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
