"""Codecs by their papers' definitions, for all ranks on one device: what each rank sends decodes
to, what it keeps, and the sum that all get.

Nothing here is packed into bytes or sent. Messages are made of float32 numbers, so what is encoded
is rounded to these first. The roundings that a codec draws are given to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

Shapes = Sequence[tuple[int, ...]]
NOISE = 1e-12  # relative to what is beside it, rounding in float64 alone
Noise = Callable[[tuple[int, ...]], Tensor]  # uniform numbers from 0 to 1, of this shape


class PlainCodec(ABC):
    """What one bucket's ranks exchange, call after call."""

    def __init__(self, options: Mapping[str, Any], ranks: int):
        """`options`: those of the codec, by name."""
        self.options, self.ranks = options, ranks
        self.kept: list[Tensor | float] = [0.0] * ranks  # what messages of each left out
        self.undecided = 0  # numbers that are rounding alone, of whose code no definition tells

    @property
    def feedback(self) -> bool:
        return bool(self.options["feedback"])

    def with_kept(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """What each rank encodes: error feedback adds what its last messages left out (Seide et al.
        2014)."""
        pairs = zip(xs, self.kept, strict=True)
        return [x + kept if self.feedback else x for x, kept in pairs]

    @abstractmethod
    def total(self, xs: Sequence[Tensor], scale: float | None) -> Tensor:
        """The sum of each rank's x [n], as the codec tells it. `scale`: times this, an x is a part
        of the mean; None: not known yet."""

    def scattered(self, xs: Sequence[Tensor]) -> Tensor:
        """The same of x [ranks, n], whose row i is for rank i, which sums what comes."""
        # weft.sync refuses such a codec under fsdp before any process starts
        raise NotImplementedError(f"{self.options['name']} has no reduce-scatter")


class SixteenBits(PlainCodec):
    """Each element is rounded to 16 bits, and so is each sum on the way."""

    def __init__(self, options: Mapping[str, Any], ranks: int):
        super().__init__(options, ranks)
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options["name"]]

    def total(self, xs: Sequence[Tensor], scale: float | None) -> Tensor:
        xs = self.with_kept(xs)
        sent = [x.to(self.dtype) for x in xs]
        self.kept = [x - each.to(x.dtype) for x, each in zip(xs, sent, strict=True)]
        total = sent[0]
        for each in sent[1:]:
            total = (total.double() + each.double()).to(self.dtype)
        return total.to(xs[0].dtype)

    def scattered(self, xs: Sequence[Tensor]) -> Tensor:
        return self.total(xs, None)


class Messages(PlainCodec):
    """A codec whose messages are decoded before they are added.

    Two ranks, or a server, add whole messages. More ranks without a server divide x into parts of
    whole blocks: each rank adds what comes for its part, and sends the sum encoded again. What that
    leaves out, the rank of the part keeps.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        ranks: int,
        in_parts: bool,
        noise: Callable[[int], Noise | None],
    ):
        """`noise(rank)`: where the draws of its next message come from."""
        super().__init__(options, ranks)
        self.in_parts, self.noise = in_parts and ranks > 2, noise

    @property
    def block(self) -> int:
        return int(self.options["size"])

    @abstractmethod
    def coded(self, x: Tensor, noise: Noise | None) -> Tensor:
        """What the message of x [n] decodes to."""

    def total(self, xs: Sequence[Tensor], scale: float | None) -> Tensor:
        xs, noise = self.with_kept(xs), [self.noise(rank) for rank in range(self.ranks)]
        if self.in_parts:
            return self._total_of_parts(xs, noise)
        sent = [self.coded(x, draw) for x, draw in zip(xs, noise, strict=True)]
        self.kept = [x - each for x, each in zip(xs, sent, strict=True)]
        return sum(sent[1:], sent[0])

    def _total_of_parts(self, xs: Sequence[Tensor], noise: Sequence[Noise | None]) -> Tensor:
        n = xs[0].numel()
        part = -(-n // self.ranks // self.block) * self.block
        rows = [torch.cat([x, x.new_zeros(self.ranks * part - n)]) for x in xs]
        sent = [self.coded(x, draw) for x, draw in zip(rows, noise, strict=True)]
        left = [(x - each).view(self.ranks, part) for x, each in zip(rows, sent, strict=True)]
        sums = sum(sent[1:], sent[0]).view(self.ranks, part)
        again = torch.stack([self.coded(s, draw) for s, draw in zip(sums, noise, strict=True)])
        for rank in range(self.ranks):
            left[rank][rank] += sums[rank] - again[rank]
        self.kept = [each.flatten()[:n] for each in left]
        return again.flatten()[:n]

    def scattered(self, xs: Sequence[Tensor]) -> Tensor:
        xs, noise = self.with_kept(xs), [self.noise(rank) for rank in range(self.ranks)]
        n = xs[0].shape[1]
        short = -n % self.block  # every row is whole blocks
        rows = [torch.cat([x, x.new_zeros(self.ranks, short)], 1) for x in xs]
        sent = [
            self.coded(x.flatten(), draw).view_as(x)[:, :n]
            for x, draw in zip(rows, noise, strict=True)
        ]
        self.kept = [x - each for x, each in zip(xs, sent, strict=True)]
        return sum(sent[1:], sent[0])

    def blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x [blocks, elements of a block] in float32, with zeros at its end; how many elements of
        each block are x's)."""
        short = -x.numel() % self.block
        found = torch.cat([x, x.new_zeros(short)]).view(-1, self.block).float()
        counts = torch.full((len(found),), float(self.block))
        if short:
            counts[-1] -= short
        return found, counts


