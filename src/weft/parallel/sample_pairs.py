"""Which tensors of a model's output compare samples with one another, as CLIP's logits of all
images by all texts: a rank's are of its own samples alone."""

from __future__ import annotations

from torch import Tensor

from weft._torch.tensors import fake_mode
from weft._torch.trees import tree_flatten

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def outputs_of_pairs(request: PlanRequest) -> frozenset[int]:
    """Their places among the leaves of the output. Two runs on tensors without elements, one of
    them with twice the samples, tell: more than one dim grows. Without a sample, or where the
    forward does not run so, none is known."""
    if not request.sample:
        return frozenset()
    mode, found = fake_mode(), []
    try:
        bare = copy_without_elements(request.model, mode)
        for asked in (request, request.with_twice_the_samples()):
            with without_elements(mode):
                output = bare(**asked.arguments())
            found.append(tree_flatten(output)[0])
        both = list(zip(*found, strict=True))
    except Exception:  # the trial before the first step says what does not run
        return frozenset()
    return frozenset(place for place, (one, two) in enumerate(both) if _pairs(one, two))


def _pairs(one: object, two: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)) or one.ndim != two.ndim:
        return False
    return sum(a != b for a, b in zip(one.shape, two.shape, strict=True)) > 1
