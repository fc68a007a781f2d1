"""Nets as teams train them at work: recommenders, forecasts, speech, detection, text, tables,
molecules, control, one net taught by another.
"""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import copy
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.cases import BATCH, LENGTH, VOCAB, Subject, tokens
from weft.nn.losses import mse, next_token


def count(n):
    return torch.tensor(float(n))


class PointWiseFeedForward(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(d, d, kernel_size=1), nn.Conv1d(d, d, kernel_size=1)
        self.dropout1, self.dropout2, self.relu = nn.Dropout(p), nn.Dropout(p), nn.ReLU()

    def forward(self, inputs):
        outputs = self.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2))))
        return inputs + self.dropout2(self.conv2(outputs)).transpose(-1, -2)


class SASRec(nn.Module):
    """Self-attentive recommendation (Kang & McAuley 2018): parallel lists of layers, time first."""

    def __init__(self, item_num=40, maxlen=LENGTH, d=16, blocks=2, heads=2, p=0.0):
        super().__init__()
        self.item_emb = nn.Embedding(item_num + 1, d, padding_idx=0)
        self.pos_emb, self.emb_dropout = nn.Embedding(maxlen + 1, d, padding_idx=0), nn.Dropout(p)
        self.attention_layernorms, self.attention_layers = nn.ModuleList(), nn.ModuleList()
        self.forward_layernorms, self.forward_layers = nn.ModuleList(), nn.ModuleList()
        self.last_layernorm = nn.LayerNorm(d, eps=1e-8)
        for _ in range(blocks):
            self.attention_layernorms.append(nn.LayerNorm(d, eps=1e-8))
            self.attention_layers.append(nn.MultiheadAttention(d, heads, p))
            self.forward_layernorms.append(nn.LayerNorm(d, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(d, p))

    def log2feats(self, log_seqs):
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, log_seqs.shape[1] + 1, device=log_seqs.device).expand_as(log_seqs)
        seqs = self.emb_dropout(seqs + self.pos_emb(poss * (log_seqs != 0)))
        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            q = self.attention_layernorms[i](seqs)
            out, _ = self.attention_layers[i](q, seqs, seqs, attn_mask=attention_mask)
            seqs = torch.transpose(q + out, 0, 1)
            seqs = self.forward_layers[i](self.forward_layernorms[i](seqs))
        return self.last_layernorm(seqs)

    def forward(self, log_seqs, pos_seqs, neg_seqs):
        feats = self.log2feats(log_seqs)
        pos_logits = (feats * self.item_emb(pos_seqs)).sum(dim=-1)
        neg_logits = (feats * self.item_emb(neg_seqs)).sum(dim=-1)
        return pos_logits, neg_logits


def histories():
    out = {k: torch.randint(1, 41, (BATCH, LENGTH)) for k in ("log_seqs", "pos_seqs", "neg_seqs")}
    for row in range(BATCH):
        for value in out.values():
            value[row, : row % 4] = 0
    return out


def ranking(out, batch):
    pos, neg = out
    seen = batch["pos_seqs"] != 0
    one, zero = torch.ones_like(pos[seen]), torch.zeros_like(neg[seen])
    loss = F.binary_cross_entropy_with_logits(pos[seen], one, reduction="sum")
    loss = loss + F.binary_cross_entropy_with_logits(neg[seen], zero, reduction="sum")
    return loss, seen.sum()


class FeaturesEmbedding(nn.Module):
    def __init__(self, field_dims, d):
        super().__init__()
        self.embedding = nn.Embedding(sum(field_dims), d)
        self.register_buffer("offsets", torch.tensor([0, *field_dims[:-1]]).cumsum(0))
        nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, x):
        return self.embedding(x + self.offsets.unsqueeze(0))


class CrossNetV2(nn.Module):
    """A mixture of low-rank crosses (Wang et al. 2020)."""

    def __init__(self, n, layers=2, rank=4, experts=3):
        super().__init__()
        self.n_experts = experts

        def of(*shape):
            return nn.ParameterList(
                [nn.Parameter(nn.init.xavier_normal_(torch.empty(*shape))) for _ in range(layers)]
            )

        self.U, self.V = of(experts, n, rank), of(experts, n, rank)
        self.C = of(experts, rank, rank)
        self.gating = nn.ModuleList([nn.Linear(n, 1, bias=False) for _ in range(experts)])
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(n, 1)) for _ in range(layers)])

    def forward(self, inputs):
        x_0 = inputs.unsqueeze(2)
        x_l = x_0
        for i in range(len(self.U)):
            outs, scores = [], []
            for e in range(self.n_experts):
                scores.append(self.gating[e](x_l.squeeze(2)))
                v = torch.tanh(torch.matmul(self.V[i][e].t(), x_l))
                v = torch.tanh(torch.matmul(self.C[i][e], v))
                uv = torch.matmul(self.U[i][e], v)
                outs.append((x_0 * (uv + self.bias[i])).squeeze(2))
            moe = torch.matmul(torch.stack(outs, 2), torch.stack(scores, 1).softmax(1))
            x_l = moe + x_l
        return x_l.squeeze()


class DCNMix(nn.Module):
    def __init__(self, field_dims=(7, 5, 11, 3), d=4, dense=3):
        super().__init__()
        self.embedding = FeaturesEmbedding(field_dims, d)
        self.linear = nn.Embedding(sum(field_dims), 1)
        n = len(field_dims) * d + dense
        self.cross = CrossNetV2(n)
        layers, width = [], n
        for w in (16, 8):
            layers += [nn.Linear(width, w), nn.BatchNorm1d(w), nn.ReLU(), nn.Dropout(0.0)]
            width = w
        self.mlp = nn.Sequential(*layers)
        self.dnn_linear = nn.Linear(n + width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros((1,)))

    def forward(self, x, dense):
        wide = self.linear(x + self.embedding.offsets).sum(1)
        e = torch.cat([self.embedding(x).flatten(1), dense], dim=1)
        logit = wide + self.dnn_linear(torch.cat([self.cross(e), self.mlp(e)], 1)) + self.bias
        return {"logit": logit.squeeze(1), "prob": torch.sigmoid(logit.squeeze(1))}


def impressions():
    x = torch.stack([torch.randint(n, (BATCH,)) for n in (7, 5, 11, 3)], 1)
    return {"x": x, "dense": torch.randn(BATCH, 3), "click": torch.randint(2, (BATCH,)).float()}


def clicked(out, batch):
    loss = F.binary_cross_entropy_with_logits(
        out["logit"], batch["click"], pos_weight=torch.tensor(3.0), reduction="sum"
    )
    return loss, count(len(batch["click"]))


