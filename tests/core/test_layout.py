from __future__ import annotations

import itertools

import pytest

from weft.core.errors import LayoutError
from weft.core.layout import Layout


@pytest.mark.parametrize(
    "text", ["dp1", "dp2", "pp2.dp2.tp2", "dp2.fsdp2+zero2.tp4+sequence", "fsdp2+zero1+offload"]
)
def test_str_and_parse_are_inverse(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not an axis with a size"),
        ("dp", "'dp' is not an axis with a size"),
        ("2dp", "'2dp' is not an axis with a size"),
        ("dp2,tp2", "'dp2,tp2' is not an axis with a size"),
        ("dp2..tp2", "'' is not an axis with a size"),
        ("dp2.tp2+", "'tp2+' is not an axis with a size"),
        ("dp-2", "'dp-2' is not an axis with a size"),
        ("dp0", "axis dp has size 0"),
        ("dp2.dp2", "axis dp is named twice"),
    ],
)
def test_what_does_not_parse_is_refused(text: str, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert caught.value.value == text
    assert says in str(caught.value)


def test_the_last_axis_is_innermost() -> None:
    layout = Layout.parse("dp2.fsdp3.tp4")
    assert layout.world == 24
    assert layout.coords(0) == {"dp": 0, "fsdp": 0, "tp": 0}
    assert layout.coords(1) == {"dp": 0, "fsdp": 0, "tp": 1}
    assert layout.coords(4) == {"dp": 0, "fsdp": 1, "tp": 0}
    assert layout.coords(23) == {"dp": 1, "fsdp": 2, "tp": 3}
    assert list(layout.coords(5)) == ["dp", "fsdp", "tp"]


def test_rank_and_coords_are_inverse() -> None:
    layout = Layout.parse("pp2.dp3.tp2")
    assert [layout.rank(**layout.coords(rank)) for rank in range(layout.world)] == list(range(12))
    assert layout.rank(tp=1) == 1


def test_peers_differ_only_on_the_named_axes() -> None:
    layout = Layout.parse("dp2.fsdp2.tp2")
    assert layout.group_ranks(5, "tp") == (4, 5)
    assert layout.group_ranks(5, "fsdp") == (5, 7)
    assert layout.group_ranks(5, "dp", "tp") == (0, 1, 4, 5)
    assert layout.group_ranks(5, "pp") == (5,)
    for axes in itertools.chain.from_iterable(
        itertools.combinations(layout.axes, n) for n in range(4)
    ):
        groups = {layout.group_ranks(rank, *axes) for rank in range(8)}
        assert sorted(rank for group in groups for rank in group) == list(range(8))  # a partition
        assert all(len(group) == layout.size(*axes) for group in groups)


def test_index_is_the_place_among_peers() -> None:
    layout = Layout.parse("dp2.tp2.fsdp3")
    for rank in range(layout.world):
        for axes in (("dp",), ("dp", "fsdp"), ("tp", "fsdp"), ("pp",)):
            assert layout.group_ranks(rank, *axes)[layout.index(rank, *axes)] == rank


def test_sizes_and_live_axes() -> None:
    layout = Layout.parse("dp1.fsdp2.tp4+sequence")
    assert layout.size("dp", "fsdp") == 2
    assert layout.size("pp") == 1
    assert layout.size() == 1
    assert layout.active_axes() == ("fsdp", "tp")
    assert layout.active_axes("dp", "tp") == ("tp",)
    assert layout.options_of("tp") == ("sequence",)
    assert layout.options_of("dp") == ()


def test_layouts_are_values() -> None:
    assert Layout.parse("dp2.tp2") == Layout.parse("dp2.tp2")
    assert Layout.parse("dp2.tp2") != Layout.parse("tp2.dp2")
    assert len({Layout.parse("dp2"), Layout.parse("dp2"), Layout.parse("dp2+x")}) == 2
