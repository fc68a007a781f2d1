"""Placeholders: tensors that a pipeline stage does not have. They know their shape, dtype and
device, but have no elements.

A shape is computed only when the forward reads it, by running the skipped work once on FakeTensors.
So shapes are those of this call, not those of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft._torch.tensors import (
    NEEDS_ELEMENTS,
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    make_empty_subclass,
    make_fake,
    mark_parameter,
    without_function_modes,
    without_function_overrides,
)
from weft.core import DtypeRule, UnsupportedModel

from .functions import METADATA_FUNCTIONS, tensors_read
from .model_copy import copy_with_tensors
from .source_lines import source_line
from .structures import PLAIN_TYPES, map_tensors, tensors_in

_REQUIRES_GRAD, _GRAD = Tensor.requires_grad.__get__, Tensor.grad.__get__  # type: ignore[attr-defined]
_ITSELF = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]


class PlaceholderTensor(Tensor):
    """`about` names the tensor in error messages. `like` makes a FakeTensor of the same shape,
    dtype and device. `differentiable` is its requires_grad. `shapes`: what made it."""

    about: str
    like: Callable[[], Tensor]
    differentiable: bool
    shapes: SkippedShapes

    @staticmethod
    def of_value(
        name: str, like: Callable[[], Tensor], differentiable: bool, shapes: SkippedShapes
    ) -> PlaceholderTensor:
        bare = make_empty_subclass(PlaceholderTensor)
        return PlaceholderTensor._with(bare, name, like, differentiable, shapes)

    @staticmethod
    def of_weight(
        name: str, weight: nn.Parameter, device: torch.device, shapes: SkippedShapes
    ) -> PlaceholderTensor:
        fake = make_fake(shapes.mode, weight, device)
        bare = make_empty_subclass(PlaceholderTensor, weight, device=device)
        mark_parameter(bare)
        return PlaceholderTensor._with(bare, name, lambda: fake, weight.requires_grad, shapes)

    @staticmethod
    def _with(
        placeholder: Any,
        name: str,
        like: Callable[[], Tensor],
        differentiable: bool,
        shapes: SkippedShapes,
    ) -> PlaceholderTensor:
        placeholder.about, placeholder.like, placeholder.differentiable = name, like, differentiable
        placeholder.shapes = shapes
        return placeholder

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({self.about})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        absent = None
        if func not in METADATA_FUNCTIONS:
            read = tensors_read(func, args, kwargs)
            absent = next((t for t in read if isinstance(t, PlaceholderTensor)), None)
        if absent is not None and absent.shapes.skip is not None:
            return absent.shapes.skip(func, args, kwargs)
        with without_function_overrides():
            if func == _REQUIRES_GRAD:
                return args[0].differentiable and torch.is_grad_enabled()
            if func == _GRAD:
                return None
            if func in _ITSELF:
                return args[0]
            if func is Tensor.register_hook:  # no gradient comes by
                return RemovableHandle({})
            if func in METADATA_FUNCTIONS:
                if len(args) == 1 and not kwargs:
                    return func(args[0].like())
                args, kwargs = map_tensors(
                    (args, kwargs), lambda t: t.like() if isinstance(t, PlaceholderTensor) else t
                )
                return func(*args, **kwargs)
            if absent is not None:
                raise UnsupportedModel(
                    "pipeline.cut",
                    absent.about,
                    f"it is made on another stage, and its elements are read at {source_line()}",
                    "call the whole module that uses it, or cut elsewhere",
                )
            args, kwargs = map_tensors((args, kwargs), _stand_in)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        absent = next(t for t in tensors_in((args, kwargs)) if isinstance(t, PlaceholderTensor))
        raise UnsupportedModel(
            "pipeline.cut",
            absent.about,
            f"it is made on another stage, and {func} reads it at {source_line()}",
            "cut elsewhere",
        )


def _stand_in(t: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device, for functions that read nothing else. All its
    elements are one element in memory."""
    if not isinstance(t, PlaceholderTensor):
        return t
    like = t.like()
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


