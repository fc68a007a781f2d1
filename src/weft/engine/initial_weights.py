"""The weights that all ranks begin with: the first rank's, or each rank's own shards of a model
that `deferred_init` built without weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft._torch.fsdp import adopt_parameters
from weft._torch.modules import replace_parameters, replace_references
from weft._torch.tensors import local_part, user_attributes
from weft.core import REPLICA_AXIS, ConfigError, Plan, Refusal, UnsupportedModel
from weft.nn import forget_initial_weights, initial_weights
from weft.parallel import Mesh
from weft.pipeline import PlaceholderTensor

from .checkpoint_state import CheckpointState
from .replica_sync.replicas import ReplicaSync
from .replica_sync.transports import start_async


def move_to(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`, in place; parameters whose weights were left for later stay on the
    meta device. Raises ConfigError if nobody knows their weights."""
    absent = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if initial_weights(model) is not None:
        for name, p in model.named_parameters():
            if not p.is_meta or p._version:
                raise ConfigError(
                    "model",
                    name,
                    "was changed after weft.deferred_init, which did not record the change",
                    "change and load weights inside of build",
                )
    elif absent is None:
        return model.to(device)
    else:
        raise ConfigError(
            "model",
            absent,
            "is on the meta device, so it has no values",
            "build the model under weft.deferred_init, which records how to fill it, or on the CPU",
        )
    return model._apply(lambda t: t if t.is_meta else t.to(device))


def allocate(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Give storage on `device` to the parameters on the meta device, which are this rank's shards
    already; on the CPU where FSDP2 keeps them there. `plan`: this rank's part."""
    units = [step for step in plan.steps if step.gather is not None and step.gather.offload]
    offloaded = {param.name for step in units for param in step.params}
    fresh: dict[int, Tensor] = {}
    for name, p in model.named_parameters():
        if not isinstance(p, PlaceholderTensor) and p.is_meta:
            here = torch.device("cpu") if name in offloaded else device
            fresh[id(p)] = _with_storage(p, here)
    for module in model.modules():
        replace_parameters(module, fresh)
        replace_references(module, fresh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            adopt_parameters(module)


def _with_storage(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty: Tensor
    if isinstance(parameter, DTensor):
        local = torch.empty_like(local_part(parameter), device=device)
        empty = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        empty = torch.empty_like(parameter, device=device)
    fresh = nn.Parameter(empty.detach(), requires_grad=parameter.requires_grad)
    vars(fresh).update(user_attributes(parameter))
    return fresh


def share_weights(model: nn.Module, mesh: Mesh, replicas: ReplicaSync) -> None:
    """All ranks begin with the first one's weights and buffers, before the model is sharded; if
    weights come later, ranks compare how they are made. Raises UnsupportedModel."""
    live = mesh.layout.active_axes()
    everyone = mesh.group(*live) if live else None
    weights = initial_weights(model)
    digest = (bytes(32), bytes(32)) if weights is None else weights.digest()
    computed_by = () if weights is None else weights.computed_by
    check_same_weights(digest, computed_by, everyone, mesh.device)
    if weights is not None:
        return
    tensors = [*model.parameters(), *model.buffers()]
    _broadcast(tensors, everyone)
    replicas.share_initial(lambda group: _broadcast(tensors, group))


def fill_shards(
    model: nn.Module, state: CheckpointState, mesh: Mesh, replicas: ReplicaSync
) -> None:
    """Each rank fills its shards with weights that were left for later; then those that are the
    same on the ranks of `dp`, and all buffers, are the first one's."""
    weights = initial_weights(model)
    if weights is None:
        return
    live = mesh.layout.active_axes()
    everyone = mesh.group(*live) if live else None
    problem: Refusal | None = None
    try:
        weights.fill(state.weights())
    except Refusal as found:  # the others would wait for this rank's broadcasts
        problem = found
    _refuse_together(problem, everyone, mesh.device)
    forget_initial_weights(model)
    filled, buffers = [*state.weights()], [*model.buffers()]
    same = [shard.tensor for shard in filled if state.same_on_replicas(shard.name)]
    _broadcast(same, mesh.group(REPLICA_AXIS))
    _broadcast(buffers, everyone)
    tensors = [*(shard.tensor for shard in filled), *buffers]
    replicas.share_initial(lambda group: _broadcast(tensors, group))


def check_same_weights(
    digest: tuple[bytes, bytes],
    computed_by: Sequence[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Refuse ranks that would draw their shards from different models. All ranks call it together.
    Raises UnsupportedModel on each of them.

    Args:
        digest: of what `build` did, and of what operators computed for it meanwhile.
        computed_by: these operators.
        group: all ranks.
        device: where this rank communicates.
    """
    if group is None:
        return
    own = torch.tensor([*digest[0], *digest[1]], dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    other = next((rank for rank, each in enumerate(everyone) if not each.equal(everyone[0])), None)
    if other is None:
        return
    if all(each[:32].equal(everyone[0][:32]) for each in everyone):
        raise UnsupportedModel(
            "model",
            "build",
            f"ranks 0 and {other} build the same model, but {' or '.join(computed_by)} gives them"
            " other numbers, as where its rounding differs from call to call",
            "compute them in a way that repeats its numbers (torch.linalg.lstsq:"
            ' driver="gels"), or load them from a file',
        )
    raise UnsupportedModel(
        "model",
        "build",
        f"ranks 0 and {other} build different models, or the same from different seeds or files",
        "seed what build draws, the same on every rank, and give all ranks the same files",
    )


def _refuse_together(
    problem: Refusal | None, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Raise this rank's problem, or on other ranks that there is one."""
    failed = torch.tensor(float(problem is not None), device=device)
    if group is not None:
        dist.all_reduce(failed, group=group)
    if problem is not None:
        raise problem
    if failed.item():
        raise UnsupportedModel(
            "model", "weights", "another rank cannot fill its shards", "see that rank's error"
        )


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    for tensor in tensors if group is not None else ():
        start_async(dist.broadcast(tensor.data, group=group, group_src=0, async_op=True)).wait()
