"""Builds what a run file names: model, loss, optimizer, plan, callbacks.

What a user can get wrong in naming them is refused here, before any process starts.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.trees import tree_leaves
from weft.core import (
    BLOCKS,
    ActionCosts,
    ConfigError,
    Layout,
    PipelineRequest,
    Plan,
    Refusal,
    RunConfig,
    Sync,
    kept_imports,
    nearest,
    parts_within,
    read_file,
    require_known,
)
from weft.engine import OptimizerFactory, make_optimizer
from weft.nn import (
    Adapter,
    Loss,
    adapter_files,
    add_adapter,
    build_hf_model,
    check_loss,
    deferred_init,
    freeze,
    hf_weight_files,
    quantize_frozen,
    split_adapter_tensors,
)
from weft.parallel import STATE_AXES, PlanRequest, plan_from_request, weights_of
from weft.sync import make_sync

from . import lr_schedule
from .callbacks import check_callback
from .loggers import LOGGERS, has_tensorboard
from .named_callables import call_named, resolve_callable, resolve_path, signature_of


def build_model(
    run: RunConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    with_adapter: bool = True,
) -> nn.Module:
    """Build the model of [model]. The global random generator does not change.

    Args:
        run: The run.
        device: Where the model is built; on "meta" it has shapes and no weights.
        dtype: What the weights are cast to after they are drawn.
        seed: The seed of the weights. Default: the seed of [train].
        tensors: The weights of `model.hf`, and of a directory that `model.adapter` names, if they
            are not to be read from their files.
        with_adapter: Whether the model has the adapter that the run trains.

    Raises:
        ConfigError: The model cannot be built.
    """
    return _frozen(run, _built(run, device, dtype, seed, tensors, with_adapter), with_adapter)


def _frozen(run: RunConfig, model: nn.Module, with_adapter: bool) -> nn.Module:
    if with_adapter or run.model.adapter is None:
        freeze(model, run.model.freeze)
    if with_adapter and run.model.quantize is not None:
        quantize_frozen(model, run.model.quantize)
    return model


def _built(
    run: RunConfig,
    device: str | torch.device,
    dtype: torch.dtype | None,
    seed: int | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    with_adapter: bool = True,
) -> nn.Module:
    """The model as `build_model` makes it, before parameters are frozen and quantized."""
    device = torch.device(device)
    undrawn = _Undrawn() if device.type == "meta" else nullcontext()
    adapter = _adapter(run) if with_adapter else None
    base, ours = split_adapter_tensors(tensors)
    generators = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with generators, device, undrawn, warnings.catch_warnings():
        # a state_dict that `build` loads, which has no effect there
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        torch.manual_seed(run.train.seed if seed is None else seed)
        if run.model.hf is not None:
            named = str(run.model.hf)
            built: Any = build_hf_model(
                resolve_path(run, named),
                run.model.arguments,
                run.model.auto,
                device,
                named,
                base,
            )
        else:
            name = str(run.model.build)
            function = resolve_callable(name, run.folder, "model.build")
            built = call_named(function, name, "model", (), run.model.arguments)
        if adapter is not None and isinstance(built, nn.Module):
            hf, task = run.model.hf, run.model.auto or ("causal-lm" if run.model.hf else None)
            built = add_adapter(built, adapter, task, hf and resolve_path(run, hf), ours)
    if not isinstance(built, nn.Module):
        raise ConfigError(
            "model.build", run.model.build, f"returns {type(built).__name__}", "return an nn.Module"
        )
    if device.type != "meta":
        for name, parameter in built.named_parameters():
            if parameter.device.type == "meta":
                problem = f"{name} is on the meta device, and has no elements"
                fix = "build it outside of torch.device('meta'): weft builds it without weights"
                raise ConfigError("model.build", run.model.build, problem, fix)
    if isinstance(built, nn.DataParallel | nn.parallel.DistributedDataParallel):
        problem = f"returns a {type(built).__name__}, and the layout says how the model is divided"
        raise ConfigError("model.build", run.model.build, problem, "return the module inside it")
    if dtype is not None:
        in_dtype(built, dtype)
    return built.to(device=device).train()


def _adapter(run: RunConfig) -> Adapter | None:
    named = run.model.adapter
    return resolve_path(run, named) if isinstance(named, str) else named


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in a dtype of real numbers, in place; its complex tensors stay complex."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(wide)
        return t.to(dtype) if t.is_floating_point() else t

    return model._apply(cast)


def build_deferred(run: RunConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of [model] without its weights, of which an Engine gives each rank its shards.
    `dtype`: as of `build_model`. Raises UnsupportedModel if its build cannot be recorded."""
    build = partial(build_model, run, dtype=dtype)
    files = hf_weight_files(resolve_path(run, str(run.model.hf))) if run.model.hf else []
    files += adapter_files(_adapter(run))
    if not files:
        return deferred_init(build, seed=None)
    return deferred_init(lambda tensors: build(tensors=tensors), seed=None, files=files)


