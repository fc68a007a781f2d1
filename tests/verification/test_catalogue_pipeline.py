"""The silent bugs of pipelines, injected one by one: `weft verify` catches each and names its
place.

docs/reference/bugs.md holds the same catalogue as a table, under "Bugs of pipelines".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bugs import Catalogue, Fault, assert_caught, assert_clean, clean, documented, patched
from tests.cases import Subject, seeded
from tests.staged import STAGED
from weft.core.plan import Plan
from weft.core.schedule import Schedule
from weft.engine import grad_buckets, initial_weights
from weft.engine.checkpoint_state import CheckpointState
from weft.engine.grad_update import GradUpdate
from weft.engine.pipeline import p2p, runner, split_backward, stage_compute, weight_stash
from weft.nn.dropout_rng import Randomness
from weft.optimizers import elementwise
from weft.pipeline import weight_versions
from weft.pipeline.schedules import make_schedule
from weft.verification.case import Case


def pipedream(kind: str) -> Subject:
    """A chain of layers, its weights kept in this way; two microbatches, so that no third shows
    what the first did."""
    plan = ("accumulate", 2), ("schedule", partial(make_schedule, "pipedream", versions=kind))
    return replace(STAGED["sequential"], plan=plan)


SUBJECTS = {
    **STAGED,
    "clipped": replace(STAGED["tied"], clip=0.5),
    **{kind: pipedream(kind) for kind in ("stash", "vertical", "2bw")},
}
CATALOGUE = Catalogue(SUBJECTS)
bug = CATALOGUE.bug


# ---- what crosses stages -------------------------------------------------------------------------


@bug("sequential", "pp2", r"output of 4\.1 \(rank 1\)")
def microbatches_swapped_between_stages(case: Case) -> Iterator[Case]:
    """Two receives are posted in another order than their sends: a stage computes on another
    microbatch's samples."""
    right = p2p.PipelineTransport.begin

    def begin(
        self: p2p.PipelineTransport,
        incoming: Mapping[int, Sequence[p2p.IncomingMessage]],
        *rest: Any,
    ) -> None:
        def order(messages: Sequence[p2p.IncomingMessage]) -> list[p2p.IncomingMessage]:
            first, second, *later = messages
            return [second, first, *later] if first.message.kind == "F" else [first, second, *later]

        right(self, {peer: order(messages) for peer, messages in incoming.items()}, *rest)

    with patched(case, (p2p.PipelineTransport, "begin", begin)):
        yield case


@bug("sequential", "pp2", r"gradient of the output of 4\.0, where .*backward begins \(rank 0\)")
def received_tensor_detached(case: Case) -> Iterator[Case]:
    """In one microbatch, what a stage receives does not take part in its graph: earlier stages get
    zeros from it."""
    right, calls = stage_compute.StageModel.__call__, count()

    def call(
        self: stage_compute.StageModel,
        stage: int,
        batch: stage_compute.Batch,
        received: dict[int, Tensor],
    ) -> Any:
        apart = next(calls) % 4 == 0
        return right(
            self, stage, batch, {v: x.detach() if apart else x for v, x in received.items()}
        )

    with patched(case, (stage_compute.StageModel, "__call__", call)):
        yield case


@bug("plain", "pp4", r"gradient of the output of enter, after that of side agreed \(rank 0\)")
def gradient_of_a_skip_dropped(case: Case) -> Iterator[Case]:
    """Stage 0's first value is used by stage 2 as well; the gradient that comes from there is
    received, and lost."""
    right = runner._PipelineRun.take

    def take(self: runner._PipelineRun, message: p2p.PipelineMessage, peer: int) -> None:
        right(self, message, peer)
        if message.kind == "B" and message.value == 0:
            self.grads[0, message.microbatch][-1] = None

    with patched(case, (runner._PipelineRun, "take", take)):
        yield case


# ---- backward in two parts -----------------------------------------------------------------------


@bug(
    "sequential",
    "pp2+zb-h1",
    r"gradient of 0\.weight \(module 0\) at step 0; 16 of 16 gradients differ \(rank 0\)",
)
def w_left_out_for_a_microbatch(case: Case) -> Iterator[Case]:
    """One of four microbatches gives its inputs' gradients, and none to the weights."""
    right, calls = split_backward.DeferredWeightGrad.run, count()

    def run(self: split_backward.DeferredWeightGrad) -> None:
        if next(calls) % 4 != 2:
            right(self)

    with patched(case, (split_backward.DeferredWeightGrad, "run", run)):
        yield case


