"""Adapters of peft (LoRA and its like): small weights beside those of a model, which stay as they
are.

An adapter is put into the model's own modules, which keep their names and forwards: what a layout
divides, it divides as without. peft alone knows what an adapter is made of, how its files call its
tensors, and how it merges into the weights beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import ConfigError, Refusal, import_extra, nearest, read_file, require_known

FIELD = "model.adapter"
NAME = "default"  # peft's own, of an adapter that is alone
PREFIX = "base_model.model."  # of all names in peft's files
ADAPTER_WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
# what leaves the weights beside it as they are; the others change them when they are made
DRAWN = (True, False, "gaussian", "orthogonal")
OTHER_BASE = "name the model that it was trained with"

Adapter = str | Mapping[str, Any]


def add_adapter(
    model: nn.Module,
    adapter: Adapter,
    task: str | None = None,
    base: str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Put an adapter into a model, and freeze all else.

    Args:
        model: The model, which is changed.
        adapter: A directory that peft saved, or arguments of an adapter of peft: `peft_type`
            (default "LORA") and those of its configuration.
        task: What the model is for, as in "causal-lm".
        base: The directory or file of the model without it, for those who load the adapter.
        tensors: The weights of a directory, by their names there, if they are not to be read.

    Raises:
        ConfigError: There is no such adapter, or it does not fit this model.
        CheckpointError: Its file is damaged.
        DataError: peft is not installed.
    """
    said = adapter if isinstance(adapter, str) else dict(adapter)
    peft = import_extra("peft", FIELD, said, extra="peft")
    saved = isinstance(adapter, str)
    config = _config(peft, _saved_settings(adapter) if isinstance(adapter, str) else dict(adapter))
    config.task_type = config.task_type or _task_of(task)
    config.base_model_name_or_path = base
    config.inference_mode = False
    if saved and hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # they are overwritten
    try:
        made: nn.Module = peft.inject_adapter_in_model(config, model, NAME)
        if isinstance(adapter, str):
            _fill(peft, made, adapter, tensors)
    except Refusal:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, NotImplementedError) as error:  # peft's
        fix = "correct the adapter's settings, or name modules that this model has"
        raise ConfigError(FIELD, said, f"peft cannot add it ({error})", fix) from error
    return made


def adapter_files(adapter: Adapter | None) -> list[Path]:
    """The safetensors of an adapter's directory; none of one that is made anew."""
    file = Path(adapter, ADAPTER_WEIGHTS) if isinstance(adapter, str) else None
    return [file] if file is not None and file.is_file() else []


