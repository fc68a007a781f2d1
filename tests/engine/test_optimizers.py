"""Every optimizer equals one device on every layout; groups, marks and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Subject
from weft.checkpoint import Retention, fill_engine, save_checkpoint
from weft.core.errors import ConfigError
from weft.engine.adamw8bit import _load, _store
from weft.engine.optimizer_factory import make_optimizer
from weft.engine.optimizers import elementwise
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.sync import make_sync
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference, run_reference

GROUPS: dict[str, Any] = {
    "decay_min_dims": 2,
    "groups": {"embedding.*": {"lr": 3e-3, "weight_decay": 0.2}, "*.wq.*": {"lr": 5e-3}},
}


@elementwise
class SignMomentum(torch.optim.SGD):
    """A user's own."""


OPTIMIZERS: dict[str, Any] = {
    "adamw": make_optimizer("adamw", lr=1e-2, weight_decay=0.1, **GROUPS),
    "adamw-foreach": make_optimizer("adamw", lr=1e-2, foreach=True, **GROUPS),
    "sgd": make_optimizer("sgd", lr=1e-2, momentum=0.9, **GROUPS),
    "adagrad": make_optimizer("adagrad", lr=1e-2),
    "rmsprop": make_optimizer("rmsprop", lr=1e-3),
    "rprop": make_optimizer("rprop", lr=1e-3),
    "lion": make_optimizer("lion", lr=1e-3, weight_decay=0.1, **GROUPS),
    "adafactor": make_optimizer("adafactor", lr=1e-2, weight_decay=0.1, **GROUPS),
    "muon": make_optimizer(
        "muon", lr=1e-2, adamw_lr=1e-3, adamw=["embedding.*", "head.*"], decay_min_dims=2
    ),
    "adamw8bit": make_optimizer("adamw8bit", lr=1e-2, **GROUPS),
    "own": partial(SignMomentum, lr=1e-2),
}
DECODER = Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH), clip=0.5)
EXPERTS = Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, experts=4))
PIPEDREAM = Subject(
    partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH),
    plan=(("accumulate", 4), ("schedule", "pipedream")),
)


def case_of(name: str, subject: Subject = DECODER) -> Case:
    return replace(subject.case(), optimizer=OPTIMIZERS[name])


@cache
def reference(name: str, subject: Subject = DECODER) -> Reference:
    return run_reference(case_of(name, subject), 2)


def verified(pool: Any, name: str, layout: str, subject: Subject = DECODER) -> LayoutResult:
    world = weft.Layout.parse(layout).world
    found = pool.run(
        check_layout, case_of(name, subject), layout, reference(name, subject), world=world
    )[0]
    assert isinstance(found, LayoutResult)
    return found


ELEMENTWISE = [
    *(("adamw", layout) for layout in ("dp2", "fsdp2.tp2", "fsdp2+zero1", "pp2", "pp2.fsdp2")),
    *(("adamw-foreach", layout) for layout in ("fsdp2", "tp2")),
    *(("sgd", layout) for layout in ("fsdp2", "tp2+sequence")),
    *(("adagrad", layout) for layout in ("fsdp2", "tp2")),
    *(("rmsprop", layout) for layout in ("fsdp2+zero2",)),
    *(("rprop", layout) for layout in ("dp2", "fsdp2", "tp2")),
    *(("lion", layout) for layout in ("dp2", "fsdp2", "fsdp2+zero1", "tp2", "pp2.dp2", "dp2.tp2")),
    ("own", "fsdp2"),
    *(("adamw8bit", layout) for layout in ("dp2", "fsdp2", "pp2", "fsdp2+zero1")),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), ELEMENTWISE)
def test_an_elementwise_optimizer_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = verified(pool, name, layout)
    assert result.passed, result


WHOLE = [
    *(("adafactor", layout) for layout in ("dp2", "fsdp2", "tp2", "fsdp2.tp2", "fsdp2+zero1")),
    *(("muon", layout) for layout in ("dp2", "fsdp2", "fsdp2+zero2", "tp2", "dp2.fsdp2", "tp4")),
    *(("muon", layout) for layout in ("pp2.fsdp2", "pp2.tp2", "fsdp2+offload", "vp2")),
    *(("muon", layout) for layout in ("fsdp2.tp2+sequence", "fsdp4", "dp2.tp2", "fsdp2.cp2")),
    *(("adamw8bit", layout) for layout in ("tp2", "fsdp2.tp2")),  # 32 columns: cut inside of blocks
]
SPREAD = [("muon", "ep2"), ("adafactor", "dp2+ep"), ("lion", "fsdp2+ep"), ("adafactor", "fsdp2+ep")]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), WHOLE)
def test_an_optimizer_of_whole_tensors_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = verified(pool, name, layout)
    assert result.passed, result


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), SPREAD)
def test_an_optimizer_of_spread_experts_equals_one_device(
    pool: Any, name: str, layout: str
) -> None:
    result = verified(pool, name, layout, EXPERTS)
    assert result.passed, result


