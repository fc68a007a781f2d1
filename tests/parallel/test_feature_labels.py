"""What labels of features take: of each linear, and not of each sample and position."""

import pytest
import torch

from weft._torch.tensors import fake_mode
from weft.models import decoder
from weft.parallel.traced_chains.feature_mode import _reshaped
from weft.parallel.traced_chains.followed_forward import follow
from weft.parallel.without_elements import copy_without_elements

SEQUENCE, WIDTH = 4096, 64


@pytest.mark.parametrize("batch", [1, 3])
def test_labels_do_not_grow_with_positions(batch: int) -> None:
    """A rotary embedding puts halves together; attention and views mix heads and positions."""
    model = decoder(vocab=16, dim=WIDTH, layers=1, heads=4, kv_heads=2, seq_len=SEQUENCE)
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    mode = fake_mode()
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.int64)
    whole = copy_without_elements(model, mode)
    followed = follow(whole, {"input_ids": tokens}, mode, linears, set(), (), [])
    assert followed.ended
    rows = {name for name in followed.trace.rows if not name.startswith("head")}
    assert rows == {"blocks.0.attention.wo", "blocks.0.mlp.down"}
    widest = max(t.untyped_storage().nbytes() for t, _ in followed.trace.seen)
    assert widest <= 8 * 4 * WIDTH * WIDTH, f"labels of {widest} bytes"


@pytest.mark.parametrize(
    ("shape", "view"),
    [((), []), ((1,), []), ((), [1]), ((2, 3, 4), [2, 3, -1, 1]), ((2, 3, 4), [6, 4])],
)
def test_views_of_expanded_labels(shape: tuple[int, ...], view: list[int]) -> None:
    """Of no dims, too."""
    labels = torch.arange(1, 1 + (shape[-1] if shape else 1))
    labels = (labels if shape else labels[0]).expand(shape)
    assert torch.equal(_reshaped(labels, view), labels.reshape(view))
