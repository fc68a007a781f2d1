"""Laws that random numbers of training keep, whatever drew them.

The reference gets the same dropout masks and random numbers as the layout, so a comparison says
nothing of them. What dropout and a distribution are does: a mask keeps an element with probability
1 - p, and other samples, calls and steps have other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from .counter_random import bits_of

SURPRISE = 36.0  # -log of the probability that chance breaks a law
SPOTS = 16  # elements of a mask whose bits are looked at, at least
MASK_BITS = 31
FIRST = 64  # numbers of a draw, by which it is told from others, however many each has
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
        kept = int(keep.sum())
        if abs(kept - n * (1 - p)) > _farthest(n, p * (1 - p), 1.0):
            self._break(f"dropout {call} with p = {p} keeps {kept / n:.3g} of its elements")
        same = -log(max(p * p + (1 - p) * (1 - p), 1e-300))  # for each element
        if samples is not None and keep.ndim and keep.shape[samples] > 1:
            rows = keep.movedim(samples, 0).flatten(1)
            if rows.shape[1] * same > SURPRISE and bool((rows[1:] == rows[:-1]).all(1).any()):
                self._break(f"dropout {call} drops the same elements of two samples")
        if n * same > SURPRISE:
            self._once(keep, step, f"dropout {call}")

    def key(self, drawn: int, defined: int, what: str) -> None:
        """The key of a call, of which its bits follow."""
        if drawn != defined:
            self._break(
                f"a draw of {what} has another key than its seed, step, place and call give"
            )

    def mask_bits(
        self, keep: Tensor, p: float, key: int, samples: Sequence[int], call: str
    ) -> None:
        """Some elements of a mask whose first dim counts `samples`, by the bits that each has."""
        for flat in range(0, keep.numel(), max(1, keep.numel() // SPOTS)):
            at = [int(n) for n in np.unravel_index(flat, keep.shape)]
            bits = bits_of(key, [samples[at[0]], *at[1:]], keep.shape) & 2**MASK_BITS - 1
            if bool(keep[tuple(at)]) != (bits >= int(p * 2**MASK_BITS)):
                self._break(f"dropout {call} draws other bits than those of its key and samples")
                return

    def numbers(
        self,
        values: Tensor,
        below: Callable[[Tensor], Tensor],
        rounding: float,
        step: int,
        call: str,
    ) -> None:
        """Independent numbers, of which the part `below(x)` is at most x: the greatest distance
        between that and what is found decides (Kolmogorov 1933; bound of Massart 1990). `rounding`:
        relative, of the dtype in which they were drawn."""
        n = values.numel()
        places = below(values.detach().double().flatten().sort().values)
        steps = torch.arange(n + 1, dtype=torch.float64, device=values.device) / max(1, n)
        off = max((steps[1:] - places).max(), (places - steps[:-1]).max()) if n else 0.0
        if float(off) > sqrt(SURPRISE / (2 * max(1, n))) + rounding:
            self._break(f"{call} is off its distribution by {float(off):.2g}")
        if n * _LOG_OF_VALUES > SURPRISE:
            self._once(values.flatten()[:FIRST], step, call)

    def whole_numbers(self, values: Tensor, mean: float, deviation: float, call: str) -> None:
        """Independent numbers of few possible ones, with this mean and standard deviation, none
        farther from the mean than ten of these."""
        n = values.numel()
        total = float(values.double().sum())
        if abs(total - n * mean) > _farthest(n, deviation**2, 10 * deviation):
            found = f"{total / n:.3g}"
            self._break(f"{call} has the mean {found}, where {mean:.3g} is its distribution's")

    def _once(self, drawn: Tensor, step: int, call: str) -> None:
        raw = drawn.detach().contiguous().cpu().numpy().tobytes()
        key = drawn.shape, blake2b(raw, digest_size=16).digest()
        before = self._seen.setdefault(key, (step, call))
        if before == (step, call):
            return
        where = f"step {before[0]}" if before[0] != step else f"the same step by {before[1]}"
        self._break(f"{call} of step {step} draws what was drawn in {where}")

    def _break(self, law: str) -> None:
        if law not in self.broken:
            self.broken.append(law)


def seed_faults(seeds: Sequence[int]) -> list[str]:
    """What is wrong with the seeds of replicas, each of which draws numbers of its own.

    The seeds are those of the definition, made by weft's own mixing of keys: this shows that they
    differ, and not what the replicas of a run draw. That shows in their losses."""
    return [] if len(set(seeds)) == len(seeds) else ["two replicas draw the same numbers"]


def _farthest(n: int, variance: float, most: float) -> float:
    """How far a sum of n independent numbers may be from its mean, if each has this variance and is
    at most `most` from its own (Bernstein's inequality)."""
    part = SURPRISE * most / 3
    return part + sqrt(part**2 + 2 * SURPRISE * n * variance)