class Transpose(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.transpose(*self.dims)


class TSTEncoderLayer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.n_heads, self.d_k = heads, d // heads
        self.W_Q, self.W_K, self.W_V = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.to_out = nn.Sequential(nn.Linear(d, d), nn.Dropout(0.0))
        self.scale = nn.Parameter(torch.tensor((d // heads) ** -0.5), requires_grad=False)
        self.norm_attn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(d), Transpose(1, 2))
        self.ff = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Dropout(0.0), nn.Linear(d_ff, d))
        self.norm_ffn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(d), Transpose(1, 2))

    def forward(self, src, prev=None):
        bs = src.size(0)
        q = self.W_Q(src).view(bs, -1, self.n_heads, self.d_k).transpose(1, 2)
        k = self.W_K(src).view(bs, -1, self.n_heads, self.d_k).permute(0, 2, 3, 1)
        v = self.W_V(src).view(bs, -1, self.n_heads, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k) * self.scale
        if prev is not None:
            scores = scores + prev
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        out = out.transpose(1, 2).contiguous().view(bs, -1, self.n_heads * self.d_k)
        src = self.norm_attn(src + self.to_out(out))
        return self.norm_ffn(src + self.ff(src)), scores


class PatchTST(nn.Module):
    """Patches of each channel as tokens (Nie et al. 2023), attention scores as residuals."""

    def __init__(self, seq_len=16, pred_len=4, patch_len=4, stride=2, d=16):
        super().__init__()
        self.patch_len, self.stride = patch_len, stride
        self.padding_patch_layer = nn.ReplicationPad1d((0, stride))
        patch_num = (seq_len - patch_len) // stride + 2
        self.W_P, self.W_pos = nn.Linear(patch_len, d), nn.Parameter(torch.empty(patch_num, d))
        nn.init.uniform_(self.W_pos, -0.02, 0.02)
        self.layers = nn.ModuleList([TSTEncoderLayer(d, 4, 32) for _ in range(2)])
        self.flatten, self.linear = nn.Flatten(-2), nn.Linear(patch_num * d, pred_len)

    def forward(self, x):
        mean = x.mean(1, keepdim=True).detach()
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        z = ((x - mean) / stdev).permute(0, 2, 1)
        z = self.padding_patch_layer(z).unfold(-1, self.patch_len, self.stride)
        n_vars = z.shape[1]
        u = self.W_P(z).reshape(z.shape[0] * n_vars, z.shape[2], -1) + self.W_pos
        scores = None
        for mod in self.layers:
            u, scores = mod(u, prev=scores)
        z = torch.reshape(u, (-1, n_vars, u.shape[-2], u.shape[-1])).permute(0, 1, 3, 2)
        z = self.linear(self.flatten(z)).permute(0, 2, 1)
        return z * stdev + mean


def series():
    return {"x": torch.randn(BATCH, 16, 3).cumsum(1), "target": torch.randn(BATCH, 4, 3)}


class InceptionBlock(nn.Module):
    def __init__(self, i, o, num_kernels=2):
        super().__init__()
        self.kernels = nn.ModuleList(
            [nn.Conv2d(i, o, kernel_size=2 * k + 1, padding=k) for k in range(num_kernels)]
        )
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
                nn.init.constant_(m.bias, 0)

    def forward(self, x):
        return torch.stack([kernel(x) for kernel in self.kernels], dim=-1).mean(-1)


def fft_for_period(x, k=2):
    xf = torch.fft.rfft(x, dim=1)
    frequency_list = abs(xf).mean(0).mean(-1)
    frequency_list[0] = 0
    _, top_list = torch.topk(frequency_list, k)
    top_list = top_list.detach().cpu().numpy()
    period = x.shape[1] // top_list
    return period, abs(xf).mean(-1)[:, top_list]


class TimesBlock(nn.Module):
    def __init__(self, seq_len, d, k=2):
        super().__init__()
        self.seq_len, self.k = seq_len, k
        self.conv = nn.Sequential(InceptionBlock(d, 2 * d), nn.GELU(), InceptionBlock(2 * d, d))

    def forward(self, x):
        B, T, N = x.size()
        period_list, period_weight = fft_for_period(x, self.k)
        res = []
        for i in range(self.k):
            period = period_list[i]
            if self.seq_len % period != 0:
                length = ((self.seq_len // period) + 1) * period
                padding = torch.zeros([x.shape[0], (length - self.seq_len), x.shape[2]]).to(x)
                out = torch.cat([x, padding], dim=1)
            else:
                length, out = self.seq_len, x
            out = out.reshape(B, length // period, period, N).permute(0, 3, 1, 2).contiguous()
            out = self.conv(out).permute(0, 2, 3, 1).reshape(B, -1, N)
            res.append(out[:, : self.seq_len, :])
        res = torch.stack(res, dim=-1)
        period_weight = F.softmax(period_weight, dim=1)
        period_weight = period_weight.unsqueeze(1).unsqueeze(1).repeat(1, T, N, 1)
        return torch.sum(res * period_weight, -1) + x


class TimesNet(nn.Module):
    """Periods that the whole batch decides (Wu et al. 2023): convolutions over its 2-D shape."""

    def __init__(self, seq_len=16, pred_len=4, d=8):
        super().__init__()
        self.pred_len = pred_len
        self.enc_embedding = nn.Conv1d(3, d, 3, padding=1, padding_mode="circular", bias=False)
        self.predict_linear = nn.Linear(seq_len, pred_len + seq_len)
        self.model = nn.ModuleList([TimesBlock(pred_len + seq_len, d) for _ in range(2)])
        self.layer_norm, self.projection = nn.LayerNorm(d), nn.Linear(d, 3)

    def forward(self, x):
        enc = self.enc_embedding(x.permute(0, 2, 1)).transpose(1, 2)
        enc = self.predict_linear(enc.permute(0, 2, 1)).permute(0, 2, 1)
        for block in self.model:
            enc = self.layer_norm(block(enc))
        return self.projection(enc)[:, -self.pred_len :, :]


class MaskConv(nn.Module):
    def __init__(self, seq_module):
        super().__init__()
        self.seq_module = seq_module

    def forward(self, x, lengths):
        for module in self.seq_module:
            x = module(x)
            mask = torch.BoolTensor(x.size()).fill_(0)
            for i, length in enumerate(lengths):
                length = length.item()
                if (mask[i].size(2) - length) > 0:
                    mask[i].narrow(2, length, mask[i].size(2) - length).fill_(1)
            x = x.masked_fill(mask, 0)
        return x, lengths


class SequenceWise(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        t, n = x.size(0), x.size(1)
        return self.module(x.view(t * n, -1)).view(t, n, -1)


class BatchRNN(nn.Module):
    def __init__(self, i, h, batch_norm=True):
        super().__init__()
        self.batch_norm = SequenceWise(nn.BatchNorm1d(i)) if batch_norm else None
        self.rnn = nn.GRU(input_size=i, hidden_size=h, bidirectional=True, bias=True)

    def forward(self, x, output_lengths):
        if self.batch_norm is not None:
            x = self.batch_norm(x)
        x = pack_padded_sequence(x, output_lengths, enforce_sorted=False)
        x, _ = self.rnn(x)
        x, _ = pad_packed_sequence(x, total_length=16)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2).view(x.size(0), x.size(1), -1)


class DeepSpeech(nn.Module):
    """DeepSpeech 2 (Amodei et al. 2016): convolutions masked by lengths, recurrent layers."""

    def __init__(self, bins=6, h=8, labels=7):
        super().__init__()
        self.conv = MaskConv(
            nn.Sequential(
                nn.Conv2d(1, 2, kernel_size=(3, 3), padding=(1, 1)),
                nn.BatchNorm2d(2),
                nn.Hardtanh(0, 20, inplace=True),
            )
        )
        rnns = [("0", BatchRNN(2 * bins, h, batch_norm=False)), ("1", BatchRNN(h, h))]
        self.rnns = nn.Sequential(OrderedDict(rnns))
        self.fc = nn.Sequential(
            SequenceWise(nn.Sequential(nn.BatchNorm1d(h), nn.Linear(h, labels, bias=False)))
        )

    def forward(self, x, lengths):
        lengths = lengths.cpu().int()
        x, output_lengths = self.conv(x, lengths)
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3])
        x = x.transpose(1, 2).transpose(0, 1).contiguous()
        for rnn in self.rnns:
            x = rnn(x, output_lengths)
        return F.log_softmax(self.fc(x).transpose(0, 1), dim=-1), output_lengths


def spectrograms():
    return {
        "x": torch.randn(BATCH, 1, 6, 16),
        "lengths": 12 + torch.arange(BATCH) % 5,
        "text": torch.randint(1, 7, (BATCH, 3)),
    }


def ctc(out, batch):
    log_probs, lengths = out
    n = torch.full((len(lengths),), 3)
    loss = F.ctc_loss(
        log_probs.transpose(0, 1), batch["text"], lengths, n, reduction="sum", zero_infinity=True
    )
    return loss, count(len(lengths))


class Transducer(nn.Module):
    """An RNN transducer (Graves 2012): stacked frames, two recurrent nets, a joint, a loss."""

    def __init__(self, d=8, vocab=7, blank=0):
        super().__init__()
        self.blank, self.subsampling = blank, 2
        self.encoder = nn.ModuleDict(
            {"proj": nn.Linear(12, d), "rnn": nn.LSTM(d, d, 1, batch_first=True)}
        )
        self.embed = nn.Embedding(vocab, d, padding_idx=blank)
        self.decoder = nn.LSTM(d, d, batch_first=True)
        self.initial = nn.Parameter(torch.zeros(1, 1, d))
        self.enc_proj, self.dec_proj = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, vocab)

    def joint(self, f, g):
        return self.out(torch.tanh(self.enc_proj(f).unsqueeze(2) + self.dec_proj(g).unsqueeze(1)))

    def forward(self, x, frames, text):
        b, t, c = x.shape
        x = x.reshape(b, t // self.subsampling, c * self.subsampling)
        f, _ = self.encoder["rnn"](self.encoder["proj"](x))
        g = torch.cat([self.initial.expand(b, -1, -1), self.embed(text)], dim=1)
        g, _ = self.decoder(g)
        logp = self.joint(f, g).log_softmax(-1)
        blank = logp[..., self.blank]
        emit = logp[:, :, :-1].gather(3, text[:, None, :, None].expand(-1, t // 2, -1, 1))
        return self.lattice(blank, emit.squeeze(3), frames // self.subsampling)

    @staticmethod
    def lattice(blank, emit, frames):
        b, t, u = blank.shape
        alpha = [[None] * u for _ in range(t)]
        for i in range(t):
            for j in range(u):
                terms = []
                if i > 0:
                    terms.append(alpha[i - 1][j] + blank[:, i - 1, j])
                if j > 0:
                    terms.append(alpha[i][j - 1] + emit[:, i, j - 1])
                alpha[i][j] = (
                    torch.logsumexp(torch.stack(terms), 0) if terms else blank.new_zeros(b)
                )
        last = torch.stack([alpha[i][-1] + blank[:, i, -1] for i in range(t)], 1)
        return -last.gather(1, (frames - 1)[:, None]).squeeze(1)


def recordings():
    return {
        "x": torch.randn(BATCH, 12, 6),
        "frames": 8 + 2 * (torch.arange(BATCH) % 3),
        "text": torch.randint(1, 7, (BATCH, 3)),
    }


def summed(out, batch):
    return out.sum(), count(len(out))


def autopad(k, p=None):
    return k // 2 if p is None else p


class Conv(nn.Module):
    default_act = nn.SiLU()

    def __init__(self, c1, c2, k=1, s=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, autopad(k), bias=False)
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = self.default_act if act is True else nn.Identity()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class C2f(nn.Module):
    def __init__(self, c1, c2, n=1):
        super().__init__()
        self.c = c2 // 2
        self.cv1, self.cv2 = Conv(c1, 2 * self.c), Conv((2 + n) * self.c, c2)
        self.m = nn.ModuleList(Conv(self.c, self.c, 3) for _ in range(n))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Concat(nn.Module):
    def forward(self, x):
        return torch.cat(x, 1)


class Detect(nn.Module):
    def __init__(self, nc, ch):
        super().__init__()
        self.nc, self.reg_max = nc, 4
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(x, 8, 3), nn.Conv2d(8, 4 * self.reg_max, 1)) for x in ch
        )
        self.cv3 = nn.ModuleList(nn.Sequential(Conv(x, 8, 3), nn.Conv2d(8, nc, 1)) for x in ch)
        self.dfl = nn.Conv2d(self.reg_max, 1, 1, bias=False).requires_grad_(False)
        self.dfl.weight.data[:] = torch.arange(self.reg_max, dtype=torch.float).view(1, -1, 1, 1)
        for b in self.cv3:
            b[-1].bias.data[:nc] = math.log(5 / nc / 80)

    def forward(self, x):
        for i in range(len(x)):
            x[i] = torch.cat((self.cv2[i](x[i]), self.cv3[i](x[i])), 1)
        flat = torch.cat([xi.view(xi.shape[0], 4 * self.reg_max + self.nc, -1) for xi in x], 2)
        box, cls = flat.split((4 * self.reg_max, self.nc), 1)
        b, _, a = box.shape
        dist = self.dfl(box.view(b, 4, self.reg_max, a).transpose(2, 1).softmax(1)).view(b, 4, a)
        return {"boxes": dist, "scores": cls, "feats": x}


class YOLO(nn.Module):
    """A detector as Ultralytics builds it: layers by a list, with the index of what each reads."""

    def __init__(self, nc=3):
        super().__init__()
        spec = [
            (-1, Conv(1, 4, 3, 2)),
            (-1, C2f(4, 4)),
            (-1, Conv(4, 8, 3, 2)),
            (-1, C2f(8, 8)),
            (-1, nn.Upsample(None, 2, "nearest")),
            ([-1, 1], Concat()),
            (-1, C2f(12, 8)),
            (-1, Conv(8, 8, 3, 2)),
            ([-1, 3], Concat()),
            (-1, C2f(16, 8)),
            ([6, 9], Detect(nc, (8, 8))),
        ]
        layers, self.save = [], []
        for i, (f, m) in enumerate(spec):
            m.i, m.f = i, f
            self.save.extend(x % i for x in ([f] if isinstance(f, int) else f) if x != -1)
            layers.append(m)
        self.model = nn.Sequential(*layers)

    def forward(self, img):
        x, y = img, []
        for m in self.model:
            if m.f != -1:
                x = y[m.f] if isinstance(m.f, int) else [x if j == -1 else y[j] for j in m.f]
            x = m(x)
            y.append(x if m.i in self.save else None)
        return x


def boxes():
    return {
        "img": torch.randn(BATCH, 1, 8, 8),
        "box": 3 * torch.rand(BATCH, 4, 20),
        "cls": (torch.rand(BATCH, 3, 20) > 0.8).float(),
    }


def detection(out, batch):
    cls = F.binary_cross_entropy_with_logits(out["scores"], batch["cls"], reduction="none")
    fg = batch["cls"].amax(1, keepdim=True)
    box = F.smooth_l1_loss(out["boxes"], batch["box"], reduction="none") * fg
    return cls.sum() + 7.5 * box.sum(), count(len(cls))


class IntermediateLayerGetter(nn.ModuleDict):
    def __init__(self, model, return_layers):
        layers, left = OrderedDict(), dict(return_layers)
        for name, module in model.named_children():
            layers[name] = module
            left.pop(name, None)
            if not left:
                break
        super().__init__(layers)
        self.return_layers = return_layers

    def forward(self, x):
        out = OrderedDict()
        for name, module in self.items():
            x = module(x)
            if name in self.return_layers:
                out[self.return_layers[name]] = x
        return out


class ASPPPooling(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Conv2d(i, o, 1, bias=False), nn.ReLU())

    def forward(self, x):
        size = x.shape[-2:]
        for mod in self:
            x = mod(x)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def conv_bn(i, o, k=3, **kw):
    pad = kw.get("dilation", 1) * (k // 2)
    conv = nn.Conv2d(i, o, k, padding=pad, bias=False, **kw)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class ASPP(nn.Module):
    def __init__(self, i, rates, o):
        super().__init__()
        modules = [conv_bn(i, o, 1)]
        modules.extend(conv_bn(i, o, dilation=rate) for rate in rates)
        modules.append(ASPPPooling(i, o))
        self.convs = nn.ModuleList(modules)
        self.project = nn.Sequential(conv_bn(len(self.convs) * o, o, 1), nn.Dropout(0.0))

    def forward(self, x):
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class DeepLab(nn.Module):
    """DeepLabV3 (Chen et al. 2017) as torchvision has it: a dict of features, an auxiliary head."""

    def __init__(self, classes=4):
        super().__init__()
        body = nn.Sequential(
            OrderedDict(
                stem=conv_bn(1, 4),
                layer1=conv_bn(4, 8, stride=2),
                layer2=conv_bn(8, 8, dilation=2),
                fc=nn.Linear(8, 10),
            )
        )
        self.backbone = IntermediateLayerGetter(body, {"layer1": "aux", "layer2": "out"})
        self.classifier = nn.Sequential(ASPP(8, (1, 2), 8), conv_bn(8, 8), nn.Conv2d(8, classes, 1))
        self.aux_classifier = nn.Sequential(conv_bn(8, 4), nn.Conv2d(4, classes, 1))

    def forward(self, image):
        shape, features, result = image.shape[-2:], self.backbone(image), OrderedDict()
        x = self.classifier(features["out"])
        result["out"] = F.interpolate(x, size=shape, mode="bilinear", align_corners=False)
        x = self.aux_classifier(features["aux"])
        result["aux"] = F.interpolate(x, size=shape, mode="bilinear", align_corners=False)
        return result


def masks():
    mask = torch.randint(0, 4, (BATCH, 8, 8))
    mask[::2, :2] = 255
    return {"image": torch.randn(BATCH, 1, 8, 8), "mask": mask}


def segmentation(out, batch):
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0]).to(out["out"])
    loss = [
        F.cross_entropy(x, batch["mask"], weight=weight, ignore_index=255, reduction="sum")
        for x in out.values()
    ]
    return loss[0] + 0.5 * loss[1], (batch["mask"] != 255).sum()


class DINOHead(nn.Module):
    def __init__(self, d, out, hidden=16, bottleneck=8):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )
        self.bottleneck = nn.Linear(hidden, bottleneck)
        self.apply(self._init_weights)
        self.last_layer = nn.utils.parametrizations.weight_norm(
            nn.Linear(bottleneck, out, bias=False)
        )
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.2)
            nn.init.constant_(m.bias, 0)

    def forward(self, x):
        x = F.normalize(self.bottleneck(self.mlp(x)), dim=-1, p=2)
        return self.last_layer(x)


