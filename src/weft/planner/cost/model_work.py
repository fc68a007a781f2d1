"""What a model computes, keeps and sends, block by block, for one sample. Pure data; no torch.

It is the same data whether it was read off a module on the meta device (`trace`) or follows from a
transformer's dimensions (`dims`), and it knows no layout: an op says which axes would divide it,
and `estimate` divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Which of a block's parameters: all, those that are trained, those that lie in a byte each
Held = Literal["params", "trained", "in_int8"]
# What divides an op's work, what it keeps, and parameters:
#   whole      data and sequence axes alone: every rank of tp does all of it
#   sequence   tp too, where it has that option: norms, dropout, residuals
#   features   axes that divide heads and features
#   vocabulary axes that divide the vocabulary
#   expert     parameters: axes that shard experts, and features; work: features, as each rank has
#              its tokens
Cut = Literal["whole", "sequence", "features", "vocabulary", "expert"]
Kind = Literal["matmul", "attention", "memory"]


@dataclass(frozen=True)
class OpWork:
    """Some work of a block's forward, for one sample.

    `flops` of a matmul or a fused attention (as computed: causal kernels count half); `moved_bytes`
    that memory-bound work reads and writes; `saved_bytes` kept for backward. `matmuls`: over how
    many of equal size the flops are divided. `kernels` launched by the forward of a microbatch,
    whatever its samples. `backward` work over forward work. `core`: part of attention's core, which
    selective recomputation does again and does not keep. Of a matmul, the dims that may be no
    multiple of what a device computes at once, 0 where they surely are: `width`, which tp divides,
    and `unit`, which it does not.
    """

    name: str
    kind: Kind
    cut: Cut
    flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    matmuls: float = 1.0
    kernels: float = 1.0
    backward: float = 2.0
    core: bool = False
    width: int = 0
    unit: int = 0


@dataclass(frozen=True)
class PartWork:
    """Parameters that `cut` divides, and whose rows are stored over `axes` (none: on every rank)
    where those of others are over `fsdp`: so many `elements`, of which so many are `trained`."""

    cut: Cut
    axes: tuple[str, ...]
    elements: float
    trained: float


@dataclass(frozen=True)
class BlockWork:
    """One module of a chain, `count` times in a row. Bytes and elements are of one sample, or of
    one block.

    `params`: elements by what divides them; of each, a matmul reads the weights once a microbatch.
    `output_bytes`: what the next block gets. `reduced_bytes`: of activations that tp sums in a
    forward (all-reduces, or all-gather and reduce-scatter under sequence; the same in backward), in
    `reductions` collectives. `key_bytes`: of keys and values (both), and `query_bytes` of queries
    and of what attention gives (both), which axes that share a sequence exchange. `routed_bytes`:
    of one dispatch of tokens to experts; `experts` in the block. `working_bytes`: the most that its
    backward needs beside what was saved, divided by tp. `repeated`: recomputation may be asked of
    it. `tied`: its parameters are those of a block before it. `frozen`: of `params`, the elements
    that are not trained; `in_int8`: those that are int8, whatever the others are. `parts`: of
    `params`, those that are not stored as others are.
    """

    name: str
    count: int
    ops: tuple[OpWork, ...]
    params: tuple[tuple[Cut, float], ...]
    output_bytes: float
    reduced_bytes: float = 0.0
    reductions: float = 0.0
    key_bytes: float = 0.0
    query_bytes: float = 0.0
    routed_bytes: float = 0.0
    experts: int = 0
    kv_heads: int = 0
    heads: int = 0
    working_bytes: float = 0.0
    repeated: bool = False
    tied: bool = False
    frozen: tuple[tuple[Cut, float], ...] = ()
    in_int8: tuple[tuple[Cut, float], ...] = ()
    parts: tuple[PartWork, ...] = ()

    def elements(self, cut: Cut | None = None) -> float:
        """Parameters of one of these blocks: of this cut, or all."""
        return sum(count for each, count in self.params if cut in (None, each))

    @property
    def trained(self) -> tuple[tuple[Cut, float], ...]:
        """Elements that are trained, by what divides them."""
        frozen = dict(self.frozen)
        return tuple((cut, count - frozen.get(cut, 0.0)) for cut, count in self.params)


@dataclass(frozen=True)
class UnitSizes:
    """What fsdp gathers together, against the repeated blocks: units `each` block has (a half where
    two blocks are one), the `largest` over the largest block, and the share of the blocks' weights
    that is in no unit, and so is `left` to be gathered with the rest of the model."""

    each: float = 1.0
    largest: float = 1.0
    left: float = 0.0


@dataclass(frozen=True)
class ModelWork:
    """A model as a chain of blocks, in the order of its forward. `tokens` of a sample;
    `model_flops` that one sample's forward and backward take by the model's definition, which MFU
    counts. `vocab`: logits of a token, 0 where it has none. Activations are computed in `dtype`,
    `itemsize` bytes each."""

    name: str
    blocks: tuple[BlockWork, ...]
    tokens: float
    model_flops: float
    dtype: str
    itemsize: int
    vocab: int = 0
    units: UnitSizes = UnitSizes()

    @property
    def params(self) -> float:
        """Elements, tied ones once."""
        return sum(block.count * block.elements() for block in self.blocks if not block.tied)

    @property
    def trained_params(self) -> float:
        """Elements that are trained, tied ones once."""
        return self._elements("trained")

    @property
    def int8_params(self) -> float:
        """Elements that are int8."""
        return self._elements("in_int8")

    def _elements(self, held: Held) -> float:
        own = ((b.count, n) for b in self.blocks if not b.tied for _, n in getattr(b, held))
        return sum(count * n for count, n in own)

    @property
    def head(self) -> float:
        """Elements of the matmuls behind the repeated blocks."""
        last = max(
            (i for i, block in enumerate(self.blocks) if block.repeated), default=len(self.blocks)
        )
        behind = (b for b in self.blocks[last + 1 :] if any(op.kind == "matmul" for op in b.ops))
        return sum(block.count * block.elements() for block in behind)

    @property
    def depth(self) -> int:
        """Number of repeated blocks."""
        return sum(block.count for block in self.blocks if block.repeated)

    @property
    def parts(self) -> int:
        """Number of all blocks: as many stages there can be."""
        return sum(block.count for block in self.blocks)
