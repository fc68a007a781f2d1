"""Builds a transformers model from a configuration file or a model directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import ConfigError, Refusal, import_extra, nearest, require_known, table_keys

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


def build_hf_model(
    source: str,
    overrides: Mapping[str, Any],
    task: str | None,
    device: torch.device,
    name: str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Build the transformers model of a configuration file or of a model directory.

    A directory's safetensors weights are loaded, unless the device is "meta". Nothing is
    downloaded, and no pickle is read.

    Args:
        source: A configuration file, or a directory that holds config.json.
        overrides: Keys of the configuration, and `attn_implementation`, with their values.
        task: What the model is for, as in "causal-lm", which is the default.
        device: Where the model is built.
        name: What errors call the source, if not by its path.
        tensors: The weights, if they are not to be read from the directory's files.

    Raises:
        ConfigError: There is no such file, or transformers cannot build the model.
        DataError: transformers is not installed.
    """
    path, name, overrides = Path(source), name or source, dict(overrides)
    transformers = import_extra("transformers", "hf", source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        fix = (
            "name a configuration file, or a directory that holds config.json; nothing is"
            " downloaded"
        )
        raise ConfigError("model.hf", name, "there is no such file or directory", fix)
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
            raise ConfigError("model.hf", name, problem, fix)
        written = transformers.AutoConfig.for_model(**keys)
        names = written.attribute_map  # such as GPT-2's hidden_size for n_embd
        known = {*written.to_dict(), *names, "num_labels", "attn_implementation"} - _FIXED
        require_known("model", overrides, known, f"key of {file.name}", table_keys("model"))
        if "num_labels" in overrides:
            keys = {
                key: value for key, value in keys.items() if key not in ("id2label", "label2id")
            }
        config = transformers.AutoConfig.for_model(
            **{**keys, **{names.get(k, k): v for k, v in overrides.items()}}
        )
        set_use_cache(config, False)
        words = "".join(word.capitalize() for word in (task or "causal-lm").split("-"))
        kind = getattr(
            transformers, f"AutoModelFor{words.replace('Lm', 'LM').replace('2seq', '2Seq')}"
        )
        if device.type == "meta" or not hf_weight_files(path):
            _refuse_pickles(name, path)
            settings = {"attn_implementation": attention, "dtype": torch.float32}
            with device:
                return kind.from_config(config, **settings, trust_remote_code=False)
        how: dict[str, Any] = {
            "config": config,
            "attn_implementation": attention,
            "dtype": torch.float32,
            "output_loading_info": True,
        }
        if tensors is None:
            own = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
            with torch.device("cpu"), _without_bars(transformers):
                built, report = kind.from_pretrained(path, **how, **own)
        else:
            with torch.device("meta"):  # its class alone takes tensors
                cls = type(kind.from_config(config, trust_remote_code=False))
            with torch.device("cpu"), _without_bars(transformers), _loading_in_this_thread():
                built, report = cls.from_pretrained(None, state_dict=dict(tensors), **how)
    except Refusal:
        raise
    except Exception as error:  # transformers raises of all kinds
        if "ignore_mismatched_sizes" in str(error):
            asked = ", ".join(f"{key} = {value!r}" for key, value in overrides.items())
            problem = f"its weights have other shapes than {asked or 'its config.json'} says"
            fix = "leave that out, or name config.json alone, for fresh weights"
            raise ConfigError("model.hf", name, problem, fix) from error
        problem = f"transformers cannot build it ({type(error).__name__}: {str(error).strip()})"
        raise ConfigError(
            "model.hf", name, problem, "correct the configuration or the overrides"
        ) from error
    # Fine-tuning starts from a fresh head; a language model that lacks weights is another model.
    if report["missing_keys"] and task in (None, "causal-lm"):
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError("model.hf", name, f"its weights lack {missing}", "name a complete model")
    return built


def hf_weight_files(path: str | Path) -> list[Path]:
    """The safetensors of a model directory; none for a configuration file."""
    return sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []


@contextmanager
def _loading_in_this_thread() -> Iterator[None]:
    """transformers loads in a pool of threads, which modes of this thread do not see."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


@contextmanager
def _without_bars(transformers: Any) -> Iterator[None]:
    """transformers draws a bar of progress in every process."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_pickles(name: str, path: Path) -> None:
    pickles = sorted(path.glob("*.bin")) if path.is_dir() else []
    if pickles:
        problem = f"its weights are pickled ({pickles[0].name}), which can run any code"
        raise ConfigError(
            "model.hf",
            name,
            problem,
            "convert them to safetensors, or name config.json alone",
        )


def set_use_cache(config: Any, value: bool) -> None:
    """Whether a model of transformers, and the models in it, keep keys and values for generation.

    Args:
        config: The model's configuration.
        value: Whether they do.
    """
    config.use_cache = value
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "use_cache"):
            set_use_cache(part, value)
