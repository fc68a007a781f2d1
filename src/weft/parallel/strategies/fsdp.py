"""Sharded data parallel over `fsdp`: ZeRO-1, ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020), through
FSDP2.

Parameters rest as rows of dim 0 on the ranks; each repeated block, or what `fsdp_units` names, is
gathered and reduced as one unit, what is left as the last. With `dp` beside it: hybrid sharding,
gradients reduced inside and then summed across. A part of the model may be replicated, or lie on
the ranks of `tp` too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch.distributed.tensor import Shard

from weft.core import (
    COPY,
    SUM,
    AxisTraits,
    Divides,
    FSDPUnit,
    LayoutError,
    Param,
    Part,
    Step,
    UnsupportedModel,
    Weight,
    field_of_part,
    is_inside,
)
from weft.nn import callable_blocks, called_by_data

from ._request import StepsRequest

AXIS = "fsdp"
TRAITS = AxisTraits(
    frozenset({Divides.SAMPLES, Divides.STATE}),
    order=2,
    spreads_experts=True,
    shrinks_freely=True,
)
OPTIONS: Mapping[str, str] = {
    "zero1": "optimizer state sharded; parameters gathered and gradients reduced once a step",
    "zero2": "gradients sharded too: reduced every microbatch",
    "zero3": "parameters sharded too: gathered at every use (the default)",
    "offload": "parameters, gradients and optimizer state rest in host memory",
}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step per unit, inner units before the rest of the model."""
    layout, roles, weights = request.layout, request.roles, request.weights
    options = layout.options_of(AXIS)
    levels = [o for o in options if o.startswith("zero")] or ["zero3"]
    if len(levels) > 1:
        raise LayoutError("layout", str(layout), f"{' and '.join(levels)} at once", "choose one")
    if layout.size("dp") > 1 and layout.axes.index("dp") > layout.axes.index(AXIS):
        raise LayoutError(
            "layout",
            str(layout),
            "fsdp outside dp",
            "write dp before fsdp: replicas of sharded groups",
        )
    gather = FSDPUnit(
        AXIS,
        gathered="use" if levels[0] == "zero3" else "step",
        reduced="step" if levels[0] == "zero1" else "microbatch",
        offload="offload" in options,
    )
    divided = request.divided(AXIS)  # other parts are replicated
    alike = roles.alike(weights, layout, AXIS)
    usual = Counter(w.dtype for w in alike).most_common(1)[0][0] if alike else None
    left = {w.name: w for w in alike if w.shape and w.dtype == usual and w.name in divided}
    kept = [Param(w.name, AXIS, COPY, COPY, SUM) for w in alike if w.name not in left]
    # so is what has no dim to shard, or a dtype that FSDP2 does not gather with the others
    if kept:
        yield Step("", "fsdp", params=tuple(kept))
    for part in request.parts:
        if part.placed.beside:
            yield from _together(request, part, left, gather)
    last = replace(gather, gathered="microbatch") if gather.gathered == "use" else gather
    staged = layout.stage_ranks > 1
    for unit in request.units:
        # the loss may read a head's weight after its forward, and backward needs it first
        ends = not staged and any(is_inside(head, m) for head in roles.heads for m in unit)
        yield from _unit(unit, left, last if ends else gather)
    yield Step("", "fsdp", params=_params(list(left.values())), gather=last)


def _unit(modules: Sequence[str], left: dict[str, Weight], gather: FSDPUnit) -> Iterator[Step]:
    """The Step of modules that are gathered together, less those of which no weight is left."""
    taken = {module: inside for module in modules if (inside := _take(module, left))}
    if taken:
        first, *beside = taken
        weights = [weight for inside in taken.values() for weight in inside]
        unit = replace(gather, beside=tuple(beside))
        yield Step(first, "fsdp", params=_params(weights, gather.axis), gather=unit)


def _take(module: str, left: dict[str, Weight]) -> list[Weight]:
    """The weights in a module, which are no longer left. If one is tied to something outside, none:
    they are gathered with the rest."""

    def names_inside(weight: Weight) -> list[bool]:
        return [is_inside(name, module) for name in (weight.name, *weight.aliases)]

    inside = [w for w in left.values() if any(names_inside(w))]
    if not all(all(names_inside(w)) for w in inside):
        return []
    for weight in inside:
        del left[weight.name]
    return inside


def _together(
    request: StepsRequest,
    part: Part,
    left: dict[str, Weight],
    gather: FSDPUnit,
) -> Iterator[Step]:
    """Units of a part whose rows lie on the ranks of several axes together: those inside of it,
    then its modules with the rest. The ranks of the other axes have the same samples, so the same
    gradient.

    Raises:
        UnsupportedModel: Some of its weights are in no module that can be gathered by itself.
    """
    layout, model = request.layout, request.model
    axis = ".".join(layout.active_axes(AXIS, *part.placed.beside))
    unit = replace(gather, axis=axis, copies=layout.size(*part.placed.beside))
    for each in request.units:
        if all(any(is_inside(name, m) for m in part.modules) for name in each):
            yield from _unit(each, left, unit)
    for module in callable_blocks(model, part.modules):
        if module and not called_by_data(model, module):
            yield from _unit((module,), left, unit)
    if rest := [name for name in left if name in part.weights]:
        raise UnsupportedModel(
            field_of_part(part.pattern),
            str(part.placed),
            f"{rest[0]} is in no module that can be gathered by itself over {axis}",
            "name a module that is called in every forward and holds all users of its weights",
        )


def _params(weights: list[Weight], axis: str = AXIS) -> tuple[Param, ...]:
    return tuple(Param(w.name, axis, Shard(0), COPY, SUM) for w in weights)
