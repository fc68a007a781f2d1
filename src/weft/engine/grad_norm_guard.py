"""Which steps are to be taken, by the norms of the gradients of those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import isfinite
from statistics import median

NORMS, FEW = 64, 16  # of how many steps the median is taken, and before how many it says nothing


class GradNormGuard:
    """A gradient is trusted if it is finite, and its norm at most `skip` times the median of the
    last that were."""

    def __init__(self, skip: float):
        self.skip = skip
        self.norms: deque[float] = deque(maxlen=NORMS)  # of the last steps that were taken

    def __call__(self, norm: float) -> bool:
        """Whether a step with a gradient of this norm is to be taken: then its norm is
        remembered."""
        known = len(self.norms) >= FEW
        if not isfinite(norm) or (known and norm > self.skip * median(self.norms)):
            return False
        self.norms.append(norm)
        return True

    def remember(self, norms: Iterable[float]) -> None:
        """These, in place of what is remembered."""
        self.norms.clear()
        self.norms.extend(map(float, norms))
