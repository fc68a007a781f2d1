"""The collectives of a layout's step on one rank, predicted from the plan and from what the
one-device run has shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod

import torch
from torch import Tensor

from weft.core import (
    Plan,
    is_inside,
)
from weft.engine import (
    Engine,
)
from weft.parallel import (
    AttentionCall,
    BoundaryShape,
    CallSizes,
    Collective,
    RoutingCall,
    SequenceInput,
    dim_of_positions,
    predict_collectives,
    whole_batch_comms,
)

from .activation_recorder import ActivationRecorder
from .case import Case
from .reference import Reference
from .stage_values import stage_value_bytes

CallShapes = tuple[tuple[int, ...], tuple[int, ...]]  # of what enters a call, and leaves it


def predict_step(
    case: Case, engine: Engine, reference: Reference, trace: ActivationRecorder
) -> list[Collective]:
    """The collectives of a step on this rank."""
    values = stage_value_bytes(case, engine.plan, reference.batches[0])
    gathered = (n for place, n in reference.loss_bytes if place not in engine.plan.pairs)
    loss = whole_batch_comms(engine.plan, engine.mesh.rank, gathered)
    crossings = _crossings(engine.plan, reference, trace)
    comms = predict_collectives(
        engine.plan,
        crossings,
        engine.plan.dtypes.computed(case.dtype).itemsize,
        reference.unreached,
        engine.buffers.nbytes,
        engine.mesh.rank,
        values,
        [
            *_shared_attentions(engine, reference, trace),
            *_sequence_inputs(engine, reference.batches[0], trace),
        ],
        _routings(reference.traces),
        reference.traces[0].asked,
        engine.updated_whole,
        _module_calls(engine.plan, reference.traces[0], crossings, trace),
    )
    return [*comms, *loss]


def _shared_attentions(
    engine: Engine, reference: Reference, trace: ActivationRecorder
) -> list[AttentionCall]:
    """Those among the positions that ranks share. Attention of an image, or to one, is none: each
    rank has as many keys as one device."""
    cores, batch = reference.traces[0].cores, reference.batches[0]
    if not engine.sequence:
        return cores
    length, here = engine.sequence.length(batch), {core.module: core.key[2] for core in trace.cores}
    return [
        core
        for core in cores
        if core.query[2] == core.key[2] == length and here.get(core.module) != length
    ]


def _crossings(
    plan: Plan, reference: Reference, trace: ActivationRecorder
) -> dict[str, BoundaryShape]:
    """What crosses the boundaries of modules. Of several heads, the first has all labels."""
    whole = reference.traces[0]
    crossings = {}
    for name, each in whole.crossings.items():
        shapes, mine = whole.shapes[name], trace.shapes.get(name, [])
        if _is_fixed(plan, each, shapes, mine):
            entered, left = shapes[0]
            each = replace(each, entered=entered, left=left, batched=False, fixed=True)
        crossings[name] = replace(each, joined=_is_joined(plan, each, shapes, mine))
    heads = [s.module for s in plan.steps if s.output is not None and s.output.typed]
    labels = reference.labels
    for head in heads if labels else ():
        if head in crossings:
            crossings[head], labels = replace(crossings[head], labels=labels), ()
    return crossings


def _is_fixed(
    plan: Plan, crossing: BoundaryShape, whole: Sequence[CallShapes], mine: Sequence[CallShapes]
) -> bool:
    """Whether what enters is as large as on one device in every call, though there are fewer
    samples."""
    return len(mine) >= len(whole) and all(
        _is_fixed_call(plan, crossing, *both) for both in zip(whole, mine, strict=False)
    )


def _is_fixed_call(
    plan: Plan, crossing: BoundaryShape, whole: CallShapes, mine: CallShapes
) -> bool:
    """The same of one call. Features may be divided."""
    if plan.microbatch == crossing.samples or plan.sequence_size > 1:
        return False
    (entered, _), (here, _) = whole, mine
    return entered != (0,) and (entered == here or (len(entered) > 1 and entered[:-1] == here[:-1]))


def _is_joined(
    plan: Plan, crossing: BoundaryShape, whole: Sequence[CallShapes], mine: Sequence[CallShapes]
) -> bool:
    """Whether a dim of what leaves counts samples: the first, with something else, as in [samples *
    patches, positions, features]; or a later one by itself, as in [layers, samples, queries,
    features]. Of this rank's samples it is as much shorter as these are fewer."""
    if crossing.batched or not mine:
        return False
    (_, left), (_, here) = whole[0], mine[0]
    if len(left) < 2 or len(here) != len(left):
        return False
    fewer = [here[dim] * crossing.samples == n * plan.microbatch for dim, n in enumerate(left)]
    apart = [dim for dim, n in enumerate(left[:-1]) if n != here[dim]]  # features may be divided
    return fewer[0] or (plan.sequence_size == 1 and len(apart) == 1 and fewer[apart[0]])


