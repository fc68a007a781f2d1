"""layout.fsdp_units: what is gathered together. Equal to one device, with the collectives that it
says, and refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Subject, batch_of, tokens
from weft.core import ConfigError, load_run
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.train import check_run
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference, run_reference

DEEP = Subject(partial(decoder, VOCAB, 32, 4, 4, 2, seq_len=LENGTH, dropout=0.1), tokens)
LINEARS = ("blocks.*.w?", "blocks.*.gate", "blocks.*.up", "blocks.*.down")
# what is asked for -> how many units there are beside the rest of the model
CHOICES: dict[str, tuple[Any, int]] = {
    "linears": (LINEARS, 28),
    "pairs": (2, 2),
    "threes": (3, 2),
    "model": ("model", 0),
    "mixed": (("blocks.[02].mlp", "blocks.[13]", "embedding", "head"), 6),
}


def asking(name: str) -> Subject:
    return replace(DEEP, plan=(("accumulate", 2), ("fsdp_units", CHOICES[name][0])))


@cache
def reference() -> Reference:
    return run_reference(DEEP.case(), 2)


def verified(name: str, layout: str, **more: Any) -> LayoutResult:
    subject = asking(name)
    case = replace(subject, plan=(*subject.plan, *more.items())).case()
    return check_layout(case, layout, reference())


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["fsdp2", "dp2.fsdp2", "fsdp2.tp2", "pp2.fsdp2"])
@pytest.mark.parametrize("name", ["linears", "pairs", "model", "mixed"])
def test_it_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = pool.run(verified, name, layout, world=4 if "." in layout else 2)[0]
    assert result.passed, result


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("linears", {"recompute": "full"}),
        ("linears", {"fsdp_prefetch": 2}),
        ("pairs", {"recompute": "full", "fsdp_prefetch": 2}),
        ("mixed", {"logits": "chunks"}),  # the loss reads the head's weight after its forward
    ],
)
def test_it_goes_with_other_options(pool: Any, name: str, more: dict[str, Any]) -> None:
    result = pool.run(partial(verified, name, "fsdp2", **more), world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("name", CHOICES)
def test_the_plan_says_which_units_there_are(name: str) -> None:
    asked, count = CHOICES[name]
    plan = weft.plan(DEEP.build(), "fsdp2", batch=BATCH, loss=next_token, fsdp_units=asked)
    units = [s for s in plan.steps if s.gather is not None and s.module]
    assert len(units) == count
    gathered = [p.name for s in plan.steps if s.gather is not None for p in s.params]
    assert sorted(gathered) == sorted(w.name for w in plan.weights)
    said = next(line for line in str(plan).splitlines() if "fsdp_units" in line)
    assert (f"{count} units" in said) == (count > 0), said


def held_at_once(name: str) -> tuple[int, int]:
    """The most elements of gathered weights of blocks that there are as a linear of a block runs,
    and all elements of the blocks."""
    subject = asking(name)
    case = subject.case()
    model = case.model()
    layout = "fsdp2"
    engine = weft.Engine(
        model, case.plan(model, layout), optimizer=case.optimizer, loss=case.loss, device="cpu"
    )
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        here = [p for p in model.blocks.parameters() if type(p).__name__ != "DTensor"]
        most = max(most, sum(p.numel() for p in here))

    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(count)
    engine.step(engine.local(batch_of(subject, 0, 0, 1)))
    whole = sum(w.shape.numel() for w in decoder(VOCAB, 32, 4, 4, 2).blocks.parameters())
    return most, whole


def test_units_are_freed_after_their_forward(pool: Any) -> None:
    found = {name: pool.run(held_at_once, name, world=2)[0] for name in ("pairs", "model")}
    most, whole = found["model"]
    assert most == whole
    most, whole = found["pairs"]
    assert most == whole // 2


class Several(nn.Module):
    """Tied weights, attention that reads its linear's weight, and modules that hold no block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.parts = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for part in self.parts:  # which itself is not called
            x = part(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("units", "says"),
    [
        (["block.0"], "'block.0': matches no module"),
        (["parts.1"], "'parts.1': matches no module with weights"),
        (["parts.*", "parts"], "'parts.*': parts.0 is inside of parts, which 'parts' makes one"),
        (["head"], "'head': embedding.weight .*head.weight|'head': head.weight in head and embed"),
        (["attention.out_proj"], "its weights are read by attention, .* or name attention"),
        (["parts"], "parts': its weights are read by parts.0, which runs outside of it"),
        (2, "fsdp_units = 2: the model has no list of repeated blocks"),
        ("whole", "fsdp_units = 'whole': is not a choice of units"),
        (0, "fsdp_units = 0: is not a choice of units"),
    ],
)
def test_units_that_do_not_fit(units: Any, says: str) -> None:
    sample = {"input_ids": tokens()["input_ids"][:2]}
    with pytest.raises(ConfigError, match=says):
        weft.plan(Several(), "fsdp2", batch=8, loss=next_token, sample=sample, fsdp_units=units)


def test_units_that_run_again_are_not_gathered_ahead() -> None:
    subject = asking("linears")
    more = ("fsdp_prefetch", 2), ("recompute", 2)
    case = replace(subject, plan=(*subject.plan, *more)).case()
    with pytest.raises(ConfigError, match=r"fsdp_prefetch = 2: .* the units in blocks\.0"):
        case.plan(case.model(), "fsdp2")


def test_blocks_of_a_unit_lie_in_one_stage() -> None:
    case = asking("threes").case()
    with pytest.raises(ConfigError, match=r"blocks\.0 and blocks\.1 and blocks\.2 are one unit"):
        case.plan(case.model(), "pp2.fsdp2")


def test_a_head_that_a_stage_frees_makes_no_chunks() -> None:
    for logits, heads in (("auto", ()), ("chunks", None)):
        case = replace(asking("mixed"), plan=(*asking("mixed").plan, ("logits", logits))).case()
        if heads is None:
            with pytest.raises(
                ConfigError, match=r"train\.logits = 'chunks': a unit .* holds head"
            ):
                case.plan(case.model(), "pp2.fsdp2")
        else:
            assert case.plan(case.model(), "pp2.fsdp2").heads == heads
            assert case.plan(case.model(), "fsdp2").heads == ("head",)


def run_file(tmp_path: Path, layout: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nbuild = "weft.models:decoder"\ndim = 16\nheads = 2\nlayers = 2\n[data]\n'
        f'build = "weft.data:stdlib"\nseq_len = 16\n[layout]\n{layout}\n[train]\nbatch = 8\n'
        "steps = 2\n"
    )
    return path


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ('axes = "dp2"\nfsdp_units = "model"', "has no effect with layout dp2, which gathers no"),
        ('axes = "fsdp2"\nfsdp_units = []', "layout.fsdp_units = .*: is not a choice of units"),
        ('axes = "fsdp2"\nfsdp_units = true', "layout.fsdp_units = .*: is not a choice of units"),
        ('axes = "fsdp2"\nfsdp_units = ["blocks.9"]', "matches no module. Did you mean"),
    ],
)
def test_a_run_file_that_does_not_fit(tmp_path: Path, layout: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_run(load_run(run_file(tmp_path, layout)))
