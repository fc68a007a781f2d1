"""Losses that run files and scripts name: `loss = "weft.losses:next_token"`. They are defined in
`weft/nn/losses.py`."""

from weft.nn import (
    accepts_sharded_logits,
    classification,
    cross_entropy,
    is_positionwise,
    logits_of,
    mse,
    next_token,
    positionwise,
    vocab_parallel,
)

__all__ = [
    "accepts_sharded_logits",
    "classification",
    "cross_entropy",
    "is_positionwise",
    "logits_of",
    "mse",
    "next_token",
    "positionwise",
    "vocab_parallel",
]
