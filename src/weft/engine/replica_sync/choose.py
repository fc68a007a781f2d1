"""Chooses the ReplicaSync that a plan asks for."""

from __future__ import annotations

from weft._torch.c10d import default_store
from weft.core import AsyncServers, LocalSteps, Plan
from weft.parallel import Mesh

from ..optimizers import Optimizers
from .async_servers import AsyncServerReplicas
from .local_steps import LocalStepReplicas
from .membership import Membership, ReplicaGroup
from .replicas import ReplicaSync


def make_replica_sync(
    plan: Plan, mesh: Mesh, company: ReplicaGroup | None, optimizers: Optimizers
) -> ReplicaSync:
    """How the replicas of this plan stay together.

    Args:
        plan: of all ranks.
        mesh: of this rank; of its replica, where replicas step independently.
        company: where replicas meet that have a process group each; None where they share one.
        optimizers: makes the optimizer of a server.
    """
    index, sync = plan.layout.replica_of(mesh.place), plan.sync
    if not plan.replicas_step_independently or not isinstance(sync, LocalSteps | AsyncServers):
        return ReplicaSync(index)
    # replicas that share a world write one checkpoint, of the first one's
    writes = company is not None or index == 0
    if company is None:
        company = ReplicaGroup(default_store(), index)
    world = mesh.layout.world
    membership = Membership(company, plan.layout.replica_count, mesh.rank, world, sync.timeout_s)
    if isinstance(sync, AsyncServers):
        return AsyncServerReplicas(index, writes, membership, plan, sync, optimizers)
    return LocalStepReplicas(index, writes, membership, plan)
