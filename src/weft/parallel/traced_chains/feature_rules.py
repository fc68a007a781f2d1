"""How the output features of linears go through operators: which of them each combines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from weft._torch.trees import tree_leaves, tree_map

from .feature_labels import LabelClasses, narrow

# Operators that move elements: labels move as they do.
MOVES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "unfold",
        "alias",
        "detach",
        "diagonal",
        "repeat",
        "flip",
        "roll",
        "constant_pad_nd",
        "chunk",
        "narrow",
        "pixel_shuffle",
        "pixel_unshuffle",
        "cat",
        "stack",
    ]
)
# Operators that combine the elements along dims; where none is given, all elements.
_SUMS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "prod",
        "any",
        "all",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "logsumexp",
        "linalg_vector_norm",
        "norm",
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "sort",
        "topk",
        "_fft_r2c",
        "_fft_c2r",
        "_fft_c2c",
    ]
)
# Operators that pick elements, or add to them, at places that an index says.
_PICKS = frozenset(["index", "index_select", "gather", "embedding"])
_ADDS = frozenset(["index_add", "index_add_", "scatter_add", "scatter_add_"])
_NORMS = frozenset(["native_layer_norm", "_fused_rms_norm", "rms_norm"])
# Of each feature by itself, but with running statistics that are whole on every rank.
_BATCH_NORMS = frozenset(["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"])
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm"])
_MATRICES = frozenset(["linalg_solve_triangular", "triangular_solve", "_linalg_solve_ex"])
NEW = frozenset(
    [
        "empty",
        "zeros",
        "ones",
        "full",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "empty_strided",
        "new_empty_strided",
    ]
)
# Those that leave each where it is, or make a tensor like another.
SAME_PLACE = frozenset(
    [
        "_to_copy",
        "lift_fresh",
        "clone",
        "contiguous",
        "tril",
        "triu",
        "native_dropout",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "bernoulli_",
        "uniform_",
        "normal_",
        "fill_",
        "zero_",
        "bernoulli",
    ]
)
_ZERO = torch.zeros((), dtype=torch.int64)


class Meet(Protocol):
    """Takes down that a tensor without labels combines with labels; `shape`: see `Meeting`."""

    def __call__(
        self, other: Tensor, labels: Tensor, shape: tuple[int, ...] | None = None
    ) -> None: ...


class FeatureRules:
    """The labels of what an operator makes.

    Args:
        classes: of the labels.
        meet: where a tensor without labels combines with labels.
        is_parameter: whether a tensor is made of parameters alone.
    """

    def __init__(self, classes: LabelClasses, meet: Meet, is_parameter: Callable[[Tensor], bool]):
        self._classes, self._meet, self._is_parameter = classes, meet, is_parameter

    def labels(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        live: Mapping[int, Tensor],
        made: list[Tensor],
    ) -> list[Tensor] | None:
        """Those of what an operator made. None: it is not known how it combines features."""
        shape = made[0].shape
        if name in SAME_PLACE:
            return [live[id(args[0])]] * len(made)
        if name in MOVES:
            return self._put_together(func, name, args, kwargs, live, made)
        if name in _PRODUCTS:
            labels = self._product(args[-2], args[-1], live, shape)
            if len(args) == 3:
                labels = self._combined([(None, labels), (args[0], live.get(id(args[0])))], shape)
            return [labels]
        if name in _SUMS or name in _NORMS or name in _BATCH_NORMS:
            if id(args[0]) not in live:
                return None
            dims = _dims(func, name, args, kwargs)
            labels = live[id(args[0])]
            for dim in dims:
                labels = self._classes.join_along(labels, dim)
            for other in (t for t in args[1:] if isinstance(t, Tensor)):
                self._meet(other, labels)
            return [_shaped(labels, dims, t.shape) for t in made]
        if name in _PICKS:
            return self._picked(func, name, args, live)
        if name in _ADDS:
            return self._added(args, live, shape)
        if name in _MATRICES:
            both = []
            for t in args[:2]:
                labels = live.get(id(t))
                for back in (1, 2) if labels is not None else ():
                    labels = self._classes.join_along(labels, t.ndim - back)
                both.append((t, labels))
            return [self._combined(both, shape)] * len(made)
        if "scaled_dot_product" in name:
            mask = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
            return self._attended(args[:3], kwargs.get("attn_mask", mask), live, made)
        if name == "convolution":
            return self._convolved(args, live, shape)
        if torch.Tag.pointwise in func.tags or name == "copy_":
            operands = args[1:] if name == "copy_" else args
            tensors = tree_leaves(operands, Tensor)
            return [self._combined([(t, live.get(id(t))) for t in tensors], shape)]
        return None

    def _put_together(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        live: Mapping[int, Tensor],
        made: list[Tensor],
    ) -> list[Tensor] | None:
        """The labels of several tensors, put together by the operator itself."""
        others = [t for t in tree_leaves(args, Tensor) if id(t) not in live]
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        for t in others:  # beside labels in one tensor
            if name != "cat":
                return None
            labels = next(iter(live.values())).narrow(dim, 0, 1).expand(t.shape)
            if self._is_parameter(t):
                live = {**live, id(t): labels}
            self._meet(t, narrow(labels))
        args = tree_map(
            lambda t: live.get(id(t), _ZERO.expand(t.shape)) if isinstance(t, Tensor) else t,
            args,
        )
        if name in ("cat", "stack"):
            labels = tree_leaves(args, Tensor)
            beside = {d for d in range(made[0].ndim) if name == "stack" or d != dim % made[0].ndim}
            alike = [d for d in beside if all(_is_expanded(each, d) for each in labels)]
            args = tree_map(lambda t: narrow(t, alike) if isinstance(t, Tensor) else t, args)
            return [func(*args, **kwargs).expand(made[0].shape)]
        return tree_leaves(func(*args, **kwargs), Tensor)

    def _combined(
        self, operands: list[tuple[Tensor | None, Tensor | None]], shape: torch.Size
    ) -> Tensor:
        """Of an operator that takes elements one by one. Operands: (tensor, its labels)."""
        labels = [narrow(known) for _, known in operands if known is not None]
        joined = labels[0]
        for other in labels[1:]:
            joined = self._classes.join(joined, other)
        for t, known in operands:
            if known is None and t is not None:
                self._meet(t, joined)
        return self._classes.classes(joined).expand(shape)

    def _product(
        self, left: Tensor, right: Tensor, live: Mapping[int, Tensor], shape: torch.Size
    ) -> Tensor:
        classes = self._classes
        rows, columns = live.get(id(left)), live.get(id(right))
        if rows is not None:
            rows = classes.join_along(narrow(rows), rows.ndim - 1)
        if columns is not None:
            columns = classes.join_along(narrow(columns), columns.ndim - 2)
        if rows is not None and columns is not None:
            return classes.join(rows, columns).expand(shape)
        labels, other = (rows, right) if rows is not None else (columns, left)
        assert labels is not None
        self._meet(other, labels, (*sizes(other)[:-2], 1, 1))
        return classes.classes(labels).expand(shape)

    def _attended(
        self, args: Any, mask: Tensor | None, live: Mapping[int, Tensor], made: list[Tensor]
    ) -> list[Tensor] | None:
        """Query, key and value [b, heads, s, d]: each head by itself; and a mask or bias."""
        if any(id(t) not in live for t in args):
            return None
        # a bias that linears make of positions
        own = [mask] if mask is not None and id(mask) in live else []
        if any(t.ndim != 4 for t in own):
            return None
        joined: Tensor | None = None
        for t in (*args, *own):
            labels = live[id(t)]
            for dim in (0, 2, 3):
                labels = self._classes.join_along(labels, dim)
            labels = labels.repeat_interleave(args[0].shape[1] // t.shape[1], dim=1)
            joined = labels if joined is None else self._classes.join(joined, labels)
        assert joined is not None
        if mask is not None and not own:
            self._meet(mask, joined)
        return [joined.expand(made[0].shape)]

    def _convolved(
        self, args: Any, live: Mapping[int, Tensor], shape: torch.Size
    ) -> list[Tensor] | None:
        """Each group of channels by itself [b, channels, ...]."""
        (x, weight, bias), groups = args[:3], args[8]
        if id(x) not in live:
            return None
        labels = live[id(x)].unflatten(1, (groups, -1))
        for dim in (0, *range(2, labels.ndim)):
            labels = self._classes.join_along(labels, dim)
        labels = labels.reshape(groups)
        each = labels.repeat_interleave(len(weight) // groups)
        self._meet(weight, each.reshape(-1, *[1] * (weight.ndim - 1)))
        labels = labels.repeat_interleave(shape[1] // groups)
        if bias is not None:
            self._meet(bias, labels)
        made = self._classes.classes(labels).reshape(-1, *[1] * (len(shape) - 2))
        return [made.expand(shape)]

    def _picked(
        self, func: Any, name: str, args: Any, live: Mapping[int, Tensor]
    ) -> list[Tensor] | None:
        """What is picked may be any along the dims that are looked up in, which are one class."""
        x, index = args[0], tree_leaves(args[1:], Tensor)
        if id(x) not in live or any(each.dtype in (torch.bool, torch.uint8) for each in index):
            return None
        dims = [args[1] % x.ndim] if isinstance(args[1], int) else [0]
        if name == "index":
            dims = [dim for dim, each in enumerate(args[1]) if each is not None]
        labels = live[id(x)]
        for dim in dims:
            labels = self._classes.join_along(labels, dim)
        labels = labels.expand(x.shape)
        first = tree_map(
            lambda t: torch.zeros(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t, args[1:]
        )
        return [func(labels, *first)]

    def _added(
        self, args: Any, live: Mapping[int, Tensor], shape: torch.Size
    ) -> list[Tensor] | None:
        """What is added may be added to any along the dim, which is one class."""
        to, dim, _, added = args[:4]
        beside = [d for d in range(to.ndim) if d != dim % max(1, to.ndim)]
        if not isinstance(added, Tensor) or any(to.shape[d] != added.shape[d] for d in beside):
            return None
        operands = []
        for t in (to, added):
            known = live.get(id(t))
            joined = None if known is None else self._classes.join_along(known, dim)
            operands.append((t, joined))
        return [self._combined(operands, shape)]


def moved_places(
    before: Callable[[], Tensor | None],
    t: Tensor,
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    shape: torch.Size,
) -> Tensor | None:
    """Where the elements of what an operator makes are in the one parameter that it takes; None:
    not known.

    Args:
        before: makes the places of the elements of `t`.
        t: what the operator takes, made of that parameter.
        shape: of what it makes.
    """
    places = before()
    if places is None or name in SAME_PLACE:
        return places
    if name in ("view", "_unsafe_view"):
        return places.reshape(args[1])
    if name == "constant_pad_nd":  # what it fills with counts as what is beside it
        for back, (left, right) in enumerate(zip(args[1][::2], args[1][1::2], strict=True), 1):
            count = places.shape[-back]
            at = torch.arange(-left, count + right).clamp(0, count - 1)
            places = places.index_select(-back, at)
        return places
    if name in _SUMS:  # of those that it combines, the first
        dims = _dims(func, name, args, kwargs)
        for dim in dims:
            places = places.narrow(dim, 0, 1)
        return _shaped(places, dims, shape)
    if name in MOVES:
        moved = func(*tree_map(lambda each: places if each is t else each, args), **kwargs)
        return moved if isinstance(moved, Tensor) else None
    rows = name == "index" and len(args[1]) == 1 and args[1][0] is not None
    if name == "embedding" or (rows and len(shape) == args[1][0].ndim + places.ndim - 1):
        return places[:1].expand(shape)  # a row for each, and each has all columns
    return places.expand(shape) if torch.Tag.pointwise in func.tags else None


def sizes(t: Tensor) -> tuple[int, ...]:
    """Its shape, with 1 along the dims along which it is expanded."""
    return tuple(1 if step == 0 else n for n, step in zip(t.shape, t.stride(), strict=True))


def _is_expanded(t: Tensor, dim: int) -> bool:
    return dim < t.ndim and t.stride(dim) == 0 and t.shape[dim] > 1


def _dims(func: Any, name: str, args: Any, kwargs: Any) -> list[int]:
    """The dims along which an operator combines elements."""
    count = args[0].ndim
    if name in _NORMS:
        return list(range(count - len(args[1]), count)) if name != "rms_norm" else [count - 1]
    names = [a.name for a in func._schema.arguments]
    if "dim" not in names:
        return list(range(count))
    place = names.index("dim")
    dims = args[place] if len(args) > place else kwargs.get("dim", None)
    if dims is None or dims == []:
        default = func._schema.arguments[place].default_value
        dims = default if isinstance(default, int) else range(count)
    return [d % count for d in ([dims] if isinstance(dims, int) else dims)] if count else []


def _shaped(labels: Tensor, dims: list[int], shape: torch.Size) -> Tensor:
    """Labels with dims of size 1, as a result of this shape has them."""
    if labels.ndim > len(shape):
        labels = labels.reshape([n for d, n in enumerate(labels.shape) if d not in dims])
    return labels.expand(shape)
