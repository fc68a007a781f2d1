"""From a model and a layout to a Plan: asks every strategy that the layout names for its Steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core import (
    BLOCKS,
    DTYPES,
    EXPERTS,
    OFF,
    ConfigError,
    Divides,
    Layout,
    LayoutError,
    PipelineRequest,
    Plan,
    Schedule,
    Step,
    Sync,
    UnsupportedModel,
    Weight,
    nearest,
)
from weft.nn import (
    accepts_sharded_logits,
    callable_blocks,
    check_inputs,
    check_loss,
    chosen_modules,
    find_roles,
)
from weft.pipeline import make_stages
from weft.sync import check_gate_biases, check_sync, make_sync

from .axes import DATA_AXES, FEATURE_AXES, SEQUENCE_AXES, TOKEN_AXES, VOCABULARY_AXES
from .carried_tensors import check_carried_tensors
from .check_modules import check_modules
from .cut_trial import runnable_roles
from .float8_choice import check_recipe, choose_float8
from .forward_record import record_forward
from .gathered_units import check_unit_stages, gathered_units, heads_for_chunks, unit_notes
from .logits_uses import combines_logits
from .lone_linears import with_lone_linears
from .memory_checks import check_offload, check_prefetch
from .multihead_calls import called_attentions
from .norm_calls import check_norm_calls
from .other_layouts import plan_or_name_others
from .parts import check_parts, find_parts, part_notes, parts_on, roles_with_parts
from .pipeline_checks import (
    bubble_note,
    check_called_modules,
    check_stages,
    modules_of_one_stage,
)
from .plan_request import PlanRequest
from .recomputed_modules import recomputed_modules
from .sample_dims import dropped_shapes
from .sample_loops import traced_sample
from .sample_pairs import outputs_of_pairs
from .sequence_checks import check_shared_sequence
from .strategies import StepsRequest, allowed_options, axis_table, registry
from .traced_chains.find_chains import traced_roles
from .weight_reads import (
    check_named_units,
    check_unit_reads,
    without_blocks_read_elsewhere,
    without_weights_read_elsewhere,
)
from .whole_batch import plan_whole_batch

LOGITS = ("auto", "whole", "chunks")


class PipelineKeywords(TypedDict, total=False):
    """The arguments of `plan` that are those of PipelineRequest."""

    schedule: str | Schedule | Callable[..., Schedule]
    options: Mapping[str, object]
    cut: str | Sequence[str]
    dynamic_shapes: bool


class PlanKeywords(PipelineKeywords, total=False):
    """Further arguments of `plan`."""

    logits: str
    reduce: str
    fsdp_prefetch: int | None
    offload_activations: bool
    float8: str
    parts: Mapping[str, str]
    fsdp_units: str | int | Sequence[str]


def plan(
    model: nn.Module,
    layout: str | Layout,
    *,
    batch: int,
    accumulate: int = 1,
    loss: Callable | None = None,
    roles: Mapping[str, object] | None = None,
    recompute: str | int | Sequence[str] = "none",
    precision: str = "fp32",
    sync_batchnorm: bool = True,
    inputs: Sequence[str] | None = None,
    sample: Mapping[str, Tensor] | None = None,
    sync: str | Sync | None = None,
    **further: Unpack[PlanKeywords],
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
        recompute: "none", "selective" (the attention core), "full", k for every k-th block
            (Korthikanti et al. 2022), or globs of names of modules.
        precision: dtype of computation: "fp32", "bf16", "fp16" or "fp64" (docs/precision.md).
        reduce: dtype in which gradients are summed with "bf16": "fp32" (default) or "bf16".
        float8: recipe by which linears multiply in float8, with "bf16": "rowwise",
            "rowwise_with_gw_hp" or "tensorwise"; "off" by default.
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
        logits: "whole"; "chunks": a loss marked `weft.losses.vocab_parallel` makes them, of some
            tokens at a time, and again in backward; "auto": chunks where they are many.
        fsdp_prefetch: how many units (blocks) ahead of the one that runs `fsdp` gathers weights.
            Default: FSDP2's own way.
        offload_activations: whether what blocks save for backward rests in host memory between
            forward and backward. Needs CUDA.
        parts: globs of module names -> the axes that divide the weights of these modules:
            "fsdp", "tp", "fsdp.tp", "fsdp+tp" or "whole" (docs/layouts.md).
        fsdp_units: what `fsdp` gathers and frees together: "blocks", each by itself (default);
            "model", all at once; k: k blocks in a row; or globs of names of modules.

    Raises:
        Refusal: what the layout cannot do with this model.

    Example:
        >>> from weft.models import decoder
        >>> print(plan(decoder(), "dp2.tp2", batch=32).layout)
        dp2.tp2
    """
    logits, reduce = further.pop("logits", "auto"), further.pop("reduce", "fp32")
    prefetch, away = further.pop("fsdp_prefetch", None), further.pop("offload_activations", False)
    float8, parts = further.pop("float8", OFF), further.pop("parts", {})
    units = further.pop("fsdp_units", BLOCKS)
    return plan_from_request(
        PlanRequest(
            model,
            Layout.parse(layout) if isinstance(layout, str) else layout,
            batch,
            accumulate,
            loss,
            roles,
            recompute if isinstance(recompute, str | int) else tuple(recompute),
            precision,
            reduce,
            sync_batchnorm,
            PipelineRequest(**cast(PipelineKeywords, further)),
            inputs,
            sample,
            make_sync(sync) if isinstance(sync, str) else sync,
            logits,
            prefetch,
            away,
            float8,
            parts,
            units if isinstance(units, str | int) else tuple(units),
        )
    )