@pytest.mark.parametrize(
    ("name", "layout"), [("muon", "pp2.tp2"), ("adafactor", "pp2.tp2"), ("lion", "pp2.dp2")]
)
def test_stages_that_update_by_themselves(pool: Any, name: str, layout: str) -> None:
    case = case_of(name, PIPEDREAM)
    delayed = run_delayed(case, layout, 2)
    result = pool.run(check_layout, case, layout, delayed, world=4)[0]
    assert result.passed, result


@pytest.mark.parametrize(("name", "layout"), [("muon", "dp2.tp2"), ("adafactor", "dp2")])
def test_owners_that_update_for_all(pool: Any, name: str, layout: str) -> None:
    plan = (("accumulate", 2), ("sync", make_sync("central")))
    result = verified(pool, name, layout, replace(DECODER, plan=plan))
    assert result.passed, result


def test_blocks_that_a_layout_does_not_cut_stay_sharded(pool: Any) -> None:
    """Rows of 256 over two ranks: each has a whole block of 128."""
    build = partial(decoder, VOCAB, 256, 1, 4, 4, seq_len=LENGTH, hidden=256)
    result = verified(pool, "adamw8bit", "tp2", Subject(build))
    assert result.passed, result
    assert ("all_to_all", "tp") not in result.comms_seen
    narrow = verified(pool, "adamw8bit", "tp2")
    assert narrow.comms_seen["all_to_all", "tp"][0] == 2


# ---- what they compute ---------------------------------------------------------------------------


def test_lion_is_that_of_the_paper() -> None:
    """Algorithm 2 of Chen et al. 2023, element by element."""
    torch.manual_seed(0)
    lr, (now, later), decay = 0.1, (0.8, 0.95), 0.3
    p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    made = make_optimizer("lion", lr=lr, betas=[now, later], weight_decay=decay)([("p", p)])
    weight, momentum = p.detach().clone(), torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(4):
        p.grad = torch.randn(3, 4, dtype=torch.float64)
        made.step()
        step = torch.sign(now * momentum + (1 - now) * p.grad)
        weight = weight - lr * (step + decay * weight)
        momentum = later * momentum + (1 - later) * p.grad
        torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.state[p]["exp_avg"], momentum, rtol=1e-12, atol=1e-12)


def test_8_bit_moments_stay_near_those_of_adamw() -> None:
    torch.manual_seed(0)
    begin, shape = torch.randn(20, 300), (20, 300)
    made = {}
    for name in ("adamw", "adamw8bit"):
        p = nn.Parameter(begin.clone())
        made[name] = make_optimizer(name, lr=1e-2, weight_decay=0.1)([("p", p)]), p
    scale = torch.logspace(-4, 0, 300)  # rows whose elements differ ten thousandfold
    for _ in range(30):
        grad = torch.randn(shape) * scale
        for optimizer, p in made.values():
            p.grad = grad.clone()
            optimizer.step()
    (_, exact), (optimizer, p) = made.values()
    assert (p - exact).norm() < 0.05 * (exact - begin).norm()
    state = optimizer.state[p]
    assert sum(v.numel() * v.itemsize for v in state.values() if v.ndim) < 2.1 * p.numel()
    assert state["exp_avg_scale"].shape == (20, 3)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_holds_its_own_values(signed: bool) -> None:
    """What is decoded is encoded as the same code; each element is off by less than its table's
    step."""
    moment = torch.randn(4, 300).abs_() if not signed else torch.randn(4, 300)
    state: dict[str, Any] = {}
    _store(state, "m", moment, signed)
    once = _load(state, "m", moment, signed)
    assert (once - moment).abs().max() < 0.02 * moment.abs().max()
    tiny = torch.tensor([[1.0, 1e-8, 0.0]])
    _store(small := {}, "m", tiny, signed)
    assert signed or (_load(small, "m", tiny, signed) > 0).tolist() == [[True, True, False]]
    codes = state["m"].clone()
    _store(state, "m", once.clone(), signed)
    assert torch.equal(state["m"], codes)


# ---- groups --------------------------------------------------------------------------------------


