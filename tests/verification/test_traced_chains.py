"""Tensor parallel of modules whose names say nothing: cut by what their forward computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import weft
from tests.cases import Subject, laid, reference, seeded, tokens
from tests.verification.nets_to_trace import TO_TRACE, Net, NormedHeads
from weft.core import COPY
from weft.nn.losses import next_token
from weft.verification.compare import check_layout

SUBJECTS = {
    name: Subject(partial(Net, expected.mixer), tokens, next_token)
    for name, expected in TO_TRACE.items()
}


@pytest.mark.parametrize("name", TO_TRACE)
def test_what_is_cut(name: str) -> None:
    """By tensor parallel, in both blocks: no more and no less."""
    subject = SUBJECTS[name]
    table = laid(subject, seeded(subject.build), "tp2").params()
    cut = {n for n, axes in table.items() if "tp" in axes and axes["tp"].stored != COPY}
    inside = {n for n in cut if n.startswith("parts.")}
    assert inside == {f"parts.{i}.own.{key}" for i in (0, 1) for key in TO_TRACE[name].cut}


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp4", marks=pytest.mark.grid)])
@pytest.mark.parametrize("name", TO_TRACE)
def test_equals_one_device(pool: Any, name: str, layout: str) -> None:
    subject = SUBJECTS[name]
    case = subject.case()
    world = int(layout[2:])
    found = pool.run(check_layout, case, layout, reference(subject), world=world)[0]
    assert found.passed, found


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("tp2", "full"),
        ("fsdp2.tp2", "none"),
        ("pp2.tp2", "full"),
        ("cp2.tp2", "none"),
    ],
)
def test_norms_over_all_heads_on_layouts(pool: Any, layout: str, recompute: str) -> None:
    plan = (("recompute", recompute), ("accumulate", 2))
    subject = Subject(partial(Net, NormedHeads), tokens, next_token, plan)
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]
    assert found.passed, found
