"""A shared sequence: the part of each sample that this rank has, and attention that reaches the parts of the others.

A model runs on its part as on a shorter sequence. What it asks of other positions is replaced where it calls
`scaled_dot_product_attention`, as `Functions` does with dropout:

    ring        keys and values travel around the ranks (Liu et al. 2023)
    gather      keys and values of all ranks are gathered first (Llama 3, Dubey et al. 2024)
    ulysses     the sequence is whole for a part of the heads, by all-to-all there and back (Jacobs et al. 2023)

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

from ..collectives import all_gather, cross
from ..errors import CannotCut
from ..losses import IGNORED
from ..masks import Pattern, documents_of, within
from ..mesh import Mesh
from ..order import zigzag
from ..plans import Boundary, Plan
from ..randomness import Randomness
from .attention import Blocks, Span, attend

Batch = dict[str, Tensor]

VALID, DOCUMENTS = "weft/valid", "weft/documents"  # of the whole sequence, beside this rank's part


@dataclass
class Now:
    """The microbatch that runs."""

    length: int = 0  # of the whole sequence; 0 where it is not divided
    documents: Tensor | None = None
    valid: Tensor | None = None


class SharedSequence:
    """One rank's part. `names`: the arguments that the model's forward takes."""

    def __init__(self, plan: Plan, mesh: Mesh, randomness: Randomness, names: tuple[str, ...]):
        methods = {step.sequence.axis: step.sequence.method for step in plan.steps if step.sequence is not None}
        self.layout, self.mesh, self.randomness, self.names = plan.layout, mesh, randomness, names
        self._plan = plan
        self._positions: dict[int, Tensor] = {}  # by length
        self.heads = tuple(axis for axis, method in methods.items() if method == "ulysses")
        self.keys = tuple(axis for axis, method in methods.items() if method != "ulysses")
        self.travels = "ring" in methods.values()
        self.size = mesh.size(*methods)
        self.now, self.calls = Now(), 0
        if methods and "transformers" in sys.modules:
            _stand_in_for_masks()

    def __bool__(self) -> bool:
        return self.size > 1

    # ---- the batch -----------------------------------------------------------------------------------------------

    def cut(self, batch: Batch, inputs: tuple[str, ...]) -> Batch:
        """This rank's part of every entry [b, s, ...] whose s is that of the first input."""
        if not self:
            return batch
        first = next((batch[k] for k in (*inputs, *batch) if k in batch and batch[k].ndim > 1), None)
        if first is None:
            raise CannotCut("layout", str(self.layout), "no entry of the batch has a sequence", "use dp or fsdp")
        length = first.shape[1]
        mine = self.positions(length, first.device)
        batch = dict(batch)
        if "input_ids" in batch and not any(key.startswith("label") for key in batch):
            batch["labels"] = F.pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORED)  # the next one may be elsewhere
        found: Batch = {}
        padding = batch.pop("attention_mask", None)
        if padding is not None:
            if padding.ndim != 2:
                raise CannotCut(
                    "batch['attention_mask']", tuple(padding.shape), "says which pairs of positions see each other",
                    "give [samples, positions], 1 where a token counts",
                )  # fmt: skip
            found[VALID] = padding.bool()
        if "position_ids" in batch and padding is None:
            documents = documents_of(batch["position_ids"])
            if documents is not None:
                found[DOCUMENTS] = documents
        if "position_ids" in self.names and "position_ids" not in batch:
            batch["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[0], length)
        for key, value in batch.items():
            found[key] = value[:, mine] if value.ndim > 1 and value.shape[1] == length else value
        if "attention_mask" in self.names:
            # transformers would else take a jump of position_ids for the beginning of a document
            found["attention_mask"] = torch.ones_like(first[:, mine], dtype=torch.long)
        return found

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Which positions this rank has, in the order of its rows."""
        if length not in self._positions:
            self._positions[length] = torch.tensor(self._plan.positions(self.mesh.rank, length))
        return self._positions[length].to(device)

    def _spans(self, length: int) -> list[list[Span]]:
        return zigzag(length, self.mesh.size(*self.keys) if self.keys else 1)

    def begin(self, micro: Batch) -> None:
        """What runs from now on is of this microbatch, a part of what `cut` gave."""
        if not self:
            return
        first = next(v for k, v in micro.items() if v.ndim > 1 and k not in (VALID, DOCUMENTS))
        self.now = Now(first.shape[1] * self.size, micro.get(DOCUMENTS), micro.get(VALID))
        self.randomness.rows = self.positions(self.now.length, first.device)
        self.randomness.length = self.now.length

    def end(self) -> None:
        """What runs from now on has whole sequences."""
        self.now, self.randomness.rows = Now(), None

    def whole(self, x: Tensor) -> Tensor:
        """All positions of what this rank has [b, s / ranks, ...], in their order."""
        for axis in self.heads:
            group = self.mesh.group(axis)
            x = all_gather(x, 1, group, None) if group is not None else x
        for axis in self.keys:
            group = self.mesh.group(axis)
            x = all_gather(x, 1, group, None) if group is not None else x
        order = torch.cat([torch.arange(*s) for spans in self._spans(x.shape[1]) for s in spans])
        return x[:, torch.argsort(order).to(x.device)]

    # ---- attention -----------------------------------------------------------------------------------------------

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
        """`scaled_dot_product_attention` of this rank's positions with all. `keep`: (first head, how many are here, how
        many the ranks that share the sequence have; queries; keys; device) -> factors of the weights."""
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
            query, key, value = (cross(x, there, True, self.mesh) for x in (query, key, value))
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
        out = attend(query, key, value, Blocks(pattern, spans, rank, group, scale, factor, own, not self.travels))
        for axis in reversed(self.heads):
            out = cross(out, Boundary({axis: Shard(2)}, {axis: Shard(1)}), False, self.mesh)
        assert out.shape[1] == heads
        return out

    def _pattern(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Pattern:
        def refuse(problem: str, fix: str) -> CannotCut:
            return CannotCut("layout", str(self.layout), problem, fix)

        if query.ndim != 4 or query.shape[2] * self.size != self.now.length:
            raise refuse(
                f"attention of {list(query.shape)}, which is not [samples, heads, positions here, width]",
                "use dp, fsdp or tp",
            )
        if key.shape[2] != query.shape[2]:
            raise refuse("attention to another sequence", "use dp, fsdp or tp")
        if mask is None:
            return Pattern(is_causal)
        pattern = getattr(mask, "weft_pattern", None)
        if pattern is None:
            raise refuse(
                f"attention is given a mask {list(mask.shape)}, which says nothing of other ranks' keys",
                "use is_causal, or a mask that weft.masks.causal_mask makes",
            )
        found: Pattern = pattern
        return found

    def _check_heads(self, query: Tensor, key: Tensor, axis: str, size: int) -> None:
        heads, kv = query.shape[1], key.shape[1]
        if heads % size or (kv % size and size % kv):
            problem = f"{heads} heads and {kv} key heads on a rank do not divide over {axis}{size}"
            raise CannotCut("layout", str(self.layout), problem, "use cp, whose keys travel, or a smaller size")

    def counted(self, *args: Any, **kwargs: Any) -> Tensor:
        """`torch.arange`. A model that takes no position_ids counts its positions itself: these are this rank's. The
        trial of a sample finds one that counted something else."""
        counted = torch.arange(*args, **kwargs)
        here = self.now.length // self.size
        if "position_ids" in self.names or counted.shape != (here,) or counted[0] != 0 or counted[-1] != here - 1:
            return counted
        return self.positions(self.now.length, counted.device).to(counted.dtype)

    def mask(self, position_ids: Tensor, window: int | None) -> Tensor | None:
        """What `masks.causal_mask` is here."""
        pattern = Pattern(True, within(window), self.now.documents)
        return None if pattern.plain else stand_in(pattern, position_ids.shape[0], self.now.length // self.size)


def stand_in(pattern: Pattern, samples: int, length: int) -> Tensor:
    """What a model hands on in place of a mask: no memory, and the rule with it."""
    mask = torch.empty(samples, 1, length, length, dtype=torch.bool, device="meta")
    mask.weft_pattern = pattern  # type: ignore[attr-defined]
    return mask


# ---- transformers ------------------------------------------------------------------------------------------------

_running: list[SharedSequence] = []  # whose forward runs
_replaced: list[Callable] = []


def running(sequence: SharedSequence) -> Any:
    """Around a forward: masks that transformers makes are for this sequence."""
    return _Running(sequence)


class _Running:
    def __init__(self, sequence: SharedSequence):
        self._sequence = sequence

    def __enter__(self) -> None:
        _running.append(self._sequence)

    def __exit__(self, *error: object) -> None:
        _running.pop()


def _stand_in_for_masks() -> None:
    """Where transformers makes a mask for `scaled_dot_product_attention`, keep its rule."""
    from transformers.masking_utils import (  # type: ignore[import-not-found, unused-ignore]
        ALL_MASK_ATTENTION_FUNCTIONS,
        AttentionMaskInterface,
        causal_mask_function,
    )

    if _replaced:
        return
    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    _replaced.append(original)

    def made(
        batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Callable = causal_mask_function,
        **kwargs: Any,
    ) -> Tensor | None:  # fmt: skip
        if not _running or not _running[-1].now.length:
            kwargs["mask_function"] = mask_function
            found: Tensor | None = original(batch_size, q_length, kv_length, *args, **kwargs)
            return found
        now = _running[-1].now
        zero = torch.zeros((), dtype=torch.long)

        def rule(q: Tensor, k: Tensor) -> Tensor:
            seen: Tensor = mask_function(zero.to(q.device), zero.to(q.device), q, k)
            return seen

        causal = mask_function is causal_mask_function
        pattern = Pattern(causal, None if causal else rule, now.documents, now.valid)
        return None if pattern.plain and causal else stand_in(pattern, batch_size, q_length)

    AttentionMaskInterface.register("sdpa", made)
