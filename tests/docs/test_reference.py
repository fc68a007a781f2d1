"""The pages and pictures that docs/generate.py writes are those in the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    assert not sorted(load_generator().outdated()), "run `python docs/generate.py` and commit"


def test_generated_pages_are_all_there_is() -> None:
    """No page or picture is left over from a name that is gone."""
    docs = ROOT / "docs"
    kept = {str(path.relative_to(docs)) for path in docs.glob("reference/*.md")} - {
        "reference/bugs.md"  # written by hand; tests/verification hold it
    }
    kept |= {str(path.relative_to(docs)) for path in docs.glob("images/*")}
    assert kept == set(load_generator().pages()) - {"architecture.md"}