class DINO(nn.Module):
    """A student that follows its own average (Caron et al. 2021), several crops in one batch."""

    def __init__(self, d=16, out=12, m=0.9):
        super().__init__()
        backbone = nn.Sequential(nn.Flatten(1), nn.Linear(16, d), nn.GELU(), nn.Linear(d, d))
        self.student = nn.ModuleDict({"backbone": backbone, "head": DINOHead(d, out)})
        self.teacher = copy.deepcopy(self.student)
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.m = m
        self.register_buffer("center", torch.zeros(1, out))

    @torch.no_grad()
    def update_teacher(self):
        for q, k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            k.data.mul_(self.m).add_((1 - self.m) * q.detach().data)

    def forward(self, global_1, global_2, local):
        if self.training:
            self.update_teacher()
        crops = torch.cat([global_1, global_2, local])
        s = self.student["head"](self.student["backbone"](crops)) / 0.1
        with torch.no_grad():
            t = self.teacher["head"](self.teacher["backbone"](crops[: 2 * len(local)]))
        targets = F.softmax((t - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for iq, q in enumerate(targets):
            for v, logits in enumerate(s.chunk(3)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(logits, dim=-1), dim=-1)
                terms += 1
        self.center = self.center * self.m + t.mean(0, keepdim=True) * (1 - self.m)
        return total / terms


def crops():
    return {key: torch.randn(BATCH, 1, 4, 4) for key in ("global_1", "global_2", "local")}


class BertSelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, d // heads
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.dense, self.LayerNorm = nn.Linear(d, d), nn.LayerNorm(d, eps=1e-12)
        self.dropout = nn.Dropout(0.0)

    def transpose_for_scores(self, x):
        new = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(*new).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        probs = self.dropout(nn.Softmax(dim=-1)(scores + attention_mask))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        context = context.view(*context.size()[:-2], q.size(1) * q.size(3))
        return self.LayerNorm(self.dropout(self.dense(context)) + hidden_states)


class BertLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attention = BertSelfAttention(d, heads)
        self.intermediate, self.output = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.LayerNorm = nn.LayerNorm(d, eps=1e-12)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        return self.LayerNorm(self.output(F.gelu(self.intermediate(x))) + x)


class BertEmbeddings(nn.Module):
    def __init__(self, d, vocab=VOCAB):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, d, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = (
            nn.Embedding(32, d),
            nn.Embedding(2, d),
        )
        self.LayerNorm = nn.LayerNorm(d, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(32).expand((1, -1)))

    def forward(self, input_ids, token_type_ids):
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(x + self.position_embeddings(self.position_ids[:, : x.size(1)]))


class BertForPreTraining(nn.Module):
    """BERT from scratch: two heads, a tied decoder with its own bias, masked positions gathered."""

    def __init__(self, d=16, heads=4):
        super().__init__()
        self.embeddings = BertEmbeddings(d)
        self.encoder = nn.ModuleList([BertLayer(d, heads) for _ in range(2)])
        self.pooler = nn.Sequential(nn.Linear(d, d), nn.Tanh())
        self.transform = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d, eps=1e-12))
        self.decoder = nn.Linear(d, VOCAB, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.seq_relationship = nn.Linear(d, 2)
        self.apply(self.init_bert_weights)
        self.decoder.weight = self.embeddings.word_embeddings.weight

    def init_bert_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(self, input_ids, token_type_ids, attention_mask, masked_positions):
        mask = attention_mask.unsqueeze(1).unsqueeze(2).to(dtype=next(self.parameters()).dtype)
        mask = (1.0 - mask) * -10000.0
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder:
            x = layer(x, mask)
        at = masked_positions[:, :, None].expand(-1, -1, x.size(-1))
        masked = torch.gather(x, 1, at)
        scores = self.decoder(self.transform(masked)) + self.bias
        return {"mlm": scores, "nsp": self.seq_relationship(self.pooler(x[:, 0]))}


def sentence_pairs():
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH))
    lengths = LENGTH - torch.arange(BATCH) % 4
    attention_mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    return {
        "input_ids": ids * attention_mask,
        "token_type_ids": (torch.arange(LENGTH)[None] >= 6).long().expand(BATCH, -1).clone(),
        "attention_mask": attention_mask,
        "masked_positions": torch.stack([torch.randperm(8)[:3] for _ in range(BATCH)]),
        "masked_ids": torch.randint(1, VOCAB, (BATCH, 3)),
        "is_next": torch.randint(2, (BATCH,)),
    }


