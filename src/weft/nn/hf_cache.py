"""The caches of keys and values that models of transformers are called with."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def is_cache(value: object) -> bool:
    """Whether it holds keys and values for generation, by a class of transformers."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def copy_cache(cache: object) -> object:
    """A cache with copies of its keys and values, which may be in a graph."""
    with _ClonesTensors():
        return copy.deepcopy(cache)


class _ClonesTensors(TorchFunctionMode):
    """`deepcopy` refuses tensors that are made in a graph; here it clones them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.clone())
