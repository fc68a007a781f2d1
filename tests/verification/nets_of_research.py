"""Nets of research code: a soft mixture of experts, and a matcher of key points whose modules are
called with sets of different sizes."""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import BATCH, Subject


def count(n):
    return torch.tensor(float(n))


class SoftMoELayer(nn.Module):
    """Puigcerver et al. 2023: slots are means of tokens, tokens are means of slots."""

    def __init__(self, d_model, num_experts, slots_per_expert, layer):
        super().__init__()
        self.num_experts, self.slots_per_expert = num_experts, slots_per_expert
        self.phi = nn.Parameter(torch.zeros(d_model, num_experts, slots_per_expert))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.phi, mean=0, std=1 / d_model**0.5)
        self.experts = nn.ModuleList([layer() for _ in range(num_experts)])

    def forward(self, x):  # [b, m, d]
        assert len(x.shape) == 3, f"expected 3 dims, got {x.shape}"
        phi = self.scale * F.normalize(self.phi, dim=0)
        logits = torch.einsum("bmd,dnp->bmnp", F.normalize(x, dim=2), phi)
        d = F.softmax(logits, dim=1)
        c = logits.flatten(2).softmax(dim=-1).view_as(logits)
        xs = torch.einsum("bmd,bmnp->bnpd", x, d)
        ys = torch.stack([f_i(xs[:, i, :, :]) for i, f_i in enumerate(self.experts)], dim=1)
        return torch.einsum("bnpd,bmnp->bmd", ys, c)


