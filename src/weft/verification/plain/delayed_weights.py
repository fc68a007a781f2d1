"""Which weights a microbatch's gradient is computed with when a pipeline updates without a flush,
read off the table of a schedule by the papers' words.

PipeDream (Harlap et al. 2018): a stage uses the newest weights that it has when the microbatch's
forward begins; with vertical sync, all use the version that the input stage has then. PipeDream-2BW
(Narayanan et al. 2021): W(t+1) = W(t) - lr f(W(t-1)), where t counts the groups of microbatches
that are applied together. Version v of a stage's weights has had v updates, and a version below 0
is the first.
"""

from __future__ import annotations

from weft.core import Schedule


def update_of(schedule: Schedule) -> list[int]:
    """Microbatch -> the update that applies its gradient: the first that is not before it."""
    order = schedule.order[schedule.placement[0]]
    ends = [m for kind, stage, m in order if (kind, stage) == ("U", 0)]
    return [sum(end < m for end in ends) for m in range(schedule.microbatches)]


def version_of(schedule: Schedule, stage: int, microbatch: int) -> int:
    """The version of a stage's weights that a microbatch is computed with."""
    if schedule.versions == "2bw":
        return max(0, update_of(schedule)[microbatch] - 1)
    whose = 0 if schedule.versions == "vertical" else stage
    order = schedule.order[schedule.placement[whose]]
    before = order[: order.index(("F", whose, microbatch))]
    return sum((kind, of) == ("U", whose) for kind, of, _ in before)


def update_faults(schedule: Schedule) -> list[str]:
    """What a table of PipeDream does otherwise than its papers, in the first stage that does:
    after which microbatches it updates, and how old the weights of each microbatch are.

    PipeDream: after every one; microbatch m meets the weights of update m - (n - 1 - s) on stage s
    of n, and with vertical sync those of stage 0. PipeDream-2BW: once in n microbatches, of which
    those left over belong to the last update."""
    stages, count = schedule.stages, schedule.microbatches
    size = stages if schedule.versions == "2bw" else 1
    wanted = [(group + 1) * size - 1 for group in range(max(1, count // size) - 1)] + [count - 1]
    for stage, rank in enumerate(schedule.placement):
        ends = [m for kind, of, m in schedule.order[rank] if (kind, of) == ("U", stage)]
        if ends != wanted:
            shown = ", ".join(map(str, ends)) or "none"
            return [
                f"stage {stage} updates after microbatches {shown}, where"
                f" {schedule.versions} does after {', '.join(map(str, wanted))}"
            ]
        ahead = stages - 1 - (0 if schedule.versions == "vertical" else stage)
        for m in range(count if schedule.versions != "2bw" else 0):
            version = version_of(schedule, stage, m)
            if version != max(0, m - ahead):
                return [
                    f"stage {stage} takes microbatch {m} with version {version} of its weights,"
                    f" where {schedule.versions} takes {max(0, m - ahead)}"
                ]
    return []
