"""From model and layout to a Plan: roles found or declared, what is cut, and what is refused by
name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import weft
from weft.core.errors import ConfigError, LayoutError, Refusal, UnsupportedModel
from weft.core.grad_buckets import bucket_gradients
from weft.core.step import COPY, SUM, Boundary, DimShard, collective, dual
from weft.nn.losses import classification, mse, next_token
from weft.nn.models import convnet, decoder
from weft.nn.module_roles import find_roles

plan = partial(weft.plan, batch=8)


def model(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return decoder(
            **{
                "vocab": 64,
                "dim": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "seq_len": 16,
                **changes,
            }
        )


def test_a_boundary_fixes_its_collectives() -> None:
    """Megatron's f and g, and their sequence-parallel forms."""

    def ops(outside: Any, inside: Any, entry: bool) -> tuple[str | None, str | None]:
        ((_, forward, backward),) = Boundary({"tp": outside}, {"tp": inside}).moves(entry)
        return collective(*forward), collective(*backward)

    assert ops(COPY, COPY, True) == (None, "all_reduce")  # f
    assert ops(COPY, SUM, False) == ("all_reduce", None)  # g
    assert ops(Shard(1), COPY, True) == ("all_gather", "reduce_scatter")
    assert ops(Shard(1), SUM, False) == ("reduce_scatter", "all_gather")
    assert ops(COPY, Shard(-1), False) == (
        "all_gather",
        None,
    )  # a gathered column splits in backward
    assert ops(COPY, Shard(1), True) == (None, "all_gather")
    assert ops(Shard(2), Shard(1), True) == ("all_to_all", "all_to_all")
    assert dual(Shard(3)) == Shard(3) and dual(Replicate()) == SUM


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_cut_covers_every_row_once(size: int) -> None:
    for cut in (
        DimShard(0, (12, 6, 6), (12, 6, 6)),
        DimShard(0, (67,), (67,)),
        DimShard(1, (48,), (4,)),
    ):
        rows = [r for i in range(size) for a, b in cut.intervals(i, size) for r in range(a, b)]
        assert sorted(rows) == list(range(sum(cut.parts)))


def test_units_fewer_than_ranks_are_shared_by_neighbours() -> None:
    cut = DimShard(0, (16,), (2,))
    assert [cut.intervals(i, 4) for i in range(4)] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert cut.shared(4) and not cut.shared(2)


def test_the_plan_is_a_table_a_person_reads() -> None:
    text = str(plan(model(), "dp2.fsdp2+zero2.tp2+sequence", loss=next_token))
    assert "8 ranks; batch 8 = 4 data ranks x 1 microbatches x 2 samples" in text
    assert "gathered per step, reduced per microbatch" in text
    assert "blocks.*.attention.wo [2]" in text and "P->S(1) (reduce_scatter / all_gather)" in text
    assert "note: guessed; 4 chains of linears are cut" in text


def test_what_is_cut_under_tp() -> None:
    table = plan(model(), "tp2", loss=next_token).params()
    assert table["blocks.0.attention.wq.weight"]["tp"].stored == Shard(0)
    assert table["blocks.1.mlp.down.weight"]["tp"].stored == Shard(1)
    assert table["embedding.weight"]["tp"].stored == table["head.weight"]["tp"].stored == Shard(0)
    assert "tp" not in table["norm.weight"]
    sequence = plan(model(), "tp2+sequence", loss=next_token).params()
    assert (
        sequence["blocks.0.mlp_norm.weight"]["tp"].grad == SUM
        and "tp" not in sequence["norm.weight"]
    )


def test_logits_stay_sharded_only_for_a_loss_that_takes_them() -> None:
    def outside(loss: Any) -> Any:
        step = next(s for s in plan(model(), "tp2", loss=loss).steps if s.module == "head")
        assert step.output is not None
        return step.output.outside["tp"], step.output.typed

    assert outside(next_token) == (Shard(-1), True)
    assert outside(mse) == outside(None) == (COPY, False)


