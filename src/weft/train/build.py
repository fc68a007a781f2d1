"""From a Run to the objects that it names: model, dataset, loss, optimizer, plan. All that a user
can get wrong in naming them is refused here, before any process starts.
"""

from __future__ import annotations

import glob
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core import (
    SEQUENCE_AXES,
    ActionCosts,
    AsyncServers,
    ConfigError,
    DataError,
    Layout,
    LayoutConfig,
    LayoutError,
    LocalSteps,
    PipelineConfig,
    PipelineRequest,
    Plan,
    Refusal,
    RunConfig,
    Sync,
    SyncConfig as SyncTable,
    SyncEveryStep,
    UnsupportedModel,
    nearest,
    place_modules,
)
from weft.engine import ELEMENTWISE, check_codec, check_worker_plan
from weft.nn import Loss, find_roles
from weft.parallel import PlanRequest, plan_from_request
from weft.sync import make_sync

from . import data, lr_schedule
from .tokenizer import import_extra

OPTIMIZERS = {kind.__name__.lower(): kind for kind in ELEMENTWISE}

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def resolve_callable(
    name: str, folder: str | Path = ".", field: str = "build"
) -> Callable[..., Any]:
    """What `package.module:callable` names. `folder` and the current directory are importable.
    Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(
            field,
            name,
            "is not of the form package.module:callable",
            'write as in "weft.models:decoder"',
        )
    for place in (str(Path.cwd()), str(Path(folder).resolve())):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                field, name, f"imports {error.name}, which is not installed", "install it"
            ) from error
        fix = (
            f"put {error.name.partition('.')[0]}.py beside the run file or in the current"
            " directory, or install it"
        )
        raise ConfigError(field, name, f"there is no module {error.name}", fix) from error
    except Refusal:
        raise
    except Exception as error:  # a user's module may fail in any way
        problem = f"importing {module_name} fails: {type(error).__name__}: {error}"
        raise ConfigError(field, name, problem, "correct that module") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [word for word in dir(found) if not word.startswith("_")]
            raise ConfigError(field, name, f"{module_name} has no {part}", nearest(part, known))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            field,
            name,
            f"is of type {type(found).__name__} and cannot be called",
            "name a function",
        )
    return found


def build_model(
    run: RunConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> nn.Module:
    """The model of [model] with weights drawn by `seed` ([train] seed if left out); the global
    generator is untouched.

    On "meta" it has shapes and no weights. Weights are made as the model makes them and then cast
    to `dtype`. Raises ConfigError.
    """
    device = torch.device(device)
    undrawn = _Undrawn() if device.type == "meta" else nullcontext()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device, undrawn:
        torch.manual_seed(run.train.seed if seed is None else seed)
        if run.model.hf is not None:
            built: Any = _transformer(run, device)
        else:
            name = str(run.model.build)
            function = resolve_callable(name, run.folder, "model.build")
            built = _call(function, name, "model", (), run.model.arguments)
    if not isinstance(built, nn.Module):
        raise ConfigError(
            "model.build", run.model.build, f"returns {type(built).__name__}", "return an nn.Module"
        )
    if dtype is not None:
        built._apply(
            lambda t: t.to(dtype) if t.is_floating_point() else t
        )  # complex tables stay complex
    return built.to(device=device).train()


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


def replica_ranks(run: RunConfig) -> list[list[int]]:
    """The ranks of each replica, where replicas step by themselves and are worlds of their own;
    else nothing."""
    layout, made = run.layout.axes, build_sync(run)
    return (
        layout.replicas() if not isinstance(made, SyncEveryStep) and layout.size("dp") > 1 else []
    )


def server_replicas(run: RunConfig) -> range:
    """The replicas without which others cannot go on."""
    made = build_sync(run)
    return range(made.servers if isinstance(made, AsyncServers) else 0)


def build_sync(run: RunConfig) -> Sync:
    """That of [sync]. Raises ConfigError."""
    return make_sync(run.sync.name, run.sync.codec, **run.sync.arguments)


def build_skeleton(run: RunConfig) -> nn.Module:
    """The model without weights, on the meta device; with them if it computes with them while it is
    made."""
    try:
        return build_model(run, device="meta")
    except ConfigError:
        return build_model(run)


def build_dataset(run: RunConfig, split: str = "train") -> data.Dataset:
    """The dataset of [data] for the split "train" or "val". Raises ConfigError, DataError.

    A callable without a parameter `split` has only "train".
    """
    table, arguments = run.data, run.data.arguments
    positional: tuple = ()
    function: Callable[..., Any]
    if table.text is not None:
        name, function = "weft.data:text", data.text
        positional = ([resolve_path(run, pattern) for pattern in table.text],)
    elif table.hf is not None:
        name, function = "weft.data:hf", data.hf
        positional = (resolve_path(run, table.hf),)
    else:
        name = str(table.build)
        function = resolve_callable(name, run.folder, "data.build")
    if "tokenizer" in arguments and isinstance(arguments["tokenizer"], str):
        arguments["tokenizer"] = resolve_path(run, arguments["tokenizer"])
    if "split" in _signature(function).parameters:
        arguments["split"] = split
    elif split != "train":
        fix = f"give {name} a parameter split, or set train.eval_every to 0"
        raise ConfigError("data.build", name, f"has no split {split!r}", fix)
    made = _call(function, name, "data", positional, arguments)
    for method in ("__len__", "__getitem__"):
        if method not in dir(made):
            problem = f"returns {type(made).__name__}, which has no {method}"
            raise ConfigError("data.build", name, problem, "return a map-style dataset")
    return made


def build_loss(run: RunConfig) -> Loss:
    """The loss of [train]: (output, batch) -> (sum, weight). Raises ConfigError."""
    return resolve_callable(run.train.loss, run.folder, "train.loss")


def build_optimizer(run: RunConfig) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """The optimizer of [optimizer], as a function of named parameters. Raises ConfigError."""
    name, arguments = run.optimizer.name, run.optimizer.arguments
    if name not in OPTIMIZERS:
        raise ConfigError(
            "optimizer.name",
            name,
            "is no elementwise optimizer of torch",
            nearest(name, OPTIMIZERS),
        )
    kind = OPTIMIZERS[name]
    known = set(inspect.signature(kind).parameters) - {"params"}
    _known("optimizer", arguments, known, f"argument of {name}")
    arguments = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    try:
        kind([torch.zeros(1)], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "optimizer", arguments, f"{name} refuses: {error}", "correct that argument"
        ) from error
    return partial(kind, **arguments)


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
    """Step (the first is 0) -> what the learning rate is multiplied by."""
    t = run.train
    return partial(
        lr_schedule.lr_factor,
        steps=t.steps,
        warmup=t.warmup,
        decay=t.decay,
        min_ratio=t.min_lr_ratio,
    )


def sample_batch(run: RunConfig, held: data.Dataset) -> dict[str, Tensor]:
    """A batch of the dataset's first two samples, as the model is to be called with it: batch norm
    asks for two."""
    return cast_batch(run, data.collate([held[i] for i in range(min(2, len(held)))]))


def cast_batch(run: RunConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model in float64 computes on nothing less."""
    if run.precision.compute != "fp64":
        return batch
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }


