"""What runs tell of layers of one shape: at that shape, near it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.test_cost_estimate import EXPERTS, PRACTICE, SMALL, laid
from weft.core.errors import ConfigError
from weft.core.toml import dump_toml
from weft.planner.cost import hardware
from weft.planner.cost.estimate import Estimate, estimate
from weft.planner.cost.fit import fit_layers
from weft.planner.cost.hardware import Cluster, Era, LayerTiming
from weft.planner.cost.layer_correction import (
    MEASURED,
    NEAR,
    layer_factor,
    layer_shapes,
    main_layer_shape,
)
from weft.planner.cost.transformer_work import TransformerDims, transformer_work

LAYOUTS = ("dp8", "tp2.dp4", "tp4.dp2", "tp8", "pp2.dp4", "cp2.dp4")
CHOICES = laid(*LAYOUTS, batch=16)  # of four samples in a microbatch on tp2.dp4
CLUSTER = Cluster.parse("h100x8")
PLAIN = CLUSTER.hardware.era("compiled")


def at(dims: TransformerDims = SMALL) -> np.ndarray:
    found = main_layer_shape(transformer_work(dims), CHOICES)
    assert found is not None
    return found


def told(took: float, tp: float = 2, samples: float = 4.0) -> LayerTiming:
    return LayerTiming(
        flops=2 ** float(at()[0, 0]), tokens=SMALL.seq_len, samples=samples, tp=tp, took=took
    )


def priced(*layers: LayerTiming) -> Estimate:
    return estimate(
        transformer_work(SMALL),
        CHOICES,
        CLUSTER,
        PLAIN.model_copy(update={"layers": layers}),
        PRACTICE,
    )


def test_a_layer_tells_of_its_shape_and_of_no_other() -> None:
    plain, found = priced(), priced(told(1.5))
    longer = found.step_s / plain.step_s
    assert longer[1] > 1.05
    np.testing.assert_array_equal(np.delete(longer, 1), 1.0)
    parts = {part.name: np.broadcast_to(part.value, 6) for part in found.time}
    np.testing.assert_allclose(sum(parts.values()), found.step_s)
    assert parts[MEASURED][1] == pytest.approx(found.step_s[1] - plain.step_s[1])
    before = {part.name: np.broadcast_to(part.value, 6) for part in plain.time}
    assert all(
        (parts[name] == before[name]).all() for name in before
    )  # what the constants say stays to be seen


def test_a_layer_tells_less_of_what_is_farther() -> None:
    block = next(b for b in transformer_work(SMALL).blocks if b.repeated)
    here = layer_shapes(transformer_work(SMALL), block, CHOICES)[1]
    assert here.tolist() == pytest.approx(
        [np.log2(sum(op.flops for op in block.ops)), 10.0, 2.0, 1.0]
    )
    assert layer_factor([told(1.5)], here[None]) == pytest.approx(1.5)
    for dim in range(4):
        near = here + NEAR * np.eye(4)[dim]
        assert layer_factor([told(1.5)], near[None]) == pytest.approx(1.5 ** np.exp(-0.5))
    assert layer_factor([told(1.2), told(1.8)], here[None]) == pytest.approx((1.2 * 1.8) ** 0.5)


def test_another_sequence_of_as_many_flops_is_another_shape() -> None:
    longer = replace(SMALL, seq_len=2 * SMALL.seq_len)
    assert (
        layer_factor([told(1.5)], np.where([True, False, True, True], at()[1], at(longer)[1])[None])
        == 1.0
    )


def test_layers_are_learned_so_that_steps_agree() -> None:
    which = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    true = priced(told(1.5), told(0.8, tp=1, samples=2)).step_s[which]

    def predict(era: Era) -> np.ndarray:
        return estimate(transformer_work(SMALL), CHOICES, CLUSTER, era, PRACTICE).step_s[which]

    noise = np.array([1, 1, 1, 0.99, 1, 1.01, 9, 1, 1])  # one run is far out
    era = fit_layers(predict, list(true * noise), at()[which], PLAIN)
    found = {one.tp: one.took for one in era.layers}
    assert found == {
        1: pytest.approx(0.8, rel=0.01),
        2: pytest.approx(1.5, rel=0.02),
    }  # of tp4 are two runs
    assert era.model_copy(update={"layers": ()}) == PLAIN


def test_runs_that_do_not_agree_tell_nothing_of_a_layer() -> None:
    which = np.array([1, 1, 1, 1])
    step_s = priced().step_s[which]
    assert (
        fit_layers(lambda era: step_s, list(step_s * [0.8, 0.9, 1.1, 1.3]), at()[which], PLAIN)
        == PLAIN
    )


def test_the_shape_of_a_mixture_is_that_of_the_layers_with_most_work() -> None:
    mixed = transformer_work(replace(EXPERTS, dense=1))
    most = max((b for b in mixed.blocks if b.repeated), key=lambda b: b.count)
    found = main_layer_shape(mixed, CHOICES)
    assert found is not None and (found == layer_shapes(mixed, most, CHOICES)).all()
    alone = replace(mixed, blocks=tuple(replace(block, repeated=False) for block in mixed.blocks))
    assert main_layer_shape(alone, CHOICES) is None


def test_layers_of_a_sheet_are_read_and_refused_by_name() -> None:
    sheet = Cluster.parse("a100x8").hardware
    assert len(sheet.era("megatron").layers) > 20
    assert hardware.parse_sheet(dump_toml(sheet), "sheet") == sheet
    for wrong, said in (("tp = 0", "eras.megatron.layers"), ("speed = 1, tp = 2", "speed")):
        layer = f"layers = [{{ flops = 1e9, tokens = 1, samples = 1, {wrong}, took = 1.1 }}]"
        text = dump_toml(sheet.model_copy(update={"eras": {"megatron": Era()}})).replace(
            "layers = []", layer
        )
        assert layer in text
        with pytest.raises(ConfigError, match=said):
            hardware.parse_sheet(text, "sheet")
