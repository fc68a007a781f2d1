"""What all tests share: one thread, one pool of processes for the whole session, and how many cases of a grid run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weft.launch.processes import Pool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of every grid that runs in processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a grid that runs in processes, the cases that have a value, or an axis in one, that none before them has."""
    if config.getoption("--all-cases"):
        return
    had, left = set[tuple[str, str, str]](), []
    for item in items:
        case = getattr(item, "callspec", None)
        if case is None or "pool" not in item.fixturenames:  # type: ignore[attr-defined]
            continue
        values = [
            (item.originalname, name, part) for name, value in case.params.items() for part in str(value).split(".")
        ]
        if had.issuperset(values):
            left.append(item)
        had.update(values)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes; `pool.run(function, *args, world=n)`. Functions stand at the top of a test module."""
    with Pool(4) as processes:
        yield processes