def build_plan(run: RunConfig, model: nn.Module, sample: dict[str, Tensor]) -> Plan:
    """The Plan of this run for its model, which may be on the meta device. `sample`: see `first`.
    Raises Refusal."""
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
        )
    )


def _options(run: RunConfig) -> dict[str, Any]:
    """The arguments of the schedule. `costs` is a table, or a file that `weft train --trace`
    wrote."""
    options = run.pipeline.arguments
    costs = options.get("costs")
    if isinstance(costs, str):
        try:
            options["costs"] = ActionCosts.from_json(
                Path(resolve_path(run, costs)).read_text(encoding="utf-8")
            )
        except OSError as error:
            fix = "name a costs.json that weft train --trace wrote"
            raise ConfigError("pipeline.costs", costs, f"cannot be read ({error})", fix) from None
    elif isinstance(costs, dict):
        _known("pipeline.costs", costs, [f.name for f in fields(ActionCosts)], "cost")
        options["costs"] = ActionCosts(**costs)
    return options


def check_run(run: RunConfig, layouts: Sequence[str | Layout] = ()) -> list[Plan]:
    """Build all that the run names, as far as that takes no memory, and plan each layout ([layout]
    if none is given).

    So what a process of the run would refuse is refused here. Raises Refusal.
    """
    bare, train = build_skeleton(run), build_dataset(run)
    plans = [
        plan_without_weights(with_layout(run, axes), bare, train)
        for axes in layouts or [run.layout.axes]
    ]
    made = build_optimizer(run)([("", nn.Parameter(torch.zeros(1)))])
    for each in plans:
        check_codec(made, each)
        _check_workers(run, bare, each)
    for each in plans:
        period = each.sync.period if each.separate and isinstance(each.sync, LocalSteps) else 1
        if period > run.train.steps:
            problem = (
                f"the run ends after {run.train.steps} steps, and its replicas would never agree"
            )
            raise ConfigError("sync.period", period, problem, f"use at most {run.train.steps}")
    for split, held in (
        ("train", train),
        *([("val", build_dataset(run, "val"))] if run.train.eval_every else []),
    ):
        if len(held) < run.train.batch:
            problem = f"the split {split!r} has {len(held)} samples, less than one batch"
            raise DataError(
                "train.batch", run.train.batch, problem, f"use at most {len(held)}, or more data"
            )
    _check_inputs(run, bare, train[0])
    check_sizes(bare, train, plans)
    return plans


