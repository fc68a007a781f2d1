"""Replicas that step by themselves, on one device: each is a plain run on its own samples, and
after every step they exchange weights by the definitions of `plain.replicas`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.core import REPLICA_AXIS, ConfigError, LocalSteps, Plan
from weft.engine import message_params
from weft.nn import mix_key

from .case import Batch, Case
from .codec_definitions import (
    EXACT,
    DefinedCodec,
    codec_bounds,
    describe_codec,
    rounding_optimizer,
    same,
)
from .parcels import Parcel, parcel_of, samples_of
from .plain.draw_laws import DrawLaws, seed_faults
from .plain.replicas import (
    RULES,
    PlainReplicas,
    Weights,
    mean_difference,
    part_faults,
)
from .plain.samples import division_faults
from .reference import Reference, reference_steps

MOST_STEPS = 20  # to two exchanges of each part of a model; a longer period is shortened
PERIOD, FRAGMENTS, DELAY = 4, 8, 3  # to these, where that is less


def run_replicas(case: Case, layout: str, steps: int) -> Reference:
    """The replicas of `layout` on this process alone, for as many steps as two exchanges of each
    part of the model take, and at least `steps`. The reference of the first replica, which has
    those of all. Raises ConfigError."""
    configured = _sync_of(case, layout)
    sync = shortened(configured)
    if sync.name not in RULES:
        fix = "use " + ", ".join(RULES) + ", or define it in weft/verification/plain/replicas.py"
        raise ConfigError(
            "sync.name",
            sync.name,
            "has no sequential definition that verify can compare it with",
            fix,
        )
    case = replace(case, plan=partial(_with_sync, case.plan, sync))
    plan = case.lay(case.model(), layout)
    count, codec = plan.layout.replica_count, sync.codec
    case = replace(case, within=codec_bounds(codec, count))
    instead = rounding_optimizer(codec, count)
    if instead is not None:
        case = replace(case, optimizer=instead)
    definition = _describe(sync, configured) + (", with SGD" if instead is not None else "")
    cases = cases_of_replicas(case, plan)
    runs = [reference_steps(each, max(steps, _steps_of(sync))) for each in cases]
    trained = {n: p.detach() for n, p in case.model().named_parameters() if p.requires_grad}
    replicas, (exchange,) = exchanging({0: plan}, trained)
    after: list[list[dict[str, Tensor]]] = [[] for _ in runs]
    for step in range(1, max(steps, _steps_of(sync)) + 1):
        weights = [_weights(next(run), trained) for run in runs]
        replicas.after(step, weights)
        for kept_now, now in zip(after, weights, strict=True):
            kept_now.append({name: w.clone() for name, w in now.items()})
    found = []
    for number, run in enumerate(runs):
        try:
            next(run)
        except StopIteration as end:
            found.append(end.value)
        found[-1].definition, found[-1].case = definition, case
        found[-1].after = after[number]
        kept = replicas.state(number)
        found[-1].final |= {f"outer/{name}": tensor for name, tensor in kept.items()}
        laws = seed_faults([each.seed for each in cases])
        found[-1].broken = (*found[-1].broken, *laws, *exchange.broken)
    return replace(found[0], replicas=tuple(found))


def codes_weights(plan: Plan) -> bool:
    """Whether replicas send differences of weights through a lossy codec."""
    sync = plan.sync
    return isinstance(sync, LocalSteps) and sync.codec.name != "identity"


def exchanging(
    plans: Mapping[int, Plan], trained: Weights
) -> tuple[PlainReplicas, list[WeightExchange]]:
    """What exchanges the weights of all replicas, by the plan of each step: what codecs keep begins
    anew with a plan. `plans`: by the step after which the replicas are laid so; `trained`: the
    weights that they begin with."""
    sync = plans[0].sync
    assert isinstance(sync, LocalSteps)
    each = {begins: WeightExchange(plan, sync) for begins, plan in plans.items()}
    options = {f.name: getattr(sync, f.name) for f in fields(sync)}
    plain = {0: mean_difference}
    means = each if codes_weights(plans[0]) else plain
    return PlainReplicas(sync.name, options, trained, each[0].parts, means), [*each.values()]


def shortened(sync: LocalSteps) -> LocalSteps:
    """The same method with a shorter period, if two exchanges take too many steps. Nothing but when
    an exchange begins and ends depends on it."""
    if _steps_of(sync) <= MOST_STEPS:
        return sync
    fragments, delay = min(sync.fragments, FRAGMENTS), min(sync.delay, DELAY)
    return replace(sync, period=max(PERIOD, fragments), fragments=fragments, delay=delay)


def _steps_of(sync: LocalSteps) -> int:
    """Steps after which each part has arrived twice."""
    return 2 * sync.period + sync.delay


def _describe(sync: LocalSteps, configured: LocalSteps) -> str:
    """The method with its options, and what they are in the run."""
    found = []
    for field in fields(sync):
        value, wanted = getattr(sync, field.name), getattr(configured, field.name)
        if field.name not in ("name", "codec", "timeout_s") and value != field.default:
            name = field.name
            found.append(f"{name} {value}" + (f" in place of {wanted}" if value != wanted else ""))
    return ", ".join([sync.name, *found, f"differences in {describe_codec(sync.codec)}"])


class WeightExchange:
    """Differences of weights through a codec: the parts of the model, and the messages that the
    ranks of a replica make of each. `near`: changes what is encoded by a few roundings."""

    def __init__(self, plan: Plan, sync: LocalSteps):
        self._messages: list[list[tuple[Parcel, DefinedCodec]]] = [
            [] for _ in range(sync.fragments)
        ]
        self.parts: list[list[str]] = [[] for _ in range(sync.fragments)]
        self._codec, self._laws = sync.codec.name, DrawLaws()
        self.near: Callable[[Tensor], Tensor] = same
        view = sync.replica_view(plan.layout.replica_count)
        for rank in plan.layout.replicas()[0]:
            held = [w.name for w in plan.of(rank).weights if w.trainable]
            for (number, *_), names in message_params(plan, sync.fragments, held).items():
                parcel = parcel_of(plan, rank, names)
                self.parts[number] += [n for n in names if n not in self.parts[number]]
                if sync.codec.name != "identity":
                    own = replace(view, bucket=parcel.name)
                    coded = DefinedCodec(sync.codec, parcel.shapes, own, self._laws, parcel.name)
                    self._messages[number].append((parcel, coded))
        trained = [w.name for w in plan.weights if w.trainable]
        self._faults = part_faults(self.parts, trained)
        self._faults += division_faults(samples_of(plan, REPLICA_AXIS), plan.batch)

    @property
    def broken(self) -> list[str]:
        return [*self._faults, *self._laws.broken]

    def __call__(self, number: int, anchor: Weights, sent: Sequence[Weights]) -> Weights:
        found = {name: torch.zeros_like(value) for name, value in anchor.items()}
        for parcel, coded in self._messages[number]:
            xs = [self.near(parcel.taken(anchor) - parcel.taken(each)) for each in sent]
            parcel.put(coded.plain.total(xs, None) / len(sent), found)
            if coded.plain.undecided:
                problem = "the definition cannot compute what a replica sends: a difference of"
                problem += " weights is only rounding"
                raise ConfigError("sync.codec", self._codec, problem, EXACT)
        return found


# ---- one replica as a case of its own ------------------------------------------------------------


def cases_of_replicas(case: Case, plan: Plan) -> list[Case]:
    """What each replica of a plan trains."""
    parts = samples_of(plan, REPLICA_AXIS)
    return [_case_of(case, len(parts), number, part) for number, part in enumerate(parts)]


def _case_of(case: Case, count: int, number: int, samples: Sequence[int]) -> Case:
    """What one of `count` replicas trains: these samples of each batch."""
    return replace(
        case,
        plan=partial(_alone, case.plan, count),
        whole_batch=partial(_rows, case, list(samples)),
        seed=mix_key(case.seed, number) if number else case.seed,  # numbers of its own
        faults=case.faults if number == 0 else tuple,
    )


def _alone(plan: object, count: int, model: nn.Module, layout: str) -> Plan:
    whole = plan(model, layout)  # type: ignore[operator]
    return replace(whole, batch=whole.batch // count, sync=None)


def _rows(case: Case, samples: Sequence[int], step: int) -> Batch:
    index = torch.tensor(samples)
    return {key: value[index] for key, value in case.whole_batch_of(step).items()}


def _with_sync(plan: object, sync: LocalSteps, model: nn.Module, layout: str) -> Plan:
    return replace(plan(model, layout), sync=sync)  # type: ignore[operator]


def _sync_of(case: Case, layout: str) -> LocalSteps:
    sync = case.lay(case.model(), layout).sync
    assert isinstance(sync, LocalSteps)
    return sync


def _weights(params: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> Weights:
    return {name: p.detach() for name, p in params.items() if name in names}