def build_for_ranks(
    run: RunConfig,
    sample: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    checked: Plan | None = None,
) -> tuple[nn.Module, Plan]:
    """The model that a rank trains, without weights where that is possible, and its plan, which
    says so where it is not.

    Args:
        run: The run.
        sample: As of `sample_batch`.
        dtype: As of `build_model`.
        checked: The plan that `check_run` has made. It is made anew for stages, which are cut in
            the forward of the very model, for other weights, and for a model with whole numbers as
            tensors, which a forward may read: `check_run` has them without elements.

    Raises:
        Refusal: The model cannot be built, or not be laid out so.
    """
    reason = "the cut by measured time runs it" if run.pipeline.cut == "time" else ""
    if not (run.workers or reason):
        try:
            model = build_deferred(run, dtype)
            same = checked is not None and checked.staging is None
            same = same and not _has_whole_numbers(model)
            if checked is not None and same and checked.weights == weights_of(model):
                return model, checked
            return model, build_plan(run, model, sample)
        except ConfigError:  # as below
            reason = f"{run.model.build} does not run on tensors without elements"
        except Refusal as problem:  # the model with weights may do; if not, it says why
            reason = str(problem)
    model = build_model(run, dtype=dtype)
    made = build_plan(run, model, sample)
    note = f"every process builds the whole model: {reason}"
    return model, made if run.workers else replace(made, notes=(*made.notes, note))


