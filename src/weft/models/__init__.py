"""Models that run files and scripts name: `build = "weft.models:decoder"`. They are defined in
`weft/nn/models/`."""

from weft.nn import convnet, decoder

__all__ = ["convnet", "decoder"]