def _check_workers(run: RunConfig, bare: nn.Module, laid: Plan) -> None:
    """What does not go with [workers]. Raises Refusal."""
    if not run.workers:
        return
    for name, table, plain in (
        ("pipeline", run.pipeline, PipelineConfig()),
        ("sync", run.sync, SyncTable()),
    ):
        for key, value in table.model_dump().items():
            if value != plain.model_dump().get(key):
                problem = "there is one driver, whose calls run one after the other"
                raise ConfigError(
                    f"{name}.{key}", value, problem, f"leave [{name}] out, or [workers]"
                )
    check_worker_plan(laid, place_modules(bare, run.workers))


def plan_without_weights(
    run: RunConfig, bare: nn.Module, train: data.Dataset, load: bool = True
) -> Plan:
    """The plan before any process starts: on the model without data if its forward can be followed
    so, else on the model, unless it is too large to `load`. Raises Refusal for all that a rank
    would refuse."""
    if run.pipeline.cut == "time":  # a model without data has no times: the ranks measure theirs
        run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"cut": "flops"})})
    sample = sample_batch(run, train)
    try:
        made = build_plan(run, bare, sample)
    except UnsupportedModel:
        if not (load and run.layout.axes.live("pp") and any(p.is_meta for p in bare.parameters())):
            raise
        made = build_plan(run, build_model(run), sample)
    if run.train.rollback is not None:
        _can_go_back(run, made)
    for field, value in (("train.clip", run.train.clip), ("train.skip", run.train.skip)):
        if value is not None and made.schedule.versions:
            problem = (
                f"{made.schedule.name} updates each stage by itself, and no stage knows the norm of"
                " all gradients"
            )
            raise ConfigError(
                field, value, problem, "leave it out, or use a synchronous schedule such as 1f1b"
            )
    sync = made.sync
    if run.train.skip is not None and sync is not None:
        if isinstance(sync, AsyncServers) and made.separate:
            problem = f"{sync.name} updates weights at a server, for each replica at another time"
            raise ConfigError(
                "train.skip", run.train.skip, problem, "leave it out, or use staleness = 0"
            )
        if isinstance(sync, SyncEveryStep) and sync.codec.keeps_residual:
            problem = (
                f"{sync.codec.name} keeps of a gradient what it has not sent, which would come with"
                " the next"
            )
            raise ConfigError(
                "train.skip",
                run.train.skip,
                problem,
                "leave it out, or use a codec without feedback",
            )
    return made


