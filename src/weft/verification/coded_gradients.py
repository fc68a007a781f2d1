"""The gradients of a step that replicas exchange through a codec, on one device: those of each
replica's samples, encoded and summed by the definitions of `plain.codecs`.

What is encoded is the sum of the gradients of a replica's samples, divided by the samples of the
global batch. Which parts of parameters are encoded together is data of the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core import REPLICA_AXIS, ConfigError, Plan
from weft.nn import is_whole_batch
from weft.parallel import STATE_AXES

from .activation_recorder import ActivationRecorder
from .case import Batch, Case
from .codec_definitions import EXACT, DefinedCodec, same
from .parcels import bucket_parcels, samples_of, scattered_units
from .plain.draw_laws import DrawLaws
from .plain.samples import division_faults
from .plain_run import PlainRun, loss_of

Gradients = dict[str, Tensor]


def codes_gradients(plan: Plan) -> bool:
    """Whether replicas, or the ranks of FSDP2, send gradients through a lossy codec."""
    sync = plan.gradient_sync
    lossy = sync is not None and sync.codec.name != "identity"
    return lossy and (plan.uses_custom_dp_sync or plan.fsdp_uses_codec)


def coding_ranks(plan: Plan) -> int:
    """How many encode gradients of their own."""
    return plan.layout.size(*_axes(plan))


def _axes(plan: Plan) -> tuple[str, ...]:
    return STATE_AXES if plan.fsdp_uses_codec else (REPLICA_AXIS,)


class CodedGradients:
    """Takes the place of a run's own `gradients`. `plan`: of all replicas."""

    def __init__(self, run: PlainRun, plan: Plan):
        self.exchange = GradientExchange(plan)
        self._run, self._plan = run, plan
        self._scale: float | None = None  # of the step before

    def kept(self) -> tuple[GradientExchange, float | None]:
        """What a step depends on beside its samples."""
        return self.exchange.copied(), self._scale

    def restore(self, kept: tuple[GradientExchange, float | None]) -> None:
        """Go on from what `kept` returned."""
        self.exchange, self._scale = kept[0].copied(), kept[1]

    def __call__(self, step: int, batch: Batch) -> tuple[float, float]:
        """As of `PlainRun.gradients`. Raises ConfigError where the definition does not tell what is
        sent."""
        run, plan = self._run, self._plan
        run.step_begins()
        sums, buffers = torch.zeros(2, dtype=torch.float64), _copies(run.model.buffers())
        gradients: list[list[Gradients]] = []  # of each replica and microbatch
        for samples in self.exchange.samples:
            for buffer, before in buffers:  # each replica begins with what all have
                buffer.copy_(before)
            gradients.append([])
            size = len(samples) // plan.accumulate
            for m in range(plan.accumulate):
                own = samples[m * size : (m + 1) * size]
                micro = {key: value[torch.tensor(own)] for key, value in batch.items()}
                sums += self._backward(step, own, micro)
                reached = {n: p.grad for n, p in run.params.items() if p.grad is not None}
                gradients[-1].append(reached)
                run.model.zero_grad(set_to_none=True)
        summed = self.exchange(gradients, self._scale)
        if self.exchange.undecided:
            why = f"step {step} encodes {self.exchange.undecided} numbers that are only rounding"
            raise untold(plan, why)
        self._scale = float(plan.batch / sums[1])
        for name, grad in summed.items():
            run.params[name].grad = grad * self._scale
        return float(sums[0] / sums[1]), float(sums[1])

    def _backward(self, step: int, samples: Sequence[int], micro: Batch) -> Tensor:
        """(loss, weight) of these samples, whose gradients the parameters have then."""
        run = self._run
        run.randomness.begin(step, list(samples))
        with run.case.mode(), run.functions(micro, None).active() as functions:
            part, count, _ = loss_of(run.case.loss, run.forward(micro), micro)
            (sum(functions.added, part) / self._plan.batch).backward()
        run.gate_loss += float(sum(each.detach() for each in functions.added))
        return torch.stack([part.detach(), torch.as_tensor(count).double()])