def plan_from_request(request: PlanRequest) -> Plan:
    """The Plan that `request` asks for: the steps of every axis, checked, with their stages.

    Raises:
        Refusal: The layout cannot do what is asked for with this model.
    """
    return plan_or_name_others(request, _plan_checked)


def _plan_checked(request: PlanRequest) -> Plan:
    model, layout, sync, loss = request.model, request.layout, request.sync, request.loss
    check_modules(model)
    if loss is not None:
        check_loss(loss)
    if request.sample:  # a worker has none
        check_inputs(model, request.inputs, request.sample)
    _check_layout(layout)
    _check_batch(layout, request.batch, request.accumulate)
    _check_precision(request.precision, request.reduce, sync)
    check_recipe(request.float8, request.precision)
    _check_logits(request.logits)
    weights = weights_of(model)
    parts = parts_on(layout, find_parts(model, weights, request.parts), weights, sync)
    request = replace(request, roles=roles_with_parts(model, parts, request.roles))
    found = called_attentions(request, find_roles(model, request.roles))
    found = without_blocks_read_elsewhere(request, found)
    found = without_weights_read_elsewhere(request, found)
    found = runnable_roles(request, found)
    found = with_lone_linears(request, traced_roles(request, found))
    steps: list[Step] = []
    typed = loss is not None and accepts_sharded_logits(loss)
    if typed and layout.active_axes(*FEATURE_AXES, *VOCABULARY_AXES):
        typed = not combines_logits(request, found.heads)
    units = gathered_units(model, layout, found.blocks, weights, request.fsdp_units)
    asked = StepsRequest(model, weights, found, layout, typed, parts, units)
    spread = axis_table().dividing(Divides.EXPERTS) if layout.active_axes(EXPERTS) else ()
    for axis in dict.fromkeys((*layout.active_axes(), *spread)):
        for strategy in registry()[axis]:
            steps += strategy.steps(asked)
    _check_shared(model, weights, steps, layout)
    check_parts(parts, steps)
    check_unit_reads(request, parts, steps)
    check_named_units(request, steps)
    check_carried_tensors(request, steps)
    if layout.active_axes(*SEQUENCE_AXES):
        check_shared_sequence(request, layout, found, steps)
    blocks = callable_blocks(model, (b for blocks in found.blocks for b in blocks))
    if isinstance(request.recompute, tuple):
        again = recomputed_modules(model, request.recompute, blocks)
        blocks = tuple(name for name, _ in model.named_modules() if name in {*blocks, *again})
        request = replace(request, recompute=again)
    _check_recompute(request.recompute, blocks)
    check_offload(request.offload_activations, blocks)
    norms = tuple(
        n
        for n, m in model.named_modules()
        if isinstance(m, _BatchNorm)
        and (m.training or not model.training or m.running_mean is None)
    )
    synced = norms if request.sync_batchnorm and layout.active_axes(*TOKEN_AXES) else ()
    check_norm_calls(request, synced)
    staging, staged = None, None
    counted = tuple(each.shared for each in found.experts if each.shared)
    if layout.stage_ranks > 1:
        whole = modules_of_one_stage(request, found, steps, blocks)
        staging, staged = make_stages(
            model,
            layout,
            request.accumulate,
            request.pipeline,
            blocks,
            request.inputs,
            traced_sample(request),
            counted,
            whole,
            request.loss,
        )
        check_stages(layout, staging, staged, whole, request.precision)
        check_unit_stages(staging, request.fsdp_units, steps)
        check_called_modules(layout, staging, steps)
        steps = [_once_a_step(s) for s in steps]
    if sync is not None and sync.independent and layout.replica_count > 1:
        check_gate_biases(model, sync)
    notes = (
        check_sync(layout, axis_table(), sync, staged, request.precision)
        if sync is not None and not sync.plain
        else []
    )
    if layout.active_axes(*FEATURE_AXES):
        notes += [f"{found.source}; {len(found.chains)} chains of linears are cut", *found.notes]
        if found.lone:
            notes.append(
                f"{len(found.lone)} linears and convolutions are cut each by itself, and all ranks"
                " gather their outputs: the model has no chain, vocabulary or experts to cut"
            )
    notes += part_notes(parts, weights, layout)
    notes += unit_notes(request.fsdp_units, steps, weights)
    if staged is not None:
        notes.append(bubble_note(staged))
    heads = heads_for_chunks(found.heads, steps, staged is not None, request.logits)
    record = record_forward(request)
    made = Plan(
        layout,
        tuple(steps),
        weights,
        request.batch,
        axis_table(),
        request.accumulate,
        blocks,
        request.recompute,
        request.precision,
        request.reduce,
        synced,
        notes=tuple(notes),
        staging=staging,
        staged=staged,
        dynamic_shapes=request.pipeline.dynamic_shapes,
        sync=sync,
        counted=counted,
        chosen=chosen_modules(model),
        asks_gradients=record is not None and record.asks_gradients,
        logits=request.logits,
        heads=heads if typed and _in_chunks(request.logits, staged) else (),
        offload_activations=request.offload_activations,
        fsdp_prefetch=request.fsdp_prefetch,
        dropped=dropped_shapes(request),
    )
    check_prefetch(made)
    made = plan_whole_batch(made, loss)
    if made.whole_batch:
        made = replace(made, pairs=outputs_of_pairs(request))
    return made if request.float8 == OFF else choose_float8(made, model, found, request.float8)


