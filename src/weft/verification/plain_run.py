"""One device, in plain PyTorch: a model as its user wrote it, its gradients and its updates, with
torch's own functions and definitions of `plain`.

Of weft it takes what is data: the plan's microbatches and blocks, dropout masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft._torch.trees import tree_flatten
from weft.core import Plan
from weft.engine import LazyBatch, Loss
from weft.nn import Randomness, RepeatedDraws, is_whole_batch
from weft.parallel import Mesh, call_forwards_with_hooks, cast_arguments, parallelize

from .activation_recorder import ActivationRecorder, record_activations
from .case import Case
from .plain.draw_laws import DrawLaws
from .plain.experts import PlainExperts
from .plain.functions import PlainFunctions
from .plain.inputs import plain_arguments, plain_inputs
from .plain.losses import own_loss, plain_loss
from .plain.parameter_groups import leave_frozen, plain_optimizer
from .plain.places import name_places

Batch = dict[str, Tensor]
MOST_SCALE, MARGIN = 2.0**16, 2.0**4


# an average of weights that begins as their copy changes nothing before the first update
WATCHED = 2


class NeedsMicrobatches(Exception):
    """The microbatch is part of what the model computes, and the whole batch went through it."""


@dataclass
class StepRecord:
    """What is kept of a step whose modules are compared.

    `traces`: one per piece of the batch. `labels`: of each cross-entropy, for one sample.
    `loss_bytes`: of each tensor of all samples that a whole-batch loss gets: its place in the
    output (-1: of the batch), and its bytes.
    """

    traces: list[ActivationRecorder] = field(default_factory=list)
    labels: tuple[float, ...] = ()
    loss_bytes: tuple[tuple[int, int], ...] = ()


class PlainRun:
    """A case on this process alone: `gradients`, then `update`, step after step.

    The whole batch goes through at once, unless the microbatch is part of what is computed: with
    batch norms, `routing.shares` of experts, or a forward that changes weights or buffers. The
    last two are seen in the first steps, if these are watched.

    Args:
        case: model, loss and optimizer.
        in_microbatches: whether microbatches go through one by one.
    """

    def __init__(self, case: Case, in_microbatches: bool = False):
        self.case, self.model = case, case.plain_model()
        leave_frozen(self.model, case.frozen)
        self.plan = case.lay(self.model, "dp1")
        self.inputs = plain_inputs(self.model, case.inputs)
        self.randomness, self.laws = Randomness(case.seed), DrawLaws()
        self.repeated = RepeatedDraws()
        self.experts = prepare_plain(case, self.model, self.plan, self.randomness)
        self.masters = Masters(self.model, self.plan)
        named = [(n, p) for n, p in self.params.items() if p.requires_grad]
        self.optimizer = plain_optimizer(case.optimizer, named)
        norms = any(isinstance(m, _BatchNorm) for m in self.model.modules())
        self.in_microbatches = in_microbatches or norms
        self.loss_scale = 1.0  # of what backward begins with
        self.gate_loss = 0.0  # that gates have added in this step, summed over tokens
        self.calls = Counter[str]()  # of modules, since the step began
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(partial(self._count, name))

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""
        return self.masters.named

    @property
    def pieces(self) -> int:
        """Into how many a batch is divided."""
        return self.plan.accumulate if self.in_microbatches else 1

    def step_begins(self) -> None:
        """There are no gradients, and nothing is counted."""
        self.optimizer.zero_grad()
        self.calls.clear()
        self.experts.step_begins()
        self.gate_loss = 0.0
        self.masters.round()

    def gradients(
        self, step: int, batch: Batch, record: StepRecord | None = None, watched: bool = False
    ) -> tuple[float, float]:
        """(mean loss, weight) of a batch, whose mean gradients the parameters have then.

        Args:
            step: its number, of which dropout masks depend.
            batch: all samples.
            record: gets what modules compute.
            watched: raise NeedsMicrobatches where they are. Weights and buffers are as before then.
        """
        self.step_begins()
        size, whole = self.plan.batch // self.pieces, is_whole_batch(self.case.loss)
        loss_sum, weight = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.float64),
        )
        outputs: list[Any] = []  # of a loss over the whole batch
        added: list[Tensor] = []  # losses of gates
        for piece in range(self.pieces):
            micro = self._piece(batch, piece)
            self.randomness.begin(step, list(range(piece * size, (piece + 1) * size)))
            kept = watched and self.pieces < self.plan.accumulate
            before = _state_of(self.model) if kept else None
            recorded, trace = ExitStack(), None  # with its backward, which may run forwards again
            with self.case.mode():
                if record is not None:
                    trace = recorded.enter_context(record_activations(self.model, size))
                with self.functions(micro, trace).active() as functions:
                    output = self.forward(micro)
                    added += functions.added
                    if not whole:
                        part, count, labels = loss_of(self.case.loss, output, micro)
                        if record is not None:
                            record.labels = record.labels or tuple(n / size for n in labels)
                    elif piece == self.pieces - 1:
                        together, nbytes = _together([*outputs, output], size)
                        read = LazyBatch(batch, batch.__getitem__)
                        part, count, _ = own_loss(self.case.loss, together, read)
                        nbytes += [(-1, entry.nbytes) for entry in read.read.values()]
                        if record is not None:
                            record.loss_bytes = tuple(nbytes)
            if before is not None and not _same_state(before, self.model):
                _restore(before, self.model)
                raise NeedsMicrobatches
            outputs.append(output)
            if not whole:
                with functions.backward():
                    (sum(added, part) * self.loss_scale).backward()
                self.gate_loss += float(sum(each.detach() for each in added))
                added.clear()
                self.masters.add()
            if not whole or self.pieces > 1:
                recorded.close()
            if trace is not None and record is not None:
                record.traces.append(trace)
                shares = any(each.what == "shares" for each in trace.asked)
                if watched and shares and self.pieces < self.plan.accumulate:
                    raise NeedsMicrobatches
            if not whole:
                loss_sum += part.detach()
                weight += torch.as_tensor(count).detach()
        if whole:
            with functions.backward():
                (sum(added, part) * self.loss_scale).backward()
            self.gate_loss = float(sum(each.detach() for each in added))
            recorded.close()
            self.masters.add()
            loss_sum, weight = part.detach().double(), torch.as_tensor(count).detach().double()
        for p in self.params.values():
            if p.grad is not None:
                p.grad /= weight * self.loss_scale
        return float(loss_sum / weight), float(weight)

    def update(self, clip: float | None, taken: bool = True) -> None:
        """The end of a step, which may not be taken."""
        if taken:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.params.values(), clip)
            with self.case.mode():
                self.optimizer.step()
        self.experts.move(taken)

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], metrics: Mapping[str, Loss]
    ) -> dict[str, tuple[float, float]]:
        """(sum, weight) of the loss and of each metric over all that counts in these batches, in
        evaluation mode."""
        asked = {"loss": self.case.loss, **metrics}
        found = dict.fromkeys(asked, (0.0, 0.0))
        self.model.eval()
        for output, samples in (each for batch in batches for each in self._evaluated(batch)):
            with self.case.mode(), self.functions(samples, None).active():
                for name, function in asked.items():
                    part, count, _ = loss_of(function, output, samples)
                    total, weight = found[name]
                    found[name] = total + float(part), weight + float(count)
        self.model.train()
        return found

    def _evaluated(self, batch: Batch) -> list[tuple[Any, Batch]]:
        """Outputs and their samples: a microbatch at a time where a norm keeps no statistics."""
        modules = self.model.modules()
        alone = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in modules)
        pieces = [self._piece(batch, n) for n in range(self.pieces)] if alone else [batch]
        found = []
        for piece in pieces:
            with self.case.mode(), self.functions(piece, None).active():
                found.append((self.forward(piece), piece))
        if is_whole_batch(self.case.loss) and len(pieces) > 1:
            size = self.plan.batch // self.pieces
            return [(_together([output for output, _ in found], size)[0], batch)]
        return found

    def _piece(self, batch: Batch, number: int) -> Batch:
        size = self.plan.batch // self.pieces
        return {key: value[number * size : (number + 1) * size] for key, value in batch.items()}

    @torch.no_grad()
    def output(self, batch: Batch) -> Any:
        """What the model returns in evaluation mode."""
        self.model.eval()
        try:
            with self.case.mode(), self.functions(batch, None).active():
                return self.forward(batch)
        finally:
            self.model.train()

    def _count(self, name: str, module: nn.Module, args: tuple) -> None:
        self.calls[name] += 1

    def functions(self, batch: Batch, trace: ActivationRecorder | None) -> PlainFunctions:
        """The definitions that are active in a forward of this batch."""
        seen, asked = (trace.attention, trace.ask) if trace is not None else (None, None)
        known = known_positions(self.inputs, batch)
        return PlainFunctions(self.randomness, self.laws, seen, asked, known, self.repeated)

    def forward(self, batch: Batch) -> Any:
        """What the model returns."""
        given = cast_arguments(self.plan.dtypes, plain_arguments(self.inputs, batch))
        return self.model(**given)


def needs_microbatches(case: Case) -> bool:
    """Whether the microbatch is part of what the case computes."""
    run, batch = PlainRun(case), case.whole_batch_of(0)
    try:
        for step in range(WATCHED):
            run.gradients(step, batch, None if step else StepRecord(), watched=True)
            run.update(case.clip)
    except NeedsMicrobatches:
        return True
    return run.in_microbatches


def fitting_scale(case: Case, in_microbatches: bool) -> float:
    """A loss scale with which no gradient of the first step comes near the largest number of
    fp16."""
    scale = MOST_SCALE
    while scale > 1.0:
        run = PlainRun(case, in_microbatches)
        run.loss_scale = scale * MARGIN
        run.gradients(0, case.whole_batch_of(0))
        if all(bool(p.grad.isfinite().all()) for p in run.params.values() if p.grad is not None):
            break
        scale /= 2.0
    return scale


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
        return own_loss(loss, output, batch)
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


@torch.no_grad()
def _restore(before: Mapping[str, tuple[Tensor, Tensor]], model: nn.Module) -> None:
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name in before:
            tensor.copy_(before[name][1])


class Masters:
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
    their count, which the model takes or makes."""
    found = [value for key, value in batch.items() if key in inputs and value.ndim == 2]
    if found and not {"position_ids"} & batch.keys() & {*inputs}:
        found.append(torch.arange(found[0].shape[1]).expand_as(found[0]))
    return found
