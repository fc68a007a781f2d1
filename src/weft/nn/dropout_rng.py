"""Dropout, and other random numbers, that do not depend on the layout.

A mask is a function of (seed, step, sample, place in the program, place in the sample's tensor) and
of nothing else: a counter-based generator (Salmon et al. 2011; the mixing function is splitmix64's,
Steele et al. 2014). So every rank draws its own part of one global mask, whatever part it holds,
and a recomputed forward draws the same mask again.

What differs from step to step is in tensors, so that a compiled forward is compiled once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import ActivationSharding, DroppedShapes, dims_of_samples

DROPOUTS_OF_CHANNELS = frozenset({F.dropout1d, F.dropout2d, F.dropout3d})
DROPOUTS = DROPOUTS_OF_CHANNELS | {
    F.dropout,
    torch.dropout,
    F.alpha_dropout,
    F.feature_alpha_dropout,
}

_BITS = 31
_SAMPLES = 2**24  # more than any batch has, so that it does not depend on how many a rank has
_NEXT_CALL = 0xD1B54A32D192ED03  # between the keys of two calls: no tensor has as many elements
_NEXT_PART = 0x8CB92BA72F3D8DD7  # between those of two tensors of one call


def mix_key(*words: int) -> int:
    """One 63-bit key out of integers (splitmix64)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


def _to_signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def place_of(module: str, again: int = 0) -> int:
    """The place in the program of a module that counts its own calls, where it is called once more
    after `again` times."""
    place = zlib.crc32(module.encode())
    return mix_key(place, again) if again else place


class DrawPosition(NamedTuple):
    """Where in a microbatch the program is: what the next mask follows from beside the samples."""

    place: int
    calls: int
    passes: dict[str, int]
    again: int
    own_count: bool


