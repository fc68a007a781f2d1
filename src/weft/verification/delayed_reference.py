"""An asynchronous pipeline on one device: the same delayed weights, one microbatch after the other.

PipeDream (Harlap et al. 2018) by its definition: microbatch m's loss and gradient are computed with
the weight versions that the papers give for each stage (`plain.delayed_weights`), and every update
applies the mean gradient of its microbatches to the newest weights.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from weft.nn import Randomness
from weft.pipeline.schedules import builtin_schedules

from .activation_recorder import record_activations
from .case import Case
from .plain.delayed_weights import update_faults, update_of, version_of
from .plain.draw_laws import DrawLaws
from .plain.functions import PlainFunctions
from .plain.inputs import plain_arguments, plain_inputs
from .plain.parameter_groups import plain_optimizer
from .plain_run import known_positions, loss_of, prepare_plain
from .reference import Reference, final_state


def run_delayed(case: Case, layout: str, steps: int) -> Reference:
    """`steps` calls of the schedule of `layout` on this process alone. Of gradients only those of
    activations are kept: weights have changed before a step has all of them."""
    model = case.plain_model()
    plan, alone = case.lay(model, layout), case.lay(model, "dp1")
    assert plan.staging is not None
    randomness, laws = Randomness(case.seed), DrawLaws()
    experts = prepare_plain(case, model, alone, randomness)
    params, inputs = dict(model.named_parameters()), plain_inputs(model, case.inputs)
    stages = [
        [n for n in stage.weights if params[n].requires_grad] for stage in plan.staging.stages
    ]
    optimizers = [
        plain_optimizer(case.optimizer, [(n, params[n]) for n in names]) if names else None
        for names in stages
    ]
    update = update_of(plan.schedule)
    size = plan.batch // plan.accumulate
    found = Reference(tuple(params), plan)
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        versions = [[_copies(params, names)] for names in stages]
        sums = torch.zeros(2, dtype=torch.float64)
        for m in range(plan.accumulate):
            micro = {key: value[m * size : (m + 1) * size] for key, value in batch.items()}
            randomness.begin(step, list(range(m * size, (m + 1) * size)))
            weights = {
                n: p
                for s, kept in enumerate(versions)
                for n, p in kept[version_of(plan.schedule, s, m)].items()
            }
            together = update.count(update[m])
            with (
                case.mode(),
                record_activations(model, size) as trace,
                PlainFunctions(
                    randomness, laws, trace.attention, trace.ask, known_positions(inputs, micro)
                ).active() as functions,
            ):
                output = torch.func.functional_call(
                    model, weights, (), plain_arguments(inputs, micro)
                )
                part, count, _ = loss_of(case.loss, output, micro)
                minimised = sum(functions.added, part)
                (minimised * (1.0 / (torch.as_tensor(count).double() * together))).backward()
            if step == 0:
                found.traces.append(trace)
            sums += torch.stack([part.detach(), torch.as_tensor(count).double()])
            for name, leaf in weights.items():
                if leaf.grad is not None:
                    params[name].grad = (
                        leaf.grad if params[name].grad is None else params[name].grad + leaf.grad
                    )
                    leaf.grad = None
            if m == plan.accumulate - 1 or update[m + 1] > update[m]:
                for names, optimizer, kept in zip(stages, optimizers, versions, strict=True):
                    if optimizer is not None:
                        with case.mode():
                            optimizer.step()
                        optimizer.zero_grad()
                    kept.append(_copies(params, names))
        experts.move()
        found.took_s.append(time.monotonic() - begun)
        found.losses.append(float(sums[0] / sums[1]))
        found.gradients.append({})
        found.norms.append(0.0)
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in params.items()}
    found.final = final_state(model, [o for o in optimizers if o is not None], params)
    own = plan.schedule.name not in builtin_schedules()  # of a user's, which defines itself
    of_papers = [] if own else update_faults(plan.schedule)
    found.broken = (*of_papers, *laws.broken, *case.faults())
    return found


def _copies(params: dict, names: list[str]) -> dict[str, Tensor]:
    return {name: params[name].detach().clone().requires_grad_() for name in names}
