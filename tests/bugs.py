"""Injected bugs: a catalogue of them, and what verify says in worker processes with one of them in.

A bug is a context manager that breaks weft inside the worker processes, or gives a broken Case; the
reference is run clean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import weft
from tests.cases import Subject, reference
from weft.core import UnsupportedModel
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference
from weft.verification.report import VerifyReport

Fault = Callable[[Case], AbstractContextManager[Case]]
STEPS = 2


@dataclass
class Catalogue:
    """Bugs in `subjects`. `params`, for pytest: (fault, subject, layout, where, says), named as the
    bug."""

    subjects: Mapping[str, Subject]
    params: list[Any] = field(default_factory=list)

    def bug(
        self, subject: str, layout: str, says: str, where: str = "first"
    ) -> Callable[[Callable], Fault]:
        """Enter a bug under its function's name. `says` is a pattern of what the result must say at
        `where`: its first difference, its problem, or the collective that strays from the plan."""

        def register(function: Callable[[Case], Iterator[Case]]) -> Fault:
            fault = contextmanager(function)
            self.params.append(
                pytest.param(fault, subject, layout, where, says, id=function.__name__)
            )
            return fault

        return register

    @property
    def names(self) -> list[str]:
        return [param.id for param in self.params]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each (subject, layout) that has a bug."""
        return sorted({(param.values[1], param.values[2]) for param in self.params})

    def run(self, pool: Any, fault: Fault, subject: str, layout: str) -> LayoutResult:
        found = self.subjects[subject]
        world = weft.Layout.parse(layout).world
        return pool.run(under, fault, found.case(), layout, held_to(found, layout), world=world)[0]


@cache
def held_to(subject: Subject, layout: str) -> Reference:
    """The one-device run, or where weights are delayed the schedule's own definition."""
    if weft.Layout.parse(layout).active_axes("pp"):
        case = subject.case()
        if case.plan(case.build(), layout).schedule.versions:
            return run_delayed(case, layout, STEPS)
    return reference(subject, STEPS)


def under(fault: Fault, case: Case, layout: str, clean: Reference) -> LayoutResult:
    """What verify says in this process group, with the bug in."""
    with fault(case) as broken:
        return check_layout(broken, layout, clean)


def assert_caught(result: LayoutResult, where: str, says: str) -> None:
    assert not result.passed, "the bug was not seen"
    assert re.match(says, str(getattr(result, where))), result
    if where == "first":
        assert f"first difference  {result.first}" in VerifyReport((result,), STEPS).text()


def assert_clean(result: LayoutResult) -> None:
    assert result.passed, result
    assert result.first is None and result.problem is None and result.stray is None


@contextmanager
def clean(case: Case) -> Iterator[Case]:
    """No bug."""
    yield case


@contextmanager
def patched(case: Case, *changes: tuple[Any, str, Any]) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        for target, name, new in changes:
            patch.setattr(target, name, new)
        yield case


def with_weights(case: Case) -> Case:
    """The case with ranks that build the whole model, as if its build could not be recorded."""

    def refused() -> nn.Module:
        raise UnsupportedModel("model", "build", "is to be built whole", "nothing")

    return replace(case, build_deferred=refused)


def documented(heading: str) -> list[str]:
    """The bugs in the table that follows this heading of docs/reference/bugs.md."""
    page = (Path(__file__).parent.parent / "docs" / "reference" / "bugs.md").read_text()
    section = re.split(
        r"^#+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]
    return re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
