"""Nets that take their batch apart: patches, edges and words of all samples in one dim, weights
that are made for each sample."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.cases import BATCH, LENGTH, VOCAB, FusedBlock, Subject, tokens
from weft.nn.losses import classification, mse, next_token


class MegaByte(nn.Module):
    """A decoder over patches, and one over the bytes of each patch (Yu et al. 2023)."""

    def __init__(self, patch=3, d=24):
        super().__init__()
        self.p, self.d = patch, d
        self.glob, self.loc = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, d)
        self.start = nn.Parameter(torch.randn(1, 1, patch * 8))
        self.up, self.down = nn.Linear(patch * 8, d), nn.Linear(d, patch * d)
        self.big, self.small = FusedBlock(d, 4, 0.0), FusedBlock(d, 4, 0.0)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids):
        b, n = input_ids.shape
        patches = self.glob(input_ids).view(b, n // self.p, -1)
        patches = torch.cat([self.start.expand(b, -1, -1), patches[:, :-1]], 1)
        g = self.down(self.big(self.up(patches))).view(b * (n // self.p), self.p, self.d)
        local = F.pad(self.loc(input_ids).view(-1, self.p, self.d), (0, 0, 1, 0))[:, :-1]
        return self.head(self.small(g + local)).view(b, n, -1)


class MPNN(nn.Module):
    """Messages along edges of the batch, and a gated update (Gilmer et al. 2017)."""

    def __init__(self, d=12, steps=3):
        super().__init__()
        self.steps, self.inp = steps, nn.Linear(5, d)
        self.message = nn.Sequential(nn.Linear(2 * d + 3, d), nn.ReLU(), nn.Linear(d, d))
        self.update, self.out = nn.GRUCell(d, d), nn.Linear(d, 4)

    def forward(self, nodes, edge_index, edge_attr):
        b, n, _ = nodes.shape
        h = torch.relu(self.inp(nodes))
        offset = torch.arange(b)[:, None, None] * n
        src, dst = (edge_index + offset).permute(1, 0, 2).reshape(2, -1)
        for _ in range(self.steps):
            flat = h.reshape(b * n, -1)
            m = self.message(torch.cat([flat[src], flat[dst], edge_attr.flatten(0, 1)], -1))
            agg = torch.zeros_like(flat).index_add_(0, dst, m)
            deg = torch.bincount(dst, minlength=b * n).clamp(min=1).unsqueeze(-1)
            h = self.update(agg / deg, flat).view(b, n, -1)
        return self.out(h.sum(1))


class Packed(nn.Module):
    """A recurrence over packed words, which attention pools."""

    def __init__(self, d=12):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d, padding_idx=0)
        self.lstm = nn.LSTM(d, d, num_layers=2, bidirectional=True, batch_first=True)
        self.attention, self.fc = nn.Linear(2 * d, 1), nn.Linear(4 * d, 5)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(
            self.embedding(text), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, (hidden, _) = self.lstm(packed)
        output, lengths = pad_packed_sequence(output, batch_first=True)
        mask = torch.arange(output.size(1))[None, :] < lengths[:, None]
        weights = self.attention(output).squeeze(2).masked_fill(~mask, -1e10).softmax(1)
        context = torch.bmm(weights.unsqueeze(1), output).squeeze(1)
        return self.fc(torch.cat((context, hidden[-2], hidden[-1]), dim=1))


class PerSample(nn.Module):
    def forward(self, x, w, b):
        return torch.vmap(F.linear)(x, w, b)


class TaskHyper(nn.Module):
    """Weights of a layer for each sample's task."""

    def __init__(self, apart):
        super().__init__()
        self.task, self.layer = nn.Embedding(3, 6), PerSample()
        self.w, self.b, self.head = nn.Linear(6, 12 * 8), nn.Linear(6, 12), nn.Linear(12, 4)
        self.apart = apart

    def forward(self, x, task):
        z = self.task(task)
        w, b = self.w(z).view(-1, 12, 8), self.b(z)
        return self.head(
            torch.relu(self.layer(x, w, b) if self.apart else torch.vmap(F.linear)(x, w, b))
        )


def molecules(n=6, e=9):
    return {
        "nodes": torch.randn(BATCH, n, 5),
        "edge_index": torch.randint(0, n, (BATCH, 2, e)),
        "edge_attr": torch.randn(BATCH, e, 3),
        "target": torch.randn(BATCH, 4),
    }


def texts():
    lengths = torch.randint(3, LENGTH + 1, (BATCH,))
    text = torch.randint(1, VOCAB, (BATCH, LENGTH))
    text[torch.arange(LENGTH)[None] >= lengths[:, None]] = 0
    return {"text": text, "lengths": lengths, "label": torch.randint(5, (BATCH,))}


def tasks():
    x, task = torch.randn(BATCH, 8), torch.randint(0, 3, (BATCH,))
    return {"x": x, "task": task, "target": torch.randn(BATCH, 4)}


def within():
    return TaskHyper(False)


def apart():
    return TaskHyper(True)


EDGES = {
    "megabyte": Subject(MegaByte, tokens, next_token),
    "mpnn": Subject(MPNN, molecules, mse),
    "packed": Subject(Packed, texts, classification),
    "packed-dynamic": Subject(
        Packed, texts, classification, (("accumulate", 2), ("dynamic_shapes", True))
    ),
    "task-hyper": Subject(within, tasks, mse),
    "task-hyper-apart": Subject(apart, tasks, mse),
}
