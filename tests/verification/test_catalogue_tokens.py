"""The silent bugs of shared sequences and of experts on ranks: `weft verify` catches each and names
its place.

docs/reference/bugs.md holds the same catalogue as a table, under "Bugs of sequences and experts".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bugs import Catalogue, Fault, assert_caught, assert_clean, clean, documented, patched
from tests.engine.test_context_parallel import SUBJECTS as CONTEXT
from tests.engine.test_experts import GATES, subject as experts
from tests.verification.test_catalogue import params, planned
from weft.core.step import COPY, SUM, Param, Step
from weft.engine import engine, function_overrides
from weft.engine.context_parallel import ring_attention, sequence
from weft.nn import rebalance_gates
from weft.nn.attention_masks import AttentionPattern
from weft.nn.moe_routing import expert_shares, within_capacity
from weft.parallel import apply, expert_dispatch
from weft.verification.case import Case

SUBJECTS = {
    **{name: CONTEXT[name] for name in ("shifted", "packed", "padded")},
    "decoder": CONTEXT["micro"],
    "dropout": CONTEXT["counts"],
    "experts": experts("mixtral"),
    "balanced": experts("", **GATES["softmax"]),
    "capacity": experts("", **GATES["capacity"]),
    "bias": experts("", **GATES["bias"]),
}
CATALOGUE = Catalogue(SUBJECTS)
bug = CATALOGUE.bug


# ---- sequences -----------------------------------------------------------------------------------


@bug("decoder", "cp2", r"output of blocks\.0\.attention\.wo")
def positions_from_zero(case: Case) -> Iterator[Case]:
    """Each rank counts the positions of its part from 0."""

    def cut(
        self: sequence.ContextParallel, batch: Any, right: Any = sequence.ContextParallel.cut
    ) -> Any:
        found = right(self, batch)
        positions = found.arguments["position_ids"]
        counted = torch.arange(positions.shape[1]).expand_as(positions)
        return replace(found, arguments={**found.arguments, "position_ids": counted})

    with patched(case, (sequence.ContextParallel, "cut", cut)):
        yield case


@bug("decoder", "cp2", r"output of blocks\.0\.attention\.wo")
def every_block_causal(case: Case) -> Iterator[Case]:
    """Keys of another stretch are masked as those of the own one are."""
    with patched(
        case,
        (AttentionPattern, "between", lambda *_: None),
        (ring_attention.KeyBlocks, "causal", lambda *_: True),
    ):
        yield case


@bug("decoder", "cp2+gather", r"output of blocks\.0\.attention\.wo")
def future_seen(case: Case) -> Iterator[Case]:
    """Later stretches are not left out."""

    def between(
        self: AttentionPattern,
        queries: Any,
        keys: Any,
        device: Any,
        right: Any = AttentionPattern.between,
    ) -> Any:
        return right(self, queries, keys, device) or True if queries != keys else None

    with patched(case, (AttentionPattern, "between", between)):
        yield case


@bug("decoder", "cp2", r"output of blocks\.0\.attention\.wo")
def blocks_averaged(case: Case) -> Iterator[Case]:
    """Blocks are merged as if their scores had one sum."""

    def forward(*args: Any, right: Any = ring_attention._forward) -> tuple[Tensor, Tensor]:
        out, logs = right(*args)
        return out, torch.zeros_like(logs)

    with patched(case, (ring_attention, "_forward", forward)):
        yield case


@bug("decoder", "cp2", r"gradient of the output of blocks\.1\.attention\.w[vk]")
def gradients_of_keys_stay(case: Case) -> Iterator[Case]:
    """A rank keeps the gradients of the keys that it last had, and they do not go home."""
    with patched(
        case,
        (ring_attention._RingPasses, "home", lambda self: self._sums.wait() and self._sums._sent),
    ):
        yield case


@bug("decoder", "cp2", r"gradient of the output of blocks\.1\.attention\.wv")
def softmax_of_a_block_in_backward(case: Case) -> Iterator[Case]:
    """Backward takes each block's weights as if the block were all."""

    def backward(
        grad: Tensor,
        out: Tensor,
        logs: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Any,
        right: Any = ring_attention._backward,
    ) -> Any:
        own, _ = ring_attention._forward(q, k, v, *rest), None
        return right(grad, out, own[1].masked_fill(own[1] == -torch.inf, 0.0), q, k, v, *rest)

    with patched(case, (ring_attention, "_backward", backward)):
        yield case


@bug("shifted", "cp2", r"loss of step 0")
def labels_shifted_in_parts(case: Case) -> Iterator[Case]:
    """The last position of each stretch has no next one."""

    def cut(
        self: sequence.ContextParallel, batch: Any, right: Any = sequence.ContextParallel.cut
    ) -> Any:
        found = right(self, batch)
        batch = {key: value for key, value in found.batch.items() if key != "labels"}
        return replace(found, batch=batch)

    with patched(case, (sequence.ContextParallel, "cut", cut)):
        yield case


@bug("decoder", "cp2", r"gradient of embedding\.weight .*21 of 21")
def gradients_of_a_part(case: Case) -> Iterator[Case]:
    """Gradients are not summed over the ranks that share the sequence."""
    yield planned(case, partial(params, lambda p: None if p.axis == "cp" else p))