def _can_go_back(run: RunConfig, made: Plan) -> None:
    problem, fix = "", "leave it out"
    if not run.checkpoint.every:
        problem, fix = "there would be no checkpoint to go back to", "set checkpoint.every, as 100"
    elif made.schedule.versions:
        problem, fix = (
            f"{made.schedule.name} keeps older weights beside those of a checkpoint",
            f"{fix}, or use 1f1b",
        )
    elif made.separate:
        problem = f"replicas under {run.sync.name} are at different steps, and none goes back alone"
    if problem:
        raise ConfigError("train.rollback", run.train.rollback, problem, fix)


def with_layout(run: RunConfig, layout: str | Layout) -> RunConfig:
    """The same run on another layout. Raises LayoutError."""
    axes = Layout.parse(layout) if isinstance(layout, str) else layout
    return run.model_copy(update={"layout": LayoutConfig(axes=axes, elastic=run.layout.elastic)})


def resolve_path(run: RunConfig, path: str) -> str:
    """A path or pattern of the run file: below the run's folder if something is there, else as it
    is written."""
    below = os.path.join(run.folder, path)
    return below if path and any(True for _ in glob.iglob(below, recursive=True)) else path


def _check_inputs(run: RunConfig, model: nn.Module, sample: Mapping[str, Any]) -> None:
    """The model can be called with what the dataset gives."""
    names = model_inputs(run, model)
    if names is None:
        parameters = inspect.signature(model.forward).parameters.values()
        needed = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = tuple(p.name for p in needed if p.default is p.empty)
    for name in names:
        if name not in sample:
            problem = (
                f"{type(model).__name__} is called with {name}, and a sample holds"
                f" {', '.join(sample)}"
            )
            fix = (
                f"rename that entry of the dataset or parameter of forward; {nearest(name, sample)}"
            )
            raise ConfigError("model.inputs", list(names), problem, fix)


def check_sizes(model: nn.Module, held: data.Dataset, plans: Sequence[Plan]) -> None:
    """The model has a row for every token, and sequences divide where a plan cuts them."""
    ids = held[0].get("input_ids")
    vocab, embeddings = getattr(held, "vocab", None), find_roles(model).embeddings
    if ids is None:
        return
    if vocab is not None and embeddings:
        rows = model.get_submodule(embeddings[0]).num_embeddings
        if isinstance(rows, int) and rows < vocab:
            problem = f"{embeddings[0]} has {rows} rows, and the data has {vocab} tokens"
            raise ConfigError(
                "model", embeddings[0], problem, f"give the model a vocabulary of at least {vocab}"
            )
    for laid in plans:
        size, parts = laid.layout.size("tp"), laid.layout.size("tp", *SEQUENCE_AXES)
        if "sequence" in laid.layout.option("tp") and len(ids) % parts:
            problem = (
                f"tp{size} cuts sequences of {len(ids) * size // parts} tokens, which it does not"
                " divide"
            )
            raise LayoutError(
                "layout", str(laid.layout), problem, f"use a seq_len that is a multiple of {parts}"
            )


# ---- calls ---------------------------------------------------------------------------------------


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some builtins have none: they take what they take
        return inspect.signature(lambda *args, **arguments: None)


