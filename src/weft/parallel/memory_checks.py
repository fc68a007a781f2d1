"""Refuses options of memory where they would have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import ConfigError, Layout, Step, UnsupportedModel

from .axes import STATE_AXES


def check_prefetch(depth: int | None, layout: Layout, steps: Sequence[Step]) -> None:
    """Refuse to gather weights ahead where no unit comes after another.

    Args:
        depth: how many units ahead; None: as FSDP2 does.
        layout: of the run.
        steps: of all axes.

    Raises:
        ConfigError: A depth below 1, a layout without `fsdp`, or a model that is a single unit.
    """
    if depth is None:
        return
    if depth < 1:
        problem = "not a number of units to gather ahead"
        raise ConfigError("train.fsdp_prefetch", depth, problem, "use 1 or more")
    units = sum(step.gather is not None for step in steps)
    if not units:
        raise ConfigError(
            "train.fsdp_prefetch",
            depth,
            f"has no effect with layout {layout}, which gathers no weights",
            f"leave it out, or use a layout with {STATE_AXES[0]}",
        )
    if units == 1:
        raise ConfigError(
            "train.fsdp_prefetch",
            depth,
            "has no effect: the model has no repeated blocks, and is gathered as one unit",
            "leave it out, or hold its blocks in a ModuleList",
        )


def check_offload(offload: bool, blocks: Sequence[str]) -> None:
    """Refuse to offload activations of a model without repeated blocks. Raises UnsupportedModel."""
    if offload and not blocks:
        raise UnsupportedModel(
            "train.offload_activations",
            offload,
            "the model has no list of repeated blocks, whose activations would be offloaded",
            "leave it out, or hold them in a ModuleList",
        )
