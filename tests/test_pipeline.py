"""Every model through every schedule equals one device; what crosses stages is what was predicted.

The grid covers each pair of (model, schedule), (model, layout) and (schedule, layout); `benchmarks/parity` runs all.
"""

from __future__ import annotations

from typing import Any

import pytest
from staged import STAGED
from test_parity import run

SYNCHRONOUS = ["naive", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipev"]


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_first(pool: Any, name: str, kind: str) -> None:
    result = run(pool, STAGED[name], f"pp2+{kind}")
    assert result.passed, result
