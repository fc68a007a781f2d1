"""What can be, what it would take, and which of it is best: the planner's search, held to weft's
own planner."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.core.errors import LayoutError, Refusal
from weft.core.layout import Layout
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.parallel import SPREADING, strategies as parallel
from weft.planner.cost.hardware import GIB, Cluster, Device, Era, Hardware, Tier
from weft.planner.cost.layout_batch import AXES, LayoutBatch
from weft.planner.cost.model_work import ModelWork
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.profile import profile_model
from weft.planner.search import ranking
from weft.planner.search.baselines import baseline_patterns, baselines, why_slower
from weft.planner.search.candidates import (
    Candidates,
    find_candidates,
    find_left_out,
    join_candidates,
    refusal,
    with_schedules,
)
from weft.planner.search.constraints import SCHEDULES
from weft.planner.search.feasibility import shorten_model
from weft.planner.search.layout_pattern import ANY, LayoutPattern, searched_options
from weft.planner.search.query import PlanQuery
from weft.planner.search.ranking import TIE, price, rank, rows_of, simulate_rows
from weft.train import run_checks

BATCH, LENGTH = 8, 12
DENSE: dict[str, Any] = {"heads": 4, "kv_heads": 2}
ROUTED: dict[str, Any] = {**DENSE, "experts": 2, "active": 1, "hidden": 32}


def cluster(devices: int, memory_gib: float = 80.0, node: int = 8) -> Cluster:
    """Devices of 1 PFLOP/s, in nodes; between these a tenth of the bandwidth."""
    sheet = Hardware(
        name="test",
        title="a device for tests",
        source="these tests",
        kind="cuda",
        device=Device(
            memory_gib=memory_gib,
            memory_bps=3e12,
            host_bps=5e10,
            flops={"bf16": 1e15, "fp32": 1e14},
        ),
        tiers=(
            Tier(name="inside", devices=node, bps=4e11, latency_s=1e-6),
            Tier(name="outside", devices=0, bps=4e10, latency_s=1e-5),
        ),
        eras={"eager": Era(context_gib=0.0, reserved=1.0)},
    )
    return Cluster(hardware=sheet, devices=devices)


def bare(**arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return decoder(
            **{"vocab": 64, "dim": 32, "layers": 2, "seq_len": LENGTH, **DENSE, **arguments}
        )


def sample() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    return {"input_ids": ids}


@cache
def work(routed: bool = False, **arguments: Any) -> ModelWork:
    return profile_model(bare(**(ROUTED if routed else {}), **arguments), sample(), next_token)


def question(
    devices: int, what: ModelWork | None = None, batch: int = BATCH, **where: Any
) -> PlanQuery:
    return PlanQuery(
        what or work(), batch, cluster(devices, **where), Era(), PrecisionPolicy(compute="fp32")
    )


def large(layers: int = 32, tokens: float = 8192) -> ModelWork:
    """A model of 8e9 parameters, of numbers."""
    from weft.planner.cost import transformer_work

    return transformer_work.transformer_work(
        transformer_work.TransformerDims(
            layers=layers,
            hidden=4096,
            heads=32,
            kv_heads=8,
            vocab=128256,
            seq_len=int(tokens),
            ffn=14336,
            gated=True,
            tied=False,
        )
    )


def everything(
    asked: PlanQuery, devices: int, exhaustive: bool = False, pattern: LayoutPattern = ANY
) -> Candidates:
    found = find_candidates(asked, devices, pattern, exhaustive)
    return join_candidates([found, with_schedules(found, asked, pattern, exhaustive)])


# ---- candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "batch"), [(1, 8), (6, 12), (64, 96), (1024, 512)])
@pytest.mark.parametrize("routed", [False, True])
def test_candidates_take_all_devices_and_the_whole_batch(
    devices: int, batch: int, routed: bool
) -> None:
    found = everything(question(devices, work(routed), batch), devices).choices
    assert len(found)
    assert (found.world == devices).all()
    assert (found.batch == batch).all()
    assert (found.microbatch >= 1).all() and (found.accumulate >= 1).all()


@pytest.mark.parametrize("routed", [False, True])
def test_candidates_are_the_choices_of_the_layouts_that_they_name(routed: bool) -> None:
    """Arrays made at once are those made of each layout by itself."""
    found = everything(question(8, work(routed)), 8, exhaustive=True)
    places = np.random.default_rng(0).permutation(len(found))[:300]
    found = found.take(places)
    names = [found.schedule(i)[0] or "1f1b" for i in range(len(found))]
    again = LayoutBatch.of(
        [found.layout(i) for i in range(len(found))],
        batch=BATCH,
        accumulate=found.choices.accumulate.tolist(),
        recompute=[found.recompute(i) for i in range(len(found))],
        schedule=names,
        chunks=found.choices.chunks.tolist(),
    )
    for axis in AXES:
        assert (found.choices.sizes[axis] == again.sizes[axis]).all(), axis
        live = again.sizes[axis] > 1
        assert (found.choices.strides[axis][live] == again.strides[axis][live]).all(), axis
    for name in (
        "experts",
        "sequence",
        "gather",
        "zero",
        "shards",
        "offload",
        "microbatch",
        "again",
        "selective",
    ):
        assert (getattr(found.choices, name) == getattr(again, name)).all(), name


def test_no_candidate_comes_twice() -> None:
    found = everything(question(8, work(True)), 8, exhaustive=True)
    c = found.choices
    columns = [
        *(c.sizes[axis] for axis in AXES),
        found.spread,
        c.sequence,
        c.zero,
        c.offload,
        c.schedule,
        c.chunks,
    ]
    columns += [c.microbatch, c.again, c.selective, c.gather]
    assert len(np.unique(np.stack(columns, 1), axis=0)) == len(found)


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize(
    ("routed", "world", "without"), [(False, 4, ""), (True, 4, "pp"), (False, 8, "pp")]
)
def test_rules_allow_what_weft_lays(routed: bool, world: int, without: str) -> None:
    """A third of all layouts of so many ranks: what weft's planner takes is among the candidates,
    and what it refuses is not."""
    asked = question(world, work(routed))
    model = decoder(vocab=64, dim=32, layers=2, seq_len=LENGTH, **ROUTED) if routed else bare()
    found = find_candidates(asked, world, exhaustive=True)
    every = [text for text in _layouts(world, routed) if Layout.parse(text).size(without) == 1]
    some = random.Random(world).sample(every, len(every) // 3)
    named = {str(found.layout(i)) for i in range(len(found)) if found.layout(i).size(without) == 1}
    assert named <= {*every}
    named &= {*some}
    taken, refused = set(), {}
    for text in some:
        try:
            laid = weft.plan(model, text, batch=BATCH, loss=next_token, sample=sample())
            run_checks.check_sizes(model, [{"input_ids": sample()["input_ids"][0]}], [laid])
            taken.add(text)
        except Refusal as error:
            refused[text] = str(error)
    assert len(taken) > 10 and len(refused) >= 3
    assert named == taken, ({t: refused[t] for t in named - taken}, taken - named)


def _layouts(world: int, routed: bool) -> list[str]:
    """As the search writes them: each axis with each of its options that is not its default,
    experts or not."""
    own = {"fsdp": ("", "+zero1", "+zero2"), "tp": ("", "+sequence"), "cp": ("", "+gather")}
    choices = []
    for axis in AXES:
        spread = ("", "+ep") if routed and axis in SPREADING else ("",)
        options = [a + b for a in own.get(axis, ("",)) for b in spread]
        choices.append(
            ["", *(f"{axis}{n}{o}" for n in range(2, world + 1) if world % n == 0 for o in options)]
        )
    texts = [".".join(filter(None, chosen)) for chosen in product(*choices)]
    return [text for text in texts if text and Layout.parse(text).world == world]


def test_options_of_patterns_are_those_of_the_parallelisms() -> None:
    for axis in parallel.registry():
        assert set(searched_options(axis)) <= set(parallel.allowed_options(axis)), axis
    assert "ulysses" not in searched_options("cp") and "ring" in searched_options("cp")


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [
        ("tp4.*", lambda layout: layout.size("tp") == 4),
        (
            "fsdp2+zero2.*",
            lambda layout: layout.size("fsdp") == 2 and layout.options_of("fsdp") == ("zero2",),
        ),
        ("dp*.tp2", lambda layout: set(layout.axes) <= {"dp", "tp"} and layout.size("tp") == 2),
        ("tp*+sequence.*", lambda layout: layout.options_of("tp") == ("sequence",)),
        ("cp*+gather.*", lambda layout: layout.options_of("cp") == ("gather",)),
        ("cp2+ring.*", lambda layout: layout.size("cp") == 2 and not layout.options_of("cp")),
        ("fsdp*+offload.*", lambda layout: "offload" in layout.options_of("fsdp")),
        ("pp*+gpipe.*", lambda layout: layout.size("pp") > 1),
        ("vp*.dp*", lambda layout: set(layout.axes) <= {"dp", "vp"}),
    ],
)
def test_what_a_pattern_fixes(pattern: str, holds: Any) -> None:
    parsed, asked = LayoutPattern.parse(pattern), question(8, work(layers=4))
    found = find_candidates(asked, 8, parsed, exhaustive=True)
    free = find_candidates(asked, 8, exhaustive=True)
    named = {str(found.layout(i)) for i in range(len(found))}
    assert named and all(holds(Layout.parse(text)) for text in named)
    if "offload" not in pattern:  # which no search looks at unasked
        assert named == {
            text for i in range(len(free)) if holds(Layout.parse(text := str(free.layout(i))))
        }
    if "gpipe" in pattern:
        assert {found.schedule(i)[0] for i in range(len(found))} == {"gpipe"}
        assert not len(with_schedules(found, asked, parsed, exhaustive=True))


def test_keys_are_gathered_where_that_is_asked_or_the_size_is() -> None:
    asked = question(8, large())
    for pattern, exhaustive, methods in (
        ("*", False, {False}),
        ("*", True, {False, True}),
        ("cp2.*", False, {False, True}),
        ("cp*+gather.*", False, {True}),
        ("cp*+ring.*", True, {False}),
        ("dp*.tp2", False, set()),
    ):
        found = find_candidates(asked, 8, LayoutPattern.parse(pattern), exhaustive)
        assert set(found.choices.gather[found.choices.sizes["cp"] > 1].tolist()) == methods, pattern
        convention = "keys of cp round a ring"
        assert (convention in found.conventions) == (pattern == "*" and not exhaustive)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("xp4.*", "there is no axis 'xp'"),
        ("tp.*", "is not an axis with a size"),
        ("tp4+zero1.*", "no option"),
        ("tp2.tp4", "is named twice"),
        ("tp0.*", "has size 0"),
        ("cp2+ulysses.*", "Write ulysses2, which"),
    ],
)
def test_patterns_that_cannot_be(pattern: str, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        LayoutPattern.parse(pattern)


def test_what_the_rules_leave_out_is_said() -> None:
    said = {(one.axis, one.sizes): one.why for one in find_left_out(question(16), 16)}
    assert said[("tp", (8, 16))] == "4 heads"
    assert said[("ep", (2, 4, 8))] == "the model has no experts"
    assert said[("dp", (16,))] == "a batch of 8 does not divide over 16 data ranks"
    assert (
        refusal({"cp": 4, "ulysses": 1}, question(16)) == "12 positions do not divide into 8 pieces"
    )


def test_every_schedule_is_tried_where_it_is_of_use() -> None:
    asked = question(4, work(layers=8), batch=64)
    found = everything(asked, 4).choices
    seen = {SCHEDULES[i] for i in np.unique(found.schedule[found.sizes["pp"] > 1])}
    assert seen == set(SCHEDULES) - {"naive"}
    interleaved = (found.schedule == SCHEDULES.index("interleaved")) & (found.sizes["pp"] > 1)
    assert (found.accumulate % found.sizes["pp"] == 0)[interleaved].all()
    assert (found.sizes["pp"] * found.chunks <= 8).all()


# ---- ranking -------------------------------------------------------------------------------------


def test_pipelines_that_are_not_priced_with_every_schedule_would_not_have_won(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best of all choices, each priced, is the best that the search finds, and so are those of
    the next layouts."""
    monkeypatch.setattr(ranking, "simulate_rows", lambda question, rows: rows)
    monkeypatch.setattr(ranking, "TIE", 1e-12)
    asked = question(32, large(), batch=64)
    pattern = LayoutPattern.parse("pp4.*")
    every = everything(asked, 32, pattern=pattern)
    prices = price(asked, every)
    fits = prices.over_bytes <= 0
    kinds, best = every.kinds, {}
    for place in np.flatnonzero(fits):
        best[kinds[place]] = min(best.get(kinds[place], np.inf), prices.step_s[place])
    found = rank(asked, pattern)
    assert found.fits and found.priced < len(every)
    assert [row.step_s for row in found.rows[:10]] == pytest.approx(sorted(best.values())[:10])
    assert any(row.schedule not in ("", "1f1b") for row in found.rows)


