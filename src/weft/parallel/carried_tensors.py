"""What a unit of `fsdp` may not do with tensors.

One that it makes and does not return, as in `self.carry = self.up(x)`, another module may take.
FSDP2 gathers a unit's weights again when backward comes to what the unit returned: what it made
after that comes before, and would meet weights that are not there.

What enters a unit goes through an autograd function of FSDP2's, so autograd lets no unit change it
in place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import fake_mode
from weft._torch.trees import tree_leaves
from weft.core import Step, UnsupportedModel
from weft.nn import module_calls

from .direct_forward import call_forwards_with_hooks
from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def check_carried_tensors(request: PlanRequest, steps: Iterable[Step]) -> None:
    """Refuse a unit whose weights backward would need before FSDP2 has gathered them, and one that
    autograd stops.

    Raises:
        UnsupportedModel: something else takes what a unit made after what it returns, or it changes
            what enters it.
    """
    units = [s.module for s in steps if s.gather is not None and s.module]
    if request.sample is None or not units:
        return
    mode = fake_mode()
    model = copy_without_elements(request.model, mode)
    call_forwards_with_hooks(model)  # as the model that is laid out does
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
    carried = _Carried(model, units)
    try:
        with (
            module_calls(model) as carried.inside,
            without_elements(mode),
            torch.enable_grad(),
            carried,
        ):
            carried.take(tree_leaves(model(**request.arguments()), Tensor))
    except Exception:  # the rest of it is not seen
        pass
    for unit in carried.changing:
        raise UnsupportedModel(
            "layout",
            str(request.layout),
            f"{unit} changes in place what enters it, and autograd does not let a unit of fsdp do"
            " so",
            "write its first function without changing a tensor in place (inplace=False), or leave"
            " fsdp out of the layout",
        )
    for unit, reader in carried.found.items():
        raise UnsupportedModel(
            "layout",
            str(request.layout),
            f"{unit} makes a tensor after its output, and {reader} uses it: backward reaches that"
            f" tensor before the weights of {unit} are gathered",
            "return that tensor too, or make it before what is returned; or leave fsdp out of the"
            " layout",
        )


class _Carried(TorchFunctionMode):
    """`found`: by unit, what takes a tensor of it that backward reaches before the unit.
    `changing`: the units that change in place what enters them, the innermost first."""

    def __init__(self, model: nn.Module, units: Iterable[str]):
        super().__init__()
        self.inside: list[str] = []
        self.found: dict[str, str] = {}
        self.changing: list[str] = []
        self._model, self._units = model, frozenset(units)
        # by id, which lives as long as the tensor: the unit that made it, and its turn in backward;
        # "" where something else has changed it in place since
        self._made: dict[int, tuple[Tensor, str, int]] = {}
        self._returned: dict[str, int] = {}  # by unit that has ended, where backward comes to it
        # by unit, what has entered it, and how often each had been changed in place
        self._entered: dict[str, list[tuple[Tensor, int]]] = {}
        for name in self._units:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            module.register_forward_hook(partial(self._end, name))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.take(tree_leaves((args, kwargs or {}), Tensor))
        made = func(*args, **(kwargs or {}))
        unit = next((name for name in reversed(self.inside) if name in self._units), "")
        if torch.is_grad_enabled():  # off within a reentrant checkpoint
            for tensor in tree_leaves(made, Tensor):
                _, maker, turn = self._made.get(id(tensor), (None, "", None))
                if turn != _turn(tensor) and (unit or maker):
                    self._made[id(tensor)] = tensor, unit, _turn(tensor)
        return made

    def take(self, tensors: Iterable[Tensor]) -> None:
        """These are taken by the innermost module that runs, or by the loss."""
        for tensor in tensors:
            _, unit, turn = self._made.get(id(tensor), (None, "", None))
            if not unit or unit in self.inside or unit not in self._returned:
                continue
            # another turn than when the unit ended: something else has changed it in place since
            if turn == _turn(tensor) and _reads_weights(tensor, self._returned[unit]):
                reader = self.inside[-1] if self.inside else "the loss"
                self.found.setdefault(unit, reader or type(self._model).__name__)

    def _begin(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        entered = (x for x in tree_leaves((args, kwargs), Tensor) if x.requires_grad)
        self._entered[unit] = [(x, x._version) for x in entered]

    def _end(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if any(x._version != before for x, before in self._entered.pop(unit, ())):
            self.changing.append(unit)
        self._returned[unit] = max(map(_turn, tree_leaves(output, Tensor)), default=-1)
        for key, (tensor, maker, _) in self._made.items():
            if maker == unit:
                self._made[key] = tensor, unit, _turn(tensor)


def _turn(tensor: Tensor) -> int:
    """Backward takes the highest first; -1: it does not come here."""
    return tensor.grad_fn._sequence_nr() if tensor.grad_fn is not None else -1


def _reads_weights(tensor: Tensor, turn: int) -> bool:
    """Whether backward, on its way from a tensor to what has this turn, comes by a function that
    reads a parameter or a view of one. A slice of what a unit returned reads none."""
    nodes, seen = [tensor.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() <= turn:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if _is_of_parameter(before):
                return True
            nodes.append(before)
    return False


def _is_of_parameter(node: Any) -> bool:
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")
