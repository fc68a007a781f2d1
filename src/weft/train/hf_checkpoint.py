"""A run's weights as a directory that transformers reads, and a directory's weights as a run's
first checkpoint.

Both go through files a part at a time: no more than a shard, or a layer, is in memory. Names and
shapes are those that transformers itself saves, which for some models are others than a module's
own (experts one by one).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.checkpoint import (
    CHECKPOINTS,
    CheckpointIndex,
    CheckpointReader,
    Retention,
    checkpoint_path,
    latest_step,
    read_index,
    save_checkpoint,
)
from weft.core import (
    DTYPES,
    CheckpointError,
    ConfigError,
    LocalShard,
    RunConfig,
    dump_toml,
    import_extra,
    load_run,
    replace_file,
    whole_shard,
)
from weft.engine import averaged_name
from weft.nn import (
    ADAPTER_WEIGHTS,
    adapter_state,
    file_tensors,
    save_adapter_settings,
    set_use_cache,
)
from weft.parallel import weights_of

from . import build, named_callables
from .checkpoint_weights import CheckpointWeights, MergedWeights
from .run_folder import data_position

SHARD_BYTES = 5 * 10**9  # transformers' own: what most tools that split such files expect


@dataclass(frozen=True)
class Exported:
    """What was written."""

    step: int
    tensors: int
    nbytes: int
    files: int


def export_weights(
    folder: Path,
    to: Path,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
    averaged: bool = False,
) -> Exported:
    """Write the weights of a checkpoint to a directory that `from_pretrained` loads.

    It holds safetensors and their index, the configuration, and the tokenizer if the run's data has
    one; of a run that trains an adapter, the adapter in peft's format. The directory appears when
    it is complete.

    Args:
        folder: The run folder.
        to: The directory to write, which does not exist yet.
        step: The step of the checkpoint. Default: the latest.
        dtype: A key of DTYPES. Default: the checkpoint's dtype.
        shard_bytes: The most bytes in one file.
        merge: Write the whole model, with the adapter's weights merged into its own.
        averaged: Write the moving averages that `train.ema` kept.

    Raises:
        ConfigError: The directory cannot be written, or there is no adapter to merge.
        CheckpointError: The checkpoint is damaged, or lacks a weight.
    """
    run, contents, source = _run(folder), *_open_checkpoint(folder, step)
    adapted = build.build_skeleton(run) if run.model.adapter is not None else None
    if merge and adapted is None:
        raise ConfigError("--merge", run.model.adapter, "the run has no adapter", "leave it out")
    if merge and run.model.quantize is not None:
        problem = f"the adapter was trained beside weights in {run.model.quantize}"
        fix = "leave it out, and load the adapter beside such weights (docs/fine_tuning.md)"
        raise ConfigError("--merge", True, problem, fix)
    if averaged and not any(name.startswith(averaged_name("")) for name in contents.tensors):
        problem = f"the checkpoint of step {contents.step} has no averages"
        raise ConfigError("--ema", True, problem, "leave it out, or train with train.ema")
    model = _transformer(run) if adapted is None or merge else None
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            "--to", str(to), "is there already", "name a directory that does not exist"
        )
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with CheckpointReader(source, contents) as reader:
            reader.check()
            to_dtype = DTYPES[dtype] if dtype is not None else None
            weights = CheckpointWeights(reader, contents, to_dtype, averaged)
            if model is None:
                assert adapted is not None
                found = _write_adapter(adapted, weights, partial)
            else:
                whole = weights if adapted is None else MergedWeights(weights, model, adapted)
                found = _write(model, whole, partial, shard_bytes)
        if model is not None:
            _write_settings(model, dtype, partial)
        _write_tokenizer(run, partial)
        if to.exists():
            to.rmdir()
        partial.rename(to)
    except OSError as error:
        raise ConfigError(
            "--to", str(to), f"cannot be written to ({error})", "name another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return found


def import_weights(source: Path, run: RunConfig) -> Exported:
    """Write the weights of a directory that transformers reads as the checkpoint of step 0 in the
    run's folder, from which `weft train --resume` begins, each rank with its part. Raises
    ConfigError, CheckpointError."""
    file = source / "config.json"
    if not file.is_file():
        raise ConfigError(
            "directory",
            str(source),
            "holds no config.json",
            "name a directory that transformers saved",
        )
    folder = Path(run.output) / CHECKPOINTS
    if latest_step(folder) is not None:
        raise ConfigError(
            "output", run.output, "holds checkpoints already", "name another folder with --output"
        )
    if run.model.adapter is not None:
        fix = f'write hf = "{source}" in [model]: a run with an adapter begins with these weights'
        raise ConfigError("model.adapter", run.model.adapter, "is not in the directory", fix)
    model = _transformer(run)
    nbytes = count = 0

    def pieces() -> Iterator[LocalShard]:
        nonlocal nbytes, count
        wanted = {alias: w.name for w in weights_of(model) for alias in (w.name, *w.aliases)}
        wanted |= {name: name for name in _saved_names(model)}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        dtype = torch.float64 if run.precision.compute == "fp64" else torch.float32
        seen: set[str] = set()
        for name, tensor in _read(source, model, dtype):
            if name not in wanted or wanted[name] in seen:
                continue
            if tuple(tensor.shape) != shapes[name]:
                problem = (
                    f"{name} is {tuple(tensor.shape)} in {source}, and {shapes[name]} in"
                    f" {run.model.hf}"
                )
                raise CheckpointError(
                    "model.hf", run.model.hf, problem, "name the configuration of these weights"
                )
            seen.add(wanted[name])
            count, nbytes = count + 1, nbytes + tensor.nbytes
            yield whole_shard(wanted[name], tensor)
        if missing := sorted(set(wanted.values()) - seen):
            problem = (
                f"the weights in {source} lack {missing[0]} ({len(missing)} of"
                f" {len({*wanted.values()})} tensors)"
            )
            raise CheckpointError(
                "model.hf", run.model.hf, problem, "name the configuration of these weights"
            )

    scale = 2.0**16 if run.precision.compute == "fp16" else 1.0
    scalars = {"steps_done": 0, "loss_scale": scale, "good_steps": 0, **data_position(run)}
    save_checkpoint(
        folder, 0, pieces(), scalars, {"layout": "dp1", "from": source.name}, Retention(1)
    )
    replace_file(Path(run.output) / "run.toml", dump_toml(run))  # which export reads
    return Exported(0, count, nbytes, len(read_index(folder, 0).files))


def _read(source: Path, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The model's own names and tensors of a directory, those of a layer at a time."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            "directory", str(source), "holds no safetensors", "convert its weights to safetensors"
        )
    model._apply(lambda t: torch.empty_like(t, dtype=dtype) if t.is_floating_point() else t)
    bare = {
        name: getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name in model.state_dict()
    }
    loading = LoadStateDictConfig(
        device_map={"": "cpu"}, dtype=dtype, weight_mapping=get_model_conversion_mapping(model)
    )
    with ExitStack() as stack:
        groups: dict[str, dict[str, Any]] = {}
        for file in files:
            file_tensors([file])  # refuses what the library would wait for, or fail at
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                fix = "copy the file again"
                raise CheckpointError("weights", str(file), str(error), fix) from error
            for key in opened.keys():  # noqa: SIM118
                layer = re.match(r".*?\.\d+(?=\.)", key)
                groups.setdefault(layer[0] if layer else key, {})[key] = opened.get_slice(key)
        for group in groups.values():
            convert_and_load_state_dict_in_model(model, group, loading)
            found = {
                name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta
            }
            yield from found.items()
            for name in found:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, bare[name])


def _write_adapter(model: nn.Module, weights: CheckpointWeights, folder: Path) -> Exported:
    bare = {name: torch.empty(0, device="meta") for name in _saved_names(model)}
    own = {id(tensor) for tensor in adapter_state(model, bare).values()}
    names = [name for name, tensor in bare.items() if id(tensor) in own]
    _check_complete(weights, names)
    found = adapter_state(model, {name: weights.read(name) for name in names})
    found = {name: tensor.contiguous() for name, tensor in found.items()}
    save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    save_adapter_settings(model, folder)
    return Exported(weights.step, len(found), sum(t.nbytes for t in found.values()), 1)


def _check_complete(weights: CheckpointWeights | MergedWeights, names: Iterable[str]) -> None:
    for name in names:
        if weights.nbytes(name) is None:
            problem = f"the checkpoint of step {weights.step} lacks {name}"
            fix = "export with the run file that trained it"
            raise CheckpointError("checkpoint", name, problem, fix)


def _write_settings(model: nn.Module, dtype: str | None, folder: Path) -> None:
    settings: Any = model.config
    set_use_cache(settings, True)  # what weft does without is for generation
    if dtype is not None:
        settings.dtype = DTYPES[dtype]
    settings.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _write(
    model: nn.Module, weights: CheckpointWeights | MergedWeights, folder: Path, shard_bytes: int
) -> Exported:
    from transformers.core_model_loading import revert_weight_conversion

    _check_complete(weights, (w.name for w in weights_of(model)))
    sizes = {name: weights.nbytes(name) for name in _saved_names(model)}
    shards: list[dict[str, int]] = []  # of each file: name -> bytes
    there = {name: size for name, size in sizes.items() if size is not None}
    for number, group in enumerate(_groups(there, shard_bytes)):
        tensors = {name: weights.read(name) for name in group}
        tensors = {
            name: tensor.contiguous()
            for name, tensor in revert_weight_conversion(model, tensors).items()
        }
        save_file(tensors, folder / f"{number}.safetensors", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in tensors.items()})
    total = sum(sum(shard.values()) for shard in shards)
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for number, file in enumerate(files):
            (folder / f"{number}.safetensors").rename(folder / file)
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return Exported(weights.step, sum(map(len, shards)), total, len(shards))


def _saved_names(model: nn.Module) -> Iterator[str]:
    """What a directory holds: every parameter once, by the first name that a checkpoint has it
    under, and buffers that are part of the state."""
    weights = {w.name for w in weights_of(model)}
    buffers = {name for name, _ in model.named_buffers()}
    yield from (name for name in model.state_dict() if name in weights or name in buffers)


def _groups(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Consecutive names whose tensors have at most so many bytes together."""
    group: list[str] = []
    held = 0
    for name, nbytes in sizes.items():
        if group and held + nbytes > most:
            yield group
            group, held = [], 0
        group.append(name)
        held += nbytes
    if group:
        yield group


