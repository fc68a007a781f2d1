"""The learning rate of every step, by its definition."""

from __future__ import annotations

import math
from fractions import Fraction


def rate_factor(step: int, steps: int, warmup: int, decay: str, least: float) -> float:
    """What the learning rate of a step is multiplied by.

    Args:
        step: its number; the first is 0.
        steps: of the run.
        warmup: steps in which the factor rises to 1, by as much in each.
        decay: "constant", or how it falls after them: "linear", "cosine".
        least: the factor that it falls to.
    """
    done = Fraction(max(0, step - warmup), max(1, steps - warmup))
    if step < warmup:
        return float(Fraction(step + 1, warmup))
    if decay == "linear":
        return float(1 - done) * (1.0 - least) + least
    if decay == "cosine":  # Loshchilov and Hutter 2017, equation 5, without restarts
        return least + 0.5 * (1.0 - least) * (1.0 + math.cos(math.pi * float(done)))
    return 1.0
