"""Small configurations of transformers' model families, and their run files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from sizes import OWN, SIZES
from tasks import BINS, FRAMES, IMAGE_TOKEN, LOSSES, PIXELS, TOKENS, WAVE, samples
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# task of a run file -> families beside those of causal language models
OTHERS: dict[str, tuple[str, ...]] = {
    "masked-lm": (
        *("bert", "roberta", "albert", "electra", "distilbert", "modernbert", "deberta-v2"),
        *("deberta", "layoutlm", "funnel", "mobilebert", "squeezebert", "fnet", "longformer"),
        *("nystromformer", "convbert", "ibert", "mpnet", "esm", "xlm-roberta"),
    ),
    "sequence-classification": ("bert", "distilbert", "llama"),
    "token-classification": ("bert", "roberta"),
    "seq2seq-lm": (
        *("t5", "bart", "mbart", "pegasus", "marian", "mt5", "longt5"),
        *("m2m_100", "blenderbot", "led", "switch_transformers", "umt5", "t5gemma"),
    ),
    "image-classification": (
        *("vit", "deit", "swin", "convnext", "resnet", "beit", "dinov2", "convnextv2", "swinv2"),
        *("segformer", "mobilevit", "poolformer", "regnet", "efficientnet", "cvt", "levit", "pvt"),
        *("mobilenet_v2", "siglip", "hiera", "focalnet"),
    ),
    "audio-classification": (
        *("wav2vec2", "hubert", "wavlm", "whisper", "audio-spectrogram-transformer"),
        *("data2vec-audio", "unispeech", "sew", "wav2vec2-conformer", "wav2vec2-bert"),
    ),
    "speech-seq2seq": ("whisper", "speech_to_text", "moonshine"),
    "image-text-to-text": (
        *("llava", "paligemma", "qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "smolvlm"),
        *("internvl", "blip", "blip-2", "mistral3", "qwen3_vl", "mllama", "git"),
    ),
    "zero-shot-image-classification": ("clip", "siglip", "altclip", "chinese_clip"),
}

# family and task -> arguments of its samples
DATA: dict[str, dict[str, Any]] = {
    "whisper audio-classification": {"shapes": {"input_features": (BINS, FRAMES)}},
    "audio-spectrogram-transformer audio-classification": {
        "shapes": {"input_values": (FRAMES, BINS)}
    },
    "wav2vec2-bert audio-classification": {"shapes": {"input_features": (FRAMES, BINS)}},
    "speech_to_text speech-seq2seq": {"shapes": {"input_features": (FRAMES, BINS)}},
    "moonshine speech-seq2seq": {"shapes": {"input_values": (WAVE,)}},
    **{
        f"{name} image-text-to-text": {"image_tokens": count}
        for name, count in {
            **dict.fromkeys(("llava", "paligemma", "gemma3"), 16),
            "internvl": 4,
        }.items()
    },
    **{
        f"{name} image-text-to-text": {
            "image_tokens": 4,
            "shapes": {"pixel_values": (16, 3 * 2 * 8 * 8)},
            "given": {"image_grid_thw": (1, 4, 4), "mm_token_type_ids": (1,) * 4 + (0,) * TOKENS},
        }
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    },
    "mistral3 image-text-to-text": {"image_tokens": 4, "given": {"image_sizes": (PIXELS, PIXELS)}},
    **{
        f"{name} image-text-to-text": {
            "image_tokens": 4,
            "shapes": {"pixel_values": (1, 3, PIXELS, PIXELS)},
        }
        for name in ("idefics3", "smolvlm")
    },
    "mllama image-text-to-text": {
        "shapes": {"pixel_values": (1, 2, 3, PIXELS, PIXELS)},
        "given": {
            "aspect_ratio_ids": (2,),
            "aspect_ratio_mask": ((1, 1),),
            "cross_attention_mask": (((1, 1),),) * TOKENS,
        },
    },
}

# causal language models of transformers' table of which the class builds only a part of what the
# configuration describes -> the task that builds it all
WHOLE: dict[str, str] = dict.fromkeys(("musicgen", "musicgen_melody"), "text-to-waveform")


@dataclass(frozen=True)
class Family:
    """A model type of transformers, and the task that it is built for."""

    model_type: str
    task: str = "causal-lm"

    @property
    def name(self) -> str:
        return self.model_type if self.task == "causal-lm" else f"{self.model_type} {self.task}"


def all_families() -> list[Family]:
    """Every causal language model family of the installed transformers, and OTHERS."""
    causal = [
        Family(name, WHOLE.get(name, "causal-lm")) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
    return [*causal, *(Family(name, task) for task, names in OTHERS.items() for name in names)]


def small_config(family: Family) -> transformers.PreTrainedConfig:
    """The family's configuration in small. Raises whatever transformers raises."""
    name = family.model_type
    sizes = _sizes(transformers.AutoConfig.for_model(name)) | OWN.get(name, {})
    if family.task == "image-text-to-text":
        sizes |= dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN)
    config = transformers.AutoConfig.for_model(name, **sizes)
    config.use_cache = False
    return config


def _sizes(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    known = {*config.to_dict(), *config.attribute_map}
    found = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # latent attention makes keys for each head
        found["num_key_value_heads"] = 4
    for key in config.sub_configs or {}:
        part = getattr(config, key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            kind = {"model_type": part.model_type} if part.model_type else {}
            found[key] = _sizes(part) | OWN.get(part.model_type, {}) | kind
    return found


def has_experts(family: Family) -> bool:
    """Whether the configuration counts experts. Raises whatever transformers raises."""
    text = json.dumps(transformers.AutoConfig.for_model(family.model_type).to_dict(), default=str)
    return "_experts" in text


def write_run(family: Family, folder: Path) -> Path:
    """A configuration and a run file of it. Raises whatever transformers raises, also if the model
    does not run by itself."""
    config = small_config(family)
    config.to_json_file(folder / "config.json", use_diff=False)
    held = DATA.get(family.name, {})
    model = build_alone(family, config)
    model(**example(samples(family.task, **held)))
    lines = ["[model]", f'hf = "{folder / "config.json"}"']
    if family.task != "causal-lm":
        lines.append(f'auto = "{family.task}"')
    lines += ["[data]", 'build = "tasks:samples"', f'task = "{family.task}"']
    lines += [f"{key} = {_toml(value)}" for key, value in held.items()]
    loss = LOSSES.get(family.name) or LOSSES.get(family.task, "weft.losses:next_token")
    lines += ["[train]", "batch = 4", "steps = 2", f'loss = "{loss}"']
    if loss == "tasks:contrastive":  # needs all forwards before the first backward
        lines += ["[pipeline]", 'schedule = "gpipe"']
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        # what a batch norm takes away has gradients that are rounding alone, which AdamW enlarges
        lines += ["[optimizer]", 'name = "sgd"', "lr = 0.01"]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in value.items())}}}"
    return json.dumps(value)


def build_alone(family: Family, config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """The family's model, by transformers alone."""
    words = "".join(word.capitalize() for word in family.task.split("-"))
    name = f"AutoModelFor{words.replace('Lm', 'LM').replace('2seq', '2Seq')}"
    return getattr(transformers, name).from_config(config)


def example(held: samples) -> dict[str, Tensor]:
    """Two samples, without labels."""
    rows = [held[0], held[1]]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "labels"}