@dataclass
class Randomness:
    """Where the program is: which samples this rank holds, which call comes next, how activations
    are cut here.

    `samples`: global indices of this microbatch's samples, int64 [samples], on the device of the
    masks. `index` of `size`: this rank on the axis that cuts activations. `rows`: the positions
    that it has of sequences of `length`, where ranks share them; `rows_dim`: the dim that counts
    them, where it does not follow from the shape.
    """

    seed: int
    index: int = 0
    size: int = 1
    step: int = 0
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    activation_sharding: ActivationSharding = "whole"
    rows: Tensor | None = None
    rows_dim: int | None = None
    length: int = 0
    place: int = 0
    calls: int = 0
    own_count: bool = False  # whether a module runs that counts its own calls wherever it is called
    chosen: int = 0  # how many modules run that a forward calls only where its data say so
    recomputed: bool = (
        False  # whether weft's own recomputation runs a block, which repeats its masks
    )
    repeated: bool = False  # whether that runs it in backward
    own_call: Any = None  # that call of torch.utils.checkpoint
    compiled: bool = False  # whether a block runs that is compiled after the first step
    dropped: DroppedShapes = field(default_factory=DroppedShapes)
    in_use: bool = True  # whether dropout draws its masks here
    drawn: bool = False  # whether anything has been drawn since the engine was made
    # of each module that counts its own calls: how often it has been called in this microbatch
    passes: dict[str, int] = field(default_factory=dict)
    again: int = 0  # how often the one that runs was called before
    _key: Tensor | None = None  # of the place, int64 []

    def begin(self, step: int, samples: Tensor | Sequence[int]) -> None:
        """A microbatch begins."""
        self.step, self.samples = step, torch.as_tensor(samples)
        self.activation_sharding, self.own_count, self.compiled = "whole", False, False
        self.passes, self.again = {}, 0
        self.move_to(0)

    def move_to(self, place: int, calls: int = 0) -> None:
        """What runs next is at this place of the program, where so many calls came before."""
        self.place, self.calls, self._key = place, calls, None

    @property
    def position(self) -> DrawPosition:
        return DrawPosition(self.place, self.calls, dict(self.passes), self.again, self.own_count)

    @position.setter
    def position(self, position: DrawPosition) -> None:
        self.move_to(position.place, position.calls)
        self.passes, self.again = dict(position.passes), position.again
        self.own_count = position.own_count

    def call_of(self, module: str) -> int:
        """How often this module, which counts its own calls, was called before. It is now."""
        before = self.passes.get(module, 0)
        self.passes[module] = before + 1
        return before

    def make_key(self) -> Tensor:
        """The key of this place and step. A compiled forward needs it to be made before."""
        if self._key is None:
            key = _to_signed(mix_key(self.seed, self.step, self.place))
            self._key = torch.full((), key, dtype=torch.int64, device=self.samples.device)
        return self._key

    def site(self) -> Tensor:
        """A key for the next call, int64 []."""
        self.calls += 1
        self.drawn = True
        return self.make_key() + _to_signed(self.calls * _NEXT_CALL % 2**64)

    def skip(self, calls: int, modules: Sequence[str] = ()) -> None:
        """As many calls were another rank's to make, and those of these modules."""
        self.calls += calls
        for module in modules:
            self.call_of(module)

    def sample_dim(self, shape: torch.Size) -> int:
        """The dim that counts samples: 0, or 1 where positions come first."""
        samples = self.samples.shape[0]
        if len(shape) != 3 or shape[1] != samples:
            return 0
        known = self._known_dims(shape)
        if len(known) == 1:
            return next(iter(known))
        if shape[2] == samples:  # weights of attention
            return 0
        return 1 if self.dropped.positions_first or shape[0] % max(1, samples) else 0

    def _known_dims(self, shape: torch.Size) -> set[int]:
        """Each dim that counts samples in one of the shapes that were seen to have positions first,
        or beside such, and that this may be."""
        if not self.dropped.by_sample:
            return set()
        whole, sharded = [*shape], self.sharded_dim(shape)
        if sharded is not None:
            whole[sharded] *= self.size
        found = dims_of_samples(self.dropped.by_sample, whole, self.samples.shape[0])
        return {dim for dim, rows in found if rows}

    def _coordinates(
        self,
        shape: torch.Size,
        dim: int,
        sharded: int | None,
        device: torch.device,
        of_samples: int,
    ) -> Tensor:
        length = shape[dim]
        coords = torch.arange(length, device=device, dtype=torch.int64)
        if dim != of_samples:
            if dim == sharded:
                coords += self.index * length
        elif dim:
            coords = self.samples.to(device)
        else:
            samples = self.samples.shape[0]
            rows = max(1, length // max(1, samples))  # samples may be flattened with tokens
            if length == rows * samples:
                base = self.samples.to(device)
                own, total = torch.arange(rows, device=device), rows
                if self.rows is not None and rows == len(self.rows):
                    own, total = self.rows.to(device), self.length
                if sharded == 0:
                    own, total = own + self.index * rows, rows * self.size
                coords = (base[:, None] * total + own).flatten()
        return coords

    def _sequence_dim(self, shape: torch.Size, sharded: int | None) -> int | None:
        """The dim that counts this rank's positions, where ranks share the sequence."""
        if self.rows is None or len(shape) < 2:
            return None
        if self.rows_dim is not None:
            return self.rows_dim
        if len(shape) == 4 and shape[2:] == (len(self.rows), self.length):
            return 2  # weights of attention
        dim = 2 if self.activation_sharding == "heads" and len(shape) == 4 else 1
        return dim if shape[dim] * (self.size if sharded == dim else 1) == len(self.rows) else None

    def sharded_dim(self, shape: torch.Size) -> int | None:
        """The dim of an activation of this shape that is cut at this place of the program."""
        ndim = len(shape)
        if self.size == 1 or self.activation_sharding == "whole":
            return None
        if self.activation_sharding == "sequence":
            return 1 if ndim > 2 else 0
        if self.activation_sharding == "heads" and ndim == 3 and shape[0] > self.samples.shape[0]:
            return 0  # weights of attention, with samples and heads in one dim
        if self.activation_sharding == "heads" and ndim > 3:
            return ndim - 3  # before queries and keys; blocks of the sequence may come first
        return ndim - 1

    def keep(self, shape: torch.Size, p: float, site: Tensor, device: torch.device) -> Tensor:
        """A bool mask of this shape, each element true with probability 1 - p."""
        if self.all_share(shape):
            places = _whole(shape, device)
        else:
            sharded = self.sharded_dim(shape)
            places = self._places(shape, sharded, device, self.sample_dim(shape))
        return self._draw_mask(places, p, site, device)

    def all_share(self, shape: torch.Size) -> bool:
        """Whether what has this shape is the same for all samples."""
        known = self.dropped
        if not (known.without_samples or known.unclear):
            return False
        shared = tuple(shape) in known.without_samples
        return shared or (tuple(shape) in known.unclear and not self._divides(shape))

    def drawn_dim(self, shape: torch.Size, alike: bool) -> int | None:
        """The dim that counts samples in random numbers of this shape; None if all samples have the
        same. `alike`: it is the shape of a tensor of the model, and not written out by it."""
        if not shape:
            return None
        samples = len(self.samples)
        if alike:
            dim = self.sample_dim(shape)
            shared = not shape[dim] or shape[dim] % max(1, samples) or self.all_share(shape)
            return None if shared else dim
        return self.dropped.dim_of_written(shape, samples)

    def is_unclear(self, shape: torch.Size, alike: bool) -> bool:
        """Whether nothing says if each sample has random numbers of its own in this shape. `alike`:
        as of `drawn_dim`."""
        if alike:
            return self.may_share(shape)
        return self.dropped.is_written_unclear(shape, len(self.samples))

    def may_share(self, shape: torch.Size) -> bool:
        """Whether samples share one tensor of this shape, and another counts samples in it; or two
        count them in other dims."""
        unclear = self.dropped.unclear
        if self.dropped.by_sample and len(self._known_dims(shape)) > 1:
            return True
        return bool(unclear) and tuple(shape) in unclear and self._divides(shape)

    def _divides(self, shape: torch.Size) -> bool:
        return shape[0] % max(1, self.samples.shape[0]) == 0

    def _places(
        self, shape: torch.Size, sharded: int | None, device: torch.device, of_samples: int
    ) -> list[tuple[Tensor, int]]:
        """For every dim, the coordinates in the global tensor, and its length."""
        sequence = self._sequence_dim(shape, sharded)
        places = []
        for dim in range(len(shape)):
            total = shape[dim] * (self.size if dim == sharded else 1)
            coords = self._coordinates(shape, dim, sharded, device, of_samples)
            if dim and dim == of_samples:
                total = _SAMPLES
            if dim == sequence and dim and self.rows is not None:
                coords, total = self.rows.to(device)[coords], self.length
            places.append((coords, total))
        return places

    def keep_weights(
        self,
        heads: tuple[int, int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        p: float,
        site: Tensor,
        device: torch.device,
    ) -> Tensor:
        """`keep` for weights of attention [samples, heads, queries, keys] between two stretches of
        a sequence. `heads`: the first one, how many, and how many all ranks have."""
        first, count, every = heads
        samples = self.samples.shape[0]
        places = [(self._coordinates(torch.Size([samples]), 0, None, device, 0), samples)]
        for (start, stop), total in (
            ((first, first + count), every),
            (queries, self.length),
            (keys, self.length),
        ):
            places.append((torch.arange(start, stop, device=device), total))
        return self._draw_mask(places, p, site, device)

    def _draw_mask(
        self, places: list[tuple[Tensor, int]], p: float, site: Tensor, device: torch.device
    ) -> Tensor:
        """`places`: for every dim, the coordinates in the global tensor, and its length."""
        word = self._words(places, site, device).bitwise_and_(2**_BITS - 1)
        return word >= int(p * 2**_BITS)

    def _words(
        self, places: list[tuple[Tensor, int]], site: Tensor, device: torch.device
    ) -> Tensor:
        """64 mixed bits for every element, int64 [of the lengths of the coordinates]."""
        number = torch.zeros((), dtype=torch.int64, device=device)
        for coords, total in places:
            number = (number * total).unsqueeze(-1) + coords
        word = number + site.to(device)
        word.mul_(_to_signed(0x9E3779B97F4A7C15))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word.bitwise_xor_(word >> shift).mul_(_to_signed(factor))
        return word.bitwise_xor_(word >> 31)

    def uniform(
        self,
        shape: torch.Size,
        site: Tensor,
        device: torch.device,
        of_samples: int | None,
        part: int = 0,
    ) -> Tensor:
        """float64 in [0, 1) of this shape, 53 bits of each.

        Args:
            shape: of what this rank has.
            site: the key of the call.
            device: of the result.
            of_samples: the dim that counts samples; the others are cut as activations are at this
                place. None: all samples and all ranks have the same numbers.
            part: which of several such tensors of one call.
        """
        if of_samples is None:
            places = _whole(shape, device)
        else:
            others = (n for dim, n in enumerate(shape) if dim != of_samples)
            spread = any(n > 1 for n in others)  # one number per sample is one on all ranks
            sharded = self.sharded_dim(shape) if spread else None
            places = self._places(shape, sharded, device, of_samples)
        words = self._words(places, site + _to_signed(part * _NEXT_PART), device)
        # the low bits: the shifts above fill with the sign, and leave the highest bit 0
        return words.bitwise_and_(2**53 - 1).double() * 2.0**-53

    def dropout(self, x: Tensor, p: float, site: Tensor) -> Tensor:
        """`torch.nn.functional.dropout` in training, with the mask of this site."""
        if p >= 1.0:
            return x * 0.0
        keep = self.keep(x.shape, p, site, x.device)
        return x * keep.to(x.dtype).mul_(1.0 / (1.0 - p))


def _whole(shape: torch.Size, device: torch.device) -> list[tuple[Tensor, int]]:
    """The places of a tensor that is the same on all ranks."""
    return [(torch.arange(n, device=device), n) for n in shape]