@bug("sequential", "pp2+zb-h1", r"every gradient of step 0 is 2 times")
def weights_get_gradients_in_b_and_in_w(case: Case) -> Iterator[Case]:
    """B is a whole backward, and W comes as well."""
    right = split_backward.backward_inputs

    def both(
        roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> Any:
        torch.autograd.backward(roots, grads, retain_graph=True)
        return right(roots, grads, inputs)

    with patched(case, (runner, "backward_inputs", both)):
        yield case


# ---- sums over ranks, and their scale ------------------------------------------------------------


@bug(
    "tied",
    "pp2",
    r"gradient of embedding\.weight \(module embedding\) at step 0; 1 of 28 gradients differ",
)
def tied_gradients_not_summed_over_stages(case: Case) -> Iterator[Case]:
    """The first stage keeps the embedding's gradient, the last one the head's: the copies drift
    apart."""
    right = Plan.reduced_over

    def reduced_over(self: Plan, *args: Any) -> tuple[str, ...]:
        return tuple(axis for axis in right(self, *args) if axis != "pp")

    with patched(case, (Plan, "reduced_over", reduced_over)):
        yield case


@bug("clipped", "pp2", r"norm of all gradients at step 0")
def norm_counts_tied_weights_twice(case: Case) -> Iterator[Case]:
    """Both stages that hold the embedding add its whole gradient to the norm."""

    def copies(self: CheckpointState, right: Any = CheckpointState.copies) -> dict[str, int]:
        return dict.fromkeys(right(self), 1)

    with patched(case, (CheckpointState, "copies", copies)):
        yield case


@bug("sequential", "pp2+zb-v.dp2", r"gradient of 0\.weight \(module 0\)")
def reduced_when_another_stage_ends(case: Case) -> Iterator[Case]:
    """A rank's gradients are all summed over replicas as soon as one of its two stages has
    ended."""
    right = grad_buckets.GradReducer.close

    def close(self: grad_buckets.GradReducer, stage: int) -> None:
        for bucket in self.buckets:
            bucket.stage = stage
        right(self, stage)
        for bucket in self.buckets:
            bucket.work.wait()  # type: ignore[union-attr]

    with patched(case, (grad_buckets.GradReducer, "close", close)):
        yield case


@bug("sequential", "pp2", r"gradient of the output of 8, where backward begins \(rank 1\)")
def loss_divided_by_microbatches_again(case: Case) -> Iterator[Case]:
    """The loss that is differentiated is a mean over microbatches, of what is divided by all
    samples anyway."""
    right = stage_compute.TrainingCompute.begin

    def begin(
        self: stage_compute.TrainingCompute,
        step: int,
        micros: Sequence[stage_compute.Batch],
        scale: float,
    ) -> None:
        right(self, step, micros, scale / len(micros))

    with patched(case, (stage_compute.TrainingCompute, "begin", begin)):
        yield case


@bug("sequential", "pp2", r"every gradient of step 0 is 2 times")
def weight_of_the_loss_divided_by_stages(case: Case) -> Iterator[Case]:
    """Sum and weight of the loss are taken as if every stage had counted them. Their ratio, the
    loss, is right."""
    right = GradUpdate.__call__

    def update(self: GradUpdate, missing: list, step: int) -> Any:
        training = self.training
        assert training.agreed is not None
        training.agreed.wait()
        training.total[1:3] /= self.plan.layout.size("pp")
        return right(self, missing, step)

    with patched(case, (GradUpdate, "__call__", update)):
        yield case


# ---- state of a stage ----------------------------------------------------------------------------


@bug("sequential", "pp2", r"output of 4\.1 \(rank 1\)")
def stages_begin_from_other_weights(case: Case) -> Iterator[Case]:
    """Each rank draws its own initial model, and takes its stages from that."""
    build = partial(seeded, STAGED["sequential"].build, dist.get_rank())
    with patched(case, (initial_weights, "check_same_weights", lambda *_: None)):
        yield replace(case, build=build)


@elementwise
class StepPerStage(torch.optim.AdamW):
    """Takes its step once for each of this rank's two stages."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            super().step(closure)


@bug("sequential", "pp2+zb-v", r"0\.weight after step 0")
def updated_once_per_stage(case: Case) -> Iterator[Case]:
    """A rank that holds two stages updates all of its parameters for each of them."""

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return StepPerStage([p for _, p in named], lr=1e-2)

    yield replace(case, optimizer=optimizer)


@bug("convnet", "pp2.dp2", r"output of stages\.2\.1 \(rank [23]\)")
def batch_norm_of_a_later_stage_left_local(case: Case) -> Iterator[Case]:
    """Only the first stage's statistics are those of both replicas."""
    right = Plan.of

    def of(self: Plan, rank: int) -> Plan:
        found = right(self, rank)
        return replace(found, batchnorms=()) if 0 not in self.stages(rank) else found

    with patched(case, (Plan, "of", of)):
        yield case


@bug("convnet", "pp2", r"stages\.2\.1\.running_mean after step 0 \(rank 0\)")
def buffers_saved_by_another_stage(case: Case) -> Iterator[Case]:
    """Rank 0 saves all buffers, though the statistics of the second stage change on rank 1."""
    with patched(case, (CheckpointState, "buffer_holders", lambda self, name: (0,))):
        yield case


@bug("deep", "pp2", r"output of head \(rank 1\)")
def dropout_counted_from_the_start_of_a_stage(case: Case) -> Iterator[Case]:
    """The dropout after the blocks draws the mask of the one before them, which the first stage has
    drawn."""
    with patched(case, (Randomness, "skip", lambda self, calls, modules: None)):
        yield case


# ---- delayed weights -----------------------------------------------------------------------------


@bug("stash", "pp2", r"gradient of the output of 3\.3, after that of 4\.0 agreed \(rank 0\)")
def backward_with_the_newest_weights(case: Case) -> Iterator[Case]:
    """A version is no copy: backward multiplies by weights that have been updated since its
    forward."""
    right = weight_stash.WeightStash._keep

    def keep(self: weight_stash.WeightStash, stage: int) -> None:
        right(self, stage)
        for leaves in self._kept.values():
            for name, leaf in leaves.items():
                leaf.data = self._params[name].data

    with patched(case, (weight_stash.WeightStash, "_keep", keep)):
        yield case


@bug("vertical", "pp2", r"output of 4\.1 \(rank 1\)")
def vertical_sync_ignored(case: Case) -> Iterator[Case]:
    """Each stage takes the newest weights that it has, and not those that the first one took."""

    def used(schedule: Schedule) -> dict[tuple[int, int], int]:
        return weight_versions.versions_used(replace(schedule, versions="stash"))

    with patched(case, (weight_stash, "versions_used", used)):
        yield case


@bug("2bw", "pp2", r"gradient of the output of 8, where backward begins \(rank 1\)")
def update_not_divided_by_its_microbatches(case: Case) -> Iterator[Case]:
    """An update is the sum of its two microbatches' gradients, and not their mean."""

    def shares(schedule: Schedule) -> dict[int, int]:
        return dict.fromkeys(range(schedule.microbatches), 1)

    with patched(case, (weight_stash, "update_shares", shares)):
        yield case


@bug("vertical", "pp2.dp2", r"gradient of the output of 8, where backward begins \(rank [23]\)")
def update_divided_per_replica(case: Case) -> Iterator[Case]:
    """Each replica divides by the tokens of its own half of a microbatch."""

    def divisor(self: weight_stash.WeightStash, weight: Tensor, microbatch: int) -> Tensor:
        return 1.0 / (weight * self._shared[microbatch])

    with patched(case, (weight_stash.WeightStash, "divisor", divisor)):
        yield case


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "subject", "layout", "where", "says"), CATALOGUE.params)
def test_bug_is_caught_and_named(
    pool: Any, fault: Fault, subject: str, layout: str, where: str, says: str
) -> None:
    assert_caught(CATALOGUE.run(pool, fault, subject, layout), where, says)


@pytest.mark.parametrize(("subject", "layout"), CATALOGUE.pairs)
def test_no_bug_no_alarm(pool: Any, subject: str, layout: str) -> None:
    assert_clean(CATALOGUE.run(pool, clean, subject, layout))


def test_the_catalogue_is_documented() -> None:
    """docs/reference/bugs.md has one row per bug, and no other."""
    assert documented("Bugs of pipelines") == CATALOGUE.names
