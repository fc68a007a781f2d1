"""Adapters under `tp`: each factor of LoRA is divided with the linear that it is beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

from tests.train.test_adapter import base, begun, logits_of
from tests.train.test_hf_checkpoint import FAMILIES
from weft.cli.app import app
from weft.core import Plan
from weft.nn import find_roles
from weft.train import build, build_data, hf_checkpoint
from weft.train.trainer import train

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

__all__ = ["base"]  # a fixture

EVERY: dict[str, Any] = {"r": 4, "lora_dropout": 0.25, "init_lora_weights": "gaussian"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {**EVERY, "target_modules": "all-linear"},
    "gpt2": {**EVERY, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
LAYOUTS = ("tp2", "tp2+sequence", "dp2.tp2", "fsdp2.tp2")
IN_INT8 = ["--set", 'model.quantize="int8"']


def model_of(family: str, folder: Path) -> Path:
    """A model directory with weights."""
    kind, keys = FAMILIES[family]
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys))
    made.save_pretrained(folder)
    return folder


def plan_of(folder: Path, source: Path, adapter: Any, axes: str, **settings: str) -> Plan:
    run = begun(folder, source, adapter, layout__axes=f'"{axes}"', **settings)
    return build.build_for_ranks(run, build_data.sample_batch(run, build_data.build_dataset(run)))[
        1
    ]


def cuts_of(plan: Plan, within: str) -> dict[str, int | None]:
    """Of each parameter of a module its dim that tp divides; None: it is whole."""
    cuts: dict[str, int | None] = {}
    for name, axes in plan.params().items():
        if name.startswith(within):
            stored = axes["tp"].stored if "tp" in axes else None
            cuts[name.removeprefix(within)] = stored.dim if isinstance(stored, Shard) else None
    return cuts


def test_factors_are_divided_with_their_linear(tmp_path: Path, base: Path) -> None:
    plan = plan_of(tmp_path, base, ADAPTERS["llama"], "tp2")
    column = {"base_layer.weight": 0, "lora_A.default.weight": None, "lora_B.default.weight": 0}
    row = {"base_layer.weight": 1, "lora_A.default.weight": 1, "lora_B.default.weight": None}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert cuts_of(plan, f"model.layers.1.{name}.") == column, name
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert cuts_of(plan, f"model.layers.1.{name}.") == row, name


def test_a_transposed_base_is_divided_as_its_factors_are(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, model_of("gpt2", tmp_path / "gpt2"), ADAPTERS["gpt2"], "tp2")
    column = cuts_of(plan, "transformer.h.0.attn.c_attn.")
    assert column["base_layer.weight"] == 1 and column["base_layer.bias"] == 0
    assert column["lora_A.default.weight"] is None and column["lora_B.default.weight"] == 0
    row = cuts_of(plan, "transformer.h.0.mlp.c_proj.")
    assert row["base_layer.weight"] == 0 and row["base_layer.bias"] is None
    assert row["lora_A.default.weight"] == 1 and row["lora_B.default.weight"] is None


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("family", ADAPTERS)
def test_every_layout_equals_one_device(tmp_path: Path, family: str) -> None:
    """Verified in float64, with dropout before A."""
    begun(tmp_path, model_of(family, tmp_path / "base"), ADAPTERS[family])
    named = [x for layout in LAYOUTS for x in ("--layout", layout)]
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "run.toml"), *named])
    assert said.exit_code == 0 and "4 of 4 layouts equal" in said.stdout, said.output


@pytest.mark.grid
def test_so_does_a_base_in_8_bits(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("torchao")
    plan = plan_of(tmp_path, base, ADAPTERS["llama"], "tp2", model__quantize='"int8"')
    column = cuts_of(plan, "model.layers.1.mlp.up_proj.base_layer.")
    assert column == {"weight": 0, "scale": 0}
    row = cuts_of(plan, "model.layers.1.mlp.down_proj.base_layer.")
    assert row == {"weight": 1, "scale": None}
    named = ["--layout", "tp2+sequence", "--layout", "fsdp2.tp2"]
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "run.toml"), *named, *IN_INT8])
    assert said.exit_code == 0 and "2 of 2 layouts equal" in said.stdout, said.output


def test_peft_loads_what_tp_has_trained(tmp_path: Path, base: Path, pool: Any) -> None:
    whole = begun(tmp_path / "one", base, ADAPTERS["llama"])
    train(whole, False)
    run = begun(tmp_path / "two", base, ADAPTERS["llama"], layout__axes='"tp2"')
    pool.run(train, run, False, world=2)
    logits = []
    for each in (whole, run):
        out = Path(each.output) / "adapter"
        hf_checkpoint.export_weights(Path(each.output), out)
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        before = logits_of(plain)
        logits.append(logits_of(peft.PeftModel.from_pretrained(plain, out)))
    assert not torch.allclose(logits[0], before, atol=1e-2)  # it has learnt something
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["use_dora", "lora_bias"])
def test_what_is_more_than_two_factors(variant: str) -> None:
    """DoRA norms the rows of the sum, so that its linear is left whole; a bias of B is cut."""
    net = nn.Sequential(nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}))
    settings = {"r": 2, "target_modules": ["up", "down"], variant: True}
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), net)
    declared = {"0.up": "column", "0.down": "row"}
    if variant == "use_dora":
        assert not find_roles(net).chains
        return
    (chain,) = find_roles(net, declared).chains
    assert chain.columns == ("0.up.base_layer", "0.up.lora_B.default")
    assert chain.rows == ("0.down.base_layer", "0.down.lora_A.default")
