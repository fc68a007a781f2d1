"""What an estimate takes for software that launches, computes and updates in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft.core.layout import Layout
from weft.planner.cost.compute import _host_paced
from weft.planner.cost.estimate import Estimate, estimate
from weft.planner.cost.fit import fit_era
from weft.planner.cost.hardware import Cluster, Era
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.transformer_work import TransformerDims, transformer_work

DIMS = TransformerDims(8, 1024, 16, 32000, 1024, 4096, gated=True, tied=False)
CLUSTER = Cluster.parse("a100x8")
POLICY = PrecisionPolicy(weight_bytes=2, grad_bytes=2, state_bytes=12, logit_bytes=18)


def priced(
    layout: str,
    policy: PrecisionPolicy = POLICY,
    dims: TransformerDims = DIMS,
    era: Era | None = None,
    **options: Any,
) -> Estimate:
    choices = LayoutBatch.of([Layout.parse(layout)], batch=16)
    work = transformer_work(dims, **options)
    return estimate(work, choices, CLUSTER, era or CLUSTER.hardware.era("megatron"), policy)


def memory(found: Estimate) -> Mapping[str, float]:
    return {part.name: float(np.broadcast_to(part.value, 1)[0]) for part in found.memory}


def time(found: Estimate) -> Mapping[str, float]:
    return {part.name: float(np.broadcast_to(part.value, 1)[0]) for part in found.time}


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [0.0, 0.1, 0.3, 1.0])
def test_launches_add_most_where_they_take_as_long_as_the_work(waits: float) -> None:
    era = Era(waits=waits)
    took, floor = np.array([1.0, 10.0, 0.1, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    found = _host_paced(took, floor, era)
    assert found[0] == pytest.approx(1 + waits)
    assert found[3:] == pytest.approx([1.0, 0.0])
    assert found[1] == pytest.approx(10 * found[2])  # either hides the other alike
    assert 10 <= found[1] <= 10 + waits


def test_much_work_hides_launches_but_where_none_queues() -> None:
    took, floor = np.array([10.0]), np.array([1.0])
    assert _host_paced(took, floor, Era(waits=0.3))[0] < 10.02
    assert _host_paced(took, floor, Era(waits=1.0))[0] == pytest.approx(11)


# ---- a loss of all logits ------------------------------------------------------------------------


def test_a_loss_that_gathers_logits_holds_all_on_each_rank() -> None:
    every = replace(POLICY, gathers_logits=True)
    count = 18 * 32000 * 1024 * 16
    assert memory(priced("tp8", every))["temporaries"] == pytest.approx(count)
    assert memory(priced("tp8"))["temporaries"] < count / 4
    one, other = priced("dp8", every), priced("dp8")
    assert (
        memory(one)["temporaries"] == memory(other)["temporaries"]
    )  # without tp there is nothing to gather


def test_a_loss_that_gathers_logits_takes_as_long_on_each_rank() -> None:
    every = replace(POLICY, gathers_logits=True)
    own, gathered = time(priced("tp8")), time(priced("tp8", every, eager=("loss",)))
    assert gathered["tp exposed"] > own["tp exposed"]
    rate = CLUSTER.hardware.device.memory_bps * CLUSTER.hardware.era("megatron").memory
    nbytes = 1.6 * 32000 * 1024 * 16  # of the forward, and 0.6 times as many of the backward
    more = gathered["memory"] - own["memory"]
    assert more == pytest.approx((20 - 10 / 8) * nbytes / rate)


# ---- op by op ------------------------------------------------------------------------------------


def layer(**options: Any) -> Mapping[str, Any]:
    work = transformer_work(DIMS, **options)
    return {op.name: op for op in next(block for block in work.blocks if block.repeated).ops}


def test_what_goes_op_by_op_moves_and_keeps_more() -> None:
    plain, eager = layer(), layer(eager=("norms", "elementwise"))
    assert eager["norm"].moved_bytes == 9 * plain["norm"].moved_bytes
    assert eager["norm"].saved_bytes > plain["norm"].saved_bytes
    assert "rotation" in eager and "rotation" not in plain
    assert eager["activation"].saved_bytes == 2 * plain["activation"].saved_bytes
    scores = DIMS.heads * DIMS.seq_len**2
    fused, op_by_op = layer(flash=False), layer(flash=False, eager=("softmax",))
    assert op_by_op["softmax"].moved_bytes - fused["softmax"].moved_bytes == 18 * scores


def test_the_first_flash_attention_is_slower() -> None:
    assert layer(flash_version=1)["attention"].flops == 1.7 * layer()["attention"].flops


def test_a_ragged_head_is_not_a_ragged_vocabulary() -> None:
    odd = replace(DIMS, hidden=1160, heads=8)  # heads of 145, a vocabulary that fits
    words = replace(DIMS, vocab=32001)

    def slower(dims: TransformerDims, **change: float) -> bool:
        era = CLUSTER.hardware.era("megatron")
        base = era.model_copy(update={"launch_s": 0.0})
        changed = base.model_copy(update=change)
        found = [priced("dp8", dims=dims, era=e, flash=False).step_s[0] for e in (base, changed)]
        return bool(found[1] > 1.001 * found[0])

    assert slower(odd, ragged_heads=0.05) and not slower(odd, ragged=0.05)
    assert slower(words, ragged=0.05) and not slower(words, ragged_heads=0.05)


# ---- a step of the optimizer ---------------------------------------------------------------------


def test_a_step_of_the_optimizer_stands_in_place_of_activations() -> None:
    params = transformer_work(DIMS).params
    little, much = (memory(priced("dp8", replace(POLICY, step_bytes=n))) for n in (1.0, 1e3))
    gone = little["activations"] + little["temporaries"]
    assert little["update"] == 0
    assert much["update"] == pytest.approx(1e3 * params - gone)
    sharded = memory(priced("fsdp8+zero1", replace(POLICY, step_bytes=1e3)))
    assert sharded["update"] == pytest.approx(1e3 * params / 8 - gone)


# ---- sums of whole gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["fsdp8+zero1", "dp2.fsdp4+zero1"])
def test_zero1_may_sum_whole_gradients(layout: str) -> None:
    """As one all-reduce over all that have other samples, and the gather stays."""
    policy = replace(POLICY, overlaps=False)
    found = priced(layout, replace(policy, sums_whole=True))
    parts, plain = time(found), time(priced("dp8", policy))
    assert parts["dp exposed"] == pytest.approx(plain["dp exposed"])
    assert parts["fsdp reduce exposed"] == 0
    shards = time(priced(layout, policy))
    assert parts["fsdp gather exposed"] == shards["fsdp gather exposed"] > 0
    params = transformer_work(DIMS).params
    wire = 7 / 8 * 2 * params * policy.reduce_bytes
    size = {"fsdp8+zero1": 8, "dp2.fsdp4+zero1": 4}[layout]
    gathered = (size - 1) / size * params * policy.gather_bytes
    assert sum(found.traffic.values()) == pytest.approx(wire + gathered)


@pytest.mark.parametrize("layout", ["fsdp8+zero2", "fsdp8", "dp8"])
def test_only_zero1_sums_whole_gradients_beside_shards(layout: str) -> None:
    every = replace(POLICY, sums_whole=True, whole_bytes=34)
    assert priced(layout, every).step_s == priced(layout).step_s


def test_casts_of_whole_gradients_are_read_and_written() -> None:
    policy = replace(POLICY, overlaps=False, sums_whole=True)
    few, many = (
        time(priced("fsdp8+zero1", replace(policy, whole_bytes=n)))["dp exposed"] for n in (0, 34)
    )
    rate = CLUSTER.hardware.device.memory_bps * CLUSTER.hardware.era("megatron").memory
    assert many - few == pytest.approx(34 * transformer_work(DIMS).params / rate)


def test_a_step_that_awaits_weights_hides_no_gather() -> None:
    hidden, awaited = (
        time(priced("fsdp8+zero1", replace(POLICY, awaits_weights=awaits)))["fsdp gather exposed"]
        for awaits in (False, True)
    )
    alone = time(priced("fsdp8+zero1", replace(POLICY, overlaps=False)))["fsdp gather exposed"]
    assert hidden < awaited == alone


# ---- fits ----------------------------------------------------------------------------------------


def test_a_constant_that_no_run_tells_stays_where_it_was() -> None:
    pytest.importorskip("scipy")
    start = Era(matmul=0.5, launch_s=5e-5)

    def predict(era: Era) -> np.ndarray:
        return np.array([1.0, 2.0]) / era.matmul * (1 + 1e-4 * np.log(era.launch_s))

    seen = predict(Era(matmul=0.7, launch_s=5e-5)) * np.array([0.999, 1.001])
    found = fit_era(predict, seen, start, ("matmul", "launch_s"), toward=0.01)
    assert found.matmul == pytest.approx(0.7, rel=0.01)
    assert found.launch_s == pytest.approx(5e-5, rel=0.05)
