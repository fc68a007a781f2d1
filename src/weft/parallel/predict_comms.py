"""The collectives that a plan implies in an optimizer step: kind, axis and bytes of each.

`nbytes` is the message as the collective sees it: the tensor of an all-reduce or broadcast, what an
all-gather gives, what a reduce-scatter takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from torch import Tensor
from torch.distributed.tensor import Shard

from weft.core import (
    EXPERTS,
    REPLICA_AXIS,
    STAGE_AXIS,
    Plan,
    Step,
    bucket_gradients,
    collective,
    computes_whole_sequences,
)
from weft.nn import reduced_numels

from .axes import DATA_AXES, FEATURE_AXES, TOKEN_AXES
from .comm_queries import (
    AttentionCall,
    BoundaryShape,
    CallSizes,
    Collective,
    GateQuery,
    RoutingCall,
    SequenceInput,
)
from .predict_grad_comms import (
    bucket_bytes,
    chosen_weights,
    gather_comms,
    in_a_bucket,
    read_alone,
    replica_comms,
    update_comms,
    whole_update_comms,
)
from .predict_norm_comms import batchnorm_comms, mean_comms
from .wire_sizes import HEADER_BYTES

TRAIL_BYTES = 2 * 8  # which modules the ranks of one stage ran, and its square, in float64
# of a step, in float64: squared norm, loss, weight, unreached parameters, what ran, what it
# changed
STEP_STATISTICS = 6


def predict_collectives(
    plan: Plan,
    crossings: Mapping[str, BoundaryShape],
    itemsize: int,
    unreached: Collection[str] = (),
    buffers: Iterable[int] = (),
    rank: int = 0,
    values: Mapping[int, int] | None = None,
    sequence_calls: Iterable[AttentionCall | SequenceInput] = (),
    routings: Iterable[RoutingCall] = (),
    asked: Iterable[GateQuery] = (),
    updated_whole: Collection[str] = (),
    calls: Mapping[str, CallSizes] | None = None,
) -> list[Collective]:
    """The collectives of the first optimizer step on a rank, and what it sends to other stages.

    Args:
        plan: the whole plan.
        crossings: shapes of what crosses each module's boundary, by module name.
        itemsize: bytes of an element of activations and their gradients.
        unreached: parameters that get no gradient.
        buffers: bytes of each buffer that is broadcast at the start of a step.
        rank: whose collectives.
        values: bytes of each value that crosses stages, for one microbatch on one rank.
        sequence_calls: the calls of the model's attention, and what enters the modules that compute
            on whole sequences.
        routings: which experts the tokens of each mixture choose.
        asked: what the gates compute over all tokens.
        updated_whole: parameters that one rank updates for all that hold a part of them.
        calls: how often each module is called; one that is not named is not called. Default: each
            once.
    """
    if any((calls or {}).get(b, CallSizes()).again[0] for b in plan.recomputed()):
        plan = replace(plan, recompute="none")  # the model checkpoints these blocks by itself
    whole, plan = plan, plan.of(rank)
    comms: list[Collective] = []
    routed = {each.module for each in routings}
    for microbatch in range(plan.accumulate):
        for step in plan.steps:
            every = step.input is not None and step.input.every
            if not (every and step.module in routed):
                comms += _boundaries(plan, step, microbatch, crossings, itemsize, calls or {})
        for name in plan.batchnorms:
            called = (calls or {}).get(name, CallSizes())
            again = _norms_again(plan, name, called, microbatch)
            comms += batchnorm_comms(plan, name, again, crossings, itemsize, called.count)
        for routing in routings:
            comms += _inside(plan, routing, microbatch, itemsize)
            comms += _dispatch(plan, whole, routing, microbatch, rank, itemsize)
        for each in asked:
            if plan.staging is None or plan.stage_of(each.module) in whole.stages(rank):
                comms += _of_all_tokens(plan, each, microbatch)
        for call in sequence_calls if plan.sequence_size > 1 else ():
            if isinstance(call, SequenceInput):
                comms += _gathered(plan, call, microbatch)
            elif computes_whole_sequences(plan.steps, call.module):
                continue
            elif plan.staging is None or plan.stage_of(call.module) in whole.stages(rank):
                comms += _attention(plan, call, microbatch, itemsize)
    if plan.runs_forward_twice:
        comms += [comm for comm in comms if comm.when == "forward"]
    comms += gather_comms(plan, plan.layout.coords(rank), crossings, unreached, calls)
    missing = {*unreached, *read_alone(whole)}
    drops_unused = bool(plan.chosen) or (bool(missing) and in_a_bucket(whole, missing))
    for bucket in bucket_gradients(plan):
        axis, names = ".".join(plan.layout.active_axes(*bucket.axes)), bucket.names
        apart = plan.uses_custom_dp_sync and REPLICA_AXIS in bucket.axes
        within = [a for a in bucket.axes if not (apart and a == REPLICA_AXIS)]
        if within:
            nbytes = bucket_bytes(plan, names, rank)
            comms.append(
                Collective(
                    "all_reduce",
                    ".".join(plan.layout.active_axes(*within)),
                    nbytes,
                    "reduce",
                    names[0],
                )
            )
        if apart:
            comms += replica_comms(plan, bucket, rank)
        if drops_unused:
            comms.append(Collective("all_reduce", axis, 4 * len(names), "reduce", names[0]))
    comms += _messages(whole, rank, values or {})
    comms += update_comms(plan, rank)
    comms += whole_update_comms(plan, rank, updated_whole)
    data = plan.layout.active_axes(*DATA_AXES)
    if tokens := plan.layout.active_axes(*TOKEN_AXES):
        if zeros := chosen_weights(plan):
            group = ".".join(tokens)
            comms.append(Collective("all_reduce", group, 4 * len(zeros), "reduce", zeros[0]))
        comms += [
            Collective("broadcast", ".".join(tokens), nbytes, "step", "") for nbytes in buffers
        ]
    biases = [
        e.size for e in asked if e.what == "bias" and plan.stage_of(e.module) in whole.stages(rank)
    ]
    if biases and (axis := ".".join(plan.layout.active_axes(*plan.token_axes))):
        comms.append(Collective("all_reduce", axis, sum(biases) * max(4, itemsize), "step", ""))
    if plan.layout.active_axes():
        comms.append(
            Collective(
                "all_reduce", ".".join(plan.layout.active_axes()), STEP_STATISTICS * 8, "step", ""
            )
        )
    if plan.staging is not None and any(step.gather is not None for step in plan.steps):
        comms.append(Collective("all_reduce", ".".join(data), TRAIL_BYTES, "step", ""))
    return comms


def collective_totals(comms: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (count, bytes)."""
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for comm in comms:
        counts[comm.kind, comm.axis] += 1
        nbytes[comm.kind, comm.axis] += comm.nbytes
    return {key: (counts[key], nbytes[key]) for key in sorted(counts)}


