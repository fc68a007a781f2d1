"""Every model through every schedule equals one device, and what crosses stages is what was predicted.

Each pair of a model and a schedule is run once; the layouts beside them take turns. `benchmarks/parity` runs all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from cases import BATCH, Subject, laid, reference, seeded
from staged import STAGED
from test_parity import run

import weft
from weft.errors import CannotCut, ConfigError, LayoutError, Refusal
from weft.schedules import Action, Schedule
from weft.verification.delayed import run_delayed
from weft.verification.parity import LayoutResult, check

SYNCHRONOUS = ["naive", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipev"]
BESIDE = ["pp2+{}.tp2", "pp4+{}", "pp2+{}.dp2", "pp2+{}", "pp2+{}.fsdp2", "dp2.pp2+{}", "pp2+{}.tp2+sequence"]
NO_TP = {"convnet", "sequential", "plain"}
SHALLOW = {"convnet"}  # seven parts: too few for two stages on each of four ranks


def _grid() -> list[tuple[str, str]]:
    found, turns = [], cycle(BESIDE)
    for name in STAGED:
        for kind in SYNCHRONOUS:
            layout = next(turns)
            while (name in NO_TP and "tp2" in layout) or (name in SHALLOW and "pp4" in layout):
                layout = next(turns)
            if name == "t5":  # its decoder attends to another sequence, which is not cut
                layout = layout.replace("+sequence", "")
            found.append((name, layout.format(kind)))
    return found


@pytest.mark.parametrize(("name", "layout"), _grid())
def test_pipeline_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = run(pool, replace(STAGED[name], clip=0.5), layout)
    assert result.passed, result
    assert result.comms_seen["send", "pp"][0] >= 4, "a pipeline that sends nothing"


WIDE = [
    ("tied", "pp2+zb-v.fsdp2+zero1"),
    ("llama", "fsdp2+zero2.pp2+zb-h1"),
    ("gpt2", "pp2+interleaved.fsdp2+offload"),
    ("deep", "tp2.pp2"),
]


@pytest.mark.parametrize(("name", "layout"), WIDE)
def test_sharded_and_cut_inside_a_stage(pool: Any, name: str, layout: str) -> None:
    result = run(pool, STAGED[name], layout)
    assert result.passed, result


def with_plan(name: str, **plan: Any) -> Subject:
    return replace(STAGED[name], plan=tuple({**dict(STAGED[name].plan), **plan}.items()))


@pytest.mark.parametrize("recompute", ["selective", "full", 2])
@pytest.mark.parametrize("layout", ["pp2.dp2", "pp2+zb-h1.tp2", "pp2+dualpipev.fsdp2"])
def test_recompute_inside_a_stage(pool: Any, recompute: str | int, layout: str) -> None:
    result = run(pool, with_plan("deep", recompute=recompute), layout)
    assert result.passed, result


@pytest.mark.parametrize("cut", ["flops", "time", ("blocks.3.mlp",), ("blocks.2.attention.proj",)])
def test_cut_anywhere(pool: Any, cut: Any) -> None:
    """Inside a block too, whose dropout masks are counted across both of its stages."""
    result = run(pool, with_plan("deep", cut=cut), "pp2+zb-h1")
    assert result.passed, result


def test_chunks_and_shapes_that_are_always_sent(pool: Any) -> None:
    case = with_plan("deep", options={"chunks": 3}, dynamic_shapes=True).case()
    result = pool.run(check, case, "pp2+interleaved", reference(STAGED["deep"], 3), world=2)[0]
    assert isinstance(result, LayoutResult) and result.passed, result


def backwards(ranks: int, microbatches: int) -> Schedule:
    """Someone's own: the last microbatch first."""
    order = [
        tuple(Action(kind, rank, m) for kind in "FB" for m in reversed(range(microbatches))) for rank in range(ranks)
    ]
    return Schedule("backwards", tuple(range(ranks)), tuple(order))  # type: ignore[arg-type]


def test_a_schedule_of_ones_own(pool: Any) -> None:
    result = run(pool, with_plan("deep", schedule=backwards), "pp4")
    assert result.passed, result


