"""Sequence parallel, an option of `tp`: between the chains, activations are cut along the sequence.

Korthikanti et al. 2022. The region runs from the first block's input to the last block's output.
What runs in it on a slice of the sequence (norms, biases added after a row) leaves a partial sum as
its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.tensor import Shard

from weft.core import COPY, SUM, Boundary, Param, Step, UnsupportedModel
from weft.nn import OF_OUTPUTS

from ._request import StepsRequest

AXIS = "tp"
OPTIONS: Mapping[str, str] = {
    "sequence": "activations between the chains are cut along the sequence"
}


def steps(request: StepsRequest) -> Iterator[Step]:
    """The edges of every region, and the gradients that are partial inside."""
    layout, roles = request.layout, request.roles
    if "sequence" not in layout.options_of(AXIS):
        return
    stacks = roles.stacks()
    if not stacks:
        why = f" ({roles.notes[0]})" if roles.notes else ""
        raise UnsupportedModel(
            "layout",
            str(layout),
            f"sequence parallelism finds no list of blocks that each have a chain to cut{why}",
            "use tp without it",
        )
    within = tuple(f"{block}." for blocks in stacks for block in blocks)
    _check_attentions(request, within)
    crossing = [c.row for c in roles.chains if c.cross and c.row.startswith(within)]
    if crossing:
        raise UnsupportedModel(
            "layout",
            str(layout),
            f"{crossing[0]} attends to another sequence, which is not cut",
            "use tp without sequence",
        )
    flat = [chain.row for chain in roles.chains if chain.flat]
    if flat:
        raise UnsupportedModel(
            "layout",
            str(layout),
            f"the attention of {flat[0]} is part of its block's own forward, where the sequence"
            " is cut",
            "put the attention in a module of its own, or use tp without sequence",
        )
    cut = {
        f"{linear}.{leaf}"
        for c in roles.chains
        for linear in c.linears
        for leaf in ("weight", *(OF_OUTPUTS if linear in c.columns else ("bias",)))
    }
    cut |= {name for chain in roles.chains for name in (*chain.inner, *chain.parameters)}
    cut |= {name for experts in roles.experts for name in experts.cuts}
    alike = roles.alike(request.weights, layout, AXIS)
    for blocks in stacks:
        yield Step(blocks[0], "sequence", input=Boundary({AXIS: COPY}, {AXIS: Shard(1)}))
        yield Step(blocks[-1], "sequence", output=Boundary({AXIS: COPY}, {AXIS: Shard(1)}))
        for block in blocks:
            partial = [
                w.name for w in alike if w.name.startswith(block + ".") and w.name not in cut
            ]
            params = tuple(Param(name, AXIS, COPY, COPY, SUM) for name in partial)
            yield Step(block, "sequence", params=params, activation_sharding="sequence")


def _check_attentions(request: StepsRequest, within: tuple[str, ...]) -> None:
    """Refuse nn.MultiheadAttention that does not gather the positions that it attends to."""
    divided = {chain.entry for chain in request.roles.chains if chain.by_entry}
    for name, module in request.model.named_modules():
        if not (isinstance(module, nn.MultiheadAttention) and name.startswith(within)):
            continue
        if name not in divided:
            notes = [note for note in request.roles.notes if note.startswith(f"{name}:")]
            problem = f"{name} is left whole, and would attend to a part of the positions"
            problem += f" ({notes[0]})" if notes else ""
        elif not module.batch_first:
            problem = f"{name} takes positions before samples (batch_first is false), and the"
            problem += " second dim is cut"
        else:
            continue
        fix = "use tp without sequence"
        raise UnsupportedModel("layout", str(request.layout), problem, fix)
