"""From a model and a layout to a Plan: asks every strategy that the layout names for its Steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core import (
    COPY,
    DATA_AXES,
    DEFAULT_SCHEDULE,
    EXPERTS,
    SEQUENCE_AXES,
    TOKEN_AXES,
    ActionCosts,
    AsyncServers,
    ConfigError,
    Layout,
    LayoutError,
    LocalSteps,
    MessageCodec,
    Plan,
    Schedule,
    Staging,
    Step,
    Sync,
    SyncEveryStep,
    UnsupportedModel,
    Weight,
    nearest,
    stage_runs_module,
)
from weft.nn import (
    GateBias,
    Roles,
    accepts_sharded_logits,
    chain_module,
    check_padding,
    find_roles,
    is_positionwise,
    named_inputs,
)
from weft.pipeline import make_stages, simulate
from weft.sync import make_sync

from . import strategies as parallel

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


def plan(
    model: nn.Module,
    layout: str | Layout,
    *,
    batch: int,
    accumulate: int = 1,
    loss: Callable | None = None,
    roles: Mapping[str, object] | None = None,
    recompute: str | int = "none",
    precision: str = "fp32",
    sync_batchnorm: bool = True,
    schedule: str | Schedule | Callable[..., Schedule] = DEFAULT_SCHEDULE,
    options: Mapping[str, object] | None = None,
    cut: str | Sequence[str] = "parameters",
    dynamic_shapes: bool = False,
    inputs: Sequence[str] | None = None,
    sample: Mapping[str, Tensor] | None = None,
    sync: str | Sync | None = None,
) -> Plan:
    """Plan how `model` runs under `layout`. Nothing runs, and the model does not change.

    Args:
        model: the module as written for one device; it may be on the meta device.
        layout: axes and sizes, such as "dp2.tp2" (docs/layouts.md).
        batch: samples of one optimizer step, over all ranks.
        accumulate: number of microbatches that the batch is divided into.
        loss: (output, batch) -> (sum, weight). If it is marked `weft.losses.vocab_parallel`, logits
            stay sharded over `tp`.
        roles: globs of module names -> roles of `tp` (docs/roles.md). Default: read or guessed.
        recompute: "none", "selective" (the attention core), "full", or k for every k-th block
            (Korthikanti et al. 2022).
        precision: dtype of computation: "fp32", "bf16", "fp16" or "fp64".
        sync_batchnorm: whether batch-norm statistics cover the whole microbatch.
        schedule: of `pp`: a name of docs/schedules.md (an option of `pp` in the layout overrides
            it), a Schedule, or a function that makes one.
        options: further arguments of the schedule, such as `chunks` per rank.
        cut: what stages of `pp` balance: "parameters", "flops" or measured "time"; or the modules
            with which the second and later stages begin.
        dynamic_shapes: whether shapes between stages depend on values, not only on batch shapes.
        inputs: batch entries that the model is called with. Default: those that its forward names.
        sample: a batch of two or more samples, along which `pp` traces the forward.
        sync: how the replicas on `dp` synchronise: a name, or what `weft.sync.make_sync` returns.
            Default: the backend's all-reduce.

    Raises:
        Refusal: what the layout cannot do with this model.

    Example:
        >>> from weft.models import decoder
        >>> print(plan(decoder(), "dp2.tp2", batch=32).layout)
        dp2.tp2
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    strategies = parallel.registry()
    if isinstance(sync, str):
        sync = make_sync(sync)
    _check_layout(layout, strategies)
    _check_batch(layout, batch, accumulate)
    if precision not in PRECISIONS:
        raise ConfigError(
            "precision.compute",
            precision,
            "not a precision",
            f"choose one of {', '.join(PRECISIONS)}",
        )
    found = find_roles(model, roles)
    weights = weights_of(model)
    steps: list[Step] = []
    folded = layout.live(EXPERTS) and not layout.live("ep")
    for axis in (*layout.live(), *(("ep",) if folded else ())):
        for strategy in strategies[axis]:
            steps += strategy.steps(
                model, weights, found, layout, loss is not None and accepts_sharded_logits(loss)
            )
    _check_shared(model, weights, steps, layout)
    if layout.live(*SEQUENCE_AXES):
        _check_sequence(model, layout, loss, found, steps, sample or {}, inputs)
    blocks = tuple(b for blocks in found.blocks for b in blocks)
    _check_recompute(recompute, blocks)
    norms = tuple(
        n
        for n, m in model.named_modules()
        if isinstance(m, _BatchNorm) and (m.training or not model.training)
    )
    synced = norms if sync_batchnorm and layout.live(*TOKEN_AXES) else ()
    staging, staged = None, None
    counted = tuple(each.shared for each in found.experts if each.shared)
    if layout.live("pp"):
        staging, staged = make_stages(
            model, layout, accumulate, schedule, options or {}, cut, blocks, inputs, sample, counted
        )
        again = (
            blocks
            if recompute == "full"
            else blocks[::recompute]
            if isinstance(recompute, int)
            else ()
        )
        units = {
            step.module: "sharding" for step in steps if step.gather is not None and step.module
        }
        units |= dict.fromkeys(again, "recompute")
        if layout.live("tp"):
            units |= {chain_module(chain): "tensor parallelism" for chain in found.chains}
        if "sequence" in layout.option("tp"):
            units |= dict.fromkeys(blocks, "sequence parallelism")
        _check_staged(layout, staging, staged, units, precision)
        _check_called(layout, staging, steps)
        steps = [_once_a_step(s) for s in steps]
    if isinstance(sync, LocalSteps | AsyncServers) and layout.size("dp") > 1:
        _check_biases(model, sync)
    notes = (
        check_sync(layout, sync, staged, precision) if sync is not None and not sync.plain else []
    )
    if layout.live("tp"):
        notes += [f"{found.source}; {len(found.chains)} chains of linears are cut", *found.notes]
    if staged is not None:
        notes.append(_bubble(staged))
    return Plan(
        layout,
        tuple(steps),
        weights,
        batch,
        accumulate,
        blocks,
        recompute,
        precision,
        synced,
        notes=tuple(notes),
        staging=staging,
        staged=staged,
        dynamic_shapes=dynamic_shapes,
        sync=sync,
        counted=counted,
    )


