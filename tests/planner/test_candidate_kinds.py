"""Numbers of rows by which choices of one layout are found."""

import numpy as np
import pytest

from weft.planner.search.candidates import number_rows


@pytest.mark.parametrize(("columns", "most"), [(3, 4), (9, 300), (6, 8192)])
def test_equal_rows_alone_have_one_number(columns: int, most: int) -> None:
    """Also where columns may hold more rows than 64 bits can number."""
    draw = np.random.default_rng(columns)
    rows = np.stack([draw.permutation(most) for _ in range(columns)], 1)
    other_first, other_last = rows.copy(), rows.copy()
    other_first[:, 0] = np.roll(rows[:, 0], 1)
    other_last[:, -1] = np.roll(rows[:, -1], 1)
    rows = np.concatenate([rows, other_first, other_last, rows[:50]])
    numbers = number_rows(rows.T)
    distinct = {tuple(row) for row in rows.tolist()}
    pairs = {(tuple(row), int(n)) for row, n in zip(rows.tolist(), numbers, strict=True)}
    assert len(pairs) == len(distinct) == len({*numbers.tolist()})


def test_no_rows() -> None:
    assert number_rows([np.zeros(0, dtype=np.int64)]).shape == (0,)
