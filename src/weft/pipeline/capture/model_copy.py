"""Copies of a model with other tensors, and ops on tensors without elements."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from weft._torch.modules import wrap_hooks
from weft._torch.tensors import FakeTensor
from weft._torch.trees import tree_leaves
from weft.core import UnsupportedModel

from .functions import GROUPED_MM


def copy_with_tensors(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model in which `replace` has replaced every parameter and buffer. Raises
    UnsupportedModel."""
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in _computed(model)}
    memo |= {id(t): replace(t) for t in (*model.parameters(), *model.buffers())}
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as problem:
        raise UnsupportedModel(
            "model",
            type(model).__name__,
            f"it cannot be copied ({problem})",
            "keep such attributes out of the model",
        ) from problem
    for module in copied.modules():
        wrap_hooks(module, lambda hook: _of_copy(hook, memo), set())
        functions = {k: v for k, v in vars(module).items() if isinstance(v, FunctionType)}
        vars(module).update({k: _of_copy(v, memo) for k, v in functions.items()})
    return copied


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Tensors with a graph that modules keep: `torch.nn.utils.weight_norm` makes such a weight
    where it is applied, and again before each forward. `deepcopy` refuses them."""
    for module in model.modules():
        yield from (t for t in tree_leaves(vars(module), Tensor) if not t.is_leaf)


def _of_copy(function: Any, memo: Mapping[int, Any]) -> Any:
    """A hook, or a forward that an instance has, which refers to the model by its closure or its
    defaults, as it is for the copy: `deepcopy` leaves functions as they are.

    Args:
        function: any callable.
        memo: id of what was copied -> its copy.
    """
    if not isinstance(function, FunctionType):
        return function
    cells = function.__closure__ or ()
    held = [cell.cell_contents if _is_set(cell) else None for cell in cells]
    defaults = function.__defaults__ or ()
    if not any(id(each) in memo for each in (*held, *defaults)):
        return function
    closure = tuple(
        CellType(memo[id(each)]) if id(each) in memo else cell
        for cell, each in zip(cells, held, strict=True)
    )
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(memo.get(id(each), each) for each in defaults) or None,
        closure or None,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(vars(function))
    return made


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def run_op_without_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an op. Torch cannot compute the shape of a grouped matmul without data unless
    it is in bf16; this function can. Nor does torch count, inside a dispatch mode, what foreach
    functions change in place."""
    first, second = args[:2] if func._overloadpacket is GROUPED_MM else (None, None)
    if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
        if first.ndim == 2 and second.ndim == 3:
            return first.new_empty((first.shape[0], second.shape[2]))
        if first.ndim == second.ndim == 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            return first.new_empty((len(offsets), first.shape[0], second.shape[1]))
    if func._schema.is_mutable and func._overloadpacket.__name__.startswith("_foreach_"):
        increment_version(args[0])
    return func(*args, **kwargs)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter; also true of placeholders for one."""
    return isinstance(tensor, nn.Parameter)
