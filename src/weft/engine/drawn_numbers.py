"""Random numbers inside of a user's forward: dropout and draws that are the same on every layout,
and the refusal of those that would not be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from weft._torch.autograd import hidden_checkpoints, in_backward
from weft.core import UnsupportedModel
from weft.nn import (
    DRAWS,
    DROPOUTS_OF_CHANNELS,
    Draws,
    Randomness,
    RepeatedDraws,
    rerun_of_model,
)
from weft.parallel import Mesh, rerun_dropout, rerun_in_graph

from .expert_load import ExpertLoad

_SELU_FLOOR = -1.0507009873554805 * 1.6732632423543772  # what SELU tends to on the left


class DrawnNumbers:
    """Of one rank.

    Args:
        randomness: where the program is.
        mesh: whose ranks have other samples; None: there are no others.
        loads: the modules that hold experts, if any.
        repeated: what backward is to draw again; None: it does so without weft.
        parted: whether a forward has not all samples of the batch.
    """

    def __init__(
        self,
        randomness: Randomness,
        mesh: Mesh | None,
        loads: ExpertLoad | None,
        repeated: RepeatedDraws | None,
        parted: bool,
    ):
        self._randomness, self._mesh, self._loads = randomness, mesh, loads
        self._repeated, self._parted = repeated, parted
        self._step, self._shapes = -1, dict[tuple[int, int], torch.Size]()  # of its draws, by place

    def dropout(self, func: Callable, input: Tensor, p: float) -> Tensor:
        """What `func`, a dropout in training, makes of `input`."""
        site = self.site(p)
        self._check_samples("dropout", input.shape, self._randomness.may_share(input.shape))
        if func in DROPOUTS_OF_CHANNELS and input.ndim > 2:
            channels = self._randomness.dropout(input.new_ones(input.shape[:2]), p, site)
            return input * channels.view(*input.shape[:2], *[1] * (input.ndim - 2))
        if func is F.alpha_dropout:
            return self._alpha(input, p, site)
        if func not in (F.dropout, torch.dropout):
            raise UnsupportedModel(
                "dropout",
                func.__name__,
                "weft has no mask for it that does not depend on the layout",
                "use nn.Dropout",
            )
        return self._randomness.dropout(input, p, site)

    def site(self, what: object) -> Tensor:
        """The key of this call. Refuses places where the numbers would depend on the layout."""
        repeated = None if torch.compiler.is_compiling() else self._repeated
        if repeated is not None and (site := repeated.repeat(what, self._randomness)) is not None:
            return site
        if rerun := rerun_of_model(self._randomness):
            if self._randomness.compiled:
                raise rerun_in_graph(what)
            if repeated is None or not torch.is_grad_enabled():
                raise rerun_dropout(what, rerun)
        own = self._randomness.own_call is not None
        if not torch.compiler.is_compiling() and hidden_checkpoints() > own:
            raise rerun_dropout(what, "torch.utils.checkpoint with hooks of saved tensors inside")
        within = self._loads is not None and self._loads.inside and not self._randomness.own_count
        if within and self._several():
            problem = "it is drawn within experts, whose rows are others on every layout"
            raise UnsupportedModel(
                "dropout", what, problem, "put it after the experts, or set it to 0"
            )
        if self._randomness.chosen and self._several():
            problem = (
                "it is drawn in a module that the forward calls only where its data say so, as"
            )
            problem += " an expert, and each microbatch on each rank has other data"
            raise UnsupportedModel(
                "dropout", what, problem, "put it outside of that module, or set it to 0"
            )
        site = self._randomness.site()
        if repeated is not None:
            repeated.keep(site, self._randomness)
        return site

    def _several(self) -> bool:
        return self._mesh is not None and bool(self._mesh.layout.active_axes())

    def numbers(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Random numbers that are the same on every layout."""
        site, part = self.site(func.__name__), count()

        def uniform(shape: torch.Size, device: torch.device, alike: bool) -> Tensor:
            dim = self._randomness.drawn_dim(shape, alike)
            unclear = self._randomness.is_unclear(shape, alike)
            self._check_samples(f"torch.{func.__name__}", shape, unclear)
            return self._randomness.uniform(shape, site, device, dim, next(part))

        return DRAWS[func](Draws(uniform), *args, **kwargs)

    def _check_samples(self, what: str, shape: torch.Size, unclear: bool) -> None:
        """Refuse random numbers of which nothing says whether they are those of samples."""
        if not self._several():
            return
        samples = len(self._randomness.samples)
        uneven = self._parted and self._randomness.dropped.is_uneven(shape, samples)
        if uneven or not self._has_shape_of_step(shape):
            raise UnsupportedModel(
                what,
                tuple(shape),
                "its shape follows from the data, as of edges of graphs, of tokens without padding,"
                " or of sequences cut to the longest, so ranks with other samples would draw"
                " another mask",
                "drop out before its rows are selected or cut, or set the dropout to 0",
            )
        if not unclear:
            return
        raise UnsupportedModel(
            what,
            tuple(shape),
            f"whether each of the {samples} samples of a microbatch has"
            " numbers of its own, or all share these, does not follow from the shape",
            "draw after the shape of an activation, as by torch.rand_like, or take another"
            " number of samples for each rank's microbatch",
        )

    def _has_shape_of_step(self, shape: torch.Size) -> bool:
        """Whether this draw has the shape that it has in the other microbatches of the step."""
        now = self._randomness
        if torch.compiler.is_compiling() or in_backward():
            return True
        if self._step != now.step:
            self._step = now.step
            self._shapes.clear()
        return self._shapes.setdefault((now.place, now.calls), shape) == shape

    def _alpha(self, input: Tensor, p: float, site: Tensor) -> Tensor:
        """Keeps mean and variance after SELU (Klambauer et al. 2017)."""
        keep = self._randomness.keep(input.shape, p, site, input.device)
        a = ((1.0 - p) * (1.0 + p * _SELU_FLOOR**2)) ** -0.5
        return torch.where(keep, input, _SELU_FLOOR) * a - a * _SELU_FLOOR * p
