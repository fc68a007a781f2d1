"""What a synchroniser needs of a layout, a schedule, a precision and a model."""

from __future__ import annotations

from torch import nn

from weft.core import (
    REPLICA_AXIS,
    AsyncServers,
    AxisTable,
    ConfigError,
    Divides,
    Layout,
    LocalSteps,
    MessageCodec,
    Schedule,
    Sync,
)
from weft.nn import GateBias


def check_sync(
    layout: Layout, axes: AxisTable, sync: Sync, staged: Schedule | None, precision: str
) -> list[str]:
    """Check what can be known of a synchroniser before any process starts.

    Args:
        layout: The axes; replicas are on `dp`.
        axes: What each axis divides.
        sync: The synchroniser with its codec.
        staged: The schedule of the pipeline, if there is one.
        precision: The dtype of computation.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: The synchroniser does not work with the layout, schedule or precision.
    """
    size = layout.replica_count
    if (
        size > 1
        and layout.spreads_experts(REPLICA_AXIS)
        and (sync.independent or sync.updates_on_servers)
    ):
        raise ConfigError(
            "sync.name",
            sync.name,
            f"it needs all weights on each replica, and {layout} spreads experts over replicas",
            'use ep, or fsdp with +ep, beside dp, or name = "allreduce" or "ring"',
        )
    if staged is not None and staged.versions:
        raise ConfigError(
            "sync.name",
            f"{sync.name}, {sync.codec.name}",
            f"{staged.name} updates each stage by itself, and sums its gradients with the backend",
            'use name = "allreduce" and codec = "identity", or a synchronous schedule such as 1f1b',
        )
    if size == 1 and not layout.active_axes(*axes.dividing(Divides.STATE)):
        return [f"[sync] {sync.name}, {sync.codec.name}: one replica has nothing to synchronise"]
    if precision == "fp16" and not sync.independent and sync.codec.keeps_residual:
        raise ConfigError(
            "sync.codec",
            sync.codec.name,
            "the residual that it keeps for the next step would have another loss scale",
            "use bf16 or fp32 in [precision], or a codec without feedback",
        )
    if isinstance(sync, LocalSteps | AsyncServers):
        return _check_separate(layout, sync, precision)
    if size == 1 and layout.active_axes(*axes.dividing(Divides.STATE)):
        if sync.route != "backend":
            raise ConfigError(
                "sync.name",
                sync.name,
                f"{layout} has no replicas: fsdp sums gradients with the backend's reduce-scatter",
                'use name = "allreduce", which a codec may go with, or dp beside fsdp',
            )
        if not sync.codec.scatters:
            raise ConfigError(
                "sync.codec",
                sync.codec.name,
                "has no reduce-scatter, which is how fsdp sums gradients",
                "use bf16, fp16, int8, int4 or sign, or dp beside fsdp",
            )
        cut = ".".join(
            layout.active_axes(*axes.dividing(Divides.FEATURES, Divides.VOCABULARY)) or ()
        )
        if cut and isinstance(sync.codec, MessageCodec):
            raise ConfigError(
                "sync.codec",
                sync.codec.name,
                f"in {layout} FSDP2 hands the codec weights that {cut} shards and weights that"
                f" {cut} replicates in one tensor, and the replicated ones would diverge",
                "use bf16 or fp16, or dp beside or in place of fsdp",
            )
        return [f"gradients are reduce-scattered over fsdp in {sync.codec.name}"]
    _check_servers(layout, sync.servers)
    if size % sync.local:
        raise ConfigError(
            "sync.local",
            sync.local,
            f"does not divide the {size} replicas of {layout}",
            "use a divisor of that number",
        )
    return [f"gradients are summed over dp by {sync.name}, in {sync.codec.name}"]


def _check_separate(layout: Layout, sync: LocalSteps | AsyncServers, precision: str) -> list[str]:
    size = layout.replica_count
    if size == 1:
        return [f"[sync] {sync.name}: fsdp alone is one replica, and has nothing to synchronise"]
    if sync.codec.has_momentum:
        other = (
            "sends differences of weights"
            if isinstance(sync, LocalSteps)
            else "updates weights at a server"
        )
        raise ConfigError(
            "sync.codec",
            sync.codec.name,
            f"keeps momentum of gradients, and {sync.name} {other}",
            'use another codec, or name = "allreduce"',
        )
    if isinstance(sync, AsyncServers):
        _check_servers(layout, sync.servers)
        if precision == "fp16":
            problem = "each replica would have its own loss scale, and skip different steps"
            raise ConfigError(
                "precision.compute", precision, problem, "use bf16 or fp32, or staleness = 0"
            )
        bound = "any number of" if sync.staleness is None else f"at most {sync.staleness}"
        return [
            f"{size} replicas push gradients in {sync.codec.name} to {sync.servers} servers and"
            f" pull weights, {bound} steps ahead of the slowest"
        ]
    when = f"every {sync.period} steps" if sync.period > 1 else "every step"
    return [
        f"{size} replicas step by themselves; {when} {sync.name} synchronises their weights, in"
        f" {sync.codec.name}"
    ]


def check_gate_biases(model: nn.Module, sync: Sync) -> None:
    """Refuse gates with a bias if replicas synchronise weights alone. Raises ConfigError."""
    name = next(
        (name for name, module in model.named_modules() if isinstance(module, GateBias)), None
    )
    if name is not None:
        raise ConfigError(
            "sync.name",
            sync.name,
            f"each replica would update {name} from its own tokens, because only weights"
            " are synchronised",
            'balance by a loss instead of a bias, or use name = "allreduce"',
        )


def _check_servers(layout: Layout, servers: int) -> None:
    size = layout.replica_count
    if servers > size:
        raise ConfigError(
            "sync.servers", servers, f"{layout} has {size} replicas", f"use at most {size}"
        )