class SkippedShapes:
    """What skipped work would have returned: runs it on FakeTensors, and caches the result by the
    shapes, dtypes and values of its arguments. `device`: where the model runs; its parameters may
    be on the meta device. `dtypes`: what it computes in.

    `skip`: (function, args, kwargs) -> what stands for the result of a function that reads elements
    of a placeholder; None: it is refused."""

    skip: Callable[[Callable, tuple, dict], Any] | None = None

    def __init__(self, model: nn.Module, device: torch.device, dtypes: DtypeRule):
        self.mode: FakeTensorMode = fake_mode()
        self.dtypes = dtypes
        self.real = model
        self.model = copy_with_tensors(
            model, lambda t: make_fake(self.mode, self._computed(t), device)
        )
        self.device = device.type
        self._known: dict[Hashable, Any] = {}

    def placeholder(
        self, name: str, weight: nn.Parameter, device: torch.device
    ) -> PlaceholderTensor:
        """What stands for a weight of another stage."""
        computed: Any = self._computed(weight)
        return PlaceholderTensor.of_weight(name, computed, device, self)

    def _computed(self, t: Tensor) -> Tensor:
        """What the model computes with in the place of a parameter, without elements."""
        dtype = self.dtypes.computed(t.dtype)
        if dtype == t.dtype or not isinstance(t, nn.Parameter):
            return t
        bare = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="meta")
        return nn.Parameter(bare, requires_grad=t.requires_grad)

    def autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def of(
        self,
        work: str | Callable,
        name: str,
        args: tuple,
        kwargs: Mapping[str, Any],
        cast: tuple[bool, torch.dtype],
    ) -> Any:
        """What this module (by its name) or function returns, with FakeTensors. Raises
        UnsupportedModel."""
        if work is Tensor.__getitem__:
            args = (args[0], _without_masks(args[1]))
        try:
            key: Hashable = (work, cast, self.real.training, _signature(args), _signature(kwargs))
        except TypeError:  # an argument that is not known by its value
            return self._done(work, name, args, kwargs, cast)
        if key not in self._known:
            self._known[key] = self._done(work, name, args, kwargs, cast)
        return self._known[key]

    def _done(
        self,
        work: str | Callable,
        name: str,
        args: tuple,
        kwargs: Mapping[str, Any],
        cast: tuple[bool, torch.dtype],
    ) -> Any:
        call: Any = work
        if isinstance(work, str):
            call = self.model.get_submodule(work)
            for like, module in zip(
                call.modules(), self.real.get_submodule(work).modules(), strict=True
            ):
                like.training = module.training  # evaluation may make other shapes than training
        autocast = torch.autocast(self.device, enabled=cast[0], dtype=cast[1])
        try:
            with without_function_modes(), torch.no_grad(), autocast, self.mode:
                args, kwargs = map_tensors((args, kwargs), self._fake)
                return call(*args, **kwargs)
        except NEEDS_ELEMENTS as problem:
            raise UnsupportedModel(
                "pipeline.cut",
                name,
                f"its shape, asked for at {source_line()}, follows from elements of another stage",
                "pad to shapes that follow from the inputs' shapes, or cut before it is made",
            ) from problem

    def _fake(self, t: Tensor) -> Tensor:
        if isinstance(t, PlaceholderTensor):
            return t.like()
        return (
            t if isinstance(t, FakeTensor) else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        )


def _without_masks(index: Any) -> tuple:
    """The index with places instead of masks whose elements are here: so many rows are chosen."""
    places: list[Any] = []
    for each in index if isinstance(index, tuple) else (index,):
        masks = isinstance(each, Tensor) and each.dtype == torch.bool and each.ndim
        if masks and not isinstance(each, PlaceholderTensor):
            places += each.nonzero().unbind(1)
        else:
            places.append(each)
    return tuple(places)


class SkippedWork:
    """A module call or function that was skipped, and what it would have returned."""

    def __init__(self, shapes: SkippedShapes, work: str | Callable, args: tuple, kwargs: dict):
        self._call = (shapes, work, args, kwargs, shapes.autocast())
        self._result: Any = None
        self._likes: dict[int, Tensor] = {}

    def result(self, name: str) -> Any:
        if self._result is None:
            shapes, work, args, kwargs, cast = self._call
            self._result = shapes.of(work, name, args, kwargs, cast)
        return self._result

    def placeholder(self, name: str, place: int, differentiable: bool) -> PlaceholderTensor:
        """A placeholder for the tensor at this index among those that the work would have
        returned."""

        def like() -> Tensor:
            if place not in self._likes:
                self._likes[place] = tensors_in(self.result(name))[place]
            return self._likes[place]

        return PlaceholderTensor.of_value(name, like, differentiable, self._call[0])


def _signature(structure: Any) -> Hashable:
    if isinstance(structure, PlaceholderTensor):
        structure = structure.like()
    if isinstance(structure, Tensor):
        return (tuple(structure.shape), structure.dtype)
    if isinstance(structure, (tuple, list)):
        return (type(structure), *map(_signature, structure))
    if isinstance(structure, Mapping):
        return tuple((key, _signature(value)) for key, value in structure.items())
    if isinstance(structure, slice):
        return (structure.start, structure.stop, structure.step)
    if isinstance(structure, PLAIN_TYPES):
        return (type(structure), structure)
    if structure is Ellipsis:
        return "..."
    raise TypeError
