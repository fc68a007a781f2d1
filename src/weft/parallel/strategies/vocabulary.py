"""Vocabulary parallel over `vp`: the rows of the embedding and of the head lie on ranks, which all
compute the blocks alike.

The embedding and the head of a model with a large vocabulary and small blocks are most of its
memory (Megatron-LM, Shoeybi et al. 2019, without the cut of blocks). `tp` cuts the vocabulary too,
so one layout has one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core import AxisTraits, Divides, NothingToDivide, Step

from ._request import StepsRequest
from ._vocabulary import vocabulary_steps

AXIS = "vp"
TRAITS = AxisTraits(frozenset({Divides.VOCABULARY}), order=6, within_node=True, searched=False)
OPTIONS: Mapping[str, str] = {}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step for each embedding and head."""
    if not request.roles.embeddings and not request.roles.heads:
        problem = "vocabulary parallelism finds no embedding and no head in this model"
        fix = '{others}, or declare [roles] such as "embed" = "embedding"'
        raise NothingToDivide("layout", str(request.layout), problem, fix)
    yield from vocabulary_steps(request, AXIS, "vocabulary")
