"""What runs tell of layers of one shape: at that shape, near it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_cost_estimate import EXPERTS, PRACTICE, SMALL, laid

from weft.cost.dims import Dims, work
from weft.cost.estimate import Estimate, estimate
from weft.cost.fit import learned
from weft.cost.hardware import Cluster, Era, Layer
from weft.cost.layers import NEAR, of_most, shapes, times
from weft.errors import ConfigError

LAYOUTS = ("dp8", "tp2.dp4", "tp4.dp2", "tp8", "pp2.dp4", "cp2.dp4")
CHOICES = laid(*LAYOUTS, batch=16)


def told(tp: float, took: float, runs: int = 9, dims: Dims = SMALL, samples: float = 4.0) -> Layer:
    model = work(dims)
    flops = 2 ** float(of_most(model, CHOICES)[0, 0])
    return Layer(flops=flops, samples=samples, tp=tp, took=took, runs=runs)


def with_layers(*layers: Layer, dims: Dims = SMALL) -> tuple[Estimate, Estimate]:
    cluster = Cluster.parse("h100x8")
    era = cluster.hardware.era("compiled")
    eras = (era, era.model_copy(update={"layers": layers}))
    plain, found = (estimate(work(dims), CHOICES, cluster, each, PRACTICE) for each in eras)
    return plain, found


def test_a_layer_tells_of_its_shape_and_of_no_other() -> None:
    plain, found = with_layers(told(tp=2, took=1.5))  # of four samples, as tp2.dp4 has
    longer = found.step_s / plain.step_s
    assert longer[1] > 1.05
    np.testing.assert_allclose(np.delete(longer, 1), 1.0, atol=0.02)
    parts = {part.name: np.broadcast_to(part.value, 6) for part in found.time}
    np.testing.assert_allclose(sum(parts.values()), found.step_s)
    assert parts["as measured"][1] > 0
    before = {part.name: np.broadcast_to(part.value, 6) for part in plain.time}
    np.testing.assert_allclose(parts["matmul"], before["matmul"])  # what the constants say stays to be seen


def test_of_many_runs_a_layer_takes_what_they_took() -> None:
    block = next(b for b in work(SMALL).blocks if b.repeated)
    at = shapes(block, CHOICES)
    assert at[1].tolist() == pytest.approx([np.log2(sum(op.flops for op in block.ops)), 2.0, 1.0])
    assert times([told(tp=2, took=1.5, runs=10**6)], at)[1] == pytest.approx(1.5, rel=1e-5)
    assert times([told(tp=2, took=1.5, runs=1)], at)[1] == pytest.approx(1.5**0.5)  # one run is half believed
    near = at[1] + [NEAR, 0.0, 0.0]
    assert times([told(tp=2, took=1.5, runs=10**6)], near[None])[0] == pytest.approx(1.5 ** np.exp(-0.5), rel=1e-5)


def test_where_layers_are_near_each_other_they_are_averaged() -> None:
    at = of_most(work(SMALL), CHOICES)[1:2]
    same = [told(tp=2, took=took, runs=10**6) for took in (1.2, 1.8)]
    assert times(same, at)[0] == pytest.approx((1.2 * 1.8) ** 0.5, rel=1e-4)


def test_layers_are_learned_from_what_constants_leave() -> None:
    at = of_most(work(SMALL), CHOICES)[[0, 1, 1, 1, 2, 2]]
    predicted = np.array([2.0, 1.0, 1.0, 2.0, 1.0, 3.0])
    era = learned(predicted, predicted * [1.002, 1.3, 1.3, 5.0, 0.8, 0.8], at, Era())
    assert [(one.tp, one.samples, one.took, one.runs) for one in era.layers] == [(2, 4, 1.3, 3), (4, 8, 0.8, 2)]
    assert era.model_copy(update={"layers": ()}) == Era()


def test_the_shape_of_a_mixture_is_that_of_the_layers_with_most_work() -> None:
    mixed = work(replace(EXPERTS, dense=1))
    most = max((b for b in mixed.blocks if b.repeated), key=lambda b: b.count)
    assert (of_most(mixed, CHOICES) == shapes(most, CHOICES)).all()


def test_layers_of_a_sheet_are_read_and_refused_by_name() -> None:
    from weft.cost import hardware
    from weft.tables import dump

    sheet = Cluster.parse("a100x8").hardware
    assert len(sheet.era("megatron").layers) > 20
    assert hardware.parse(dump(sheet), "sheet") == sheet
    for wrong, said in (("tp = 0", "eras.megatron.layers"), ("speed = 1, tp = 2", "speed")):
        layer = f"layers = [{{ flops = 1e9, samples = 1, {wrong}, took = 1.1, runs = 3 }}]"
        text = dump(sheet.model_copy(update={"eras": {"megatron": Era()}})).replace("layers = []", layer)
        assert layer in text
        with pytest.raises(ConfigError, match=said):
            hardware.parse(text, "sheet")
