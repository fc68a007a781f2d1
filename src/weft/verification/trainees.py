"""Who trains in a run of `weft train`, on one device: one, or replicas that step by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core import REPLICA_AXIS, Plan

from .case import Batch, Case
from .parcels import samples_of
from .plain.replicas import PlainReplicas
from .replica_reference import cases_of_replicas, exchanging
from .training_reference import Trainee


def trainees_of(
    case: Case, plan: Plan, validation: Sequence[Batch], in_microbatches: bool
) -> tuple[list[Trainee], PlainReplicas | None]:
    """Those of a plan, and what exchanges their weights; arguments as of a Trainee."""
    if not plan.replicas_step_independently:
        return [Trainee(case, validation, in_microbatches)], None
    found = []
    places = samples_of(plan, REPLICA_AXIS)
    for own, samples in zip(cases_of_replicas(case, plan), places, strict=True):
        rows = torch.tensor(samples)
        parts = [{key: value[rows] for key, value in batch.items()} for batch in validation]
        found.append(Trainee(own, parts, in_microbatches))
    begun = {name: p.detach() for name, p in found[0].trained.items()}
    return found, exchanging(plan, begun)[0]
