"""Experts over `ep`, or over any axis with the option `ep`: whole experts lie on ranks, and tokens
travel to them.

Each rank has the tokens of its own samples and positions; those routed to an expert elsewhere go
there by an all-to-all of true sizes, and what it makes of them comes back (GShard, Lepikhin et al.
2021). `ep` divides the batch as `dp` does; `dp2+ep.cp2+ep` reads the ranks of other axes a second
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.distributed.tensor import Shard

from weft.core import (
    COPY,
    EXPERTS,
    SUM,
    AxisTraits,
    DimShard,
    Divides,
    ExpertDispatch,
    LayoutError,
    NothingToDivide,
    Param,
    Step,
    UnsupportedModel,
)
from weft.nn import why_none_of

from ._request import StepsRequest

AXIS = "ep"
TRAITS = AxisTraits(frozenset({Divides.SAMPLES, Divides.EXPERTS}), order=3, shrinks_freely=True)
OPTIONS: Mapping[str, str] = {}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step for each module that holds experts, and one for all other weights where `ep` is an
    axis of its own."""
    model, weights, roles = request.model, request.weights, request.roles
    layout = request.layout
    size = layout.size(EXPERTS)
    if not roles.experts:
        why = why_none_of(model)
        problem = f"expert parallelism finds no experts in this model{why and ': '}{why}"
        fix = "{others}: ep takes modules with num_experts, called with (tokens, experts,"
        fix += " weights), that hold all experts' weights"
        refusal = NothingToDivide("layout", str(layout), problem, fix)
        refusal.others = ("dp", "fsdp", "pp")
        raise refusal
    if "ep" in layout.options_of("tp") and "sequence" not in layout.options_of("tp"):
        raise LayoutError(
            "layout",
            str(layout),
            "the ranks of tp have the same tokens, and would all send them to the same experts",
            f"write tp{layout.size('tp')}+sequence+ep, which parts them, or leave +ep out: tp then"
            " cuts each expert",
        )
    inside = tuple(block + "." for stack in roles.stacks() for block in stack)
    for experts in roles.experts:
        module, count = experts.module, experts.count
        if "ep" in layout.options_of("tp") and not module.startswith(inside):
            raise UnsupportedModel(
                "layout",
                str(layout),
                f"{module} is outside of the blocks, where the ranks of tp have the same tokens",
                "leave +ep out of tp: it then cuts each expert",
            )
        if count % size:
            fit = [n for n in range(2, count + 1) if count % n == 0]
            raise UnsupportedModel(
                "layout",
                str(layout),
                f"{module} has {count} experts, which do not divide over {size} ranks",
                f"sizes that work: {fit}",
            )
        cut = DimShard(0, (count,), (count,))
        held = [w for w in weights if w.name.startswith(module + ".")]
        params = tuple(Param(w.name, EXPERTS, Shard(0), Shard(0), Shard(0), cut) for w in held)
        dispatch = ExpertDispatch(count, experts.names, experts.shared)
        yield Step(
            module,
            "expert",
            params,
            attributes=(("num_experts", count // size),),
            dispatch=dispatch,
        )
    if layout.size(AXIS) > 1:
        others = tuple(
            Param(w.name, AXIS, COPY, COPY, SUM) for w in weights if not roles.of_experts(w.name)
        )
        yield Step("", "expert", params=others)
