"""`weft.verify` from Python, on a model and a loss of the user's own; and that the examples are
what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core import Layout, Refusal, run_config
from weft.train import build, build_data, run_checks
from weft.train.data import Loader
from weft.verification.case import Case
from weft.verification.difference import Bounds
from weft.verification.tensor_errors import tensor_error
from weft.verification.verify_model import verify_case
from weft.verification.verify_run import verify_layouts

EXAMPLES = Path(__file__).parents[2] / "examples"


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = layer(points)
        return points


@pytest.mark.parametrize("layout", ["dp2", "fsdp2+zero2", "tp2"])
def test_a_model_and_a_loss_of_ones_own(layout: str) -> None:
    dim = 6

    def make() -> nn.Module:  # a closure: nothing needs to be importable
        return Stack(dim, 2)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (output - batch["goal"]).abs().sum(), torch.tensor(float(output.numel()))

    plan = weft.plan(make(), layout, batch=4, accumulate=2, loss=loss)
    batch = {"points": torch.randn(4, 5, dim), "goal": torch.randn(4, 5, dim)}
    report = weft.verify(make, plan, batch, loss=loss, clip=0.1)
    assert report.passed, report.text()
    assert weft.verify(make, layout, batch, loss=loss, steps=1).passed
    assert (
        f"{layout}: equal" in report.text() and "1 of 1 layouts equal one device" in report.text()
    )


def test_a_loss_that_is_a_mean_of_its_own_rank_is_refused() -> None:
    """The user's loss, not weft, divides by what this rank holds: the mean depends on the
    layout."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (output - batch["goal"]).abs().mean() * 3.0, torch.tensor(1.0)

    def make() -> nn.Module:
        return Stack(6, 1)

    plan = weft.plan(make(), "dp2", batch=4, loss=loss)
    batch = {"points": torch.randn(4, 5, 6), "goal": torch.randn(4, 5, 6)}
    batch["goal"][1:] *= 7.0
    with pytest.raises(Refusal, match="depends on how dp divides the batch"):
        weft.verify(make, plan, batch, loss=lambda o, b: (loss(o, b)[0] ** 2, torch.tensor(1.0)))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_not_refused(path: Path) -> None:
    """As far as that needs no files beside them."""
    run = build_data.count_steps(run_config.load_run(path))
    assert run.train.steps > 0
    build.build_loss(run)
    build.build_optimizer(run)


@pytest.mark.parametrize(
    "name", ["quickstart.toml", "images.toml", "experts.toml", "mnist.toml", "pipeline.toml"]
)
def test_examples_are_complete(name: str) -> None:
    run = build_data.count_steps(run_config.load_run(EXAMPLES / name))
    (plan,) = run_checks.check_run(run)
    assert plan.layout.world > 1
    batch = next(Loader(build_data.build_dataset(run), run.train.batch, 0))
    model = build.build_model(run)
    inputs = {key: value[:2] for key, value in batch.items() if not key.startswith("label")}
    loss_sum, weight = build.build_loss(run)(
        model(**inputs), {key: value[:2] for key, value in batch.items()}
    )
    assert torch.isfinite(loss_sum / weight)


class Counting(Block):
    """Its forward counts the features between its linears by a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).view(*x.shape[:-1], 18))


RECOMPUTED = {
    "train.recompute": '"full"',
    "train.batch": "4",
    "model.dim": "32",
    "model.layers": "1",
    "model.seq_len": "16",
    "data.seq_len": "16",
}


def counting() -> nn.Module:
    model = Stack(6, 1)
    model.layers[0] = Counting(6)
    return model


def test_a_layout_that_does_not_run_does_not_end_the_others() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return output.square().sum(), torch.tensor(float(output.numel()))

    case = Case(
        build=counting,
        plan=lambda model, layout: weft.plan(model, layout, batch=4, precision="fp64"),
        batch=lambda step, rank, size: {
            "points": torch.arange(120.0).view(4, 5, 6)[4 * rank // size :][: 4 // size]
        },
        loss=loss,
        optimizer=lambda params: torch.optim.SGD([p for _, p in params], lr=0.1),
    )
    report = verify_case(case, ["tp2", "dp2"])
    assert [result.passed for result in report.results] == [False, True]
    assert "tp2: REFUSED\n  layout = 'tp2': the sharded model does not run: shape" in report.text()
    assert ", in layers.0. Use dp, fsdp or pp." in report.text()  # nothing else is cut
    assert "these do not: tp2 (refused)" in report.verdict()


def test_a_layout_that_cannot_be_planned_does_not_end_the_others() -> None:
    run = run_config.load_run(
        EXAMPLES / "quickstart.toml", {"data.seq_len": "16", "train.batch": "4"}
    )
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"axes": Layout.single()})})
    refused: dict[str, Refusal] = {}
    (plan,) = run_checks.check_run(run, ["dp3", "dp2"], refused.__setitem__)
    assert str(plan.layout) == "dp2" and list(refused) == ["dp3"]
    report = verify_layouts(run, ["dp3", "dp2"], 1, lambda result: None, refused=refused)
    assert [result.passed for result in report.results] == [False, True]
    assert "dp3: REFUSED\n  train.batch = 4: does not divide over 3" in report.text()
    assert "these do not: dp3 (refused)" in report.verdict()
    assert '"refused": "train.batch = 4' in report.json()
    with pytest.raises(Refusal, match="over 5"):
        run_checks.check_run(run, ["dp3", "dp5"], refused.__setitem__)


def test_a_run_with_full_recomputation_is_verified() -> None:
    """On one device, too, attention then runs again in backward."""
    run = run_config.load_run(EXAMPLES / "quickstart.toml", RECOMPUTED)
    report = verify_layouts(run, ["dp2"], 1, lambda result: None)
    assert report.passed, report.verdict()


def test_what_rounding_leaves_of_a_gradient_of_zero_is_no_difference() -> None:
    bounds, whole = Bounds(), ((slice(0, 4), slice(0, 4)),)
    noise, zero = torch.full((4,), 2e-15), torch.zeros(4)  # beside gradients of norm 1
    assert tensor_error(noise, whole, zero, bounds.small) < bounds.gradient  # type: ignore[arg-type]
    assert tensor_error(noise * 1e3, whole, zero, bounds.small) > bounds.gradient  # type: ignore[arg-type]


DRAWN = """
import torch
from torch import nn
def whole(split="train"):
    return torch.utils.data.StackDataset(input=drawn(), target=drawn()[:, :1])
def drawn():
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
def rows(split="train"):
    for x in drawn():
        yield {"input": x, "target": torch.tensor([0.1])}
def net():
    return nn.Linear(4, 1)
"""


@pytest.mark.parametrize("data", ["whole", "rows"])
def test_a_dataset_that_draws_its_samples(data: str, tmp_path: Path) -> None:
    """By torch.randn, whose numbers in float64 are others than in float32."""
    (tmp_path / f"drawn_{data}.py").write_text(DRAWN)
    (tmp_path / "run.toml").write_text(
        f'[model]\nbuild = "drawn_{data}:net"\n[data]\nbuild = "drawn_{data}:{data}"\n'
        '[train]\nbatch = 8\nsteps = 2\nloss = "weft.losses:mse"\n[optimizer]\nlr = 0.1\n'
    )
    report = verify_layouts(run_config.load_run(tmp_path / "run.toml"), ["dp2"], 1, lambda _: None)
    assert report.passed, report.text()
