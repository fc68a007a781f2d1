"""Nets that take their batch apart: patches, edges and words of all samples in one dim, weights
that are made for each sample."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
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


class Implicit(nn.Module):
    """The same small field for each sample, at points of its own (torch.func)."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.field = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
        self.shift = nn.Linear(8, 12)

    def at(self, code, shift, points):
        own = {"0.bias": self.field[0].bias + shift}
        x = torch.cat([points, code.expand(len(points), -1)], -1)
        return functional_call(self.field, own, (x,))[:, 0]

    def forward(self, x, points):
        return torch.vmap(self.at)(self.encode(x), self.shift(x), points)


class ChosenRows(nn.Module):
    """A feed-forward of the rows that the data choose, some more of some samples."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 16), nn.Linear(16, 4)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, nodes, chosen):
        x = self.first(nodes)
        y = torch.zeros_like(x)
        y[chosen] = self.down(F.gelu(self.up(x[chosen])))
        return self.head((x + y).mean(1))


class DroppedEdges(nn.Module):
    """Drops out messages, of which each graph has as many as it has edges."""

    def __init__(self):
        super().__init__()
        self.first, self.message, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, nodes, edges, kinds):
        b, n, _ = nodes.shape
        real = kinds.flatten() > 0
        start = n * torch.arange(b)[:, None, None]
        src, dst = (edges + start).flatten(0, 1)[real].t()
        x = self.first(nodes).flatten(0, 1)
        messages = F.dropout(self.message(x)[src], 0.3, self.training)
        return self.head(x.index_add(0, dst, messages).view(b, n, -1).mean(1))


class Trimmed(nn.Module):
    """Cuts sequences to the longest before it drops out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, nodes, lengths):
        x = self.first(nodes[:, : int(lengths.max())])
        x = F.dropout(torch.tanh(x), 0.2, self.training)
        return self.head(self.second(x).sum(1))


class Lengths(nn.Module):
    """Lengths shrink with the sequence, and later blocks compare positions with them."""

    def __init__(self):
        super().__init__()
        self.subsample = nn.Conv1d(5, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def shorter(self, nodes, lengths):
        return self.subsample(nodes.transpose(1, 2)).transpose(1, 2), (lengths - 1) // 2 + 1

    def forward(self, nodes, lengths):
        x, lengths = self.shorter(nodes, lengths)
        for block in self.blocks:
            real = torch.arange(x.size(1))[None] < lengths[:, None]
            late = torch.arange(x.size(1))[None] >= lengths[:, None] - 1
            x = x + torch.tanh(block(x)) * real[..., None] + 0.1 * late[..., None]
        return self.head(x.mean(1))


class LinearsAtRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.fc4, self.fc5, self.fc6 = nn.Linear(32, 16), nn.Linear(16, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(F.relu(self.fc2(F.relu(self.fc1(x)))))
        x = self.drop(F.relu(self.fc4(F.relu(self.fc3(x)))))
        return self.fc6(F.relu(self.fc5(x)))


class AttentionAtRoot(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.norm, self.head = (
            nn.Embedding(VOCAB, d),
            nn.LayerNorm(d),
            nn.Linear(d, VOCAB),
        )
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, d))
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class FeaturesAmongTokens(nn.Module):
    """Features of images take the places of a token, whose number is checked (LLaVA)."""

    def __init__(self, d=16):
        super().__init__()
        self.emb, self.project = nn.Embedding(VOCAB, d), nn.Linear(5, d)
        self.blocks = nn.ModuleList(FusedBlock(d, 4, 0.0) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids, images):
        x, features = self.emb(input_ids), self.project(images)
        special = (input_ids == 0).unsqueeze(-1).expand_as(x)
        if x[special].numel() != features.numel():
            raise ValueError("as many features as tokens")
        x = x.masked_scatter(special, features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def linears_in_list():
    sizes = [8, 32, 16, 32, 16, 32, 16, 32, 4]
    pairs = ((nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes))
    return Named(nn.Sequential(*itertools.chain(*pairs)))


class Named(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def vectors():
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, 4)}


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


def fields():
    x, points = torch.randn(BATCH, 8), torch.randn(BATCH, 7, 2)
    return {"x": x, "points": points, "target": torch.randn(BATCH, 7)}


def choices(n=6):
    """One row of each sample, and two of the last: 2 in each microbatch of the first rank."""
    chosen = torch.zeros(BATCH, n, dtype=torch.bool)
    chosen[torch.arange(BATCH), torch.randint(0, n - 1, (BATCH,))] = True
    chosen[-1, n - 1] = True
    return {
        "nodes": torch.randn(BATCH, n, 5),
        "chosen": chosen,
        "target": torch.randn(BATCH, 4),
    }


def graphs(n=6, e=9):
    kinds = torch.ones(BATCH, e, dtype=torch.int64)
    for row in range(BATCH):
        kinds[row, e - row % 3 :] = 0
    return {
        "nodes": torch.randn(BATCH, n, 5),
        "edges": torch.randint(0, n, (BATCH, e, 2)),
        "kinds": kinds,
        "target": torch.randn(BATCH, 4),
    }


def captions(n=3):
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH))
    ids[:, :n] = 0
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return {"input_ids": ids, "images": torch.randn(BATCH, n, 5), "labels": labels}


def signals(n=12):
    return {
        "nodes": torch.randn(BATCH, n, 5),
        "lengths": torch.randint(n // 2, n + 1, (BATCH,)),
        "target": torch.randn(BATCH, 4),
    }


EDGES = {
    "megabyte": Subject(MegaByte, tokens, next_token),
    "mpnn": Subject(MPNN, molecules, mse),
    "packed": Subject(Packed, texts, classification),
    "packed-dynamic": Subject(
        Packed, texts, classification, (("accumulate", 2), ("dynamic_shapes", True))
    ),
    "task-hyper": Subject(within, tasks, mse),
    "task-hyper-apart": Subject(apart, tasks, mse),
    "linears-in-list": Subject(linears_in_list, vectors, mse),
    "linears-at-root": Subject(LinearsAtRoot, vectors, mse),
    "attention-at-root": Subject(AttentionAtRoot, tokens, next_token),
    "features-among-tokens": Subject(FeaturesAmongTokens, captions, next_token),
    "implicit": Subject(Implicit, fields, mse),
    "chosen-rows": Subject(ChosenRows, choices, mse),
    "dropped-edges": Subject(DroppedEdges, graphs, mse),
    "lengths": Subject(Lengths, signals, mse),
    "trimmed": Subject(Trimmed, signals, mse),
}