def pretraining(out, batch):
    mlm = F.cross_entropy(out["mlm"].transpose(1, 2), batch["masked_ids"], reduction="sum")
    nsp = F.cross_entropy(out["nsp"], batch["is_next"], reduction="sum")
    return mlm + nsp, count(len(batch["is_next"]))


class Electra(nn.Module):
    """ELECTRA (Clark et al. 2020): what a small generator writes, a discriminator doubts."""

    def __init__(self, d=16, heads=4):
        super().__init__()
        self.embeddings = BertEmbeddings(d)
        self.embeddings_project = nn.Linear(d, 8)
        self.generator = nn.ModuleList([BertLayer(8, 2)])
        self.generator_predictions = nn.ModuleDict(
            {"dense": nn.Linear(8, d), "LayerNorm": nn.LayerNorm(d)}
        )
        self.generator_bias = nn.Parameter(torch.zeros(VOCAB))
        self.discriminator = nn.ModuleList([BertLayer(d, heads) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 1))

    def forward(self, input_ids, masked, attention_mask):
        types = torch.zeros_like(input_ids)
        keep = attention_mask[:, None, None, :]
        mask = torch.zeros_like(keep, dtype=torch.get_default_dtype()).masked_fill(~keep, -1e4)
        x = self.embeddings(input_ids.masked_fill(masked, 1), types)
        x = self.embeddings_project(x)
        for layer in self.generator:
            x = layer(x, mask)
        for name in ("dense", "LayerNorm"):
            x = self.generator_predictions[name](x)
        logits = F.linear(x, self.embeddings.word_embeddings.weight, self.generator_bias)
        with torch.no_grad():
            sampled = logits.argmax(-1)
        corrupted = torch.where(masked, sampled, input_ids)
        labels = (corrupted != input_ids).to(logits.dtype)
        y = self.embeddings(corrupted, types)
        for layer in self.discriminator:
            y = layer(y, mask)
        found = self.head(y).squeeze(-1)
        gen = F.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none") * masked
        disc = F.binary_cross_entropy_with_logits(
            found, labels, weight=attention_mask.to(found.dtype), reduction="none"
        )
        return gen.sum(1) + 50.0 * disc.sum(1)


