"""Runs that train an adapter of peft beside a model's own weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from tests.train.test_hf_checkpoint import FAMILIES
from weft import checkpoint
from weft.cli.app import app
from weft.core import run_config
from weft.core.errors import CheckpointError, ConfigError
from weft.train import build, build_data, hf_checkpoint
from weft.train.trainer import train

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
RUN = """
[model]
hf = "{base}"
adapter = {adapter}
[data]
build = "tests.train.test_trainer:Ramps"
[train]
batch = 8
steps = 4
loss = "weft.losses:next_token"
[optimizer]
lr = 1e-2
[checkpoint]
every = 4
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights."""
    folder = tmp_path_factory.mktemp("base")
    kind, keys = FAMILIES["llama"]
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys))
    made.save_pretrained(folder)
    return folder


def begun(folder: Path, base: Path, adapter: Any, **settings: str) -> run_config.RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    written = json.dumps(adapter)
    if isinstance(adapter, dict):
        pairs = (f"{key} = {json.dumps(value)}" for key, value in adapter.items())
        written = "{ " + ", ".join(pairs) + " }"
    (folder / "run.toml").write_text(RUN.format(base=base, adapter=written))
    named = {key.replace("__", "."): value for key, value in settings.items()}
    out = {"output": json.dumps(str(folder / "out"))}
    return run_config.load_run(folder / "run.toml", {**out, **named})


def logits_of(model: Any) -> Tensor:
    ids = torch.arange(24).view(2, 12) % 60
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_an_adapter_goes_to_peft_and_into_the_weights(tmp_path: Path, base: Path) -> None:
    """What is exported is what peft loads, and merged the same model; a run begins with it."""
    run = begun(tmp_path / "run", base, {**LORA, "lora_alpha": 16})
    train(run, False)
    folder = Path(run.output)
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    found = hf_checkpoint.export_weights(folder, out)
    assert found.tensors == 2 * 3 * 2  # A and B of three linears in two layers
    assert sorted(f.name for f in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = logits_of(plain)
    loaded = peft.PeftModel.from_pretrained(plain, out)
    wanted = logits_of(loaded)
    assert not torch.allclose(wanted, before, atol=1e-2)  # it has learnt something

    hf_checkpoint.export_weights(folder, merged, merge=True, shard_bytes=20_000)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits_of(whole), wanted, atol=1e-5, rtol=1e-5)
    theirs = loaded.merge_and_unload().state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name

    still = begun(tmp_path / "still", base, str(out), optimizer__lr="0.0")
    train(still, False)  # each rank with its part of what the directory holds
    hf_checkpoint.export_weights(Path(still.output), tmp_path / "same")
    first, same = (
        load_file(each / "adapter_model.safetensors") for each in (out, tmp_path / "same")
    )
    assert first.keys() == same.keys()
    assert all(torch.equal(first[name], same[name]) for name in first)

    again = begun(tmp_path / "again", base, str(out))
    torch.testing.assert_close(logits_of(build.build_model(again)), wanted, atol=1e-6, rtol=1e-6)
    model = build.build_for_ranks(
        again, build_data.sample_batch(again, build_data.build_dataset(again))
    )
    assert not any("builds the whole model" in note for note in model[1].notes)
    train(again, False)
    hf_checkpoint.export_weights(Path(again.output), tmp_path / "further")
    first, second = (
        load_file(each / "adapter_model.safetensors") for each in (out, tmp_path / "further")
    )
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_only_the_adapter_is_trained(tmp_path: Path, base: Path) -> None:
    run = begun(tmp_path / "run", base, LORA)
    train(run, False)
    hf_checkpoint.export_weights(Path(run.output), tmp_path / "merged", merge=True)
    mine = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = load_file(base / "model.safetensors")
    changed = {name for name in theirs if not torch.equal(mine[name], theirs[name])}
    adapted = ("q_proj", "v_proj", "down_proj")
    assert changed == {name for name in theirs if any(each in name for each in adapted)}


def test_modules_that_are_trained_whole_go_with_it(tmp_path: Path, base: Path) -> None:
    adapter = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    run = begun(tmp_path / "run", base, adapter)
    train(run, False)
    folder = Path(run.output)
    hf_checkpoint.export_weights(folder, tmp_path / "adapter")
    hf_checkpoint.export_weights(folder, tmp_path / "merged", merge=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    wanted = logits_of(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(whole), wanted, atol=1e-5, rtol=1e-5)
    head = load_file(base / "model.safetensors")["lm_head.weight"]
    assert not torch.equal(whole.lm_head.weight, head)


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("kind", ["LORA", "LOHA", "IA3"])
def test_every_layout_equals_one_device(tmp_path: Path, base: Path, kind: str) -> None:
    """Verified in float64, and trained, with the trial before the first step."""
    adapter = {"peft_type": kind, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    if kind == "IA3":
        adapter["feedforward_modules"] = ["down_proj"]
    run = begun(tmp_path, base, adapter)
    file = str(tmp_path / "run.toml")
    if kind == "LOHA":  # it reads the shapes of whole weights, as the refusal says
        with (tmp_path / "run.toml").open("a") as written:
            written.write('[roles]\n"model.layers.*_proj" = "whole"\n')
    layouts = [("--layout", each) for each in ("dp2", "fsdp2", "tp2", "pp2", "cp2", "fsdp2.tp2")]
    said = CliRunner().invoke(app, ["verify", file, *(x for pair in layouts for x in pair)])
    assert said.exit_code == 0 and "6 of 6 layouts equal" in said.stdout, said.output
    named = ["--set", 'layout.axes="tp2"', "--output", str(tmp_path / "out")]
    said = CliRunner().invoke(app, ["train", file, *named])
    assert said.exit_code == 0, said.output
    assert checkpoint.latest_step(Path(run.output) / "checkpoints") == 4


REFUSED: list[tuple[Any, str]] = [
    ({"r": 4, "target_module": ["q_proj"]}, 'Did you mean "target_modules"'),
    ({"r": 4, "target_modules": ["query"]}, "peft cannot add it .*query"),
    ({"peft_type": "LORAX"}, "is not a peft adapter"),
    ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, "prompt learning"),
    ({**LORA, "init_lora_weights": "pissa"}, "changes the frozen weights"),
    ({**LORA, "r": -1}, "peft cannot add it|LORA fails"),
    ("nowhere", "holds no adapter_config"),
]


@pytest.mark.parametrize(("adapter", "says"), REFUSED)
def test_what_is_refused(tmp_path: Path, base: Path, adapter: Any, says: str) -> None:
    run = begun(tmp_path / "run", base, adapter)
    with pytest.raises(ConfigError, match=says) as refused:
        build.build_skeleton(run)
    assert "model.adapter" in str(refused.value)


def saved(folder: Path, base: Path, **arguments: Any) -> Path:
    """An adapter that peft itself has saved."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(plain, peft.LoraConfig(**{**LORA, **arguments})).save_pretrained(folder)
    return folder