@bug("dropout", "cp2", r"output of dropout")
def same_dropout_on_all_parts(case: Case) -> Iterator[Case]:
    """Each rank draws the masks of the first positions."""

    def begin(
        self: sequence.ContextParallel,
        micro: Any,
        model: Any,
        right: Any = sequence.ContextParallel.begin,
    ) -> None:
        right(self, micro, model)
        if self:
            self.randomness.rows = torch.arange(len(self.randomness.rows))

    with patched(case, (sequence.ContextParallel, "begin", begin)):
        yield case


@bug("packed", "cp2", r"output of blocks\.0\.attention\.wo")
def documents_see_each_other(case: Case) -> Iterator[Case]:
    """A packed document attends to those before it."""
    with patched(case, (sequence, "documents_of", lambda _: None)):
        yield case


@bug("padded", "cp2", r"output of model\.layers\.0\.self_attn")
def padding_seen(case: Case) -> Iterator[Case]:
    """Padding on the left is attended to."""

    def cut(
        self: sequence.ContextParallel, batch: Any, right: Any = sequence.ContextParallel.cut
    ) -> Any:
        found = right(self, batch)
        return replace(found, sequence=replace(found.sequence, valid=None))

    with patched(case, (sequence.ContextParallel, "cut", cut)):
        yield case


# ---- experts -------------------------------------------------------------------------------------


def of_experts(change: Any, step: Step) -> Step:
    """A Step with each Param of an expert changed, or left out."""
    return params(lambda p: change(p) if ".experts." in p.name else p, step)


@bug("experts", "dp2.ep2", r"gradient of model\.layers\.\d\.mlp\.experts\.gate_up_proj")
def expert_not_reduced_over_its_replicas(case: Case) -> Iterator[Case]:
    """An expert's replicas keep what the tokens of their own side gave."""
    yield planned(case, partial(of_experts, lambda p: None if p.axis == "dp" else p))


@bug("experts", "dp2+ep", r"gradient of model\.layers\.\d\.mlp\.experts\.gate_up_proj")
def expert_summed_with_others(case: Case) -> Iterator[Case]:
    """The gradients of different experts are summed, as all else over `dp` is."""

    def add(step: Step) -> Step:
        if not step.dispatch:
            return step
        return replace(
            step,
            params=(*step.params, *(Param(p.name, "dp", COPY, COPY, SUM) for p in step.params)),
        )

    yield planned(case, add)


@bug("experts", "ep2", r"output of model\.layers\.0\.mlp\.experts")
def tokens_back_in_another_order(case: Case) -> Iterator[Case]:
    """What comes back is taken in the order of tokens, and not of their experts."""

    def dispatched(
        *args: Any, right: Any = expert_dispatch.dispatch_tokens, **named: Any
    ) -> Tensor:
        *front, tokens, index, weights = args
        return right(*front, tokens.flip(0), index, weights, **named)

    with patched(case, (expert_dispatch, "dispatch_tokens", dispatched)):
        yield case


@bug("experts", "ep2", r"gradient of the output of model\.layers\.1\.post_attention_layernorm")
def gradients_of_tokens_stay(case: Case) -> Iterator[Case]:
    """Backward does not send the gradients of tokens home."""

    def backward(ctx: Any, token: Tensor) -> Any:
        return torch.zeros_like(ctx.trip.wait()), None

    with patched(case, (expert_dispatch._StartAllToAll, "backward", staticmethod(backward))):
        yield case


@bug("experts", "tp2", r"gradient of the output of model\.layers\.1\.mlp\.gate")
def weights_of_a_part_of_an_expert(case: Case) -> Iterator[Case]:
    """The gradients of a gate's weights are of the features that a rank has."""

    class Wrong(apply.Crossing):
        def __init__(self, boundary: Any, *rest: Any) -> None:
            super().__init__(boundary, *rest)
            self.every = boundary.every

        def __call__(self, x: Tensor) -> Tensor:
            weights = self.every and x.is_floating_point() and x.shape[-1] == 2
            return x if weights else super().__call__(x)

    with patched(case, (apply, "Crossing", Wrong)):
        yield case


@bug("balanced", "dp2", r"gradient of the output of blocks\.1\.mlp\.gate")
def shares_of_own_tokens(case: Case) -> Iterator[Case]:
    """Each rank balances the load by the shares that its own tokens have."""
    with patched(
        case,
        (
            function_overrides.FunctionOverrides,
            "_shares",
            lambda self, *asked: expert_shares(*asked),
        ),
    ):
        yield case


@bug("capacity", "cp2", r"output of blocks\.0\.mlp\.experts")
def capacity_of_a_part(case: Case) -> Iterator[Case]:
    """An expert has room for what comes of each part of a sequence."""

    def within(self: function_overrides.FunctionOverrides, *asked: Any) -> Tensor:
        self.routed = True
        return within_capacity(*asked)

    with patched(case, (function_overrides.FunctionOverrides, "_within_capacity", within)):
        yield case


@bug(
    "bias",
    "dp2",
    r"blocks\.\d\.mlp\.gate\.bias\.state after step 0|output of|loss of step 1",
)
def bias_of_own_tokens(case: Case) -> Iterator[Case]:
    """Each rank moves its biases by the load of its own tokens."""

    def own(model: nn.Module, sum_loads: Any, *more: Any, **options: Any) -> None:
        rebalance_gates(model, lambda loads: loads, *more, **options)

    with patched(case, (engine, "rebalance_gates", own)):
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
    assert documented("Bugs of sequences and experts") == CATALOGUE.names
