"""Models as people write them, edited for nothing: what layouts have to carry or to refuse."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import BATCH, LENGTH, VOCAB, Subject, images, tokens
from weft.nn.losses import classification, mse, next_token

DIM, HEADS = 16, 4


def features() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, 4)}


def sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 6, 8), "label": torch.randint(0, 5, (BATCH,))}


def pictures() -> dict[str, Tensor]:
    x = torch.randn(BATCH, 1, 8, 8)
    return {"image": x, "target": torch.randn(BATCH, 1, 8, 8)}


# ---- language models -----------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = LENGTH
    vocab_size: int = VOCAB
    n_layer: int = 2
    n_head: int = HEADS
    n_embd: int = DIM
    dropout: float = 0.1
    bias: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTMLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = CausalSelfAttention(config), GPTMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT's model.py, its generation left out."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config = GPTConfig()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> tuple:
        _, t = input_ids.size()
        assert t <= self.config.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=input_ids.device)
        tok_emb = self.transformer.wte(input_ids)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            return logits, loss
        return self.lm_head(x), None


class DictBlocks(nn.Module):
    """Blocks that are dicts of modules, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(DIM), "up": nn.Linear(DIM, 32), "down": nn.Linear(32, DIM)}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        return self.head(x)


class ListBlocks(nn.Module):
    """Blocks that are lists of modules: attention, then a feed-forward (lucidrains)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([])
        for _ in range(2):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(DIM),
                        nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)),
                    ]
                )
            )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for norm, ff in self.layers:
            x = x + ff(norm(x))
        return self.head(x)


class SharedBlock(nn.Module):
    """ALBERT's idea: one block, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(2):
            x = x + self.block(x)
        return self.head(x)


class SharedInList(nn.Module):
    """Two layers, each used twice, from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(2):
            for layer in self.layers:
                x = x + layer(x)
        return self.head(x)


class TwoNames(nn.Module):
    """A module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.backbone = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


class TwoNamesInBlocks(nn.Module):
    """Every block holds the same rotary table and the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList()
        for _ in range(2):
            block = nn.Sequential(
                OrderedDict(
                    norm=norm, up=nn.Linear(DIM, 32), act=nn.GELU(), down=nn.Linear(32, DIM)
                )
            )
            self.layers.append(block)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class ThreeTied(nn.Module):
    """Encoder's, decoder's and output's embedding are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.target.weight = self.head.weight = self.source.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.source(input_ids)) + self.target(input_ids.flip(1)))


class LoopExperts(nn.Module):
    """Experts chosen in a Python loop, the unused ones skipped (Mixtral's first code)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.gate = nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM)) for _ in range(4)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return self.head(x + out.view_as(x))


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM, max_norm=1.0)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, VOCAB))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mlp(self.embedding(input_ids))


# ---- state that a forward changes ----------------------------------------------------------------


class RunningMean(nn.Module):
    """Keeps its own running mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x - self.mean)


