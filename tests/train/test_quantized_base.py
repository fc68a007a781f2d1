"""`[model] quantize`: frozen linears in 8 bits, or 4, beside an adapter."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.train.test_adapter import LORA, base, begun, logits_of
from weft import checkpoint
from weft.cli.app import app
from weft.core import ConfigError, DataError, Refusal
from weft.nn.nf4_linear import BLOCK, VALUES, Nf4Linear, from_nf4, to_nf4
from weft.nn.quantized_linears import Int8Linear, quantize_frozen
from weft.train import build, build_data, hf_checkpoint
from weft.train.trainer import train

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")

__all__ = ["base"]  # a fixture


def frozen(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(nn.Linear, sizes, sizes[1:])).requires_grad_(False)


def test_a_linear_is_that_of_torchao() -> None:
    net = frozen(40, 24)
    theirs = copy.deepcopy(net)
    torchao.quantize_(theirs, torchao.Int8WeightOnlyConfig())
    quantize_frozen(net, "int8")
    ours: Any = net[0]
    assert torch.equal(ours.weight, theirs[0].weight.qdata) and ours.weight.dtype == torch.int8
    x = torch.randn(3, 5, 40)
    found = [gradient_of(each, x) for each in (net, theirs)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def gradient_of(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("features", [2, 40, 64, 150])
def test_four_bits_are_the_nearest_values_of_their_block(features: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, features) * torch.tensor([[1.0], [0.0], [9.0]])
    packed, scale = to_nf4(weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, features // 2))
    found = from_nf4(packed, scale, torch.float32)
    for row in range(3):
        for start in range(0, features, BLOCK):
            block = weight[row, start : start + BLOCK]
            largest = block.abs().max()
            wanted = [min(VALUES, key=lambda v: abs(v * float(largest) - float(x))) for x in block]
            got = found[row, start : start + BLOCK]
            torch.testing.assert_close(got, torch.tensor(wanted) * largest, rtol=1e-6, atol=0.0)


def test_a_linear_in_four_bits_is_that_of_its_values() -> None:
    net = frozen(150, 24)
    wide = copy.deepcopy(net)
    quantize_frozen(net, "nf4")
    held: Any = net[0]
    wide[0].weight.data = from_nf4(held.weight, held.scale, torch.float32)
    x = torch.randn(3, 5, 150)
    found = [gradient_of(each, x) for each in (net, wide)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="'nf4': 1 has 7 input features, an odd"):
        quantize_frozen(frozen(8, 7, 8), "nf4")


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.int8), ("nf4", torch.uint8)])
def test_backward_keeps_no_other_copy_of_a_weight(kind: str, dtype: torch.dtype) -> None:
    net, kept = frozen(40, 40, 40), list[Tensor]()
    quantize_frozen(net, kind)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(torch.randn(2, 40, requires_grad=True))
    assert {t.dtype for t in kept if t.numel() >= 40 * 40 / 2} == {dtype}


def test_what_is_trained_or_shared_stays_as_it_is() -> None:
    net = frozen(8, 8, 8, 8, 8)
    net[0].weight.requires_grad_(True)
    net[3].weight = net[2].weight
    quantize_frozen(net, "int8")
    assert [type(each) for each in net] == [nn.Linear, Int8Linear, nn.Linear, nn.Linear]
    net = frozen(8, 8, 8)
    quantize_frozen(net, "nf4")
    assert [type(each) for each in net] == [Nf4Linear, Nf4Linear]
    with pytest.raises(ConfigError, match=r"model.quantize = 'int8': the model has no nn.Linear"):
        quantize_frozen(nn.Sequential(nn.Linear(2, 2)), "int8")


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_every_layout_equals_one_device(tmp_path: Path, base: Path, kind: str) -> None:
    begun(tmp_path, base, LORA)
    file, quantized = str(tmp_path / "run.toml"), ["--set", f'model.quantize="{kind}"']
    layouts = ("dp2", "fsdp2", "tp2", "pp2", "cp2")
    named = [x for layout in layouts for x in ("--layout", layout)]
    said = CliRunner().invoke(app, ["verify", file, *named, *quantized])
    assert said.exit_code == 0 and "5 of 5 layouts equal" in said.stdout, said.output
    low = ["--layout", "fsdp2", "--set", 'precision.compute="bf16"', "--precision", "bf16"]
    said = CliRunner().invoke(app, ["verify", file, *low, *quantized])
    assert said.exit_code == 0, said.output


IN_INT8 = ["--set", 'model.quantize="int8"']


def in_int8(folder: Path) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torchao.quantize_(
        model,
        torchao.Int8WeightOnlyConfig(),
        lambda module, name: isinstance(module, nn.Linear) and name != "lm_head",
    )
    return model


def in_nf4(folder: Path) -> nn.Module:
    """Its linears have the values that bitsandbytes gives them."""
    bits = pytest.importorskip("bitsandbytes.functional")
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            kind = {"blocksize": BLOCK, "quant_type": "nf4"}  # a row by itself: these are short
            rows = [bits.quantize_4bit(row.clone(), **kind) for row in module.weight.data]
            module.weight.data = torch.cat([bits.dequantize_4bit(*row).view(1, -1) for row in rows])
    return model


@pytest.mark.parametrize(
    ("kind", "dtype", "theirs_of"),
    [("int8", torch.int8, in_int8), ("nf4", torch.uint8, in_nf4)],
    ids=["int8", "nf4"],
)
def test_peft_loads_what_was_trained_beside_it(
    tmp_path: Path, base: Path, pool: Any, kind: str, dtype: torch.dtype, theirs_of: Any
) -> None:
    """Its base is torchao's own, or that of bitsandbytes."""
    theirs, written = theirs_of(base), json.dumps(kind)
    sharded = {"layout__axes": '"fsdp2"', "model__quantize": written}
    run = begun(tmp_path / "run", base, LORA, **sharded)
    sample = build_data.sample_batch(run, build_data.build_dataset(run))
    notes = build.build_for_ranks(run, sample)[1].notes
    assert not any("builds the whole model" in note for note in notes)
    pool.run(train, run, False, world=2)
    held = checkpoint.read_index(Path(run.output) / "checkpoints").tensors
    assert {name.rpartition(".")[2] for name, t in held.items() if t.dtype == dtype} == {"weight"}
    out = tmp_path / "adapter"
    hf_checkpoint.export_weights(Path(run.output), out)

    before = logits_of(theirs)
    wanted = logits_of(peft.PeftModel.from_pretrained(theirs, out))
    assert not torch.allclose(wanted, before, atol=1e-2)  # it has learnt something
    again = begun(tmp_path / "again", base, str(out), model__quantize=written)
    torch.testing.assert_close(logits_of(build.build_model(again)), wanted, atol=1e-5, rtol=1e-5)

    with pytest.raises(ConfigError, match="--merge = True: the adapter was trained beside weights"):
        hf_checkpoint.export_weights(Path(run.output), tmp_path / "merged", merge=True)


