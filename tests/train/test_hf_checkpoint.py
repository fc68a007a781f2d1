"""Weights that leave a run as a transformers directory and come into one, for every family that is
supported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from tests.train.test_trainer import Ramps
from weft import checkpoint
from weft.cli.app import app
from weft.core import run_config
from weft.core.errors import CheckpointError, ConfigError
from weft.core.shards import whole_shard
from weft.train import build, hf_checkpoint
from weft.train.trainer import train

transformers = pytest.importorskip("transformers")

VOCAB = 67
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Any] = {
    "llama": ("LlamaConfig", SMALL),
    "tied": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 8}),
    "mistral": ("MistralConfig", SMALL),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "bert": (
        "BertConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "t5": (
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "olmoe": ("OlmoeConfig", {**SMALL, "num_experts": 8, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {
            **SMALL,
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek": (
        "DeepseekV3Config",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_experts_per_tok": 2,
        },
    ),
}

RUN = """
[model]
hf = "config.json"
auto = "{auto}"
[data]
build = "tests.train.test_hf_checkpoint:Both"
[train]
batch = 8
steps = {steps}
[optimizer]
lr = 1e-2
[checkpoint]
every = 2
"""


class Both(Ramps):
    """With what a model of two halves asks for."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        return {**found, "decoder_input_ids": found["input_ids"].flip(0)}


def auto(family: str) -> str:
    return {"bert": "masked-lm", "t5": "seq2seq-lm"}.get(family, "causal-lm")


def begun(folder: Path, family: str, steps: int = 2) -> run_config.RunConfig:
    """A run of a family's model; not trained."""
    kind, keys = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    getattr(transformers, kind)(**keys).save_pretrained(folder)
    (folder / "run.toml").write_text(RUN.format(steps=steps, auto=auto(family)))
    return run_config.load_run(folder / "run.toml", {"output": json.dumps(str(folder / "out"))})


def files_of(folder: Path) -> dict[str, Tensor]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def held(run: run_config.RunConfig, step: int) -> dict[str, Tensor]:
    folder = Path(run.output) / "checkpoints"
    contents = checkpoint.read_index(folder, step)
    found = {
        n: torch.empty(s.shape, dtype=s.dtype) for n, s in contents.tensors.items() if "/" not in n
    }
    checkpoint.load_checkpoint(
        folder, step, [whole_shard(name, tensor) for name, tensor in found.items()]
    )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_out_and_in_and_out(tmp_path: Path, family: str) -> None:
    """What is exported is what transformers itself saves; it loads, gives the same logits, and
    comes back."""
    run = begun(tmp_path / "run", family)
    train(run, False)
    out = tmp_path / "exported"
    found = hf_checkpoint.export_weights(Path(run.output), out, shard_bytes=20_000)
    weights = held(run, 2)
    model = build.build_model(run).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in weights:
                tensor.copy_(weights[name])
    model.save_pretrained(tmp_path / "own")  # type: ignore[operator]
    mine, theirs = files_of(out), files_of(tmp_path / "own")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert found.files > 1 and len([*out.glob("*.safetensors")]) == found.files

    kinds = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    loaded = kinds.get(family, transformers.AutoModelForCausalLM).from_pretrained(out).eval()
    ids = {"input_ids": torch.randint(0, VOCAB, (2, 8))}
    ids |= {"decoder_input_ids": ids["input_ids"]} if family == "t5" else {}
    with torch.no_grad():
        assert torch.equal(loaded(**ids).logits, model(**ids).logits)
    assert loaded.config.use_cache

    fresh = begun(tmp_path / "fresh", family)
    brought = hf_checkpoint.import_weights(out, fresh)
    back = held(fresh, 0)
    assert brought.tensors == len(back) and back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in back)
    # a run goes on from it, and what is exported of that first is the same to the byte
    again = tmp_path / "again"
    hf_checkpoint.export_weights(Path(fresh.output), again, step=0, shard_bytes=20_000)
    for file in sorted(out.glob("*.safetensors")):
        assert (again / file.name).read_bytes() == file.read_bytes()
    train(fresh, True)
    assert checkpoint.latest_step(Path(fresh.output) / "checkpoints") == 2


def test_refusals(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "llama")
    with pytest.raises(ConfigError, match=r"holds no run\.toml"):
        hf_checkpoint.export_weights(tmp_path, tmp_path / "x")
    train(run, False)
    folder = Path(run.output)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is there already"):
        hf_checkpoint.export_weights(folder, tmp_path / "full")
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 7"):
        hf_checkpoint.export_weights(folder, tmp_path / "x", 7)
    file = next((folder / "checkpoints" / "step-000002").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="its checksum is not the one"):
        hf_checkpoint.export_weights(folder, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]  # nothing half made
    other = begun(tmp_path / "other", "qwen3")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        hf_checkpoint.import_weights(tmp_path / "full", other)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        hf_checkpoint.import_weights(tmp_path / "other", run)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(
        tmp_path / "llama"
    )
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.0\.self_attn\.k_norm\.weight"):
        hf_checkpoint.import_weights(tmp_path / "llama", other)


def test_commands(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "mixtral")
    train(run, False)
    call = CliRunner().invoke
    shown = call(app, ["checkpoint", "show", run.output, "--tensors"])
    assert shown.exit_code == 0 and re.search(r"^step +2 \(here: 2\)$", shown.output, re.MULTILINE)
    assert "model.layers.0.mlp.experts.gate_up_proj" in shown.output
    found = json.loads(call(app, ["checkpoint", "show", run.output, "--json"]).output)
    assert found["kinds"]["weights"]["bytes"] == sum(t.nbytes for t in held(run, 2).values())
    done = call(
        app, ["checkpoint", "export", run.output, "--to", str(tmp_path / "hf"), "--dtype", "bf16"]
    )
    assert done.exit_code == 0, done.output
    assert {t.dtype for t in files_of(tmp_path / "hf").values()} == {torch.bfloat16}
    assert (
        call(
            app,
            ["checkpoint", "export", run.output, "--to", str(tmp_path / "y"), "--dtype", "int3"],
        ).exit_code
        == 2
    )
    begun(tmp_path / "fresh", "mixtral")
    brought = call(
        app,
        [
            "checkpoint",
            "import",
            str(tmp_path / "hf"),
            "--run",
            str(tmp_path / "fresh" / "run.toml"),
            "--output",
            str(tmp_path / "new"),
        ],
    )
    assert brought.exit_code == 0, brought.output
    assert f" --output {tmp_path / 'new'} --resume" in brought.output
    assert run_config.load_run(tmp_path / "new" / "run.toml").output == str(tmp_path / "new")
    assert call(app, ["checkpoint", "show", str(tmp_path)]).exit_code == 2