def masked_text():
    ids = torch.randint(2, VOCAB, (BATCH, LENGTH))
    lengths = LENGTH - torch.arange(BATCH) % 4
    return {
        "input_ids": ids,
        "masked": torch.rand(BATCH, LENGTH) < 0.3,
        "attention_mask": torch.arange(LENGTH)[None] < lengths[:, None],
    }


class PointerGenerator(nn.Module):
    """See et al. 2017: copies words that no vocabulary has, and remembers where it has looked."""

    def __init__(self, vocab=20, h=8, d=8):
        super().__init__()
        self.vocab, self.h = vocab, h
        self.embedding = nn.Embedding(vocab, d)
        self.encoder = nn.LSTM(d, h, batch_first=True, bidirectional=True)
        self.reduce_h, self.reduce_c = nn.Linear(2 * h, h), nn.Linear(2 * h, h)
        self.W_h, self.W_c = nn.Linear(2 * h, 2 * h, bias=False), nn.Linear(1, 2 * h, bias=False)
        self.decode_proj, self.v = nn.Linear(2 * h, 2 * h), nn.Linear(2 * h, 1, bias=False)
        self.x_context, self.cell = nn.Linear(2 * h + d, d), nn.LSTMCell(d, h)
        self.p_gen_linear = nn.Linear(4 * h + d, 1)
        self.out1, self.out2 = nn.Linear(3 * h, h), nn.Linear(h, vocab)
        for names in self.encoder._all_weights:
            for name in names:
                if name.startswith("bias_"):
                    bias = getattr(self.encoder, name)
                    bias.data.fill_(0.0)
                    bias.data[bias.size(0) // 4 : bias.size(0) // 2].fill_(1.0)

    def attend(self, state, outputs, features, mask, coverage):
        at = features + self.decode_proj(torch.cat(state, 1)).unsqueeze(1)
        at = at + self.W_c(coverage.unsqueeze(2))
        scores = self.v(torch.tanh(at)).squeeze(2)
        attn = F.softmax(scores, dim=1) * mask
        attn = attn / attn.sum(1, keepdim=True)
        return torch.bmm(attn.unsqueeze(1), outputs).squeeze(1), attn

    def forward(self, source, source_ext, source_len, decoder_in, target):
        b, n = source.size()
        mask = (torch.arange(n)[None] < source_len[:, None]).to(self.v.weight.dtype)
        outputs, (h, c) = self.encoder(self.embedding(source))
        features = self.W_h(outputs)
        h = F.relu(self.reduce_h(h.transpose(0, 1).reshape(b, -1)))
        c = F.relu(self.reduce_c(c.transpose(0, 1).reshape(b, -1)))
        context, coverage = torch.zeros(b, 2 * self.h).to(h), torch.zeros_like(mask)
        extra = torch.zeros(b, 4).to(h)
        losses = []
        for step in range(decoder_in.size(1)):
            x = self.x_context(torch.cat((context, self.embedding(decoder_in[:, step])), 1))
            h, c = self.cell(x, (h, c))
            context, attn = self.attend((h, c), outputs, features, mask, coverage)
            p_gen = torch.sigmoid(self.p_gen_linear(torch.cat((context, h, c, x), 1)))
            vocab_dist = F.softmax(self.out2(self.out1(torch.cat((h, context), 1))), dim=1)
            final = torch.cat([p_gen * vocab_dist, extra], 1)
            final = final.scatter_add(1, source_ext, (1 - p_gen) * attn)
            gold = torch.gather(final, 1, target[:, step].unsqueeze(1)).squeeze(1)
            step_loss = -torch.log(gold + 1e-12)
            step_loss = step_loss + torch.sum(torch.min(attn, coverage), 1)
            coverage = coverage + attn
            losses.append(step_loss * (target[:, step] != 0))
        return torch.sum(torch.stack(losses, 1), 1)


def articles():
    ext = torch.randint(1, 24, (BATCH, 7))
    target = torch.where(torch.rand(BATCH, 4) < 0.4, ext[:, :4], torch.randint(1, 20, (BATCH, 4)))
    target[::3, -1] = 0
    return {
        "source": torch.where(ext < 20, ext, 0),
        "source_ext": ext,
        "source_len": 5 + torch.arange(BATCH) % 3,
        "decoder_in": torch.randint(1, 20, (BATCH, 4)),
        "target": target,
    }


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, d, heads, kv_heads):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = heads, kv_heads, d // heads
        self.c_q = nn.Linear(d, heads * self.head_dim, bias=False)
        self.c_k = nn.Linear(d, kv_heads * self.head_dim, bias=False)
        self.c_v = nn.Linear(d, kv_heads * self.head_dim, bias=False)
        self.c_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, v1, cos, sin, lamb):
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        v1 = v if v1 is None else v1
        v = (1 - lamb) * v + lamb * v1.view_as(v)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.n_head != self.n_kv_head,
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)), v1


