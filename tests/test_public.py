"""The names that run files and scripts use: what type checkers are told is what is there."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft


@pytest.mark.parametrize(
    "name", ["weft", "weft.losses", "weft.models", "weft.data", "weft.optimizers"]
)
def test_what_is_declared_is_there(name: str) -> None:
    module = importlib.import_module(name)
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(stub) if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname for node in imports for alias in node.names}
    assert declared == set(module.__all__)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_what_scripts_use_comes_with_import_weft_alone() -> None:
    """In a process of its own: here others have imported it all."""
    code = """
import sys, weft
assert "torch" not in sys.modules, "import weft imports torch"
parts = ["checkpoint", "data", "losses", "models", "optimizers", "sync"]
assert {*parts} <= {*dir(weft)}, dir(weft)
assert weft.losses.next_token and weft.models.decoder and weft.data.stdlib
assert weft.optimizers.elementwise and weft.checkpoint.read_index
"""
    source = str(Path(weft.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source}
    )


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="weft attribute engin"):
        weft.engin  # noqa: B018
