"""The one-device run that every layout is held to: a plain loop over the user's model, with torch's
own functions and definitions of `plain`.

Of weft it takes what is data: the plan's microbatches and blocks, the order of samples, dropout
masks. Laws hold what is drawn (`plain.draw_laws`, `plain.samples`).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft._torch.trees import tree_flatten
from weft.core import Plan
from weft.engine import LazyBatch, Loss
from weft.nn import (
    Randomness,
    count_labels,
    is_whole_batch,
    model_arguments,
    named_inputs,
    weighed_loss,
)
from weft.parallel import Mesh, call_forwards_with_hooks, cast_arguments, parallelize

from .activation_recorder import ActivationRecorder, record_activations
from .case import Case
from .plain.draw_laws import DrawLaws
from .plain.experts import PlainExperts
from .plain.functions import PlainFunctions
from .plain.losses import plain_loss
from .plain.places import name_places

Batch = dict[str, Tensor]


@dataclass
class Reference:
    """All whole; weights and gradients are those of masters. By parameter name: gradients of each
    step before clipping, weights after step 0."""

    parameters: tuple[str, ...]
    plan: Plan | None = (
        None  # whose delays it has: a cut by measured time would be another one the next time
    )
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients of a step together
    updated: dict[str, Tensor] = field(default_factory=dict)
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
    slowest_s: float = 0.0  # of the steps
    # laws that what was drawn for both sides breaks: masks, random numbers, the order of samples
    broken: tuple[str, ...] = ()
    definition: str = ""  # what it is instead of the plain run: a synchroniser's own definition
    case: Case | None = None  # what was run, if not the case that was asked for
    replicas: tuple[Reference, ...] = ()  # one for each, where they step by themselves
    replayed: bool = False  # it is made of what happened in the run that is compared with it


def run_reference(case: Case, steps: int) -> Reference:
    """`steps` optimizer steps of the case on this process alone."""
    run = reference_steps(case, steps)
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def reference_steps(
    case: Case, steps: int, in_microbatches: bool = False
) -> Generator[dict[str, nn.Parameter], None, Reference]:
    """The same step by step: gives the weights after each, which may be changed before the next.

    The whole batch goes through at once, unless the microbatch is part of what is computed: with
    batch norms, `routing.shares` of experts, or a forward that changes weights or buffers.
    """
    model = case.model().train()
    plan = case.lay(model, "dp1")
    inputs = case.inputs if case.inputs is not None else named_inputs(model)
    randomness, laws = Randomness(case.seed), DrawLaws()
    experts = prepare_plain(case, model, plan, randomness)
    masters = _Masters(model, plan)
    optimizer = case.optimizer([(n, p) for n, p in masters.named.items() if p.requires_grad])
    in_microbatches |= any(isinstance(m, _BatchNorm) for m in model.modules())
    pieces = plan.accumulate if in_microbatches else 1
    whole = is_whole_batch(case.loss)
    found = Reference(tuple(name for name, _ in model.named_parameters()))
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        optimizer.zero_grad()
        masters.round()
        size = plan.batch // pieces
        loss_sum, weight = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.float64),
        )
        outputs: list[Any] = []  # of a loss over the whole batch
        added: list[Tensor] = []  # losses of gates
        for piece in range(pieces):
            micro = {key: value[piece * size : (piece + 1) * size] for key, value in batch.items()}
            randomness.begin(step, list(range(piece * size, (piece + 1) * size)))
            before = _state_of(model) if step == 0 and pieces < plan.accumulate else None
            recorded, trace = ExitStack(), None  # with its backward, which may run forwards again
            with case.mode():
                if step == 0:
                    trace = recorded.enter_context(record_activations(model, size))
                seen, asked = (trace.attention, trace.ask) if trace is not None else (None, None)
                known = known_positions(inputs, micro)
                with PlainFunctions(randomness, laws, seen, asked, known).active() as functions:
                    given = cast_arguments(plan.dtypes, model_arguments(inputs, micro))
                    output = model(**given)
                    added += functions.added
                    if not whole:
                        part, count, labels = loss_of(case.loss, output, micro)
                        found.labels = found.labels or tuple(n / size for n in labels)
                    elif piece == pieces - 1:
                        together, nbytes = _together([*outputs, output], size)
                        read = LazyBatch(batch, batch.__getitem__)
                        part, count = weighed_loss(case.loss, together, read)
                        nbytes += [(-1, entry.nbytes) for entry in read.read.values()]
                        found.loss_bytes = found.loss_bytes or tuple(nbytes)
            if before is not None and not _same_state(before, model):
                return (yield from reference_steps(case, steps, in_microbatches=True))
            outputs.append(output)
            if not whole:
                sum(added, part).backward()
                added.clear()
                masters.add()
            if not whole or pieces > 1:
                recorded.close()
            if trace is not None:
                found.traces.append(trace)
                shares = any(each.what == "shares" for each in trace.asked)
                if shares and not in_microbatches and plan.accumulate > 1:
                    return (yield from reference_steps(case, steps, in_microbatches=True))
            if not whole:
                loss_sum += part.detach()
                weight += torch.as_tensor(count).detach()
        if whole:
            sum(added, part).backward()
            recorded.close()
            masters.add()
            loss_sum, weight = part.detach().double(), torch.as_tensor(count).detach().double()
        for p in masters.named.values():
            if p.grad is not None:
                p.grad /= weight
        found.losses.append(float(loss_sum / weight))
        found.gradients.append(
            {n: p.grad.clone() for n, p in masters.named.items() if p.grad is not None}
        )
        if step == 0:
            found.unreached = frozenset(
                n for n, p in masters.named.items() if p.requires_grad and p.grad is None
            )
        found.norms.append(norms_of(found.gradients[-1])[0])
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.named.values(), case.clip)
        optimizer.step()
        experts.move()
        found.slowest_s = max(found.slowest_s, time.monotonic() - begun)
        yield masters.named
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in masters.named.items()}
    masters.restore()
    keep_final_state(found, model, [optimizer], masters.named)
    found.broken = (*laws.broken, *case.order_faults())
    return found


def prepare_plain(case: Case, model: nn.Module, plan: Plan, randomness: Randomness) -> PlainExperts:
    """Make a model the reference's: as its user wrote it, but that calls of dropout know their
    places, and weft's mixtures of experts compute by their definition. Below float64 weft's rule of
    what is computed in which precision is part of what is verified, and holds here too."""
    for module in model.modules():  # optimizers take dense gradients, which have the same numbers
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    experts = PlainExperts(model, compute=case.precision == "fp64")
    if case.precision == "fp64":
        call_forwards_with_hooks(model)  # which record what is compared
    else:
        parallelize(plan, model, Mesh(plan.layout, torch.device("cpu"), alone=True), randomness)
    name_places(model, plan, randomness)
    return experts


def loss_of(loss: Loss, output: Any, batch: Batch) -> tuple[Tensor, Any, Sequence[int]]:
    """(sum, weight, labels of each cross-entropy): by the definition where it is one of weft's."""
    plain = plain_loss(loss)
    if plain is None:
        with count_labels() as counted:
            total, weight = weighed_loss(loss, output, batch)
        return total, weight, counted
    total, weight, labels = plain(output, batch)
    return total, weight, [labels] if labels else []


