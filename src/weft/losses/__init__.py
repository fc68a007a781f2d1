"""Losses that run files and scripts name, as in `loss = "weft.losses:next_token"`.

They are defined in `weft/nn/losses.py`, and imported when they are first used.
"""

from lazy_loader import attach

NAMES = [
    "accepts_sharded_logits",
    "causal_lm",
    "classification",
    "cross_entropy",
    "is_positionwise",
    "is_whole_batch",
    "logits_of",
    "mse",
    "next_token",
    "positionwise",
    "vocab_parallel",
    "whole_batch",
]

__getattr__, __dir__, __all__ = attach("weft.nn", submod_attrs={"losses": NAMES})