class GradientExchange:
    """What replicas exchange in a step: a codec for each bucket, of gradients or of FSDP2's
    units. `near`: changes what is encoded by a few roundings, to see what these do."""

    def __init__(self, plan: Plan):
        assert plan.sync is not None
        scatters, codec = plan.fsdp_uses_codec, plan.sync.codec
        self.samples, ranks = samples_of(plan, *_axes(plan)), coding_ranks(plan)
        self._faults = division_faults(self.samples, plan.batch)
        view = plan.sync.replica_view(ranks)
        view = replace(view, sharded=view.sharded or scatters)
        self._parcels = [] if scatters else bucket_parcels(plan)
        self._units = scattered_units(plan) if scatters else []
        named = [(parcel.name, parcel.shapes) for parcel in self._parcels]
        named = named or [(unit.name, []) for unit in self._units]
        self._laws = DrawLaws()
        self.near: Callable[[Tensor], Tensor] = same
        self._codecs = [
            DefinedCodec(codec, shapes, replace(view, bucket=name), self._laws, name)
            for name, shapes in named
        ]

    @property
    def broken(self) -> list[str]:
        return [*self._faults, *self._laws.broken]

    @property
    def undecided(self) -> int:
        """Numbers whose code no definition tells."""
        return sum(codec.plain.undecided for codec in self._codecs)

    def copied(self) -> GradientExchange:
        """The same with what codecs keep now, held to the same laws."""
        return copy.deepcopy(self, {id(each): each for each in (self._laws, self.near)})

    def __call__(self, gradients: Sequence[Sequence[Gradients]], scale: float | None) -> Gradients:
        """The sums of each replica's gradients, of all its microbatches; of parameters that a
        gradient reached."""
        reached = {n: g for replica in gradients for micro in replica for n, g in micro.items()}
        found = {n: torch.zeros_like(g) for n, g in reached.items()}
        for parcel, codec in zip(self._parcels, self._codecs, strict=False):
            xs = [parcel.taken(added(replica)) for replica in gradients]
            xs = [self.near(x) for x in xs]
            parcel.put(codec.plain.total(xs, scale), found)
        for unit, codec in zip(self._units, self._codecs, strict=False):
            together = [tuple(added(replica) for replica in gradients)]
            for turn in zip(*gradients, strict=True) if unit.often else together:
                rows = [unit.rows(each) for each in turn]
                unit.put(codec.plain.scattered([self.near(x) for x in rows]), found)
        return found


def added(parts: Sequence[Gradients]) -> Gradients:
    """The sums of these gradients, by name."""
    found: Gradients = {}
    for part in parts:
        for name, grad in part.items():
            found[name] = found[name] + grad if name in found else grad
    return found


def check_separate(
    case: Case, model: nn.Module, plan: Plan, traces: Sequence[ActivationRecorder]
) -> None:
    """Refuse where a replica sends another gradient than that of its samples. `traces`: of a plain
    step. Raises ConfigError."""
    if any(each.what == "shares" for trace in traces for each in trace.asked):
        raise untold(plan, "the model's gates balance the tokens of all replicas")
    if any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise untold(plan, "the model's batch norms take the samples of all replicas")
    if is_whole_batch(case.loss):
        raise untold(plan, "the loss takes the samples of all replicas")
    table = plan.params()
    for weight in table if plan.fsdp_uses_codec else ():
        if over := plan.reduced_over(weight, table):
            axes = " and ".join(over)
            raise untold(
                plan,
                f"the gradient of {weight} is a sum over {axes}, and each rank encodes its"
                " own part of the sum",
            )


def untold(plan: Plan, why: str) -> ConfigError:
    """Why the definition of a plan's codec cannot be computed."""
    assert plan.sync is not None
    problem = f"the definition cannot compute what a replica sends: {why}"
    return ConfigError("sync.codec", plan.sync.codec.name, problem, EXACT)


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(tensor, tensor.clone()) for tensor in tensors]
