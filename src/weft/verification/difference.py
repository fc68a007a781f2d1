"""A difference between a run on ranks and the one-device run, and what counts as one."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-9


# (step, what, place among its kind), and what to say of it
Difference = tuple[tuple[int, str, int], str]


Calls = dict[str, list[Tensor]]  # module -> a tensor per call
