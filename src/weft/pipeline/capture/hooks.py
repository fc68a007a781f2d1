"""What can be seen of a forward from outside, without editing it: what its functions do with
tensors, the structures of tensors that they take and return, the lines of source that run, the
module calls.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft._torch.tensors import FakeTensor, tensor_attributes
from weft.core import InputRef, OpaqueRef, ParamRef, TensorRef, UnsupportedModel
from weft.nn import DROPOUTS

# ---- what a function does with a tensor ----------------------------------------------------------


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
GROUPED = torch.ops.aten._grouped_mm
# functions that read shapes, types and devices, and no element
METADATA: frozenset[Any] = frozenset(
    _ATTRIBUTES
    | _named("is_floating_point is_complex is_signed numel is_same_size result_type", torch, Tensor)
    | _named(
        "size dim ndimension nelement element_size stride storage_offset is_contiguous"
        " is_inference",
        Tensor,
    )
    | _named("is_pinned get_device __len__ __hash__ _is_view _nnz", Tensor)
)
# functions that make a tensor after the shape, type or device of another
FACTORIES: frozenset[Any] = frozenset(
    _named("zeros_like ones_like empty_like full_like", torch)
    | _named("new_zeros new_ones new_empty new_full new_tensor new_empty_strided", Tensor)
)
_UNREAD = METADATA | FACTORIES
_AFTER_ANOTHER = _named("to type_as expand_as view_as reshape_as", Tensor)
# functions whose result no other stage could draw again
RANDOM: frozenset[Any] = frozenset(
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
        elif not isinstance(value, SIMPLE):
            _collect(value, found)
    return found


def count_dropouts(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int:
    """How many dropout masks a call draws."""
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


def name_of(func: Callable) -> str:
    owner = getattr(func, "__self__", None)  # an attribute's __get__ is a method of its descriptor
    return owner.__name__ if inspect.isgetsetdescriptor(owner) else func.__name__


# ---- structures of tensors -----------------------------------------------------------------------

_LEAF = (Tensor, TensorRef, InputRef, ParamRef)


def tensors_in(structure: Any) -> list[Any]:
    """The tensors (or what stands for them) in nested tuples, lists, dicts and dataclasses, in
    order."""
    found: list[Any] = []
    _collect(structure, found)
    return found


def _collect(structure: Any, found: list[Any]) -> None:
    if isinstance(structure, _LEAF):
        found.append(structure)
    elif not isinstance(structure, SIMPLE):
        for part in _parts(structure):
            _collect(part, found)


def _parts(structure: Any) -> Iterable[Any]:
    if isinstance(structure, (tuple, list)):
        return structure
    if isinstance(structure, dict):
        return structure.values()
    if _is_record(structure):
        return [getattr(structure, f.name) for f in dataclasses.fields(structure)]
    return ()


def rebuild(
    structure: Any, replace: Callable[[Any], Any], other: Callable[[Any], Any] = lambda part: part
) -> Any:
    """The same structure with every tensor (or what stands for one) replaced; `other` replaces what
    is no structure."""
    if isinstance(structure, _LEAF):
        return replace(structure)
    if isinstance(structure, (tuple, list)):
        parts = [rebuild(part, replace, other) for part in structure]
        kind = type(structure)
        return (
            parts
            if kind is list
            else tuple(parts)
            if kind is tuple
            else getattr(kind, "_make", kind)(parts)
        )
    if isinstance(structure, dict):
        made = copy.copy(structure)
        for key, part in structure.items():
            made[key] = rebuild(part, replace, other)
        return made
    if _is_record(structure):
        made = copy.copy(structure)
        for f in dataclasses.fields(structure):
            object.__setattr__(made, f.name, rebuild(getattr(structure, f.name), replace, other))
        return made
    return other(structure)


def _is_record(structure: Any) -> bool:
    return dataclasses.is_dataclass(structure) and not isinstance(structure, (type, OpaqueRef))


def arguments(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[InputRef, Tensor]]:
    """Every tensor among the arguments, and how to find it again."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        for index, tensor in enumerate(tensors_in(value)):
            yield InputRef(place, index), tensor


def argument_at(at: InputRef, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that stands there among the arguments."""
    return tensors_in(argument(at.argument, args, kwargs))[at.index]


def argument(place: int | str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


SIMPLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
)


def other_leaves(structure: Any) -> list[Any]:
    """What is neither a tensor nor a container in a structure."""
    found: list[Any] = []
    rebuild(structure, lambda t: None, found.append)
    return found


def numbers_in(structure: Any) -> list[Any]:
    return [part for part in other_leaves(structure) if isinstance(part, (int, float))]


def unknown_classes(structure: Any) -> list[str]:
    """The classes of objects in it that are neither structures of tensors nor were given."""
    return [
        part.kind
        for part in other_leaves(structure)
        if isinstance(part, OpaqueRef) and part.argument is None
    ]


def tensors_inside(part: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in the attributes of an object."""
    if isinstance(part, Tensor):
        yield part
    elif depth and not isinstance(part, (nn.Module, type, *SIMPLE)):
        for inner in (*_parts(part), *getattr(part, "__dict__", {}).values()):
            yield from tensors_inside(inner, depth - 1)


# ---- lines of source -----------------------------------------------------------------------------

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WEFT = str(Path(__file__).parents[2]) + os.sep
FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")


def user_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_model(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_WEFT):
        return path.startswith(os.path.join(_WEFT, "nn", "models", ""))
    return not path.startswith((_TORCH, "<"))


def source_line() -> str:
    """`file:line` of the model's code that runs."""
    frame = next(filter(_is_model, user_frames()), None)
    return (
        "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    )


def source_text() -> str:
    """That line itself."""
    frame = next(filter(_is_model, user_frames()), None)
    return (
        "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    )


# ---- the model that is traced --------------------------------------------------------------------


def twin_model(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other parameters and buffers. Raises CannotCut."""
    memo = {id(t): replace(t) for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as problem:
        raise UnsupportedModel(
            "model",
            type(model).__name__,
            f"it cannot be copied ({problem})",
            "keep such attributes out of the model",
        ) from problem


def run_op(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an op gives. Without data torch knows the shape of grouped matmuls in bf16 alone, and
    here it is of any."""
    first, second = args[:2] if func._overloadpacket is GROUPED else (None, None)
    if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
        if first.ndim == 2 and second.ndim == 3:
            return first.new_empty((first.shape[0], second.shape[2]))
        if first.ndim == second.ndim == 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            return first.new_empty((len(offsets), first.shape[0], second.shape[1]))
    return func(*args, **kwargs)


def is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