def _known(table: str, arguments: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(
                f"{table}.{key}",
                value,
                f"is no {what}",
                nearest(key, known) if known else "leave it out",
            )


def _call(
    function: Callable[..., Any],
    name: str,
    table: str,
    positional: tuple,
    arguments: Mapping[str, Any],
) -> Any:
    """`function(*positional, **arguments)`, with the arguments checked against its signature."""
    signature = _signature(function)
    named = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    named = named[len(positional) :]
    if all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        _known(table, arguments, [p.name for p in named], f"argument of {name}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in arguments:
            field = f"{table}.{parameter.name}"
            raise ConfigError(
                field, None, f"{name} needs it", f"write {parameter.name} in [{table}]"
            )
    try:
        return function(*positional, **arguments)
    except Refusal:
        raise
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # what callables raise about their arguments
        raise ConfigError(
            table, dict(arguments), f"{name} fails: {error}", "correct these arguments"
        ) from error


# ---- Hugging Face --------------------------------------------------------------------------------


# Keys of a configuration that do not describe the model, or that weft decides: [precision] says the
# dtype.
_FIXED = {
    "dtype",
    "use_cache",
    "model_type",
    "architectures",
    "transformers_version",
    "_name_or_path",
}


def _transformer(run: RunConfig, device: torch.device) -> nn.Module:
    """The transformers model of a configuration file, or of a directory with its safetensors
    weights if it has them."""
    source = resolve_path(run, str(run.model.hf))
    path = Path(source)
    transformers = import_extra("transformers", "hf", source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        fix = (
            "name a configuration file, or a directory that holds config.json; nothing is"
            " downloaded"
        )
        raise ConfigError("model.hf", run.model.hf, "there is no such file or directory", fix)
    overrides = run.model.arguments
    attention = overrides.pop("attn_implementation", None)
    try:
        keys, _ = transformers.PreTrainedConfig.get_config_dict(file, local_files_only=True)
        called = keys.get("model_type")
        if called not in transformers.CONFIG_MAPPING:
            fix = (
                nearest(str(called), transformers.CONFIG_MAPPING)
                if called
                else 'write one, as in "llama"'
            )
            problem = (
                f"transformers has no model_type {called!r}" if called else "it has no model_type"
            )
            raise ConfigError("model.hf", run.model.hf, problem, fix)
        written = transformers.AutoConfig.for_model(**keys)
        names = written.attribute_map  # such as GPT-2's hidden_size for n_embd
        known = {*written.to_dict(), *names, "num_labels", "attn_implementation"} - _FIXED
        _known("model", overrides, known, f"key of {file.name}")
        if "num_labels" in overrides:
            keys = {
                key: value for key, value in keys.items() if key not in ("id2label", "label2id")
            }
        config = transformers.AutoConfig.for_model(
            **{**keys, **{names.get(k, k): v for k, v in overrides.items()}}
        )
        config.use_cache = False
        task = "".join(word.capitalize() for word in (run.model.auto or "causal-lm").split("-"))
        kind = getattr(
            transformers, f"AutoModelFor{task.replace('Lm', 'LM').replace('2seq', '2Seq')}"
        )
        weights = (
            sorted(path.glob("*.safetensors")) if path.is_dir() and device.type != "meta" else []
        )
        if not weights:
            _no_pickles(run, path)
            return kind.from_config(
                config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
            )
        with torch.device("cpu"):
            built, report = kind.from_pretrained(
                path,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Refusal:
        raise
    except Exception as error:  # transformers raises of all kinds
        problem = f"transformers cannot build it ({type(error).__name__}: {str(error).strip()})"
        raise ConfigError(
            "model.hf", run.model.hf, problem, "correct the configuration or the overrides"
        ) from error
    # Fine-tuning starts from a fresh head; a language model that lacks weights is another model.
    if report["missing_keys"] and run.model.auto in (None, "causal-lm"):
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(
            "model.hf", run.model.hf, f"its weights lack {missing}", "name a complete model"
        )
    return built


def _no_pickles(run: RunConfig, path: Path) -> None:
    pickles = sorted(path.glob("*.bin")) if path.is_dir() else []
    if pickles:
        problem = f"its weights are pickled ({pickles[0].name}), which can run any code"
        raise ConfigError(
            "model.hf",
            run.model.hf,
            problem,
            "convert them to safetensors, or name config.json alone",
        )
