"""A copy of a model that has the weights of one block at a time, in forward and in backward: what
the trial before the first step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.modules import replace_parameters, replace_references
from weft._torch.tensors import without_function_modes
from weft._torch.trees import tree_flatten
from weft.core import is_inside
from weft.nn import copy_cache, is_cache
from weft.parallel import own_forward, set_own_forward
from weft.pipeline import copy_with_tensors

from .context_parallel.whole_marks import copy_mark, is_fixed, set_whole, whole_of, whole_shape


def copy_without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no elements. Raises UnsupportedModel."""

    def without_data(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach().clone()
        return nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)

    copy = copy_with_tensors(model, without_data)
    twins = dict(zip(map(id, model.modules()), copy.modules(), strict=True))
    for module in copy.modules():
        if "forward" in vars(module):  # a function of the model's own, which a copy shares
            module.forward = _rebound(vars(module)["forward"], twins, {})  # type: ignore[method-assign]
    return copy


def _rebound(value: Any, twins: dict[int, nn.Module], done: dict[int, Any]) -> Any:
    """The same function, with copies in the place of the modules that it refers to."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    if id(value) not in done:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        made.__kwdefaults__ = value.__kwdefaults__
        done[id(value)] = made
        for cell, old in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # it is empty
                cell.cell_contents = _rebound(old.cell_contents, twins, done)
    return done[id(value)]


class GatheredModel:
    """Runs a model whose parameters have no elements. A block's weights are made when it runs, and
    let go after. In backward its forward runs again, from its inputs. What no block holds alone
    has weights for the whole run.

    Args:
        model: becomes this object's own.
        blocks: names of the repeated modules.
        make: the weight of this name, as the model computes with it. All ranks call it together.
        around: entered around each forward, also where it runs again.
        take: gets the name and the gradient of each parameter, which is let go then.
        hands_learned: whether a block knows what is learned outside of it for all positions, as
            a bias of pairs. Where FSDP2 gathers its weights, it is given its part.

    Example:
        output = gathered.forward(arguments)
        gathered.backward(output, cotangent)
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        make: Callable[[str], Tensor],
        around: Callable[[], AbstractContextManager],
        take: Callable[[str, Tensor], None],
        hands_learned: bool = True,
    ):
        self._hands_learned = hands_learned
        self.model, self._make, self._around, self._take = model, make, around, take
        inside = {name: model.get_submodule(name) for name in blocks}
        self._units = _units(model, inside)
        for name, module in inside.items():
            # hooks run around this, in forward as in backward
            set_own_forward(module, partial(self._call, name, module, own_forward(module)))

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The weights outside of blocks are there."""
        with self._unit("", self.model) as fresh:
            for name, p in fresh.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._taken, name))
            yield

    def forward(self, arguments: dict[str, Any]) -> Any:
        """What the model returns, inside of `weights()`."""
        with torch.enable_grad(), self._around():
            return self.model(**arguments)

    def _taken(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        self._take(name, p.grad)
        p.grad = None

    @contextmanager
    def _unit(self, name: str, module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters of a unit are there, by name."""
        members = self._units[name]
        fresh = {n: nn.Parameter(self._make(n), p.requires_grad) for n, p in members}
        there: dict[int, Tensor] = {id(p): fresh[n] for n, p in members}
        back: dict[int, Tensor] = {id(fresh[n]): p for n, p in members}
        for each in module.modules():
            replace_parameters(each, there)
            replace_references(each, there)
        try:
            yield fresh
        finally:
            for each in module.modules():
                replace_parameters(each, back)
                replace_references(each, back)

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        leaves, join = tree_flatten((args, kwargs))
        # a mask that stands for its rule has no numbers, and a copy would lose the rule
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not x.is_meta]
        marks = {i: (is_fixed(leaves[i]), whole_shape(leaves[i])) for i in places}
        known = [i for i in places if not marks[i][0] and whole_of(leaves[i]) is not None]
        if not self._hands_learned:
            known = [i for i in known if not leaves[i].requires_grad]
        # leaves of the output, how they are joined, where tensors are, which are known whole, and
        # how they are marked
        made: list[Any] = []
        # a cache grows at each call: where it runs again, a block finds it as it was
        before = [copy_cache(leaf) if is_cache(leaf) else leaf for leaf in leaves]

        def run(tensors: Sequence[Tensor], again: bool) -> list[Tensor]:
            given = list(before if again else leaves)
            for place, tensor in zip(places, tensors, strict=False):
                given[place] = copy_mark(tensor, *marks[place])
            for place, whole in zip(known, tensors[len(places) :], strict=True):
                set_whole(given[place], whole)
            more, named = join(given)
            found, together = tree_flatten(forward(*more, **named))
            there = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor)]
            wholes = {i: w.tensor for i in there if (w := whole_of(found[i])) is not None}
            fixed = [is_fixed(found[i]) and i not in wholes for i in there]
            wide = [whole_shape(found[i]) for i in there]
            if not again:
                made[:] = found, together, there, [*wholes], [*zip(fixed, wide, strict=True)]
            return [*(found[i] for i in there), *wholes.values()]

        @contextmanager
        def whole() -> Iterator[None]:
            with self._unit(name, module) as fresh:
                yield
                for each, p in fresh.items():
                    if p.grad is not None:
                        self._take(each, p.grad)

        tensors = [leaves[place] for place in places]
        tensors += [w.tensor for place in known if (w := whole_of(leaves[place])) is not None]
        # a gradient is to come here even if nothing that enters needs one
        anchor = torch.zeros((), requires_grad=True)
        outputs = _Recomputed.apply(run, whole, self._around, anchor, *tensors)
        found, together, there, wholes, marked = made
        for place, tensor, mark in zip(there, outputs, marked, strict=False):
            found[place] = copy_mark(tensor, *mark)
        for place, tensor in zip(wholes, outputs[len(there) :], strict=True):
            set_whole(found[place], tensor)
        return together(found)


class _Recomputed(torch.autograd.Function):
    """`run(tensors)`, whose graph is let go; backward runs it again. Both inside of `whole()`, and
    with gradients, which a forward may take of itself by `torch.autograd.grad`."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., list[Tensor]],
        whole: Callable[[], AbstractContextManager],
        around: Callable[[], AbstractContextManager],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.whole, ctx.around = run, whole, around
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with without_function_modes():  # which follow what the forward does
            inputs = _leaves(ctx, tensors)
        with torch.enable_grad(), whole():
            # what changes its input in place must find it unchanged again
            made = run([tensor.clone() for tensor in inputs], False)
        with without_function_modes():
            outputs = [tensor.detach() for tensor in made]
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = _leaves(ctx, ctx.saved_tensors)
        with torch.enable_grad(), ctx.whole():
            with ctx.around():
                outputs = ctx.run([tensor.clone() for tensor in inputs], True)
            pairs = [
                (output, grad)
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return (None, None, None, None, *(tensor.grad for tensor in inputs))


def _leaves(ctx: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    wanted = ctx.needs_input_grad[4:]
    return [t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]


def _units(
    model: nn.Module, blocks: dict[str, nn.Module]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Block, or "" for all else, -> the names and parameters that it alone holds."""
    owner: dict[Tensor, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # one may be in two blocks
        inside = max((b for b in blocks if is_inside(name, b)), key=len, default="")
        for p in module.parameters(recurse=False):
            owner[p] = inside if owner.get(p, inside) == inside else ""  # used by two
    units: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *blocks)}
    for name, p in model.named_parameters():
        units[owner[p]].append((name, p))
    return units
