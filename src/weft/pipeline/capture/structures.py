"""Structures of tensors: nested tuples, lists, dicts and dataclasses, as modules take and
return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import InputRef, OpaqueRef, ParamRef, TensorRef

_LEAF = (Tensor, TensorRef, InputRef, ParamRef)
PLAIN_TYPES = (
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


def tensors_in(structure: Any) -> list[Any]:
    """The tensors, or references to them, in nested tuples, lists, dicts and dataclasses, in
    order."""
    found: list[Any] = []
    _collect(structure, found)
    return found


def _collect(structure: Any, found: list[Any]) -> None:
    if isinstance(structure, _LEAF):
        found.append(structure)
    elif not isinstance(structure, PLAIN_TYPES):
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


def map_tensors(
    structure: Any, replace: Callable[[Any], Any], other: Callable[[Any], Any] = lambda part: part
) -> Any:
    """The same structure with every tensor, or reference to one, replaced by `replace(it)`, and
    every other leaf by `other(it)`."""
    if isinstance(structure, _LEAF):
        return replace(structure)
    if isinstance(structure, (tuple, list)):
        parts = [map_tensors(part, replace, other) for part in structure]
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
            made[key] = map_tensors(part, replace, other)
        return made
    if _is_record(structure):
        made = copy.copy(structure)
        for f in dataclasses.fields(structure):
            object.__setattr__(
                made, f.name, map_tensors(getattr(structure, f.name), replace, other)
            )
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
    """The tensor among the arguments that an InputRef refers to."""
    return tensors_in(argument(at.argument, args, kwargs))[at.index]


def argument(place: int | str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The argument at this position, or of this name."""
    return args[place] if isinstance(place, int) else kwargs[place]


def other_leaves(structure: Any) -> list[Any]:
    """The leaves of a structure that are not tensors."""
    found: list[Any] = []
    map_tensors(structure, lambda t: None, found.append)
    return found


def numbers_in(structure: Any) -> list[Any]:
    return [part for part in other_leaves(structure) if isinstance(part, (int, float))]


def unknown_classes(structure: Any) -> list[str]:
    """The names of classes whose objects are in a structure, cannot be looked into, and were not
    arguments of the call."""
    return [
        part.kind
        for part in other_leaves(structure)
        if isinstance(part, OpaqueRef) and part.argument is None
    ]


def tensors_inside(part: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in the attributes of an object."""
    if isinstance(part, Tensor):
        yield part
    elif depth and not isinstance(part, (nn.Module, type, *PLAIN_TYPES)):
        for inner in (*_parts(part), *getattr(part, "__dict__", {}).values()):
            yield from tensors_inside(inner, depth - 1)
