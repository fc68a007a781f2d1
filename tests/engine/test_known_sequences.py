"""Values that each rank knows for all positions: the part that a model sees, and the rows that
attention takes, are those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core.data_order import zigzag_spans
from weft.engine.context_parallel.counts_by_size import CountsBySize
from weft.engine.context_parallel.followed_shapes import FollowedShapes
from weft.engine.context_parallel.known_sequences import KnownSequences
from weft.engine.context_parallel.mask_rules import OnWholes
from weft.engine.context_parallel.whole_marks import dims_of_positions, set_whole, whole_of

SAMPLES, LENGTH, RANKS = 3, 16, 2
TABLE = nn.Parameter(torch.randn(LENGTH + 4, 5))
BUFFER = torch.arange(LENGTH + 4).expand(1, -1)
BIAS = nn.Embedding(8, 2)
MASK = torch.ones(LENGTH + 4, LENGTH + 4, dtype=torch.bool).tril()


class _Calls(TorchFunctionMode):
    def __init__(self, known: KnownSequences | CountsBySize):
        super().__init__()
        self.known = known

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self.known(func, args, kwargs or {})


def positions(rank: int) -> Tensor:
    spans = zigzag_spans(LENGTH, RANKS)[rank]
    return torch.cat([torch.arange(*span) for span in spans])


def known_of(rank: int) -> KnownSequences:
    def no_mask(placeholder: Tensor) -> Tensor:
        raise AssertionError(placeholder)

    mine = positions(rank)
    return KnownSequences(LENGTH, mine, FollowedShapes(), no_mask, CountsBySize(mine))


def tokens() -> Tensor:
    return torch.randint(1, 9, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))


def padded() -> Tensor:
    return tokens() * (torch.arange(LENGTH) < torch.tensor([[16], [11], [5]]))


def here(rank: int, entry: Tensor, function: Callable[[Tensor], Any]) -> tuple[Any, KnownSequences]:
    """What a rank's function of its part of an entry gives."""
    known = known_of(rank)
    part = set_whole(entry[:, positions(rank)], entry)
    with _Calls(known):
        return function(part), known


# ---- of one dim of positions ---------------------------------------------------------------------


def numbered(ids: Tensor) -> Tensor:
    """As RoBERTa and M2M-100."""
    mask = ids.ne(0).int()
    return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1


def shifted_right(ids: Tensor) -> Tensor:
    """As T5's decoder."""
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 7
    return shifted


def padded_on_the_left(ids: Tensor) -> Tensor:
    return F.pad(ids, (1, 0))[:, :-1] - torch.roll(ids, 2, 1)


