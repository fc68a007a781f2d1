"""What a model casts to float32 inside (norms, softmax) stays in float64 while it is verified.

Such a cast rounds what the ranks hold of one sum each by itself, to 1e-7: rounding of the model's
own, which would hide what a layout does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import FakeTensor


class Float64Mode(TorchFunctionMode):
    """Casts of float64 tensors to float32 leave them as they are. torch's grouped matmul has no
    float64: a loop has."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch._grouped_mm:
                return _grouped_mm(args[0], args[1], kwargs["offs"])
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
            elif kwargs.get("dtype") is torch.float32:  # softmax(x, dtype=torch.float32)
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """`grouped_mm` of rows [n, in] with [groups, in, out]: rows up to offs[g] are group g's, the
    rest gives zeros."""
    if isinstance(offs, FakeTensor):  # the model is traced without data: shape and work are known
        return x @ weights[0]
    ends = [0, *offs.tolist()]
    parts = [x[start:stop] @ weights[g] for g, (start, stop) in enumerate(pairwise(ends))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])