# ---- asynchronous --------------------------------------------------------------------------------------------------

DELAYED = [
    ("llama", "pp4", "stash"), ("deep", "pp2.dp2", "stash"), ("convnet", "pp2.dp2", "stash"),
    ("llama", "pp4", "vertical"), ("gpt2-untied", "pp2.tp2+sequence", "vertical"), ("plain", "pp4", "2bw"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "versions"), DELAYED)
def test_pipedream_equals_its_sequential_definition(pool: Any, name: str, layout: str, versions: str) -> None:
    name = name.removesuffix("-untied") if name != "gpt2-untied" else "deep"
    subject = with_plan(
        name, schedule="pipedream", options={"versions": versions}, accumulate=8 // (1 + ("dp" in layout))
    )
    delayed = run_delayed(subject.case(), layout, 3)
    world = weft.Layout.parse(layout).world
    result = pool.run(check, subject.case(), layout, delayed, world=world)[0]
    assert isinstance(result, LayoutResult) and result.passed, result
    bound = 0.0 if world == weft.Layout.parse(layout).size("pp") else 1e-12  # bit for bit where nothing else is summed
    assert max(result.loss_rel_err, result.param_rel_err) <= bound, result


def test_delays_change_the_weights() -> None:
    """What the two definitions are told apart by."""
    found = {}
    for versions in ("stash", "vertical", "2bw"):
        subject = with_plan("llama", schedule="pipedream", options={"versions": versions}, accumulate=8)
        found[versions] = run_delayed(subject.case(), "pp4", 1).updated["model.norm.weight"]
    plain = reference(STAGED["llama"], 1).updated["model.norm.weight"]
    for one, other in [("stash", "vertical"), ("stash", "2bw"), ("vertical", "2bw")]:
        assert not torch.allclose(found[one], found[other], rtol=1e-9)
    assert not any(torch.allclose(weights, plain, rtol=1e-9) for weights in found.values())


# ---- refusals ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, dict[str, Any], type[Refusal], str]] = [
    ("tied", "pp2+pipedream", {}, CannotCut, "used by two stages, which pipedream updates at other times"),
    ("deep", "pp2+pipedream.fsdp2", {}, LayoutError, "keeps several versions of the weights"),
    ("deep", "pp2+1f1", {}, LayoutError, "(?i)did you mean \"1f1b\""),
    ("deep", "pp2+gpipe+1f1b", {}, ConfigError, "at once"),
    ("deep", "pp2", {"schedule": "zb"}, ConfigError, "not a schedule"),
    ("deep", "pp2", {"options": {"chunks": 2}}, ConfigError, "1f1b has no such option"),
    ("deep", "pp2", {"cut": "layers"}, ConfigError, "not a way to cut"),
    ("deep", "pp2", {"cut": ("blocks.3", "blocks.4")}, ConfigError, "has 2 stages"),
    ("deep", "pp2", {"cut": ("block.3",)}, CannotCut, "blocks.3"),
    ("deep", "pp2.tp2", {"cut": ("blocks.3.attention.proj",)}, CannotCut, "one unit of tensor parallelism"),
    ("deep", "pp2.tp2+sequence", {"cut": ("blocks.3.mlp",)}, CannotCut, "one unit of sequence parallelism"),
    ("deep", "pp2.fsdp2", {"cut": ("blocks.3.mlp",)}, CannotCut, "one unit of sharding"),
    ("deep", "pp2", {"cut": ("blocks.3.mlp",), "recompute": "full"}, CannotCut, "one unit of recompute"),
    ("convnet", "pp8", {}, CannotCut, "has 8 stages, and the model 7 parts"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "plan", "kind", "says"), REFUSED)
def test_what_cannot_be_cut_is_refused(name: str, layout: str, plan: dict, kind: type[Refusal], says: str) -> None:
    with pytest.raises(kind, match=says):
        laid(with_plan(name, **plan), seeded(STAGED[name].build), layout)


def test_a_pipeline_needs_a_sample() -> None:
    with pytest.raises(ConfigError, match="Give a batch of two samples"):
        weft.plan(STAGED["deep"].build(), "pp2", batch=BATCH)
