"""Laws that random numbers of training keep, whatever drew them.

The reference gets the same dropout masks and random numbers as the layout, so a comparison says
nothing of them. What dropout and a distribution are does: a mask keeps an element with probability
1 - p, and other samples, calls and steps have other masks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import torch
from torch import Tensor

DEVIATIONS = 8.0  # of a mean, in standard deviations of it: chance alone takes 1e15 of them
FEWEST = 100  # elements whose mean says something
SURPRISE = 36.0  # -log of the probability that chance breaks a law
_LOG_OF_VALUES = log(2**8)  # of the fewest values that a number may have: those of bfloat16


class DrawLaws:
    """Holds what is drawn in a run to the laws. `broken`: those that it broke, each once."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self._seen: dict[tuple[torch.Size, bytes], tuple[int, str]] = {}

    def mask(self, keep: Tensor, p: float, step: int, call: str, samples: int | None) -> None:
        """A mask of dropout with probability `p`, drawn by `call` in `step`.

        Args:
            keep: bool, true for what is kept.
            p: the probability of dropping an element.
            step: number of the optimizer step.
            call: names the call of dropout: the microbatch, and the place in its forward.
            samples: the dim that counts samples; None where all share one mask.
        """
        n = keep.numel()
        rate = float(keep.double().mean()) if n else 1.0 - p
        if n >= FEWEST and abs(rate - (1 - p)) > DEVIATIONS * sqrt(p * (1 - p) / n):
            self._break(f"dropout {call} with p = {p} keeps {rate:.3g} of its elements")
        same = -log(max(p * p + (1 - p) * (1 - p), 1e-300))  # for each element
        if samples is not None and keep.ndim and keep.shape[samples] > 1:
            rows = keep.movedim(samples, 0).flatten(1)
            if rows.shape[1] * same > SURPRISE and bool((rows[1:] == rows[:-1]).all(1).any()):
                self._break(f"dropout {call} drops the same elements of two samples")
        if n * same > SURPRISE:
            self._once(keep, step, f"dropout {call}")

    def numbers(
        self, values: Tensor, below: Callable[[Tensor], Tensor], step: int, call: str
    ) -> None:
        """Independent numbers, of which the part `below(x)` is at most x: the greatest distance
        between that and what is found decides (Kolmogorov 1933; bound of Massart 1990)."""
        n = values.numel()
        places = below(values.detach().double().flatten().sort().values)
        steps = torch.arange(n + 1, dtype=torch.float64, device=values.device) / max(1, n)
        off = max((steps[1:] - places).max(), (places - steps[:-1]).max()) if n else 0.0
        if n >= FEWEST and float(off) > sqrt(SURPRISE / (2 * n)):
            self._break(f"{call} is off its distribution by {float(off):.2g}")
        if n * _LOG_OF_VALUES > SURPRISE:
            self._once(values, step, call)

    def whole_numbers(self, values: Tensor, mean: float, deviation: float, call: str) -> None:
        """Independent numbers of few possible ones, with this mean and standard deviation."""
        n = values.numel()
        if n < FEWEST:
            return
        found, spread = float(values.double().mean()), float(values.double().std())
        if abs(found - mean) > DEVIATIONS * deviation / sqrt(n):
            self._break(f"{call} has the mean {found:.3g}, where {mean:.3g} is its distribution's")
        if abs(spread - deviation) > 0.2 * deviation:
            self._break(f"{call} has the standard deviation {spread:.3g}, not {deviation:.3g}")

    def _once(self, drawn: Tensor, step: int, call: str) -> None:
        key = drawn.shape, drawn.detach().contiguous().cpu().numpy().tobytes()
        before = self._seen.setdefault((key[0], _digest(key[1])), (step, call))
        if before == (step, call):
            return
        where = f"step {before[0]}" if before[0] != step else f"the same step by {before[1]}"
        self._break(f"{call} of step {step} draws what was drawn in {where}")

    def _break(self, law: str) -> None:
        if law not in self.broken:
            self.broken.append(law)


def _digest(raw: bytes) -> bytes:
    from hashlib import blake2b

    return blake2b(raw, digest_size=16).digest()
