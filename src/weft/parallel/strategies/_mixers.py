"""Modules that compute on whole sequences where an axis divides them."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core import Step

from ._request import StepsRequest


def mixer_steps(request: StepsRequest) -> Iterator[Step]:
    """A Step on each. The gradients of its weights are partial sums, as those of all others are."""
    for name in request.roles.mixers:
        yield Step(name, "context", whole_sequence=True)
