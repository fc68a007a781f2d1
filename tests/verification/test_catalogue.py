"""The classic silent bugs of distributed training, injected one by one: `weft verify` catches each
and names its place.

docs/reference/bugs.md holds the same catalogue as a table. Bugs of pipelines:
test_catalogue_pipeline.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from tests.bugs import (
    Catalogue,
    Fault,
    assert_caught,
    assert_clean,
    clean,
    documented,
    patched,
    with_weights,
)
from tests.cases import SUBJECTS, VOCAB, Subject, global_batch, seeded, tokens
from tests.verification.nets_of_multihead import MIXERS
from tests.verification.nets_to_trace import Net
from weft._torch import functional_collectives
from weft.core.plan import Plan
from weft.core.schedule import Action
from weft.core.shards import LocalShard
from weft.core.step import COPY, SUM, Boundary, DimShard, Param, Step
from weft.engine import engine, grad_buckets, grad_update, initial_weights
from weft.engine.checkpoint_state import CheckpointState
from weft.engine.pipeline import stage_compute
from weft.nn import LocalMultiheadAttention, batchnorm, losses
from weft.nn.dropout_rng import Randomness, mix_key
from weft.nn.losses import next_token
from weft.optimizers import elementwise
from weft.parallel import apply as parallelize, collectives
from weft.verification.case import Case
from weft.verification.report import VerifyReport

CATALOGUE = Catalogue(
    {**SUBJECTS, "per-head": Subject(partial(Net, MIXERS["per-head"].mixer), tokens, next_token)}
)
bug = CATALOGUE.bug


def planned(case: Case, edit: Callable[[Step], Step]) -> Case:
    """The same case, each Step of its plan edited."""
    return replace(case, plan=partial(edited, case.plan, edit))


def edited(
    plan: Callable[[nn.Module, str], Plan],
    edit: Callable[[Step], Step],
    model: nn.Module,
    layout: str,
) -> Plan:
    found = plan(model, layout)
    return replace(found, steps=tuple(edit(step) for step in found.steps))


def params(change: Callable[[Param], Param | None], step: Step) -> Step:
    """A Step with each Param changed, or left out where the change gives None."""
    return replace(step, params=tuple(new for p in step.params if (new := change(p)) is not None))


# ---- gradients that are not reduced --------------------------------------------------------------


@bug(
    "decoder",
    "tp2+sequence",
    r"gradient of blocks\.0\.attention_norm\.weight \(module blocks\.0\.attention_norm\)",
)
def norm_gradient_not_reduced_under_sequence(case: Case) -> Iterator[Case]:
    """A norm sees a slice of the sequence, and its gradient is left a partial sum."""

    def change(p: Param) -> Param:
        return replace(p, grad=COPY) if p.axis == "tp" and "attention_norm" in p.name else p

    yield planned(case, partial(params, change))


@bug(
    "fused",
    "tp2",
    r"gradient of blocks\.0\.attention\.q_norm\.weight \(module blocks\.0\.attention\.q_norm\)",
)
def head_norm_gradient_not_reduced(case: Case) -> Iterator[Case]:
    """A norm of queries sees this rank's heads alone."""
    yield planned(
        case, partial(params, lambda p: replace(p, grad=COPY) if "q_norm" in p.name else p)
    )


@bug("clipped", "tp2+sequence", r"gradient of blocks\.1\.norm2\.weight \(module blocks\.1\.norm2\)")
def norm_gradient_not_reduced_and_clipped(case: Case) -> Iterator[Case]:
    """The wrong gradient changes the global norm, so clipping spreads it over every other
    gradient."""
    yield planned(
        case, partial(params, lambda p: replace(p, grad=COPY) if "1.norm2.w" in p.name else p)
    )


@bug("decoder", "dp2", r"gradient of blocks\.1\.mlp\.up\.weight \(module blocks\.1\.mlp\.up\)")
def parameter_never_reduced(case: Case) -> Iterator[Case]:
    """One parameter is in no bucket."""
    yield planned(
        case, partial(params, lambda p: None if p.name == "blocks.1.mlp.up.weight" else p)
    )