def check_sync(layout: Layout, sync: Sync, staged: Schedule | None, precision: str) -> list[str]:
    """What can be said of a synchroniser before any process starts. Returns notes. Raises
    ConfigError."""
    size = layout.size("dp")
    if (
        size > 1
        and "ep" in layout.option("dp")
        and not (isinstance(sync, SyncEveryStep) and sync.route != "owners")
    ):
        raise ConfigError(
            "sync.name",
            sync.name,
            f"each replica is to have all weights, and {layout} spreads experts over them",
            'use ep, or fsdp with +ep, beside dp, or name = "allreduce" or "ring"',
        )
    if staged is not None and staged.versions:
        raise ConfigError(
            "sync.name",
            f"{sync.name}, {sync.codec.name}",
            f"{staged.name} updates each stage by itself, and sums its gradients with the backend",
            'use name = "allreduce" and codec = "identity", or a synchronous schedule such as 1f1b',
        )
    if size == 1 and not layout.live("fsdp"):
        return [f"[sync] {sync.name}, {sync.codec.name}: one replica has none to agree with"]
    if precision == "fp16" and isinstance(sync, SyncEveryStep) and sync.codec.keeps_residual:
        raise ConfigError(
            "sync.codec",
            sync.codec.name,
            "what it keeps for the next step would have another loss scale",
            "use bf16 or fp32 in [precision], or a codec without feedback",
        )
    if isinstance(sync, LocalSteps | AsyncServers):
        return _check_separate(layout, sync, precision)
    if size == 1 and layout.live("fsdp"):
        if sync.route != "backend":
            raise ConfigError(
                "sync.name",
                sync.name,
                f"{layout} has no replicas: fsdp sums gradients with the backend's reduce-scatter",
                'use name = "allreduce", which a codec may go with, or dp beside fsdp',
            )
        if not sync.codec.scatters:
            raise ConfigError(
                "sync.codec",
                sync.codec.name,
                "has no reduce-scatter, which is how fsdp sums gradients",
                "use bf16, fp16, int8, int4 or sign, or dp beside fsdp",
            )
        if layout.live("tp") and isinstance(sync.codec, MessageCodec):
            raise ConfigError(
                "sync.codec",
                sync.codec.name,
                f"in {layout} FSDP2 gives it what tp cuts and what tp copies in one piece, and the"
                " copies would part",
                "use bf16 or fp16, or dp beside or in place of fsdp",
            )
        return [f"gradients are reduce-scattered over fsdp in {sync.codec.name}"]
    _check_servers(layout, sync.servers)
    if size % sync.local:
        raise ConfigError(
            "sync.local",
            sync.local,
            f"does not divide the {size} replicas of {layout}",
            "use a divisor",
        )
    return [f"gradients are summed over dp by {sync.name}, in {sync.codec.name}"]