class SpeedBlock(nn.Module):
    def __init__(self, d, heads, kv_heads):
        super().__init__()
        self.attn = CausalSelfAttention(d, heads, kv_heads)
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.c_proj.weight.data.zero_()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.lamb = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v1, x0, cos, sin):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        h, v1 = self.attn(F.rms_norm(x, (x.size(-1),)), v1, cos, sin, self.lamb)
        x = x + h
        x = x + self.c_proj(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())
        return x, v1


class SpeedGPT(nn.Module):
    """GPT as speed runs write it: the first values and the embedding reach every block, halves of
    a U, a cap on logits, blocks recomputed, autocast off for the head."""

    def __init__(self, d=16, layers=4):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, d),
                "h": nn.ModuleList([SpeedBlock(d, 4, 2) for _ in range(layers)]),
            }
        )
        self.half, self.gradient_checkpointing = layers // 2, True
        self.skip_weights = nn.Parameter(torch.ones(layers // 2))
        self.lm_head = nn.Linear(d, VOCAB, bias=False)
        self.register_buffer(
            "inv_freq", 100.0 ** -(torch.arange(0, 4, 2).float() / 4), persistent=False
        )
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))

    def rotary(self, T, like):
        t = torch.arange(T, device=like.device).type_as(self.inv_freq)
        freqs = torch.outer(t, self.inv_freq).to(like)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[None, :, None, :], emb.sin()[None, :, None, :]

    def forward(self, input_ids):
        x = self.transformer["wte"](input_ids)
        x = F.rms_norm(x, (x.size(-1),))
        x0, v1, skips = x, None, []
        cos, sin = self.rotary(input_ids.size(1), x)
        for i, block in enumerate(self.transformer["h"]):
            if i >= self.half:
                x = x + self.skip_weights[i - self.half] * skips.pop()
            if self.training and self.gradient_checkpointing:
                x, v1 = checkpoint(block, x, v1, x0, cos, sin, use_reentrant=False)
            else:
                x, v1 = block(x, v1, x0, cos, sin)
            if i < self.half:
                skips.append(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            logits = self.lm_head(F.rms_norm(x, (x.size(-1),)))
            return 15 * torch.tanh(logits / 15)


class FeatureTokenizer(nn.Module):
    def __init__(self, n_num, cardinalities, d):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_num + 1, d))
        self.bias = nn.Parameter(torch.empty(n_num + len(cardinalities), d))
        self.register_buffer("category_offsets", torch.tensor([0, *cardinalities[:-1]]).cumsum(0))
        self.category_embeddings = nn.Embedding(sum(cardinalities), d)
        for p in (self.weight, self.bias, self.category_embeddings.weight):
            nn.init.kaiming_uniform_(p, a=math.sqrt(5))

    def forward(self, x_num, x_cat):
        x_num = torch.cat([torch.ones(len(x_cat), 1, device=x_cat.device).to(x_num), x_num], dim=1)
        x = self.weight[None] * x_num[:, :, None]
        x = torch.cat([x, self.category_embeddings(x_cat + self.category_offsets[None])], dim=1)
        bias = torch.cat([torch.zeros(1, self.bias.shape[1]).to(self.bias), self.bias])
        return x + bias[None]


class TabularAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.W_q, self.W_k, self.W_v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.W_out, self.n_heads = nn.Linear(d, d) if heads > 1 else None, heads

    def _reshape(self, x):
        b, n, d = x.shape
        d_head = d // self.n_heads
        x = x.reshape(b, n, self.n_heads, d_head).transpose(1, 2)
        return x.reshape(b * self.n_heads, n, d_head)

    def forward(self, x_q, x_kv):
        q, k, v = self.W_q(x_q), self.W_k(x_kv), self.W_v(x_kv)
        b, d_head_value = len(q), v.shape[-1] // self.n_heads
        n_q, q, k = q.shape[1], self._reshape(q), self._reshape(k)
        attention = F.softmax(q @ k.transpose(1, 2) / math.sqrt(k.shape[-1]), dim=-1)
        x = attention @ self._reshape(v)
        x = x.reshape(b, self.n_heads, n_q, d_head_value).transpose(1, 2)
        x = x.reshape(b, n_q, self.n_heads * d_head_value)
        return x if self.W_out is None else self.W_out(x)


def reglu(x):
    a, b = x.chunk(2, dim=-1)
    return a * F.relu(b)


class FTTransformer(nn.Module):
    """A table's columns as tokens (Gorishniy et al. 2021); the last layer asks for one alone."""

    def __init__(self, d=16, heads=4, layers=2):
        super().__init__()
        self.tokenizer = FeatureTokenizer(4, [5, 3], d)
        self.layers = nn.ModuleList([])
        for i in range(layers):
            layer = nn.ModuleDict(
                {
                    "attention": TabularAttention(d, heads),
                    "linear0": nn.Linear(d, 2 * 20),
                    "linear1": nn.Linear(20, d),
                    "norm1": nn.LayerNorm(d),
                }
            )
            if i:
                layer["norm0"] = nn.LayerNorm(d)
            self.layers.append(layer)
        self.last_normalization, self.head = nn.LayerNorm(d), nn.Linear(d, 1)

    def forward(self, x_num, x_cat):
        x = self.tokenizer(x_num, x_cat)
        for i, layer in enumerate(self.layers):
            last = i + 1 == len(self.layers)
            r = layer["norm0"](x) if "norm0" in layer else x
            r = layer["attention"](r[:, :1] if last else r, r)
            x = (x[:, :1] if last else x) + r
            x = x + layer["linear1"](reglu(layer["linear0"](layer["norm1"](x))))
        return self.head(F.relu(self.last_normalization(x[:, 0]))).squeeze(-1)


def table():
    x_cat = torch.stack([torch.randint(5, (BATCH,)), torch.randint(3, (BATCH,))], 1)
    return {"x_num": torch.randn(BATCH, 4), "x_cat": x_cat, "target": torch.randn(BATCH)}


class SAINT(nn.Module):
    """Attention over columns, then over the rows of the batch (Somepalli et al. 2021)."""

    def __init__(self, d=8, n=6):
        super().__init__()
        self.tokenizer = FeatureTokenizer(4, [5, 3], d)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(d),
                        TabularAttention(d, 2),
                        nn.Sequential(
                            nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)
                        ),
                        nn.LayerNorm((n + 1) * d),
                        TabularAttention((n + 1) * d, 2),
                    ]
                )
            )
        self.mlpfory = nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x_num, x_cat):
        x = self.tokenizer(x_num, x_cat)
        _, n, d = x.shape
        for norm1, attn, ff, norm2, row_attn in self.layers:
            h = norm1(x)
            x = attn(h, h) + x
            x = ff(x) + x
            rows = x.reshape(1, -1, n * d)
            h = norm2(rows)
            x = (row_attn(h, h) + rows).reshape(-1, n, d)
        return self.mlpfory(x[:, 0]).squeeze(-1)


