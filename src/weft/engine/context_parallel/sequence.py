"""A shared sequence: the part of each sample that this rank has, and attention that reaches the
parts of the others.

A model runs on its part as on a shorter sequence. What it asks of other positions is replaced where
it calls `scaled_dot_product_attention`, as `Functions` does with dropout:

    ring        keys and values travel around the ranks (Liu et al. 2023)
    gather      keys and values of all ranks are gathered first (Llama 3, Dubey et al. 2024)
    ulysses     whole sequence, a part of the heads: all-to-all there and back (Jacobs et al. 2023)

Each rank of a ring, or of a gather, has two stretches, from both ends (`order.zigzag`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from weft._torch.modes import function_modes
from weft.core import Boundary, Plan, UnsupportedModel, zigzag_spans
from weft.nn import (
    IGNORED,
    MADE,
    AttentionPattern,
    Randomness,
    check_padding,
    documents_of,
    window_rule,
)
from weft.parallel import Mesh, all_gather, cross_boundary

from .ring_attention import KeyBlocks, Span, attend_blocks

Batch = dict[str, Tensor]

# Beside this rank's part of a batch: of the whole sequence [b, s], and arguments of the model that
# the batch has not
VALID, DOCUMENTS, WHOLE = "weft/valid", "weft/documents", "weft/whole/"


@dataclass
class SequenceBatchInfo:
    """The microbatch that runs: what is known of its whole sequences [b, s]."""

    length: int = 0  # 0 where they are not divided
    wholes: tuple[Tensor, ...] = ()  # integers that the model is called with, such as position_ids
    documents: Tensor | None = None  # as transformers tells them from position_ids
    valid: Tensor | None = None  # false where a position is padding, if any is


class ContextParallel:
    """One rank's part. `names`: the arguments that the model's forward takes; `inputs`: what it
    gets of a batch."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        randomness: Randomness,
        names: tuple[str, ...],
        inputs: tuple[str, ...],
    ):
        methods = {
            step.sequence.axis: step.sequence.method
            for step in plan.steps
            if step.sequence is not None
        }
        self.layout, self.mesh, self.randomness, self.names, self.inputs = (
            plan.layout,
            mesh,
            randomness,
            names,
            inputs,
        )
        self._plan = plan
        self._positions: dict[int, Tensor] = {}  # by length
        self.heads = tuple(axis for axis, method in methods.items() if method == "ulysses")
        self.keys = tuple(axis for axis, method in methods.items() if method != "ulysses")
        self.travels = "ring" in methods.values()
        self.size = mesh.size(*methods)
        self.now, self.calls, self._length = SequenceBatchInfo(), 0, 0
        if methods and "transformers" in sys.modules:
            _stand_in_for_masks()

    def __bool__(self) -> bool:
        return self.size > 1

    # ---- the batch -------------------------------------------------------------------------------

    def length(self, batch: Batch) -> int:
        """Positions of a sequence: dim 1 of the first input that has one."""
        found = next(
            (batch[k].shape[1] for k in (*self.inputs, *batch) if k in batch and batch[k].ndim > 1),
            0,
        )
        if not found:
            raise UnsupportedModel(
                "layout", str(self.layout), "no entry of the batch has a sequence", "use dp or fsdp"
            )
        return found

    def cut(self, batch: Batch) -> Batch:
        """This rank's part of every entry [b, s, ...] whose s is that of the first input."""
        if not self:
            return batch
        length = self._length = self.length(batch)
        first = next(
            value for value in batch.values() if value.ndim > 1 and value.shape[1] == length
        )
        samples, device = first.shape[0], first.device
        given, found = {key for key in self.inputs if key in batch}, dict(batch)
        if "input_ids" in batch and "labels" not in batch:
            found["labels"] = F.pad(
                batch["input_ids"][:, 1:], (0, 1), value=IGNORED
            )  # the next one may be elsewhere
        positions = batch["position_ids"] if "position_ids" in given else None
        padding = batch["attention_mask"] if "attention_mask" in given else None
        if padding is not None:
            check_padding(padding)
        elif "attention_mask" in self.names:
            # transformers would else take a jump of position_ids for the beginning of a document
            found[MADE + "attention_mask"] = torch.ones(
                samples, length, dtype=torch.long, device=device
            )
            documents = documents_of(positions) if positions is not None else None
            if documents is not None:
                found[DOCUMENTS] = documents.expand(samples, length)
        if positions is None and "position_ids" in self.names:
            found[MADE + "position_ids"] = torch.arange(length, device=device).expand(
                samples, length
            )
        mine = self.positions(length, device)
        kept = {DOCUMENTS: found.pop(DOCUMENTS, None)}
        for key in (*given, MADE + "position_ids"):
            value = found.get(key)
            if (
                value is not None
                and value.shape == (samples, length)
                and not value.is_floating_point()
            ):
                kept[WHOLE + key] = value
        kept[VALID] = (
            padding.bool() if padding is not None and not bool(padding.bool().all()) else None
        )
        found = {
            k: v[:, mine] if v.ndim > 1 and v.shape[1] == length else v for k, v in found.items()
        }
        return found | {key: value for key, value in kept.items() if value is not None}

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

    def begin(self, micro: Batch) -> None:
        """What runs from now on is of this microbatch, a part of what `cut` gave."""
        if not self:
            return
        wholes = tuple(value for key, value in micro.items() if key.startswith(WHOLE))
        self.now = SequenceBatchInfo(self._length, wholes, micro.get(DOCUMENTS), micro.get(VALID))
        self.randomness.rows = self.positions(self._length, next(iter(micro.values())).device)
        self.randomness.length = self._length

    def end(self) -> None:
        """What runs from now on has whole sequences."""
        self.now, self.randomness.rows = SequenceBatchInfo(), None

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """All positions, in their order, of what this rank has its part of."""
        for axis in (*self.heads, *self.keys):
            group = self.mesh.group(axis)
            x = all_gather(x, dim, group, None) if group is not None else x
        order = torch.cat([torch.arange(*s) for spans in self._spans(x.shape[dim]) for s in spans])
        return x.index_select(dim, torch.argsort(order).to(x.device))

    # ---- attention -------------------------------------------------------------------------------

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
        self.calls += 1
        pattern = self._pattern(query, key, attn_mask, is_causal)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        first, heads = 0, query.shape[1]
        for axis in self.heads:
            size = self.mesh.size(axis)
            self._check_heads(query, key, axis, size)
            if key.shape[1] < size:
                key, value = (x.repeat_interleave(size // x.shape[1], 1) for x in (key, value))
            there = Boundary({axis: Shard(2)}, {axis: Shard(1)})
            query, key, value = (
                cross_boundary(x, there, True, self.mesh) for x in (query, key, value)
            )
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
        )
        for axis in reversed(self.heads):
            out = cross_boundary(
                out, Boundary({axis: Shard(2)}, {axis: Shard(1)}), False, self.mesh
            )
        assert out.shape[1] == heads
        return out

    def _pattern(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
    ) -> AttentionPattern:
        def refuse(problem: str, fix: str) -> UnsupportedModel:
            return UnsupportedModel("layout", str(self.layout), problem, fix)

        if query.ndim != 4 or query.shape[2] * self.size != self.now.length:
            raise refuse(
                f"attention of {list(query.shape)}, which is not [samples, heads, positions here,"
                " width]",
                "use dp, fsdp or tp",
            )
        if key.shape[2] != query.shape[2]:
            raise refuse("attention to another sequence", "use dp, fsdp or tp")
        if mask is None and self.now.valid is not None:
            raise refuse(
                "the model is given an attention_mask with padding, and calls attention without it",
                "give it to the mask, or leave it out of the model's inputs",
            )
        if mask is None:
            return AttentionPattern(is_causal)
        pattern = getattr(mask, "weft_pattern", None)
        if pattern is None:
            raise refuse(
                f"attention is given a mask {list(mask.shape)}, which says nothing of other ranks'"
                " keys",
                "use is_causal, or a mask that weft.nn.attention_masks.causal_mask makes",
            )
        found: AttentionPattern = pattern
        return found

    def _check_heads(self, query: Tensor, key: Tensor, axis: str, size: int) -> None:
        heads, kv = query.shape[1], key.shape[1]
        if heads % size or (kv % size and size % kv):
            problem = f"{heads} heads and {kv} key heads on a rank do not divide over {axis}{size}"
            raise UnsupportedModel(
                "layout", str(self.layout), problem, "use cp, whose keys travel, or a smaller size"
            )

    def counted(self, *args: Any, **kwargs: Any) -> Tensor:
        """`torch.arange`. A model that takes no position_ids counts its positions itself: these are
        this rank's. The trial finds one that counted something else."""
        counted = torch.arange(*args, **kwargs)
        here = self.now.length // self.size
        asked = args[:1] == (here,) or args[:2] == (0, here) or kwargs.get("end") == here
        if (
            "position_ids" in self.names
            or not asked
            or counted.shape != (here,)
            or counted.is_floating_point()
        ):
            return counted
        return self.positions(self.now.length, counted.device).to(counted.dtype)

    def rule(
        self,
        samples: int,
        here: int,
        *,
        mask_function: Callable,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        local_size: int | None = None,
        **rest: Any,
    ) -> Tensor | None:
        """What transformers' mask is here; None where it would have none, with all positions at
        hand."""
        now, zero = self.now, torch.zeros((), dtype=torch.long)
        plain = (
            now.valid is None
            and now.documents is None
            and (local_size is None or now.length < local_size)
        )
        if plain and (allow_is_causal_skip or allow_is_bidirectional_skip):
            return None

        def seen(q: Tensor, k: Tensor) -> Tensor:
            try:
                found: Tensor = mask_function(zero.to(q.device), zero.to(q.device), q, k)
            except IndexError as problem:
                raise UnsupportedModel(
                    "layout",
                    str(self.layout),
                    "the model's mask depends on what this rank has of the batch",
                    "let its forward name attention_mask and position_ids, so that they are given"
                    " for its positions",
                ) from problem
            return found

        return mask_placeholder(
            AttentionPattern(False, seen, now.documents, now.valid), samples, here
        )

    def mask(self, position_ids: Tensor, window: int | None) -> Tensor | None:
        """What `masks.causal_mask` is here."""
        here, mine = (
            self.now.length // self.size,
            self.positions(self.now.length, position_ids.device),
        )
        known = (whole for whole in self.now.wholes if torch.equal(whole[:, mine], position_ids))
        whole = next(known, None)
        if whole is None:
            whole = self.whole(position_ids)  # the model has made them
        rule = window_rule(window) if window is not None and window < self.now.length else None
        pattern = AttentionPattern(True, rule, documents_of(whole), self.now.valid)
        return None if pattern.plain else mask_placeholder(pattern, position_ids.shape[0], here)


def mask_placeholder(pattern: AttentionPattern, samples: int, length: int) -> Tensor:
    """What a model hands on in place of a mask: no memory, and the rule with it."""
    mask = torch.empty(samples, 1, length, length, dtype=torch.bool, device="meta")
    mask.weft_pattern = pattern  # type: ignore[attr-defined]
    return mask


# ---- transformers --------------------------------------------------------------------------------


def _stand_in_for_masks() -> None:
    """Where transformers makes a mask for `scaled_dot_product_attention`, keep its rule if ranks
    share the sequence."""
    from transformers.masking_utils import (  # type: ignore[import-not-found, unused-ignore]
        ALL_MASK_ATTENTION_FUNCTIONS,
        AttentionMaskInterface,
    )

    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(original, _Masks):
        AttentionMaskInterface.register("sdpa", _Masks(original))


class _Masks:
    """What makes transformers' masks."""

    def __init__(self, original: Callable):
        self._original = original

    def __call__(
        self, batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        modes = reversed(function_modes())
        shared = next(
            (found for mode in modes if (found := getattr(mode, "sequence", None)) is not None),
            None,
        )
        if shared is None or not shared.now.length:
            made: Tensor | None = self._original(batch_size, q_length, kv_length, *args, **kwargs)
            return made
        mask: Tensor | None = shared.rule(batch_size, q_length, **kwargs)
        return mask