class Quantized(Messages):
    """A block's largest magnitude is `top` steps; each element is a whole number of steps: the
    nearest one, or at random one of the two beside it, which is right in the mean (Alistarh et al.
    2017)."""

    def coded(self, x: Tensor, noise: Noise | None) -> Tensor:
        blocks, _ = self.blocks(x)
        top = 2 ** (int(self.options["bits"]) - 1) - 1
        step = blocks.abs().amax(1, keepdim=True) / top
        steps = torch.where(step > 0, blocks / step, 0.0)
        if self.options["stochastic"]:
            assert noise is not None
            steps = (steps + noise(tuple(steps.shape))).floor()
        else:
            steps = steps.round()
        values = steps.clamp(-top, top).to(x.dtype) * step.to(x.dtype)
        return values.flatten()[: x.numel()]


class Signs(Messages):
    """The sign of each element, times its block's mean magnitude (Karimireddy et al. 2019)."""

    def coded(self, x: Tensor, noise: Noise | None) -> Tensor:
        blocks, counts = self.blocks(x)
        mean = torch.linalg.vector_norm(blocks, 1, dim=1) / counts
        self.undecided += int(((blocks != 0) & (blocks.abs() < NOISE * mean[:, None])).sum())
        signs = torch.where(blocks < 0, -1.0, 1.0).to(x.dtype)
        return (signs * mean.to(x.dtype)[:, None]).flatten()[: x.numel()]


class Largest(Messages):
    """The largest elements; the others are zero (Aji & Heafield 2017)."""

    def coded(self, x: Tensor, noise: Noise | None) -> Tensor:
        sent = torch.zeros_like(x)
        places = largest(x, float(self.options["density"]))
        sent[places] = x[places].float().to(x.dtype)
        return sent


def largest(x: Tensor, density: float) -> Tensor:
    """The places of this part of the elements of x [n], one at least, that are largest."""
    count = min(x.numel(), max(1, round(density * x.numel())))
    return x.abs().argsort(descending=True, stable=True)[:count]


class DeepGradient(PlainCodec):
    """Deep Gradient Compression (Lin et al. 2018): u = m u + g; v = v + u; the largest of v are
    sent, where u and v become zero. A rank's part of the mean is clipped before, to `clip` /
    sqrt(ranks). In the first `warmup` calls the density falls exponentially from 1/4."""

    def __init__(self, options: Mapping[str, Any], ranks: int):
        super().__init__(options, ranks)
        self.speed: list[Tensor | float] = [0.0] * ranks
        self.calls = 0

    def total(self, xs: Sequence[Tensor], scale: float | None) -> Tensor:
        density, clip = float(self.options["density"]), self.options["clip"]
        warmup = int(self.options["warmup"])
        if self.calls < warmup:
            density = max(density, 0.25 * (density / 0.25) ** (self.calls / warmup))
        self.calls += 1
        total = torch.zeros_like(xs[0])
        for rank, x in enumerate(xs):
            size = float(x.norm()) * scale if scale is not None else 0.0
            if clip is not None and size > 0:
                x = x * min(1.0, clip / sqrt(self.ranks) / size)
            u = float(self.options["momentum"]) * self.speed[rank] + x
            v = self.kept[rank] + u
            places = largest(v, density)
            sent = torch.zeros_like(v)
            sent[places] = v[places].float().to(v.dtype)
            u[places] = 0.0
            self.speed[rank], self.kept[rank] = u, v - sent
            total = total + sent
        return total