def _boundaries(
    plan: Plan,
    step: Step,
    microbatch: int,
    crossings: Mapping[str, BoundaryShape],
    itemsize: int,
    calls: Mapping[str, CallSizes],
) -> Iterator[Collective]:
    crossing, called = crossings.get(step.module), calls.get(step.module, CallSizes())
    if crossing is None or (called.sizes and microbatch):  # not reached, or known of all at once
        return
    if step.mean_over and not called.sizes:
        again = _norms_again(plan, step.module, called, microbatch)
        yield from mean_comms(plan, step, again, crossing, itemsize, called.count)
    every = step.input is not None and step.input.every
    further = crossing.further if every and crossing.gives_grad else ()
    for each in (crossing, *(replace(shape, needing=crossing.giving) for shape in further)):
        yield from _crossing(plan, step, microbatch, each, itemsize, called)


def _crossing(
    plan: Plan,
    step: Step,
    microbatch: int,
    crossing: BoundaryShape,
    itemsize: int,
    called: CallSizes,
) -> Iterator[Collective]:
    again = _recomputations(plan, step.module, microbatch, step.by == "tensor")
    whole_inside = computes_whole_sequences(plan.steps, step.module.rpartition(".")[0])
    parts = 1 if whole_inside else plan.sequence_size
    for boundary, shape, entry in (
        (step.input, crossing.entered, True),
        (step.output, crossing.left, False),
    ):
        if boundary is None or shape is None:
            continue
        rows = crossing.rows(shape, plan.microbatch)
        for axis, forward, backward in boundary.moves(entry):
            size = plan.layout.size(axis)
            if size == 1:
                continue
            last = given = shape[-1] if shape else 1
            if boundary.inside.get(axis) == Shard(-1):
                last = -(-last // size) * size  # an uneven vocabulary travels padded
            nbytes = round(rows * prod(shape[:-1]) * last) // parts * itemsize
            each = [nbytes] * called.count
            if called.sizes:
                numels = (sizes[0 if entry else 1] for sizes in called.sizes)
                each = [numel * last // max(1, given) * itemsize for numel in numels]
            for move, when in ((forward, "forward"), (backward, "backward")):
                kind = collective(*move)
                if kind is None or (
                    when == "backward"
                    and not (crossing.needs_grad if entry else crossing.gives_grad)
                ):
                    continue
                counted = crossing.needing if entry else crossing.giving
                partly = when == "backward" and counted is not None and not called.sizes
                # backward comes to some calls alone, or to one several times
                for nbytes in each[:1] * (counted or 0) if partly else each:
                    yield Collective(kind, axis, nbytes, when, step.module)
                    for _ in range(again if when == "forward" else 0):
                        yield Collective(kind, axis, nbytes, "recompute", step.module)
                if when == "forward":
                    for nbytes in each[:1] * crossing.differentiated[0 if entry else 1]:
                        yield Collective(kind, axis, nbytes, "backward", step.module)
                    once_more = crossing.asked if again else 0
                    # by the model itself
                    backwards = plan.backwards(plan.stage_of(step.module), microbatch)
                    own = called.again[0 if entry else 1] * backwards
                    own *= plan.accumulate if called.sizes else 1
                    for nbytes in (*each[:1] * once_more, *(each[-own:] if own else ())):
                        yield Collective(kind, axis, nbytes, "recompute", step.module)
            each_row = (rows * prod(shape[:-1]) / plan.microbatch,)
            labels = each_row if crossing.labels is None else crossing.labels
            for scored in labels if boundary.typed else ():
                for count in reduced_numels(round(scored * plan.microbatch) // parts):
                    yield Collective(
                        "all_reduce", axis, count * max(4, itemsize), "forward", "(loss)"
                    )


def _attention(
    plan: Plan, core: AttentionCall, microbatch: int, itemsize: int
) -> Iterator[Collective]:
    """What attention over a sequence that ranks share exchanges, in forward and backward."""
    methods = {
        step.sequence.method: step.sequence.axis for step in plan.steps if step.sequence is not None
    }
    params = [p for step in plan.steps for p in step.params]
    cut = any(
        p.axis in FEATURE_AXES and p.cut is not None and p.name.startswith(core.module + ".")
        for p in params
    )
    tp = plan.layout.size(*FEATURE_AXES) if cut else 1
    heads, kv, length = (
        core.query[1] // tp,
        max(1, core.key[1] // tp),
        core.query[2] // plan.sequence_size,
    )
    again = _recomputations(plan, core.module + ".", microbatch)
    if plan.recompute == "selective":
        again = 1  # a second backward, of weights alone, does not come to it
    again = again if core.needs_grad else 0
    times = (
        *(("forward", "backward") if core.needs_grad else ("forward",)),
        *("recompute",) * again,
    )

    def nbytes(count: int, positions: int, shape: tuple[int, ...]) -> int:
        return plan.microbatch * count * positions * shape[-1] * itemsize

    axis = methods.pop("ulysses", None)
    if axis is not None and plan.layout.size(axis) > 1:
        size = plan.layout.size(axis)
        kv = max(kv, size)
        sent = [
            nbytes(heads, length, core.query),
            nbytes(kv, length, core.key),
            nbytes(kv, length, core.value),
            nbytes(heads, length, core.value),
        ]
        for when in times:
            # what nothing in backward needs is not made again where the core alone is
            made = sent[:3] if when == "recompute" and plan.recompute == "selective" else sent
            yield from (Collective("all_to_all", axis, n, when, core.module) for n in made)
        heads, kv, length = heads // size, kv // size, length * size
    for method, axis in methods.items():
        size = plan.layout.size(axis)
        if size == 1:
            continue
        own, wide = (
            [nbytes(kv, length, core.key), nbytes(kv, length, core.value)],
            max(4, itemsize) / itemsize,
        )
        if method == "gather":
            if core.eager:  # autograd keeps what is gathered, and sums in the dtype it is in
                times, wide = tuple(when for when in times if when != "backward"), 1
            for when in times:
                yield from (
                    Collective("all_gather", axis, n * size, when, core.module) for n in own
                )
            sums = own if core.needs_grad else []
            yield from (
                Collective("reduce_scatter", axis, round(n * size * wide), "backward", core.module)
                for n in sums
            )
            continue
        for when in times:
            yield from (
                Collective("send", axis, n, when, core.module) for n in own for _ in range(size - 1)
            )
        sums = own if core.needs_grad else []
        yield from (
            Collective("send", axis, round(n * wide), "backward", core.module)
            for n in sums
            for _ in range(size)
        )


def _gathering_order(plan: Plan) -> list[str]:
    """The axes that divide sequences, as they are gathered: ulysses within the ranks of cp."""
    cuts = [step.sequence for step in plan.steps if step.sequence is not None]
    return [cut.axis for cut in sorted(cuts, key=lambda cut: cut.method != "ulysses")]


def _gathered(plan: Plan, entering: SequenceInput, microbatch: int) -> Iterator[Collective]:
    """By which a module gets whole sequences: over ulysses first, then over what it stands in."""
    again = _recomputations(plan, entering.module + ".", microbatch)
    nbytes = prod(entering.shape) * entering.itemsize
    for axis in _gathering_order(plan):
        nbytes *= plan.layout.size(axis)
        for when in ("forward", *["recompute"] * again):
            yield Collective("all_gather", axis, nbytes, when, entering.module)
        if entering.needs_grad:
            yield Collective("reduce_scatter", axis, nbytes, "backward", entering.module)


def _inside(
    plan: Plan, routing: RoutingCall, microbatch: int, itemsize: int
) -> Iterator[Collective]:
    """What ranks exchange that have a part of each expert: tokens, where these go and with which
    weights, and what comes of them."""
    step = next(
        (
            s
            for s in plan.steps
            if s.input is not None and s.input.every and s.module == routing.module
        ),
        None,
    )
    if step is None or step.input is None or step.output is None:
        return
    again = _recomputations(plan, routing.module, microbatch)
    n, k = (
        len(routing.index) // (plan.data_size * plan.accumulate * plan.sequence_size),
        routing.index.shape[1],
    )
    tokens, weights, made = routing.needs_grad
    rows = n * routing.width * itemsize
    entering = (
        (rows, tokens),
        (n * k * routing.index.itemsize, False),
        (n * k * itemsize, weights),
    )
    for boundary, entry, crossing in (
        (step.input, True, entering),
        (step.output, False, ((rows, made or weights),)),
    ):
        for axis, forward, backward in boundary.moves(entry):
            for nbytes, needs_grad in crossing if plan.layout.size(axis) > 1 else ():
                ahead, back = collective(*forward), collective(*backward)
                if ahead is not None:
                    yield from (
                        Collective(ahead, axis, nbytes, when, routing.module)
                        for when in ("forward", *("recompute",) * again)
                    )
                if back is not None and needs_grad:
                    yield Collective(back, axis, nbytes, "backward", routing.module)


def _dispatch(
    plan: Plan, whole: Plan, routing: RoutingCall, microbatch: int, rank: int, itemsize: int
) -> Iterator[Collective]:
    """Tokens that go to their experts and come back, in forward and backward, and how many they
    are."""
    step = next((s for s in plan.steps if s.dispatch and s.module == routing.module), None)
    axis = ".".join(plan.layout.active_axes(EXPERTS))
    if step is None or not axis:
        return
    index, size = routing.index, plan.layout.size(EXPERTS)
    assert step.dispatch is not None
    length, each = len(index) // plan.batch, step.dispatch.experts // size
    mine = plan.layout.index(rank, EXPERTS)
    sliced = plan.sliced(routing.module)
    sliced &= not any(
        s.input is not None and s.input.every and s.module == routing.module for s in plan.steps
    )

    def routed(peer: int) -> Tensor:
        data = plan.layout.index(peer, *DATA_AXES)
        first = (microbatch * plan.data_size + data) * plan.microbatch
        rows = index.unflatten(0, (plan.batch, length))[first : first + plan.microbatch]
        held = whole.positions(peer, length)
        if sliced:
            here, parts = plan.layout.index(peer, *FEATURE_AXES), plan.layout.size(*FEATURE_AXES)
            held = held[here * len(held) // parts : (here + 1) * len(held) // parts]
        return rows[:, held] // each

    here = (
        sum(int((routed(peer) == mine).sum()) for peer in plan.layout.group_ranks(rank, EXPERTS))
        * routing.width
        * itemsize
    )
    sent = int((routed(rank) >= 0).sum()) * routing.width * itemsize
    again = _recomputations(plan, routing.module, microbatch)
    for when in ("forward", *("recompute",) * again):
        yield Collective("all_to_all", axis, step.dispatch.experts * 8, when, routing.module)
    tokens, _, made = routing.needs_grad
    for nbytes, needs_grad in ((here, tokens), (sent, made)):  # there, and back again
        for when in ("forward", *("backward",) * needs_grad, *("recompute",) * again):
            yield Collective("all_to_all", axis, nbytes, when, routing.module)


def _of_all_tokens(plan: Plan, asked: GateQuery, microbatch: int) -> Iterator[Collective]:
    """Shares: how many choices each expert has, summed over all ranks with tokens of their own.
    Capacity: which choices a sequence has, gathered from the ranks that have parts of it."""
    sliced = plan.sliced(asked.module)
    times = ("forward", *("recompute",) * _recomputations(plan, asked.module, microbatch))
    axis = ".".join(plan.layout.active_axes(*TOKEN_AXES, *(FEATURE_AXES if sliced else ())))
    if asked.what == "shares" and axis:
        yield from (
            Collective("all_reduce", axis, asked.size * 8, when, asked.module) for when in times
        )
    if asked.what not in ("capacity", "positions"):
        return
    if computes_whole_sequences(plan.steps, asked.module):
        return
    sliced &= asked.what == "capacity"  # masks are of what tp has gathered
    axes = [
        axis
        for axis in (*(FEATURE_AXES if sliced else ()), *_gathering_order(plan))
        if plan.layout.size(axis) > 1
    ]
    nbytes = plan.microbatch * asked.size * 8 // prod(map(plan.layout.size, axes))
    for axis in axes:
        nbytes *= plan.layout.size(axis)
        yield from (Collective("all_gather", axis, nbytes, when, asked.module) for when in times)


def _recomputations(plan: Plan, module: str, microbatch: int, linear: bool = False) -> int:
    """How often the forward of a module runs again in backward. `linear`: it exchanges in its own
    forward; other modules do so around it, and around a block that is recomputed."""
    recomputed = any(
        (linear and module == block) or module.startswith(block + ".")
        for block in plan.recomputed()
    )
    return plan.backwards(plan.stage_of(module), microbatch) if recomputed else 0


def _norms_again(plan: Plan, module: str, called: CallSizes, microbatch: int) -> int:
    """How often a norm sums its statistics again in backward, over all calls of a forward."""
    own = called.again[0] * plan.backwards(plan.stage_of(module), microbatch)
    return _recomputations(plan, module, microbatch) * called.count + own


def _messages(plan: Plan, rank: int, values: Mapping[int, int]) -> Iterator[Collective]:
    """What a rank sends over `pp`: values to the ranks of later stages, their gradients back."""
    placement, here = plan.schedule.placement, plan.layout.stage_of(rank)
    for index, value in enumerate(plan.staging.values if plan.staging is not None else ()):
        source, others = (
            placement[value.source],
            {placement[t] for t in value.targets} - {placement[value.source]},
        )
        for microbatch in range(plan.accumulate):
            if source == here:
                for _ in others:
                    if microbatch == 0 or plan.dynamic_shapes:
                        yield Collective("send", STAGE_AXIS, HEADER_BYTES, "forward", value.name)
                    yield Collective("send", STAGE_AXIS, values[index], "forward", value.name)
            elif here in others and value.differentiable:
                yield Collective("send", STAGE_AXIS, values[index], "backward", value.name)