def _sequence_inputs(
    engine: Engine, batch: dict[str, Tensor], trace: ActivationRecorder
) -> Iterator[SequenceInput]:
    """What enters the modules that compute on whole sequences, in one microbatch on this rank."""
    names = [step.module for step in engine.rank_plan.steps if step.whole_sequence]
    whole = {engine.model.get_submodule(name) for name in names}
    if not whole or not engine.sequence:
        return
    here = engine.sequence.length(batch) // engine.plan.sequence_size
    for name, module in engine.model.named_modules():
        entered = trace.entered.get(name, []) if module in whole else []
        for each in entered[: len(entered) // engine.plan.accumulate]:
            if dim_of_positions(each.shape, here) is not None:
                yield each


def _module_calls(
    plan: Plan,
    whole: ActivationRecorder,
    crossings: Mapping[str, BoundaryShape],
    trace: ActivationRecorder,
) -> dict[str, CallSizes]:
    """How often each module is called; and with how much, on this rank, where that differs from
    call to call, or one device's shapes do not tell: a Python loop over experts calls each with the
    tokens that chose it."""
    at_first = {s.module for s in plan.steps if s.gather and s.gather.gathered != "use"}
    again = _regathered(_unit_calls(plan, whole), at_first)
    repeated = {n: (whole.called_again[n], whole.left_again[n]) for n in whole.calls}
    found = {
        n: CallSizes(count, (), again[n], repeated[n], _kept(plan, whole, n))
        for n, count in whole.calls.items()
    }
    for name, shapes in whole.shapes.items():
        crossing, mine = crossings[name], trace.shapes.get(name, [])
        chosen = any(name == each or is_inside(name, each) for each in plan.chosen)
        side = 0 if crossing.entered is not None else 1  # indices enter an embedding
        flat = len(shapes[0][side]) == 2 and not crossing.batched
        counted = crossing.batched or crossing.fixed
        if len(set(shapes)) > 1 and not chosen and counted and plan.sequence_size == 1:
            both = zip_longest(shapes, mine[: len(shapes)])
            sizes = tuple(_call_sizes(plan, crossing, *each) for each in both)
            found[name] = replace(found[name], sizes=sizes * plan.accumulate)
        if not (chosen or flat or _parts_samples(plan, shapes, mine)):
            continue
        rows = shapes[0][side][0]
        usual = {rows, rows * plan.microbatch / crossing.samples}
        chosen = chosen or any(call[side] and call[side][0] not in usual for call in mine)
        chosen = chosen or _parts_samples(plan, shapes, mine)
        if chosen and plan.sequence_size == 1 and not plan.sliced(name):
            sizes = tuple((prod(entered), prod(left)) for entered, left in mine)
            count = len(shapes) if sizes else 0
            found[name] = replace(found[name], count=count, sizes=sizes)
    return found


def _first_asked(
    plan: Plan, whole: ActivationRecorder, stage: int
) -> tuple[Counter[str], frozenset[str]] | None:
    """When the forward of a stage first asked for a gradient that FSDP2 is told of: one that comes
    to what a unit puts out. Inside of the next unit it comes to that unit's own view of it."""
    units = {n for s in plan.steps if s.gather is not None for n in (s.module, *s.gather.beside)}
    for (name, _), (called, running) in whole.at_gradient.items():
        others = (u for u in units & running if u and (u == name or not is_inside(name, u)))
        if name in units and plan.stage_of(name) == stage and not any(others):
            return called, running
    return None


def _kept(plan: Plan, whole: ActivationRecorder, name: str) -> int | None:
    """How often a microbatch, or in a pipeline all of a step together, gather a unit that is whole
    from the first gradient on that the forward asks for: at each call before, and once after,
    unless it runs then."""
    asked = _first_asked(plan, whole, plan.stage_of(name))
    if asked is None:
        return None
    called, running = asked
    reached = any(whole.forward[place] == name for place in whole.reached)
    later = name not in running and (reached or whole.calls[name] > called[name])
    return called[name] + later


def _call_sizes(
    plan: Plan, crossing: BoundaryShape, whole: CallShapes, mine: CallShapes | None
) -> tuple[int, int]:
    """Elements that enter a call on this rank, and leave it."""
    fixed = mine is not None and _is_fixed_call(plan, crossing, whole, mine)
    here, all_ = (1, 1) if fixed else (plan.microbatch, crossing.samples)
    entered, left = map(prod, whole)
    return entered * here // all_, left * here // all_


def _parts_samples(plan: Plan, whole: Sequence[CallShapes], mine: Sequence[CallShapes]) -> bool:
    """Whether a Python loop over parts of the rows calls a module more often where there are more
    samples: as many rows come by in fewer calls."""
    if len(mine) == len(whole) * plan.accumulate:
        return False
    rows, here = (sum(entered[0] for entered, _ in each if entered) for each in (whole, mine))
    return here * plan.data_size == rows > 0


def _unit_calls(plan: Plan, whole: ActivationRecorder) -> list[tuple[str, bool, bool]]:
    """The calls of a forward, as `_regathered` takes them. Modules that are gathered together are
    called one after another, and count as one call: backward comes to the last, what enters is that
    of the first."""
    units = [(s.module, s.gather.beside) for s in plan.steps if s.gather is not None]
    unit_of = {name: unit for unit, beside in units for name in (unit, *beside)}
    order: list[tuple[str, bool, bool]] = []
    for place, name in enumerate(whole.forward):
        unit = unit_of.get(name)
        if unit is None:
            continue
        needs = place in whole.needing
        if name != unit and order and order[-1][0] == unit:
            needs = order.pop()[2]
        order.append((unit, place in whole.reached, needs))
    return order


def _regathered(order: list[tuple[str, bool, bool]], at_first: Collection[str]) -> Counter[str]:
    """How often backward gathers each unit. When FSDP2 comes to a unit, it gathers that of the call
    before, too, also if backward does not come there (`FSDPParamGroup._backward_prefetch`). A
    unit is freed where the gradient of what entered the call is made, else when backward ends.

    Args:
        order: (unit, whether backward comes to it, whether what enters needs a gradient) of the
            calls of a forward.
        at_first: the units that are whole when backward begins.
    """
    count: Counter[str] = Counter()
    gathered = {*at_first}
    open_units: set[str] = set()  # a call of theirs is not done
    for place in reversed(range(len(order))):
        name, reached, needs = order[place]
        if reached and name not in open_units:
            for unit in (name, *(before for before, _, _ in order[max(0, place - 1) : place])):
                count[unit] += unit not in gathered
                gathered.add(unit)
            open_units.add(name)
        if reached and needs:
            gathered.discard(name)
            open_units.discard(name)
    return count


def _routings(traces: list[ActivationRecorder]) -> list[RoutingCall]:
    """Of the whole batch."""
    together = zip(*(trace.routings for trace in traces), strict=True)
    return [replace(each[0], index=torch.cat([one.index for one in each])) for each in together]
