"""What the pages say of model families is what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "families"))

import cells


def test_both_pages_have_the_counts_of_the_cells() -> None:
    found = cells.read()
    assert len(found) > 1000
    assert cells.tables(found) in cells.README.read_text()
    assert cells.counts(found) in cells.OF_PROJECT.read_text()


def test_counts() -> None:
    found = [
        cells.Cell("a", "cp2", "equal", trained=True),
        cells.Cell("b", "cp2", "equal"),
        cells.Cell("c", "cp2", "refused", "samples have no sequence"),
        cells.Cell("d", "cp2", "not built"),
    ]
    counts = cells.counts(found)
    assert "| `cp2` | 3 | 2 (67%) | 1 |" in counts
    assert "Of the 1 that `cp2` refuses, 1 have no sequence (images), and 0 a" in counts
    assert "| `cp2` | 3 | 2 | 0 | 1 | 0 | 0 | 1 |" in cells.tables(found)
