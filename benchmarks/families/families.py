"""Small configurations of transformers' model families, and batches for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, TOKENS, PIXELS, SAMPLES = 96, 16, 32, 64

# key of a configuration -> its small value, wherever a family has that key
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("n_inner", "d_ff", "dff", "ffn_hidden_size", "d_inner"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_layer"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": PIXELS,
    "patch_size": 8,
}

# family -> what it needs beside SIZES
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8, "mp_num": 4},
    "cpmant": {"prompt_types": 4, "prompt_length": 4, "segment_types": 4, "dim_head": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "convnext": {
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_hidden_layers": 2,
        "patch_size": 4,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "shared_experts_intermediate_size": 32,
        "per_layer_config": {
            layer: {
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
                **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim"), 16),
                **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
            }
            for layer in (2, 3)
        },
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": None,
        "laurel_rank": 8,
    },
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "attention_head_size": 16,
        "feed_forward_size": 128,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 256,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 8,
        "hc_lowrank": 8,
    },
    # its last map has 4 x 4 places: of one, batch norm leaves gradients that are rounding alone
    "resnet": {"hidden_sizes": [16, 32], "depths": [2, 2], "embedding_size": 16},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "swin": {
        **{key: [2, 4] for key in ("num_heads", "num_attention_heads")},
        "embed_dim": 16,
        "depths": [2, 2],
        "window_size": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "head_dim": 32,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
}

# task of a run file -> families beside those of causal language models
OTHERS: dict[str, tuple[str, ...]] = {
    "masked-lm": ("bert", "roberta", "albert", "electra", "distilbert", "modernbert", "deberta-v2"),
    "seq2seq-lm": ("t5", "bart", "mbart", "pegasus", "marian", "mt5", "longt5"),
    "image-classification": ("vit", "deit", "swin", "convnext", "resnet", "beit", "dinov2"),
}


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
    causal = [Family(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return [*causal, *(Family(name, task) for task, names in OTHERS.items() for name in names)]


def small_config(family: Family) -> transformers.PreTrainedConfig:
    """The family's configuration in small. Raises whatever transformers raises."""
    name = family.model_type
    sizes = _sizes(transformers.AutoConfig.for_model(name)) | OWN.get(name, {})
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
    build_alone(family, config)(**example(family.task))
    auto = f'auto = "{family.task}"\n' if family.task != "causal-lm" else ""
    loss = "classification" if "classification" in family.task else "next_token"
    path = folder / "run.toml"
    path.write_text(
        f'[model]\nhf = "{folder / "config.json"}"\n{auto}'
        f'[data]\nbuild = "families:samples"\ntask = "{family.task}"\n'
        f'[train]\nbatch = 4\nsteps = 2\nloss = "weft.losses:{loss}"\n'
    )
    return path


def build_alone(family: Family, config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """The family's model, by transformers alone."""
    words = "".join(word.capitalize() for word in family.task.split("-"))
    name = f"AutoModelFor{words.replace('Lm', 'LM').replace('2seq', '2Seq')}"
    return getattr(transformers, name).from_config(config)


def example(task: str) -> dict[str, Tensor]:
    """Two samples, without labels."""
    held = samples(task)
    rows = [held[0], held[1]]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "labels"}


class samples(Dataset):
    """Random samples of a task; labels are shifted, and some are left out (-100)."""

    def __init__(self, task: str):
        self.task = task

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        if self.task == "image-classification":
            pixels = torch.randn(3, PIXELS, PIXELS, generator=draw)
            return {"pixel_values": pixels, "labels": torch.tensor(index % 2)}
        ids = torch.randint(3, VOCABULARY, (TOKENS + 1,), generator=draw)
        labels = ids[1:].clone()
        labels[: index % 5] = -100
        found = {"input_ids": ids[:-1], "labels": labels}
        return found | ({"decoder_input_ids": ids[:-1]} if self.task == "seq2seq-lm" else {})
