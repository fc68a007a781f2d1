"""torch's functions in the one-device reference: dropout with the masks that the layout has too,
and attention and what a gate asks of all tokens by their definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.autograd import rerun_by
from weft.engine import BACKWARDS, OPENED_FUNCTIONS, eager_attention_by
from weft.nn import (
    DRAWS,
    Draws,
    EagerAttention,
    Randomness,
    RepeatedDraws,
    causal_mask,
    expert_shares,
    place_kept,
    with_loss,
    within_capacity,
)
from weft.parallel import rerun_dropout

from .attention import attend, mask_of_documents
from .counter_random import key_of_call
from .distributions import distribution_of
from .draw_laws import DrawLaws
from .experts import choices_with_room, shares_of_choices

_OF_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d}
_DROPOUTS = {F.dropout, torch.dropout, F.alpha_dropout, *_OF_CHANNELS}


class PlainFunctions(TorchFunctionMode):
    """Functions of the reference's forward.

    Args:
        randomness: draws the masks and numbers that the layout has too.
        laws: which these are held to.
        seen: is told of every call of attention: query, key, value.
        asked: is told what is asked of all tokens: shares of so many experts, the capacity for so
            many choices, so many positions that the model has made, and are not `known`.
        known: positions that follow from the batch.
        repeated: what backward is to draw again.
    """

    def __init__(
        self,
        randomness: Randomness,
        laws: DrawLaws,
        seen: Callable[..., None] | None = None,
        asked: Callable[[str, int], None] | None = None,
        known: Sequence[Tensor] = (),
        repeated: RepeatedDraws | None = None,
    ):
        super().__init__()
        self.randomness, self.laws, self.known = randomness, laws, known
        self.seen, self.asked = seen or (lambda *tensors: None), asked or (lambda *what: None)
        self.added: list[Tensor] = []  # losses of gates, to be added to what is minimised
        self._calls = 0
        self._draws = Counter[int]()  # of this microbatch, by place in the program
        self._repeated = RepeatedDraws() if repeated is None else repeated
        self._again = False  # whether what is drawn is a repetition

    @contextmanager
    def active(self) -> Iterator[PlainFunctions]:
        """In this context, also where a model attends by itself through transformers' interface."""
        with eager_attention_by(self._eager), self:
            yield self

    @contextmanager
    def backward(self) -> Iterator[None]:
        """In this context a backward draws again what forwards have drawn."""
        told = self.seen, self.asked, self.added
        self.seen, self.asked, self.added = lambda *_: None, lambda *_: None, []
        try:
            with self if self._repeated else nullcontext():
                yield
        finally:
            self.seen, self.asked, self.added = told

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func in DRAWS:
            return self._numbers(func, args, kwargs)
        if func in BACKWARDS:
            with self, place_kept(self.randomness):
                return BACKWARDS[func](*args, **kwargs)
        if func in OPENED_FUNCTIONS:  # torch calls dropout and attention inside, with modes off
            with self:
                return OPENED_FUNCTIONS[func](*args, **kwargs)
        if func is causal_mask:
            if not any(_same(args[0], known) for known in self.known):
                self.asked("positions", args[0][0].numel())
            return mask_of_documents(*args)
        if func is expert_shares:
            self.asked("shares", args[1])
            return shares_of_choices(*args)
        if func is within_capacity:
            self.asked("capacity", args[0][0].numel())
            return choices_with_room(*args)
        if func is with_loss:
            self.added.append(args[1])
            return args[0].view_as(args[0])
        return func(*args, **kwargs)

    def _eager(
        self,
        function: EagerAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        self.seen(query, key, value, True)
        return function(module, query, key, value, *args, **options)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.seen(query, key, value)
        if dropout_p == 0.0:
            torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
            return torchs(
                query,
                key,
                value,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        site = self._site(dropout_p)
        return attend(
            query,
            key,
            value,
            attn_mask,
            is_causal,
            scale,
            lambda weights: self._dropped(weights, dropout_p, site),
        )

    def _dropout(
        self,
        func: Callable,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        if not (training if train is None else train) or p == 0.0:
            return input
        site = self._site(p)
        if func is F.alpha_dropout:
            found = self._alpha(input, p, site)
        elif func in _OF_CHANNELS and input.ndim > 2:
            channels = self._dropped(input.new_ones(input.shape[:2]), p, site)
            found = input * channels[(..., *[None] * (input.ndim - 2))]
        else:
            found = self._dropped(input, p, site)
        return input.copy_(found) if inplace else found

    def _site(self, what: object) -> Tensor:
        """The key of this call."""
        repeated = self._repeated.repeat(what, self.randomness)
        self._again = repeated is not None
        if repeated is not None:
            return repeated
        if not torch.is_grad_enabled() and (rerun := rerun_by()):
            raise rerun_dropout(what, rerun)
        place, site = self.randomness.place, self.randomness.site()
        self._draws[place] += 1
        self.laws.key(int(site), self._key(place), str(what))
        self._repeated.keep(site, self.randomness)
        return site

    def _key(self, place: int, part: int = 0) -> int:
        """That of the last call at this place."""
        at = self.randomness.seed, self.randomness.step, place, self._draws[place]
        return key_of_call(*at, part)

    def _dropped(self, x: Tensor, p: float, site: Tensor) -> Tensor:
        """Srivastava et al. 2014, with what is kept divided by its probability."""
        if p == 1.0:
            return torch.zeros_like(x) * x
        return torch.where(self._keep(x.shape, p, site, x.device), x / (1.0 - p), 0.0 * x)

    def _alpha(self, x: Tensor, p: float, site: Tensor) -> Tensor:
        """Dropped elements get SELU's lowest value, then all get their mean and variance again
        (Klambauer et al. 2017)."""
        lowest = -1.6732632423543772848 * 1.0507009873554804934
        q = 1.0 - p
        factor = 1.0 / math.sqrt(q + lowest * lowest * q * p)
        kept = torch.where(self._keep(x.shape, p, site, x.device), x, lowest)
        return factor * kept - factor * p * lowest

    def _keep(self, shape: torch.Size, p: float, site: Tensor, device: torch.device) -> Tensor:
        keep = self.randomness.keep(shape, p, site, device)
        if self._again:
            return keep
        shared, samples = self.randomness.all_share(shape), len(self.randomness.samples)
        dim = None if shared else self.randomness.sample_dim(shape)
        if dim is not None and (not shape or shape[dim] != samples):
            dim = None  # samples and positions are in one dim, or nothing is a sample's
        name = self._name(shared)
        self.laws.mask(keep, p, self.randomness.step, name, dim)
        if dim == 0:
            key, rows = self._key(self.randomness.place), self.randomness.samples.tolist()
            self.laws.mask_bits(keep, p, key, rows, name)
        return keep

    def _numbers(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        site, part = self._site(func.__name__), count()
        dims = set[int | None]()

        def uniform(shape: torch.Size, device: torch.device, alike: bool) -> Tensor:
            dim = self.randomness.drawn_dim(shape, alike)
            dims.add(dim)
            return self.randomness.uniform(shape, site, device, dim, next(part))

        found = DRAWS[func](Draws(uniform), *args, **kwargs)
        if self._again:
            return found
        name = f"torch.{func.__name__} {self._name(dims == {None})}"
        match distribution_of(func, found, args, kwargs):
            case values, below:
                rounding = torch.finfo(found.dtype).eps
                self.laws.numbers(values, below, rounding, self.randomness.step, name)
            case values, mean, deviation:
                self.laws.whole_numbers(values, mean, deviation, name)
        return found

    def _name(self, shared: bool) -> str:
        """Of a call. What all samples share is the same in each microbatch."""
        self._calls += 1
        if shared:
            return f"{self._calls} of all samples"
        first = int(self.randomness.samples[0]) if len(self.randomness.samples) else 0
        return f"{self._calls} of the microbatch from sample {first}"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
