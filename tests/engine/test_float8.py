"""float8 in an Engine: which devices, what is kept and named, and where it is left out."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Fused
from tests.verification.test_parity import transformer
from weft.core import ConfigError, Float8Linears, emulate_float8
from weft.engine import check_float8
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.parallel import linear_products

BATCH = 8
tiny = partial(decoder, VOCAB, 64, 2, 4, 2, seq_len=LENGTH)


def tokens(step: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH))}


def planned(layout: str, build: Any = tiny, recipe: str = "rowwise", **plan: Any) -> weft.Plan:
    given = {"loss": next_token, "precision": "bf16", "sample": tokens()} | plan
    made = weft.plan(build(), layout, batch=BATCH, float8=recipe, **given)
    return emulate_float8(made)


def engine(layout: str, build: Any = tiny, recipe: str = "rowwise", **further: Any) -> weft.Engine:
    torch.manual_seed(0)
    model = build()
    plan = planned(layout, build, recipe, **further.pop("plan", {}))
    adam = partial(torch.optim.AdamW, lr=3e-3)
    return weft.Engine(model, plan, optimizer=adam, loss=next_token, device="cpu", **further)


# ---- which devices -------------------------------------------------------------------------------


def refused(recipe: str, device: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_float8(Float8Linears(recipe, ("a",)), torch.device(device))
    assert caught.value.field == "precision.float8" and caught.value.value == recipe
    return caught.value


def test_a_cpu_is_refused_unless_it_emulates() -> None:
    assert "a CPU has no float8" in str(refused("rowwise", "cpu"))
    check_float8(Float8Linears("rowwise", ("a",), emulated=True), torch.device("cpu"))
    check_float8(None, torch.device("cpu"))
    plan = weft.plan(tiny(), "dp1", batch=BATCH, precision="bf16", float8="tensorwise")
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="--precision float8 emulates it"):
        weft.Engine(tiny(), plan, optimizer=sgd, loss=next_token, device="cpu")


def test_a_gpu_needs_its_compute_capability(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for capability, recipe, passes in [
        ((8, 0), "tensorwise", False),
        ((8, 9), "tensorwise", True),
        ((8, 9), "rowwise", False),
        ((8, 9), "rowwise_with_gw_hp", False),
        ((9, 0), "rowwise", True),
        ((10, 0), "rowwise_with_gw_hp", True),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        if passes:
            check_float8(Float8Linears(recipe, ("a",)), torch.device("cuda"))
            continue
        said = str(refused(recipe, "cuda"))
        assert "and a card has " + ".".join(map(str, capability)) in said
        assert ('Use "tensorwise"' in said) == (capability == (8, 9))


def test_of_amd_mi300_and_later_pass(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for kind, passes in (("gfx942:sramecc+", True), ("gfx950", True), ("gfx90a", False)):
        card = SimpleNamespace(gcnArchName=kind)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, c=card: c)
        if passes:
            check_float8(Float8Linears("rowwise", ("a",)), torch.device("cuda"))
        else:
            assert f"a card ({kind}) has no float8" in str(refused("rowwise", "cuda"))


# ---- every linear that the plan names ------------------------------------------------------------


def products_of_a_step(layout: str, build: Any) -> tuple[int, int]:
    """Products in float8 of a step's forward on this rank, and the linears that the plan names."""
    made, count = linear_products._by_torchao, [0]

    def counting(float8: Float8Linears) -> Any:
        multiply = made(float8)

        def run(x: Tensor, weight: Tensor) -> Tensor:
            count[0] += 1
            return multiply(x, weight)

        return run

    linear_products._by_torchao = counting
    try:
        e = engine(layout, build)
        e.step(e.local(tokens()))
    finally:
        linear_products._by_torchao = made
    assert e.rank_plan.float8 is not None
    return count[0], len(e.rank_plan.float8.linears)


@pytest.mark.parametrize(
    ("layout", "build"),
    [
        ("fsdp2", tiny),
        ("tp4", tiny),  # ranks share heads of keys
        ("tp2+sequence", partial(Fused, dim=64)),  # rows with biases
        ("tp2", partial(transformer, "gpt2")),
        ("pp2", tiny),
    ],
)
def test_each_linear_multiplies_in_float8(pool: Any, layout: str, build: Any) -> None:
    world = weft.Layout.parse(layout).world
    for count, linears in pool.run(products_of_a_step, layout, build, world=world):
        assert count == linears > 0


# ---- what does not change ------------------------------------------------------------------------


def kept(layout: str, recipe: str) -> list[Any]:
    e = engine(layout, recipe=recipe, plan={"accumulate": 2})
    e.step(e.local(tokens()))
    held = [(t.name, t.shape, str(t.tensor.dtype)) for t in e.tensors()]
    filled = [(n, str(p.dtype), str(p.grad.dtype)) for n, p in e.low.filled.items()]
    with weft.engine.Audit(e.mesh) as audit:
        e.step(e.local(tokens(1)))
    return [held, filled, [(c.kind, c.axis, c.nbytes) for c in audit.seen]]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2+sequence"])
def test_masters_checkpoints_and_messages_are_those_of_bf16(pool: Any, layout: str) -> None:
    plain, low = (pool.run(kept, layout, recipe, world=2) for recipe in ("off", "rowwise"))
    assert low == plain


def trial(layout: str) -> float:
    """How far a model's output in float8 is from that in bf16, by an engine that was tried."""
    sample = {key: value[:2] for key, value in tokens().items()}
    low = engine(layout, recipe="tensorwise", sample=sample).forward(tokens())
    exact = engine(layout, recipe="off").forward(tokens())
    return float((low - exact).norm() / exact.norm())


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_the_trial_of_a_layout_sees_no_rounding_to_float8(pool: Any, layout: str) -> None:
    # else it would be refused: the bound in float64 is far below
    assert all(error > 0.01 for error in pool.run(trial, layout, world=2))


def learns(layout: str, recipe: str, plan: dict[str, Any]) -> tuple[float, float]:
    e = engine(layout, recipe=recipe, plan=plan)
    found = [float(e.step(e.local(tokens(step % 2))).loss) for step in range(12)]
    assert float(e.evaluate(e.local(tokens(0))).loss) < found[0]
    e.close()
    return found[0], found[-1]


WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("pp2", "tensorwise", {"accumulate": 4, "schedule": "pipedream"}),
    ("pp2.tp2", "rowwise", {"accumulate": 4, "schedule": "zb-h1", "recompute": "full"}),
    ("dp2", "rowwise_with_gw_hp", {"sync": weft.sync.make_sync("diloco", period=4)}),
    ("fsdp2", "rowwise", {"recompute": "selective"}),
]


@pytest.mark.parametrize(("layout", "recipe", "plan"), WAYS)
def test_every_way_to_train_learns(
    pool: Any, layout: str, recipe: str, plan: dict[str, Any]
) -> None:
    world = weft.Layout.parse(layout).world
    for first, last in pool.run(learns, layout, recipe, plan, world=world):
        assert last < first - 0.2


def test_a_model_of_ones_own_may_be_cast_by_itself() -> None:
    """Biases are added in bf16, and the output has the dtype of the input."""
    e = engine("dp1", partial(Fused, dim=64))
    seen: list[torch.dtype] = []
    for module in e.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    e.step(e.local(tokens()))
    assert set(seen) == {torch.bfloat16}
