"""The definition of a plan's codec for one bucket, with what the definition takes as data: the
codec's options, and the roundings that it draws at random, which are held to laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core import Codec, ConfigError, MessageCodec, ReplicaView
from weft.engine import Optimizers

from .difference import SGD_LR, Bounds
from .plain.codecs import DEFINED, Noise, PlainCodec, plain_codec
from .plain.draw_laws import DrawLaws

Shapes = Sequence[tuple[int, ...]]

EXACT = 'verify with codec = "identity", which leaves the codec out'
FLOAT32 = 2.0**-22  # two roundings of a number in a message, where the sides round to neighbours
HALVES = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # one rounding of a codec that rounds sums, too


class DefinedCodec:
    """One bucket of tensors of these shapes, exchanged by the replicas that `view` sees. `laws`:
    hold what is drawn for all buckets together, by the `name` of each."""

    def __init__(self, codec: Codec, shapes: Shapes, view: ReplicaView, laws: DrawLaws, name: str):
        self._codec, self._view = codec, view
        self._states = [codec.state([], torch.zeros(0)) for _ in range(view.size)]
        self._calls = [0] * view.size
        self._laws, self._name = laws, name
        options = options_of(codec)
        args = options, shapes, view.size, view.sharded, self._noise, view.bucket
        self.plain: PlainCodec = plain_codec(*args)

    def _noise(self, rank: int) -> Noise | None:
        codec, view = self._codec, self._view
        if not (isinstance(codec, MessageCodec) and codec.draws):
            return None
        own = replace(view, index=rank)
        generator = codec.generator(self._states[rank], own, torch.device("cpu"))
        self._calls[rank] += 1
        return partial(self._uniform, generator, rank, self._calls[rank])

    def _uniform(
        self, generator: torch.Generator | None, rank: int, call: int, shape: tuple[int, ...]
    ) -> Tensor:
        found = torch.rand(shape, generator=generator)
        name = f"the rounding of {self._codec.name} by replica {rank}, of the bucket {self._name},"
        below, eps = partial(torch.clamp, min=0.0, max=1.0), torch.finfo(found.dtype).eps
        self._laws.numbers(found, below, eps, call, name)
        return found


def same(x: Tensor) -> Tensor:
    """What is encoded, as it is."""
    return x


def options_of(codec: Codec) -> dict[str, Any]:
    """The options of a codec, and its name. Raises ConfigError for one without a definition."""
    if codec.name not in DEFINED:
        problem = "has no sequential definition that verify can compare it with"
        fix = 'verify with codec = "identity", or define it in weft/verification/plain/codecs.py'
        raise ConfigError("sync.codec", codec.name, problem, fix)
    found = {field.name: getattr(codec, field.name) for field in fields(codec)}  # type: ignore[arg-type]
    return {**found, "name": codec.name}


def rounding_optimizer(codec: Codec, ranks: int) -> Optimizers | None:
    """SGD, where sums are rounded on the way, so that the order of more than two changes them: it
    makes no whole step of the sign of a gradient near zero. None: any optimizer will do."""
    if codec.name in HALVES and ranks > 2:
        return partial(torch.optim.SGD, lr=SGD_LR)
    return None


def codec_bounds(codec: Codec, ranks: int) -> Bounds:
    """What counts as equal. Messages of float32 numbers may round to a neighbour."""
    if rounding_optimizer(codec, ranks) is not None:
        error = HALVES[codec.name] * (ranks - 1)
        return Bounds(error / 4, 4 * error, error / 4, Bounds.activation, small=0.1, typical=1.0)
    if codec.name in (*HALVES, "identity", "powersgd"):
        return Bounds()
    return Bounds(FLOAT32, FLOAT32, FLOAT32, Bounds.activation)


def describe_codec(codec: Codec) -> str:
    """The codec with its options, as a report names it."""
    if codec.name == "identity":
        return codec.name
    known = {name: value for name, value in options_of(codec).items() if name != "name"}
    return f"{codec.name} ({', '.join(f'{name} {value}' for name, value in known.items())})"