def split_adapter_tensors(
    tensors: Mapping[str, Tensor] | None,
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
    """The tensors of files: those of the model, and those of its adapter, by their names there.
    None: there are none."""
    found = dict(tensors or {})
    ours = {name: found.pop(name) for name in [*found] if name.startswith(PREFIX)}
    return found or None, ours or None


def _config(peft: Any, settings: dict[str, Any]) -> Any:
    kinds = {kind.value: made for kind, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = settings.pop("peft_type", "LORA")
    if kind not in kinds:
        fix = nearest(str(kind), kinds) or f"choose from {', '.join(sorted(kinds))}"
        raise ConfigError(f"{FIELD}.peft_type", kind, "is not a peft adapter", fix)
    known = [each.name for each in fields(kinds[kind])]
    require_known(FIELD, settings, known, f"argument of {kind}", ["peft_type"])
    begins = settings.get("init_lora_weights", True)
    if begins not in DRAWN:
        problem = (
            "changes the frozen weights beside the adapter, which must stay as the model has them"
        )
        fix = 'choose true, false, "gaussian" or "orthogonal"'
        raise ConfigError(f"{FIELD}.init_lora_weights", begins, problem, fix)
    try:
        return kinds[kind](**settings)
    except (TypeError, ValueError, ImportError) as error:
        fix = "correct these arguments"
        raise ConfigError(FIELD, settings, f"{kind} fails: {error}", fix) from error


def _saved_settings(folder: str) -> dict[str, Any]:
    file = Path(folder, SETTINGS)
    try:
        found = json.loads(read_file(file))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"holds no {SETTINGS} that can be read ({error})"
        fix = "name a directory that peft saved, or write the adapter's arguments"
        raise ConfigError(FIELD, folder, problem, fix) from error
    if not isinstance(found, dict):
        raise ConfigError(FIELD, folder, f"{SETTINGS} holds no table", "copy the file again")
    if not adapter_files(folder):
        problem, fix = (
            f"holds no {ADAPTER_WEIGHTS}",
            "save it by peft's save_pretrained, as safetensors",
        )
        raise ConfigError(FIELD, folder, problem, fix)
    # of what another version of peft knew besides, None and {} say nothing
    return {key: value for key, value in found.items() if value not in (None, {})}


def _task_of(task: str | None) -> str | None:
    words = {
        "causal-lm": "CAUSAL_LM",
        "seq2seq-lm": "SEQ_2_SEQ_LM",
        "sequence-classification": "SEQ_CLS",
        "token-classification": "TOKEN_CLS",
    }
    return words.get(task or "")


def _fill(peft: Any, model: nn.Module, folder: str, tensors: Mapping[str, Tensor] | None) -> None:
    if any(p.is_meta for p in model.parameters()):
        return
    if tensors is None:
        from safetensors.torch import load_file

        from .weight_files import file_tensors

        file_tensors(adapter_files(folder))  # refuses what the library would wait for, or fail at
        tensors = load_file(Path(folder, ADAPTER_WEIGHTS))
    own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    wanted = {name: t.shape for name, t in peft.get_peft_model_state_dict(model).items()}
    if apart := sorted(wanted.keys() ^ own.keys()):
        problem = f"{apart[0]} is in {'its file' if apart[0] in own else 'the model'} alone"
        raise ConfigError(FIELD, folder, problem, OTHER_BASE)
    for name, shape in wanted.items():
        if own[name].shape != shape:
            problem = f"its {name} is {list(own[name].shape)}, and {list(shape)} in this model"
            raise ConfigError(FIELD, folder, problem, OTHER_BASE)
    peft.set_peft_model_state_dict(model, own, NAME)


# ---- out again -----------------------------------------------------------------------------------


def adapter_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a model's tensors those of its adapter, by the names that peft's files have.

    Args:
        model: The model, which has an adapter; it may be without elements.
        tensors: Its state.
    """
    import peft

    own = peft.get_peft_model_state_dict(model, dict(tensors), NAME, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in own.items()}


def save_adapter_settings(model: nn.Module, folder: Path) -> None:
    """Write the adapter's configuration, as peft reads it."""
    config: Any = model.peft_config
    config[NAME].inference_mode = True  # as peft's own save_pretrained writes it
    config[NAME].save_pretrained(folder)


def merged_sources(model: nn.Module, name: str) -> tuple[str, list[str]]:
    """What one weight of the model without its adapter is made of, once that is merged.

    Args:
        model: The model with its adapter.
        name: The weight's name in the model without.

    Returns:
        The module that holds an adapter, "" for a weight that is as it was; and the names, in the
        model with it, of what has to be read.
    """
    module, _, leaf = name.rpartition(".")
    found = model.get_submodule(module)
    if hasattr(found, "modules_to_save"):
        return "", [f"{module}.modules_to_save.{NAME}.{leaf}"]
    if not hasattr(found, "get_base_layer"):
        return "", [name]
    return module, [f"{module}.{own}" for own, _ in found.named_parameters()]


def merged_weight(
    model: nn.Module, module: str, leaf: str, tensors: Mapping[str, Tensor]
) -> Tensor:
    """The weight of a module with its adapter merged into it, by peft, in the weight's dtype.

    Args:
        model: The model with its adapter, without elements, as which it stays.
        module: The module that holds the adapter.
        leaf: The weight's name in it.
        tensors: What `merged_sources` named.
    """
    held: Any = model.get_submodule(module)
    own = {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items()}
    bare = dict(held.named_parameters())
    held.load_state_dict(own, assign=True)
    try:
        with torch.no_grad():
            held.merge(adapter_names=[NAME])
        return getattr(held.get_base_layer(), leaf).detach()
    finally:
        held.merged_adapters.clear()
        for name, parameter in bare.items():
            owner, _, last = name.rpartition(".")
            setattr(held.get_submodule(owner), last, parameter)