def test_the_order_is_by_time_and_of_nearly_equal_times_by_axes() -> None:
    found = rank(question(64, large(), batch=512))
    times = np.array([row.step_s for row in found.rows])
    assert (times[1:] > times[:-1] / (1 + TIE) ** 1.001).all()
    first, quickest = found.rows[0], min(found.rows, key=lambda row: row.step_s)
    assert first.step_s <= quickest.step_s * (1 + TIE)
    assert len(Layout.parse(first.layout).axes) <= len(Layout.parse(quickest.layout).axes)
    assert len({row.layout for row in found.rows}) == len(found.rows)
    for row in found.rows:
        assert row.fits and row.held_bytes <= 80 * GIB
        assert sum(row.time.values()) == pytest.approx(row.step_s)


def test_a_simulation_agrees_with_the_closed_form() -> None:
    """Stages of equal work and messages that take no time: then 1F1B's formula is exact, and so is
    what is left out."""
    asked = question(8, large(), batch=512)
    hardware = asked.cluster.hardware
    tiers = tuple(
        tier.model_copy(update={"bps": 1e18, "latency_s": 0.0}) for tier in hardware.tiers
    )
    fast = hardware.model_copy(update={"tiers": tiers})
    blocks = tuple(block for block in asked.work.blocks if block.repeated)
    asked = replace(
        asked,
        work=replace(asked.work, blocks=blocks, vocab=0),
        cluster=Cluster(hardware=fast, devices=8),
    )
    found = find_candidates(asked, 8, LayoutPattern.parse("pp4.dp2"))
    rows = [row for row in rows_of(asked, found) if row.accumulate > 12]
    assert rows
    for before, after in zip(rows, simulate_rows(asked, rows)):
        assert after.simulated and after.step_s == pytest.approx(before.step_s, rel=1e-6)