def test_directories_of_adapters_that_do_not_fit(tmp_path: Path, base: Path) -> None:
    folder = saved(tmp_path / "saved", base)
    build.build_model(begun(tmp_path / "run", base, str(folder)))
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(iter(whole))
    lacking = {key: value for key, value in whole.items() if key != name}
    save_file(lacking, file)
    with pytest.raises(ConfigError, match=re.escape("is in the model alone")):
        build.build_model(begun(tmp_path / "run", base, str(folder)))
    save_file({**lacking, name: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=r"is \[3, 3\], and \["):
        build.build_model(begun(tmp_path / "run", base, str(folder)))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="Copy the file again"):
        build.build_model(begun(tmp_path / "run", base, str(folder)))
    file.unlink()
    with pytest.raises(ConfigError, match="holds no adapter_model"):
        build.build_model(begun(tmp_path / "run", base, str(folder)))


def test_export_and_import_say_what_does_not_go(tmp_path: Path, base: Path) -> None:
    run = begun(tmp_path / "run", base, LORA)
    with pytest.raises(ConfigError, match="begins with these weights"):
        hf_checkpoint.import_weights(base, run)
    kind, keys = FAMILIES["tied"]
    tied = tmp_path / "tied"
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys))
    made.save_pretrained(tied)
    run = begun(tmp_path / "tiedrun", tied, {"target_modules": ["lm_head"]})
    train(run, False)
    with pytest.raises(ConfigError, match="is tied to"):
        hf_checkpoint.export_weights(Path(run.output), tmp_path / "out", merge=True)
    (tmp_path / "plain.toml").write_text(
        re.sub("adapter.*\n", "", (tmp_path / "run" / "run.toml").read_text())
    )
    out = {"output": json.dumps(str(tmp_path / "plain"))}
    run = run_config.load_run(tmp_path / "plain.toml", out)
    train(run, False)
    with pytest.raises(ConfigError, match="has no adapter"):
        hf_checkpoint.export_weights(Path(run.output), tmp_path / "out", merge=True)
