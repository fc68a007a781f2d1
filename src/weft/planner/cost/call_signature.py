"""Whether two calls of blocks do the same work, so that one need not run."""

from __future__ import annotations

import re
from collections.abc import Hashable

from torch import nn

from weft.pipeline import PLAIN_TYPES, other_leaves, tensors_in

_COUNTED = re.compile(
    "layer|index|idx"
)  # in the names of attributes that say which block of all it is


def call_signature(module: nn.Module, args: tuple, kwargs: dict) -> Hashable | None:
    """What is the same of two calls only where they do the same work; None where that cannot be
    told."""
    given = other_leaves((args, kwargs))
    if not all(isinstance(part, PLAIN_TYPES) for part in given):
        return None
    inner = tuple(
        (
            n,
            type(m),
            m.training,
            str(
                {
                    k: v
                    for k, v in vars(m).items()
                    if isinstance(v, PLAIN_TYPES) and not _COUNTED.search(k)
                }
            ),
            tuple(
                (leaf, p.shape, p.dtype, p.requires_grad)
                for leaf, p in m.named_parameters(recurse=False)
            ),
        )
        for n, m in module.named_modules()
    )
    return (
        inner,
        str(given),
        tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in((args, kwargs))),
    )