def test_a_pipeline_that_several_share_is_what_each_has_by_itself() -> None:
    asked = question(16, large(), batch=64)
    rows = rows_of(asked, find_candidates(asked, 16, LayoutPattern.parse("pp4.*")))
    rows = [row for row in rows if row.microbatch == 1 and row.recompute == "none"]
    assert {"pp4.dp4", "pp4.fsdp4+zero1", "pp4.dp2.fsdp2+zero1", "pp4.fsdp4"} <= {
        row.layout for row in rows
    }
    for row, found in zip(rows, simulate_rows(asked, rows)):
        assert found.simulated and found.step_s == pytest.approx(
            simulate_rows(asked, [row])[0].step_s
        ), row.layout


def test_rings_and_gathers_have_simulations_of_their_own() -> None:
    asked = question(16, large(), batch=64)
    rows = rows_of(asked, find_candidates(asked, 16, LayoutPattern.parse("pp2.cp8.*")))
    rows = [row for row in rows if row.microbatch == 1 and row.recompute == "none"]
    assert {row.layout for row in rows} == {"pp2.cp8", "pp2.cp8+gather"}
    alone = [simulate_rows(asked, [row])[0].step_s for row in rows]
    assert [row.step_s for row in simulate_rows(asked, rows)] == alone and alone[0] != alone[1]


