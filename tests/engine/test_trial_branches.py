"""The trial before the first step takes the branches that its sample does not take, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.cases import LENGTH, VOCAB, Fused, FusedAttention
from tests.engine.test_sharding_trial import DIM, begin, with_blocks
from weft.core.errors import UnsupportedModel
from weft.launch import Pool

MARK = VOCAB  # a token that no batch has


class AtAMark(Fused):
    """Calls `marked` where a sample has a mark."""

    def __init__(self) -> None:
        super().__init__(dim=DIM)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        if (input_ids == MARK).any():
            x = self.marked(x, input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        raise NotImplementedError


class Mixing(AtAMark):
    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x + 0.1 * x.cumsum(1)


class ReadsItem(Mixing):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        if (input_ids == MARK).any().item():
            x = self.marked(x, input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Scaling(AtAMark):
    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return 2.0 * x


class Raising(AtAMark):
    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        raise ValueError("no marks")


class RaisingInPart(AtAMark):
    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x + torch.ones(LENGTH, 1)


class RaisingOnOneRank(AtAMark):
    """Where x has not the first position first."""

    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        first = self.embedding(input_ids[0, 0]) + self.position(torch.tensor(0))
        if not torch.equal(x[0, 0], first):
            raise ValueError("not the first position")
        return x


class Halving(AtAMark):
    """A loop that ends by what it reads."""

    def forward(self, input_ids: Tensor) -> Tensor:
        scale = 1.0
        while (self.embedding.weight.abs() * scale > 100).any():
            scale /= 2
        return scale * super().forward(input_ids)

    def marked(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x.clamp(max=1.0)


class Overflowing(nn.Module):
    """A feed-forward that scales its first features where one of them is large."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention(DIM, 4)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y = self.up(x).relu()
        if y.max() > 1e6:
            y = torch.cat([y[..., :4] * 0.1, y[..., 4:]], -1)
        return x + self.down(y)


@pytest.mark.parametrize("build", [Mixing, ReadsItem])
def test_a_branch_that_mixes_positions_is_refused(
    pool: Pool, build: Callable[[], nn.Module]
) -> None:
    with pytest.raises(
        UnsupportedModel, match="splitting the sequence changes the model's output"
    ) as found:
        pool.run(begin, build, "cp2", world=2)
    assert "`if (input_ids == MARK).any()" in str(found.value) and "True" in str(found.value)


def test_a_branch_that_takes_cut_features_for_all_is_refused(pool: Pool) -> None:
    build = partial(with_blocks, Overflowing)
    want = pool.run(begin, build, "dp1", world=1)[0]
    try:
        assert pool.run(begin, build, "tp2", world=2)[0] == pytest.approx(want, rel=1e-5)
    except UnsupportedModel as refused:
        assert "`if y.max() > 1e6:`" in str(refused)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
@pytest.mark.parametrize("build", [Scaling, Raising, RaisingInPart, Halving])
def test_other_branches_are_let_pass(
    pool: Pool, layout: str, build: Callable[[], nn.Module]
) -> None:
    want = pool.run(begin, build, "dp1", world=1)[0]
    assert pool.run(begin, build, layout, world=2)[0] == pytest.approx(want, rel=1e-5)


def test_a_branch_that_raises_on_one_rank_is_refused(pool: Pool) -> None:
    with pytest.raises(UnsupportedModel, match="not the first position"):
        pool.run(begin, RaisingOnOneRank, "cp2", world=2)