def _check_separate(layout: Layout, sync: LocalSteps | AsyncServers, precision: str) -> list[str]:
    size = layout.size("dp")
    if size == 1:
        return [f"[sync] {sync.name}: fsdp alone is one replica, and has none to agree with"]
    if sync.codec.has_momentum:
        other = (
            "sends differences of weights"
            if isinstance(sync, LocalSteps)
            else "has a server update weights"
        )
        raise ConfigError(
            "sync.codec",
            sync.codec.name,
            f"has a momentum of gradients, and {sync.name} {other}",
            'use another codec, or name = "allreduce"',
        )
    if isinstance(sync, AsyncServers):
        _check_servers(layout, sync.servers)
        if precision == "fp16":
            problem = "each replica would have a loss scale of its own, and skip other steps"
            raise ConfigError(
                "precision.compute", precision, problem, "use bf16 or fp32, or staleness = 0"
            )
        bound = "any number of" if sync.staleness is None else f"at most {sync.staleness}"
        return [
            f"{size} replicas push gradients in {sync.codec.name} to {sync.servers} servers and"
            f" pull weights, {bound} steps ahead of the slowest"
        ]
    when = f"every {sync.period} steps" if sync.period > 1 else "every step"
    return [
        f"{size} replicas step by themselves; {when} their weights agree by {sync.name}, in"
        f" {sync.codec.name}"
    ]


def _check_biases(model: nn.Module, sync: Sync) -> None:
    name = next(
        (name for name, module in model.named_modules() if isinstance(module, GateBias)), None
    )
    if name is not None:
        raise ConfigError(
            "sync.name",
            sync.name,
            f"each replica would move {name} by its own tokens: weights alone are agreed on",
            'balance by a loss instead of a bias, or use name = "allreduce"',
        )


def _check_servers(layout: Layout, servers: int) -> None:
    size = layout.size("dp")
    if servers > size:
        raise ConfigError(
            "sync.servers", servers, f"{layout} has {size} replicas", f"use at most {size}"
        )


