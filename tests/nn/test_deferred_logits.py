"""A head whose logits the loss makes gives what a plain head gives, whatever is done with them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.nn.test_losses import IGNORED, peak_bytes
from weft.nn import deferred_logits, losses
from weft.nn.deferred_logits import DeferredLogits, DeferringHeads, computed

VOCAB, DIM = 31, 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(deferred_logits, "CPU_CHUNK", 4 * VOCAB)  # of 21 rows, the last chunk has 1


def problem(dtype=torch.float64, bias=False):
    """A head, hidden states [3, 7, DIM] and labels, of which some do not count."""
    torch.manual_seed(0)
    head = nn.Linear(DIM, VOCAB, bias=bias, dtype=dtype)
    labels = torch.randint(VOCAB, (3, 7))
    labels[0, 3:] = IGNORED
    return head, torch.randn(3, 7, DIM, dtype=dtype), labels


def step(head, hidden, labels, use=lambda logits: logits):
    """[loss, gradient of hidden states, of weight, of bias], and what the loss was given."""
    hidden = hidden.clone().requires_grad_(head.weight.requires_grad or head.bias is not None)
    head.zero_grad()
    logits = use(head(hidden))
    total, _ = losses.cross_entropy(logits, labels)
    (0.5 * total).backward()
    return [total.detach(), hidden.grad, *[p.grad for p in head.parameters()]], logits


def both(head, hidden, labels, use=lambda logits: logits):
    """The same step with whole and with deferred logits."""
    expected, _ = step(head, hidden, labels, use)
    with DeferringHeads([head], few=0):
        found, logits = step(head, hidden, labels, use)
    return expected, found, logits


@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_in_chunks(bias):
    expected, found, logits = both(*problem(bias=bias))
    assert type(logits) is DeferredLogits and not logits.made
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cast", [False, True])
def test_low_precision(cast):
    """Products in bfloat16, sums of the weight's gradient over chunks in float32."""
    dtype = torch.float32 if cast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        expected, found, logits = both(*problem(dtype, bias=True))
    assert type(logits) is DeferredLogits and logits.dtype == torch.bfloat16
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=2e-2, atol=1e-2 * float(a.abs().max()))


def capped(logits):
    return 3 * torch.tanh(logits / 3)


def read_first(logits):
    logits.argmax(-1)
    return logits


def written(logits):
    logits[..., 3] = -1e3
    return logits


def scaled_in_place(logits):
    return logits.mul_(2.0)


def added_to_itself(logits):
    return logits + logits.detach()


def twice(logits):
    """Two gradients meet at the head: one in chunks, one whole."""
    (logits.square().sum() * 1e-3).backward(retain_graph=True)
    return logits


USES = [capped, read_first, written, scaled_in_place, added_to_itself, twice, torch.clone]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_any_other_use(use):
    expected, found, _ = both(*problem(bias=True), use)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


def test_a_second_loss_on_the_same_logits():
    head, hidden, labels = problem()

    def total(logits):
        return losses.cross_entropy(logits, labels)[0] + logits.square().mean()

    grads = []
    for heads in (DeferringHeads([], 0), DeferringHeads([head], 0)):
        with heads:
            grads.append(torch.autograd.grad(total(head(hidden)), head.weight)[0])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_frozen_head_and_no_gradient():
    head, hidden, labels = problem(bias=True)
    head.requires_grad_(False)
    expected, found, _ = both(head, hidden, labels)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)
    with torch.no_grad(), DeferringHeads([head], few=0):
        total, weight = losses.cross_entropy(head(hidden), labels)
    torch.testing.assert_close(total, expected[0])
    assert not total.requires_grad and weight.item() == 17


def test_what_needs_memory_gets_it():
    head, hidden, labels = problem()
    expected = head(hidden)
    with torch.no_grad(), DeferringHeads([head], few=0):
        logits = head(hidden)
        assert "DeferredLogits" in repr(logits) and not logits.made
        assert logits.tolist() == expected.tolist()
        assert (logits.detach().numpy() == expected.detach().numpy()).all()
        assert torch.equal(pickle.loads(pickle.dumps(logits)), expected)
        assert torch.equal(copy.deepcopy(logits), expected)
        assert type(computed(logits)) is torch.Tensor and torch.equal(logits, expected)
        with pytest.raises(RuntimeError, match=f"outside the vocabulary of {VOCAB}"):
            losses.cross_entropy(logits, labels + VOCAB)


def test_when_heads_defer():
    """Not outside of the context, not few logits, not a head that is more than a linear."""
    head, hidden, _ = problem()
    heads = DeferringHeads([head], few=21 * VOCAB)
    assert type(head(hidden)) is torch.Tensor
    with heads:
        assert type(head(hidden)) is torch.Tensor
    with DeferringHeads([other := nn.Linear(DIM, VOCAB)], few=21 * VOCAB - 1):
        assert type(other(hidden.float())) is DeferredLogits

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with DeferringHeads([scaled := Scaled(DIM, VOCAB)], few=0):
        assert type(scaled(hidden.float())) is torch.Tensor


def test_memory_is_two_chunks(monkeypatch):
    """Of 2,000 x 1,000 logits, 8 MB in float32, a twenty-fourth at a time."""
    monkeypatch.setattr(deferred_logits, "CPU_CHUNK", 2**24)
    head = nn.Linear(8, 1000, bias=False)
    hidden = torch.randn(2000, 8, requires_grad=True)
    labels = torch.randint(1000, (2000,))
    gradients = 4 * (8 * 1000 + 8 * 2000)
    with DeferringHeads([head], few=0):
        step(head, hidden.detach(), labels)
        peak = peak_bytes(lambda: losses.cross_entropy(head(hidden), labels)[0].backward())
    assert peak <= 2000 * 1000 * 4 / 8 + gradients
