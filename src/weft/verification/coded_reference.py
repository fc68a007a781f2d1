"""A run whose replicas exchange gradients through a codec, on one device: the gradients that
`CodedGradients` defines, then the optimizer."""

from __future__ import annotations

import time
from dataclasses import replace

from .case import Case
from .codec_definitions import codec_bounds, describe_codec, rounding_optimizer
from .coded_gradients import CodedGradients, check_separate, coding_ranks
from .plain_run import PlainRun
from .reference import Reference, final_state, norms_of, run_reference


def run_coded(case: Case, layout: str, steps: int) -> Reference:
    """`steps` optimizer steps of the replicas of `layout` on this process alone. Raises
    ConfigError where gradients of replicas are not those of their samples."""
    model = case.plain_model()
    plan = case.lay(model, layout)
    assert plan.sync is not None
    codec = plan.sync.codec
    found = run_reference(case, 1)  # its modules compute what ranks do: weights are the same
    check_separate(case, model, plan, found.traces)
    ranks = coding_ranks(plan)
    case = replace(case, within=codec_bounds(codec, ranks))
    found.definition = f"{plan.sync.name}, gradients in {describe_codec(codec)}"
    instead = rounding_optimizer(codec, ranks)
    if instead is not None:
        case = replace(case, optimizer=instead)
        found.definition += f"; with SGD, as sums of {ranks} are rounded in any order"
    found.case, run = case, PlainRun(case)
    coded = CodedGradients(run, plan)
    for kept in (found.losses, found.gradients, found.norms, found.batches, found.buffers):
        kept.clear()
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        loss, _ = coded(step, batch)
        found.losses.append(loss)
        found.gradients.append(
            {n: p.grad.clone() for n, p in run.params.items() if p.grad is not None}
        )
        found.norms.append(norms_of(found.gradients[-1])[0])
        run.update(case.clip)
        found.took_s.append(time.monotonic() - begun)
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in run.params.items()}
    found.final = final_state(run.model, [run.optimizer], run.params)
    broken = dict.fromkeys((*found.broken, *run.laws.broken, *coded.exchange.broken))
    found.broken = tuple(broken)
    return found