@bug("fused", "tp2", r"gradient of the output of blocks\.1\.norm2, after that of blocks\.1\.mlp\.0")
def input_gradient_not_reduced(case: Case) -> Iterator[Case]:
    """Megatron's f without its backward: each rank's columns give a part of the input's
    gradient."""

    def edit(step: Step) -> Step:
        return replace(step, input=Boundary({}, {})) if step.module == "blocks.1.mlp.0" else step

    yield planned(case, edit)


@bug("even", "tp2", r"gradient of the output of norm, after that of head")
def gathered_output_sums_in_backward(case: Case) -> Iterator[Case]:
    """A column's output is gathered, and backward sums over ranks where it should take a slice: tp
    times too much."""
    right = Boundary.moves

    def moves(self: Boundary, entry: bool) -> Iterator[Any]:
        for axis, forward, backward in right(self, entry):
            gathers = not entry and isinstance(forward[0], Shard) and forward[1] == COPY
            yield axis, forward, (SUM, forward[0]) if gathers else backward

    with patched(case, (Boundary, "moves", moves)):
        yield case


@bug("decoder", "fsdp2", r"gradient of embedding\.weight \(module embedding\)")
def reduce_scatter_drops_the_tail(case: Case) -> Iterator[Case]:
    """Rows beyond a multiple of the ranks are reduced by no one."""
    right = grad_buckets.GradReducer.finish

    def finish(self: grad_buckets.GradReducer) -> list:
        if dist.get_rank() == dist.get_world_size() - 1:
            for p in self.every:  # type: ignore[attr-defined]
                if p.shape[0] % dist.get_world_size():
                    grad_buckets.local_tensor(p.grad)[-1].zero_()
        return right(self)

    def begin(
        self: grad_buckets.GradReducer,
        plan: Plan,
        named: dict,
        mesh: Any,
        init: Any = grad_buckets.GradReducer.__init__,
    ) -> None:
        init(self, plan, named, mesh)
        self.every = list(named.values())  # type: ignore[attr-defined]

    with patched(
        case,
        (grad_buckets.GradReducer, "finish", finish),
        (grad_buckets.GradReducer, "__init__", begin),
    ):
        yield case


# ---- the scale of loss and gradient --------------------------------------------------------------


