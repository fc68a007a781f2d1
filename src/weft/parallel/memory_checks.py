"""Refuses options of memory where they would have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import ConfigError, Plan, UnsupportedModel, is_inside

from .axes import STATE_AXES


def check_prefetch(plan: Plan) -> None:
    """Refuse to gather weights ahead where no unit comes after another.

    Raises:
        ConfigError: A depth below 1, a layout without `fsdp`, a model that is a single unit, or
            units that backward runs again.
    """
    depth, layout = plan.fsdp_prefetch, plan.layout
    if depth is None:
        return
    if depth < 1:
        problem = "not a number of units to gather ahead"
        raise ConfigError("train.fsdp_prefetch", depth, problem, "use 1 or more")
    units = [step.module for step in plan.steps if step.gather is not None]
    if not units:
        raise ConfigError(
            "train.fsdp_prefetch",
            depth,
            f"has no effect with layout {layout}, which gathers no weights",
            f"leave it out, or use a layout with {STATE_AXES[0]}",
        )
    if len(units) == 1:
        raise ConfigError(
            "train.fsdp_prefetch",
            depth,
            "has no effect: the model is gathered as one unit, as it has no repeated blocks or as"
            " layout.fsdp_units says",
            "leave it out, hold its blocks in a ModuleList, or name modules in layout.fsdp_units",
        )
    for around in plan.recomputed():
        if any(unit != around and is_inside(unit, around) for unit in units):
            problem = f"backward recomputes the units in {around} in the order of forward,"
            problem += " so weights gathered ahead in the order of backward would not be used next"
            fix = "leave it out, make whole blocks the units, or leave recompute out"
            raise ConfigError("train.fsdp_prefetch", depth, problem, fix)


def check_offload(offload: bool, blocks: Sequence[str]) -> None:
    """Refuse to offload activations of a model without repeated blocks. Raises UnsupportedModel."""
    if offload and not blocks:
        raise UnsupportedModel(
            "train.offload_activations",
            offload,
            "the model has no list of repeated blocks, and activations are offloaded by blocks",
            "leave it out, or hold them in a ModuleList",
        )
