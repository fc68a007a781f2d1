"""An optimizer of the user's own, tried on small tensors before any process starts: that its steps
run, that its mark is true, and that it goes on from what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core import ConfigError

from .optimizer_factory import OptimizerFactory
from .optimizers import (
    is_elementwise,
    make_state,
    number_state,
    parts_of,
    refuse_kind,
    updates_tensors,
)

STEPS, LATER = 3, 2
SHAPES = {"weight": (4, 6), "bias": (6,)}
# parts of them, each of which a rank may have alone
ELEMENTS: Sequence[Mapping[str, tuple[slice, ...]]] = (
    {"weight": (slice(0, 2),)},
    {"weight": (slice(2, 4),)},
    {"weight": (slice(0, 4), slice(2, 5))},
    {"bias": (slice(0, 3),)},
    {"bias": (slice(3, 6),)},
)
TENSORS: Sequence[Mapping[str, tuple[slice, ...]]] = ({"weight": ()}, {"bias": ()})

Tensors = Mapping[str, Tensor]


def try_optimizer(make: OptimizerFactory, named: str) -> bool:
    """Refuse an optimizer that no run could take steps with, resume, or divide over ranks as its
    mark says. `named`: as the run file has it. Whether it keeps numbers that are no tensors. Raises
    ConfigError."""
    values, *gradients = _drawn()
    optimizer, whole = _begin(make, values)
    refuse_kind(type(optimizer), named)
    try:
        if not all("lr" in group for group in optimizer.param_groups):
            raise ConfigError(
                "optimizer.build",
                named,
                "its param_groups have no lr for the schedule to scale",
                "give its param_groups an lr",
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # one that chooses by names may have none of these
        if held and held.isdisjoint(map(id, whole.values())):
            problem = "it has none of the parameters that it is called with, so no weight changes"
            fix = "make it of its first argument"
            raise ConfigError("optimizer.build", named, problem, fix)
        _steps(optimizer, whole, gradients[:STEPS])
        _check_mark(make, named, optimizer, {n: p.detach() for n, p in whole.items()})
        _check_resumed(make, named, optimizer, whole)
    except ConfigError:
        raise
    except Exception as error:  # a user's optimizer may fail in any way
        problem = f"its step fails on a matrix and a vector: {type(error).__name__}: {error}"
        raise ConfigError("optimizer.build", named, problem, "correct it") from error
    return any(number_state(v) for p in whole.values() for v in optimizer.state[p].values())


def _check_mark(
    make: OptimizerFactory, named: str, optimizer: torch.optim.Optimizer, whole: Tensors
) -> None:
    """That parts which are updated apart become what they are in the whole."""
    elements = all(is_elementwise(part) for part in parts_of(optimizer))
    if not elements and not updates_tensors(optimizer):
        return
    values, *gradients = _drawn()
    for part in ELEMENTS if elements else TENSORS:
        alone, held = _begin(make, _cut(values, part))
        _steps(alone, held, [_cut(each, part) for each in gradients[:STEPS]])
        for name, wanted in _cut(whole, part).items():
            if _same(held[name], wanted):
                continue
            what = "element" if elements else "tensor"
            fix = 'write "tensor" if it looks at one parameter alone' if elements else "use dp"
            field, value = "optimizer.build", named
            if make.updates_each is not None:
                field, value = "optimizer.updates_each", make.updates_each
            problem = (
                f"its mark says that it updates each {what} by itself, but a part of the"
                f" parameters, updated alone, got another {name} than in the whole"
            )
            raise ConfigError(field, value, problem, f"{fix}, or correct the optimizer")


def _check_resumed(
    make: OptimizerFactory, named: str, optimizer: torch.optim.Optimizer, whole: Mapping
) -> None:
    """That another optimizer with this one's weights and state goes on as this one does."""
    saved = {
        (name, key): value.clone() if isinstance(value, Tensor) else value
        for name, p in whole.items()
        for key, value in optimizer.state.get(p, {}).items()
    }
    again, held = _begin(make, {name: p.detach() for name, p in whole.items()})
    make_state(again, held, [f"optimizer/{name}/{key}" for name, key in saved])
    for name, p in held.items():
        p.data.copy_(whole[name].detach())
        for key, value in again.state.get(p, {}).items():
            if isinstance(value, Tensor) and (name, key) in saved:
                value.copy_(saved[name, key])
            elif number_state(value) and (name, key) in saved:
                again.state[p][key] = saved[name, key]
    gradients = _drawn()[1 + STEPS :]
    for one, params in ((optimizer, whole), (again, held)):
        _steps(one, params, gradients)
    if not all(_same(held[name], whole[name]) for name in whole):
        problem = (
            "after its state is loaded from a checkpoint, its updates differ from those"
            " without a checkpoint"
        )
        fix = "keep all of its state in self.state[parameter], as tensors or numbers"
        raise ConfigError("optimizer.build", named, problem, fix)


def _drawn() -> list[dict[str, Tensor]]:
    """Values, and the gradients of each step: small in the first rows, large in the last ones."""
    random = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=random, dtype=torch.float64)
        return drawn * torch.logspace(-1, 1, shape[0], dtype=torch.float64).view(
            -1, *[1] * (len(shape) - 1)
        )

    return [{n: draw(shape) for n, shape in SHAPES.items()} for _ in range(1 + STEPS + LATER)]


def _begin(
    make: Callable[..., torch.optim.Optimizer], values: Tensors
) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    held = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    return make(list(held.items())), held


def _steps(
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, nn.Parameter],
    gradients: Sequence[Tensors],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for each in gradients:
            for name, p in held.items():
                p.grad = each[name].clone()
            optimizer.step()


def _cut(tensors: Tensors, part: Mapping[str, tuple[slice, ...]]) -> dict[str, Tensor]:
    return {name: tensors[name][place] for name, place in part.items()}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach(), other.detach(), rtol=1e-6, atol=1e-9)
