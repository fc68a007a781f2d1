"""Context parallelism: this rank's part of each sample, and attention that reaches the parts of
other ranks.

A model runs on its part as on a shorter sequence. What it asks of other positions is replaced where
it calls `scaled_dot_product_attention`, as `Functions` does with dropout:

    ring        keys and values travel around the ranks (Liu et al. 2023)
    gather      keys and values of all ranks are gathered first (Llama 3, Dubey et al. 2024)
    ulysses     whole sequence, a part of the heads: all-to-all there and back (Jacobs et al. 2023)

Each rank of a ring, or of a gather, has two stretches, from both ends (`order.zigzag`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from weft.core import COPY, Boundary, Plan, UnsupportedModel, zigzag_spans
from weft.nn import (
    AttentionPattern,
    PositionNumbers,
    Randomness,
    documents_of,
    model_arguments,
    named_inputs,
    sequence_length,
    window_rule,
)
from weft.parallel import Crossing, Mesh, all_gather, no_sequence

from ..microbatch import Batch, MicroBatch, SequenceInfo
from .batch_part import part_of_batch
from .counts_by_size import CountsBySize
from .followed_forwards import FollowedForwards
from .known_sequences import KnownSequences
from .mask_rules import added_to_scores, mask_placeholder, rule_of, whole_mask
from .position_counts import PositionCount
from .ring_attention import KeyBlocks, Span, attend_blocks
from .whole_marks import is_marked, set_alike, set_fixed, set_whole, set_whole_shape, whole_of


class MaskOfOwnKeys(UnsupportedModel):
    """Attention is given a mask that the model has made of this rank's positions."""