def groups_of(made: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Parameter -> (lr, weight decay)."""
    return {
        name: (group["lr"], group["weight_decay"])
        for group in made.param_groups
        for name in group["param_names"]
    }


class Net(nn.Module):
    """A norm, two linears of which one is tied to the embedding, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.hidden, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.hidden(self.norm(self.embedding(input_ids)))))


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def test_groups_take_the_first_pattern_that_matches() -> None:
    made = make_optimizer(
        "adamw",
        lr=1.0,
        weight_decay=0.5,
        no_decay=["*.bias", "norm.*"],
        groups={
            "hidden.weight": {"lr": 2.0},
            "hidden.*": {"lr": 3.0},
            "norm.weight": {"weight_decay": 0.25},
        },
    )
    assert groups_of(made(named(Net()))) == {
        "embedding.weight": (1.0, 0.5),
        "norm.weight": (1.0, 0.25),
        "norm.bias": (1.0, 0.0),
        "hidden.weight": (2.0, 0.5),
        "hidden.bias": (3.0, 0.0),
    }


def test_decay_by_dims() -> None:
    made = make_optimizer("lion", lr=1.0, weight_decay=0.5, decay_min_dims=2)(named(Net()))
    decayed = [name for name, (_, decay) in groups_of(made).items() if decay]
    assert decayed == ["embedding.weight", "hidden.weight"]


def test_muon_has_hidden_matrices_alone() -> None:
    arguments: dict[str, Any] = {"lr": 0.02, "adamw": ["embedding.*"], "adamw_lr": 1e-3}
    made = make_optimizer("muon", **arguments, groups={"norm.*": {"lr": 5.0}})(named(Net()))
    muon, adamw = made.parts  # type: ignore[attr-defined]
    assert [*groups_of(muon)] == ["hidden.weight"]
    assert groups_of(adamw)["norm.bias"][0] == 5.0
    assert groups_of(adamw)["embedding.weight"][0] == 1e-3
    made.param_groups[0]["lr"] = 7.0
    assert muon.param_groups[0]["lr"] == 7.0
    copied = make_optimizer("muon", **arguments, groups={"norm.*": {"lr": 5.0}})(named(Net()))
    copied.load_state_dict(made.state_dict())
    copied.param_groups[0]["lr"] = 8.0
    assert copied.parts[0].param_groups[0]["lr"] == 8.0  # type: ignore[attr-defined]
    assert copied.parts[0].state is copied.state  # type: ignore[attr-defined]


def test_the_fused_step_is_the_default_where_there_is_one() -> None:
    def fused(**arguments: Any) -> Any:
        return make_optimizer(**arguments)(named(Net())).defaults.get("fused")

    assert fused(kind="adamw", lr=1e-3) is True
    assert fused(kind="sgd", lr=1e-3) is True
    assert fused(kind="adamw", lr=1e-3, foreach=True) is None
    assert fused(kind="adamw", lr=1e-3, fused=False) is False
    assert fused(kind="rmsprop", lr=1e-3) is None


# ---- refusals ------------------------------------------------------------------------------------


def plan_of(layout: str) -> weft.Plan:
    return weft.plan(Net(), layout, batch=4, loss=next_token)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no_decay", {"no_decay": ["*nrom*"]}, "matches no parameter"),
    ("groups", {"groups": {"hiden.*": {"lr": 1.0}}}, 'Did you mean "hidden.bias"?'),
    ("no_decay", {"no_decay": ["head.weight"]}, 'tied parameter.*Write "embedding.weight"'),
    ("groups", {"groups": {"frozen.*": {"lr": 1.0}}}, "all parameters that it matches are frozen"),
    ("adamw", {"kind": "muon"}, "perhaps embedding.weight, hidden.weight"),
    ("adamw", {"kind": "muon", "adamw": ["embed.*"]}, "matches no parameter"),
]


@pytest.mark.parametrize(("field", "arguments", "says"), REFUSED)
def test_patterns_that_match_nothing_are_refused(
    field: str, arguments: dict[str, Any], says: str
) -> None:
    made = make_optimizer(**{"kind": "adamw", "lr": 1.0, **arguments})
    with pytest.raises(ConfigError, match=f"optimizer.{field} = .*{says}"):
        weft.Engine(Net(), plan_of("dp1"), optimizer=made, loss=next_token, device="cpu")


