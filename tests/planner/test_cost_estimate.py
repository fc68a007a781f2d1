"""Laws of the estimate: its parts, how they scale, and what papers say of activations, FLOPs,
parameters and ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from weft.core.errors import ConfigError
from weft.core.layout import Layout
from weft.planner.cost.estimate import Estimate, estimate, stage_costs
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.memory import activation_bytes, saved_bytes
from weft.planner.cost.model_work import ModelWork
from weft.planner.cost.pipeline_stages import recomputed_share
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.transformer_work import TransformerDims, transformer_work

GPT3 = TransformerDims(layers=96, hidden=12288, heads=96, vocab=51200, seq_len=2048, ffn=4 * 12288)
LLAMA8 = TransformerDims(32, 4096, 32, 128256, 8192, 14336, kv_heads=8, gated=True, tied=False)
LLAMA70 = TransformerDims(80, 8192, 64, 128256, 8192, 28672, kv_heads=8, gated=True, tied=False)
SMALL = TransformerDims(8, 1024, 16, 32000, 1024, 4096, kv_heads=8, gated=True, tied=False)
EXPERTS = replace(SMALL, num_experts=8, top_k=2, moe_ffn=1024)
PRACTICE = PrecisionPolicy(
    compute="bf16", weight_bytes=2, grad_bytes=2, state_bytes=12, reduce_bytes=2, gather_bytes=2
)


def laid(*layouts: str, batch: int = 64, **options: Any) -> LayoutBatch:
    return LayoutBatch.of([Layout.parse(text) for text in layouts], batch=batch, **options)


def priced(
    choices: LayoutBatch,
    dims: TransformerDims = SMALL,
    practice: PrecisionPolicy = PRACTICE,
    model: ModelWork | None = None,
) -> Estimate:
    cluster = Cluster.parse("h100x64")
    return estimate(
        model or transformer_work(dims),
        choices,
        cluster,
        cluster.hardware.era("compiled"),
        practice,
    )


def parts(found: Estimate, what: str = "time", entry: int = 0) -> Mapping[str, float]:
    return {
        part.name: float(np.broadcast_to(part.value, len(found.step_s))[entry])
        for part in getattr(found, what)
    }


def one(
    layout: str,
    what: str = "time",
    dims: TransformerDims = SMALL,
    practice: PrecisionPolicy = PRACTICE,
    **options: Any,
) -> Any:
    return parts(priced(laid(layout, **options), dims, practice), what)


# ---- parts ---------------------------------------------------------------------------------------

MANY = [
    "dp64",
    "fsdp64",
    "fsdp64+zero1",
    "dp8.fsdp8+zero2",
    "tp8.dp8",
    "dp8.tp8+sequence",
    "pp4.dp2.tp8",
    "cp8.dp8",
    "ulysses8.dp8",
    "pp2.fsdp4.cp2.tp4+sequence",
    "ep8.dp8",
    "fsdp64+offload",
]


@pytest.mark.parametrize("dims", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_parts_sum_to_the_whole_and_entries_are_apart(dims: TransformerDims) -> None:
    options: dict[str, Any] = {
        "accumulate": [1] * 6 + [4] * 6,
        "recompute": ["none", "full", "selective", 2] * 3,
    }
    found = priced(laid(*MANY, batch=256, **options), dims)
    for i, layout in enumerate(MANY):
        time, memory = parts(found, "time", i), parts(found, "memory", i)
        assert sum(time.values()) == pytest.approx(found.step_s[i]), layout
        assert sum(memory.values()) == pytest.approx(found.peak_bytes[i]), layout
        least = -1e-12  # of what is a difference
        assert all(least < value < np.inf for value in (*time.values(), *memory.values())), layout
        alone = priced(
            laid(layout, batch=256, **{key: [value[i]] for key, value in options.items()}), dims
        )
        assert (
            alone.step_s[0] == pytest.approx(found.step_s[i]) and alone.fits[0] == found.fits[i]
        ), layout
        assert alone.peak_bytes[0] == pytest.approx(found.peak_bytes[i]), layout
        sent = {
            axis: float(np.broadcast_to(nbytes, len(MANY))[i])
            for axis, nbytes in found.traffic.items()
        }
        assert sent == pytest.approx(
            {axis: float(v[0]) if np.ndim(v) else v for axis, v in alone.traffic.items()}
        )


def test_every_part_says_its_formula() -> None:
    found = priced(laid(*MANY, batch=256))
    for part in (*found.time, *found.memory):
        assert part.formula and part.symbols, part.name
        assert all(np.shape(value) in ((), (len(MANY),)) for value in part.symbols.values()), (
            part.name
        )


# ---- how it scales -------------------------------------------------------------------------------

ONCE = ("optimizer", "fixed", "dp exposed")


def test_twice_the_microbatches_take_twice_as_long_but_for_what_is_once_a_step() -> None:
    few, many = (one("dp8", batch=64 * m, accumulate=m) for m in (2, 4))
    for name, value in few.items():
        assert many[name] == pytest.approx(value * (1 if name in ONCE else 2)), name
    assert few["matmul"] > 0 and few["optimizer"] > 0 and few["fixed"] > 0


def test_activations_go_with_the_microbatch_and_states_do_not() -> None:
    small, large = (one("dp8", "memory", batch=batch) for batch in (8, 16))
    for name in ("activations", "temporaries"):
        assert large[name] == pytest.approx(2 * small[name])
    for name in ("weights", "gradients", "optimizer"):
        assert large[name] == small[name] > 0


def test_more_ranks_of_tp_compute_less_and_wait_more() -> None:
    found = [one(f"tp{n}.dp8") for n in (1, 2, 4, 8)]
    for less, more in pairwise(found):
        assert more["matmul"] < less["matmul"] and more.get("tp exposed", 0) > less.get(
            "tp exposed", 0
        )


def test_a_microbatch_of_full_recomputation_runs_the_blocks_forward_and_tp_again() -> None:
    plain, full = (one("dp8.tp8", recompute=mode) for mode in ("none", "full"))
    assert full["matmul"] == plain["matmul"] and plain["recompute"] == 0
    model, head = transformer_work(SMALL), 2 * SMALL.seq_len * SMALL.hidden * SMALL.vocab
    matmuls = sum(b.count * op.flops for b in model.blocks for op in b.ops if op.kind == "matmul")
    attention = sum(
        b.count * op.flops for b in model.blocks for op in b.ops if op.kind == "attention"
    )
    assert model.model_flops == 3 * (matmuls + 2 * attention), "causal: half is computed"
    # of L blocks 2 sums each in forward, backward, and again; one more in the embedding's forward,
    # one before the head
    ends, blocks = 2, 2 * SMALL.layers
    assert full["tp exposed"] / plain["tp exposed"] == pytest.approx(
        (3 * blocks + ends) / (2 * blocks + ends)
    )
    assert (
        0.25 < full["recompute"] / (plain["matmul"] + plain["attention"] + plain["memory"]) < 0.35
    )
    assert matmuls > head


@pytest.mark.parametrize(("mode", "share"), [("full", 1), (2, 1 / 2), (4, 1 / 4)])
def test_every_kth_block_is_run_again(mode: str | int, share: float) -> None:
    whole = one("dp8", recompute="full")["recompute"]
    assert one("dp8", recompute=mode)["recompute"] == pytest.approx(share * whole)


def test_what_is_not_run_again_is_not_launched_again() -> None:
    """The host sets the pace: the blocks' kernels once more, and none of the embedding, the norm
    and the head."""
    cluster, model = Cluster.parse("h100x1"), transformer_work(SMALL)
    era = cluster.hardware.era("compiled").model_copy(update={"launch_s": 1.0})
    kernels = [(b.repeated, b.count * sum(op.kernels for op in b.ops)) for b in model.blocks]
    for mode, again in (("none", 0.0), ("full", 1.0)):
        found = estimate(model, laid("dp1", batch=1, recompute=mode), cluster, era, PRACTICE)
        took = sum(value for name, value in parts(found).items() if name in COMPUTED)
        assert took == pytest.approx(
            sum((2 + again * repeated) * count for repeated, count in kernels)
        ), mode


@pytest.mark.parametrize(
    ("mode", "stages", "most", "least"),
    [
        (2, 8, 1, 0),
        (2, 4, 1 / 2, 1 / 2),
        (3, 4, 1 / 2, 0),
        (3, 2, 2 / 4, 1 / 4),
        (3, 1, 3 / 8, 3 / 8),
        ("full", 8, 1, 1),
    ],
)
def test_of_every_kth_block_a_stage_may_have_more_or_less(
    mode: str | int, stages: int, most: float, least: float
) -> None:
    """Eight blocks: the stage with the most of them sets the pace, the one with the least has the
    most to keep."""

    def of(what: str, mode: str | int) -> float:
        kind, name = ("time", "recompute") if what == "recompute" else ("memory", "activations")
        return one(f"pp{stages}.dp4", kind, accumulate=16, recompute=mode)[name]

    assert of("recompute", mode) == pytest.approx(most * of("recompute", "full"))
    none, full = of("activations", "none"), of("activations", "full")
    assert of("activations", mode) == pytest.approx(none + least * (full - none))


@pytest.mark.parametrize(
    ("depth", "ranks", "chunks", "name"),
    [
        (32, 4, 8, "interleaved"),
        (32, 4, 2, "interleaved"),
        (16, 2, 2, "zb-v"),
        (24, 4, 2, "zb-v"),
        (12, 1, 1, "1f1b"),
    ],
)
@pytest.mark.parametrize("every", [2, 3, 5])
def test_what_chunks_of_a_rank_run_again_adds_up(
    depth: int, ranks: int, chunks: int, name: str, every: int
) -> None:
    """Counted block by block."""
    again, kept = [0] * ranks, [0] * ranks
    for block in range(depth):
        stage = block * ranks * chunks // depth
        rank = stage % ranks if name != "zb-v" or stage < ranks else 2 * ranks - 1 - stage
        again[rank] += block % every == 0
        kept[rank] += block % every > 0
    model = transformer_work(replace(SMALL, layers=depth))
    choices = laid(f"pp{ranks}", schedule=name, chunks=chunks, accumulate=8, recompute=every)
    most, least = recomputed_share(model, choices)
    assert most[0] * depth / ranks == pytest.approx(max(again))
    assert (1 - least[0]) * depth / ranks == pytest.approx(max(kept))


COMPUTED = ("matmul", "attention", "memory", "recompute", "launch")


def test_attention_that_is_run_again_gets_its_keys_again() -> None:
    for layout, axis in (("cp8.dp8", "cp"), ("ulysses8.dp8", "ulysses")):
        modes = ("none", "selective", "full")
        plain, selective, full = (one(layout, recompute=mode)[f"{axis} exposed"] for mode in modes)
        assert selective == pytest.approx(full) and full > 1.2 * plain


def test_experts_over_ranks_that_share_a_sequence_travel() -> None:
    found = [
        one(layout, dims=EXPERTS)["ep exposed"]
        for layout in ("ep8", "cp8+ep", "ep2.cp4+ep", "ulysses8+ep")
    ]
    assert found == pytest.approx([found[0]] * 4) and found[0] > 0


def test_experts_over_distant_ranks_travel_longer() -> None:
    """Of eight nodes: within each, and one rank of each."""
    near, far = (one(layout, dims=EXPERTS)["ep exposed"] for layout in ("dp8.ep8", "ep8.dp8"))
    assert far > 2 * near


def test_fsdp_gathers_in_every_microbatch_and_zero1_once() -> None:
    def sent(layout: str, m: int) -> float:
        return float(priced(laid(layout, batch=64 * m, accumulate=m)).traffic["fsdp"][0])

    total, ends = (
        count * 2 * 7 / 8
        for count in (transformer_work(SMALL).params, 2 * SMALL.vocab * SMALL.hidden + SMALL.hidden)
    )
    for m in (1, 3):
        assert sent("fsdp8+zero1", m) == pytest.approx(2 * total)
        assert sent("fsdp8+zero2", m) == pytest.approx((m + 1) * total)
        assert sent("fsdp8", m) == pytest.approx(3 * m * total - m * ends), (
            "what no block has is gathered once"
        )
    assert sent("dp8", 3) == 0


def test_hybrid_sharding_sums_shards_across_groups() -> None:
    found = priced(laid("dp8.fsdp8", "dp64", "fsdp64"))
    params = transformer_work(SMALL).params
    assert found.traffic["dp"] == pytest.approx(
        [2 * 7 / 8 * 2 * params / 8, 2 * 63 / 64 * 2 * params, 0]
    )
    assert found.peak_bytes[2] < found.peak_bytes[0] < found.peak_bytes[1]


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "weights", "gradients", "state"),
    [
        ("dp64", 2, 2, 12),
        ("fsdp64+zero1", 2, 2, 12 / 64),
        ("fsdp64+zero2", 2, 2 / 64, 12 / 64),
        ("fsdp64", 2 / 64, 2 / 64, 12 / 64),
        ("dp8.fsdp8", 2 / 8, 2 / 8, 12 / 8),
    ],
)
def test_zeros_table(layout: str, weights: float, gradients: float, state: float) -> None:
    """Rajbhandari et al. 2020, figure 1, with K = 12."""
    params = 7.5e9
    dims = TransformerDims(1, 50_000, 100, 0, 1, (7_500_000_000 - 4 * 50_000**2) // (2 * 50_000))
    assert transformer_work(dims).params == pytest.approx(params, rel=1e-3)
    found = one(layout, "memory", dims)
    exact = transformer_work(dims).params
    assert found["weights"] == pytest.approx(weights * exact)
    assert found["gradients"] == pytest.approx(gradients * exact)
    assert found["optimizer"] == pytest.approx(state * exact)


def test_what_is_gathered_are_two_units_and_ones_gradient() -> None:
    block = next(block for block in transformer_work(SMALL).blocks if block.repeated)
    unit = block.elements("features") + block.elements("whole")
    for messages in (1, 4):  # in which a block is gathered
        found = one(
            "fsdp8",
            "memory",
            practice=replace(PRACTICE, gather_bytes=4, reduce_bytes=2, messages=messages),
        )
        assert found["gathered weights"] == pytest.approx((2 * 4 + 2) * unit / messages)


def test_the_last_stage_has_a_tied_embedding_too() -> None:
    tied, apart = (
        one("pp4.dp2", "memory", replace(SMALL, tied=tied), batch=8)["weights"]
        for tied in (True, False)
    )
    assert tied == apart > one("pp8", "memory", replace(SMALL, vocab=1), batch=8)["weights"]
    alone = [
        one("dp8", "memory", replace(SMALL, tied=tied), batch=8)["weights"]
        for tied in (True, False)
    ]
    assert alone[1] - alone[0] == 2 * SMALL.vocab * SMALL.hidden
    found = priced(laid("pp4.dp2", batch=8), replace(SMALL, tied=True)).traffic["pp"][0]
    plain = priced(laid("pp4.dp2", batch=8)).traffic["pp"][0]
    assert (
        found - plain == 2 * 3 / 4 * 2 * SMALL.vocab * SMALL.hidden
    )  # over both ends and dp together


def test_offloaded_states_are_not_on_the_device_and_take_time() -> None:
    here, away = (one(layout, "memory") for layout in ("fsdp8", "fsdp8+offload"))
    assert [away[n] for n in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert all(away[n] == here[n] for n in ("activations", "temporaries", "gathered weights"))
    assert one("fsdp8+offload")["optimizer"] > 10 * one("fsdp8")["optimizer"]


def test_what_is_offloaded_travels_with_each_microbatch() -> None:
    params = transformer_work(SMALL).params / 8
    away = priced(laid("fsdp8+offload", batch=64, accumulate=4))
    comm_s = {part.name: part for part in away.time}["host exposed"].symbols["comm_s"]
    host_bps = Cluster.parse("h100x8").hardware.device.host_bps
    assert comm_s == pytest.approx(
        params * (2 * 2 + 2) / host_bps
    )  # weights twice, the gradient once
    assert "host exposed" not in one("fsdp8")
    for level, weights, gradients in (
        ("zero2", 0.25, 1),
        ("zero1", 0.25, 0.25),
    ):  # gathered, or reduced, once
        found = priced(laid(f"fsdp8+{level}+offload", batch=64, accumulate=4))
        comm_s = {part.name: part for part in found.time}["host exposed"].symbols["comm_s"]
        assert comm_s == pytest.approx(params * 2 * (weights + gradients) / host_bps), level
        here = one(f"fsdp8+{level}", "memory", accumulate=4)
        held = parts(found, "memory")
        assert held["weights"] == here["weights"] > 0 == held["optimizer"]
        assert held["gradients"] == (0 if level == "zero2" else here["gradients"])
    # an optimizer alone: weights come once a step, and what the device holds is as ever
    some = replace(PRACTICE, offloads=("gradients", "optimizer"))
    found = priced(laid("fsdp8+offload", batch=64, accumulate=4), practice=some)
    comm_s = {part.name: part for part in found.time}["host exposed"].symbols["comm_s"]
    assert comm_s == pytest.approx(params * (2 / 4 + 2) / host_bps)
    held, plain = parts(found, "memory"), one("fsdp8", "memory", accumulate=4)
    assert held["weights"] == plain["weights"] > 0 and held["gradients"] == held["optimizer"] == 0


def test_inputs_of_blocks_that_run_again_may_rest_with_the_host() -> None:
    away = replace(PRACTICE, offloads=("activations",))
    entry = 8 * SMALL.seq_len * SMALL.hidden * 2
    for recompute, gone, sent in (("full", 6, 8), (2, 2, 4), ("none", 0, 0)):
        choices = laid("fsdp8+offload", batch=64, recompute=recompute)
        here, there = (
            priced(choices, practice=practice) for practice in (replace(away, offloads=()), away)
        )
        less = parts(here, "memory")["activations"] - parts(there, "memory")["activations"]
        assert less == pytest.approx(gone * entry), recompute
        more = [
            {p.name: p for p in found.time}["host exposed"].symbols["comm_s"]
            for found in (here, there)
        ]
        host_bps = Cluster.parse("h100x8").hardware.device.host_bps
        assert more[0] == 0 and more[1] == pytest.approx(2 * sent * entry / host_bps), recompute


def test_activations_with_the_host_leave_two_blocks_and_take_time() -> None:
    there = replace(PRACTICE, host_activations=True)
    host_bps = Cluster.parse("h100x8").hardware.device.host_bps
    layer = next(block for block in transformer_work(SMALL).blocks if block.repeated)
    for recompute in ("none", "selective", "full"):
        choices = laid("fsdp8", batch=64, recompute=recompute)
        here, away = (priced(choices, practice=practice) for practice in (PRACTICE, there))
        each = saved_bytes(layer, choices)[0]
        less = parts(here, "memory")["activations"] - parts(away, "memory")["activations"]
        assert less == pytest.approx((SMALL.layers - 2) * each), recompute
        more = {part.name: part for part in away.time}["host exposed"].symbols["comm_s"]
        # all leave; but the last two, which backward finds, come back
        assert more == pytest.approx((2 * SMALL.layers - 2) * each / host_bps), recompute
        assert "host exposed" not in parts(here)
    # of four microbatches in flight the first rank keeps two blocks; the last one needs more now,
    # by what has come to it and what its head keeps
    dims, choices = replace(SMALL, vocab=64), laid("pp4.dp2", batch=64, accumulate=8)
    here, away = (
        parts(priced(choices, dims, practice), "memory")["activations"]
        for practice in (PRACTICE, there)
    )
    each = saved_bytes(layer, choices)[0]
    assert here - away == pytest.approx((4 * SMALL.layers / 4 - 2) * each, rel=0.03)


def test_units_that_are_gathered_ahead_are_held() -> None:
    def held(ahead: int, layout: str = "fsdp8") -> float:
        return one(layout, "memory", practice=replace(PRACTICE, ahead=ahead))["gathered weights"]

    layer = next(block for block in transformer_work(SMALL).blocks if block.repeated)
    unit = layer.elements() * PRACTICE.gather_bytes
    assert held(3) - held(1) == pytest.approx(2 * unit) and held(1) > 0
    assert held(1000) == held(2000)  # all units, and no more
    assert held(3, "fsdp8+zero2") == held(1, "fsdp8+zero2") == 0  # these rest gathered


def test_experts_divide_over_the_ranks_that_have_them() -> None:
    dims = EXPERTS
    routed = dims.layers * dims.num_experts * 3 * dims.hidden * dims.moe_ffn
    h, f, kv = dims.hidden, dims.moe_ffn, dims.hidden // 2
    assert (
        transformer_work(dims).params
        == dims.layers * (2 * h * h + 2 * h * kv + 3 * h * f * 8 + 8 * h + 2 * h)
        + 2 * 32000 * h
        + h
    )
    assert transformer_work(replace(dims, dense=3)).params == transformer_work(dims).params + 3 * (
        3 * h * dims.ffn - 3 * h * f * 8 - 8 * h
    )
    plain = transformer_work(dims).params - routed
    for layout, ways in (("dp8", 1), ("ep8", 8), ("dp8+ep", 8), ("ep2.dp4", 2), ("ep2.dp2.tp2", 4)):
        found = one(layout, "memory", dims)
        tp = 2 if "tp2" in layout else 1
        whole = dims.layers * (2 * dims.hidden + dims.hidden * dims.num_experts) + dims.hidden
        assert found["weights"] == pytest.approx(
            2 * (routed / ways + (plain - whole) / tp + whole)
        ), layout
    assert one("fsdp8+ep", "memory", dims)["weights"] == pytest.approx(2 * (routed / 8 + plain / 8))
    assert one("ep2.fsdp4", "memory", dims)["weights"] == pytest.approx(
        2 * (routed / 8 + plain / 4)
    )


def test_a_layer_keeps_the_embeddings_output_and_a_fused_activation_its_inputs_gradients() -> None:
    model = transformer_work(LLAMA8)
    assert not sum(op.saved_bytes for op in model.blocks[0].ops)
    (layer,) = [block for block in model.blocks if block.repeated]
    inner = 2 * LLAMA8.seq_len * LLAMA8.ffn
    assert layer.working_bytes == 2 * inner  # of the gate and of what it gates
    (unfused,) = [block for block in transformer_work(LLAMA8, fused=False).blocks if block.repeated]
    assert unfused.working_bytes == 3 * inner


def test_stand_ins_are_of_a_block_and_of_the_head() -> None:
    model = transformer_work(SMALL)
    block = next(b for b in model.blocks if b.repeated)
    asked = replace(PRACTICE, dummy_bytes=2)
    for layout, tp in (("dp64", 1), ("dp8.tp8", 8)):
        want = (
            2 * (block.elements("features") + SMALL.vocab * SMALL.hidden) / tp
            + 2 * block.elements("whole") / tp
        )
        assert one(layout, "memory", practice=asked)["dummy gradients"] == pytest.approx(want)


@pytest.mark.parametrize(
    ("schedule", "chunks", "sent"), [("1f1b", 1, 4), ("interleaved", 2, 11), ("zb-v", 2, 4)]
)
def test_what_a_stage_sent_stays_where_a_framework_keeps_it(
    schedule: str, chunks: int, sent: float
) -> None:
    """On the first rank of pp4: of each live microbatch what each chunk sends, but on a V that of
    the last stage."""
    dims = replace(SMALL, vocab=8)  # so few that the ends of the model weigh nothing
    options: dict[str, Any] = {
        "batch": 128,
        "accumulate": 8,
        "schedule": schedule,
        "chunks": chunks,
    }
    bare, more = (
        one("pp4.dp16", "memory", dims, replace(PRACTICE, keeps_sent=keeps), **options)
        for keeps in (False, True)
    )
    value = 2 * SMALL.seq_len * SMALL.hidden  # bytes of the one sample of a microbatch
    assert more["activations"] - bare["activations"] == pytest.approx(sent * value)
    assert {name for name in more if more[name] != bare[name]} == {"activations"}
    assert one("dp64", "memory", practice=replace(PRACTICE, keeps_sent=True)) == one(
        "dp64", "memory"
    )


@pytest.mark.parametrize(
    ("layout", "recompute", "of"),
    [
        ("tp1", "none", lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h)),
        ("tp8", "none", lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        ("tp8+sequence", "none", lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h)),
        ("tp8", "selective", lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
        ("tp8+sequence", "selective", lambda s, b, h, a, t: 34 * s * b * h / t),
        ("tp8", "full", lambda s, b, h, a, t: 2 * s * b * h),
    ],
)
def test_activations_of_korthikanti_2022(layout: str, recompute: str, of: Any) -> None:
    """Table 2, of one layer, in fp16 without a fused attention, with dropout."""
    dims, b = GPT3, 4
    model = transformer_work(dims, "fp16", flash=False, dropout=True)
    choices = laid(layout, batch=b, recompute=recompute)
    (layer,) = [block for block in model.blocks if block.repeated]
    want = of(dims.seq_len, b, dims.hidden, dims.heads, int(choices.sizes["tp"][0]))
    if recompute != "full":
        assert activation_bytes(layer, choices, recompute == "none")[0] == pytest.approx(
            want, rel=1e-9
        )
    ends = [block for block in model.blocks if not block.repeated]
    rest = sum(float(activation_bytes(block, choices, True)[0]) for block in ends)
    memory = parts(
        priced(choices, practice=replace(PRACTICE, compute="fp16"), model=model), "memory"
    )
    assert memory["activations"] == pytest.approx(dims.layers * want + rest, rel=1e-9)


# ---- FLOPs and parameters ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dims", [GPT3, replace(GPT3, layers=24, hidden=2304, heads=24, ffn=4 * 2304)]
)
def test_flops_of_narayanan_2021(dims: TransformerDims) -> None:
    """96 B l s h^2 (1 + s/6h + V/16lh) with the forward that is run again; 72 and 12 without."""
    layers, h, s, v, b = dims.layers, dims.hidden, dims.seq_len, dims.vocab, 8
    plain = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert b * transformer_work(dims).model_flops == pytest.approx(plain)
    again = plain + 24 * b * layers * s * h**2 * (1 + s / (6 * h))
    assert again == pytest.approx(
        96 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    )


@pytest.mark.parametrize(
    ("dims", "count"),
    [
        (GPT3, 96 * (12 * 12288**2 + 13 * 12288) + (51200 + 2048 + 2) * 12288),
        (LLAMA8, 8_030_261_248),
        (LLAMA70, 70_553_706_496),
    ],
)
def test_parameters(dims: TransformerDims, count: int) -> None:
    assert transformer_work(dims).params == pytest.approx(count, rel=1e-6)


def test_mfu_and_tokens_are_those_of_the_step() -> None:
    found = priced(laid("dp8", batch=64))
    assert found.tokens_per_s == pytest.approx(64 * SMALL.seq_len / found.step_s)
    assert found.mfu == pytest.approx(
        transformer_work(SMALL).model_flops * 64 / (found.step_s * 8 * 989e12)
    )
    assert 0 < found.mfu[0] < 1


def test_each_axis_has_a_communicator() -> None:
    found = priced(laid("dp1", "dp8", "dp2.pp2.tp2", batch=8))
    beside = found.process_bytes - found.reserved_bytes
    assert beside == pytest.approx([(1.5 + n * 0.6) * 2**30 for n in (0, 2, 4)])


def test_a_bucket_of_gradients_is_beside_what_the_allocator_has() -> None:
    bucket = replace(PRACTICE, bucket_bytes=1e9)
    plain, more = (priced(laid("dp8", "tp8", batch=8), LLAMA8, p) for p in (PRACTICE, bucket))
    assert more.reserved_bytes - plain.reserved_bytes == pytest.approx([1e9, 0])
    assert (more.over_bytes == plain.over_bytes).all()


def test_what_does_not_fit_says_by_how_much() -> None:
    found = priced(laid("dp8", "fsdp8", batch=8), LLAMA8, PRACTICE)
    assert list(found.fits) == [False, True] and found.over_bytes[1] == 0
    assert found.over_bytes[0] == pytest.approx(found.peak_bytes[0] + (1.5 - 79.1) * 2**30)
    assert found.reserved_bytes == pytest.approx(1.04 * found.peak_bytes), (
        "which it gives back before it fails"
    )


# ---- pipelines -----------------------------------------------------------------------------------


def test_a_pipelines_stages_are_what_simulation_is_given() -> None:
    choices = laid("pp4.dp2", batch=64, accumulate=8)
    cluster = Cluster.parse("h100x8")
    costs = stage_costs(
        transformer_work(SMALL), choices, 0, cluster, cluster.hardware.era("compiled"), PRACTICE
    )
    forward, backward = costs.each("forward_s", 4), costs.each("backward_s", 4)
    assert forward[1] == forward[2] and forward[3] > forward[1] and backward[1] > 0
    found = one("pp4.dp2", batch=64, accumulate=8)
    assert found["bubble"] > 0 and found["pp exposed"] > 0 and one("dp8")["bubble"] == 0


def test_of_two_stages_none_is_between() -> None:
    """Five blocks on two ranks: three on the one with most, as a simulation's stages come to in
    all."""
    odd, even = (replace(SMALL, layers=n, vocab=64) for n in (5, 6))
    assert one("pp2.dp4", dims=odd)["matmul"] == pytest.approx(one("pp2.dp4", dims=even)["matmul"])


def test_what_has_no_repeated_blocks_is_dealt_out() -> None:
    model = transformer_work(SMALL)
    flat = replace(
        model, blocks=tuple(replace(block, repeated=False) for block in model.blocks), vocab=0
    )
    whole, half = (priced(laid(layout, batch=8), model=flat) for layout in ("dp1", "pp2"))
    for what in ("weights", "optimizer"):
        assert parts(half, "memory")[what] == pytest.approx(parts(whole, "memory")[what] / 2)
    assert parts(half)["matmul"] == pytest.approx(parts(whole)["matmul"] / 2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_rank_of_a_v_has_both_ends(tied: bool) -> None:
    dims = replace(SMALL, tied=tied)
    found = one("pp4", "memory", dims, schedule="zb-v", chunks=2, accumulate=8)
    layers = (transformer_work(dims).params - (1 if tied else 2) * 32000 * 1024 - 1024) / 4
    assert found["weights"] == pytest.approx(
        2 * (layers + (1 if tied else 2) * 32000 * 1024 + 1024)
    )
    assert found["temporaries"] >= PRACTICE.logit_bytes * 32000 * 1024 * 8


def test_what_is_sent_beside_compute_is_waited_for_where_it_fills_the_pipeline() -> None:
    def waits(schedule: str, chunks: int, beside: bool) -> float:
        options = {"batch": 64, "accumulate": 8, "schedule": schedule, "chunks": chunks}
        return one("pp4.dp2", practice=replace(PRACTICE, sends_beside=beside), **options)[
            "pp exposed"
        ]

    assert waits("interleaved", 2, True) == pytest.approx(
        3 / 10 * waits("interleaved", 2, False)
    )  # 4 - 1 of 8 + 4 - 2
    assert waits("1f1b", 1, True) == waits("1f1b", 1, False)


def test_more_microbatches_have_a_smaller_share_of_bubble() -> None:
    shares = []
    for m in (4, 8, 32):
        found = priced(laid("pp4.dp2", batch=8 * m, accumulate=m))
        shares.append(parts(found)["bubble"] / float(found.step_s[0]))
    assert shares == sorted(shares, reverse=True)


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no peak"):
        priced(laid("dp8"), practice=replace(PRACTICE, compute="int4"))


def test_many_logits_are_held_in_chunks() -> None:
    """A twenty-fourth of them, with the head's gradient; all of them where a backward
    in two parts would make them twice."""
    count, whole = 32000 * 1024 * 8, PRACTICE.logit_bytes * 32000 * 1024 * 8
    chunks = replace(PRACTICE, few_logits=2**20, chunk_bytes=8.0, sum_bytes=4.0)

    def held(practice: PrecisionPolicy, layout: str = "dp1", **options: Any) -> float:
        dims = replace(SMALL, tied=False)
        return one(layout, "memory", dims, practice=practice, accumulate=8, **options)[
            "temporaries"
        ]

    assert held(PRACTICE) == pytest.approx(whole)
    found = held(chunks)
    assert found == pytest.approx(8 * count / 24 + 4 * 32000 * 1024)
    assert found < whole / 8
    assert held(replace(chunks, few_logits=count)) == pytest.approx(whole)
    assert held(chunks, "pp2", schedule="zb-h1") == pytest.approx(whole)
    assert held(replace(chunks, always_chunks=True), "pp2", schedule="zb-h1") < whole / 8