def _together(outputs: Sequence[Any], size: int) -> tuple[Any, list[tuple[int, int]]]:
    """(the output of all samples, place and bytes of each tensor with a row for each). `outputs`:
    of `size` samples each. What has no rows is the first one's."""
    flat = [tree_flatten(output) for output in outputs]
    leaves, nbytes = list[Any](), list[tuple[int, int]]()
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        leaf = parts[0]
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,):
            leaf = torch.cat(parts)
            nbytes.append((len(leaves), leaf.nbytes))
        leaves.append(leaf)
    return flat[0][1](leaves), nbytes


def _state_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    state = (*model.named_buffers(), *model.named_parameters())
    return {name: (tensor, tensor.detach().clone()) for name, tensor in state}


def _same_state(before: Mapping[str, tuple[Tensor, Tensor]], model: nn.Module) -> bool:
    """Whether a forward has left buffers and weights as they were."""
    now = dict((*model.named_buffers(), *model.named_parameters()))
    return now.keys() == before.keys() and all(
        now[name] is tensor and torch.equal(tensor.detach(), was)
        for name, (tensor, was) in before.items()
    )


class _Masters:
    """The parameters of a model as an optimizer updates them, by name. In bf16 the model computes
    with roundings of these, and each microbatch's gradients are added in float32; else they are the
    model's own."""

    def __init__(self, model: nn.Module, plan: Plan):
        self.low, self._model = plan.dtypes.low, dict(model.named_parameters())
        self.named = self._model
        if self.low:
            self.named = {
                n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in self._model.items()
            }
            for p in self._model.values():
                p.data = p.data.to(plan.dtypes.computed(p.dtype))

    def round(self) -> None:
        for name, p in self._model.items() if self.low else ():
            p.data.copy_(self.named[name].detach())

    def add(self) -> None:
        for name, p in self._model.items() if self.low else ():
            if p.grad is not None:
                master, grad = self.named[name], p.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                p.grad = None

    def restore(self) -> None:
        for name, p in self._model.items() if self.low else ():
            p.data = self.named[name].detach()


def known_positions(inputs: Sequence[str], batch: Batch) -> list[Tensor]:
    """Positions that ranks which share a sequence know whole: entries [b, s] of the batch, and
    their count if the model takes it."""
    found = [value for key, value in batch.items() if key in inputs and value.ndim == 2]
    if found and "position_ids" in inputs and "position_ids" not in batch:
        found.append(torch.arange(found[0].shape[1]).expand_as(found[0]))
    return found


def keep_final_state(
    found: Reference,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    updated: Mapping[str, nn.Parameter],
) -> None:
    """Keep the state after the last step. `updated`: what the optimizers know, by name."""
    found.final = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, p in updated.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found.final[f"optimizer/{name}/{key}"] = value.clone()


def norms_of(tensors: dict[str, Tensor]) -> tuple[float, float]:
    """(norm of all tensors together, root mean square of an element)."""
    squares = sum(float(t.abs().double().square().sum()) for t in tensors.values())
    return sqrt(squares), sqrt(squares / max(1, sum(t.numel() for t in tensors.values())))
