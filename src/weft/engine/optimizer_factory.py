"""Optimizers by name, with parameter groups by patterns of names: one function of named parameters,
which the one-device run and every rank of a layout call alike."""

from __future__ import annotations

import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.core import ConfigError, Weight, nearest, require_known, table_keys

from .adamw8bit import AdamW8bit
from .lion import Lion
from .muon import MuonWithAdamW
from .optimizers import ELEMENTWISE, refuse_kind

NamedParameters = Sequence[tuple[str, nn.Parameter]]

# These have a fused step, which passes over the elements once; some take fsdp's shards too.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
FUSED_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
NOT_BY_GROUP = ("fused", "foreach", "capturable", "differentiable", "maximize")


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Name -> class of every optimizer that `[optimizer] name` and `make_optimizer` know.

    Example:
        >>> known_optimizers()["adamw"]
        <class 'torch.optim.adamw.AdamW'>
    """
    kinds = (*ELEMENTWISE, Lion, AdamW8bit, torch.optim.Adafactor)
    return {kind.__name__.lower(): kind for kind in kinds} | {"muon": MuonWithAdamW}


@dataclass(frozen=True)
class OptimizerFactory:
    """Makes an optimizer from a list of (name, parameter); an Engine takes it as its `optimizer`.

    `kind(parameters, **arguments)` is the optimizer, and `updates_each` its mark if its class has
    none. Of `groups`, glob of names -> settings, the
    first that matches a parameter holds. Where it says nothing of weight decay, parameters that
    match `no_decay`, or have fewer dims than `decay_min_dims`, have none. A shard has as many dims
    as the whole parameter, so groups do not depend on the layout.
    """

    kind: Callable[..., torch.optim.Optimizer]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    decay_min_dims: int = 0
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    updates_each: str | None = None

    @property
    def known(self) -> bool:
        """Whether the optimizer is one of weft's own list."""
        return self.kind in known_optimizers().values()

    def __call__(self, named: NamedParameters) -> torch.optim.Optimizer:
        made = self._made(named)
        if self.updates_each is not None:
            made.updates_each = self.updates_each  # type: ignore[attr-defined]
        return made

    def _made(self, named: NamedParameters) -> torch.optim.Optimizer:
        named = list(named)
        grouped: dict[tuple, tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]] = {}
        for name, p in named:
            settings = self.settings(name, p.ndim)
            # one fused or foreach op takes no mixture of sharded and whole tensors
            key = isinstance(p, DTensor), repr(settings)
            grouped.setdefault(key, (settings, []))[1].append((name, p))
        faster = self._faster([p for _, p in named])
        if len(grouped) == 1 and not next(iter(grouped.values()))[0]:
            return self.kind(named, **self.arguments, **faster)
        groups = [{"params": members, **settings} for settings, members in grouped.values()]
        return self.kind(groups, **self.arguments, **faster)

    def settings(self, name: str, dims: int) -> dict[str, Any]:
        """What holds for a parameter of this name and number of dims, beside `arguments`."""
        found = next((g for pattern, g in self.groups.items() if fnmatchcase(name, pattern)), {})
        without = dims < self.decay_min_dims or any(fnmatchcase(name, p) for p in self.no_decay)
        return {**({"weight_decay": 0.0} if without else {}), **found}

    def check(self, weights: Sequence[Weight]) -> None:
        """Refuse patterns that match no trained parameter. `weights`: of the whole model. Raises
        ConfigError."""
        for field_name, patterns in (
            ("optimizer.no_decay", self.no_decay),
            ("optimizer.groups", self.groups),
        ):
            for pattern in patterns:
                check_pattern(field_name, pattern, weights)
        if self.kind is MuonWithAdamW:
            if "adamw" not in self.arguments:
                problem = (
                    "Muon must not update embeddings and heads, and cannot tell them from"
                    " hidden matrices"
                )
                matrices = (
                    ", ".join(_likely_embeddings(weights)) or "none, as no parameter looks like one"
                )
                fix = (
                    f"list the parameters that AdamW is to update, [] for none; perhaps {matrices}"
                )
                raise ConfigError("optimizer.adamw", None, problem, fix)
            for pattern in self.arguments["adamw"]:
                check_pattern("optimizer.adamw", pattern, weights)

    def _faster(self, params: Sequence[nn.Parameter]) -> dict[str, bool]:
        """The fused step, where there is one and nothing else was asked for."""
        if self.kind not in FUSED or {*NOT_BY_GROUP[:-1]} & {*self.arguments}:
            return {}
        sharded = any(isinstance(p, DTensor) for p in params)
        fits = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
        return {"fused": True} if fits and (self.kind in FUSED_SHARDS or not sharded) else {}