def mean_of_means(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = next_token(output, batch)
    return total / weight, torch.ones_like(weight)


def doubled_gradient(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = next_token(output, batch)
    return total + (total - total.detach()), weight


@bug("decoder", "dp2", r"loss of step 0")
def loss_averaged_per_rank(case: Case) -> Iterator[Case]:
    """Each rank takes the mean over its own tokens, and the ranks' means are averaged: padding
    weighs in."""
    yield replace(case, loss=mean_of_means)


@bug("decoder", "dp1", r"loss of step 0")
def loss_averaged_per_microbatch(case: Case) -> Iterator[Case]:
    """The same between the microbatches of one process."""
    yield replace(case, loss=mean_of_means)


@bug("decoder", "dp2", r"gradient of the output of head, where backward begins")
def gradient_not_divided_by_accumulation(case: Case) -> Iterator[Case]:
    """The loss that is shown is right, the one that is differentiated is not divided by the two
    microbatches."""
    yield replace(case, loss=doubled_gradient)


@bug("decoder", "dp2", r"all_reduce over dp: 3 ran .*, predicted were 2 ", where="stray")
def reduction_on_every_microbatch(case: Case) -> Iterator[Case]:
    """What earlier microbatches left is summed over the ranks again with each later one."""
    right = stage_compute.TrainingCompute.before

    def before(self: stage_compute.TrainingCompute, action: Action) -> None:
        right(self, action)
        for bucket in self.reducer.buckets if action.kind == "B" else ():
            if bucket.work is not None:
                bucket.work.wait()
            bucket.waiting = len(bucket.params)
        if action.kind == "B":
            self.reducer.arm(action.stage)

    with patched(case, (stage_compute.TrainingCompute, "before", before)):
        yield case


@bug("decoder", "dp2", r"every gradient of step 0 is 0\.5 times")
def gradient_averaged_twice(case: Case) -> Iterator[Case]:
    """The sum over the ranks, already divided by the global weight, is divided by the ranks
    again."""

    def launch(
        self: grad_buckets.GradReducer,
        bucket: grad_buckets.FilledBucket,
        right: Any = grad_buckets.GradReducer._launch,
    ) -> None:
        bucket.flat /= dist.get_world_size(bucket.group)
        right(self, bucket)

    with patched(case, (grad_buckets.GradReducer, "_launch", launch)):
        yield case


@bug("decoder", "fsdp2", r"every gradient of step 0 is 0\.5 times")
def fsdp_divides_as_well(case: Case) -> Iterator[Case]:
    """FSDP2's own division by its ranks is left on."""

    def divide(
        self: FSDPModule, _: float, right: Any = FSDPModule.set_gradient_divide_factor
    ) -> None:
        right(self, float(dist.get_world_size()))

    with patched(case, (FSDPModule, "set_gradient_divide_factor", divide)):
        yield case


@bug("decoder", "tp2", r"loss of step 0")
def vocabulary_padding_counted(case: Case) -> Iterator[Case]:
    """An odd vocabulary is padded with logits of zero, each of which adds exp(0) to the softmax's
    sum."""
    right = losses.sharded_token_losses

    def padded(local: Tensor, *rest: Any) -> Tensor:
        each = -(-VOCAB // dist.get_world_size())
        return right(F.pad(local, (0, each - local.size(-1))), *rest)

    with patched(case, (losses, "sharded_token_losses", padded)):
        yield case


# ---- clipping ------------------------------------------------------------------------------------


@bug("clipped", "tp2", r"norm of all gradients at step 0")
def clipping_counts_copies(case: Case) -> Iterator[Case]:
    """Parameters that every rank holds whole count tp times in the global norm."""

    def copies(self: CheckpointState, right: Any = CheckpointState.copies) -> dict[str, int]:
        return dict.fromkeys(right(self), 1)

    with patched(case, (CheckpointState, "copies", copies)):
        yield case


@bug("clipped", "fsdp2", r"norm of all gradients at step 0")
def clipping_per_rank(case: Case) -> Iterator[Case]:
    """Each rank clips by the norm of its own shards."""

    def all_reduce(tensor: Tensor, group: Any = None) -> None:
        own = tensor[0].clone()
        dist.all_reduce(tensor, group=group)
        tensor[0] = own

    with patched(case, (grad_update, "dist", SimpleNamespace(all_reduce=all_reduce))):
        yield case


# ---- cuts and shard order ------------------------------------------------------------------------


@bug("fused", "tp2", r"output of blocks\.0\.attention\.proj")
def row_bias_added_by_every_rank(case: Case) -> Iterator[Case]:
    """The bias is added before the sum over ranks."""
    with patched(case, (parallelize, "is_linear", lambda module: False)):
        yield case


@bug("decoder", "tp4", r"output of blocks\.0\.attention\.wo")
def wrong_key_head(case: Case) -> Iterator[Case]:
    """Two key heads on four ranks: rank 1, whose query head belongs to key head 0, takes key head
    1."""
    right = DimShard.intervals

    def intervals(self: DimShard, index: int, size: int) -> tuple[tuple[int, int], ...]:
        if not self.shared(size):
            return right(self, index, size)
        ((length, units),) = zip(self.parts, self.units, strict=True)
        width = length // units
        return ((index % units * width, (index % units + 1) * width),)

    with patched(case, (DimShard, "intervals", intervals)):
        yield case


@bug("per-head", "tp2", r"output of parts\.0\.own\.attn")
def mask_of_other_heads(case: Case) -> Iterator[Case]:
    """Of a mask for each head, every rank takes that of the first heads."""
    right = LocalMultiheadAttention.take_over

    def take_over(module: nn.MultiheadAttention, index: int, leave: Any) -> None:
        right(module, 0, leave)

    with patched(case, (LocalMultiheadAttention, "take_over", staticmethod(take_over))):
        yield case


@bug("fused", "tp2", r"output of blocks\.0\.attention\.q_norm")
def fused_qkv_cut_as_one_block(case: Case) -> Iterator[Case]:
    """Rank 0 gets all queries and half of the keys."""

    def change(p: Param) -> Param:
        if p.cut is None or "qkv" not in p.name:
            return p
        return replace(p, cut=DimShard(0, (sum(p.cut.parts),), (sum(p.cut.units),)))

    yield planned(case, partial(params, change))


@bug("fused", "tp2", r"output of embedding")
def absent_tokens_not_masked(case: Case) -> Iterator[Case]:
    """A token whose row lies on another rank reads some row of this one."""

    def cut(module: nn.Embedding, param: Param, mesh: Any) -> None:
        assert param.cut is not None
        ((start, stop),) = param.cut.intervals(mesh.index("tp"), mesh.size("tp"))
        module.register_forward_pre_hook(
            lambda _, args: ((args[0] - start).clamp(0, stop - start - 1),)
        )

    with patched(case, (parallelize, "_cut_embedding", cut)):
        yield case


@bug("decoder", "tp2+sequence", r"output of blocks\.0\.attention\.wq")
def gathered_in_the_wrong_order(case: Case) -> Iterator[Case]:
    """The slices of the sequence come together as 1, 0."""
    right = collectives.all_gather

    def all_gather(x: Tensor, dim: int, group: Any, total: int | None) -> Tensor:
        return torch.cat(
            right(x, dim, group, total).chunk(dist.get_world_size(group), dim)[::-1], dim
        )

    with patched(case, (collectives, "all_gather", all_gather)):
        yield case


@bug("decoder", "tp2", r"output of blocks\.0\.attention\.wq")
def cut_in_the_wrong_order(case: Case) -> Iterator[Case]:
    """Rank 0 takes the second half of the query heads."""
    right = parallelize.shard_of

    def pick(tensor: Tensor, cut: DimShard, index: int, size: int) -> Tensor:
        return right(
            tensor, cut, size - 1 - index if (cut.dim, cut.units) == (0, (4,)) else index, size
        )

    with patched(case, (parallelize, "shard_of", pick)):
        yield with_weights(case)


@bug("decoder", "tp2", r"output of embedding")
def cut_drops_the_tail(case: Case) -> Iterator[Case]:
    """An odd vocabulary, rounded down: its last word lies on no rank."""
    right = DimShard.intervals

    def intervals(self: DimShard, index: int, size: int) -> tuple[tuple[int, int], ...]:
        if self.units != (VOCAB,):
            return right(self, index, size)
        each = VOCAB // size
        return ((index * each, (index + 1) * each),)

    with patched(case, (DimShard, "intervals", intervals)):
        yield case


@bug("decoder", "fsdp2", r"not where the plan says: blocks\.0\.mlp\.down\.weight:", where="problem")
def parameter_not_where_the_plan_says(case: Case) -> Iterator[Case]:
    """The plan leaves one parameter of a sharded unit whole."""
    whole = partial(params, lambda p: None if p.name == "blocks.0.mlp.down.weight" else p)
    yield with_weights(planned(case, whole))


@bug("decoder", "tp2", r"blocks\.1\.mlp\.gate\.weight: .* in no chunk", where="problem")
def parameter_that_nobody_writes(case: Case) -> Iterator[Case]:
    """Of the ranks that hold a shard, none is the one that saves it."""
    right = CheckpointState.shard

    def shard(self: CheckpointState, full: str, tensor: Tensor, name: str, *rest: int) -> Any:
        found = right(self, full, tensor, name, *rest)
        return replace(
            found,
            writer=found.writer
            and not (name == "blocks.1.mlp.gate.weight" and self._mesh.rank == 1),
        )

    with patched(case, (CheckpointState, "shard", shard)):
        yield case


# ---- randomness ----------------------------------------------------------------------------------


@bug("dropout", "tp2+sequence", r"output of blocks\.0\.dropout .*\(rank 1\)")
def same_dropout_on_both_slices(case: Case) -> Iterator[Case]:
    """Each rank draws the mask of the first slice of the sequence."""
    right = Randomness._coordinates

    def coordinates(self: Randomness, *args: Any) -> Tensor:
        return right(replace(self, index=0), *args)

    with patched(case, (Randomness, "_coordinates", coordinates)):
        yield case


@bug("dropout", "dp2", r"output of dropout ")
def same_dropout_on_both_data_ranks(case: Case) -> Iterator[Case]:
    """Every data rank numbers its samples from 0."""
    right = Randomness.begin

    def begin(self: Randomness, step: int, samples: list[int]) -> None:
        right(self, step, [sample - samples[0] for sample in samples])

    with patched(case, (Randomness, "begin", begin)):
        yield case


@bug("dropout", "tp2", r"output of dropout .*\(rank 1\)")
def different_dropout_on_copies(case: Case) -> Iterator[Case]:
    """Where tensor-parallel ranks hold the same activation they drop different elements."""
    right = Randomness.site

    def site(self: Randomness) -> int:
        return mix_key(right(self), self.index) if self.index else right(self)

    with patched(case, (Randomness, "site", site)):
        yield case


@bug(
    "recomputed",
    "dp2",
    r"gradient of the output of blocks\.1\.mlp\.2, after that of blocks\.1\.dropout",
)
def recompute_draws_again(case: Case) -> Iterator[Case]:
    """The second forward of a block draws other masks than the first."""
    right = Randomness.site

    def site(self: Randomness) -> int:
        return right(self) + (torch._C._current_graph_task_id() != -1)

    with patched(case, (Randomness, "site", site)):
        yield case


# ---- state ---------------------------------------------------------------------------------------


@bug("tied", "tp2", r"parameter head\.weight")
def tied_weights_untied(case: Case) -> Iterator[Case]:
    """The head gets a copy of the embedding's table, and from then on its own gradient."""

    def build() -> nn.Module:
        model = case.build()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # type: ignore[union-attr, operator]
        return model

    yield replace(case, build=build)


@bug("decoder", "dp2", r"output of embedding .*\(rank 1\)")
def replicas_begin_apart(case: Case) -> Iterator[Case]:
    """Each rank draws its own initial weights, and rank 0's are not shared."""
    build = partial(seeded, SUBJECTS["decoder"].build, dist.get_rank())
    with patched(case, (engine, "share_weights", lambda *_: None)):
        yield with_weights(replace(case, build=build))


@bug("decoder", "dp2", r"output of embedding .*\(rank 1\)")
def replicas_draw_apart(case: Case) -> Iterator[Case]:
    """Each rank fills its shards from its own seed, and nobody compares."""
    build = partial(seeded, SUBJECTS["decoder"].build, dist.get_rank())
    nothing = lambda *_: None  # noqa: E731
    changes = [(initial_weights, name, nothing) for name in ("check_same_weights", "_broadcast")]
    with patched(case, *changes):
        yield replace(case, build=build)


@bug("decoder", "tp2", r"output of blocks\.0\.attention\.wq")
def filled_with_another_part(case: Case) -> Iterator[Case]:
    """Rank 1's shard of a weight gets the elements of rank 0's."""
    right = CheckpointState.weights

    def weights(self: CheckpointState) -> Iterator[LocalShard]:
        for found in right(self):
            if found.name == "blocks.0.attention.wq.weight" and self._mesh.rank == 1:
                inside = tuple((local, local) for local, _ in found.chunks)
                found = replace(found, chunks=inside)
            yield found

    with patched(case, (CheckpointState, "weights", weights)):
        yield case


@bug("convnet", "dp2", r"output of stages\.0\.1")
def batch_norm_left_local(case: Case) -> Iterator[Case]:
    """Each rank normalises by the statistics of its own samples."""
    with patched(case, (parallelize, "_replace", lambda model, name, new: None)):
        yield case


@bug("convnet", "dp2", r"stages\.0\.1\.running_mean .*\(rank 1\)")
def stale_buffers(case: Case) -> Iterator[Case]:
    """Outputs agree; the running statistics of one replica are never updated."""
    right = batchnorm.BatchNorm._track

    def track(self: batchnorm.BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if dist.get_rank() == 0:
            right(self, mean, var, count)

    with patched(case, (batchnorm.BatchNorm, "_track", track)):
        yield case


@elementwise
class Unsharded(torch.optim.AdamW):
    """Keeps one first moment whole between steps, though its parameter is a shard."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        p = self.param_groups[0]["params"][self.which]  # type: ignore[attr-defined]
        state = self.state[p]
        if state:
            state["exp_avg"] = (
                state["exp_avg"].chunk(dist.get_world_size())[dist.get_rank()].clone()
            )
        super().step(closure)
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.state[p]["exp_avg"])
        self.state[p]["exp_avg"] = torch.cat(parts)


@bug("decoder", "tp2", r"optimizer/blocks\.0\.mlp\.up\.weight/exp_avg", where="problem")
def optimizer_state_not_sharded(case: Case) -> Iterator[Case]:
    """Its numbers are right; it does not lie as its parameter."""

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        found = Unsharded([p for _, p in named], lr=1e-2)
        found.which = [name for name, _ in named].index("blocks.0.mlp.up.weight")  # type: ignore[attr-defined]
        return found

    yield replace(case, optimizer=optimizer)


@bug("decoder", "dp2", r"blocks\.1\.mlp\.gate\.weight after step 0 .*\(rank 1\)")
def optimizer_forgets_a_parameter(case: Case) -> Iterator[Case]:
    """One replica's optimizer was made without one parameter: right gradients, and the replica
    drifts."""

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return case.optimizer(
            [n for n in named if dist.get_rank() == 0 or n[0] != "blocks.1.mlp.gate.weight"]
        )

    yield replace(case, optimizer=optimizer)


# ---- data ----------------------------------------------------------------------------------------


@bug("decoder", "dp2", r"batch entry 'input_ids' of step 0")
def batch_order_depends_on_the_layout(case: Case) -> Iterator[Case]:
    """Every data rank takes each second sample, so a microbatch is another set of samples on each
    layout."""

    def batch(step: int, data_rank: int, data_size: int) -> dict[str, Tensor]:
        return {
            key: value[data_rank::data_size]
            for key, value in global_batch(SUBJECTS["decoder"], step).items()
        }

    yield replace(case, batch=batch)


@bug("decoder", "dp2", r"batch entry 'labels' of step 1")
def labels_of_another_batch(case: Case) -> Iterator[Case]:
    """From the second step on, labels are those of the next batch."""

    def batch(step: int, data_rank: int, data_size: int) -> dict[str, Tensor]:
        later = case.batch(step + 1 if step else step, data_rank, data_size)
        return {**case.batch(step, data_rank, data_size), "labels": later["labels"]}

    yield replace(case, batch=batch)


# ---- collectives ---------------------------------------------------------------------------------


@bug("decoder", "tp2", r"all_reduce over tp: 45 ran .*, predicted were 25 ", where="stray")
def all_reduce_run_twice(case: Case) -> Iterator[Case]:
    """The second result is thrown away: time is lost, and no number shows it."""
    right = functional_collectives.all_reduce

    def all_reduce(x: Tensor, op: str, group: Any) -> Tensor:
        right(x, op, group)
        return right(x, op, group)

    with patched(case, (functional_collectives, "all_reduce", all_reduce)):
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


def test_a_bug_that_numbers_do_not_show_is_seen_in_the_collectives(pool: Any) -> None:
    result = CATALOGUE.run(pool, all_reduce_run_twice, "decoder", "tp2")
    assert max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err) < 1e-9
    assert result.first is None and result.problem is None
    report = VerifyReport((result,), 2)
    assert re.search(r"all_reduce +tp .* <- differ", report.text())
    (layout,) = json.loads(report.json())["layouts"]
    assert layout["passed"] is False and layout["first_difference"] == result.stray


def test_the_catalogue_is_documented() -> None:
    """docs/reference/bugs.md has one row per bug, and no other."""
    assert documented("The catalogue") == CATALOGUE.names
