"""The work of a transformer from its dimensions alone, for models published as numbers.

Activations are those of Korthikanti et al. 2022 (table 2), and of the same sums with a fused
attention, a gated MLP and grouped keys; FLOPs those of Narayanan et al. 2021.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from .model_work import BlockWork, Cut, ModelWork, OpWork

Eager = Literal["norms", "elementwise", "softmax", "loss"]
# Bytes that each element reads and writes, op by op, in float32 but for where it comes and goes:
EAGER_NORM = 36  # an RMS norm: cast, square, mean, scale, cast, weigh
EAGER_ROTATION = 22  # two products, a sign, a concatenation, a sum, in 16 bits
EAGER_SOFTMAX = 18  # mask, softmax into float32 and cast, beside what a fused one moves
EAGER_LOSS = 20  # cast, log softmax and the sum; 12 more by the backward
FIRST_FLASH = 1.7  # FlashAttention over FlashAttention-2, whole: Dao 2023, at the least
ITEM = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # of an activation


@dataclass(frozen=True)
class TransformerDims:
    """A decoder: widths in elements. `moe_ffn` of one expert; `dense`: how many of the first layers
    have no experts; `shared_ffn`: the width of what every token goes through beside its experts."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    tied: bool = True
    num_experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense: int = 0

    @property
    def query(self) -> int:
        """Width of all heads."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)


def transformer_work(
    dims: TransformerDims,
    dtype: str = "bf16",
    *,
    flash: bool = True,
    causal: bool = True,
    dropout: bool = False,
    fused: bool = True,
    kernels: float = 1.0,
    name: str = "",
    eager: Collection[Eager] = (),
    flash_version: int = 2,
) -> ModelWork:
    """`fused`: norms, rotations and activations are kernels of their own, which keep only what goes
    in. `flash`: so is attention, which keeps no scores; a `causal` one leaves out what is masked.
    `kernels`: launched in place of each that is counted here. `eager`: what goes op by op. Through
    float32: `norms`, the `softmax` of an attention that is not fused, the `loss`, for which each
    rank of tp has all logits; in its own dtype: `elementwise`, rotations and activations.
    `flash_version`: 1 takes FIRST_FLASH times as long as 2.
    """
    item, s, h, v = ITEM[dtype], dims.seq_len, dims.hidden, dims.vocab
    token = s * h * item
    learned = () if dims.gated else (("whole", s * h),)  # positions
    first = BlockWork(
        "embedding",
        1,
        (OpWork("embedding", "memory", "sequence", moved_bytes=3 * token),),
        (("vocabulary", v * h), *learned),
        token,
        reduced_bytes=token,
        reductions=1,
    )
    dense = dims.dense if dims.num_experts else dims.layers
    layers = [
        _layer(
            dims, item, flash, causal, dropout, fused, kernels, routed, count, eager, flash_version
        )
        for routed, count in ((False, dense), (True, dims.layers - dense))
        if count
    ]
    norm = BlockWork(
        "norm",
        1,
        (
            OpWork(
                "norm",
                "memory",
                "sequence",
                moved_bytes=2 * token,
                saved_bytes=2 * token,
                backward=1.5,
            ),
        ),
        (("whole", h),),
        token,
    )
    head = BlockWork(
        "head",
        1,
        (
            OpWork("logits", "matmul", "vocabulary", flops=2 * s * h * v, kernels=kernels, width=v),
            OpWork(
                "loss",
                "memory",
                "whole" if "loss" in eager else "vocabulary",
                moved_bytes=(EAGER_LOSS if "loss" in eager else 10) * s * v,
                backward=0.6,
                kernels=6 * kernels,
            ),
        ),
        (("vocabulary", v * h),),
        0.0,
        tied=dims.tied,
    )
    blocks = (first, *layers, norm, head)
    flops = (
        3.0 * sum(b.count * _model_flops(dims, b.name == "routed") for b in layers) + 6 * s * h * v
    )
    return ModelWork(name, blocks, s, flops, dtype, item, vocab=v)


def _model_flops(dims: TransformerDims, routed: bool) -> float:
    """Of one layer's forward, attention counted in full."""
    s, h = dims.seq_len, dims.hidden
    width = dims.top_k * dims.moe_ffn + dims.shared_ffn if routed else dims.ffn
    linear = 2 * s * h * (2 * dims.query + 2 * dims.keys + (3 if dims.gated else 2) * width)
    return linear + 4 * s * s * dims.query


