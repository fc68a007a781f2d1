"""A run whose replicas exchange gradients through a codec, on one device: the gradient of each
replica's samples, encoded and summed by the definitions of `plain.codecs`, then the optimizer.

What is encoded is the sum of the gradients of a replica's samples, divided by the samples of the
global batch. Which parts of parameters are encoded together is data of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core import REPLICA_AXIS, ConfigError, Plan
from weft.nn import Randomness, is_whole_batch
from weft.parallel import STATE_AXES

from .case import Case
from .codec_definitions import (
    EXACT,
    DefinedCodec,
    codec_bounds,
    describe_codec,
    rounding_optimizer,
)
from .parcels import bucket_parcels, samples_of, scattered_units
from .plain.draw_laws import DrawLaws
from .plain.functions import PlainFunctions
from .plain.inputs import plain_arguments, plain_inputs
from .plain.parameter_groups import plain_optimizer
from .plain.samples import division_faults
from .plain_run import known_positions, loss_of, prepare_plain
from .reference import Reference, final_state, norms_of, run_reference

Gradients = dict[str, Tensor]


def run_coded(case: Case, layout: str, steps: int) -> Reference:
    """`steps` optimizer steps of the replicas of `layout` on this process alone. Raises
    ConfigError where gradients of replicas are not those of their samples."""
    model = case.plain_model()
    plan, alone = case.lay(model, layout), case.lay(model, "dp1")
    assert plan.sync is not None
    codec = plan.sync.codec
    _check_separate(case, model, plan)
    found = run_reference(case, 1)  # its modules compute what ranks do: weights are the same
    if any(each.what == "shares" for trace in found.traces for each in trace.asked):
        raise _untold(codec.name, "the model's gates balance the tokens of all replicas")
    randomness, laws = Randomness(case.seed), DrawLaws()
    experts = prepare_plain(case, model, alone, randomness)
    params, inputs = dict(model.named_parameters()), plain_inputs(model, case.inputs)
    trained = {n: p for n, p in params.items() if p.requires_grad}
    exchange = _GradientExchange(plan)
    case = replace(case, within=codec_bounds(codec, exchange.ranks))
    found.definition = f"{plan.sync.name}, gradients in {describe_codec(codec)}"
    instead = rounding_optimizer(codec, exchange.ranks)
    if instead is not None:
        case = replace(case, optimizer=instead)
        found.definition += f"; with SGD, as sums of {exchange.ranks} are rounded in any order"
    found.case, optimizer = case, plain_optimizer(case.optimizer, list(trained.items()))
    for kept in (found.losses, found.gradients, found.norms, found.batches, found.buffers):
        kept.clear()
    scale: float | None = None
    for step in range(steps):
        begun, batch = time.monotonic(), case.whole_batch_of(step)
        found.batches.append(batch)
        sums, buffers = torch.zeros(2, dtype=torch.float64), _copies(model.buffers())
        gradients: list[list[Gradients]] = []  # of each replica and microbatch
        for samples in exchange.samples:
            for buffer, before in buffers:  # each replica begins with what all have
                buffer.copy_(before)
            gradients.append([])
            size = len(samples) // plan.accumulate
            for m in range(plan.accumulate):
                own = samples[m * size : (m + 1) * size]
                micro = {key: value[torch.tensor(own)] for key, value in batch.items()}
                randomness.begin(step, own)
                positions = known_positions(inputs, micro)
                functions = PlainFunctions(randomness, laws, None, None, positions)
                with case.mode(), functions.active():
                    output = model(**plain_arguments(inputs, micro))
                    part, count, _ = loss_of(case.loss, output, micro)
                    (sum(functions.added, part) / plan.batch).backward()
                sums += torch.stack([part.detach(), torch.as_tensor(count).double()])
                gradients[-1].append({n: p.grad for n, p in trained.items() if p.grad is not None})
                model.zero_grad(set_to_none=True)
        summed = exchange(gradients, scale)
        if exchange.undecided:
            why = f"step {step} encodes {exchange.undecided} numbers that are only rounding"
            raise _untold(codec.name, why)
        scale = float(plan.batch / sums[1])
        for name, grad in summed.items():
            trained[name].grad = grad * scale
        found.losses.append(float(sums[0] / sums[1]))
        found.gradients.append(
            {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        )
        found.norms.append(norms_of(found.gradients[-1])[0])
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), case.clip)
        with case.mode():
            optimizer.step()
        optimizer.zero_grad()
        experts.move()
        found.took_s.append(time.monotonic() - begun)
        if step == 0:
            found.updated = {n: p.detach().clone() for n, p in params.items()}
    found.final = final_state(model, [optimizer], params)
    broken = dict.fromkeys((*found.broken, *laws.broken, *exchange.broken))
    found.broken = tuple(broken)
    return found


class _GradientExchange:
    """What replicas exchange in a step: a codec for each bucket, of gradients or of FSDP2's
    units."""

    def __init__(self, plan: Plan):
        assert plan.sync is not None
        scatters, codec = plan.fsdp_uses_codec, plan.sync.codec
        self.samples = samples_of(plan, *(STATE_AXES if scatters else (REPLICA_AXIS,)))
        self.ranks = len(self.samples)
        self._faults = division_faults(self.samples, plan.batch)
        view = plan.sync.replica_view(self.ranks)
        view = replace(view, sharded=view.sharded or scatters)
        self._parcels = [] if scatters else bucket_parcels(plan)
        self._units = scattered_units(plan) if scatters else []
        named = [(parcel.name, parcel.shapes) for parcel in self._parcels]
        named = named or [(unit.name, []) for unit in self._units]
        self._laws = DrawLaws()
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

    def __call__(self, gradients: Sequence[Sequence[Gradients]], scale: float | None) -> Gradients:
        """The sums of each replica's gradients, of all its microbatches; of parameters that a
        gradient reached."""
        reached = {n: g for replica in gradients for micro in replica for n, g in micro.items()}
        found = {n: torch.zeros_like(g) for n, g in reached.items()}
        for parcel, codec in zip(self._parcels, self._codecs, strict=False):
            xs = [parcel.taken(added(replica)) for replica in gradients]
            parcel.put(codec.plain.total(xs, scale), found)
        for unit, codec in zip(self._units, self._codecs, strict=False):
            together = [tuple(added(replica) for replica in gradients)]
            for turn in zip(*gradients, strict=True) if unit.often else together:
                unit.put(codec.plain.scattered([unit.rows(each) for each in turn]), found)
        return found


def added(parts: Sequence[Gradients]) -> Gradients:
    """The sums of these gradients, by name."""
    found: Gradients = {}
    for part in parts:
        for name, grad in part.items():
            found[name] = found[name] + grad if name in found else grad
    return found


def _untold(codec: str, why: str) -> ConfigError:
    problem = f"the definition cannot compute what a replica sends: {why}"
    return ConfigError("sync.codec", codec, problem, EXACT)


def _check_separate(case: Case, model: nn.Module, plan: Plan) -> None:
    """Refuse where a replica sends another gradient than that of its samples. Raises
    ConfigError."""
    assert plan.sync is not None
    name, table = plan.sync.codec.name, plan.params()
    if any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise _untold(name, "the model's batch norms take the samples of all replicas")
    if is_whole_batch(case.loss):
        raise _untold(name, "the loss takes the samples of all replicas")
    for weight in table if plan.fsdp_uses_codec else ():
        if over := plan.reduced_over(weight, table):
            axes = " and ".join(over)
            raise _untold(
                name,
                f"the gradient of {weight} is a sum over {axes}, and each rank encodes its"
                " own part of the sum",
            )


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(tensor, tensor.clone()) for tensor in tensors]