def _check_sequence(
    model: nn.Module,
    layout: Layout,
    loss: Callable | None,
    roles: Roles,
    steps: Sequence[Step],
    sample: Mapping[str, Tensor],
    inputs: Sequence[str] | None,
) -> None:
    """What can be said of a sequence that ranks share before any process starts."""

    def refuse(problem: str, fix: str) -> None:
        raise UnsupportedModel("layout", str(layout), problem, fix)

    axis = layout.live(*SEQUENCE_AXES)[0]
    if loss is not None and not is_positionwise(loss):
        refuse(
            f"the loss is not known to be a sum over positions, and {axis} parts them",
            "mark it with @weft.losses.positionwise if it is, or use weft.losses.next_token",
        )
    kind = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if kind != "sdpa":
        refuse(
            f"the model computes attention by {kind!r}, of the positions that a rank has",
            'build it with attn_implementation="sdpa"',
        )
    crossing = next((chain.row for chain in roles.chains if chain.cross), None)
    if crossing is not None:
        refuse(f"{crossing} attends to another sequence, which is not cut", "use dp, fsdp or tp")
    methods = {
        step.sequence.method: layout.size(step.sequence.axis)
        for step in steps
        if step.sequence is not None
    }
    parts = layout.size(*SEQUENCE_AXES)
    parts *= 1 if [*methods] == ["ulysses"] else 2  # from both ends
    names = inputs if inputs is not None else named_inputs(model)
    length = next(
        (sample[k].shape[1] for k in (*names, *sample) if k in sample and sample[k].ndim > 1), parts
    )
    if "attention_mask" in names and "attention_mask" in sample:
        check_padding(sample["attention_mask"])
    if length % parts:
        fix = f"use a multiple of {parts} positions"
        refuse(f"samples of {length} positions do not divide into {parts} pieces", fix)
    size = methods.get("ulysses", 1)
    for chain in (chain for chain in roles.chains if chain.heads):
        heads, kv = chain.heads // layout.size("tp"), max(1, chain.kv_heads // layout.size("tp"))
        if heads % size or (kv % size and size % kv):
            refuse(
                f"{chain.row} has {heads} heads and {kv} key heads on a rank, and Ulysses has"
                f" {size} ranks",
                "use cp, whose keys travel, or a size that divides them",
            )


def _bubble(staged: Schedule) -> str:
    timeline = simulate(staged, ActionCosts().shared(staged.placement))
    count = "1 microbatch" if staged.microbatches == 1 else f"{staged.microbatches} microbatches"
    text = f"{staged.name}, {count}: ranks wait {timeline.bubble_fraction:.0%} of a step"
    more = "" if timeline.bubble_fraction < 0.25 else "; a larger train.accumulate makes it less"
    return f"{text} if all stages take the same time{more}"


def _once_a_step(step: Step) -> Step:
    """What no block holds is gathered and reduced once a step in a pipeline: its stages share the
    unit."""
    if step.gather is None or step.module:
        return step
    return replace(step, gather=replace(step.gather, gathered="step", reduced="step"))


def _check_staged(
    layout: Layout, staging: Staging, staged: Schedule, units: Mapping[str, str], precision: str
) -> None:
    """`units`: module that must lie in one stage -> what for."""
    for one in staging.stages:
        inside = next((u for u in units if one.first.startswith(u + ".")), None)
        if inside is not None:
            raise UnsupportedModel(
                "pipeline.cut",
                one.first,
                f"cuts {inside} in two, which is one unit of {units[inside]}",
                f"cut before {inside} or before what follows it",
            )
    if not staged.versions:
        return
    if precision == "fp16":
        raise ConfigError(
            "precision.compute",
            precision,
            f"{staged.name} updates each stage by itself, and a loss scale is of all",
            "use bf16 or fp32, or a synchronous schedule such as 1f1b",
        )
    if layout.live("fsdp"):
        raise LayoutError(
            "layout",
            str(layout),
            f"{staged.name} keeps several versions of the weights, and fsdp stores one",
            "use dp beside it, or a synchronous schedule such as 1f1b",
        )
    seen: set[str] = set()
    for one in staging.stages:
        both = seen & set(one.weights)
        if both:
            raise UnsupportedModel(
                "layout",
                str(layout),
                f"{min(both)} is used by two stages, which {staged.name} updates at other times",
                "untie it, or use a synchronous schedule such as 1f1b",
            )
        seen |= set(one.weights)