def test_tied_weights_are_one_weight() -> None:
    laid = plan(model(tied=True), "tp2", loss=next_token)
    (weight,) = [w for w in laid.weights if w.aliases]
    assert (weight.name, weight.aliases) == ("embedding.weight", ("head.weight",))


def test_buckets_fill_in_backward_order() -> None:
    laid = plan(model(), "dp2.tp2+sequence", loss=next_token)
    first, *rest = bucket_gradients(laid)
    assert (
        first.axes == ("dp",)
        and first.names[0] == "head.weight"
        and first.names[-1] == "embedding.weight"
    )
    assert [r.axes for r in rest] == [("dp", "tp")]  # norms: partial over both
    assert all("norm" in name for name in rest[0].names)
    assert sum(len(bucket.names) for bucket in bucket_gradients(laid)) == len(laid.weights)


class Odd(nn.Module):
    """Names that say nothing: roles must be declared."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.parts = nn.ModuleList(OddBlock(heads) for _ in range(2))


class OddBlock(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.mix = nn.Module()
        for name in ("a", "b", "c", "d"):
            self.mix.add_module(name, nn.Linear(32, 32))
        self.heads_here = heads


DECLARED = {"*.mix": {"role": "attention", "heads": 4}, "*.mix.[abc]": "column", "*.mix.d": "row"}


def test_declared_roles() -> None:
    assert not find_roles(Odd()).chains
    found = find_roles(Odd(), DECLARED)
    assert found.source == "declared" and [c.row for c in found.chains] == [
        "parts.0.mix.d",
        "parts.1.mix.d",
    ]
    assert found.chains[0].heads == 4 and found.chains[0].columns == tuple(
        f"parts.0.mix.{n}" for n in "abc"
    )


@pytest.mark.parametrize(
    ("roles", "error", "says"),
    [
        ({"*.mix.a": "colum"}, ConfigError, 'did you mean "column"'),
        ({"*.mux": "column"}, ConfigError, "no module has such a name"),
        ({"*.mix": "column"}, UnsupportedModel, "is a Module"),
        ({"*.mix.d": "row"}, UnsupportedModel, "no column comes before it"),
        ({"*.mix.a": "column"}, UnsupportedModel, "no chain"),
        (
            {**DECLARED, "*.mix": {"role": "attention", "heads": 5}},
            UnsupportedModel,
            "number of heads is not known",
        ),
        ({"*.mix": {"role": "attention", "head": 4}}, ConfigError, "not a key of this role"),
    ],
)
def test_declared_roles_that_do_not_fit(roles: dict, error: type[Refusal], says: str) -> None:
    with pytest.raises(error, match="(?i)" + says):
        find_roles(Odd(), roles)


def test_multihead_attention_is_a_chain_by_heads() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(2)
            )

    found = find_roles(Encoder())
    assert {chain.row: chain.heads for chain in found.chains} == {
        **{f"layers.{i}.self_attn.out_proj": 4 for i in (0, 1)},
        **{f"layers.{i}.linear2": 0 for i in (0, 1)},
    }
    declared = find_roles(Encoder(), {"layers.0.self_attn": "whole"})
    assert "layers.0.self_attn.out_proj" not in {chain.row for chain in declared.chains}


@pytest.mark.parametrize(
    ("build", "layout", "error", "says"),
    [
        (model, "xp2", LayoutError, "no axis 'xp'"),
        (model, "tp2+sequense", LayoutError, 'did you mean "sequence"'),
        (model, "dp2+zero1", LayoutError, "has no option"),
        (model, "fsdp2+zero1+zero2", LayoutError, "at once"),
        (model, "fsdp2.dp2", LayoutError, "write dp before fsdp"),
        (model, "dp3", ConfigError, "use a multiple of 3, such as 9"),
        (model, "tp3", UnsupportedModel, r"4 heads, which tp3 does not divide.*\[2, 4\]"),
        (partial(model, heads=12, dim=48, kv_heads=2), "tp3", UnsupportedModel, "2 key heads"),
        (
            partial(model, hidden=33),
            "tp2",
            UnsupportedModel,
            "33 features, which tp2 does not divide",
        ),
        (convnet, "tp2", UnsupportedModel, "finds no attention"),
        (convnet, "dp1", ConfigError, "not a precision"),
    ],
)
def test_refusals(build: Any, layout: str, error: type[Refusal], says: str) -> None:
    with pytest.raises(error, match="(?i)" + says) as caught:
        plan(build(), layout, precision="fp12" if "precision" in says else "fp32", batch=8)
    assert caught.value.exit_code == 2 and caught.value.fix


def test_recompute_is_checked() -> None:
    assert plan(model(), "dp1", recompute=2).recomputed() == ("blocks.0",)
    assert plan(model(), "dp1", recompute="full").recomputed() == ("blocks.0", "blocks.1")
    with pytest.raises(ConfigError, match="not a way to recompute"):
        plan(model(), "dp1", recompute="half")
    with pytest.raises(UnsupportedModel, match="no list of repeated blocks"):
        plan(nn.Linear(2, 2), "dp1", recompute="full")


def test_heads_whose_logits_the_loss_makes() -> None:
    """Those of a loss that says it can; not where a backward in two parts makes them twice, nor
    where a step's weights are put away before the loss."""

    def heads(layout: str, loss: Any = next_token, **options: Any) -> tuple[str, ...]:
        sample = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
        return weft.plan(
            decoder(layers=4), layout, batch=8, accumulate=4, loss=loss, sample=sample, **options
        ).heads

    for layout in ("dp2", "fsdp2", "tp2", "pp2"):
        assert heads(layout) == ("head",) and heads(layout, logits="whole") == ()
    assert heads("dp2", None) == heads("dp2", mse) == heads("pp2+zb-h1") == ()
    assert heads("pp2+zb-h1", logits="chunks") == ("head",)
    assert heads("pp2+pipedream", logits="chunks") == ()
    with pytest.raises(ConfigError, match="not a way to make logits"):
        heads("dp2", logits="few")


