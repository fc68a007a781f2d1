"""In which dtypes a run computes and sums gradients: one rule, for every parameter and layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LOW = ("bf16", "fp16")


@dataclass(frozen=True)
class DtypeRule:
    """Where `compute` is bf16 or fp16, a parameter rests, and is updated, in the dtype that it was
    built in (its master). Once a step it is rounded to the dtype that is computed in, whichever
    module holds it. Gradients come in that dtype, and are added up, over microbatches and ranks, in
    that of `reduce`. In fp32 and fp64 all of these are one tensor.

    Example:
        >>> rule = DtypeRule("bf16")
        >>> rule.computed(torch.float32), rule.reduced(torch.float32)
        (torch.bfloat16, torch.float32)
    """

    compute: str
    reduce: str = "fp32"

    @property
    def low(self) -> bool:
        """Whether models compute with rounded copies of their parameters."""
        return self.compute in LOW

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """What is computed with in place of a parameter, or an input, of this dtype."""
        low = DTYPES[self.compute]
        rounded = self.low and dtype.is_floating_point and dtype.itemsize > low.itemsize
        return low if rounded else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of a parameter of this dtype are added up in."""
        return dtype if self.computed(dtype) == dtype else DTYPES[self.reduce]

    def __str__(self) -> str:
        if not self.low:
            return self.compute
        return f"{self.compute} with every parameter; gradients summed in {self.reduce}"
