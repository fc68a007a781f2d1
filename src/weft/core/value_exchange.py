"""One rank's tensors, and what holds them, on other ranks: no pickle, which can run code.

The structure travels as JSON, with a number in the place of each tensor; then the bytes of each
tensor follow. A dict or tuple of a class of its own, as models of transformers return, is made
again of that class, if this process has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.c10d import exchange_device

from .errors import UnsupportedModel
from .json_exchange import gather_json


def broadcast_value(
    value: Any, source: int, group: dist.ProcessGroup, device: torch.device | None = None
) -> Any:
    """A value of one rank, on every rank of a group.

    Args:
        value: tensors, numbers, texts and None, in dicts, lists and tuples; what the others give
            is not looked at.
        source: whose value it is, by its rank in the group.
        group: the ranks, which call it together.
        device: where the tensors are on the others; default: where they can be exchanged.

    Raises:
        UnsupportedModel: on every rank, if the value holds something else.
    """
    own = dist.get_rank(group) == source
    tensors: list[Tensor] = []
    told: Any = None
    if own:
        try:
            told = {"value": _packed(value, tensors)}
        except TypeError as error:
            told = {"problem": str(error)}
    told = gather_json(told, group)[source]
    if "problem" in told:
        fix = "return tensors, numbers and texts, in dicts, lists or tuples"
        raise UnsupportedModel("output", told["problem"], "cannot be sent to other ranks", fix)
    found: dict[int, Tensor] = {}
    between = exchange_device(group)
    for number, (shape, dtype) in enumerate(_tensors_in(told["value"])):
        if own:
            row = tensors[number].detach().contiguous().reshape(-1).view(torch.uint8).to(between)
        else:
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=between)
            row = whole.reshape(-1).view(torch.uint8)
        if row.numel():
            dist.broadcast(row, group=group, group_src=source)
        if not own:
            found[number] = whole if device is None else whole.to(device)
    return value if own else _unpacked(told["value"], found)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON, tensors set apart. Raises TypeError."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1, list(value.shape), str(value.dtype)[len("torch.") :]]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return ["dict", kind, [[key, _packed(each, tensors)] for key, each in value.items()]]
    if isinstance(value, list | tuple):
        return ["list", kind, [_packed(each, tensors) for each in value]]
    raise TypeError(kind)


def _tensors_in(packed: Any) -> list[tuple[list[int], str]]:
    """Shape and dtype of each, in the order of their numbers."""
    match packed:
        case ["tensor", _, shape, dtype]:
            return [(shape, dtype)]
        case ["dict", _, pairs]:
            return [each for _, inner in pairs for each in _tensors_in(inner)]
        case ["list", _, items]:
            return [each for inner in items for each in _tensors_in(inner)]
    return []


def _unpacked(packed: Any, tensors: dict[int, Tensor]) -> Any:
    match packed:
        case ["tensor", number, _, _]:
            return tensors[number]
        case ["dict", kind, pairs]:
            made: Any = _class(kind, dict)
            whole = {key: _unpacked(inner, tensors) for key, inner in pairs}
            return made(**whole) if hasattr(made, "__dataclass_fields__") else made(whole)
        case ["list", kind, items]:
            made = _class(kind, list, tuple)
            inner = [_unpacked(each, tensors) for each in items]
            return made(*inner) if hasattr(made, "_fields") else made(inner)
    return packed[1]


def _class(kind: str, *bases: type) -> Any:
    """The class of this name that this process has imported; the plain one if it has none."""
    module, _, name = kind.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, bases) else bases[0]
