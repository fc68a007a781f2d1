"""Files that others wrote, changed at random: each is read as what it says, or refused by name, and
nothing else.

FUZZ=100000 takes so many of each kind; a few hundred go with every run of the tests.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from weft import checkpoint
from weft.checkpoint import Retention
from weft.core import run_config
from weft.core.action_costs import ActionCosts
from weft.core.errors import CheckpointError, WeftError
from weft.core.layout import Layout
from weft.core.schedule import from_csv, to_csv
from weft.core.shards import whole_shard
from weft.pipeline import schedules
from weft.planner.cost import hardware, transformer_work
from weft.planner.cost.estimate import estimate
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.train import hf_checkpoint

COUNT = int(os.environ.get("FUZZ", "300"))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
SMALL = transformer_work.transformer_work(
    transformer_work.TransformerDims(2, 64, 4, 100, 32, 256), "fp32"
)
WORDS = (
    "=",
    "[",
    "]",
    '"',
    "\n",
    "1",
    "-1",
    "1e400",
    "nan",
    "inf",
    "true",
    "{}",
    "[]",
    "''",
    "\0",
    "é",
    "dp2",
    "..",
    "0x1",
    "1979-05-27",
    "9" * 21,
    "[model]",
    "hf = 1",
    "build = 3",
    "F0",
    "B1",
    ",,",
    "W",
    "../x",
    "\ufeff",
)


def changed(text: str, dice: random.Random) -> str:
    """Letters lost, put in, repeated."""
    letters = list(text)
    for _ in range(dice.randint(1, 4)):
        kind, at = dice.randrange(4), dice.randrange(len(letters) + 1)
        if kind == 0:
            del letters[max(0, at - 1) : at + dice.randint(0, 8)]
        elif kind == 1:
            letters[at:at] = dice.choice(WORDS)
        elif kind == 2:
            other = dice.randrange(len(letters) + 1)
            letters[at:at] = letters[other : other + dice.randint(1, 30)]
        else:
            letters[at:at] = chr(dice.randrange(1, 300))
    return "".join(letters)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """A bit turned, bytes lost, put in, overwritten, turned round; or the end lost."""
    found, kind = bytearray(data), dice.randrange(6)
    first = dice.randrange(len(found))
    last = min(len(found), first + dice.randint(1, 40))
    if kind == 0:
        found[first] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del found[first:]
    elif kind == 2:
        found += dice.randbytes(dice.randint(1, 20))
    elif kind == 3:
        found[first:last] = dice.randbytes(last - first)
    elif kind == 4:
        del found[first:last]
    else:
        found[first:last] = found[first:last][::-1]
    return bytes(found)


def each(texts: list[str], seed: int) -> Iterator[str]:
    dice = random.Random(seed)
    for _ in range(COUNT):
        yield changed(dice.choice(texts), dice)


def survives(read: Callable[[], object], what: str) -> None:
    try:
        read()
    except WeftError as error:
        assert str(error)
    except BaseException as error:  # what it must not be
        raise AssertionError(f"{type(error).__name__}: {error}, for\n{what}") from error


def test_run_files(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text in each([path.read_text() for path in EXAMPLES], 0):
        file.write_text(text, encoding="utf-8")
        survives(lambda: run_config.load_run(file), text)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_files_of_a_checkpoint_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"layers.{i}": torch.randn(7, 5) for i in range(4)} | {"step": torch.tensor(3)}
    pieces = [whole_shard(name, tensor) for name, tensor in state.items()]
    checkpoint.save_checkpoint(
        tmp_path, 1, pieces, {"steps_done": 1}, {"layout": "dp1"}, Retention(1)
    )
    files = {path: path.read_bytes() for path in sorted((tmp_path / "step-000001").iterdir())}
    dice = random.Random(0)
    for _ in range(COUNT):
        path = dice.choice([*files])
        data = damaged(files[path], dice)
        if data == files[path]:
            continue
        path.write_bytes(data)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with pytest.raises(CheckpointError):
            checkpoint.load_checkpoint(
                tmp_path, None, [whole_shard(name, tensor) for name, tensor in into.items()]
            )
        assert not any(bool(tensor.any()) for tensor in into.values())
        path.write_bytes(files[path])


def test_tables_of_schedules() -> None:
    made = [
        to_csv(schedules.make_schedule(name, 2, 4)) for name in ("1f1b", "gpipe", "zb-h1", "zb-v")
    ]
    for text in each(made, 1):
        survives(lambda text=text: schedules.require_valid(from_csv(text)), text)


def test_sheets_of_hardware(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    for text in each(
        [path.read_text(encoding="utf-8") for path in sorted(hardware.SHEETS.glob("*.toml"))], 4
    ):
        file.write_text(text, encoding="utf-8")
        survives(lambda: priced(Cluster.parse(str(file))), text)


def priced(cluster: Cluster) -> None:
    """What is read can be planned with."""
    sheet = cluster.hardware
    era, choices = (
        next(iter(sheet.eras.values())),
        LayoutBatch.of([Layout.parse("dp2.tp2")], batch=8),
    )
    practice = PrecisionPolicy(compute=next(iter(sheet.device.flops)))
    with np.errstate(all="ignore"):  # of sizes that no machine has
        assert estimate(SMALL, choices, cluster, era, practice).step_s.shape == (1,)


def test_costs() -> None:
    text = ActionCosts(forward_s=[1.0, 2.0], backward_s=1.0, comm_s=0.5).json()
    for other in each([text], 2):
        survives(partial(ActionCosts.from_json, other), other)


def test_safetensors_of_a_directory(tmp_path: Path) -> None:
    """As `weft checkpoint import` reads them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(
        tmp_path / "hf"
    )
    (tmp_path / "run.toml").write_text(
        '[model]\nhf = "hf"\n[data]\nbuild = "weft.data:stdlib"\n[train]\nbatch = 1\nsteps = 1\n',
        encoding="utf-8",
    )
    run = run_config.load_run(tmp_path / "run.toml", {"output": '"' + str(tmp_path / "out") + '"'})
    file = tmp_path / "hf" / "model.safetensors"
    right, dice = file.read_bytes(), random.Random(3)
    length = int.from_bytes(right[:8], "little")
    for _ in range(min(COUNT, max(60, COUNT // 20))):  # each makes a run
        header = damaged(right[: 8 + length], dice)
        file.write_bytes(header + right[8 + length :])
        survives(lambda: hf_checkpoint.import_weights(tmp_path / "hf", run), repr(header))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