class ContextParallel:
    """One rank's part. `inputs`: what the model gets of a batch."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        randomness: Randomness,
        model: nn.Module,
        inputs: tuple[str, ...],
    ):
        methods = {
            step.sequence.axis: step.sequence.method
            for step in plan.steps
            if step.sequence is not None
        }
        self.layout, self.mesh, self.randomness, self.inputs = plan.layout, mesh, randomness, inputs
        self.names, self._numbers = named_inputs(model), PositionNumbers(model)
        self._plan, self.gathers = plan, any(step.gather is not None for step in plan.steps)
        self._positions: dict[int, Tensor] = {}  # by length
        self.heads = tuple(axis for axis, method in methods.items() if method == "ulysses")
        self.keys = tuple(axis for axis, method in methods.items() if method != "ulysses")
        self.travels = "ring" in methods.values()
        self.size = mesh.size(*methods)
        self.now, self.calls = SequenceInfo(), 0
        self.known: KnownSequences | None = None
        self.counts: CountsBySize | None = None
        self.follows = True  # outside of graphs and losses
        self.forwards = FollowedForwards(str(plan.layout))
        self.graphs: tuple[str, ...] = ()  # modules that are compiled
        # told of queries, keys and values of calls of attention in a forward that is followed
        self.on_attention: Callable[[Tensor, Tensor, Tensor], None] = lambda *tensors: None

    def __bool__(self) -> bool:
        return self.size > 1

    # ---- the batch -------------------------------------------------------------------------------

    def length(self, batch: Batch) -> int:
        """Positions of a sequence."""
        found = sequence_length(self.inputs, batch)
        if not found:
            raise no_sequence(self.layout, batch)
        return found

    def cut(self, batch: Batch) -> MicroBatch:
        """This rank's part of every entry [b, s, ...] whose s is that of the first input."""
        if not self:
            return MicroBatch(batch, model_arguments(self.inputs, batch))
        length = self.length(batch)
        mine = self.positions(length, next(iter(batch.values())).device)
        return part_of_batch(batch, self.inputs, self.names, self._numbers, length, mine)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Which positions this rank has, in the order of its rows. Raises LayoutError."""
        if length not in self._positions:
            self._positions[length] = torch.tensor(self._plan.positions(self.mesh.rank, length))
        return self._positions[length].to(device)

    @property
    def multiple(self) -> int:
        """What the length of a sequence is to be a multiple of."""
        return self.size * (2 if self.keys else 1)

    def _spans(self, length: int) -> list[list[Span]]:
        return zigzag_spans(length, self.mesh.size(*self.keys) if self.keys else 1)

    def begin(self, micro: MicroBatch, model: nn.Module) -> None:
        """What runs from now on is of this microbatch, a part of what `cut` gave, in this model."""
        if not self:
            return
        self.now = now = micro.sequence
        device = next(iter(micro.batch.values())).device
        mine = self.positions(now.length, device)
        self.randomness.rows, self.randomness.length = mine, now.length
        every = torch.arange(now.length, device=device)
        made = partial(whole_mask, queries=every, length=now.length)
        if "position_ids" not in micro.arguments:
            self.counts = CountsBySize(mine)
        if self._plan.staging is None:  # a stage receives tensors of which nothing is known
            self.known = self.forwards.begin(micro, mine, made, self.counts)
        if self.known is None:
            return
        for buffer in model.buffers():
            set_fixed(buffer)
        for name, x in micro.arguments.items():
            if not isinstance(x, Tensor) or is_marked(x):
                continue  # since its forward, which may have changed what it was given
            if name not in now.parted:
                set_alike(x)
                self.known.use()  # another batch may go through other parts of the model
                continue
            whole = now.wholes.get(name)
            set_whole_shape(x, (x.shape[0], now.length, *x.shape[2:]))
            if whole is not None:
                set_whole(x, whole.clone())

    def end(self) -> None:
        """What runs from now on has whole sequences."""
        self.now, self.randomness.rows = SequenceInfo(), None
        self.known = self.counts = None

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """All positions, in their order, of what this rank has its part of."""
        for axis in (*self.heads, *self.keys):
            group = self.mesh.group(axis)
            x = all_gather(x, dim, group, None) if group is not None else x
        return self._ordered(x, dim)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """`whole` with a gradient, of whose sum each rank has a part."""
        for axis in (*self.heads, *self.keys):
            x = Crossing(Boundary({axis: Shard(dim)}, {axis: COPY}), True, self.mesh)(x)
        return self._ordered(x, dim)

    def whole_entry(self, x: Tensor) -> Tensor | None:
        """All positions of integers that every rank knows: what is made of the batch, or an entry
        [b, s] of it."""
        known, mine = whole_of(x), self.positions(self.now.length, x.device)
        entries = self.now.wholes.values()
        if known is None:
            return next((e for e in entries if torch.equal(e[:, mine], x)), None)
        if self.known is not None and not any(torch.equal(e, known.tensor) for e in entries):
            self.known.use()
        return known.tensor

    def _ordered(self, x: Tensor, dim: int) -> Tensor:
        """What all ranks have, one after the other, in the order of positions."""
        spans = (span for each in self._spans(x.shape[dim]) for span in each)
        held = torch.tensor([i for span in spans for i in range(*span)])  # arange may be replaced
        return x.index_select(dim, torch.argsort(held).to(x.device))

    # ---- attention -------------------------------------------------------------------------------

    @torch.compiler.disable  # messages between ranks overlap with blocks of keys
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        keep: Callable[[tuple[int, int, int], Span, Span, torch.device], Tensor] | None = None,
    ) -> Tensor:
        """`scaled_dot_product_attention` of this rank's positions with all. `keep`: (first head,
        how many are here, how many the ranks that share the sequence have; queries; keys; device)
        -> factors of the weights."""
        check_path(self)
        self.calls += 1
        pattern = self.pattern(query, key, attn_mask, is_causal)
        bias = None
        if self.known is not None and attn_mask is not None and not attn_mask.is_meta:
            rows = self.known.rows(attn_mask)
            bias = None if rows is None else added_to_scores(rows, query.dtype)
        if self.heads and bias is not None:
            problem = f"attention is given a mask {list(bias.shape)} of its own, for all heads"
            fix = f"use cp+ring or cp+gather in place of {self.heads[0]}"
            raise UnsupportedModel("layout", str(self.layout), problem, fix)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        first, heads = 0, query.shape[1]
        for axis in self.heads:
            size = self.mesh.size(axis)
            self._check_heads(query, key, axis, size)
            if key.shape[1] < size:
                key, value = (x.repeat_interleave(size // x.shape[1], 1) for x in (key, value))
            there = Crossing(_around_attention(axis), True, self.mesh)
            query, key, value = map(there, (query, key, value))
            first += self.mesh.index(axis) * query.shape[1]
        spans = self._spans(self.now.length)
        rank, group = 0, None
        for axis in self.keys:
            rank, group = self.mesh.index(axis), self.mesh.group(axis)
        own: list[Span] = spans[rank]
        if group is not None and not self.travels:
            spans, rank = [[span for each in spans for span in each]], 0
        factor = None
        if keep is not None:
            width = query.shape[1]
            factor = lambda queries, keys: keep((first, width, heads), queries, keys, query.device)  # noqa: E731
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        out = attend_blocks(
            query,
            key,
            value,
            KeyBlocks(pattern, spans, rank, group, scale, factor, own, not self.travels),
            bias,
        )
        for axis in reversed(self.heads):
            out = Crossing(_around_attention(axis), False, self.mesh)(out)
        assert out.shape[1] == heads
        return out

    def pattern(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
    ) -> AttentionPattern:
        """Which keys are seen. Raises UnsupportedModel if the mask says nothing of other ranks'."""

        def refuse(problem: str, fix: str) -> UnsupportedModel:
            return UnsupportedModel("layout", str(self.layout), problem, fix)

        if query.ndim != 4 or not self.are_parts(query):
            raise refuse(
                f"attention of {list(query.shape)}, which is not [samples, heads, positions here,"
                " width]",
                "use dp or fsdp",
            )
        if key.shape[2] != query.shape[2]:
            raise _other_keys(self, key, query)
        if mask is None and self.now.valid is not None:
            raise refuse(
                "the model is given an attention_mask with padding, and calls attention without it",
                "give it to the mask, or leave it out of the model's inputs",
            )
        if mask is None:
            return AttentionPattern(is_causal)
        pattern = getattr(mask, "weft_pattern", None)
        if pattern is None and self.known is not None and self.known.rows(mask) is not None:
            return AttentionPattern(False)  # the mask is computed for all keys
        if pattern is None:
            fix = "use is_causal, or a mask that weft.nn.attention_masks.causal_mask makes"
            if mask.is_floating_point() and self.gathers:
                fix += ", or make a learned bias in the block that adds it"
            raise MaskOfOwnKeys(
                "layout",
                str(self.layout),
                f"attention is given a mask {list(mask.shape)}, which says nothing of other ranks'"
                " keys",
                fix,
            )
        found: AttentionPattern = pattern
        return found

    def are_parts(self, query: Tensor) -> bool:
        """Whether queries [.., .., s, ..] are as many as this rank has positions."""
        return query.shape[2] * self.size == self.now.length

    def masks_a_part(self, queries: int) -> bool:
        """Whether a mask for so many queries here is for a part of a sequence, and not for what is
        known to be of no position."""
        if self.known is None or isinstance(queries, PositionCount):
            return self.now.length > 0
        if queries * self.size == self.now.length:
            return True
        self.known.use()
        return False

    def _check_heads(self, query: Tensor, key: Tensor, axis: str, size: int) -> None:
        heads, kv = query.shape[1], key.shape[1]
        if heads % size or (kv % size and size % kv):
            problem = f"{heads} heads and {kv} key heads on a rank do not divide over {axis}{size}"
            raise UnsupportedModel(
                "layout", str(self.layout), problem, "use cp, whose keys travel, or a smaller size"
            )

    def rule(self, samples: int, here: int, **asked: Any) -> Tensor | None:
        """What transformers' mask is here."""
        problem = "the model's mask depends on what this rank has of the batch"
        fix = _advice_on_masks(self.names)
        refusal = UnsupportedModel("layout", str(self.layout), problem, fix)
        return rule_of(self.now, self.known, refusal, samples, here, **asked)

    def mask(self, position_ids: Tensor, window: int | None) -> Tensor | None:
        """What `masks.causal_mask` is here."""
        here = self.now.length // self.size
        whole = self.whole_entry(position_ids)
        if whole is None:
            whole = self.whole(position_ids)  # the model has made them
        rule = window_rule(window) if window is not None and window < self.now.length else None
        pattern = AttentionPattern(True, rule, documents_of(whole), self.now.valid)
        return None if pattern.plain else mask_placeholder(pattern, position_ids.shape[0], here)


