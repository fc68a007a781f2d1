"""The cost of a user's own schedule, which has no closed form, by simulating it."""

from __future__ import annotations

import numpy as np

from weft.core import ActionCosts, peak_live
from weft.pipeline import ScheduleSummary, schedules, simulate

from .layout_batch import Array


def replay_schedule(
    name: str,
    where: Array,
    p: Array,
    m: Array,
    v: Array,
    forward: Array,
    backward: Array,
    weight: Array,
) -> ScheduleSummary:
    """As a closed form (`schedules.summarize`), of the entries where this mask is true; 1
    microbatch at once elsewhere.

    Raises ConfigError for what `schedule.make` does not make."""
    idle, first, last = np.zeros(len(where)), np.ones(len(where)), np.ones(len(where))
    for i in np.flatnonzero(where):
        ranks, microbatches, chunks = int(p[i]), int(m[i]), int(v[i])
        made, of_rank = (
            schedules.make_schedule(name, ranks, microbatches),
            [float(x[i]) for x in (forward, backward, weight)],
        )
        took = simulate(made, ActionCosts(*(seconds / chunks for seconds in of_rank))).makespan_s
        live = peak_live(made)
        idle[i] = took - microbatches * sum(of_rank)
        first[i], last[i] = live[0], live[-1]
    return ScheduleSummary(idle, first, last)
