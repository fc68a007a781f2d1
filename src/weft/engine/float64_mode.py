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
    """What would be float32 is float64: casts, tensors that are made, and torch's default, in which
    tensors without a dtype are. torch's grouped matmul has no float64: a loop has."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: list[torch.dtype] = []

    def __enter__(self) -> Float64Mode:
        self._defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._defaults.pop())

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _grouped_mm(args[0], args[1], kwargs["offs"])
        if func is Tensor.float:
            return args[0] if args[0].dtype == torch.float64 else args[0].double()
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        elif kwargs.get("dtype") is torch.float32:  # softmax(x, dtype=torch.float32), zeros
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
