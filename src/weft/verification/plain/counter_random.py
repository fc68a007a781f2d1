"""Random numbers that follow from a counter (Salmon et al. 2011), by their definition in integers:
which bits an element gets of its seed, step, place in the program, call, sample and place in the
sample. So a run that another version of weft goes on with draws the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
CALL, PART = 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7  # between two calls, and two tensors of one
ALL = 2**64 - 1


def key_of(*words: int) -> int:
    """63 bits of some integers (splitmix64, Steele et al. 2014)."""
    state = 0
    for word in words:
        state = state + word + GOLDEN & ALL
        state = (state ^ state >> 30) * FIRST & ALL
        state = (state ^ state >> 27) * SECOND & ALL
        state ^= state >> 31
    return state >> 1


def place_of_module(name: str, before: int) -> int:
    """The place in the program of a module that was called so many times before."""
    place = zlib.crc32(name.encode())
    return key_of(place, before) if before else place


def key_of_call(seed: int, step: int, place: int, call: int, part: int = 0) -> int:
    """That of the `call`-th draw at a place, the first of which is 1, as an int64."""
    return _signed(key_of(seed, step, place) + call * CALL + part * PART)


def bits_of(key: int, coordinates: Sequence[int], shape: Sequence[int]) -> int:
    """Those of an element, as an int64. `coordinates`: of its sample, and in it; `shape`: of the
    tensor, the first dim of which counts samples."""
    number = 0
    for at, length in zip(coordinates, shape, strict=True):
        number = number * length + at
    word = _signed(number + key)
    for factor, shift in ((GOLDEN, 30), (FIRST, 27), (SECOND, 31)):
        word = _signed(word * factor)
        word ^= word >> shift
    return word


def _signed(word: int) -> int:
    word &= ALL
    return word - 2**64 if word >= 2**63 else word
