"""benchmarks/planners prices the picks of other searches as they are written, and says so."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLANNERS = BENCHMARKS / "planners"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for folder in (BENCHMARKS / "published", PLANNERS):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("searches")


def _picks(searches: Any) -> list[dict[str, str]]:
    return searches.published.read(PLANNERS / "picks.csv")


def test_each_pick_is_the_layout_of_its_row(searches: Any) -> None:
    for row in _picks(searches):
        asks, layout = searches.question(row)
        c = layout.choices
        assert (asks.batch, int(c.world[0])) == (int(row["gbs"]), int(row["n_accel"]))
        assert int(c.microbatch[0]) == int(row["mbs"])
        assert int(c.batch[0]) == asks.batch
        again = int(row["blocks_again"] or (row["layers"] if row["recompute"] == "full" else 0))
        assert float(c.again[0]) == again / int(row["layers"])
        assert asks.cluster.hardware.device.memory_gib == float(row["accel_mem_gb"])


@pytest.mark.parametrize("which", [2, 9])  # a pipeline, and a shard over all
def test_a_pick_of_weft_written_as_a_row_has_the_same_price(searches: Any, which: int) -> None:
    row = _picks(searches)[which]
    asks, _ = searches.question(row)
    ours = searches.best_of(searches.SPACES[row["source_id"]], asks)
    again = searches.priced(searches.row_of(row, ours))
    assert (again.layout, again.microbatch) == (ours.layout, ours.microbatch)
    assert again.step_s == pytest.approx(ours.step_s)
    assert ours.fits and ours.step_s <= searches.priced(row).step_s


def test_an_execution_of_calculon_is_a_row(searches: Any) -> None:
    like = next(
        row for row in searches.published.own() if row["row_id"] == "korthikanti2022_table5-0004"
    )
    execution = {
        "tensor_par": 4,
        "pipeline_par": 8,
        "data_par": 2,
        "pipeline_interleaving": 3,
        "microbatch_size": 2,
        "batch_size": 64,
        "activation_recompute": "attn_only",
        "optimizer_sharding": True,
        "tensor_par_comm_type": "rs_ag",
    }
    made = searches.row_of_execution(like, execution)
    _, layout = searches.question(made)
    assert str(layout.layout(0)) == "pp8.fsdp2+zero1.tp4+sequence"
    assert (layout.schedule(0), layout.recompute(0)) == (
        ("interleaved", {"chunks": 3}),
        "selective",
    )
    assert searches.of_row(made).layout == (4, 1, 8, 3, 2, 1, True, 2)


def test_a_search_of_even_stages_has_no_others(searches: Any) -> None:
    """Stages of one block and of two are none of Calculon's."""
    like = next(
        row for row in searches.published.own() if row["row_id"] == "korthikanti2022_table5-0006"
    )
    asks, _ = searches.question(like)
    c = searches.best_of(searches.SPACES["Calculon"], asks).chosen.choices
    assert 105 % int(c.stage_ranks[0] * c.chunks[0]) == 0


def test_the_page_has_the_table_of_the_results(searches: Any) -> None:
    found = json.loads((PLANNERS / "results" / "searches.json").read_text())["runs"]
    assert "\n".join(searches.table(found)) in (PLANNERS / "README.md").read_text()