def test_what_is_refused(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.quantize = 'int4'.*int8.*nf4"):
        begun(tmp_path, base, LORA, model__quantize='"int4"')
    mistyped = begun(tmp_path, base, LORA, model__quantise='"int8"')
    with pytest.raises(ConfigError, match=r'model.quantise.*Did you mean "quantize"'):
        build.build_skeleton(mistyped)
    mistyped = begun(tmp_path, base, LORA, optimizer__decay_min_dim="2")
    with pytest.raises(
        ConfigError, match=r'optimizer.decay_min_dim.*Did you mean "decay_min_dims"'
    ):
        build.build_optimizer(mistyped)
    mistyped = begun(tmp_path, base, {**LORA, "peft_typ": "LORA"})
    with pytest.raises(ConfigError, match=r'adapter.peft_typ .*Did you mean "peft_type"'):
        build.build_skeleton(mistyped)
    run = begun(tmp_path, base, LORA)
    bare = {"hf": str(base), "quantize": "int8"}
    with pytest.raises(
        Refusal, match=r"model.quantize = 'int8': applies to the frozen weights beside"
    ):
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in bare.items())
        begun(tmp_path, base, LORA, model=f"{{ {keys} }}")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    quantized = run.model.model_copy(update={"quantize": "int8"})
    with pytest.raises(DataError, match=r"weft\[quantize\]"):
        build.build_skeleton(run.model_copy(update={"model": quantized}))