def test_a_simulation_that_rows_share_is_of_each() -> None:
    """What comes after the pipeline has other names with dp than with fsdp."""
    asked = question(16, large(), batch=512, memory_gib=200.0)
    rows = [row for row in rank(asked, LayoutPattern.parse("pp2.tp2.*")).rows if row.simulated]
    assert len({row.layout for row in rows}) > 4
    for row in rows:
        assert row.step_s == pytest.approx(simulate_rows(asked, [row])[0].step_s, rel=1e-9), (
            row.layout
        )


def test_where_nothing_fits_the_nearest_comes_first() -> None:
    found = rank(question(4, large(), batch=64, memory_gib=4.0))
    assert not found.fits and found.exhaustive
    over = [row.over_bytes for row in found.rows]
    assert over[0] == min(over) > 0


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("devices", [14, 19, 34])
def test_fewer_where_all_devices_cannot_be_used(devices: int) -> None:
    """As fast as on any number of them, of all that weft could use, a hundredth apart."""
    asked = question(devices, large(), batch=64)
    found = rank(asked)
    every = [
        len(find_candidates(asked, count))
        and rank(question(count, large(), batch=64)).rows[0].step_s
        for count in range(devices // 2, devices + 1)
    ]
    assert found.fits and found.devices <= devices
    assert found.rows[0].step_s < 1.02 * min(step_s for step_s in every if step_s)


@pytest.mark.parametrize(
    "pattern", ["pp2+1f1b.fsdp2.tp2.*", "dp8", "fsdp8+zero3+offload", "ulysses2.cp2.fsdp2+zero2"]
)
def test_formulas_give_their_values(pattern: str) -> None:
    """Every formula, of the values beside it: what follows its first comma is words."""
    asked = question(8, large(), batch=64)
    rows = rows_of(asked, find_candidates(asked, 8, LayoutPattern.parse(pattern), exhaustive=True))
    row, held = max(rows, key=lambda row: row.held_bytes), 0
    for part in (*row.time_parts, *row.memory_parts):
        values = {name: float(np.ravel(value)[0]) for name, value in part.symbols.items()}
        ends = [
            i
            for i, letter in enumerate(part.formula)
            if letter == "," and _balanced(part.formula[:i])
        ]
        text = part.formula[: ends[0] if ends else None].replace(" x ", " * ")
        if part.name == "bubble" or not part.value[0]:
            continue  # words, and what is not shown
        assert eval(text, {"max": max, "min": min}, values) == pytest.approx(
            float(part.value[0])
        ), part.formula
        held += 1
    assert held >= 8


@pytest.mark.parametrize(("zero", "copied"), [(1, 2), (2, 2), (3, 0)])
def test_copies_of_weights_are_gathered_where_masters_rest_in_shards(
    zero: int, copied: int
) -> None:
    """fsdp2 rests half of what is computed with; under zero3 nothing whole lasts."""
    asked = question(8, large(), batch=64)
    asked = replace(asked, practice=PrecisionPolicy(copy_bytes=2.0, shards_weights=True))
    pattern = LayoutPattern.parse(f"pp4+1f1b.fsdp2+zero{zero}")
    found = rows_of(asked, find_candidates(asked, 8, pattern, exhaustive=True))
    assert found
    for row in found:
        weights = next(part for part in row.memory_parts if part.name == "weights")
        resting = weights.symbols["params"]
        want = float(np.ravel((4 + 2 * copied) * resting)[0])
        assert float(np.ravel(weights.value)[0]) == pytest.approx(want)


def _balanced(text: str) -> bool:
    return text.count("(") == text.count(")")


# ---- why not -------------------------------------------------------------------------------------


def test_why_the_obvious_are_not_the_best() -> None:
    asked = question(64, large(), batch=512)
    asked = replace(asked, practice=PrecisionPolicy())
    best = rank(asked).rows[0]
    said = {one.name: one for one in baselines(asked, 64, best)}
    copies = said["data parallel"]
    assert copies.row is not None and copies.row.over_bytes > 0
    assert copies.why == f"does not fit by {copies.row.over_bytes / GIB:,.1f} GiB"
    across = said["tensor parallel over two nodes"]
    assert across.row is not None and across.row.step_s > 1.5 * best.step_s
    assert "x slower: tp " in across.why and across.why.endswith(", over nodes")
    assert "over nodes" not in said["tensor parallel in a node"].why
    assert {name for name, _ in baseline_patterns(asked, 64)} >= set(said)
    assert why_slower(asked, best, best) == "as fast"
    faster = replace(across.row, step_s=best.step_s)
    assert {one.name: one for one in baselines(asked, 64, best, [faster])}[
        "tensor parallel over two nodes"
    ].row is faster


@pytest.mark.parametrize("devices", [1, 2, 3, 8, 16, 32])
def test_the_obvious_have_room(devices: int) -> None:
    """As many ranks as devices, and each of its axes more than one."""
    for _, text in baseline_patterns(question(devices, large(), batch=512), devices):
        sizes = [size for _, size in LayoutPattern.parse(text).sizes]
        left = devices // math.prod(size or 1 for size in sizes)
        assert devices % math.prod(size or 1 for size in sizes) == 0 and 1 not in sizes
        assert sum(size is None for size in sizes) in ((0,) if left == 1 else (1, 2)), text
        assert sizes.count(None) < 2 or any(left % n == 0 for n in range(2, left)), text


def test_a_bubble_is_named() -> None:
    """Four microbatches through sixteen stages."""
    asked = question(16, large(tokens=1024), batch=4)
    row = simulate_rows(
        asked,
        rows_of(
            asked, find_candidates(asked, 16, LayoutPattern.parse("pp16+1f1b.*"), exhaustive=True)
        ),
    )[0]
    best = rank(asked).rows[0]
    assert " bubble " in why_slower(asked, row, best)


def test_what_computes_longer_is_said_to() -> None:
    """All kinds of it together: a kind may take longer because there is less of another."""
    asked = question(64, large(), batch=512)
    best = rank(asked).rows[0]
    taken = sum(best.time[name] for name in ("matmul", "attention", "memory"))
    time = {
        **best.time,
        "memory": best.time["memory"] + taken / 2,
        "optimizer": best.time["optimizer"] + taken / 9,
    }
    row = replace(best, time=time, step_s=sum(time.values()))
    assert why_slower(asked, row, best).endswith(" slower: computes 1.5 x as long")


# ---- weft's own planner --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        *("pp2.dp2", "pp2.tp2", "pp2.fsdp2+zero1", "pp2.tp8", "pp2.tp3", "pp2.cp3", "pp2.ep2"),
        *("fsdp2.tp2+sequence", "tp3", "cp3"),
    ],
)
def test_a_shortened_model_is_laid_as_the_whole_one(layout: str) -> None:
    whole = bare(layers=20)
    short = shorten_model(whole)
    assert len(short.blocks) == 4 and len(whole.blocks) == 20  # type: ignore[arg-type]
    answers = []
    for model in (whole, short):
        try:
            weft.plan(
                model,
                layout,
                batch=BATCH,
                loss=next_token,
                sample=sample(),
                recompute="full",
                schedule="zb-h1" if "pp" in layout else None,
            )
            answers.append("")
        except Refusal as error:
            answers.append(error.problem)
    assert answers[0] == answers[1]


def test_a_shortened_model_keeps_each_kind_of_block() -> None:
    model = bare(layers=24)
    model.blocks[9] = bare(hidden=64).blocks[0]  # type: ignore[operator, index]
    kept = list(shorten_model(model).blocks)  # type: ignore[arg-type]
    assert len(kept) == 4 + 5 and model.blocks[9] in kept and model.blocks[-1] in kept  # type: ignore[index]
    assert shorten_model(small := bare(layers=4)) is small
