"""What PyTorch functions do with tensors: read their elements, read their shapes alone, draw random
numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft._torch.tensors import (
    tensor_attributes,
)
from weft.nn import DRAWS, DRAWS_INSIDE, DROPOUTS

from .structures import PLAIN_TYPES, _collect


def _named(words: str, *owners: Any) -> set[Any]:
    return {
        getattr(owner, word) for owner in owners for word in words.split() if word in dir(owner)
    }


_OF_DATA = {
    "T",
    "mT",
    "H",
    "mH",
    "data",
    "real",
    "imag",
    "grad",
    "_grad",
}  # attributes that are tensors themselves
_ATTRIBUTES = {get for name, get in tensor_attributes().items() if name not in _OF_DATA}
GROUPED_MM = torch.ops.aten._grouped_mm
# functions that read shapes, types and devices, and no element
METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    _ATTRIBUTES
    | _named("is_floating_point is_complex is_signed numel is_same_size result_type", torch, Tensor)
    | _named(
        "size dim ndimension nelement element_size stride storage_offset is_contiguous"
        " is_inference",
        Tensor,
    )
    | _named("is_pinned get_device __len__ __hash__ _is_view _nnz", Tensor)
    | {torch.ops.prim.device.default}  # how a FakeTensor is asked for its device
)
# functions that make a tensor after the shape, type or device of another
FACTORY_FUNCTIONS: frozenset[Any] = frozenset(
    _named("zeros_like ones_like empty_like full_like", torch)
    | _named("new_zeros new_ones new_empty new_full new_tensor new_empty_strided", Tensor)
)
_UNREAD = METADATA_FUNCTIONS | FACTORY_FUNCTIONS
_AFTER_ANOTHER = _named("to type_as expand_as view_as reshape_as", Tensor)
# functions whose result no other stage could draw again
RANDOM_FUNCTIONS: frozenset[Any] = frozenset(
    DROPOUTS
    | _named("rand randn randint randperm rand_like randn_like randint_like", torch)
    | _named("normal bernoulli multinomial poisson", torch, Tensor)
    | _named(
        "normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_", Tensor
    )
)


def tensors_read(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a function's arguments whose elements it reads."""
    if func in _UNREAD:
        return []
    if func in _AFTER_ANOTHER:
        args, kwargs = args[:1], {}
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):  # the common case, and this runs for every function
            found.append(value)
        elif not isinstance(value, PLAIN_TYPES):
            _collect(value, found)
    return found


def count_draws(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int:
    """How often a call draws: dropout masks, and numbers that weft draws itself."""
    if func in DRAWS or func in DRAWS_INSIDE:
        return 1
    if func in DROPOUTS:
        bound = dict(zip(("input", "p", "training"), args)) | dict(kwargs)
        training = bound.get(
            "train", bound.get("training", True)
        )  # torch.dropout's, and torch.nn.functional's
        return int(bool(training) and bound.get("p", 0.5) > 0.0)
    if func is F.scaled_dot_product_attention:
        return int(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0.0)
    if func is F.multi_head_attention_forward:
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        return int(bound.get("training", True) and bound["dropout_p"] > 0.0)
    return 0


# of `a < b` Python calls `b > a` where b, a placeholder, is of a subclass
_MIRRORED = {"gt": "lt", "ge": "le"}


def function_name(func: Callable) -> str:
    """The name of a PyTorch function, or of the attribute that it reads. A comparison has one name
    from both sides."""
    owner = getattr(func, "__self__", None)  # an attribute's __get__ is a method of its descriptor
    name = owner.__name__ if inspect.isgetsetdescriptor(owner) else func.__name__
    return _MIRRORED.get(name, name)