def _layer(
    dims: TransformerDims,
    item: int,
    flash: bool,
    causal: bool,
    dropout: bool,
    fused: bool,
    kernels: float,
    routed: bool,
    count: int,
    eager: Collection[Eager],
    flash_version: int,
) -> BlockWork:
    s, h, q, k = dims.seq_len, dims.hidden, dims.query, dims.keys
    token, gates = s * h * item, 2 if dims.gated else 1
    mask = s * h if dropout else 0.0  # one byte each
    pointwise = fused and "elementwise" not in eager
    norm = OpWork(
        "norm",
        "memory",
        "sequence",
        moved_bytes=EAGER_NORM * s * h if "norms" in eager else 2 * token * (1 if fused else 3),
        saved_bytes=2 * token + (8 if "norms" in eager else 0 if fused else 4) * s * h,
        backward=1.5,
        kernels=kernels * (1 if fused and "norms" not in eager else 6),
    )
    add = OpWork(
        "residual",
        "memory",
        "sequence",
        moved_bytes=(3 + (1 if dropout else 0)) * token + mask,
        saved_bytes=mask,
        backward=1.0,
        kernels=2 * kernels,
    )
    slower = FIRST_FLASH if flash_version == 1 else 1.0
    if flash:
        core = [
            OpWork(
                "attention",
                "attention",
                "features",
                flops=4 * s * s * q * (0.5 if causal else 1.0) * slower,
                saved_bytes=s * q * item + 4 * dims.heads * s,
                kernels=kernels,
                core=True,
                backward=2.5,
            )
        ]
    else:
        scores, added = dims.heads * s * s, "softmax" in eager
        core = [
            OpWork(
                "scores",
                "matmul",
                "features",
                flops=4 * s * s * q,
                matmuls=2,
                kernels=2 * kernels,
                core=True,
                unit=q // dims.heads,
            ),
            OpWork(
                "softmax",
                "memory",
                "features",
                moved_bytes=((13 if dropout else 8) + added * EAGER_SOFTMAX) * scores,
                saved_bytes=((5 if dropout else 2) + added * 4) * scores,
                kernels=3 * kernels,
                core=True,
                backward=1.5,
            ),
            OpWork("context", "memory", "features", saved_bytes=s * q * item, kernels=0),
        ]
    rotation = OpWork(
        "rotation",
        "memory",
        "features",
        moved_bytes=EAGER_ROTATION * s * (q + k),
        backward=1.0,
        kernels=10 * kernels,
    )
    attention = [
        norm,
        OpWork(
            "qkv",
            "matmul",
            "features",
            flops=2 * s * h * (q + 2 * k),
            saved_bytes=s * (q + 2 * k + (0 if pointwise else q + k)) * item,
            kernels=2 * kernels,
            width=q,
        ),
        *([rotation] if "elementwise" in eager else []),
        *core,
        OpWork("projection", "matmul", "features", flops=2 * s * q * h, kernels=kernels, width=q),
        add,
    ]
    params: list[tuple[Cut, float]] = [
        ("features", h * (2 * q + 2 * k)),
        ("whole", 2 * h if dims.gated else 9 * h),
    ]
    f = dims.ffn
    if routed:
        rows, f = dims.top_k, dims.moe_ffn
        gate = OpWork(
            "router",
            "memory",
            "sequence",
            moved_bytes=2 * token,
            saved_bytes=0,
            kernels=8 * kernels,
        )
        groups = max(1, dims.num_experts)
        inner = s * rows * f * item
        travelled = s * rows * h * item
        mlp = [
            gate,
            OpWork(
                "permute",
                "memory",
                "whole",
                moved_bytes=4 * travelled,
                saved_bytes=2 * travelled,
                kernels=6 * kernels,
            ),
            OpWork(
                "experts up",
                "matmul",
                "expert",
                flops=2 * s * rows * h * f * gates,
                matmuls=groups,
                saved_bytes=inner * gates,
                kernels=2 * kernels,
            ),
            OpWork(
                "activation",
                "memory",
                "expert",
                moved_bytes=inner * (gates + 1),
                saved_bytes=inner,
                kernels=2 * kernels,
            ),
            OpWork(
                "experts down",
                "matmul",
                "expert",
                flops=2 * s * rows * h * f,
                matmuls=groups,
                kernels=2 * kernels,
            ),
        ]
        params += [
            ("expert", (gates + 1) * h * f * dims.num_experts),
            ("whole", h * dims.num_experts),
        ]
        if dims.shared_ffn:
            mlp += _mlp(dims, dims.shared_ffn, item, pointwise, kernels)
            params += [("features", (gates + 1) * h * dims.shared_ffn)]
    else:
        mlp = _mlp(dims, f, item, pointwise, kernels)
        params += [("features", (gates + 1) * h * f + (0 if dims.gated else f))]
    return BlockWork(
        "routed" if routed else "layer",
        count,
        (*attention, norm, *mlp, add),
        tuple(params),
        token,
        reduced_bytes=2 * token,
        reductions=2,
        key_bytes=2 * s * k * item,
        query_bytes=2 * s * q * item,
        routed_bytes=s * dims.top_k * h * item if routed else 0.0,
        experts=dims.num_experts if routed else 0,
        kv_heads=dims.kv_heads or dims.heads,
        heads=dims.heads,
        # gradients of what the activation reads; that of what it gives takes the place of what it
        # gave, if it is fused
        working_bytes=item
        * s
        * (gates + (0 if pointwise else 1))
        * (f * (dims.top_k if routed else 1)),
        repeated=True,
    )


def _mlp(dims: TransformerDims, width: int, item: int, fused: bool, kernels: float) -> list[OpWork]:
    s, h, gates = dims.seq_len, dims.hidden, 2 if dims.gated else 1
    inner = s * width * item
    return [
        OpWork(
            "up",
            "matmul",
            "features",
            flops=2 * s * h * width * gates,
            saved_bytes=inner * gates,
            kernels=kernels,
            width=width,
        ),
        OpWork(
            "activation",
            "memory",
            "features",
            moved_bytes=inner * (gates + 1),
            saved_bytes=inner * (1 if fused else 2),
            backward=1.5,
            kernels=kernels,
        ),
        OpWork("down", "matmul", "features", flops=2 * s * width * h, kernels=kernels, width=width),
    ]
