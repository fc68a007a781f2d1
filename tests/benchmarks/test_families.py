"""What the pages say of model families is what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "families"))

import family_cells


def test_both_pages_have_the_counts_of_the_cells() -> None:
    found = family_cells.read()
    assert len(found) > 1000
    assert family_cells.tables(found) in family_cells.README.read_text()
    assert family_cells.counts(found) in family_cells.OF_PROJECT.read_text()


def test_counts() -> None:
    found = [
        family_cells.Cell("a", "cp2", "equal", trained=True),
        family_cells.Cell("b", "cp2", "equal"),
        family_cells.Cell("c", "cp2", "refused", "samples have no sequence"),
        family_cells.Cell("d", "cp2", "not built"),
    ]
    counts = family_cells.counts(found)
    assert "| `cp2` | 3 | 2 (67%) | 1 |" in counts
    assert "Of the 1 that `cp2` refuses, 1 have no sequence (images), 0 a" in counts
    assert "| `cp2` | 3 | 2 | 0 | 1 | 0 | 0 | 1 |" in family_cells.tables(found)
