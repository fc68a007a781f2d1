"""The one-device run that every layout is held to: a plain loop over the user's model, with torch's
own functions and definitions of `plain`.

Of weft it takes what is data: the plan's microbatches and blocks, the order of samples, dropout
masks. Laws hold what is drawn (`plain.draw_laws`, `plain.samples`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor, nn

from weft.core import Plan

from .activation_recorder import ActivationRecorder
from .case import Case
from .plain.causality import reads_later_tokens
from .plain.optimizers import AnyOptimizer
from .plain_run import WATCHED, NeedsMicrobatches, PlainRun, StepRecord, fitting_scale

Batch = dict[str, Tensor]
LATER = "an output of the model at a position changes with the tokens after it"
OVERFLOWS = 2.0**60  # a loss scale that is too large for any gradient in fp16


@dataclass
class Reference:
    """All whole; weights and gradients are those of masters. By parameter name: gradients of each
    step before clipping, weights after step 0."""

    parameters: tuple[str, ...]
    plan: Plan | None = (
        None  # whose delays it has: a cut by measured time would be another one the next time
    )
    losses: list[float] = field(default_factory=list)
    # of modules in each step, of a plain run
    calls: list[Counter[str]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients of a step together
    updated: dict[str, Tensor] = field(default_factory=dict)
    # weights after each step, of replicas, whose exchanges come between steps
    after: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after step 0, of a plain run
    final: dict[str, Tensor] = field(
        default_factory=dict
    )  # weights, buffers, optimizer state after the last step
    batches: list[Batch] = field(default_factory=list)
    traces: list[ActivationRecorder] = field(default_factory=list)  # of step 0: one per microbatch
    unreached: frozenset[str] = frozenset()  # parameters that get no gradient in step 0
    # of each tensor of all samples that a whole-batch loss gets in step 0: its place in the
    # output (-1: of the batch), and its bytes
    loss_bytes: tuple[tuple[int, int], ...] = ()
    # labels of each cross-entropy of step 0, for one sample
    labels: tuple[float, ...] = ()
    built_s: float = 0.0  # what building the model took
    took_s: list[float] = field(default_factory=list)  # each step
    # what backward begins with, in fp16, where after `losses` a step overflows
    loss_scale: float = 1.0
    # laws that what was drawn for both sides breaks: masks, random numbers, the order of samples
    broken: tuple[str, ...] = ()
    # whether an output at a position changes with the tokens after it, which the loss has it
    # predict; of a plain run
    reads_later: bool = False
    definition: str = ""  # what it is instead of the plain run: a synchroniser's own definition
    case: Case | None = None  # what was run, if not the case that was asked for
    replicas: tuple[Reference, ...] = ()  # one for each, where they step by themselves
    replayed: bool = False  # it is made of what happened in the run that is compared with it


def run_reference(case: Case, steps: int) -> Reference:
    """`steps` optimizer steps of the case on this process alone. In fp16 one more follows that
    overflows, and changes no weight."""
    run = reference_steps(case, steps)
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def reference_steps(
    case: Case, steps: int, in_microbatches: bool = False
) -> Generator[dict[str, nn.Parameter], None, Reference]:
    """The same step by step: gives the weights after each, which may be changed before the next."""
    scale = fitting_scale(case, in_microbatches) if case.precision == "fp16" else 1.0
    begun = time.monotonic()
    run, record = PlainRun(case, in_microbatches), StepRecord()
    found = Reference(tuple(name for name, _ in run.model.named_parameters()), loss_scale=scale)
    found.built_s = time.monotonic() - begun
    run.loss_scale = scale
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        try:
            loss, _ = run.gradients(step, batch, None if step else record, watched=step < WATCHED)
        except NeedsMicrobatches:
            if step == 0:
                return (yield from reference_steps(case, steps, in_microbatches=True))
            run.in_microbatches = True  # the steps before have changed nothing
            loss, _ = run.gradients(step, batch)
        found.losses.append(loss)
        found.calls.append(run.calls.copy())
        found.gradients.append(
            {n: p.grad.clone() for n, p in run.params.items() if p.grad is not None}
        )
        if step == 0:
            found.unreached = frozenset(
                n for n, p in run.params.items() if p.requires_grad and p.grad is None
            )
        found.norms.append(norms_of(found.gradients[-1])[0])
        run.update(case.clip)
        found.took_s.append(time.monotonic() - begun)
        yield run.params
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in run.params.items()}
            kept = run.model.state_dict()
            found.buffers = {n: b.clone() for n, b in run.model.named_buffers() if n in kept}
    if case.precision == "fp16":
        run.loss_scale = OVERFLOWS
        run.gradients(steps, case.whole_batch_of(steps))
        run.update(case.clip, taken=False)
    run.masters.restore()
    found.final = final_state(run.model, [run.optimizer], run.params)
    found.traces, found.labels, found.loss_bytes = record.traces, record.labels, record.loss_bytes
    found.broken = (*run.laws.broken, *case.faults())
    if case.precision == "fp64" and _reads_later_tokens(run, found.batches[0]):
        found.reads_later = True
        if type(run.model).__module__.startswith("weft."):  # its mask is a part of weft
            found.broken = (*found.broken, LATER)
    return found


def _reads_later_tokens(run: PlainRun, batch: Batch) -> bool:
    with suppress(Exception):  # a model that takes no single sample
        return reads_later_tokens(run.output, run.case.loss, batch) or False
    return False


def final_state(
    model: nn.Module,
    optimizers: Sequence[AnyOptimizer],
    updated: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, what is tied once. `updated`: what the optimizers know,
    by name."""
    kept, each = model.state_dict(), (*model.named_parameters(), *model.named_buffers())
    found = {name: value.detach().clone() for name, value in each if name in kept}
    for name, p in updated.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{name}/{key}"] = value.clone()
                elif type(value) in (int, float):
                    number = torch.tensor(value, dtype=torch.float64)
                    found[f"optimizer/{name}/{key}"] = number
    return found


def norms_of(tensors: dict[str, Tensor]) -> tuple[float, float]:
    """(norm of all tensors together, root mean square of an element)."""
    squares = sum(float(t.abs().double().square().sum()) for t in tensors.values())
    return sqrt(squares), sqrt(squares / max(1, sum(t.numel() for t in tensors.values())))