class Reassigned(nn.Module):
    """Assigns a buffer anew in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(x - self.mean)


class Counter(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.net(x)


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class ClampedWeight(nn.Module):
    """Projects its weight in the forward (a WGAN's critic)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        return self.second(torch.tanh(self.first(x)))


# ---- recurrent nets ------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Any, dropout: float):
        super().__init__()
        self.rnn = kind(8, DIM, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


class TimeLoop(nn.Module):
    """A cell in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], DIM)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


# ---- noise ---------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Adds noise to its input, as a denoising autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn_like(x))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mu, self.logvar = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.relu(self.encoder(x))
        mu, logvar = self.mu(h), self.logvar(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.empty_like(std).normal_() * std
        return self.decoder(z), mu, logvar


class DropPath(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class DropPathNet(nn.Module):
    """timm's stochastic depth, per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM), DropPath(0.3))
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class StochasticDepth(nn.Module):
    """Skips whole blocks by the toss of a coin (Huang et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)) for _ in range(4)
        )
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(1).item() > 0.4:
                x = x + block(x)
        return self.head(x)


class Diffusion(nn.Module):
    """A denoiser that draws its own timesteps and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        alpha = (1 - t / 10).to(x.dtype)[:, None]
        noised = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return self.second(torch.tanh(self.first(noised) + self.time(t))), noise


class GumbelRouter(nn.Module):
    """F.gumbel_softmax, which draws from an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.values = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(F.gumbel_softmax(self.choose(x), tau=1.0))


class MaskedTokens(nn.Module):
    """Draws which tokens it masks (MAE): a permutation of each sample's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, DIM)
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape[0], x.shape[1], device=x.device)
        kept = noise.argsort(1)[:, :3]
        x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(torch.tanh(self.stem(x)).mean(1))


def reconstruct(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    found, mu, logvar = output
    kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()
    return (found - batch["target"]).square().sum() + kl, torch.tensor(float(len(found)))


def denoise(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    found, noise = output
    return (found - noise).square().sum(), torch.tensor(float(found.numel()))


# ---- parameters of all kinds ---------------------------------------------------------------------


class Scaled(nn.Module):
    """CLIP's logit_scale: a parameter without a dim; and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.shift = nn.Parameter(torch.zeros(1))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1) * self.logit_scale.exp() + self.shift


class LayerScale(nn.Module):
    """A scalar in every block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * self.down(F.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList(LayerScale.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Complex(nn.Module):
    """A filter in frequency space: a complex parameter (GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(16), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class MadeLater(nn.Module):
    """Makes a parameter in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(x.new_ones(x.shape[-1]))
        return self.net(x * self.scale)


class NonContiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.first.weight = nn.Parameter(torch.randn(8, 16).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# ---- arguments and outputs -----------------------------------------------------------------------


class FrozenBackbone(nn.Module):
    """Trains a head on a frozen encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class LinearsInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"in": nn.Linear(8, 16), "out": nn.Linear(16, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["out"](torch.relu(self.layers["in"](x)))


class IntegersCast(nn.Module):
    """Integers that a forward casts by .float()."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.net(input_ids.float() / VOCAB)


class MaskCast(nn.Module):
    """A mask that a forward makes and casts to float32; zeros in torch.float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.net = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask = (input_ids > 3).to(torch.float32).unsqueeze(-1)
        total = torch.zeros(x.shape[0], DIM, dtype=torch.float32) + (x * mask).sum(1)
        return self.net(total / mask.sum(1).clamp(min=1))


class TakesDict(nn.Module):
    """Its forward takes the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"])


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, *, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.net(x)
        return y if scale is None else y * scale


class AnyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.net(batch["x"])


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None
    loss: Tensor | None = None


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Output:
        hidden = torch.tanh(self.first(x))
        return Output(self.second(hidden), hidden)


class OutputWithLoss(nn.Module):
    """Computes its own loss from the labels, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Output:
        found = self.second(torch.tanh(self.first(x)))
        return Output(found, loss=(found - target).square().mean())


class ScalarFirst(nn.Module):
    """Returns a scalar loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = self.second(torch.tanh(self.first(x)))
        return (found - target).square().sum(), found


class WithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> tuple[None, Tensor, dict[str, Any]]:
        return None, self.net(x), {"aux": None}


def of_logits(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output.logits, batch)


def own_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    size = output.logits.numel()
    return output.loss * size, torch.tensor(float(size))


def first_is_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output[0], torch.tensor(float(output[1].numel()))


def of_second(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output[1], batch)


# ---- images, sequences ---------------------------------------------------------------------------


class Encoder(nn.Module):
    """nn.TransformerEncoder, as in torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]).to(
            self.head.weight.dtype
        )
        return self.head(self.encoder(self.embedding(input_ids), mask=mask, is_causal=True))


def _conv(ins: int, outs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(ins, outs, 3, padding=1), nn.GroupNorm(2, outs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _conv(1, 4), _conv(4, 8), _conv(8, 8)
        self.up2, self.up1 = _conv(16, 4), _conv(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        one = self.down1(image)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1))
        return self.out(x)


class ConvAttention(nn.Module):
    """A convolutional stem, then nn.MultiheadAttention over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, DIM, 4, 4), nn.BatchNorm2d(DIM), nn.ReLU())
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.head((x + self.mlp(x)).mean(1))


def labelled_tokens() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH)),
        "label": torch.randint(0, 5, (BATCH,)),
    }


def of_first(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return next_token(output[0], batch)


def target_of_picture(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch)


NETS: dict[str, Subject] = {
    "nanogpt": Subject(NanoGPT, tokens, of_first),
    "dict-blocks": Subject(DictBlocks, tokens, next_token),
    "list-blocks": Subject(ListBlocks, tokens, next_token),
    "shared-block": Subject(SharedBlock, tokens, next_token),
    "shared-in-list": Subject(SharedInList, tokens, next_token),
    "two-names": Subject(TwoNames, features, mse),
    "two-names-in-blocks": Subject(TwoNamesInBlocks, tokens, next_token),
    "three-tied": Subject(ThreeTied, tokens, next_token),
    "loop-experts": Subject(LoopExperts, tokens, next_token),
    "max-norm": Subject(MaxNorm, tokens, next_token),
    "running-mean": Subject(RunningMean, features, mse),
    "reassigned": Subject(Reassigned, features, mse),
    "counter": Subject(Counter, features, mse, plan=()),
    "spectral-norm": Subject(SpectralNorm, features, mse, plan=()),
    "weight-norm": Subject(WeightNorm, features, mse),
    "clamped": Subject(ClampedWeight, features, mse),
    "lstm": Subject(partial(Recurrent, nn.LSTM, 0.0), sequences, classification),
    "lstm-dropout": Subject(partial(Recurrent, nn.LSTM, 0.3), sequences, classification),
    "gru-dropout": Subject(partial(Recurrent, nn.GRU, 0.3), sequences, classification),
    "time-loop": Subject(TimeLoop, sequences, classification),
    "noisy": Subject(Noisy, features, mse),
    "vae": Subject(VAE, features, reconstruct),
    "drop-path": Subject(DropPathNet, features, mse),
    "stochastic-depth": Subject(StochasticDepth, features, mse),
    "diffusion": Subject(Diffusion, features, denoise),
    "gumbel": Subject(GumbelRouter, features, mse),
    "masked-tokens": Subject(MaskedTokens, sequences, classification),
    "scaled": Subject(Scaled, features, mse),
    "layer-scale": Subject(LayerScale, features, mse),
    "complex": Subject(Complex, features, mse),
    "lazy": Subject(Lazy, features, mse),
    "made-later": Subject(MadeLater, features, mse),
    "non-contiguous": Subject(NonContiguous, features, mse),
    "frozen": Subject(Frozen, features, mse),
    "frozen-backbone": Subject(FrozenBackbone, features, mse),
    "two-linears": Subject(TwoLinears, features, mse),
    "linears-in-dict": Subject(LinearsInDict, features, mse),
    "integers-cast": Subject(IntegersCast, labelled_tokens, classification),
    "mask-cast": Subject(MaskCast, labelled_tokens, classification),
    "takes-dict": Subject(TakesDict, features, mse),
    "keyword-only": Subject(KeywordOnly, features, mse),
    "any-keywords": Subject(AnyKeywords, features, mse),
    "dataclass": Subject(ReturnsDataclass, features, of_logits),
    "own-loss": Subject(OutputWithLoss, features, own_loss),
    "scalar-first": Subject(ScalarFirst, features, first_is_loss),
    "with-none": Subject(WithNone, features, of_second),
    "encoder": Subject(Encoder, tokens, next_token),
    "unet": Subject(UNet, pictures, target_of_picture),
    "conv-attention": Subject(ConvAttention, images, classification),
}
