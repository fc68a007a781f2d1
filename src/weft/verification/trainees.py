"""Who trains in a run of `weft train`, on one device: one, or replicas that step by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.core import REPLICA_AXIS, Plan
from weft.engine import Loss

from .case import Batch, Case
from .parcels import samples_of
from .plain.draw_laws import seed_faults
from .plain.replicas import PlainReplicas
from .replica_reference import WeightExchange, cases_of_replicas, exchanging
from .training_reference import Trainee


@dataclass(frozen=True)
class Trainees:
    """`each` of them; and where they are replicas, what exchanges their weights, and of which
    parts."""

    each: list[Trainee]
    exchange: PlainReplicas | None = None
    parts: WeightExchange | None = None

    @property
    def broken(self) -> list[str]:
        """Laws that what was drawn for them breaks, or how samples and weights are divided."""
        found = seed_faults([trainee.case.seed for trainee in self.each])
        found += [] if self.parts is None else self.parts.broken
        found += [law for trainee in self.each for law in trainee.run.laws.broken]
        return list(dict.fromkeys(found))


def trainees_of(
    case: Case,
    plan: Plan,
    validation: Sequence[Batch],
    in_microbatches: bool,
    metrics: Mapping[str, Loss],
) -> Trainees:
    """Those of a plan; arguments as of a Trainee."""
    if not plan.replicas_step_independently:
        return Trainees([Trainee(case, validation, in_microbatches, metrics)])
    found = []
    places = samples_of(plan, REPLICA_AXIS)
    for own, samples in zip(cases_of_replicas(case, plan), places, strict=True):
        rows = torch.tensor(samples)
        parts = [{key: value[rows] for key, value in batch.items()} for batch in validation]
        found.append(Trainee(own, parts, in_microbatches, metrics))
    begun = {name: p.detach() for name, p in found[0].trained.items()}
    return Trainees(found, *exchanging(plan, begun))
