"""Who trains in a run of `weft train`, on one device: one, or replicas that step by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.core import REPLICA_AXIS, Plan
from weft.engine import Loss

from .case import Batch, Case
from .codec_definitions import codec_bounds, rounding_optimizer, same
from .coded_gradients import (
    CodedGradients,
    GradientExchange,
    check_separate,
    codes_gradients,
    coding_ranks,
    untold,
)
from .delayed_steps import DelayedSteps, is_delayed
from .difference import Bounds
from .parcels import samples_of
from .plain.draw_laws import seed_faults
from .plain.replicas import PlainReplicas
from .reference import run_reference
from .replica_reference import WeightExchange, cases_of_replicas, codes_weights, exchanging
from .rounding import rounded
from .server_definition import is_served
from .training_reference import Trainee


@dataclass(frozen=True)
class Trainees:
    """`each` of them; and where they are replicas, what exchanges their weights, and in which
    messages."""

    each: list[Trainee]
    exchange: PlainReplicas | None = None
    messages: Sequence[WeightExchange] = ()

    @property
    def broken(self) -> list[str]:
        """Laws that what was drawn for them breaks, or how samples and weights are divided."""
        found = seed_faults([trainee.case.seed for trainee in self.each])
        found += [law for each in self.messages for law in each.broken]
        found += [law for trainee in self.each for law in trainee.run.laws.broken]
        coded = [each for trainee in self.each for each in trainee.codecs]
        found += [law for each in coded for law in each.exchange.broken]
        delayed = [each for trainee in self.each for each in trainee.delayed.values()]
        found += [law for each in delayed if each is not None for law in each.broken]
        return list(dict.fromkeys(found))


def trainees_of(
    case: Case,
    plans: Mapping[int, Plan],
    validation: Sequence[Batch],
    in_microbatches: bool,
    metrics: Mapping[str, Loss],
    seed: int | None = None,
) -> Trainees:
    """Those of a run. `plans`: by the step from which on it is laid so; `seed`: of changes by a few
    roundings of what codecs encode; the others as of a Trainee."""
    plan = plans[0]
    if not plan.replicas_step_independently:
        alone = Trainee(case, validation, in_microbatches, metrics)
        for begins, each in plans.items():
            alone.coded[begins] = CodedGradients(alone.run, each) if codes_gradients(each) else None
            late = DelayedSteps(alone.run, each, alone.updates) if is_delayed(each) else None
            alone.delayed[begins] = late
        _encode_nearby([coded.exchange for coded in alone.codecs], plan, seed)
        return Trainees([alone])
    found = []
    places = samples_of(plan, REPLICA_AXIS)
    for own, samples in zip(cases_of_replicas(case, plan), places, strict=True):
        rows = torch.tensor(samples)
        parts = [{key: value[rows] for key, value in batch.items()} for batch in validation]
        found.append(Trainee(own, parts, in_microbatches, metrics))
    begun = {name: p.detach() for name, p in found[0].trained.items()}
    exchange, messages = exchanging(plans, begun)
    _encode_nearby(messages, plan, seed)
    return Trainees(found, exchange, messages)


def _encode_nearby(
    coded: Iterable[GradientExchange | WeightExchange], plan: Plan, seed: int | None
) -> None:
    """What these encode is changed by a few roundings. `seed`: of the changes; None: of none."""
    for each in coded if seed is not None else ():
        each.near = near_by(plan, seed)


def near_by(plan: Plan, seed: int | None) -> Callable[[Tensor], Tensor]:
    """What changes by a few roundings what the codec of a plan encodes. `seed`: of the changes;
    None: of none."""
    if seed is None:
        return same
    together = plan.sync is not None and plan.sync.codec.name == "powersgd"
    generator = torch.Generator().manual_seed(seed)
    return partial(rounded, generator=generator, together=together)


def lossy_ranks(plan: Plan) -> int:
    """How many send gradients or weights of their own through a lossy codec; 0: none. A worker and
    its asynchronous server are two."""
    if codes_gradients(plan):
        return coding_ranks(plan)
    if is_served(plan) and plan.sync is not None and plan.sync.codec.name != "identity":
        return 2
    count = plan.layout.replica_count
    return count if codes_weights(plan) and count > 1 else 0


def check_codec(case: Case, plan: Plan) -> None:
    """Refuse where no definition tells what codecs of a plan send in a training run. Raises
    ConfigError."""
    if codes_gradients(plan):
        traces = run_reference(case, 1).traces
        check_separate(case, case.plain_model(), plan, traces)
    ranks = lossy_ranks(plan)
    if ranks and plan.sync and rounding_optimizer(plan.sync.codec, ranks) is not None:
        raise untold(plan, f"sums of {ranks} are rounded in any order")


def bounds_of(plan: Plan) -> Bounds:
    """Within which a run is equal to the definition."""
    ranks = lossy_ranks(plan)
    return codec_bounds(plan.sync.codec, ranks) if ranks and plan.sync else Bounds()
