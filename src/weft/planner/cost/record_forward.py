"""One forward and loss of a model on the meta device, as records of the modules of its chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft._torch.tensors import NEEDS_ELEMENTS, fake_mode, make_fake
from weft.core import DtypeRule, Part, UnsupportedModel
from weft.nn import (
    Loss,
    Roles,
    accepts_sharded_logits,
    model_arguments,
    weighed_loss,
)
from weft.parallel import cast_arguments, low_precision
from weft.pipeline import (
    ForwardGraph,
    GraphNode,
    containers_of,
    copy_with_tensors,
    is_parameter,
    split_points,
)

from .module_record import ModuleRecord, OpKey
from .op_recorder import BACKWARD_WORK, OpRecorder


def record_forward(
    model: nn.Module,
    roles: Roles,
    batch: dict[str, Tensor],
    loss: Loss,
    precision: str,
    inputs: Sequence[str],
    fused: bool,
    parts: Sequence[Part] = (),
) -> OpRecorder:
    """One forward of `model` and `loss` on all of `batch`. `fused`: with the kernels of a GPU;
    `parts`: of the model, with axes of their own. Raises UnsupportedModel."""
    fake = fake_mode()
    cpu = torch.device("cpu")
    rule = DtypeRule(precision)

    def stand_in(t: Tensor) -> Tensor:
        if not (t.is_meta or is_parameter(t)):
            return t.clone()
        if not is_parameter(t) or rule.computed(t.dtype) == t.dtype:
            return make_fake(fake, t, cpu)
        bare = torch.empty_strided(t.shape, t.stride(), dtype=rule.computed(t.dtype), device="meta")
        return make_fake(fake, nn.Parameter(bare, requires_grad=t.requires_grad), cpu)

    traced = copy_with_tensors(model, stand_in)
    if not model.training:
        traced.train()
    forward = OpRecorder(traced, roles, fake, accepts_sharded_logits(loss), fused, parts)
    blocks = [block for found in roles.blocks for block in found]
    lowered = low_precision(traced, rule, blocks)
    with torch.random.fork_rng([]), torch.enable_grad(), lowered, forward.watching():
        try:
            output = traced(**cast_arguments(rule, model_arguments(inputs, batch)))
            forward.in_loss = True
            weighed_loss(loss, output, batch)
        except NEEDS_ELEMENTS as problem:
            raise UnsupportedModel(
                "model",
                type(model).__name__,
                f"its forward reads elements of a tensor into Python ({problem})",
                "use a model whose forward does not depend on elements of a tensor",
            ) from problem
    return forward


def chain_records(seen: OpRecorder) -> list[ModuleRecord]:
    """The modules of the chain, in the order of the forward: those with which stages of a
    pipeline may begin, each with all that runs until the next."""
    bare = ForwardGraph(tuple(seen.events), (), {}, frozenset(), {}, containers_of(seen.model))
    starts = {event.name: place for place, event in enumerate(seen.events)}
    # a model that is one module has no point to split it at
    names = [atom.module for atom in split_points(bare, set(seen.blocks))] or [""]
    begins = [starts.get(name, 0) for name in names]
    _settle(seen)
    used: set[int] = set()
    chain = list[ModuleRecord]()
    for name, begin, end in zip(
        names, [0, *begins[1:]], [*begins[1:], len(seen.events)], strict=True
    ):
        here = ModuleRecord(name, repeated=name in seen.blocks)
        for place in range(begin, end):
            here.add(seen.at.get(place, ModuleRecord("")))
        here.bytes["output_bytes"] = seen._part(starts.get(name, 0)).bytes["output_bytes"]
        _count_parameters(here, seen, seen.events[begin:end], used)
        chain.append(here)
    for p in seen.model.parameters():
        if id(p) not in used:  # the first stage holds what no module uses
            chain[0].hold(p, seen.cuts[id(p)], seen.stored.get(id(p)))
    found = {part.name: part for part in chain}
    for part in chain:
        if part.name in seen.like:
            part.add(found[seen.like[part.name]])
            part.bytes["output_bytes"] = found[seen.like[part.name]].bytes["output_bytes"]
    return chain


def _count_parameters(
    here: ModuleRecord, seen: OpRecorder, events: Sequence[GraphNode], used: set[int]
) -> None:
    """Gives `here` the parameters of these calls that none before has used; or all, if they are
    tied."""
    found: dict[int, nn.Parameter] = {}
    for event in events:
        own = seen.modules[event.name].parameters(recurse=event.name in seen.like)
        found |= {id(p): p for p in own}
    new = {key: p for key, p in found.items() if key not in used}
    used |= set(found)
    for key, p in (new or found).items():
        here.hold(p, seen.cuts[key], seen.stored.get(key))
    here.tied = bool(found) and not new


def _settle(seen: OpRecorder) -> None:
    """Adds what was kept to the ops."""
    for storage, one in seen.saved.items():
        cut = seen.divided.get(storage) or ("whole" if storage in seen.gathered else one.cut)
        sums = seen._part(one.place).sums
        key = (
            next((k for k in sums if k.core and k.kind == "attention"), None) if one.core else None
        )
        entry = sums[key or OpKey("memory", cut, one.core, BACKWARD_WORK["memory"])]
        entry.saved += one.tensor.untyped_storage().nbytes()
        entry.names[one.leaf] = None
    seen.saved = {}
