"""Attention masks that a rank with a part of the sequence can evaluate.

A mask [b, 1, s, s] says nothing of other ranks' keys. What is asked for here, or by a model of
transformers, is kept as a rule over positions, and what the model is given then only stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from weft._torch.modes import function_modes
from weft.core import UnsupportedModel

# (query positions [q, 1], key positions [1, k]) -> bool, that broadcasts to [b, 1, q, k]
Rule = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Which keys a query attends to. `rule`: a further one beside `causal`. `documents`: [b, s] of
    the whole sequence, those of equal numbers see each other; `valid`: [b, s], false for keys that
    are padding."""

    causal: bool
    rule: Rule | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None
    seen: dict[tuple, Tensor | bool] = field(default_factory=dict)  # what has been asked

    @property
    def plain(self) -> bool:
        """Whether it is the causal mask, or none."""
        return self.rule is None and self.documents is None and self.valid is None

    def between(
        self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> Tensor | bool | None:
        """(start, stop) of the whole sequence, twice: a mask [b or 1, 1, q, k]; True or False where
        all, or none, is seen; None for the causal mask of a stretch with itself."""
        if self.plain and self.causal and queries == keys:
            return None
        if self.causal and keys[0] >= queries[1]:
            return False
        if self.plain and (not self.causal or keys[1] <= queries[0] + 1):
            return True
        if (queries, keys) not in self.seen:
            mask = self._mask(*(torch.arange(*span, device=device) for span in (queries, keys)))
            self.seen[queries, keys] = bool(mask.any()) if mask.all() or not mask.any() else mask
        return self.seen[queries, keys]

    def rows(self, queries: Tensor, length: int) -> Tensor:
        """The mask [b or 1, 1, q, length] of queries at these positions, and all keys."""
        return self._mask(queries, torch.arange(length, device=queries.device))

    def _mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k = queries[:, None], keys[None, :]
        mask = (k <= q if self.causal else torch.ones_like(k <= q))[None, None]
        if self.rule is not None:
            mask = mask & self.rule(q, k)
        if self.documents is not None:
            mine = self.documents[:, None].index_select(2, queries)[..., None]
            mask = mask & (mine == self.documents[:, None, None].index_select(3, keys))
        if self.valid is not None:
            mask = mask & self.valid[:, None, None].index_select(3, keys)
        return mask


def documents_of(position_ids: Tensor) -> Tensor | None:
    """[b, s]: which document of its sample each position is of, if any sample has several:
    positions of one go up by 1, and begin anew with the next, as in transformers."""
    after = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    found = (after != 1).cumsum(-1)
    return found if bool(found[:, -1].any()) else None


def causal_mask(position_ids: Tensor, window: int | None = None) -> Tensor | None:
    """For `scaled_dot_product_attention`: bool [b, 1, s, s], true where a position is seen. None
    where that is the causal mask alone (`is_causal`).

    `position_ids` [b, s]: those of one document go up by 1; no document sees another one. `window`:
    how many positions are seen, the own among them. Where ranks share the sequence, each gives its
    part of `position_ids`.
    """
    if function_modes():
        found: Tensor | None = handle_torch_function(causal_mask, (), position_ids, window)
        return found
    documents, length = documents_of(position_ids), position_ids.shape[1]
    pattern = AttentionPattern(True, window_rule(window), documents)
    if pattern.plain:
        return None
    mask = pattern.rows(torch.arange(length, device=position_ids.device), length)
    return mask.expand(position_ids.shape[0], 1, length, length)


def window_rule(window: int | None) -> Rule | None:
    """Seen are the last so many positions."""
    return None if window is None else (lambda q, k: q - k < window)


def check_padding(padding: Tensor) -> None:
    """Raise UnsupportedModel unless the attention mask has two dimensions [samples, positions]."""
    if padding.ndim != 2:
        raise UnsupportedModel(
            "batch['attention_mask']",
            tuple(padding.shape),
            "has an entry for each pair of positions",
            "give [samples, positions], 1 where a token counts",
        )
