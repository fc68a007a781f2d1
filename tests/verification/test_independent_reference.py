"""The one-device reference leans on nothing that it proves: a change of weft's source that both
sides run is seen all the same."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.mutants import Mutant, mutated
from tests.staged import STAGED
from tests.verification.nets_with_definitions import CASES
from tests.verification.nets_with_quirks import QUIRKS
from weft.core import whole_shard
from weft.core.run_config import RunConfig
from weft.train.data import Loader, stdlib
from weft.train.stream_loader import shuffled_places
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.samples import order_faults, place_faults
from weft.verification.reference import run_reference
from weft.verification.tensor_errors import tensor_error
from weft.verification.verify_run import make_case

STEPS = 2


RNG, LOSSES, MOE = "weft.nn.dropout_rng", "weft.nn.losses", "weft.nn.models.moe"
ROUTING, FUNCTIONS = "weft.nn.moe_routing", "weft.engine.function_overrides"
MUTANTS = {
    "causal mask lost under dropout": (
        "attention",
        FUNCTIONS,
        "plain_attention",
        "if is_causal:",
        "if False:",
    ),
    "causal mask lost in the model": (
        "decoder",
        "weft.nn.models.decoder",
        "Attention.forward",
        "is_causal=mask is None",
        "is_causal=False",
    ),
    "scale lost under dropout": (
        "attention",
        FUNCTIONS,
        "plain_attention",
        "1.0 / math.sqrt(query.shape[-1])",
        "1.0",
    ),
    "weights kept unscaled": (
        "attention",
        RNG,
        "Randomness.dropout",
        "mul_(1.0 / (1.0 - p))",
        "mul_(1.0)",
    ),
    "dropout unscaled": (
        "dropout",
        RNG,
        "Randomness.dropout",
        "mul_(1.0 / (1.0 - p))",
        "mul_(1.0)",
    ),
    "kept with p": ("dropout", RNG, "Randomness._draw_mask", "word >= int(", "word < int("),
    "same mask at every step": ("dropout", RNG, "Randomness.make_key", "self.step", "0"),
    "same mask at every call": (
        "dropout",
        RNG,
        "Randomness.site",
        "self.calls * _NEXT_CALL",
        "_NEXT_CALL",
    ),
    "same mask in every block": ("dropout", RNG, "Randomness.make_key", "self.place", "0"),
    "same mask for every sample": (
        "dropout",
        RNG,
        "Randomness._coordinates",
        "(base[:, None] * total + own)",
        "(0 * base[:, None] * total + own)",
    ),
    "no dropout at all": (
        "dropout",
        FUNCTIONS,
        "FunctionOverrides._dropout",
        "if not training or p == 0.0:",
        "if True:",
    ),
    "noise the same at every step": ("attention", RNG, "Randomness.make_key", "self.step", "0"),
    "noise of another width": (
        "attention",
        "weft.nn.random_draws",
        "Draws.normal",
        "-2.0 *",
        "-16.0 *",
    ),
    "alpha dropout without its shift": (
        "squares",
        "weft.engine.drawn_numbers",
        "DrawnNumbers._alpha",
        " - a * _SELU_FLOOR * p",
        "",
    ),
    "labels shifted twice": (
        "shifted",
        "weft.nn.batch_labels",
        "shift_labels",
        "labels[:, 1:], (0, 1)",
        "labels[:, 2:], (0, 2)",
    ),
    "labels not shifted": (
        "aligned",
        LOSSES,
        "_shifted",
        'shift_labels(batch.get("labels", batch["input_ids"]))',
        'batch["labels"]',
    ),
    "every label counts": (
        "decoder",
        LOSSES,
        "cross_entropy",
        "return total, counted.sum().to(total.dtype)",
        "return total, (counted | True).sum().to(total.dtype)",
    ),
    "every label counts in a loss of one's own": (
        "smoothed",
        LOSSES,
        "cross_entropy",
        "return total, counted.sum().to(total.dtype)",
        "return total, (counted | True).sum().to(total.dtype)",
    ),
    "weights of a loss of one's own doubled": (
        "smoothed",
        LOSSES,
        "weighed_loss",
        "return total, weight\n",
        "return total, 2 * weight\n",
    ),
    "mean of squares": ("squares", LOSSES, "mse", 'reduction="sum"', 'reduction="mean"'),
    "balance loss lost": (
        "experts",
        MOE,
        "Mixture.forward",
        "self.balance * balance_loss(shares, index)",
        "0.0 * balance_loss(shares, index)",
    ),
    "balance loss of other experts": (
        "experts",
        ROUTING,
        "balance_loss",
        "probabilities.shape[-1] * (",
        "(",
    ),
    "z loss of logits": ("experts", ROUTING, "z_loss", ".square()", ""),
    "shares of one expert too many": ("experts", ROUTING, "count_choices", "+ 1\n", "+ 0\n"),
    "added loss doubled": ("experts", ROUTING, "AddLoss.backward", "ctx.scale", "2 * ctx.scale"),
    "bias moves the other way": (
        "experts",
        ROUTING,
        "GateBias.move",
        "load.mean() - load",
        "load - load.mean()",
    ),
    "bias never moves": ("experts", ROUTING, "rebalance_gates", "bias.move(load)", "pass"),
    "bias counts every other": (
        "experts",
        ROUTING,
        "GateBias.count",
        "self.state[1] +=",
        "self.state[1] =",
    ),
    "room for one more": (
        "capacity",
        ROUTING,
        "within_capacity",
        ") >= math.ceil(",
        ") > math.ceil(",
    ),
    "later tokens first": (
        "capacity",
        ROUTING,
        "within_capacity",
        "flat.argsort(dim=1, stable=True)",
        "flat.argsort(dim=1, stable=True).flip(1)",
    ),
    "weights that are no shares": (
        "experts",
        MOE,
        "Gate.forward",
        "if self.active > 1:",
        "if False:",
    ),
    "best expert alone": (
        "experts",
        MOE,
        "Gate.forward",
        ".topk(self.active, dim=-1).indices",
        ".topk(self.active, dim=-1).indices[:, :1].expand(-1, self.active)",
    ),
    "experts unweighted": (
        "capacity",
        MOE,
        "Experts.forward",
        " * weights.reshape(-1)[\n            order\n        ].unsqueeze(-1)",
        "",
    ),
}


RECOMPUTED = (("accumulate", 2), ("recompute", "full"))
LOADER = {
    "every epoch in one order": ("[self.seed, epoch]", "[self.seed]"),
    "no shuffle": ("random.permutation(size) if self.shuffle", "np.arange(size) if self.shuffle"),
    "with repeats": ("random.permutation(size)", "random.integers(0, size, size)"),
    "half of each batch from the next": ("place * self.batch :", "place * self.batch // 2 :"),
    "one sample too few": ("(place + 1) * self.batch]", "(place + 1) * self.batch - 1]"),
    "the first batch in every step": (
        "divmod(step, self.steps_per_epoch)",
        "step // self.steps_per_epoch, 0",
    ),
}


def both_sides(mutant: Mutant, case: Case, layout: str) -> LayoutResult:
    """The reference and the layout, both with the mutant."""
    with mutated(mutant):
        return check_layout(case, layout, run_reference(case, STEPS))


@pytest.mark.grid(12, ci=12)
@pytest.mark.parametrize("name", MUTANTS)
def test_what_both_sides_run_is_seen(pool: Any, name: str) -> None:
    subject, *mutant = MUTANTS[name]
    result = pool.run(both_sides, Mutant(*mutant), CASES[subject].case(), "dp2", world=2)[0]
    assert not result.passed, result


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_the_module_is_named_that_gave_a_wrong_tensor_after_a_right_one(
    pool: Any, layout: str
) -> None:
    mutant = Mutant(MOE, "Gate.forward", "if self.active > 1:", "if self.active > 2:")
    result = pool.run(both_sides, mutant, CASES["experts"].case(), layout, world=2)[0]
    assert str(result.first).startswith("output of blocks.0.mlp.gate ("), result


def test_a_buffer_that_is_wrong_is_named_before_what_it_changes(pool: Any) -> None:
    mutant = Mutant(ROUTING, "GateBias.move", "self.rate", "2 * self.rate")
    result = pool.run(both_sides, mutant, CASES["experts"].case(), "ep2", world=2)[0]
    assert "gate.bias.state after step 0" in str(result.first), result


def test_a_collective_of_later_steps_alone_is_seen(pool: Any) -> None:
    """It changes no number."""
    update = "self._update(missing, self.steps_done)"
    again = f"{update}; self.steps_done and self._update._sum_over_ranks(torch.zeros(6), [], 0)"
    mutant = Mutant("weft.engine.engine", "Engine._step", update, again)
    result = pool.run(both_sides, mutant, CASES["squares"].case(), "dp2", world=2)[0]
    assert result.first is None
    assert result.problem == "all_reduce over dp: 3 ran in step 1, 2 in step 0", result.problem


@pytest.mark.parametrize("subject", CASES)
def test_without_a_mutant(pool: Any, subject: str) -> None:
    case = CASES[subject].case()
    result = pool.run(check_layout, case, "dp2", run_reference(case, STEPS), world=2)[0]
    assert result.passed, result
    assert result.problem is None


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2"])
def test_a_block_that_is_called_again_has_other_masks(pool: Any, layout: str) -> None:
    """Also where backward computes it again."""
    subject = replace(QUIRKS["recurrent"], plan=RECOMPUTED)
    case, alone = subject.case(), run_reference(subject.case(), STEPS)
    assert not alone.broken
    result = pool.run(check_layout, case, layout, alone, world=2)[0]
    assert result.passed, result
    with mutated(Mutant(RNG, "Randomness.call_of", "before + 1", "before")):
        broken = run_reference(case, STEPS).broken
    assert "has another key than its seed, step, place and call give" in broken[0]
    assert any("draws what was drawn in the same step" in each for each in broken)


VERSIONS = "weft.pipeline.weight_versions"
DELAYED = {
    "fewer updates": (
        "stash",
        Mutant(VERSIONS, "versions_used", "done[stage] += 1", "done[stage] += microbatch % 2"),
    ),
    "a version too old": (
        "vertical",
        Mutant(
            VERSIONS, "versions_used", "(stage, m): found[0, m]", "(stage, m): found[0, m] // 2"
        ),
    ),
    "a larger share": (
        "stash",
        Mutant(VERSIONS, "update_shares", "(end + 1 for end", "(end - 1 for end"),
    ),
    "a share of one less": (
        "2bw",
        Mutant(VERSIONS, "update_shares", "m: end + 1 - start", "m: end + 2 - start"),
    ),
}


SCHEDULES = "weft.pipeline.schedules.pipedream"
TABLES = {
    "updates in groups": (
        "stash",
        Mutant(SCHEDULES, "build", 'versions == "2bw"', 'versions != "2bw"'),
        "stage 0 updates after microbatches 1, 3, where stash does after 0, 1, 2, 3",
    ),
    "updates after every one": (
        "2bw",
        Mutant(SCHEDULES, "build", "_groups(ranks, microbatches) if", "range(microbatches) if"),
        "stage 0 updates after microbatches 0, 1, 2, 3, where 2bw does after 1, 3",
    ),
    "weights that are not late": (
        "stash",
        Mutant(SCHEDULES, "build", "ranks - 1 - rank", "1 - ranks - rank"),
        "stage 0 takes microbatch 1 with version 1 of its weights, where stash takes 0",
    ),
}


def delayed(versions: str, *mutants: Mutant) -> LayoutResult:
    """What verify says of PipeDream where both sides run the mutants."""
    subject = STAGED["decoder"]
    plan = *subject.plan, ("schedule", "pipedream"), ("options", {"versions": versions})
    case = replace(subject, plan=plan).case()
    with mutated(*mutants):
        return check_layout(case, "pp2", run_delayed(case, "pp2", STEPS))


@pytest.mark.parametrize("name", DELAYED)
def test_other_delays_than_the_papers_are_seen(pool: Any, name: str) -> None:
    assert not pool.run(delayed, *DELAYED[name], world=2)[0].passed


@pytest.mark.parametrize("name", TABLES)
def test_another_table_than_the_papers_is_seen(pool: Any, name: str) -> None:
    """Both sides run it, and are equal."""
    versions, mutant, says = TABLES[name]
    assert pool.run(delayed, versions, mutant, world=2)[0].problem == says


def test_a_buffer_that_no_rank_has_is_seen(pool: Any) -> None:
    """What is not there has no error."""
    place = Mutant(
        "weft.engine.checkpoint_state",
        "CheckpointState.absent_buffers",
        "coords.get(STAGE_AXIS, 0)",
        "coords.get(STAGE_AXIS, 1)",
    )
    result = pool.run(both_sides, place, STAGED["convnet"].case(), "dp2", world=2)[0]
    assert "no rank has stages.0.1.running_mean" in str(result.problem), result


def test_imaginary_parts_count() -> None:
    want = torch.ones(4, dtype=torch.complex128)
    chunks = whole_shard("filter", want, True).chunks
    assert tensor_error(want * 1.0, chunks, want, 0.0) == 0.0
    assert tensor_error(want + 0.5j, chunks, want, 0.0) == pytest.approx(0.5)
    assert tensor_error(want - 0.5, chunks, want, 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("versions", ["stash", "vertical", "2bw"])
def test_the_delays_are_the_papers(pool: Any, versions: str) -> None:
    result = pool.run(delayed, versions, world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("name", LOADER)
def test_a_loader_that_is_no_shuffle_is_seen(name: str) -> None:
    data = stdlib(seq_len=64, max_bytes=64 * 131)
    assert order_faults(Loader(data, 8, 0).indices, len(data), 8) == []
    with mutated(Mutant("weft.train.data", "Loader.indices", *LOADER[name])):
        assert order_faults(Loader(data, 8, 0).indices, len(data), 8)


ORDERS = {
    "another seed": ("[self.seed, epoch]", "[self.seed + 1, epoch]"),
    "seed and epoch swapped": ("[self.seed, epoch]", "[epoch, self.seed]"),
    "the order of the epoch after": ("[self.seed, epoch]", "[self.seed, epoch + 1]"),
    "turned round": ("random.permutation(size)", "random.permutation(size)[::-1]"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_shuffle_of_another_seed_is_seen(name: str) -> None:
    """So that a run which another version goes on with takes the samples that it would have."""
    data = stdlib(seq_len=64, max_bytes=64 * 131)
    assert order_faults(Loader(data, 8, 5).indices, len(data), 8, seed=5) == []
    with mutated(Mutant("weft.train.data", "Loader.indices", *ORDERS[name])):
        found = order_faults(Loader(data, 8, 5).indices, len(data), 8, seed=5)
    assert "has another order than that of its seed and number" in found[0]


def test_a_stream_of_another_seed_is_seen() -> None:
    assert place_faults(partial(shuffled_places, 5), 5) == []
    (found,) = place_faults(partial(shuffled_places, 6), 5)
    assert "another order than that of its seed and numbers" in found


TABLES_OF_A_RUN: dict[str, Any] = {
    "model": {"build": "weft.models:decoder", "vocab": 256, "seq_len": 16},
    "data": {"build": "weft.data:stdlib", "seq_len": 16, "max_bytes": 4000},
    "layout": {"axes": "dp2"},
    "train": {"batch": 8, "steps": 1},
    "output": ".",
    "folder": ".",
}
BUILT = '"model", (), run.model.arguments'
LOST = {
    "a width": ("hidden", 24, "output of "),
    "dropout": ("dropout", 0.5, "output of "),
    "ties": ("tied", True, "parameter head.weight"),
}


def of_run(*mutants: Mutant, **arguments: Any) -> LayoutResult:
    """What verify says of a run whose model has these arguments."""
    model = {**TABLES_OF_A_RUN["model"], "dim": 8, "layers": 2, "heads": 2, **arguments}
    tables = {**TABLES_OF_A_RUN, "model": model, "precision": {"compute": "fp64"}}
    case = make_case(RunConfig.model_validate(tables))
    with mutated(*mutants):
        return check_layout(case, "dp2", run_reference(case, 1))


@pytest.mark.parametrize("name", LOST)
def test_an_argument_that_does_not_reach_the_model_is_seen(pool: Any, name: str) -> None:
    key, value, first = LOST[name]
    assert pool.run(of_run, world=2, timeout=60)[0].passed
    kept = f"{{k: v for k, v in run.model.arguments.items() if k != {key!r}}}"
    loses = Mutant("weft.train.build", "_built", BUILT, BUILT.replace("run.model.arguments", kept))
    assert pool.run(partial(of_run, **{key: value}), world=2, timeout=60)[0].passed
    result = pool.run(partial(of_run, loses, **{key: value}), world=2, timeout=60)[0]
    assert not result.passed and re.search(first, str(result.first)), result


def test_a_run_is_held_to_samples_that_are_read_one_by_one() -> None:
    """`weft verify` of a run file: what the loader gives is not what the reference reads."""
    case = make_case(RunConfig.model_validate(TABLES_OF_A_RUN))
    first = Mutant("weft.train.data", "collate", "[sample[key] for", "[samples[0][key] for")
    with mutated(first):
        batch, whole = case.batch_of(0, 0, 1), case.whole_batch_of(0)
    assert not torch.equal(batch["input_ids"], whole["input_ids"])
    assert torch.equal(case.batch_of(0, 0, 1)["input_ids"], whole["input_ids"])
    assert case.faults() == []