class GaussianSmearing(nn.Module):
    def __init__(self, start=0.0, stop=5.0, n=8):
        super().__init__()
        offset = torch.linspace(start, stop, n)
        self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
        self.register_buffer("offset", offset)

    def forward(self, dist):
        return torch.exp(self.coeff * (dist.view(-1, 1) - self.offset.view(1, -1)).pow(2))


class ShiftedSoftplus(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.log(torch.tensor(2.0)).item()

    def forward(self, x):
        return F.softplus(x) - self.shift


class CFConv(nn.Module):
    def __init__(self, d, filters, mlp, cutoff):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(d, filters, bias=False), nn.Linear(filters, d)
        self.nn, self.cutoff = mlp, cutoff
        nn.init.xavier_uniform_(self.lin1.weight)

    def forward(self, x, edge_index, edge_weight, edge_attr):
        C = 0.5 * (torch.cos(edge_weight * math.pi / self.cutoff) + 1.0)
        W = self.nn(edge_attr) * C.view(-1, 1)
        src, dst = edge_index
        x = self.lin1(x)
        out = torch.zeros_like(x).index_add(0, dst, x[src] * W)
        return self.lin2(out)


class InteractionBlock(nn.Module):
    def __init__(self, d, gaussians, filters, cutoff):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(gaussians, filters), ShiftedSoftplus(), nn.Linear(filters, filters)
        )
        self.conv = CFConv(d, filters, self.mlp, cutoff)
        self.act, self.lin = ShiftedSoftplus(), nn.Linear(d, d)

    def forward(self, x, *edges):
        return self.lin(self.act(self.conv(x, *edges)))


class SchNet(nn.Module):
    """SchNet (Schuett et al. 2017) on padded molecules; a filter net that two modules hold."""

    def __init__(self, d=8, cutoff=5.0):
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("atomref", torch.randn(6, 1))
        self.embedding, self.distance_expansion = nn.Embedding(6, d, padding_idx=0), None
        self.distance_expansion = GaussianSmearing(0.0, cutoff)
        self.interactions = nn.ModuleList([InteractionBlock(d, 8, 8, cutoff) for _ in range(2)])
        self.lin1, self.act, self.lin2 = nn.Linear(d, d // 2), ShiftedSoftplus(), nn.Linear(4, 1)

    def forward(self, z, pos):
        b, n = z.shape
        real = z > 0
        batch = torch.arange(b, device=z.device)[:, None].expand(b, n)[real]
        z, pos = z[real], pos[real]
        d = torch.cdist(pos, pos)
        near = (batch[:, None] == batch[None]) & (d < self.cutoff)
        near &= ~torch.eye(len(z), dtype=torch.bool)
        edge_index = near.nonzero().t()
        edge_weight = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        edge_attr = self.distance_expansion(edge_weight)
        h = self.embedding(z)
        for interaction in self.interactions:
            h = h + interaction(h, edge_index, edge_weight, edge_attr)
        h = self.lin2(self.act(self.lin1(h))) + F.embedding(z, self.atomref)
        return torch.zeros(b, 1).to(h).index_add_(0, batch, h).squeeze(1)


def padded_molecules():
    z = torch.randint(1, 6, (BATCH, 5))
    z[::2, 4:] = 0
    return {"z": z, "pos": torch.randn(BATCH, 5, 3), "target": torch.randn(BATCH)}


class AdaBlock(nn.Module):
    def __init__(self, d, emb):
        super().__init__()
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.mod = nn.Sequential(nn.SiLU(), nn.Linear(emb, 3 * d))

    def forward(self, x, emb):
        shift, scale, gate = self.mod(emb).chunk(3, dim=1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.fc2(F.silu(self.fc1(h)))


class FlowMatching(nn.Module):
    """Conditional flow matching (Lipman et al. 2023): time and noise drawn in the forward, labels
    dropped for guidance, an average of all weights in buffers."""

    def __init__(self, d=16, classes=5, decay=0.9):
        super().__init__()
        self.classes, self.decay = classes, decay
        self.net = nn.ModuleDict(
            {
                "inp": nn.Linear(2, d),
                "emb": nn.Embedding(classes + 1, d),
                "time": nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)),
                "blocks": nn.ModuleList([AdaBlock(d, d) for _ in range(2)]),
                "out": nn.Linear(d, 2),
            }
        )
        self.register_buffer("freqs", torch.exp(-math.log(1e4) * torch.arange(d // 2) / (d // 2)))
        for name, p in self.net.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update_ema(self):
        for name, p in self.net.named_parameters():
            getattr(self, "ema_" + name.replace(".", "_")).lerp_(p, 1 - self.decay)

    def velocity(self, x, t, y):
        args = t[:, None] * self.freqs[None] * 1000
        emb = self.net["time"](torch.cat([args.cos(), args.sin()], -1)) + self.net["emb"](y)
        h = self.net["inp"](x)
        for block in self.net["blocks"]:
            h = block(h, emb)
        return self.net["out"](h)

    def forward(self, x1, y):
        if self.training:
            self.update_ema()
        x0, t = torch.randn_like(x1), torch.rand(x1.shape[0]).to(x1)
        drop = torch.rand(x1.shape[0], device=x1.device) < 0.1
        y = torch.where(drop, torch.full_like(y, self.classes), y)
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        v = self.velocity(xt, t, y)
        return F.mse_loss(v, x1 - x0, reduction="none").mean(dim=1)


def points():
    return {"x1": torch.randn(BATCH, 2), "y": torch.randint(5, (BATCH,))}


def mlp(sizes, act=nn.ReLU):
    layers = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1])]
        if i < len(sizes) - 2:
            layers += [act()]
    return nn.Sequential(*layers)


class SAC(nn.Module):
    """Soft actor-critic (Haarnoja et al. 2018) in one module: twin critics, their averages, a
    temperature that is learnt, all losses in the forward."""

    LOG_STD_MAX, LOG_STD_MIN = 2, -5

    def __init__(self, obs=5, act=2, h=16, tau=0.1, gamma=0.99):
        super().__init__()
        self.tau, self.gamma, self.target_entropy = tau, gamma, -float(act)
        self.actor = mlp([obs, h, h])
        self.mean, self.logstd = nn.Linear(h, act), nn.Linear(h, act)
        self.qf1, self.qf2 = mlp([obs + act, h, h, 1]), mlp([obs + act, h, h, 1])
        self.qf1_target, self.qf2_target = copy.deepcopy(self.qf1), copy.deepcopy(self.qf2)
        for p in (*self.qf1_target.parameters(), *self.qf2_target.parameters()):
            p.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("action_scale", torch.full((act,), 2.0))
        self.register_buffer("action_bias", torch.zeros(act))

    def get_action(self, x, noise):
        h = F.relu(self.actor(x))
        mean, log_std = self.mean(h), torch.tanh(self.logstd(h))
        span = self.LOG_STD_MAX - self.LOG_STD_MIN
        log_std = self.LOG_STD_MIN + 0.5 * span * (log_std + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = mean + log_std.exp() * noise
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t)
        log_prob = log_prob - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1, keepdim=True)

    def forward(self, obs, action, reward, next_obs, done, noise, next_noise):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, logp2 = self.get_action(next_obs, next_noise)
            sa = torch.cat([next_obs, a2], 1)
            q = torch.min(self.qf1_target(sa), self.qf2_target(sa)) - alpha * logp2
            target = reward + (1 - done) * self.gamma * q.view(-1)
        sa = torch.cat([obs, action], 1)
        critic = sum((f(sa).view(-1) - target) ** 2 for f in (self.qf1, self.qf2))
        pi, logp = self.get_action(obs, noise)
        for p in (*self.qf1.parameters(), *self.qf2.parameters()):
            p.requires_grad_(False)
        sa = torch.cat([obs, pi], 1)
        q = torch.min(self.qf1(sa), self.qf2(sa))
        for p in (*self.qf1.parameters(), *self.qf2.parameters()):
            p.requires_grad_(True)
        actor = (alpha * logp - q).view(-1)
        temperature = -self.log_alpha.exp() * (logp.detach() + self.target_entropy).view(-1)
        if self.training:
            self.polyak()
        return {"critic": critic, "actor": actor, "alpha": temperature}

    @torch.no_grad()
    def polyak(self):
        for f, t in ((self.qf1, self.qf1_target), (self.qf2, self.qf2_target)):
            for p, q in zip(f.parameters(), t.parameters(), strict=True):
                q.data.copy_(self.tau * p.data + (1 - self.tau) * q.data)