def _check_called(layout: Layout, staging: Staging, steps: list[Step]) -> None:
    """A stage that uses a cut or sharded parameter calls a module that knows of that: a function
    would not."""
    knowing: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        for param in step.params:
            if param.stored != COPY:
                knowing.setdefault((param.name, param.axis), []).append(step)
    for (name, axis), those in knowing.items():
        for one in staging.stages:
            if name in one.weights and not any(
                stage_runs_module(step.module, one.modules) for step in those
            ):
                raise UnsupportedModel(
                    "layout",
                    str(layout),
                    f"stage {one.index} uses {name} without {those[0].module}, and would not know"
                    f" that {axis} cuts it",
                    f"call {those[0].module}, or a module that is tied to it, where it is used",
                )


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """The parameters of a model, each once, with the further names under which it is shared."""
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Weight(
            first,
            tuple(tensors[key].shape),
            tensors[key].requires_grad,
            tensors[key].dtype,
            tuple(rest),
        )
        for key, (first, *rest) in names.items()
    )


def _check_shared(
    model: nn.Module, weights: tuple[Weight, ...], steps: list[Step], layout: Layout
) -> None:
    """Every module that uses a cut parameter knows of the cut. One that holds a parameter of a
    module inside it (BERT's bias) does so to tie it: the trial of the cut refuses a model that uses
    it there."""
    cut = {p.name for step in steps for p in step.params if p.cut is not None}
    aware = {
        id(model.get_submodule(s.module)) for s in steps if any(p.cut is not None for p in s.params)
    }
    for weight in weights:
        owners = (
            [name.rpartition(".")[0] for name in (weight.name, *weight.aliases)]
            if weight.name in cut
            else []
        )
        knowing = [owner for owner in owners if id(model.get_submodule(owner)) in aware]
        for owner in owners:
            inside = [
                other
                for other in knowing
                if other != owner and (not owner or other.startswith(owner + "."))
            ]
            if owner not in knowing and not inside:
                raise UnsupportedModel(
                    "layout",
                    str(layout),
                    f"{weight.name} is shared with {owner}, which would not know that it is cut",
                    f'declare the modules that hold it "whole" in [roles], {owner} among them',
                )


def _check_layout(layout: Layout, strategies: Mapping[str, list]) -> None:
    for axis in layout.axes:
        if axis not in strategies:
            raise LayoutError(
                "layout", str(layout), f"there is no axis {axis!r}", nearest(axis, strategies)
            )
    for axis, option in layout.options:
        known = {o: text for strategy in strategies[axis] for o, text in strategy.OPTIONS.items()}
        if option not in known:
            raise LayoutError(
                "layout",
                str(layout),
                f"axis {axis} has no option {option!r}",
                nearest(option, known) if known else f"write {axis} without an option",
            )


def _check_batch(layout: Layout, batch: int, accumulate: int) -> None:
    if batch < 1 or accumulate < 1:
        field, value = ("train.batch", batch) if batch < 1 else ("train.accumulate", accumulate)
        raise ConfigError(field, value, "must be at least 1", "choose a positive number")
    parts = layout.size(*DATA_AXES) * accumulate
    if batch % parts:
        raise ConfigError(
            "train.batch",
            batch,
            f"does not divide over {layout.size(*DATA_AXES)} data ranks of {layout} x {accumulate}"
            " microbatches",
            f"use a multiple of {parts}, such as {-(-batch // parts) * parts}",
        )


def _check_recompute(recompute: str | int, blocks: tuple[str, ...]) -> None:
    if recompute in ("none", "selective"):
        return
    if recompute != "full" and not (isinstance(recompute, int) and recompute > 0):
        raise ConfigError(
            "train.recompute",
            recompute,
            "not a way to recompute",
            'choose "none", "selective", "full" or a number k',
        )
    if not blocks:
        raise UnsupportedModel(
            "train.recompute",
            recompute,
            "the model has no list of repeated blocks",
            'use "none", or hold them in a ModuleList',
        )
