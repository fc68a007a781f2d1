"""The torch functions that weft overrides inside a user's forward: dropout and other draws of
random numbers, and attention under recomputation or context parallelism.

They are ordinary calls of `torch.nn.functional`, so a TorchFunctionMode sees them in any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from weft._torch.autograd import in_backward
from weft._torch.modes import without_function_modes
from weft.core import (
    UnsupportedModel,
)
from weft.nn import (
    DRAWS,
    DRAWS_INSIDE,
    DROPOUTS,
    AddLoss,
    EagerAttention,
    Randomness,
    RepeatedDraws,
    batch_sums,
    causal_mask,
    count_choices,
    expert_shares,
    place_kept,
    rerun_of_model,
    with_loss,
    within_capacity,
)
from weft.parallel import (
    FEATURE_AXES,
    TOKEN_AXES,
    Mesh,
    all_gather,
    rerun_attention,
    split_dim,
)

from .context_parallel.attention_alone import (
    attend_alone,
    attended_alone,
    attends_alone,
    drawn_in,
)
from .context_parallel.batch_statistics import of_all_ranks
from .context_parallel.counts_by_size import CountsBySize
from .context_parallel.eager_attention import attend_eagerly
from .context_parallel.known_sequences import KnownSequences
from .context_parallel.sequence import ContextParallel
from .context_parallel.transformers_interfaces import eager_attention_by, mask_rules
from .context_parallel.whole_marks import (
    dims_of_positions,
    is_fixed,
    is_marked,
    set_whole_shape,
    whole_of,
    whole_shape,
)
from .drawn_numbers import DrawnNumbers
from .expert_load import ExpertLoad


def _opened(function: Any) -> Callable[..., Any]:
    """The same code, which does not hand itself over: torch's own function calls dropout, attention
    and draws with modes off."""
    stays = {
        name: lambda *tensors: False
        for name in function.__globals__
        if name.startswith("has_torch_function")
    }
    return FunctionType(
        function.__code__, {**function.__globals__, **stays}, argdefs=function.__defaults__
    )


OPENED_FUNCTIONS = {each: _opened(each) for each in (F.multi_head_attention_forward, *DRAWS_INSIDE)}
# they compute functions under torch.utils.checkpoint again
BACKWARDS = {
    each: _opened(each) for each in (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
}


class FunctionOverrides(TorchFunctionMode):
    """Active around forward. `attended`: whether attention has been called. `sequence`:
    which ranks share. `seen`, `asked`: told of every call of attention, and of what is asked of all
    tokens: shares of so many experts, the capacity for so many choices, so many positions that the
    model has made, and are not `known` from the batch. `loads`: told of every loss that a gate
    adds. `mesh`: whose ranks have other tokens. `repeated`: what backward is to draw again; None:
    it runs without this mode. `parted`: whether a forward has not all samples of the batch."""

    def __init__(
        self,
        randomness: Randomness,
        selective: bool,
        sequence: ContextParallel | None = None,
        seen: Callable[..., None] | None = None,
        mesh: Mesh | None = None,
        asked: Callable[[str, int], None] | None = None,
        loads: ExpertLoad | None = None,
        known: Sequence[Tensor] = (),
        repeated: RepeatedDraws | None = None,
        parted: bool = False,
    ):
        super().__init__()
        self.randomness, self.selective, self.attended = randomness, selective, False
        self.repeated = repeated
        self._drawn = DrawnNumbers(randomness, mesh, loads, repeated, parted)
        self.sequence, self.mesh, self.known = sequence, mesh, known
        self.seen, self.asked, self.loads = seen, asked, loads
        self.scale = 1.0  # of the loss that backward starts from
        self.routed = False  # whether experts have asked
        self._entered: list[ExitStack] = []

    def __enter__(self) -> FunctionOverrides:
        stack = ExitStack()
        if self._shared():
            assert self.sequence is not None
            stack.enter_context(mask_rules(self.sequence))
        if self.seen is not None or self._shared():
            stack.enter_context(eager_attention_by(self._eager_attention))
        self._entered.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()
        if error[0] is not None and self.sequence is not None:
            self.sequence.forwards.forget()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(args, kwargs)
        if func is causal_mask:
            whole = whole_of(args[0]) or any(_same(args[0], x) for x in self.known)
            if self.asked is not None and not whole:
                self.asked("positions", args[0][0].numel())
            if self._shared():
                assert self.sequence is not None
                return self.sequence.mask(*args)
        if func is expert_shares:
            return self._shares(*args)
        if func is within_capacity:
            return self._within_capacity(*args)
        if func is with_loss:
            self.routed = True
            compiled = torch.compiler.is_compiling()
            again = self.randomness.repeated if compiled else in_backward()
            if self.loads is not None and torch.is_grad_enabled() and not again:
                self.loads.add(args[1])
            return AddLoss.apply(*args, self.scale)
        if func in BACKWARDS:
            with self, place_kept(self.randomness):
                return BACKWARDS[func](*args, **kwargs)
        if func in OPENED_FUNCTIONS:
            with self:
                return OPENED_FUNCTIONS[func](*args, **kwargs)
        known, counts = self._followed()
        if known is not None and func is batch_sums:
            assert self.sequence is not None
            return of_all_ranks(self.sequence, known, func, args)
        if func in DRAWS:
            drawn = self._drawn.numbers(func, args, kwargs)
            return drawn if known is None else known.drawn(drawn, func, args, kwargs)
        if func in DROPOUTS:
            if "train" in kwargs:  # torch.dropout's own name for it
                kwargs = {**kwargs, "training": kwargs["train"]}
                del kwargs["train"]
            return self._dropout(known, func, *args, **kwargs)
        if known is not None:
            return known(func, args, kwargs)
        return func(*args, **kwargs) if counts is None else counts(func, args, kwargs)

    def _followed(self) -> tuple[KnownSequences | None, CountsBySize | None]:
        """What makes this rank's part of positions and tokens; no graph is followed."""
        sequence = self.sequence
        if sequence is None:
            return None, None
        # asked first: a graph that had read `known` would be made anew where that changes
        follows = not torch.compiler.is_compiling() and sequence.follows
        return sequence.known if follows else None, sequence.counts

    def _dropout(
        self,
        known: KnownSequences | None,
        func: Callable,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if known is None:  # no graph reads marks
            dropped = self._drawn.dropout(func, input, p)
            return input.copy_(dropped) if inplace else dropped
        with drawn_in(self.randomness, *_rows_of(self.randomness, input, known)):
            dropped = self._drawn.dropout(func, input, p)
        return known.mark(input.copy_(dropped) if inplace else dropped, func, (input, p), {})

    def _attention(self, args: tuple, kwargs: dict) -> Tensor:
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if self.seen is not None:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.seen(given["query"], given["key"], given["value"])
        alone = self._shared() and self._of_no_position(*args, **kwargs)
        if self._shared() and not alone:
            return self._attention_in_parts(dropout, args, kwargs)
        core: Callable = F.scaled_dot_product_attention
        if dropout > 0.0:
            # the mask is drawn for this site, so a recomputed core draws the same one
            site, activation_sharding = (
                self._drawn.site(dropout),
                self.randomness.activation_sharding,
            )
            core = partial(plain_attention, self.randomness, activation_sharding, site)
            if alone:
                core = partial(attend_alone, core, self.randomness)
        out = self._attend(core, args, kwargs)
        return attended_alone(out, *args, **kwargs) if alone else out

    @torch.compiler.disable
    def _eager_attention(
        self,
        attend: EagerAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """transformers' attention interface, for what a model attends by itself."""
        if self.seen is not None:
            self.seen(query, key, value, True)
        if self._shared() and not self._of_no_position(query, key, value):
            assert self.sequence is not None
            self._refuse_rerun()
            attend = partial(attend_eagerly, self.sequence, attend)
        return attend(module, query, key, value, *args, **options)

    def _of_no_position(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> bool:
        assert self.sequence is not None
        known = self._followed()[0]
        return known is not None and attends_alone(self.sequence, known, query, key, value)

    @torch.compiler.disable  # one break: messages between ranks overlap with blocks of keys
    def _attention_in_parts(self, dropout: float, args: tuple, kwargs: dict) -> Tensor:
        """Of this rank's part of the sequences with all."""
        assert self.sequence is not None
        self._refuse_rerun()
        keep = _factors(self.randomness, dropout) if dropout > 0.0 else None
        out = self._attend(partial(self.sequence.attention, keep=keep), args, kwargs)
        return set_whole_shape(out, (*out.shape[:2], self.sequence.now.length, out.shape[-1]))

    def _refuse_rerun(self) -> None:
        assert self.sequence is not None
        if rerun := rerun_of_model(self.randomness):
            raise rerun_attention(self.sequence.layout, rerun)

    def _attend(self, core: Callable, args: tuple, kwargs: dict) -> Tensor:
        if self.selective and torch.is_grad_enabled():
            self.attended = True
            if not torch.compiler.is_compiling():
                core = partial(_past_modes, core)
            return checkpoint(core, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return core(*args, **kwargs)

    def _shares(self, index: Tensor, experts: int) -> Tensor:
        """`routing.shares`, of the tokens of all ranks."""
        if (known := self._had("shares of experts")) is not None:
            return known
        if self.asked is not None:
            self.asked("shares", experts)
        self.routed = True
        counts = count_choices(index, experts)[1:]
        axes = (
            (*TOKEN_AXES, *FEATURE_AXES)
            if self.randomness.activation_sharding == "sequence"
            else TOKEN_AXES
        )
        group = self.mesh.group(*axes) if self.mesh is not None else None
        if group is not None:
            dist.all_reduce(counts, group=group)
        return self._keep(counts / counts.sum())

    def _within_capacity(self, index: Tensor, experts: int, factor: float) -> Tensor:
        """`routing.within_capacity`, of the whole sequences of which this rank has a part."""
        if (known := self._had("capacity of experts")) is not None:
            return known
        if self.asked is not None:
            self.asked("capacity", index[0].numel())
        self.routed = True
        if self.loads is not None:
            self.loads.choose(index, experts)
        group = (
            self.mesh.group(*FEATURE_AXES)
            if self.mesh is not None and self.randomness.activation_sharding == "sequence"
            else None
        )
        if group is not None:
            index = all_gather(index, 1, group, None)
        if self._shared():
            assert self.sequence is not None
            here = self.sequence.positions(self.sequence.now.length, index.device)
            index = within_capacity(self.sequence.whole(index), experts, factor).index_select(
                1, here
            )
        else:
            index = within_capacity(index, experts, factor)
        mine = index if group is None else split_dim(index, 1, group.rank(), group.size())
        return self._keep(mine)

    def _had(self, what: str) -> Tensor | None:
        """The answer to this call in the forward, where backward computes it again."""
        if self.repeated is None or torch.compiler.is_compiling():
            return None
        return self.repeated.repeat(what, self.randomness)

    def _keep(self, answer: Tensor) -> Tensor:
        if self.repeated is not None and not torch.compiler.is_compiling():
            self.repeated.keep(answer, self.randomness)
        return answer

    def _shared(self) -> bool:
        """Whether this rank has a part of the sequences that run."""
        return self.sequence is not None and self.sequence.now.length > 0


def _past_modes(core: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Attention itself, also where backward computes it again inside of a mode."""
    with without_function_modes() if in_backward() else nullcontext():
        found: Tensor = core(*args, **kwargs)
    return found


def _rows_of(
    randomness: Randomness, given: Tensor, known: KnownSequences
) -> tuple[Tensor | None, int | None]:
    """The positions of which `given` may have a row each, and in which dim, if that is known."""
    rows = randomness.rows
    if rows is None or not (is_marked(given) or is_fixed(given)):
        return rows, None
    dims = dims_of_positions(given)
    if 0 in dims and not _are_samples_and_positions(randomness, given, rows):
        problem = f"its dim 0 counts positions: a mask of {list(whole_shape(given))} for all"
        problem += " samples, of which each rank would draw others"
        raise UnsupportedModel("dropout", list(given.shape), problem, "use dp or fsdp")
    if dims:
        if len(dims) > 1 or not dims[0] or given.shape[dims[0]] != len(rows):
            return rows, None
        if dims[0] != 1:
            known.use()
        return rows, dims[0]
    if any(size % len(rows) == 0 for size in given.shape):
        known.use()
    return None, None  # as many of something else as positions here are none of these


def _are_samples_and_positions(randomness: Randomness, given: Tensor, rows: Tensor) -> bool:
    samples = max(1, len(randomness.samples))
    own, whole = samples * len(rows), samples * randomness.length
    return (len(given), whole_shape(given)[0]) == (own, whole)


def _factors(randomness: Randomness, p: float) -> Callable[..., Tensor]:
    """`_kept` at this place of the program: backward draws the same masks again."""
    return partial(_kept, replace(randomness), p, randomness.site())


def _kept(
    draws: Randomness,
    p: float,
    site: Tensor,
    heads: tuple[int, int, int],
    queries: tuple[int, int],
    keys: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Factors of the weights between two stretches, in backward as in forward."""
    first, count, all_heads = heads
    if draws.activation_sharding == "heads":
        first, all_heads = first + draws.index * all_heads, all_heads * draws.size
    keep = draws.keep_weights((first, count, all_heads), queries, keys, p, site, device)
    return keep.to(torch.float64).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def plain_attention(
    randomness: Randomness,
    activation_sharding: Any,
    site: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` [.., heads, s, d] written out, with a dropout mask that no
    layout changes."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    wide = torch.promote_types(query.dtype, torch.float32)  # as torch's own kernels compute it
    scores = (
        query.to(wide)
        @ key.to(wide).transpose(-2, -1)
        * (scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    )
    if is_causal:
        s, t = scores.shape[-2:]
        keep = torch.ones(s, t, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, float("-inf"))
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    now, randomness.activation_sharding = randomness.activation_sharding, activation_sharding
    seen = (scores > float("-inf")).any(
        -1, keepdim=True
    )  # what sees nothing gets nothing, as of torch's own
    weights = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    weights = randomness.dropout(weights, dropout_p, site)
    randomness.activation_sharding = now
    return weights.to(value.dtype) @ value