def check_pattern(field_name: str, pattern: str, weights: Sequence[Weight]) -> None:
    """Refuse a glob that matches the name of no trained parameter. Raises ConfigError."""
    trained = [w for w in weights if w.trainable]
    if any(fnmatchcase(w.name, pattern) for w in trained):
        return
    tied = next((w for w in trained for n in w.aliases if fnmatchcase(n, pattern)), None)
    if tied is not None:
        problem = f"matches another name of the tied parameter {tied.name}"
        raise ConfigError(field_name, pattern, problem, f'write "{tied.name}"')
    if any(fnmatchcase(w.name, pattern) for w in weights):
        problem = "all parameters that it matches are frozen, and no optimizer updates those"
        fix = "leave it out, or set requires_grad = True on those that are to be trained"
        raise ConfigError(field_name, pattern, problem, fix)
    fix = nearest(pattern, [w.name for w in trained])
    raise ConfigError(field_name, pattern, "matches no parameter", fix)


def _likely_embeddings(weights: Sequence[Weight]) -> list[str]:
    """The trained matrices of no repeated block, which no number in their name counts."""
    return [
        w.name
        for w in weights
        if w.trainable
        and len(w.shape) == 2
        and not any(part.isdecimal() for part in w.name.split("."))
    ]


def make_optimizer(
    kind: str | Callable[..., torch.optim.Optimizer],
    *,
    no_decay: Sequence[str] = (),
    decay_min_dims: int = 0,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    updates_each: str | None = None,
    **arguments: Any,
) -> OptimizerFactory:
    """An optimizer with parameter groups, for `weft.Engine`, `weft.verify` or a loop of your own.

    Args:
        kind: A name such as "adamw", or an optimizer class, or a function that makes one.
        no_decay: Globs of names of parameters without weight decay.
        decay_min_dims: Parameters with fewer dims have no weight decay; 2 spares norms and biases.
        groups: Glob of names -> arguments that differ for these parameters; the first one that
            matches holds.
        updates_each: "element" or "tensor": what an update of the optimizer depends on, if its
            class has no mark (docs/optimizers.md).
        **arguments: The optimizer's own arguments.

    Returns:
        A function of a list of (name, parameter).

    Raises:
        ConfigError: A name or argument is not known, or the optimizer refuses its value.

    Example:
        >>> make = make_optimizer("adamw", lr=1e-3, decay_min_dims=2, groups={"0.*": {"lr": 1e-4}})
        >>> made = make(list(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).named_parameters()))
        >>> [(group["lr"], group["weight_decay"]) for group in made.param_groups]
        [(0.0001, 0.01), (0.0001, 0.0), (0.001, 0.01), (0.001, 0.0)]
    """
    found, name = (_by_name(kind), kind) if isinstance(kind, str) else (kind, _name_of(kind))
    own = {key: _tuples(value) for key, value in arguments.items()}
    each = {
        pattern: {key: _tuples(value) for key, value in settings.items()}
        for pattern, settings in (groups or {}).items()
    }
    made = OptimizerFactory(found, own, tuple(no_decay), decay_min_dims, each, updates_each)
    _check_arguments(made, name)
    return made


def _by_name(name: str) -> type[torch.optim.Optimizer]:
    kinds = known_optimizers()
    if name not in kinds:
        for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
            if name == kind.__name__.lower():
                refuse_kind(kind, name)
        raise ConfigError("optimizer.name", name, "is not a known optimizer", nearest(name, kinds))
    return kinds[name]


