"""Practice: in which dtypes a framework keeps and sends what belongs to a parameter, and what it lets overlap. Data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Practice:
    """Bytes of one parameter: `weight_bytes` that rest, `copy_bytes` of a second copy in the dtype computed in, where
    there is one; `grad_bytes` of its gradient; `state_bytes` of the optimizer (with master weights). On the wire:
    `reduce_bytes` of its gradient, `gather_bytes` where sharded weights are gathered. `update_bytes` that an optimizer
    step reads and writes; `added_bytes` where a microbatch's gradient is added to those before. `logit_bytes` at the peak, of one logit. `dummy_bytes` of one block's gradients that stand in
    for those which a fused matmul has summed elsewhere (Transformer Engine). `overlaps`: whether sums of gradients over
    data axes run beside backward. `scatters`: whether ranks of tp send a part each of what goes to the next stage, and
    gather it there (Narayanan et al. 2021).
    """

    compute: str = "bf16"
    weight_bytes: float = 4.0
    copy_bytes: float = 0.0
    grad_bytes: float = 4.0
    state_bytes: float = 8.0
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    update_bytes: float = 30.0
    added_bytes: float = 0.0
    logit_bytes: float = 10.0
    dummy_bytes: float = 0.0
    overlaps: bool = True
    scatters: bool = False


def weft(compute: str) -> Practice:
    """What weft does itself, with torch's AdamW where that is no one kernel: it goes through weights, gradients and
    both moments in steps of its own, 20 elements read or written; and before it gradients are cleared and divided by
    the weight of the batch. A loss keeps float32 logits, their log softmax and its gradient."""
    item = 8.0 if compute == "fp64" else 4.0
    low = 2.0 if compute in ("bf16", "fp16") else item
    return Practice(
        compute, weight_bytes=item, grad_bytes=item, state_bytes=2 * item, reduce_bytes=item, gather_bytes=low,
        update_bytes=23 * item, added_bytes=3 * item, logit_bytes=3 * item + (low if low < item else 0.0),
    )  # fmt: skip