class SoftMoEViT(nn.Module):
    def __init__(self, num_classes=6, dim=16, depth=3, heads=4):
        super().__init__()
        self.to_patch = nn.Conv2d(3, dim, kernel_size=4, stride=4, bias=False)
        self.pos_emb = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.layers = nn.ModuleList()
        for i in range(depth):
            mlp = lambda: nn.Sequential(  # noqa: E731
                nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.05), nn.Linear(2 * dim, dim)
            )
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim),
                        nn.Linear(dim, 3 * dim, bias=False),
                        nn.Linear(dim, dim),
                        nn.LayerNorm(dim),
                        SoftMoELayer(dim, 3, 4, mlp) if i > 0 else mlp(),
                    ]
                )
            )
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, num_classes)

    def forward(self, img):
        x = self.to_patch(img).flatten(2).mT + self.pos_emb
        for n1, qkv, proj, n2, ff in self.layers:
            b, n, d = x.shape
            q, k, v = qkv(n1(x)).view(b, n, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
            sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
            o = torch.einsum("bhij,bhjd->bihd", sim.softmax(-1), v).reshape(b, n, d)
            x = x + proj(o)
            x = x + ff(n2(x))
        return self.to_logits(self.norm(x).mean(dim=1))


def pictures():
    return {"img": torch.randn(BATCH, 3, 16, 16), "target": torch.randint(0, 6, (BATCH,))}


def smoothed(out, batch):
    return F.cross_entropy(out, batch["target"], label_smoothing=0.1, reduction="sum"), count(
        len(out)
    )


def mlp1d(channels):
    n, layers = len(channels), []
    for i in range(1, n):
        layers.append(nn.Conv1d(channels[i - 1], channels[i], kernel_size=1, bias=True))
        if i < (n - 1):
            layers.append(nn.GroupNorm(4, channels[i]))
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class MultiHeadedAttention(nn.Module):
    def __init__(self, num_heads, d_model):
        super().__init__()
        self.dim, self.num_heads = d_model // num_heads, num_heads
        self.merge = nn.Conv1d(d_model, d_model, kernel_size=1)
        self.proj = nn.ModuleList([nn.Conv1d(d_model, d_model, kernel_size=1) for _ in range(3)])

    def forward(self, query, key, value):
        b = query.size(0)
        query, key, value = (
            layer(x).view(b, self.dim, self.num_heads, -1)
            for layer, x in zip(self.proj, (query, key, value), strict=True)
        )
        scores = torch.einsum("bdhn,bdhm->bhnm", query, key) / self.dim**0.5
        x = torch.einsum("bhnm,bdhm->bdhn", F.softmax(scores, dim=-1), value)
        return self.merge(x.contiguous().view(b, self.dim * self.num_heads, -1))


class AttentionalPropagation(nn.Module):
    def __init__(self, feature_dim, num_heads):
        super().__init__()
        self.attn = MultiHeadedAttention(num_heads, feature_dim)
        self.mlp = mlp1d([feature_dim * 2, feature_dim * 2, feature_dim])
        nn.init.constant_(self.mlp[-1].bias, 0.0)

    def forward(self, x, source):
        return self.mlp(torch.cat([x, self.attn(x, source, source)], dim=1))


def log_optimal_transport(scores, alpha, iters):
    b, m, n = scores.shape
    one = scores.new_tensor(1)
    ms, ns = (m * one).to(scores), (n * one).to(scores)
    couplings = torch.cat(
        [
            torch.cat([scores, alpha.expand(b, m, 1)], -1),
            torch.cat([alpha.expand(b, 1, n), alpha.expand(b, 1, 1)], -1),
        ],
        1,
    )
    norm = -(ms + ns).log()
    log_mu = torch.cat([norm.expand(m), ns.log()[None] + norm])[None].expand(b, -1)
    log_nu = torch.cat([norm.expand(n), ms.log()[None] + norm])[None].expand(b, -1)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iters):
        u = log_mu - torch.logsumexp(couplings + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(couplings + u.unsqueeze(2), dim=1)
    return couplings + u.unsqueeze(2) + v.unsqueeze(1) - norm


class SuperGlue(nn.Module):
    """Sarlin et al. 2020: self and cross attention in turn, then Sinkhorn's iterations."""

    def __init__(self):
        super().__init__()
        self.config = {
            "descriptor_dim": 16,
            "GNN_layers": ["self", "cross"] * 2,
            "iterations": 10,
        }
        dim = self.config["descriptor_dim"]
        self.kenc = mlp1d([3, 8, dim])
        self.layers = nn.ModuleList(
            [AttentionalPropagation(dim, 4) for _ in range(len(self.config["GNN_layers"]))]
        )
        self.final_proj = nn.Conv1d(dim, dim, kernel_size=1, bias=True)
        self.register_parameter("bin_score", nn.Parameter(torch.tensor(1.0)))

    def encode(self, kpts, scores):
        center, scaling = kpts.new_tensor([[32.0, 24.0]]), 64 * 0.7
        kpts = (kpts - center[:, None, :]) / scaling
        return self.kenc(torch.cat([kpts.transpose(1, 2), scores.unsqueeze(1)], dim=1))

    def forward(self, keypoints0, scores0, descriptors0, keypoints1, scores1, descriptors1):
        desc0 = descriptors0 + self.encode(keypoints0, scores0)
        desc1 = descriptors1 + self.encode(keypoints1, scores1)
        for layer, name in zip(self.layers, self.config["GNN_layers"], strict=True):
            src0, src1 = (desc1, desc0) if name == "cross" else (desc0, desc1)
            delta0, delta1 = layer(desc0, src0), layer(desc1, src1)
            desc0, desc1 = (desc0 + delta0), (desc1 + delta1)
        mdesc0, mdesc1 = self.final_proj(desc0), self.final_proj(desc1)
        scores = torch.einsum("bdn,bdm->bnm", mdesc0, mdesc1)
        scores = scores / self.config["descriptor_dim"] ** 0.5
        scores = log_optimal_transport(scores, self.bin_score, iters=self.config["iterations"])
        with torch.no_grad():
            max0, max1 = scores[:, :-1, :-1].max(2), scores[:, :-1, :-1].max(1)
            mutual0 = torch.arange(scores.shape[1] - 1)[None] == max1.indices.gather(
                1, max0.indices
            )
            matches0 = torch.where(mutual0, max0.indices, max0.indices.new_tensor(-1))
        return {"scores": scores, "matches0": matches0}


def pairs():
    m, n = 7, 6
    matches = torch.zeros(BATCH, m + 1, n + 1, dtype=torch.bool)
    for row in range(BATCH):
        k = 2 + row % 4
        a, b = torch.randperm(m), torch.randperm(n)
        matches[row, a[:k], b[:k]] = True
        matches[row, a[k:], -1] = True
        matches[row, -1, b[k:]] = True
    return {
        "keypoints0": torch.rand(BATCH, m, 2) * torch.tensor([64.0, 48.0]),
        "scores0": torch.rand(BATCH, m),
        "descriptors0": F.normalize(torch.randn(BATCH, 16, m), dim=1),
        "keypoints1": torch.rand(BATCH, n, 2) * torch.tensor([64.0, 48.0]),
        "scores1": torch.rand(BATCH, n),
        "descriptors1": F.normalize(torch.randn(BATCH, 16, n), dim=1),
        "gt_matches": matches,
    }


def matched(out, batch):
    return -out["scores"][batch["gt_matches"]].sum(), batch["gt_matches"].sum()


RESEARCH: dict[str, Subject] = {
    "soft-mixture": Subject(SoftMoEViT, pictures, smoothed),
    "super-glue": Subject(SuperGlue, pairs, matched),
}
