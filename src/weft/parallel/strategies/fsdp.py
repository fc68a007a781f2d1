"""Sharded data parallel over `fsdp`: ZeRO-1, ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020), through
FSDP2.

Parameters rest as rows of dim 0 on the ranks; each repeated block is gathered and reduced as one
unit, what is left as the last. With `dp` beside it: hybrid sharding, gradients reduced inside and
then summed across.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
    Step,
    Weight,
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
    alike = roles.alike(weights, layout, AXIS)
    usual = Counter(w.dtype for w in alike).most_common(1)[0][0] if alike else None
    left = {w.name: w for w in alike if w.shape and w.dtype == usual}
    kept = [Param(w.name, AXIS, COPY, COPY, SUM) for w in alike if w.name not in left]
    if kept:  # without a dim to shard, or of a dtype that FSDP2 does not gather with the others
        yield Step("", "fsdp", params=tuple(kept))
    listed = (b for blocks in roles.blocks for b in blocks)
    for block in callable_blocks(request.model, listed):
        if called_by_data(request.model, block):
            continue  # ranks with other samples may call others: gathered with the rest
        touched = [
            w for w in left.values() if any(n.startswith(block + ".") for n in (w.name, *w.aliases))
        ]
        inside = [
            w for w in touched if all(n.startswith(block + ".") for n in (w.name, *w.aliases))
        ]
        if not inside or len(inside) < len(touched):
            continue  # tied to something outside: gathered with the rest
        for weight in inside:
            del left[weight.name]
        yield Step(block, "fsdp", params=_params(inside), gather=gather)
    last = replace(gather, gathered="microbatch") if gather.gathered == "use" else gather
    yield Step("", "fsdp", params=_params(list(left.values())), gather=last)


def _params(weights: list[Weight]) -> tuple[Param, ...]:
    return tuple(Param(w.name, AXIS, Shard(0), COPY, SUM) for w in weights)