def transitions():
    return {
        "obs": torch.randn(BATCH, 5),
        "action": torch.rand(BATCH, 2) * 4 - 2,
        "reward": torch.randn(BATCH),
        "next_obs": torch.randn(BATCH, 5),
        "done": (torch.rand(BATCH) < 0.2).float(),
        "noise": torch.randn(BATCH, 2),
        "next_noise": torch.randn(BATCH, 2),
    }


def all_of(out, batch):
    return sum(v.sum() for v in out.values()), count(len(out["actor"]))


def layer_init(layer, std=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class RecurrentPPO(nn.Module):
    """PPO with memory as CleanRL writes it: the state is reset where an episode ends."""

    def __init__(self, obs=6, h=8, actions=4):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Linear(obs, 16)), nn.ReLU(), layer_init(nn.Linear(16, h)), nn.ReLU()
        )
        self.lstm = nn.LSTM(h, h)
        for name, param in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.constant_(param, 0)
            elif "weight" in name:
                nn.init.orthogonal_(param, 1.0)
        self.actor, self.critic = (
            layer_init(nn.Linear(h, actions), std=0.01),
            layer_init(nn.Linear(h, 1), std=1),
        )

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                (
                    (1.0 - d).view(1, -1, 1) * lstm_state[0],
                    (1.0 - d).view(1, -1, 1) * lstm_state[1],
                ),
            )
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def forward(self, obs, done, h0, c0, action):
        t, b = obs.shape[1], obs.shape[0]
        state = (h0.unsqueeze(0), c0.unsqueeze(0))
        x = obs.transpose(0, 1).reshape(t * b, -1)
        hidden, _ = self.get_states(x, state, done.t().reshape(-1))
        probs = torch.distributions.Categorical(logits=self.actor(hidden))
        logprob = probs.log_prob(action.t().reshape(-1)).view(t, b).t()
        entropy, value = probs.entropy().view(t, b).t(), self.critic(hidden).view(t, b).t()
        return logprob, entropy, value


def rollouts():
    return {
        "obs": torch.randn(BATCH, 5, 6),
        "done": (torch.rand(BATCH, 5) < 0.2).float(),
        "h0": torch.randn(BATCH, 8),
        "c0": torch.randn(BATCH, 8),
        "action": torch.randint(4, (BATCH, 5)),
        "old": torch.randn(BATCH, 5) * 0.1 - 1.4,
        "advantage": torch.randn(BATCH, 5),
        "ret": torch.randn(BATCH, 5),
    }


def ppo(out, batch):
    logprob, entropy, value = out
    ratio, adv = (logprob - batch["old"]).exp(), batch["advantage"]
    policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2))
    loss = policy + 0.25 * (value - batch["ret"]) ** 2 - 0.01 * entropy
    return loss.sum(), count(loss.numel())


class Distilled(nn.Module):
    """DistilBERT's way: a teacher that never trains, a student that begins as its every second
    layer, and a loss on logits, labels and hidden states."""

    def __init__(self, d=16, heads=4, T=2.0):
        super().__init__()
        self.T = T
        self.teacher = self._bert(d, heads, 2)
        self.student = self._bert(d, heads, 2)
        self.student["embeddings"].load_state_dict(self.teacher["embeddings"].state_dict())
        self.student["layers"][0].load_state_dict(self.teacher["layers"][1].state_dict())
        self.proj = nn.Linear(d, d, bias=False)
        for p in self.teacher.parameters():
            p.requires_grad = False

    @staticmethod
    def _bert(d, heads, n):
        return nn.ModuleDict(
            {
                "embeddings": BertEmbeddings(d),
                "layers": nn.ModuleList([BertLayer(d, heads) for _ in range(n)]),
                "head": nn.Linear(d, VOCAB),
            }
        )

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    @staticmethod
    def run(net, ids, mask):
        x = net["embeddings"](ids, torch.zeros_like(ids))
        for layer in net["layers"]:
            x = layer(x, mask)
        return net["head"](x), x

    def forward(self, input_ids, labels):
        mask = torch.zeros(1, 1, 1, 1).to(self.proj.weight)
        with torch.no_grad():
            t_logits, t_hidden = self.run(self.teacher, input_ids, mask)
        s_logits, s_hidden = self.run(self.student, input_ids, mask)
        keep = (labels != -100).unsqueeze(-1)
        kd = F.kl_div(
            F.log_softmax(s_logits / self.T, dim=-1),
            F.softmax(t_logits / self.T, dim=-1),
            reduction="none",
        )
        kd = (kd * keep).sum((1, 2)) * self.T**2
        ce = F.cross_entropy(s_logits.transpose(1, 2), labels, reduction="none").sum(1)
        hidden = (1 - F.cosine_similarity(self.proj(s_hidden), t_hidden, dim=-1)).sum(1)
        return {"loss": 5.0 * kd + 2.0 * ce + hidden, "logits": s_logits}


def own(out, batch):
    return out["loss"].sum(), count(len(out["loss"]))


TIMES_NET = Subject(TimesNet, series, mse, plan=())  # the periods are those of the whole batch
SAINT_NET = Subject(SAINT, table, mse, plan=())  # samples attend to one another
PRACTICE: dict[str, Subject] = {
    "sasrec": Subject(SASRec, histories, ranking),
    "dcn-mix": Subject(DCNMix, impressions, clicked),
    "patch-tst": Subject(PatchTST, series, mse),
    "deep-speech": Subject(DeepSpeech, spectrograms, ctc),
    "transducer": Subject(Transducer, recordings, summed),
    "yolo": Subject(YOLO, boxes, detection),
    "deep-lab": Subject(DeepLab, masks, segmentation),
    "dino": Subject(DINO, crops, summed),
    "bert-pretraining": Subject(BertForPreTraining, sentence_pairs, pretraining),
    "electra": Subject(Electra, masked_text, summed),
    "pointer-generator": Subject(PointerGenerator, articles, summed),
    "speed-gpt": Subject(SpeedGPT, tokens, next_token),
    "ft-transformer": Subject(FTTransformer, table, mse),
    "schnet": Subject(SchNet, padded_molecules, mse),
    "flow-matching": Subject(FlowMatching, points, summed),
    "sac": Subject(SAC, transitions, all_of),
    "recurrent-ppo": Subject(RecurrentPPO, rollouts, ppo),
    "distilled": Subject(Distilled, tokens, own),
}
