"""Batch norms that a forward gives some of the samples at a time, as ghost batch norm does: ranks
that divide the batch would normalize others together than one device does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode, fake_mode, make_fake
from weft.core import ConfigError, UnsupportedModel
from weft.nn import model_arguments, named_inputs

from .axes import DATA_AXES
from .direct_forward import call_forwards_with_hooks
from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements

Calls = dict[str, list[int]]  # norm -> rows of each of its calls


def check_norm_calls(request: PlanRequest, norms: Sequence[str]) -> None:
    """Refuse norms whose statistics are of other samples on ranks that divide them.

    Raises:
        Refusal: a norm is given a part of a microbatch.
    """
    ranks = request.layout.size(*DATA_AXES)
    if ranks == 1 or not norms or request.sample is None:
        return
    samples = request.batch // request.accumulate
    found = _given_a_part(request, norms, samples)
    if found is None:
        return
    name, calls = found
    fits = (
        n
        for n in range(samples // ranks, 0, -1)
        if samples % (n * ranks) == 0 and _given_a_part(request, norms, n * ranks) is None
    )
    problem = (
        f"{name} normalizes the {samples} samples of a microbatch in {calls} parts, and ranks of"
        f" {request.layout} would not have the same parts"
    )
    fewer = next(fits, None)
    if fewer is not None:
        times = request.batch // (fewer * ranks)
        fix = f"set it to {times}, where {name} normalizes a microbatch at once"
        raise ConfigError("accumulate", request.accumulate, problem, fix)
    data = ".".join(request.layout.active_axes(*DATA_AXES))
    raise UnsupportedModel(
        "layout", str(request.layout), problem, f"leave {data} out of the layout"
    )


def _given_a_part(
    request: PlanRequest, norms: Sequence[str], samples: int
) -> tuple[str, int] | None:
    """The first norm that is not given all of so many samples in each call, and how often it is
    called; None if there is none, or if that cannot be said."""
    called = _calls(request, norms, samples)
    if called is None or all(len(each) == 1 for each in called.values()):
        return None
    prime = next(n for n in count(max(samples, 3)) if all(n % d for d in range(2, n)))
    other, fewer = (_calls(request, norms, n) for n in (prime, samples // 2))
    if other is None or fewer is None:
        return None
    for name, rows in called.items():
        again = len(fewer.get(name, ())) != len(rows)
        if again or any(n % prime for n in other.get(name, ())):
            return name, len(rows)
    return None


def _calls(request: PlanRequest, norms: Sequence[str], samples: int) -> Calls | None:
    """Of a forward of so many samples without elements; None if it does not run so."""
    mode, found = fake_mode(), defaultdict[str, list[int]](list)

    def see(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        found[name].append(args[0].numel() // args[0].shape[1])

    names = request.inputs if request.inputs is not None else named_inputs(request.model)
    try:
        model = copy_without_elements(request.model, mode).train()
        call_forwards_with_hooks(model)
        for name in norms:
            norm = model.get_submodule(name).eval()  # in training it refuses one row
            norm.register_forward_pre_hook(partial(see, name))
        batch = {k: _of(mode, t, samples) for k, t in (request.sample or {}).items()}
        with without_elements(mode):
            model(**model_arguments(names, batch))
    except Exception:  # what does not run is said where it runs
        return None
    return found


def _of(mode: FakeTensorMode, entry: Tensor, samples: int) -> Tensor:
    """An entry of a batch of so many samples, without elements where it holds no integers."""
    if not entry.ndim:
        return entry
    if not entry.is_floating_point():
        return entry[torch.arange(samples, device=entry.device) % len(entry)]
    empty = torch.empty((samples, *entry.shape[1:]), dtype=entry.dtype, device="meta")
    return make_fake(mode, empty, torch.device("cpu"))
