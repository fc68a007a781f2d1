"""Under cp a forward that follows from tokens and counts has one device's numbers, also where the
first batch, which the trial runs, does not have the tokens that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.core.errors import UnsupportedModel
from weft.launch.local_workers import Pool
from weft.nn.losses import next_token

VOCAB, LENGTH, WIDTH, SAMPLES, SPECIAL, STEPS = 67, 16, 32, 8, 7, 3


@torch.jit.script
def unfollowed(x: Tensor) -> Tensor:
    return x * 1.0


@torch.jit.script
def unfollowed_tokens(x: Tensor) -> Tensor:
    return x * 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class AfterScripted(Block):
    """Nothing is known of the shapes of its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(unfollowed(q), k, v, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class OfChangedTokens(Block):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.5 * (ids == 2).unsqueeze(-1)), ids)


class Net(nn.Module):
    def __init__(self, embed: Callable[[Net, Tensor], Tensor], block: type[Block] = Block):
        super().__init__()
        self.embed, self.tokens = embed, nn.Embedding(VOCAB, WIDTH)
        self.table = nn.Parameter(torch.randn(3 * LENGTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(self, input_ids)
        for block in self.blocks:
            x = block(x, input_ids)
        return self.head(x)


def plainly(net: Net, ids: Tensor) -> Tensor:
    return net.tokens(ids)


def count_in_where(net: Net, ids: Tensor) -> Tensor:
    return net.tokens(ids) + net.table[torch.where(ids == SPECIAL, ids.shape[1], 3)]


def count_in_masked_fill(net: Net, ids: Tensor) -> Tensor:
    places = torch.arange(LENGTH // 2).repeat(2)[: ids.shape[1]].expand(ids.shape)
    return net.tokens(ids) + net.table[places.masked_fill(ids == SPECIAL, ids.shape[1])]


def changed_tokens(net: Net, ids: Tensor) -> Tensor:
    ids.masked_fill_(ids == SPECIAL, 2)
    return net.tokens(ids)


def through_a_view(net: Net, ids: Tensor) -> Tensor:
    mask = torch.ones(ids.shape, dtype=torch.float64)
    wide = mask.unsqueeze(-1)
    mask[ids == SPECIAL] = 0.5
    return net.tokens(ids) * wide


def through_data(net: Net, ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids.data.masked_fill_(ids == SPECIAL, 2)
    return net.tokens(ids)


def through_a_slice(net: Net, ids: Tensor) -> Tensor:
    changed = ids.clone()
    changed[:, 1:].masked_fill_(ids[:, 1:] == SPECIAL, 2)
    return net.tokens(changed)


def row_by_row(net: Net, ids: Tensor) -> Tensor:
    mask = torch.ones(ids.shape, dtype=torch.float64)
    for row, own in zip(mask, ids, strict=True):
        row[own == SPECIAL] = 0.5
    return net.tokens(ids) * mask.unsqueeze(-1)


def into_a_tensor(net: Net, ids: Tensor) -> Tensor:
    found = torch.zeros(ids.shape, dtype=torch.long)
    torch.cumsum(ids == SPECIAL, 1, out=found)
    return net.tokens(ids) + net.table[found]


def after_a_constant(net: Net, ids: Tensor) -> Tensor:
    """The number of the document: shifted by a constant."""
    begins = torch.zeros(len(ids), 1, dtype=torch.bool)
    document = torch.cat((begins, (ids == SPECIAL)[:, :-1]), 1).cumsum(1)
    return net.tokens(ids) + net.table[document]


def into_a_constant(net: Net, ids: Tensor) -> Tensor:
    has = torch.zeros(len(ids), VOCAB).scatter_(1, ids, (ids == SPECIAL).float()).sum(1)
    return net.tokens(ids) + has.to(net.table)[:, None, None] * net.table[0]


def gathered(net: Net, ids: Tensor) -> Tensor:
    places = (ids == SPECIAL).cumsum(1).clamp(max=ids.shape[1] - 1)
    return net.tokens(ids) + net.tokens(ids.gather(1, places))


def modulated(net: Net, ids: Tensor) -> Tensor:
    """Nothing is known of what meets weights, before dropout."""
    rows = net.table[torch.zeros(1, 1, dtype=torch.long)]
    return F.dropout(unfollowed(net.tokens(ids)) * (1 + rows), 0.3, net.training)


def of_lost_tokens(net: Net, ids: Tensor) -> Tensor:
    return F.dropout(net.tokens(unfollowed_tokens(ids)), 0.3, net.training)


FORWARDS: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    each.__name__: (lambda each=each: Net(each), {})  # type: ignore[misc]
    for each in (
        *(count_in_where, count_in_masked_fill, through_a_view, through_data, through_a_slice),
        *(row_by_row, into_a_tensor, after_a_constant, into_a_constant, gathered),
        *(modulated, of_lost_tokens),
    )
}
FORWARDS["changed_tokens, again in backward"] = (
    lambda: Net(changed_tokens, OfChangedTokens),
    {"recompute": "full"},
)
FORWARDS["dropout after a scripted function"] = (lambda: Net(plainly, AfterScripted), {})


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(SPECIAL + 1, VOCAB, (SAMPLES, LENGTH), generator=generator)
    if step:
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = SPECIAL
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def sgd(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in params], lr=0.1)


def losses(make: Callable[[], Net], layout: str, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = make().double()
    plan = weft.plan(model, layout, batch=SAMPLES, loss=next_token, precision="fp64", **options)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    return [float(engine.step(engine.local(batch_of(step))).loss) for step in range(STEPS)]


def of_a_forward(name: str, layout: str) -> list[float]:
    make, options = FORWARDS[name]
    return losses(make, layout, options)


@pytest.mark.grid(4, ci=3)
@pytest.mark.parametrize("layout", ["cp2", "cp2+gather"])
@pytest.mark.parametrize("name", FORWARDS)
def test_it_equals_one_device(pool: Pool, name: str, layout: str) -> None:
    alone = pool.run(of_a_forward, name, "dp1", world=1)[0]
    found = pool.run(of_a_forward, name, layout, world=2)[0]
    assert found == pytest.approx(alone, rel=1e-9)


def dropped_table(net: Net, ids: Tensor) -> Tensor:
    return net.tokens(ids) + F.dropout(net.table[: ids.shape[1]], 0.3, net.training)


def of_dropped_table() -> list[float]:
    return losses(lambda: Net(dropped_table), "cp2", {})


def test_dropout_of_positions_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"dim 0 counts positions: a mask of \[16, 32\] for all"
    ):
        pool.run(of_dropped_table, world=2)
