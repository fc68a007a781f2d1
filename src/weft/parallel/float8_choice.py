"""Which linears of a model multiply in float8 under a plan, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from weft.core import MULTIPLE, OFF, RECIPES, ConfigError, Float8Linears, Param, Plan
from weft.nn import Roles, is_conv1d, is_linear, is_plain_linear, linear_features

FIELD = "precision.float8"
SPLIT = (
    "B and W each compute the whole backward of a linear in float8, which torchao does not split"
)


def check_recipe(recipe: str, precision: str) -> None:
    """Refuse a recipe that does not exist, or computation that is not in bf16. Raises
    ConfigError."""
    if recipe == OFF:
        return
    if recipe not in RECIPES:
        fix = f"choose one of {', '.join((OFF, *RECIPES))}"
        raise ConfigError(FIELD, recipe, "is not a recipe", fix)
    if precision != "bf16":
        problem = f"float8 goes with bf16, and this model computes in {precision}"
        raise ConfigError(FIELD, recipe, problem, 'use it with compute = "bf16"')


def choose_float8(plan: Plan, model: nn.Module, roles: Roles, recipe: str) -> Plan:
    """The plan, with the linears that multiply in float8.

    All do whose features, as every rank has them, are multiples of 16, in the model's repeated
    blocks (without blocks: anywhere). Layers before and after the blocks stay in bf16: rounding
    hurts there most, and they are few (Micikevicius et al. 2022, FP8 formats for deep learning).

    Raises:
        ConfigError: no linear does.
    """
    table = plan.params()
    names = {alias: w.name for w in plan.weights for alias in (w.name, *w.aliases)}
    found: list[str] = []
    others: list[tuple[str, str]] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        weight = names.get(f"{name}.weight" if name else "weight", "")
        why = _why_not(name, modules, roles, plan) or _uneven(module, table.get(weight, {}), plan)
        if why:
            others.append((name, why))
        else:
            found.append(name)
    if not found:
        first = f"{others[0][0] or 'the model'}: {others[0][1]}" if others else "it has none"
        problem = f"no linear of this model can multiply in float8 under {plan.layout} ({first})"
        raise ConfigError(FIELD, recipe, problem, "leave it out")
    split = any(action.kind == "W" for order in plan.schedule.order for action in order)
    notes = (*plan.notes, SPLIT) if split else plan.notes
    products = Float8Linears(recipe, tuple(found), tuple(others))
    return replace(plan, float8=products, notes=notes)


def _why_not(name: str, modules: Mapping[str, nn.Module], roles: Roles, plan: Plan) -> str | None:
    """What keeps a linear in bf16, whatever its sizes."""
    module, parent = modules[name], name.rpartition(".")[0]
    if not is_linear(module):
        return "a parametrization makes its weight"
    if isinstance(modules[parent], nn.MultiheadAttention) or not is_plain_linear(module):
        return "it is not nn.Linear's forward that multiplies"
    if name in roles.heads:
        return "the output head"
    if any(_gates(name, module, each.module, each.count) for each in roles.experts):
        return "a gate of experts"
    if plan.blocks and not any(name.startswith(f"{block}.") for block in plan.blocks):
        return "outside of the repeated blocks"
    return None


def _gates(name: str, module: nn.Module, experts: str, count: int) -> bool:
    """Whether a linear scores the experts of a module beside it."""
    around = experts.rpartition(".")[0]
    inside = not around or name.startswith(f"{around}.")
    return inside and linear_features(module)[1] == count


def _uneven(module: nn.Module, params: Mapping[str, Param], plan: Plan) -> str | None:
    """Which features of a linear are no multiple of 16, whole or as some rank has them."""
    inside, outside = linear_features(module)
    if inside % MULTIPLE or outside % MULTIPLE:
        return f"{inside} to {outside} features are not multiples of {MULTIPLE}"
    for axis, param in params.items():
        for length in _lengths(param, plan.layout.size(axis)):
            if length % MULTIPLE:
                whole = module.weight.shape[param.cut.dim]  # type: ignore[union-attr, index]
                size = plan.layout.size(axis)
                return (
                    f"{axis}{size} leaves a rank {length} of {whole} features, no multiple of"
                    f" {MULTIPLE}"
                )
    return None


def _lengths(param: Param, size: int) -> Iterator[int]:
    """What each rank of an axis computes with of the dim that is cut."""
    for index in range(size if param.cut is not None else 0):
        assert param.cut is not None
        yield sum(stop - start for start, stop in param.cut.intervals(index, size))
