"""What torch must keep doing for weft._torch.data_workers."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from weft._torch.data_workers import hide_worker_info


class Known(IterableDataset):
    """Whether it knows that it is read by a worker, before and after that is hidden."""

    def __iter__(self) -> Iterator[bool]:
        yield get_worker_info() is not None
        hide_worker_info()
        yield get_worker_info() is not None


def test_a_worker_no_longer_knows_that_it_is_one() -> None:
    assert list(DataLoader(Known(), batch_size=None, num_workers=1)) == [True, False]
