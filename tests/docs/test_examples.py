"""The `>>>` examples of public docstrings hold, and each public name has an example."""

from __future__ import annotations

import doctest
import inspect
import sys
from typing import Any

import pytest

from tests.docs.test_reference import load_generator

FACES = ("weft", "weft.losses", "weft.models", "weft.data", "weft.sync")
# Results and records that a user gets and does not make; a name of another face; a registry.
WITHOUT_EXAMPLE = {"weft.Plan", "weft.StepResult", "weft.Remote", "weft.sync.registry"}


def public() -> list[Any]:
    generator = load_generator()
    return [
        pytest.param(value, id=f"{face}.{name}")
        for face in FACES
        for name, value in generator.public_names(face)
        if callable(value) and f"{face}.{name}" not in WITHOUT_EXAMPLE
    ]


@pytest.mark.parametrize("value", public())
def test_a_public_name_has_an_example_that_holds(value: Any) -> None:
    assert "Example:" in (inspect.getdoc(value) or ""), "add an example to the docstring"
    names = {**vars(sys.modules[value.__module__])}
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(verbose=False)
    for example in finder.find(value, value.__name__, globs=names):
        runner.run(example)
    assert runner.failures == 0
