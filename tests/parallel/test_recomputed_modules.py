"""train.recompute with names of modules: equal to one device, with as many forwards as it says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Subject
from weft.core import ConfigError, load_run
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.train import check_run
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference, run_reference


class Part(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(x).relu()))


class Attributes(nn.Module):
    """Its blocks are in no list."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.block1, self.block2, self.block3 = (Part(dropout) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block3(self.block2(self.block1(self.embedding(input_ids)))))


def build_attributes() -> nn.Module:
    torch.manual_seed(0)
    return Attributes()


SUBJECTS = {
    "attributes": (Subject(build_attributes), ("block1", "block[3]")),
    "list": (
        Subject(partial(decoder, VOCAB, 32, 3, 4, 2, seq_len=LENGTH, dropout=0.1)),
        ("blocks.0", "*.2"),
    ),
}
FOUND = {"attributes": ("block1", "block3"), "list": ("blocks.0", "blocks.2")}


@cache
def reference(name: str) -> Reference:
    return run_reference(replace(SUBJECTS[name][0]).case(), 2)


def verified(name: str, layout: str) -> LayoutResult:
    subject, patterns = SUBJECTS[name]
    case = replace(subject, plan=(("recompute", patterns),)).case()
    return check_layout(case, layout, reference(name))


@pytest.mark.grid(4, ci=2)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_it_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = pool.run(verified, name, layout, world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_named_runs_again_and_nothing_else(name: str) -> None:
    subject, patterns = SUBJECTS[name]
    case, model = subject.case(), subject.build().double()
    plan = weft.plan(model, "dp1", batch=BATCH, loss=subject.loss, recompute=patterns)
    assert plan.recomputed() == FOUND[name]
    assert f"recompute {', '.join(FOUND[name])}" in str(plan)
    engine = weft.Engine(model, plan, optimizer=case.optimizer, loss=case.loss, device="cpu")
    ran: list[str] = []
    leaves = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for path, module in leaves.items():
        module.register_forward_pre_hook(lambda *_, path=path: ran.append(path))
    engine.step(case.batch(0, 0, 1))
    for path in leaves:
        times = 2 if path.startswith(tuple(f"{each}." for each in FOUND[name])) else 1
        assert ran.count(path) == times * plan.accumulate, path


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["block.0"], "'block.0': matches no module. Did you mean \"blocks.0\""),
        (["blocks.0.mlp"], 'blocks.0.mlp is inside of blocks.0.*Write "blocks.0"'),
        ([], "is not a way to recompute"),
        ([1], "is not a way to recompute"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, names: list[Any], says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nbuild = "weft.models:decoder"\ndim = 16\nheads = 2\n[data]\n'
        'build = "weft.data:stdlib"\nseq_len = 16\n[train]\nbatch = 8\nsteps = 2\n'
        f"recompute = {names}\n"
    )
    with pytest.raises(ConfigError, match=says):
        check_run(load_run(path))


def test_a_module_that_holds_blocks_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = decoder(VOCAB, 16, 2, 2, 2, seq_len=LENGTH)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.body(input_ids)

    with pytest.raises(ConfigError, match=r'body holds blocks.*as "body\.blocks\.0"'):
        weft.plan(Outer(), "dp1", batch=4, loss=next_token, recompute=["body"])


def test_masks_would_be_others() -> None:
    with pytest.raises(ConfigError, match="block1 has dropout and is in no list of blocks"):
        weft.plan(Attributes(0.2), "dp1", batch=4, loss=next_token, recompute=["block1"])