def documents(ids: Tensor) -> Tensor:
    counted = torch.arange(ids.shape[1]).expand(ids.shape) % 5
    return (torch.diff(counted, prepend=counted[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def counted_from(ids: Tensor) -> Tensor:
    return torch.arange(3, 3 + ids.shape[1]).unsqueeze(0) + torch.arange(1 - ids.shape[1], 1)


def the_last_of_all(ids: Tensor) -> Tensor:
    """As transformers cut a mask that is longer than what is computed."""
    return ids[:, -ids.shape[1] :].flip(1)


def of_a_buffer(ids: Tensor) -> Tensor:
    return BUFFER[:, 2 : ids.shape[1] + 2] * 2


def features(ids: Tensor) -> Tensor:
    """As many features as there are positions on a rank."""
    x = ids.unsqueeze(-1) * torch.linspace(0, 1, LENGTH)
    return x[..., : LENGTH // RANKS] + x.narrow(-1, 0, LENGTH // RANKS)


def by_the_longest(ids: Tensor) -> Tensor:
    """What is one number for all positions is that of the whole sequence."""
    last = int(ids.ne(0).sum(-1).max())
    return torch.arange(ids.shape[1]).unsqueeze(0) * last + ids.ne(0).sum(-1, keepdim=True)


def changed_in_place(ids: Tensor) -> Tensor:
    mask = torch.ones(ids.shape, dtype=torch.long)
    mask.masked_fill_(ids == 0, 0)
    mask += 2
    return mask.flip(1)


ROWS = [
    *(numbered, shifted_right, padded_on_the_left, documents, counted_from, of_a_buffer),
    *(the_last_of_all, features, by_the_longest, changed_in_place),
]


@pytest.mark.parametrize("function", ROWS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_the_part_is_that_of_one_device(function: Callable, rank: int) -> None:
    want = function(padded())
    found, _ = here(rank, padded(), function)
    assert torch.equal(found, want[:, positions(rank)])
    known = whole_of(found)
    assert known is not None and torch.equal(known.tensor, want)


# ---- of pairs of positions -----------------------------------------------------------------------


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def not_padding(ids: Tensor) -> Tensor:
    """As LayoutLM."""
    mask = torch.ones(ids.shape) * ids.ne(0)
    return (1.0 - mask[:, None, None, :]) * -1e4


def distances(ids: Tensor) -> Tensor:
    counted = torch.arange(ids.shape[1])
    return (counted[None, :] - counted[:, None]).clamp(-3, 4)


def relative(ids: Tensor) -> Tensor:
    """As T5."""
    return BIAS(distances(ids) + 3).permute(2, 0, 1).unsqueeze(0)


def alibi(ids: Tensor) -> Tensor:
    """As MPT."""
    slopes = torch.tensor([0.5, 0.25]).view(2, 1, 1)
    return slopes * torch.arange(1 - ids.shape[1], 1).view(1, 1, ids.shape[1])


def both(ids: Tensor) -> Tensor:
    return torch.where(causal(ids), relative(ids), -1e9) + not_padding(ids)


def of_a_table(ids: Tensor) -> Tensor:
    """As gpt-fast, whose mask is a buffer that its positions and their number index."""
    counted = torch.arange(ids.shape[1])
    return MASK[None, None, counted, : ids.shape[1]]


PAIRS = [causal, not_padding, distances, relative, alibi, both, of_a_table]


@pytest.mark.parametrize("function", PAIRS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_rows_have_all_keys(function: Callable, rank: int) -> None:
    want, mine = function(padded()), positions(rank)
    found, known = here(rank, padded(), function)
    queries = want if want.shape[-2] == 1 else want.index_select(-2, mine)
    rows = known.rows(found)
    assert rows is not None and torch.equal(rows, queries)
    assert torch.equal(found, queries.index_select(-1, mine))


def test_gradients_of_rows_add_up() -> None:
    cotangent = torch.randn(1, 2, LENGTH, LENGTH)
    (relative(padded()) * cotangent).sum().backward()
    want, BIAS.weight.grad = BIAS.weight.grad, None
    for rank in range(RANKS):
        found, known = here(rank, padded(), relative)
        rows = known.rows(found)
        assert rows is not None
        (rows * cotangent[:, :, positions(rank)]).sum().backward()
    torch.testing.assert_close(BIAS.weight.grad, want)
    BIAS.weight.grad = None


# ---- what is not known ---------------------------------------------------------------------------


def test_activations_stay_those_of_the_part() -> None:
    embedding = nn.Embedding(9, 4)

    def forward(ids: Tensor) -> Tensor:
        x = embedding(ids) + BUFFER[:, : ids.shape[1]].unsqueeze(-1)
        assert whole_of(x) is None
        x[ids == 0] = 0.0
        return x * torch.arange(1, 1 + ids.shape[1]).unsqueeze(-1)

    want = forward(padded())[:, positions(1)]
    found, known = here(1, padded(), forward)
    assert torch.equal(found, want) and whole_of(found) is None and known.rows(found) is None


def test_what_activations_change_is_known_no_longer() -> None:
    def forward(ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape)
        mask.mul_(torch.rand(SAMPLES, LENGTH // RANKS))
        return mask

    found, _ = here(0, padded(), forward)
    assert whole_of(found) is None and float(found.max()) < 1


@pytest.mark.parametrize("fill", [None, float("nan")])
def test_activations_are_written_through_slices_of_features(fill: float | None) -> None:
    """As keys of multi-head latent attention, whose memory holds anything at first."""
    embedding = nn.Embedding(9, 4)

    def forward(ids: Tensor) -> Tensor:
        x = embedding(ids)
        size = (*ids.shape, 8)
        keys = x.new_empty(size) if fill is None else x.new_full(size, fill)
        keys[..., :4].copy_(x)
        keys[:, :, 4:].copy_(2 * x)
        return keys

    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        want = forward(padded())[:, positions(1)]
        found, known = here(1, padded(), forward)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, want) and whole_of(found) is None and not known.used


def test_what_activations_change_through_a_view_is_known_no_longer() -> None:
    def forward(ids: Tensor) -> Tensor:
        mask = torch.zeros(*ids.shape, 2)
        other = mask[..., :1]
        mask[..., 1].copy_(torch.rand(SAMPLES, LENGTH // RANKS))
        assert whole_of(other) is None
        return mask * 2

    found, _ = here(0, padded(), forward)
    assert whole_of(found) is None and float(found.max()) > 0


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class _Same(torch.autograd.Function):
    """As FSDP2 calls with what enters a unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().requires_grad_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@pytest.mark.parametrize("function", [_Twice, _Same])
def test_what_a_function_with_its_own_backward_gives_is_known_no_longer(function: Any) -> None:
    """The whole one would have no gradient."""
    found, known = here(0, padded(), lambda ids: function.apply(relative(ids)))
    assert whole_of(found) is None and known.rows(found) is None and found.requires_grad


def test_what_is_learned_and_changed_in_place_is_known_no_longer() -> None:
    """The part's gradient would be that of a step on the part."""

    def forward(ids: Tensor) -> Tensor:
        rows = BIAS(distances(ids)[0] + 3) * 1
        rows[1:] = rows[:-1].clone()
        return rows

    found, _ = here(0, padded(), forward)
    assert whole_of(found) is None


@pytest.mark.parametrize("rank", range(RANKS))
def test_rows_of_a_table_are_those_of_the_part(rank: int) -> None:
    """As learned positions are added."""
    found, _ = here(rank, padded(), lambda ids: TABLE[: ids.shape[1]])
    assert torch.equal(found, TABLE[:LENGTH][positions(rank)])


def test_sizes_that_are_no_positions_stay() -> None:
    """Of heads, features, buckets and samples there may be as many as positions."""
    here_now = LENGTH // RANKS
    table = torch.randn(here_now, here_now)

    def forward(ids: Tensor) -> tuple[Tensor, ...]:
        counted = torch.arange(table.shape[0])
        x = table[counted] + table[:here_now]
        return counted, x, torch.ones(here_now, LENGTH), torch.zeros(LENGTH).cumsum(0)

    found, known = here(1, padded(), forward)
    assert found[0].tolist() == [*range(here_now)] and torch.equal(found[1], 2 * table)
    assert not any(dims_of_positions(x) or known.rows(x) is not None for x in found)


@pytest.mark.parametrize("size", [LENGTH // RANKS + 1, LENGTH])
def test_integers_of_another_number_are_counted_from_0(size: int) -> None:
    with _Calls(known_of(1)):
        assert torch.arange(size).tolist() == [*range(size)]


def test_where_nothing_is_followed_integers_are_counted_by_size() -> None:
    by_size, here_now = CountsBySize(positions(0)), LENGTH // RANKS
    assert torch.equal(by_size(torch.arange, (here_now,), {}), positions(0))
    assert by_size(torch.arange, (LENGTH,), {}).tolist() == [*range(LENGTH)]


def test_rules_of_masks_read_the_whole() -> None:
    entry, told = padded(), []
    part = set_whole(entry[:, positions(1)], entry)
    with OnWholes(lambda: told.append(True)):
        assert torch.equal(part[:, LENGTH - 1], entry[:, LENGTH - 1])
    assert told


# ---- whether the next forward has to be followed -------------------------------------------------


def each_alone(ids: Tensor) -> Tensor:
    """As rotary tables, and what hands heads and samples on."""
    counted = torch.arange(ids.shape[1]).unsqueeze(0) + 1
    angles = (torch.ones(3, 1) @ counted[:, None, :].float()).transpose(1, 2)
    table = torch.cat((angles, angles), dim=-1).cos() * 2.0
    return table.unsqueeze(1)[..., :] * ids.ne(0)[:, None, :, None]


def heads_of(ids: Tensor) -> Tensor:
    x = nn.Embedding(9, 4)(ids).view(*ids.shape, 2, 2).transpose(1, 2)
    return x.reshape(ids.shape[0], -1, 2) if ids.shape[1] > 1 else x


USED = {
    "a fraction": lambda ids: TABLE.sum() / ids.shape[1],
    "a Python fraction": lambda ids: torch.tensor(1 / ids.shape[1]),
    "a root": lambda ids: TABLE.sum() * math.sqrt(ids.shape[1]) * float(ids.shape[1]),
    "a limit": lambda ids: ids if ids.shape[1] > LENGTH - 1 else ids * 2,
    "a number of them all": lambda ids: int(ids.max()),
    "a look": lambda ids: bool((ids == 3).any()),
    "values for all": lambda ids: torch.full((2,), ids.shape[1]),
    "a table": lambda ids: TABLE[: ids.shape[1]],
    "a cut": lambda ids: ids[:, 2:],
    "joined positions": lambda ids: torch.cat((ids, ids), 1),
    "a sum over positions": lambda ids: ids.float() @ torch.ones(ids.shape[1]),
    "other integers": lambda ids: torch.arange(1, 1 + ids.shape[1]),
    "what is written": lambda ids: ids.ne(0).int().masked_fill_(ids == 1, 5),
}


@pytest.mark.parametrize("function", [each_alone, heads_of])
@pytest.mark.parametrize("rank", range(RANKS))
def test_what_each_position_has_alone_needs_no_following(function: Callable, rank: int) -> None:
    """What is not followed is the same."""
    torch.manual_seed(0)
    found, known = here(rank, padded(), function)
    assert not known.used
    torch.manual_seed(0)
    with _Calls(CountsBySize(positions(rank))):
        assert torch.equal(function(padded()[:, positions(rank)]), found)


@pytest.mark.parametrize("function", [*PAIRS, *ROWS, *USED.values()])
def test_what_is_of_other_positions_needs_following(function: Callable) -> None:
    for rank in range(RANKS):
        found, known = here(rank, padded(), function)
        if function in PAIRS:
            known.rows(found)  # as attention asks
        assert known.used