def _write_tokenizer(run: RunConfig, folder: Path) -> None:
    named = run.data.arguments.get("tokenizer")
    if not isinstance(named, str):
        return
    path = Path(named_callables.resolve_path(run, named))
    transformers = import_extra("transformers", "data.tokenizer", named)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    elif file.is_file():
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    else:
        fix = "put it there again, or name another with --set data.tokenizer=PATH"
        raise ConfigError("data.tokenizer", named, "there is no such tokenizer any more", fix)
    tokenizer.save_pretrained(folder)


# ---- a run and its model -------------------------------------------------------------------------


def _run(folder: Path) -> RunConfig:
    file = folder / "run.toml"
    if not file.is_file():
        raise ConfigError(
            "run folder", str(folder), "holds no run.toml", "name a folder that weft train wrote"
        )
    return load_run(file)


def _open_checkpoint(folder: Path, step: int | None) -> tuple[CheckpointIndex, Path]:
    contents = read_index(folder / CHECKPOINTS, step)
    return contents, checkpoint_path(folder / CHECKPOINTS, contents.step)


def _transformer(run: RunConfig) -> nn.Module:
    """The run's model on the meta device, without the adapter that it trains. Raises ConfigError
    for one that is not transformers'."""
    if run.model.hf is None:
        fix = "its checkpoint already has the names of its state_dict: see weft checkpoint show"
        raise ConfigError(
            "model.build", run.model.build, "has no transformers configuration to go with it", fix
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return build.build_skeleton(run, with_adapter=False)
