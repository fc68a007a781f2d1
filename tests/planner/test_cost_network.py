"""Laws of seconds over a group of ranks, whatever networks it spans."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.layout import Layout
from weft.planner.cost.hardware import Cluster, Era, Tier, named_sheet
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.network import Network, RankGroup

GB = 1e9
ERA = Era(link=1.0, network=1.0)


def network(*widths: int, devices: int = 4096, latency: float = 0.0) -> Network:
    """Tiers that join so many devices each, the outermost any number; each a tenth as quick as the
    one before."""
    sheet = named_sheet("a100")
    tiers = tuple(
        Tier(name=str(i), devices=w, bps=1e11 / 10**i, latency_s=latency)
        for i, w in enumerate((*widths, 0))
    )
    return Network(
        Cluster(hardware=sheet.model_copy(update={"tiers": tiers}), devices=devices), ERA
    )


def choices(*layouts: str) -> LayoutBatch:
    return LayoutBatch.of([Layout.parse(text) for text in layouts], batch=4096)


def group(net: Network, layout: str, *axes: str) -> RankGroup:
    return net.group(choices(layout), *axes)


def test_one_rank_costs_nothing() -> None:
    net = network(8, latency=1e-5)
    alone = group(net, "dp8.tp1", "tp")
    for seconds in (net.gather_s, net.reduce_s, net.exchange_s):
        assert seconds(GB, alone) == [0.0]
    assert net.send_s(GB, choices("pp1.dp8"), "pp") == [0.0]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_within_one_network(size: int) -> None:
    net = network(8)
    ranks = group(net, f"tp{size}", "tp")
    assert net.gather_s(GB, ranks) == pytest.approx((size - 1) / size * GB / 1e11)
    assert net.reduce_s(GB, ranks) == pytest.approx(2 * (size - 1) / size * GB / 1e11)
    assert net.exchange_s(GB, ranks) == pytest.approx((size - 1) / size * GB / 1e11)


def test_latency_is_a_rings_or_a_trees() -> None:
    net = network(1024, latency=1.0)
    assert [net.gather_s(0.0, group(net, f"tp{n}", "tp"))[0] for n in (2, 4, 8)] == [1.0, 3.0, 6.0]
    assert net.reduce_s(0.0, group(net, "tp1024", "tp")) == [2 * 2 * 10.0]


def test_between_nodes_a_gather_goes_round_all_ranks() -> None:
    """In a ring of 64 ranks on 8 nodes 7 steps are between nodes."""
    net = network(8, latency=1.0)
    ranks = group(net, "fsdp64", "fsdp")
    assert net.ring_hops(ranks) == pytest.approx(56 + 7)
    low = 56 * 1.9 / 3.4 + 7 * 4 / 14
    assert net.gather_s(0.0, ranks, count=3) == pytest.approx(3 * low)
    wire = 63 / 64 * 1e15 / net.bandwidth(ranks)
    assert net.gather_s(1e15, ranks) == pytest.approx(63 + wire), "LL128 carries 120 bytes of 128"
    assert net.reduce_s(0.0, ranks) == pytest.approx(2 * 2 * (3 + 3)), "in a tree"


@pytest.mark.parametrize("inside", [1, 2, 4, 8])
def test_a_group_over_nodes_has_a_rail_for_each_member_inside(inside: int) -> None:
    net, rail, link = network(8), 1e10, 1e11
    ranks = group(
        net, f"dp4.pp{8 // inside}.tp{inside}", "dp", "tp"
    )  # so many within a node of 8, on 4 nodes
    assert (ranks.size, ranks.inside[0], ranks.inside[1]) == (4 * inside, inside, 4 * inside)
    assert net.bandwidth(ranks) == min(inside * rail, link)
    quick = Network(
        net.cluster.model_copy(), ERA.model_copy(update={"link": 0.05})
    )  # a link slower than 8 rails
    assert quick.bandwidth(ranks) == min(inside * rail, 0.05 * link if inside > 1 else np.inf)


def test_three_tiers() -> None:
    net = network(4, 16)
    near, far, across = (group(net, text, "dp") for text in ("dp4", "dp16", "dp64"))
    assert [[float(n[0]) for n in g.inside] for g in (near, far, across)] == [
        [4, 4, 4],
        [4, 16, 16],
        [4, 16, 64],
    ]
    assert [float(net.bandwidth(g)[0]) for g in (near, far, across)] == [1e11, 4e10, 16e9]
    # of 64 equal parts: 3 stay in the tier of 4, 12 cross the second, 48 the third, over every
    # rank's own rail
    shares = [3 / 64 / 1e11, 12 / 64 / 1e10, 48 / 64 / 1e9]
    assert net.exchange_s(GB, across) == pytest.approx(max(shares) * GB)
    # strided by 16: no two within a node
    apart = group(net, "dp4.tp16", "dp")
    assert [float(n[0]) for n in apart.inside] == [1, 1, 4] and net.bandwidth(apart) == [1e9]


def test_what_leaves_a_node_is_its_share_of_an_exchange() -> None:
    net = network(8)
    for nodes in (2, 4, 16):
        ranks = group(net, f"dp{8 * nodes}", "dp")
        assert net.exchange_s(GB, ranks) == pytest.approx((nodes - 1) / nodes * GB / 1e10)


@pytest.mark.parametrize("inner", [1, 2, 8])
def test_more_bytes_and_more_ranks_take_longer(inner: int) -> None:
    net = network(8, 64, latency=1e-6)
    groups = [group(net, f"dp{n}.tp{inner}", "dp") for n in (1, 2, 4, 8, 16, 64, 256)]
    for seconds in (net.gather_s, net.reduce_s, net.exchange_s):
        table = np.array(
            [[float(seconds(nbytes, g)[0]) for nbytes in (0.0, 1e3, 1e6, 1e9)] for g in groups]
        )
        assert (np.diff(table, axis=0) >= 0).all(), "ranks"
        assert (np.diff(table[1:], axis=1) > 0).all() and np.isfinite(table).all(), "bytes"


def test_a_message_goes_over_the_innermost_network_that_holds_the_pipeline() -> None:
    net = network(8, 64)
    rates = {"pp4.tp2": 1e11, "pp2.tp8": 1e10, "pp4.tp4": 1e10, "pp8.dp2.tp8": 1e9}
    for layout, rate in rates.items():
        assert net.send_s(GB, choices(layout), "pp") == [pytest.approx(GB / rate)], layout


def test_eras_scale_links_within_nodes_and_between() -> None:
    full = network(8)
    half = Network(full.cluster, Era(link=0.5, network=0.25))
    near, far = group(full, "tp8", "tp"), group(full, "dp4.tp8", "dp")
    assert half.gather_s(GB, near) == 2 * full.gather_s(GB, near)
    assert half.gather_s(GB, far) == 4 * full.gather_s(GB, far)


def test_entries_do_not_touch_each_other() -> None:
    net = network(8, 64, latency=1e-6)
    layouts = ["dp2.tp4", "pp2.dp16.tp2", "fsdp64", "dp1"]
    together = net.reduce_s(GB, net.group(choices(*layouts), "dp", "fsdp"))
    assert list(together) == [
        float(net.reduce_s(GB, group(net, one, "dp", "fsdp"))[0]) for one in layouts
    ]