class LowRank(PlainCodec):
    """PowerSGD (Vogels et al. 2019): of each tensor as a matrix M [dim 0, others], P = sum of M Q,
    made orthonormal; Q = sum of M^T P; all get P Q^T, and the next call begins with Q. A rank keeps
    what of its own M is not in the span of P. Vectors, and matrices that P and Q together would not
    be smaller than, are added as they are."""

    def __init__(self, options: Mapping[str, Any], ranks: int, shapes: Shapes, bucket: str):
        """`bucket`: its name, which tells its first Qs from those of others."""
        super().__init__(options, ranks)
        self.shapes, self.rank = shapes, int(options["rank"])
        sizes = [
            (prod(shape[1:]), min(self.rank, shape[0], prod(shape[1:])))
            if self._thin(shape)
            else ()
            for shape in shapes
        ]
        lengths = [prod(size) if size else 0 for size in sizes]
        drawn = _normal(sum(lengths), bucket).split(lengths)
        self.right = [
            part.view(size) if size else None for part, size in zip(drawn, sizes, strict=True)
        ]

    def _thin(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and self.rank * (shape[0] + prod(shape[1:])) < prod(shape)

    def total(self, xs: Sequence[Tensor], scale: float | None) -> Tensor:
        xs, sizes = self.with_kept(xs), [prod(shape) for shape in self.shapes]
        found, kept = [], [list[Tensor]() for _ in xs]
        for i, parts in enumerate(zip(*(x.split(sizes) for x in xs), strict=True)):
            right = self.right[i]
            if right is None:
                found.append(sum(parts[1:], parts[0]))
                for each, part in zip(kept, parts, strict=True):
                    each.append(torch.zeros_like(part))
                continue
            matrices = [part.view(self.shapes[i][0], -1) for part in parts]
            left = orthonormal(product := sum(m @ right for m in matrices))
            self.undecided += noisy_columns(product, left)
            rights = [m.T @ left for m in matrices]
            self.right[i] = total = sum(rights[1:], rights[0])
            found.append((left @ total.T).flatten())
            for each, m, own in zip(kept, matrices, rights, strict=True):
                each.append((m - left @ own.T).flatten())
        self.kept = [torch.cat(each) for each in kept]
        return torch.cat(found)


def _normal(n: int, bucket: str) -> Tensor:
    """So many numbers of the standard normal distribution, by torch's generator, whose seed is the
    first 32 bits of the BLAKE2b digest (of 4 bytes) of a bucket's name."""
    digest = blake2b(bucket.encode(), digest_size=4).hexdigest()
    generator = torch.Generator().manual_seed(int(digest, 16))
    return torch.empty(n, dtype=torch.float64).normal_(generator=generator)


def orthonormal(x: Any) -> Tensor:
    """Columns that span what those of x do, each made orthogonal to those before (twice: once
    leaves rounding)."""
    columns: list[Tensor] = []
    for column in x.T:
        for before in (*columns, *columns):
            column = column - before * (before @ column)
        size = column.norm()
        columns.append(column / size if size > 0 else column)
    return torch.stack(columns, 1)


def noisy_columns(x: Any, columns: Tensor) -> int:
    """How many of these columns, which span what those of x do, have the direction of rounding."""
    found = (columns.T @ x).diagonal().abs()  # what each has that those before have not
    return int(((found > 0) & (found < NOISE * x.norm())).sum())


_MESSAGES: dict[str, type[Messages]] = {
    "int8": Quantized,
    "int4": Quantized,
    "sign": Signs,
    "topk": Largest,
}
DEFINED = frozenset({"bf16", "fp16", "dgc", "powersgd", *_MESSAGES})


def plain_codec(
    options: Mapping[str, Any],
    shapes: Shapes,
    ranks: int,
    in_parts: bool,
    noise: Callable[[int], Noise | None],
    bucket: str,
) -> PlainCodec:
    """The definition of a codec, for one bucket.

    Args:
        options: the codec's, its name among them.
        shapes: of the tensors that lie one after the other in the bucket.
        ranks: how many exchange it.
        in_parts: whether ranks add a part each, where there is no server.
        noise: of a rank: where the draws of its next message come from.
        bucket: its name.
    """
    name = options["name"]
    if name in _MESSAGES:
        return _MESSAGES[name](options, ranks, in_parts and name != "topk", noise)
    if name in ("bf16", "fp16"):
        return SixteenBits(options, ranks)
    if name == "dgc":
        return DeepGradient(options, ranks)
    return LowRank(options, ranks, shapes, bucket)
