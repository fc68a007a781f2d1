"""A run of an asynchronous pipeline on one device, whose steps `DelayedSteps` defines."""

from __future__ import annotations

import time

from .case import Case
from .delayed_steps import DelayedSteps
from .plain_run import PlainRun
from .reference import Reference, final_state


def run_delayed(case: Case, layout: str, steps: int) -> Reference:
    """`steps` calls of the schedule of `layout` on this process alone. Of gradients only those of
    activations are kept: weights have changed before a step has all of them."""
    plan = case.lay(case.plain_model(), layout)
    run = PlainRun(case, in_microbatches=True)
    delayed, found = DelayedSteps(run, plan), Reference(tuple(run.params), plan)
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        loss, _ = delayed(step, batch, found.traces if step == 0 else None)
        found.took_s.append(time.monotonic() - begun)
        found.losses.append(loss)
        found.gradients.append({})
        found.norms.append(0.0)
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in run.params.items()}
    found.final = final_state(run.model, [run.optimizer], run.params)
    found.broken = (*delayed.broken, *run.laws.broken, *case.faults())
    return found
