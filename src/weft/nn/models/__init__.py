"""Two models as a user would write them: a decoder-only transformer and a small convolutional
net."""

from __future__ import annotations

from .convnet import convnet
from .decoder import decoder

__all__ = ["convnet", "decoder"]