@contextmanager
def on_the_part(sequence: ContextParallel) -> Iterator[None]:
    """Within this context functions see this rank's positions alone, as in a loss, whose sums are
    of these, and in a graph, which is traced from them."""
    outside, sequence.follows = sequence.follows, False
    try:
        yield
    finally:
        sequence.follows = outside


def _other_keys(sequence: ContextParallel, key: Tensor, query: Tensor) -> UnsupportedModel:
    problem = (
        f"attention of {key.shape[2]} keys for {query.shape[2]} queries on a rank: to another"
        " sequence, or also to keys of no position, as a learned prefix"
    )
    fix = 'use dp or fsdp, or declare the module around it "whole_sequence" under [roles]'
    return UnsupportedModel("layout", str(sequence.layout), problem, fix)


def check_path(sequence: ContextParallel) -> None:
    """Refuse what exchanges tensors with other ranks where they may not come. Raises
    UnsupportedModel."""
    known = sequence.known
    if known is not None and (deciding := known.own_reads.deciding()):
        problem = (
            f"whether attention runs depends on {deciding}, where each rank reads what its own"
            " positions give"
        )
        fix = "use dp or fsdp, or let the forward call attention equally often for all data"
        raise UnsupportedModel("layout", str(sequence.layout), problem, fix)


class WholeSequence:
    """What runs between `begin` and `end` has whole sequences. `length`: of those that are parted
    outside; 0: none are."""

    def __init__(self, sequence: ContextParallel):
        self._sequence = sequence
        self._outside = sequence.now, sequence.randomness.rows, sequence.known, sequence.counts
        self.length = sequence.now.length

    def begin(self) -> None:
        self._sequence.end()

    def end(self) -> None:
        sequence = self._sequence
        sequence.now, sequence.randomness.rows, sequence.known, sequence.counts = self._outside


def _advice_on_masks(names: Sequence[str]) -> str:
    """transformers reads documents off the position_ids of a batch, where it is given no mask."""
    unmasked = "position_ids" in names and "attention_mask" not in names
    named = "let its forward name attention_mask, and hand on what is given; or "
    return f"{named if unmasked else ''}use dp or fsdp"


def _around_attention(axis: str) -> Boundary:
    """Outside each rank has some positions of all heads, inside all positions of some heads."""
    return Boundary({axis: Shard(2)}, {axis: Shard(1)})