class Adaptive(nn.Module):
    """An adaptive softmax: its tails are chains of 5 and of 4 features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 10)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(20, 40, cutoffs=[10, 24], div_value=2.0)
        self.up = nn.Linear(10, 20)

    def forward(self, input_ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.embedding(input_ids)).flatten(0, 1)
        return self.softmax(hidden, target.flatten()).output


def test_a_guessed_chain_that_ranks_do_not_divide_is_left_whole_beside_others() -> None:
    ids = torch.arange(16).view(2, 8)
    sample = {"input_ids": ids, "target": ids}
    found = weft.plan(Adaptive(), "tp2", batch=8, sample=sample)
    cut = {p.name for step in found.steps for p in step.params if p.cut is not None}
    assert "softmax.tail.0.0.weight" in cut and "softmax.tail.1.0.weight" not in cut
    note = "softmax.tail.1.1 takes 5 features or heads, which tp2 does not divide: left whole"
    assert any(note in each for each in found.notes)
    with pytest.raises(UnsupportedModel, match=r"softmax\.tail\.1\.1 takes 5 features, which tp2"):
        weft.plan(
            Adaptive(),
            "tp2",
            batch=8,
            sample=sample,
            roles={"softmax.tail.1.0": "column", "softmax.tail.1.1": "row"},
        )


class TwoLayers(nn.Module):
    """Names that say nothing: its forward shows what a column and a row are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_size_that_divides_no_chain_of_the_forward_is_named() -> None:
    sample = {"x": torch.zeros(1, 8), "y": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(UnsupportedModel, match=r"second takes 16 .*, which tp3 does not") as caught:
        weft.plan(TwoLayers(), "tp3", batch=8, loss=classification, sample=sample)
    assert caught.value.fix == "tp sizes that work: [2, 4, 8, 16]"
    assert weft.plan(TwoLayers(), "tp4", batch=8, loss=classification, sample=sample).steps
