"""What each axis declares, and that the lists of axes follow from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import weft
from weft.core import REPLICA_AXIS, STAGE_AXIS, Divides, LayoutError, UnsupportedModel
from weft.nn.losses import next_token
from weft.nn.models import convnet, decoder
from weft.parallel import axes
from weft.parallel.strategies import allowed_options, axis_table, axis_with_option, registry
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.memory import stage_params
from weft.planner.cost.pipeline_stages import stage_shares
from weft.planner.cost.profile import profile_model
from weft.planner.search.candidates import find_candidates, find_left_out
from weft.planner.search.layout_pattern import ANY, LayoutPattern

VOCAB, DIM = 64, 32
plan = partial(weft.plan, batch=8)


def model(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return decoder(**{"vocab": VOCAB, "dim": DIM, "layers": 2, "heads": 4, **changes})


def test_every_axis_has_traits_and_a_place_of_its_own() -> None:
    assert set(axis_table().traits) == set(registry())
    orders = [traits.order for traits in axis_table().traits.values()]
    assert orders == sorted(set(orders))


def test_lists_of_axes_follow_from_traits() -> None:
    assert axes.DATA_AXES == ("dp", "fsdp", "ep")
    assert (*axes.KEY_AXES, *axes.HEAD_AXES) == axes.SEQUENCE_AXES
    assert axes.FEATURE_AXES == ("tp",) and axes.VOCABULARY_AXES == ("vp", "tp")
    assert axis_table().dividing(Divides.STAGES) == (STAGE_AXIS,)
    assert REPLICA_AXIS in axes.DATA_AXES and axis_with_option("sequence") == "tp"
    assert all("ep" in allowed_options(axis) for axis in axes.SPREADING)


@pytest.mark.parametrize("layout", ["tp2.vp2", "dp2.vp2.tp2"])
def test_two_axes_do_not_divide_one_thing(layout: str) -> None:
    with pytest.raises(LayoutError, match="both divide the vocabulary"):
        plan(model(), layout)


def test_vp_cuts_the_vocabulary_alone() -> None:
    made = plan(model(), "vp2")
    cut = {p.name for step in made.steps for p in step.params if p.stored == Shard(0)}
    assert cut == {"embedding.weight", "head.weight"}
    table = made.params()
    shapes = {w.name: made.local_shape(w, table, {"vp": 1}) for w in made.weights}
    assert shapes["embedding.weight"] == (VOCAB // 2, DIM)
    assert made.data_size == 1, "its ranks have the same samples"


def test_the_old_name_of_an_axis_names_the_new_one() -> None:
    with pytest.raises(LayoutError, match=r"no axis 'up'.*now called .ulysses."):
        plan(model(), "cp2.up2")
    with pytest.raises(LayoutError, match='now called "ulysses"'):
        LayoutPattern.parse("up*.dp*")


def test_vp_needs_a_vocabulary() -> None:
    with pytest.raises(UnsupportedModel, match="no embedding and no head"):
        plan(convnet(), "vp2")
    with pytest.raises(UnsupportedModel, match="has 64 rows"):
        plan(model(), "vp65", batch=65)


def test_vp_is_priced_by_what_it_divides() -> None:
    work = profile_model(model(), {"input_ids": torch.zeros(1, 16, dtype=torch.long)}, next_token)
    choices = LayoutBatch.of([weft.Layout.parse(text) for text in ("dp2", "vp2")], batch=8)
    _, held = stage_params(stage_shares(work, choices)[0], work, choices)
    assert held[0] - held[1] == 2 * VOCAB * DIM / 2


def test_vp_is_searched_where_it_is_named() -> None:
    from tests.planner.test_search import question, work

    asked = question(8, work())
    found = find_candidates(asked, 8, LayoutPattern.parse("vp*.dp*"))
    assert {"dp4.vp2", "dp2.vp4"} <= {str(found.layout(i)) for i in range(len(found))}
    assert not any("vp" in str(each) for each in find_left_out(asked, 8, ANY))
    unnamed = find_candidates(asked, 8)
    assert len(unnamed) and (unnamed.choices.sizes["vp"] == 1).all()
    assert isinstance(asked.cluster, Cluster)
