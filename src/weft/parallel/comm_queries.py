"""What a prediction of collectives needs to know: calls and shapes recorded on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. `axis`: the axes of its group, joined by a dot."""

    kind: str
    axis: str
    nbytes: int
    when: str  # forward, backward, recompute, reduce, gather, step
    module: str


@dataclass(frozen=True)
class BoundaryShape:
    """What crosses a module on one device, per sample: shapes without dim 0 where that is the
    batch."""

    entered: tuple[int, ...] | None  # first floating-point tensor that enters
    left: tuple[int, ...] | None
    needs_grad: bool  # whether what enters needs a gradient
    batched: bool = True  # dim 0 counts samples
    samples: int = 1  # how many there are
    gives_grad: bool = True  # whether what leaves needs a gradient
    # how often, over all calls and all backwards through each, what enters needs one, and what
    # leaves does
    needing: int | None = None
    giving: int | None = None
    # how often backward goes through gradients of what enters, and of what leaves
    differentiated: tuple[int, int] = (0, 0)
    # how often the forward itself asks for a gradient that goes through the module
    asked: int = 0
    # of logits: labels of each cross-entropy that reads them, for one sample; None: one, which has
    # a label for each row
    labels: tuple[float, ...] | None = None
    further: tuple[BoundaryShape, ...] = ()  # other tensors that enter and need a gradient
    # another dim has the samples, or dim 0 has them with something else, as patches
    # [samples * patches, positions, features]
    joined: bool = False
    fixed: bool = False  # the same for any number of samples, as what is made of parameters

    def rows(self, shape: tuple[int, ...], microbatch: int) -> float:
        """What the elements of a shape are to be multiplied by for `microbatch` samples."""
        if self.fixed:
            return 1
        if self.batched:
            return microbatch
        joined = self.joined or (len(shape) == 2 and shape[0] % self.samples == 0)
        return microbatch / self.samples if joined else 1


@dataclass(frozen=True)
class CallSizes:
    """How often the forward of a batch calls a module. `sizes`: where these differ or depend on
    data, how many elements enter and leave in each call on this rank, over all microbatches.
    `regathered`: how often the backward of a microbatch gathers a unit of FSDP2. `again`: how often
    the model itself enters and leaves the module again in the backward of a microbatch. `kept`: how
    often a microbatch gathers a unit of a model whose forward asks for gradients, and which stays
    whole from then on."""

    count: int = 1
    sizes: tuple[tuple[int, int], ...] = ()
    regathered: int = 0
    again: tuple[int, int] = (0, 0)
    kept: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention` on one device: shapes [b, heads, s, width], of all
    samples, and whose it is. `eager`: of a function of the model's own instead."""

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    needs_grad: bool = True
    eager: bool = False


@dataclass(frozen=True)
class SequenceInput:
    """A tensor that enters a module which needs whole sequences: the shape of this rank's part, of
    one microbatch, and bytes of an element."""

    module: str
    shape: tuple[int, ...]
    itemsize: int
    needs_grad: bool


def dim_of_positions(shape: Sequence[int], here: int) -> int | None:
    """In which dim a tensor that enters such a module has this rank's positions, of which there are
    `here`: [samples, positions, features]; of what else is computed of them, as a mask of keys
    [samples, 1, 1, positions], the one dim of that size. None: in none, or it does not tell."""
    if len(shape) < 3:  # an entry of the batch, which is known whole
        return None
    dims = [dim for dim, size in enumerate(shape) if dim and size == here]
    if len(shape) == 3 and 1 in dims:
        return 1
    return dims[0] if len(dims) == 1 else None


@dataclass(frozen=True)
class GateQuery:
    """What is asked of all tokens: by a gate "shares" of `size` experts, "capacity" for `size`
    choices of a sample, or once a step the "bias" of `size` experts; for a mask `size` "positions"
    of a sample, which the model has made."""

    module: str
    what: str
    size: int


@dataclass(frozen=True, eq=False)
class RoutingCall:
    """A call of a module that holds experts, on one device: which ones each token of the batch goes
    to, int [n, k], and whether tokens, their weights and what experts make of them need a gradient.
    """

    module: str
    index: Tensor
    width: int
    needs_grad: tuple[bool, bool, bool] = (True, True, True)
