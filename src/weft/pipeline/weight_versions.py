"""Which version of a stage's weights each microbatch uses, in schedules that update weights without
a flush. No torch.

Version v is the weights of a stage after v updates. PipeDream (Harlap et al. 2018) with 3 stages
and an update after every microbatch: stage 0 begins microbatches 0, 1, 2 with version 0, microbatch
3 with version 1, ...; the last stage begins microbatch m with version m.
"""

from __future__ import annotations

from weft.core import Schedule


def weight_updates(schedule: Schedule) -> tuple[int, ...]:
    """The last microbatch of each update, in order; the same for all stages. Empty for a
    synchronous schedule."""
    return tuple(
        a.microbatch
        for actions in schedule.order
        for a in actions
        if a.kind == "U" and a.stage == 0
    )


def update_shares(schedule: Schedule) -> dict[int, int]:
    """Microbatch -> the number of microbatches whose mean gradient its update uses."""
    ends = weight_updates(schedule)
    starts = [0, *(end + 1 for end in ends)]
    return {m: end + 1 - start for start, end in zip(starts, ends) for m in range(start, end + 1)}


def versions_used(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, microbatch) -> version.

    "stash": the newest version that the stage has when it begins the microbatch. "vertical": on all
    stages, the version with which stage 0 begins. "2bw": the version before the newest, among those
    that exist when all earlier microbatches have been applied (Narayanan et al. 2021: gradients at
    W(t-1) are applied to W(t)).
    """
    found: dict[tuple[int, int], int] = {}
    done = [0] * schedule.stages
    for actions in schedule.order:
        for kind, stage, microbatch in actions:
            if kind == "U":
                done[stage] += 1
            elif kind == "F":
                found[stage, microbatch] = done[stage]
    if schedule.versions == "vertical":
        return {(stage, m): found[0, m] for stage, m in found}
    if schedule.versions == "2bw":
        number: dict[int, int] = {}
        for group, end in enumerate(weight_updates(schedule)):
            start = weight_updates(schedule)[group - 1] + 1 if group else 0
            number |= dict.fromkeys(range(start, end + 1), group)
        return {(stage, m): max(0, number[m] - 1) for stage, m in found}
    return found
