"""Pictures of a Plan: what is cut in which way, where ranks exchange, and what each rank holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import nn
from typer.testing import CliRunner, Result

import weft
from tests.cases import Fused
from tests.pipeline.test_draw import SVG
from tests.run_files import TINY
from weft.cli.app import app
from weft.core import Plan
from weft.core.errors import ConfigError
from weft.losses import next_token
from weft.models import decoder
from weft.parallel.draw_plan.rows import EdgeCrossing, HeldSlices, PlanRows, plan_rows
from weft.parallel.draw_plan.svg import COLOURS, plan_svg
from weft.parallel.draw_plan.text import plan_text

SMALL: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "layers": 2, "hidden": 24}


def plan(model: nn.Module, layout: str) -> Plan:
    return weft.plan(model, layout, batch=8, loss=next_token)


def held(rows: PlanRows) -> dict[str, HeldSlices]:
    found: dict[str, HeldSlices] = {}
    for panel in rows.panels:
        for row in panel.rows:
            if isinstance(row, HeldSlices):
                found.setdefault(row.weight, row)  # a tied head's comes again
    return found


def exchanges(rows: PlanRows) -> list[str]:
    """What crosses an edge: forward / backward."""
    found = []
    for panel in rows.panels:
        for row in panel.rows:
            if isinstance(row, EdgeCrossing):
                found.append(f"{row.letter or '-'} {row.module}: {row.forward} / {row.backward}")
    return found


def test_text_of_a_decoder() -> None:
    said = plan_text(plan_rows(plan(decoder(**SMALL), "tp2"))).plain.splitlines()
    assert [line.rstrip() for line in said] == [
        "layout tp2: 2 ranks on tp",
        "",
        "                                                         rank 0     rank 1",
        "  embedding.weight     256 x 16, rows (dim 0)            0:128      128:256",
        "  g  embedding         leaves: partial sums, then whole"
        "  forward: all-reduce, backward: identity",
        "blocks.0 to blocks.1: 2 blocks, each the same",
        "  f  attention         enters: whole"
        "                     forward: identity, backward: all-reduce",
        "  attention.wq.weight  16 x 16, columns (dim 0)          heads 0-1  heads 2-3",
        "  attention.wk.weight  8 x 16, columns (dim 0)           head 0     head 1",
        "  attention.wv.weight  8 x 16, columns (dim 0)           head 0     head 1",
        "  attention.wo.weight  16 x 16, rows (dim 1)             heads 0-1  heads 2-3",
        "  g  attention.wo      leaves: partial sums, then whole"
        "  forward: all-reduce, backward: identity",
        "  f  mlp               enters: whole"
        "                     forward: identity, backward: all-reduce",
        "  mlp.gate.weight      24 x 16, columns (dim 0)          0:12       12:24",
        "  mlp.up.weight        24 x 16, columns (dim 0)          0:12       12:24",
        "  mlp.down.weight      16 x 24, rows (dim 1)             0:12       12:24",
        "  g  mlp.down          leaves: partial sums, then whole"
        "  forward: all-reduce, backward: identity",
        "  f  head              enters: whole"
        "                     forward: identity, backward: all-reduce",
        "  head.weight          256 x 16, columns (dim 0)         0:128      128:256",
        "  head                 leaves: last dim cut"
        "              forward: identity, backward: identity",
        "",
        "f where a tensor enters, g where it leaves (Megatron-LM, Shoeybi et al. 2019)",
        "columns: a rank makes some of a linear's outputs, from all of its inputs",
        "rows: a rank reads some of a linear's inputs, or some rows of a table; its output is a"
        " partial sum",
        "Weights that are not shown are whole on every rank.",
    ]


def test_sequence_gathers_where_a_tensor_enters_and_scatters_where_it_leaves() -> None:
    rows = plan_rows(plan(decoder(**SMALL), "tp2+sequence"))
    assert exchanges(rows) == [
        "g embedding: all-reduce / identity",
        "- blocks.0: split / all-gather",
        "f attention: all-gather / reduce-scatter",
        "g attention.wo: reduce-scatter / all-gather",
        "f mlp: all-gather / reduce-scatter",
        "g mlp.down: reduce-scatter / all-gather",
        "- blocks.1: all-gather / split",
        "f head: identity / all-reduce",
        "- head: identity / identity",
    ]
    norm = held(rows)["attention_norm.weight"]
    assert norm.summed and norm.said == ("whole", "whole")
    assert not held(rows)["attention.wq.weight"].summed


def gpt2() -> nn.Module:
    t = pytest.importorskip("transformers")
    config = t.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=16, vocab_size=64)
    model: nn.Module = t.GPT2LMHeadModel(config)
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)


@pytest.mark.parametrize("build", [partial(decoder, **SMALL), Fused, gpt2, encoder])
def test_columns_divide_outputs_and_rows_inputs(build: Callable[[], nn.Module]) -> None:
    """By the modules, which the picture does not look at: what stores inputs first is another
    dim."""
    model = build()
    made = plan(model, "tp2")
    shown = held(plan_rows(made))
    outputs = {nn.Linear: 0, nn.MultiheadAttention: 0}
    seen = set()
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            row = next((r for w, r in shown.items() if f"{name}.{leaf}".endswith(w)), None)
            if row is None or parameter.dim() != 2:
                continue
            if isinstance(module, nn.Embedding):
                assert (row.cut, row.dim) == ("rows", 0)
                continue
            dim = outputs.get(type(module), 0 if isinstance(module, nn.Linear) else 1)
            assert row.cut == ("columns" if row.dim == dim else "rows"), name
            seen.add(row.cut)
    assert seen == {"columns", "rows"}
    for row in shown.values():
        spans = sorted({span for rank in row.spans for span in rank})
        assert spans[0][0] == 0 and spans[-1][1] == 1
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_fused_queries_keys_and_values_are_cut_each_by_itself() -> None:
    shown = held(plan_rows(plan(encoder(), "tp2")))
    row = shown["self_attn.in_proj_weight"]
    assert row.said == ("heads 0-1", "heads 2-3")
    assert row.spans[0] == ((0, 1 / 6), (1 / 3, 1 / 2), (2 / 3, 5 / 6))
    assert shown["linear1.weight"].said == ("0:12", "12:24")  # features, no heads


def test_a_bias_of_rows_is_added_after_the_sum() -> None:
    [panel] = plan_rows(plan(encoder(), "tp2")).panels
    names = [row.module if isinstance(row, EdgeCrossing) else row.weight for row in panel.rows]
    assert names.index("linear2.bias") == names.index("linear2") + 1
    assert names.index("self_attn.out_proj.bias") > [*names[1:]].index("self_attn") + 1


def test_ranks_share_key_heads_where_there_are_fewer() -> None:
    rows = plan_rows(plan(decoder(**SMALL), "dp2.tp4"))
    assert rows.head() == "layout dp2.tp4: 4 positions on tp, in each of 2 groups"
    assert rows.lanes == ("tp 0", "tp 1", "tp 2", "tp 3")
    key = held(rows)["attention.wk.weight"]
    assert key.said == ("head 0", "head 0", "head 1", "head 1")
    assert key.stored_whole and key.summed
    assert "stored whole, gradient summed" in plan_text(rows).plain


def test_a_tied_head_stands_at_the_end() -> None:
    rows = plan_rows(plan(gpt2(), "tp2"))
    assert exchanges(rows)[0].startswith("g transformer.wte")
    assert exchanges(rows)[-2].startswith("f lm_head")
    *_, head, _ = rows.panels[-1].rows
    assert isinstance(head, HeldSlices)
    assert (head.weight, head.cut) == ("transformer.wte.weight", "columns")
    assert held(rows)["transformer.wte.weight"].cut == "rows"


def test_a_block_with_other_rows_has_a_panel_of_its_own() -> None:
    model = decoder(**SMALL | {"layers": 4})
    model.blocks[2].mlp.up.bias = nn.Parameter(model.blocks[2].mlp.up.weight[:, 0].detach())
    panels = plan_rows(plan(model, "tp2")).panels
    assert [panel.modules for panel in panels] == [
        (),
        ("blocks.0", "blocks.1"),
        ("blocks.2",),
        ("blocks.3",),
        (),
    ]


def test_svg_has_each_slice_in_the_colour_of_its_rank() -> None:
    root = ElementTree.fromstring(plan_svg(plan_rows(plan(decoder(**SMALL), "tp2"))))
    found = {}
    for group in root.iter(f"{SVG}g"):
        tip = group.findtext(f"{SVG}title") or ""
        sides = [
            [float(rect.get(side, 0)) for side in ("x", "y", "width", "height")]
            for rect in group.iter(f"{SVG}rect")
        ]
        paints = [rect.get("fill") for rect in group.iter(f"{SVG}rect")]
        whole, own = sides[0], sides[1]
        share = [
            (own[0] - whole[0]) / whole[2],
            (own[1] - whole[1]) / whole[3],
            own[2] / whole[2],
            own[3] / whole[3],
        ]
        found[tip] = paints[1], [round(part, 2) for part in share]
    wq, wo = "attention.wq.weight, rank {}: heads {}", "attention.wo.weight, rank {}: heads {}"
    assert found[wq.format(0, "0-1")] == (COLOURS[0], [0, 0, 0.5, 1])
    assert found[wq.format(1, "2-3")] == (COLOURS[1], [0.5, 0, 0.5, 1])
    assert found[wo.format(0, "0-1")] == (COLOURS[0], [0, 0, 1, 0.5])
    assert found[wo.format(1, "2-3")] == (COLOURS[1], [0, 0.5, 1, 0.5])
    words = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert words.count("\u2193 forward: all-reduce") == 3  # embedding, attention, mlp
    assert words.count("\u2191 backward: all-reduce") == 3  # attention, mlp, head


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_a_layout_that_cuts_no_layer_is_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="its ranks divide no layer"):
        plan_rows(plan(decoder(**SMALL), layout))


def test_more_ranks_than_a_picture_shows_are_refused() -> None:
    with pytest.raises(ConfigError, match="shows at most 8 ranks, and tp has 16"):
        plan_rows(plan(decoder(**SMALL | {"dim": 64, "heads": 16, "hidden": 64}), "tp16"))


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)

    def run(*args: str) -> Result:
        given = ["draw", "--plan", str(tmp_path / "run.toml"), *args]
        return CliRunner().invoke(app, given, env={"NO_COLOR": "1", "FORCE_COLOR": None})

    said = run("--layout", "pp2.tp2", "--set", "model.layers=2")
    assert "2 positions on tp, in each of 2 groups" in said.output
    assert "Each group holds only the weights of its own stages" in said.output
    figures = json.loads(run("--layout", "tp2", "--json").output)
    assert figures["axes"] == ["tp"] and figures["panels"][0]["rows"][0]["said"][0] == "0:128"
    image = tmp_path / "x.svg"
    assert run("--layout", "tp2", "--out", str(image)).exit_code == 0
    ElementTree.fromstring(image.read_text())
    for args, message in (
        (("--layout", "tp2", "--out", "x.json"), "Name a .svg"),
        (("--layout", "tp2", "--ranks", "2"), "applies only to schedules and --collective"),
        (("--layout", "tp3"), "layout = "),
        (("1f1b",), "--plan = "),
    ):
        refused = run(*args)
        assert refused.exit_code == 2 and message in " ".join(refused.output.split())
