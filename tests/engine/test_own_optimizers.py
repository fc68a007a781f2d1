"""Optimizers of the user's own: equal to one device on every layout, or refused before it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.cases import LENGTH, VOCAB, Subject
from weft.checkpoint import Retention, fill_engine, save_checkpoint
from weft.core import ConfigError, load_run
from weft.engine import OptimizerFactory, make_optimizer, try_optimizer
from weft.engine.optimizers import is_elementwise
from weft.nn.models import decoder
from weft.train import check_run
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.reference import Reference, run_reference


class CountedAdam(torch.optim.Optimizer):
    """Adam without decay, whose count of steps is a Python number, as in many repositories."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                scale = math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-group["lr"] * scale)


class Normed(torch.optim.SGD):
    """A step of each parameter has a length that depends on the whole of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1e-6).mul_(p.norm())
        return super().step(closure)


class Globally(torch.optim.SGD):
    """A step has one length over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


class Forgetful(torch.optim.Optimizer):
    """Its momentum is not in its state."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        self.kept: dict[int, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.kept[id(p)] = self.kept.get(id(p), 0) * 0.9 + p.grad
            p.sub_(self.kept[id(p)], alpha=self.param_groups[0]["lr"])


class Closed(Forgetful):
    def step(self, closure: Any = None) -> None:
        closure()


class Plain(torch.optim.AdamW):
    """Other defaults, and no step of its own."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr=lr, betas=(0.8, 0.9))


def counted(params: Any, lr: float) -> torch.optim.Optimizer:
    return CountedAdam(params, lr)


def no_optimizer(params: Any, lr: float = 1.0) -> dict[str, float]:
    return {"lr": lr}


MADE = {
    "element": make_optimizer(counted, updates_each="element", lr=1e-2),
    "tensor": make_optimizer(Normed, updates_each="tensor", lr=1e-2, momentum=0.9),
    "plain": make_optimizer(Plain, lr=1e-2, decay_min_dims=2),
    "global": make_optimizer(Globally, lr=1e-2),
}
DECODER = Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH))


def case_of(name: str) -> Case:
    return replace(DECODER.case(), optimizer=MADE[name])


@cache
def reference(name: str) -> Reference:
    return run_reference(case_of(name), 3)


LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "fsdp2.tp2")


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["element", "tensor", "plain"])
def test_it_equals_one_device(pool: Any, name: str, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    given = case_of(name), layout, reference(name)
    result = pool.run(check_layout, *given, world=world)[0]
    assert result.passed, result


def test_one_that_looks_at_all_parameters_runs_where_ranks_have_them(pool: Any) -> None:
    result = pool.run(check_layout, case_of("global"), "dp2", reference("global"), world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("kind", [Normed, Globally])
def test_a_mark_that_is_not_true_is_believed_in_python_and_does_not_verify(
    pool: Any, kind: type
) -> None:
    case = replace(DECODER.case(), optimizer=make_optimizer(kind, updates_each="element", lr=1e-2))
    result = pool.run(check_layout, case, "fsdp2", run_reference(case, 2), world=2)[0]
    assert not result.passed and 1e-6 < result.param_rel_err < math.inf


def trained(layout: str, begin: int, folder: Path, steps: int = 3) -> list[float]:
    """Steps from `begin`, with a checkpoint before the first, unless it is 0, and after the
    last."""
    case = case_of("element")
    model = case.build()
    e = weft.Engine(
        model, case.plan(model, layout), optimizer=case.optimizer, loss=case.loss, device="cpu"
    )
    found = []
    if begin:
        fill_engine(e, folder / "first", begin)
        save_checkpoint(folder / "again", begin, e.tensors(), e.scalars(), {}, Retention(9))
        fill_engine(e, folder / "again", begin)
    for step in range(begin, begin + steps):
        found.append(float(e.step(case.batch(step, e.data_rank, e.data_size)).loss))
    save_checkpoint(folder / "first", begin + steps, e.tensors(), e.scalars(), {}, Retention(9))
    return found


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "tp2"), ("pp2", "dp1"), ("dp1", "fsdp2")])
def test_a_count_of_steps_is_resumed_on_another_layout(
    pool: Any, tmp_path: Path, first: str, second: str
) -> None:
    expected = trained("dp1", 0, tmp_path / "one", steps=6)
    losses = []
    for begin, layout in ((0, first), (3, second)):
        world = weft.Layout.parse(layout).world
        losses += pool.run(trained, layout, begin, tmp_path / "two", world=world)[0]
    assert losses == pytest.approx(expected, rel=1e-9)


# ---- refusals ------------------------------------------------------------------------------------


def test_a_step_of_its_own_is_not_its_base_class() -> None:
    parameters = [("w", torch.nn.Parameter(torch.zeros(2)))]
    assert is_elementwise(Plain(parameters))
    assert not is_elementwise(Normed(parameters))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            make_optimizer(Normed, updates_each="element"),
            "updates_each = 'element': its mark says that it updates each element by itself, but",
        ),
        (
            make_optimizer(Globally, updates_each="tensor"),
            "updates_each = 'tensor': its mark says that it updates each tensor by itself, but",
        ),
        (make_optimizer(Forgetful), "after its state is loaded from a checkpoint"),
        (make_optimizer(Closed), "its step fails on a matrix and a vector: TypeError"),
        (make_optimizer(torch.optim.LBFGS), "'mine': its step computes the loss several times"),
    ],
)
def test_what_no_run_could_do_is_refused(made: OptimizerFactory, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        try_optimizer(made, "mine")


@pytest.mark.parametrize("name", MADE)
def test_what_runs_is_not_refused(name: str) -> None:
    assert try_optimizer(MADE[name], "mine") is (name == "element")


RUN = """
[model]
build = "weft.models:decoder"
vocab = 256
dim = 16
heads = 2
[data]
build = "weft.data:stdlib"
seq_len = 16
[train]
batch = 8
steps = 4
[optimizer]
build = "tests.engine.test_own_optimizers:NAME"
"""


@pytest.mark.parametrize(
    ("name", "more", "layout", "says"),
    [
        ("Globally", "", "fsdp2", "optimizer.build = '.*:Globally': it is not known to update"),
        ("CountedAdam", "", "tp2", 'write optimizer.updates_each = "element" or "tensor"'),
        ("Normed", 'updates_each = "elements"', "dp2", "updates_each = 'elements'"),
        ("no_optimizer", "", "dp2", "makes dict, which is not a torch.optim.Optimizer"),
        ("CountedAdam", "rate = 1.0", "dp2", "optimizer.rate = 1.0: is not a known argument"),
        ("CountedAdam", 'name = "lion"', "dp2", "name = 'lion': is given beside build"),
        (
            "CountedAdam",
            'updates_each = "element"\n[sync]\nname = "parameter_server"\nstaleness = 1',
            "dp2",
            "its state has numbers, such as a step count",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused(
    tmp_path: Path, name: str, more: str, layout: str, says: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("NAME", name) + more)
    with pytest.raises(ConfigError, match=says):
        check_run(load_run(path), [layout])


def test_code_is_not_a_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace('build = "tests', 'name = "tests'))
    with pytest.raises(
        ConfigError, match=r"is code, not the name of an optimizer\. Write build = "
    ):
        load_run(path)