class _Undrawn(TorchFunctionMode):
    """Draws no elements for tensors that have none: torch would take a millisecond to find that
    out, for each."""

    _DRAWS = frozenset(
        (
            nn.init.normal_,
            nn.init.uniform_,
            nn.init.kaiming_uniform_,
            Tensor.normal_,
            Tensor.uniform_,
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def planned_dtype(run: RunConfig) -> torch.dtype | None:
    """What a model is cast to that is planned with batches of `sample_batch`."""
    return torch.float64 if run.precision.compute == "fp64" else None


def replica_ranks(run: RunConfig) -> list[list[int]]:
    """The ranks of each replica, if each replica is a process group of its own; else nothing."""
    layout, made = run.layout.axes, build_sync(run)
    return layout.replicas() if made.independent and layout.replica_count > 1 else []


def server_replicas(run: RunConfig) -> range:
    """The replicas that hold parameter servers: without them the others cannot continue."""
    made = build_sync(run)
    return range(made.servers if made.asynchronous else 0)


def build_sync(run: RunConfig) -> Sync:
    """Make the synchroniser of [sync]. Raises ConfigError."""
    return make_sync(run.sync.name, run.sync.codec, **run.sync.arguments)


def build_skeleton(run: RunConfig, with_adapter: bool = True) -> nn.Module:
    """The model without weights, on the meta device; with them if it computes with them while it is
    made. `with_adapter`: as of `build_model`."""
    dtype = planned_dtype(run)
    try:
        with kept_imports():
            built = _built(run, "meta", dtype, with_adapter=with_adapter)
    except ConfigError:
        built = _built(run, "cpu", dtype, with_adapter=with_adapter)
    return _frozen(run, built, with_adapter)


def build_loss(run: RunConfig) -> Loss:
    """The loss of [train]: (output, batch) -> (sum, weight). Raises ConfigError."""
    found = resolve_callable(run.loss, run.folder, "train.loss")
    check_loss(found, "train.loss", run.loss)
    return found


def build_eval_metrics(run: RunConfig) -> dict[str, Loss]:
    """What [train] eval_metrics names: the last part of each name -> the function. Raises
    ConfigError."""
    found: dict[str, Loss] = {}
    for name in run.train.eval_metrics:
        short = name.rpartition(":")[2].rpartition(".")[2]
        metric = resolve_callable(name, run.folder, "train.eval_metrics")
        check_loss(metric, "train.eval_metrics", name)
        if short in found or short == "loss":
            problem, fix = (
                f"val_{short} is another metric already",
                "give the function another name",
            )
            raise ConfigError("train.eval_metrics", name, problem, fix)
        found[short] = metric
    return found


def _has_whole_numbers(model: nn.Module) -> bool:
    """Whether a model without weights has other tensors of whole numbers, as of torch.tensor: those
    a plan reads. Those in which batch norms count their batches are none."""
    return any(
        not (t.is_meta or t.is_floating_point() or t.is_complex())
        for module in model.modules()
        for t in tree_leaves({**vars(module), "_modules": {}}, Tensor)
        if t is not getattr(module, "num_batches_tracked", None)
    )


def build_callbacks(run: RunConfig) -> list[Any]:
    """What [train] callbacks names, and after these the loggers. Raises ConfigError, DataError."""
    made, field = [], "train.callbacks"
    for entry in run.train.callbacks:
        name, arguments = _named_table(field, entry, "package.module:Name")
        function = resolve_callable(name, run.folder, field)
        needed = inspect.isfunction(function) and inspect.signature(function).parameters
        if needed and "run" in needed and "run" not in arguments:
            problem = "is a function of the run, and not a class of callbacks"
            fix = "name a class with methods, as on_step_end(self, run, result, metrics)"
            raise ConfigError(field, name, problem, fix)
        made.append(call_named(function, name, field, (), arguments))
        check_callback(made[-1], field, name)
        if (check := getattr(made[-1], "check_run", None)) is not None:
            check(run.model_dump(mode="json", exclude_none=True))
    loggers, field = run.train.loggers, "train.loggers"
    if loggers is None:
        loggers = ("tensorboard",) if has_tensorboard() else ()
    for entry in loggers:
        name, arguments = _named_table(field, entry, "wandb")
        if ":" in name:
            fix = "name a logger of your own in train.callbacks"
            raise ConfigError(field, name, "is not a logger of weft", fix)
        if name not in LOGGERS:
            raise ConfigError(field, name, "is not a logger", nearest(name, LOGGERS))
        made.append(call_named(LOGGERS[name], name, field, (), arguments))
    return made


def _named_table(
    field: str, entry: str | dict[str, Any], example: str
) -> tuple[str, dict[str, Any]]:
    """The name of a name or a table, and the table's other keys."""
    arguments = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(field, entry, "has no name", f'write {{ name = "{example}", ... }}')
    return name, arguments


def build_optimizer(run: RunConfig) -> OptimizerFactory:
    """The optimizer of [optimizer], as a function of named parameters. Raises ConfigError."""
    table = run.optimizer
    kind: str | Callable[..., Any] = str(table.name)
    if table.build is not None:
        kind = resolve_callable(table.build, run.folder, "optimizer.build")
    return make_optimizer(
        kind,
        updates_each=table.updates_each,
        no_decay=table.no_decay,
        decay_min_dims=table.decay_min_dims,
        groups=table.groups,
        **table.arguments,
    )


def model_inputs(run: RunConfig, model: nn.Module) -> tuple[str, ...] | None:
    """Batch entries that the model is called with; None: those that its forward names. Raises
    ConfigError."""
    names, parameters = run.model.inputs, inspect.signature(model.forward).parameters
    if names is not None and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        for name in names:
            if name not in parameters:
                problem = f"{type(model).__name__}.forward has no parameter {name}"
                raise ConfigError("model.inputs", list(names), problem, nearest(name, parameters))
    return names


def build_lr_factor(run: RunConfig) -> Callable[[int], float]:
    """The function from a step, counted from 0, to the factor of the learning rate. Raises
    ConfigError, as does a user's function where it fails."""
    name = run.lr_schedule.build
    t = run.train
    if name is None:
        return partial(
            lr_schedule.lr_factor,
            steps=t.steps,
            warmup=t.warmup,
            decay=t.decay,
            min_ratio=t.min_lr_ratio,
            warmup_shape=t.warmup_shape,
            start_ratio=t.start_lr_ratio,
            decay_share=t.decay_share,
        )
    function = resolve_callable(name, run.folder, "lr_schedule.build")
    arguments = run.lr_schedule.arguments
    if "steps" in signature_of(function).parameters:
        arguments = {"steps": t.steps, **arguments}
    made = call_named(function, name, "lr_schedule", (), arguments)
    if not callable(made):
        problem = f"returns {type(made).__name__}, which cannot be called"
        fix = "return a function from a step to the factor of the learning rate"
        raise ConfigError("lr_schedule.build", name, problem, fix)
    return lr_schedule.checked(made, name)


def check_lr_schedule(run: RunConfig) -> None:
    """Refuse a schedule of the user's own that no run could resume. Raises ConfigError."""
    if run.lr_schedule.build is not None:
        make = partial(build_lr_factor, run)
        try:
            lr_schedule.check_factors(make, run.lr_schedule.build, run.train.steps)
        except lr_schedule.ScheduleFailed as error:  # before the run: a refusal like others
            said = error.field, error.value, error.problem, error.fix
            raise ConfigError(*said) from error.__cause__


def build_plan(run: RunConfig, model: nn.Module, sample: dict[str, Tensor]) -> Plan:
    """The Plan of this run for its model, which may be on the meta device. `sample`: see
    `sample_batch`. Raises Refusal."""
    t, p = run.train, run.pipeline
    named = ":" in p.schedule
    return plan_from_request(
        PlanRequest(
            model,
            run.layout.axes,
            batch=t.batch,
            accumulate=t.accumulate,
            loss=build_loss(run),
            roles=run.roles or None,
            recompute=t.recompute,
            precision=run.precision.compute,
            reduce=run.precision.reduce,
            sync_batchnorm=t.sync_batchnorm,
            pipeline=PipelineRequest(
                resolve_callable(p.schedule, run.folder, "pipeline.schedule")
                if named
                else p.schedule,
                _options(run),
                p.cut,
                p.dynamic_shapes,
            ),
            inputs=model_inputs(run, model),
            sample=sample,
            sync=build_sync(run),
            logits=t.logits,
            fsdp_prefetch=t.fsdp_prefetch,
            offload_activations=t.offload_activations,
            float8=run.precision.float8,
            parts=run.layout.parts,
            fsdp_units=run.layout.fsdp_units,
        )
    )


def _options(run: RunConfig) -> dict[str, Any]:
    """The arguments of the schedule. `costs` is a table, or a file that `weft train --trace`
    wrote."""
    options = run.pipeline.arguments
    costs = options.get("costs")
    if isinstance(costs, str):
        try:
            text = read_file(resolve_path(run, costs)).decode()
            options["costs"] = ActionCosts.from_json(text)
        except (OSError, UnicodeDecodeError) as error:
            fix = "name a costs.json that weft train --trace wrote"
            raise ConfigError("pipeline.costs", costs, f"cannot be read ({error})", fix) from None
    elif isinstance(costs, dict):
        require_known("pipeline.costs", costs, [f.name for f in fields(ActionCosts)], "cost")
        options["costs"] = ActionCosts(**costs)
    return options


def with_layout(run: RunConfig, layout: str | Layout) -> RunConfig:
    """The same run on another layout. Raises LayoutError."""
    axes = Layout.parse(layout) if isinstance(layout, str) else layout
    return run.model_copy(update={"layout": run.layout.model_copy(update={"axes": axes})})


def on_own_layout(run: RunConfig, layout: str | Layout) -> RunConfig:
    """The same run on a layout that weft itself chose: less what has no effect there, which is
    refused where a user names the layout. Raises LayoutError."""
    there = with_layout(run, layout)
    left = parts_within(run.layout.parts, there.layout.axes)
    sharded = bool(there.layout.axes.active_axes(*STATE_AXES))
    units = run.layout.fsdp_units if sharded else BLOCKS
    laid = there.layout.model_copy(update={"parts": left, "fsdp_units": units})
    train = run.train if sharded else run.train.model_copy(update={"fsdp_prefetch": None})
    return there.model_copy(update={"layout": laid, "train": train})