def _in_chunks(logits: str, staged: Schedule | None) -> bool:
    """Whether the loss may make logits in chunks. Where a backward comes in two parts, each would
    make them again: that is not worth it unless it is asked for. Where weights have versions, those
    of the forward are put away before the loss runs."""
    if logits == "whole" or (staged is not None and staged.versions):
        return False
    split = staged is not None and any(a.kind == "W" for order in staged.order for a in order)
    return logits == "chunks" or not split


def _once_a_step(step: Step) -> Step:
    """The step, gathered and reduced once an optimizer step if no block holds its module: the
    stages of a pipeline share that unit."""
    if step.gather is None or step.module:
        return step
    return replace(step, gather=replace(step.gather, gathered="step", reduced="step"))


def _check_precision(precision: str, reduce: str, sync: Sync | None) -> None:
    if precision == "fp8":
        problem = "float8 covers only the matmuls of linears; all else is computed in bf16"
        fix = 'use bf16, with float8 = "rowwise" beside it'
        raise ConfigError("precision.compute", precision, problem, fix)
    if precision not in DTYPES:
        fix = f"choose one of {', '.join(DTYPES)}"
        raise ConfigError("precision.compute", precision, "not a precision", fix)
    if reduce == "fp32":
        return
    if reduce != "bf16":
        problem = "not a dtype in which gradients are summed"
        raise ConfigError("precision.reduce", reduce, problem, "choose fp32 or bf16")
    if precision != "bf16":
        problem = f"gradients of a model that computes in {precision} are summed in its own dtype"
        if precision == "fp16":
            problem = "gradients in fp16 are scaled, and bf16 keeps fewer of their digits"
        raise ConfigError("precision.reduce", reduce, problem, 'use it with compute = "bf16"')
    if sync is not None and not (sync.plain or sync.independent):
        problem = f"{sync.name} and its codec set the dtype in which replicas exchange gradients"
        fix = 'leave reduce out, and use [sync] codec = "bf16"'
        raise ConfigError("precision.reduce", reduce, problem, fix)


def _check_logits(logits: str) -> None:
    if logits not in LOGITS:
        raise ConfigError(
            "train.logits", logits, "not a way to make logits", f"choose one of {', '.join(LOGITS)}"
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
                    f"{weight.name} is shared with {owner}, which would read its shard as"
                    " the whole weight",
                    f'declare the modules that hold it "whole" in [roles], {owner} among them',
                )


def _check_layout(layout: Layout) -> None:
    table = axis_table()
    for axis in layout.axes:
        if axis not in table.traits:
            raise LayoutError(
                "layout", str(layout), f"there is no axis {axis!r}", nearest(axis, table.names)
            )
    if twice := table.twice_divided(layout.active_axes()):
        first, second, what = twice
        raise LayoutError(
            "layout",
            str(layout),
            f"{first} and {second} both divide the {what}",
            "keep one of the two",
        )
    for axis, option in layout.options:
        known = allowed_options(axis)
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


def _check_recompute(recompute: str | int | tuple[str, ...], blocks: tuple[str, ...]) -> None:
    if recompute in ("none", "selective") or isinstance(recompute, tuple):
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
