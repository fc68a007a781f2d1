"""What a step does with a batch before its sequences are cut."""

from __future__ import annotations

from weft.nn import check_entries, check_labels, split_loss

from .microbatch import Batch
from .pipeline.stage_compute import Loss


class BatchPreparation:
    """Prepares batches for a loss. `loss` is that of a prepared batch, of any part of a sequence
    if it is positionwise."""

    def __init__(self, loss: Loss):
        self._given, self._checked = loss, False
        self._prepare, split = split_loss(loss)
        self.loss: Loss = split

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the labels that `loss` takes; the first one's labels are checked.

        Raises:
            ConfigError: it is no dict of tensors.
            DataError: its labels are shifted where the loss shifts them, or not where it does not.
        """
        check_entries(batch)
        if not self._checked:
            check_labels(self._given, batch)
            self._checked = True
        return dict(self._prepare(batch))