def _name_of(kind: Callable[..., Any]) -> str:
    return str(getattr(kind, "__name__", kind))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_arguments(made: OptimizerFactory, name: str) -> None:
    """Refuse what the optimizer refuses. Raises ConfigError."""
    parameters = inspect.signature(made.kind).parameters
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        known = list(parameters)[1:]
        what = f"argument of {name}"
        require_known("optimizer", made.arguments, known, what, table_keys("optimizer"))
    defaults = {key: p.default for key, p in parameters.items()}
    _check_values("optimizer", made, made.arguments, defaults)
    whole = _try(made, name, {}, "optimizer")
    if not isinstance(whole, torch.optim.Optimizer):
        problem = f"makes {type(whole).__name__}, which is not a torch.optim.Optimizer"
        raise ConfigError("optimizer.build", name, problem, "return one")
    allowed = {key for group in whole.param_groups for key in group} - {"params", "param_names"}
    if "weight_decay" not in allowed:
        for key, value in (("no_decay", made.no_decay), ("decay_min_dims", made.decay_min_dims)):
            if value:
                raise ConfigError(
                    f"optimizer.{key}", value, f"{name} has no weight decay", "leave it out"
                )
    for pattern, settings in made.groups.items():
        table = f"optimizer.groups.{pattern}"
        for key in settings:
            if key in NOT_BY_GROUP and key in allowed:
                problem, fix = "must be the same for all parameters", f"write {key} in [optimizer]"
                raise ConfigError(f"{table}.{key}", settings[key], problem, fix)
        require_known(table, settings, allowed - {*NOT_BY_GROUP}, f"setting of a group of {name}")
        _check_values(table, made, settings, dict(ChainMap(*whole.param_groups)))
        _try(made, name, settings, table)


def _check_values(
    table: str, made: OptimizerFactory, given: Mapping[str, Any], like: Mapping[str, Any]
) -> None:
    """Refuse values on which an optimizer fails or diverges at its first step only. `like`: values
    that it takes. What an optimizer of the user's own means by a value it says itself, but for the
    rate. Raises ConfigError."""
    known = made.known
    for key, value in given.items():
        usual, field_name = like.get(key), f"{table}.{key}"
        numbers = value if isinstance(value, tuple) else (value,)
        floats = [number for number in numbers if isinstance(number, float)]
        if key == "lr" and not all(map(math.isfinite, floats)):
            raise ConfigError(field_name, value, "is not finite", "write a finite number")
        if known and any(map(math.isnan, floats)):  # an infinite bound is none: Adafactor's d
            raise ConfigError(field_name, value, "is not a number", "write a number")
        if not known:
            continue
        if isinstance(usual, tuple) and usual and len(numbers) != len(usual):
            problem, fix = f"is not a list of {len(usual)} values", f"write as in {[*usual]}"
            raise ConfigError(field_name, value, problem, fix)
        if isinstance(value, bool | str) and isinstance(usual, float):
            raise ConfigError(field_name, value, "is not a number", f"write as in {usual}")


def _try(
    made: OptimizerFactory, name: str, settings: Mapping[str, Any], table: str
) -> torch.optim.Optimizer:
    """The optimizer of a matrix and a vector, as its constructor checks its arguments. An argument
    without which it takes all others is named as the one that it refuses."""

    def construct(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
        shapes = {"weight": (2, 2), "bias": (2,)}
        tried = [(n, nn.Parameter(torch.zeros(shape))) for n, shape in shapes.items()]
        return made.kind(tried, **arguments, **settings)

    given = dict(settings or made.arguments)
    others = {k: v for k, v in made.arguments.items() if k not in given}
    try:
        return construct(given, others)
    except Exception as error:  # an optimizer of the user's own may fail in any way
        field_name: str = table
        value: Any = given
        for key in given:
            with suppress(Exception):
                construct({k: v for k, v in given.items() if k != key}, others)
                field_name, value = f"{table}.{key}", given[key]
                break
        problem, fix = f"{name} refuses: {error}", "correct that argument"
        raise ConfigError(field_name, value, problem, fix) from error
