"""Tensor parallel of nn.MultiheadAttention and torch's own transformers: divided by heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.cases import Subject, global_batch, laid, reference, seeded, tokens
from tests.verification.nets_of_multihead import MIXERS, Encoder, Translator
from tests.verification.nets_to_trace import Net
from weft.core import COPY
from weft.core.errors import Refusal
from weft.nn.losses import next_token
from weft.verification.compare import check_layout

SUBJECTS = {
    **{
        name: Subject(partial(Net, expected.mixer), tokens, next_token)
        for name, expected in MIXERS.items()
    },
    "encoder": Subject(Encoder, tokens, next_token),
    "translator": Subject(partial(Translator, True), tokens, next_token),
    "translator-time-major": Subject(partial(Translator, False), tokens, next_token),
}


def cut(name: str, layout: str = "tp2") -> set[str]:
    """The parameters that tensor parallel divides."""
    table = laid(SUBJECTS[name], seeded(SUBJECTS[name].build), layout).params()
    return {n for n, axes in table.items() if "tp" in axes and axes["tp"].stored != COPY}


@pytest.mark.parametrize("name", MIXERS)
def test_what_is_cut(name: str) -> None:
    """In both blocks: no more and no less."""
    inside = {n for n in cut(name) if n.startswith("parts.")}
    assert inside == {f"parts.{i}.own.{key}" for i in (0, 1) for key in MIXERS[name].cut}


@pytest.mark.parametrize(("name", "count"), [("encoder", 2), ("translator", 6)])
def test_every_attention_of_a_transformer_is_cut(name: str, count: int) -> None:
    assert sum(n.endswith("in_proj_weight") for n in cut(name)) == count


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp4", marks=pytest.mark.grid)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_equals_one_device(pool: Any, name: str, layout: str) -> None:
    check(pool, name, layout)


@pytest.mark.parametrize("layout", ["dp2.tp2", "fsdp2.tp2", "pp2.tp2", "tp2+sequence"])
def test_encoder_on_more_axes(pool: Any, layout: str) -> None:
    check(pool, "encoder", layout)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("translator", "multihead_attn.out_proj attends to another sequence"),
        ("time-major", "own.attn takes positions before samples"),
        ("reads-and-feeds", "attn is left whole, and would attend to a part of the positions"),
    ],
)
def test_sequence_is_refused(name: str, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        cut(name, "tp2+sequence")


def test_heads_that_ranks_do_not_divide_are_left_whole() -> None:
    plan = laid(SUBJECTS["encoder"], seeded(SUBJECTS["encoder"].build), "tp8")
    assert not any("in_proj" in p.name for step in plan.steps for p in step.params)
    assert any("8 ranks do not divide its 4 heads" in note for note in plan.notes)


def engine_of(layout: str) -> weft.Engine:
    subject = SUBJECTS["encoder"]
    model = seeded(subject.build)
    plan, sgd = laid(subject, model, layout), partial(torch.optim.SGD, lr=0.1)
    return weft.Engine(model, plan, optimizer=sgd, loss=subject.loss, device="cpu")


def saved(layout: str, folder: Path, resume: bool) -> dict[str, torch.Tensor]:
    """The weights that a rank has after a step, which are saved."""
    engine = engine_of(layout)
    if resume:
        weft.checkpoint.load(engine, folder)
    engine.step(engine.local(global_batch(SUBJECTS["encoder"], int(resume))))
    weft.checkpoint.save(engine, folder)
    return {name: p.detach() for name, p in engine.params.items()}


def test_weights_are_saved_under_their_names_and_whole(pool: Any, tmp_path: Path) -> None:
    saved("dp1", tmp_path / "one", False)
    want = saved("dp1", tmp_path / "one", True)
    pool.run(saved, "tp2", tmp_path / "two", False, world=2)
    found = saved("dp1", tmp_path / "two", True)
    assert {*found} == {*want}
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def evaluated(layout: str) -> float:
    """A loss of what padding does not hide."""
    engine, batch = engine_of(layout), global_batch(SUBJECTS["encoder"], 0)
    batch["labels"][:, -2:] = -100
    return float(engine.evaluate(engine.local(batch)).loss)


@pytest.mark.parametrize("layout", ["tp2", "pp2.tp2"])
def test_evaluation_with_padding(pool: Any, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    assert pool.run(evaluated, layout, world=world) == pytest.approx([evaluated("dp1")] * world)


def check(pool: Any, name: str, layout: str) -> None:
    subject = SUBJECTS[name]
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]
    assert found.passed, found
