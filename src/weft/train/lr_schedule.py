"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def lr_factor(
    step: int, steps: int, warmup: int = 0, decay: str = "constant", min_ratio: float = 0.0
) -> float:
    """What the learning rate of step `step` (the first is 0) of `steps` is multiplied by.

    Rises in a line over the first `warmup` steps, then falls to `min_ratio` at step `steps`, in a
    line or as half a cosine (Loshchilov and Hutter 2017), or stays ("constant").
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    falling = 1 - progress if decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_ratio + (1 - min_ratio) * falling
