"""What an Engine is built from: the mesh and the pipeline's runners."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import (
    REPLICA_AXIS,
    STAGE_AXIS,
    Action,
    ConfigError,
    Plan,
    Schedule,
    bucket_gradients,
)
from weft.nn import FEW_LOGITS, DeferringHeads, is_positionwise
from weft.parallel import ActivationOffload, CudaCopies, Mesh

from .float8_device import check_float8
from .pipeline.p2p import PipelineTransport
from .pipeline.runner import PipelineRunner, ValueRoute
from .pipeline.stage_compute import Loss
from .replica_sync.membership import ReplicaGroup


def own_device() -> torch.device:
    """The GPU of this process; the CPU where there is none or the process group uses gloo."""
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def check_request(plan: Plan, clip: float | None, device: torch.device) -> None:
    """Refuse what the plan cannot do with this clip and device. Raises Refusal."""
    check_offload_device(plan, device)
    check_float8(plan.float8, device)
    if clip is not None and plan.schedule.versions:
        raise ConfigError(
            "train.clip",
            clip,
            f"{plan.schedule.name} updates each stage by itself, and no stage knows the norm of"
            " all gradients",
            "leave it out, or use a synchronous schedule such as 1f1b",
        )
    if device.type == "cuda" and plan.sync is not None and not plan.sync.runs_on_cuda:
        problem = "is tested only on CPUs: its messages are not ordered with a GPU's other work"
        fix = 'use name = "allreduce", with any codec'
        raise ConfigError("sync.name", plan.sync.name, problem, fix)


def check_offload_device(plan: Plan, device: torch.device) -> None:
    """Refuse to offload activations to the device where they are. Raises ConfigError."""
    if plan.offload_activations and device.type != "cuda":
        raise ConfigError(
            "train.offload_activations",
            True,
            f"the run's device is the {device.type.upper()}, whose memory is host memory already",
            "leave it out, or run on GPUs",
        )


def make_offload(plan: Plan, device: torch.device) -> ActivationOffload | None:
    """What keeps activations in the host's memory; None: they stay on the device."""
    return ActivationOffload(CudaCopies(device)) if plan.offload_activations else None


def require_positionwise(loss: Loss) -> None:
    """Ranks that share a sequence need a loss that is a sum over positions. Raises ConfigError."""
    if not is_positionwise(loss):
        problem = "is not known to be a sum over positions, and each rank has only some positions"
        fix = "mark it @weft.losses.positionwise"
        raise ConfigError("loss", getattr(loss, "__name__", loss), problem, fix)


def make_mesh(
    global_plan: Plan, plan: Plan, device: torch.device, company: ReplicaGroup | None
) -> Mesh:
    """The process groups of this rank.

    Args:
        global_plan: of all ranks.
        plan: of one replica, where replicas step independently; else the same.
        device: of this rank.
        company: where replicas meet that have a process group each.
    """
    sync, ranks = global_plan.sync, range(plan.layout.world)
    shared = [b.among for rank in ranks for b in bucket_gradients(plan.of(rank)) if b.among]
    groups = (
        sync.groups(global_plan.layout.replica_count)
        if sync and global_plan.uses_custom_dp_sync
        else ()
    )
    return Mesh(
        global_plan.layout,
        device,
        shared=shared,
        pairs=_stage_pairs(plan),
        replicas=groups,
        independent_axes=(REPLICA_AXIS,) if global_plan.replicas_step_independently else (),
        replica=company.replica if company is not None else None,
    )


def _stage_pairs(plan: Plan) -> set[tuple[int, int]]:
    """The positions on `pp` between which values cross."""
    at = plan.schedule.placement
    values = plan.staging.values if plan.staging is not None else ()
    pairs = {(at[value.source], at[target]) for value in values for target in value.targets}
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def make_runners(plan: Plan, mesh: Mesh) -> tuple[PipelineRunner, PipelineRunner]:
    """One runs the plan's schedule, the other a single microbatch forward."""
    schedule, staging = plan.schedule, plan.staging
    routes, transport = [], None
    if staging is not None:
        routes = [ValueRoute(v.source, v.targets, v.name, v.unread) for v in staging.values]
        position, dynamic = mesh.coords[STAGE_AXIS], plan.dynamic_shapes
        transport = PipelineTransport(position, mesh.pipes, mesh.device, dynamic_shapes=dynamic)
    order = tuple(
        tuple(Action("F", stage, 0) for stage, at in enumerate(schedule.placement) if at == rank)
        for rank in range(schedule.ranks)
    )
    forward = Schedule("forward", schedule.placement, order)
    rank = mesh.coords.get(STAGE_AXIS, 0)
    return (
        PipelineRunner(schedule, routes, rank, transport, mesh.device),
        PipelineRunner(forward, routes, rank, transport, mesh.device),
    )


def deferring_heads(model: nn.Module, plan: Plan) -> DeferringHeads:
    """The heads whose logits the loss makes in chunks; with plan.logits "auto", where they are
    many."""
    few = 0 if plan.logits == "chunks" else FEW_LOGITS
    return DeferringHeads(map(model.get_submodule, plan.heads), few)


def sum_over_ranks(group: dist.ProcessGroup | None, tensor: Tensor) -> Tensor:
    """The sum of a tensor over the ranks of a group, in place; None: this rank alone."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
