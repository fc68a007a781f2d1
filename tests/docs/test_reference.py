"""The pages and pictures that docs/generate.py writes are those in the repository."""

from __future__ import annotations

from types import ModuleType

from tests.docs.scripts import ROOT, load_script


def load_generator() -> ModuleType:
    return load_script("generate")


def test_generated_pages_are_up_to_date() -> None:
    assert not sorted(load_generator().outdated()), "run `python docs/generate.py` and commit"


def test_generated_pages_are_all_there_is() -> None:
    """No page or picture is left over from a name that is gone."""
    docs = ROOT / "docs"
    kept = {str(path.relative_to(docs)) for path in docs.glob("reference/*.md")} - {
        "reference/bugs.md"  # written by hand; tests/verification hold it
    }
    kept |= {str(path.relative_to(docs)) for path in docs.glob("images/*")}
    assert kept == set(load_generator().pages()) - set(load_generator().ARCHITECTURE)