class Careless(torch.optim.SGD):
    """An optimizer that does not check its arguments."""

    def __init__(self, params: Any, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, lr=lr, momentum=betas[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "lbfgs"}, "'lbfgs': its step computes the loss several times"),
        ({"kind": "sparseadam"}, "'sparseadam': it takes sparse gradients alone"),
        ({"kind": "adamq"}, "is not a known optimizer. Did you mean"),
        ({"groups": {"*": {"rate": 1.0}}}, r"groups.\*.rate = 1.0: is not a known setting"),
        (
            {"groups": {"*": {"lr": -1.0}}},
            r"groups.\*.lr = -1.0: adamw refuses: Invalid learning rate: -1.0",
        ),
        ({"lr": -1.0, "eps": 0.0}, "optimizer.lr = -1.0: adamw refuses: Invalid learning rate"),
        ({"lr": 1.0, "eps": -1.0}, "optimizer.eps = -1.0: adamw refuses: Invalid epsilon"),
        ({"lr": 1.0, "betas": [0.9, 1.5]}, r"betas = \(0.9, 1.5\): adamw refuses: Invalid beta"),
        (
            {"betas": [0.9]},
            r"betas = \(0.9,\): is not a list of 2 values. Write as in \[0.9, 0.999\]",
        ),
        ({"betas": [0.9, 0.99, 0.999]}, "optimizer.betas = .*: is not a list of 2 values"),
        ({"betas": 0.9}, "optimizer.betas = 0.9: is not a list of 2 values"),
        (
            {"groups": {"*": {"betas": [0.9]}}},
            r"groups.\*.betas = \(0.9,\): is not a list of 2 values",
        ),
        (
            {"kind": "muon", "adamw": [], "groups": {"*": {"betas": [0.9]}}},
            r"groups.\*.betas = \(0.9,\): is not a list of 2 values",
        ),
        ({"kind": "sgd", "lr": float("inf")}, "optimizer.lr = inf: is not finite"),
        ({"eps": float("nan")}, "optimizer.eps = nan: is not a number"),
        ({"weight_decay": True}, "weight_decay = True: is not a number. Write as in 0.01"),
        ({"kind": Careless, "lr": float("nan")}, "optimizer.lr = nan: is not finite"),
        ({"kind": Careless, "betas": (0.9,)}, r"betas = \(0.9,\): Careless refuses: tuple index"),
        ({"groups": {"*": {"fused": True}}}, "must be the same for all parameters"),
        ({"kind": "rprop", "no_decay": ["*"]}, "rprop has no weight decay"),
        ({"kind": "lion", "betas": [0.9, 1.0]}, "lion refuses: betas are two numbers"),
        ({"kind": "muon", "adamw": [], "ns_step": 3}, 'Did you mean "ns_steps"?'),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_optimizer(**{"kind": "adamw", **arguments})


def test_an_infinite_bound_is_no_bound() -> None:
    assert make_optimizer("adafactor", d=float("inf")).arguments == {"d": float("inf")}


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_engine_refuses_what_no_layout_runs(kind: type) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.*(several times|sparse gradients)"):
        weft.Engine(Net(), plan_of("dp1"), optimizer=kind, loss=next_token, device="cpu")


# ---- checkpoints ---------------------------------------------------------------------------------


def trained(name: str, layout: str, begin: int, folder: Path) -> list[float]:
    """Two steps from `begin`, which 2 reads from the checkpoint; both save one."""
    case = case_of(name)
    model = case.build()
    plan = case.plan(model, layout)
    e = weft.Engine(
        model, plan, optimizer=case.optimizer, loss=case.loss, clip=case.clip, device="cpu"
    )
    if begin:
        fill_engine(e, folder, begin)
    found = []
    for step in range(begin, begin + 2):
        found.append(float(e.step(case.batch(step, e.data_rank, e.data_size)).loss))
    save_checkpoint(folder, begin + 2, e.tensors(), e.scalars(), {}, Retention(9))
    return found


@pytest.mark.grid(3, ci=3)
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("adamw", "fsdp2", "pp2"),
        ("sgd", "tp2", "fsdp2"),
        ("lion", "fsdp2.tp2", "dp2"),
        ("rprop", "dp2", "fsdp2"),
        ("adafactor", "fsdp2", "tp2"),
        ("adafactor", "dp1", "fsdp2.tp2"),
        ("muon", "fsdp2.tp2", "dp1"),
        ("muon", "dp2", "fsdp4"),
        ("muon", "pp2.tp2", "tp2"),
        ("adamw8bit", "fsdp2", "tp2"),
    ],
)
def test_a_checkpoint_is_resumed_on_another_layout(
    pool: Any, tmp_path: Path, name: str, first: str, second: str
) -> None:
    expected = trained(name, "dp1", 0, tmp_path / "one") + trained(name, "dp1", 2, tmp_path / "one")
    losses = []
    for begin, layout in ((0, first), (2, second)):
        world = weft.Layout.parse(layout).world
        losses += pool.run(trained, name, layout, begin, tmp_path / "two", world=world)[0]
    assert losses == pytest.approx(expected, rel=1e-9)
