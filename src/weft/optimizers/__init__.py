"""Optimizers with parameter groups, and marks for optimizers of your own (docs/optimizers.md).

They are defined in `weft/engine`, and imported when they are first used.
"""

from lazy_loader import attach

NAMES = {
    "adamw8bit": ["AdamW8bit"],
    "lion": ["Lion"],
    "optimizer_factory": ["known_optimizers", "make_optimizer"],
    "muon": ["MuonWithAdamW"],
    "optimizers": ["elementwise", "whole_tensors"],
}

__getattr__, __dir__, __all__ = attach("weft.engine", submod_attrs=NAMES)
