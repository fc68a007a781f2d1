"""Nets from many fields: efficient convolutions, external memory, pointers, operators, sets of
boxes, forecasts with gates, optical flow, speech of given lengths, control as a sequence.
"""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import itertools
import math
from collections import OrderedDict, namedtuple
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import BATCH, VOCAB, Subject, tokens
from weft.nn.losses import classification, mse, next_token


def count(n):
    return torch.tensor(float(n))


class LayerNorm2d(nn.Module):
    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps, self.data_format = eps, data_format
        self.normalized_shape = (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, layer_scale_init_value=1e-1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = LayerNorm2d(dim)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = (
            nn.Parameter(layer_scale_init_value * torch.ones(dim))
            if layer_scale_init_value > 0
            else None
        )

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + x


class ConvNeXt(nn.Module):
    """A ConvNet for the 2020s (Liu et al. 2022): stems and stages in two lists."""

    def __init__(self, in_chans=3, num_classes=5, depths=(1, 1, 2, 1), dims=(6, 8, 12, 16)):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        stem = nn.Sequential(
            nn.Conv2d(in_chans, dims[0], kernel_size=2, stride=2),
            LayerNorm2d(dims[0], data_format="channels_first"),
        )
        self.downsample_layers.append(stem)
        for i in range(3):
            self.downsample_layers.append(
                nn.Sequential(
                    LayerNorm2d(dims[i], data_format="channels_first"),
                    nn.Conv2d(dims[i], dims[i + 1], kernel_size=2, stride=2),
                )
            )
        self.stages = nn.ModuleList(
            nn.Sequential(*[ConvNeXtBlock(dims[i]) for _ in range(depths[i])]) for i in range(4)
        )
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.2)
            nn.init.constant_(m.bias, 0)

    def forward_features(self, x):
        for i in range(4):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, image):
        return self.head(self.forward_features(image))


def photos(size=16):
    return {"image": torch.randn(BATCH, 3, size, size), "label": torch.randint(5, (BATCH,))}


BlockArgs = namedtuple(
    "BlockArgs", ["num_repeat", "kernel", "stride", "expand", "inp", "out", "se_ratio", "id_skip"]
)


class MemoryEfficientSwish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def get_same_padding_conv2d():
    class Conv2dStaticSamePadding(nn.Conv2d):
        """'SAME' as TensorFlow pads."""

        def forward(self, x):
            ih, iw = x.size()[-2:]
            kh, kw = self.weight.size()[-2:]
            sh, sw = self.stride
            oh, ow = math.ceil(ih / sh), math.ceil(iw / sw)
            pad_h = max((oh - 1) * self.stride[0] + (kh - 1) * self.dilation[0] + 1 - ih, 0)
            pad_w = max((ow - 1) * self.stride[1] + (kw - 1) * self.dilation[1] + 1 - iw, 0)
            if pad_h > 0 or pad_w > 0:
                x = F.pad(x, [pad_w // 2, pad_w - pad_w // 2, pad_h // 2, pad_h - pad_h // 2])
            return F.conv2d(
                x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
            )

    return Conv2dStaticSamePadding


class MBConvBlock(nn.Module):
    def __init__(self, block_args):
        super().__init__()
        self._block_args = block_args
        self.has_se = block_args.se_ratio is not None and 0 < block_args.se_ratio <= 1
        self.id_skip = block_args.id_skip
        Conv2d = get_same_padding_conv2d()
        inp = block_args.inp
        oup = block_args.inp * block_args.expand
        if block_args.expand != 1:
            self._expand_conv = Conv2d(inp, oup, kernel_size=1, bias=False)
            self._bn0 = nn.BatchNorm2d(oup, momentum=0.01, eps=1e-3)
        k, s = block_args.kernel, block_args.stride
        self._depthwise_conv = Conv2d(oup, oup, groups=oup, kernel_size=k, stride=s, bias=False)
        self._bn1 = nn.BatchNorm2d(oup, momentum=0.01, eps=1e-3)
        if self.has_se:
            num_squeezed = max(1, int(inp * block_args.se_ratio))
            self._se_reduce = Conv2d(oup, num_squeezed, kernel_size=1)
            self._se_expand = Conv2d(num_squeezed, oup, kernel_size=1)
        self._project_conv = Conv2d(oup, block_args.out, kernel_size=1, bias=False)
        self._bn2 = nn.BatchNorm2d(block_args.out, momentum=0.01, eps=1e-3)
        self._swish = MemoryEfficientSwish()

    def forward(self, inputs):
        x = inputs
        if self._block_args.expand != 1:
            x = self._swish(self._bn0(self._expand_conv(inputs)))
        x = self._swish(self._bn1(self._depthwise_conv(x)))
        if self.has_se:
            x_squeezed = F.adaptive_avg_pool2d(x, 1)
            x_squeezed = self._se_expand(self._swish(self._se_reduce(x_squeezed)))
            x = torch.sigmoid(x_squeezed) * x
        x = self._bn2(self._project_conv(x))
        a = self._block_args
        if self.id_skip and a.stride == 1 and a.inp == a.out:
            x = x + inputs
        return x


class EfficientNet(nn.Module):
    """Inverted bottlenecks with squeeze and excitation (Tan & Le 2019)."""

    def __init__(self, num_classes=5):
        super().__init__()
        args = [
            BlockArgs(1, 3, 1, 1, 8, 4, 0.25, True),
            BlockArgs(2, 3, 2, 4, 4, 6, 0.25, True),
            BlockArgs(2, 5, 2, 4, 6, 8, 0.25, True),
        ]
        Conv2d = get_same_padding_conv2d()
        self._conv_stem = Conv2d(3, 8, kernel_size=3, stride=2, bias=False)
        self._bn0 = nn.BatchNorm2d(8)
        self._blocks = nn.ModuleList([])
        for block_args in args:
            self._blocks.append(MBConvBlock(block_args))
            if block_args.num_repeat > 1:
                block_args = block_args._replace(inp=block_args.out, stride=1)
            for _ in range(block_args.num_repeat - 1):
                self._blocks.append(MBConvBlock(block_args))
        self._conv_head = Conv2d(8, 24, kernel_size=1, bias=False)
        self._bn1 = nn.BatchNorm2d(24)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._fc = nn.Linear(24, num_classes)
        self._swish = MemoryEfficientSwish()

    def forward(self, image):
        bs = image.size(0)
        x = self._swish(self._bn0(self._conv_stem(image)))
        for block in self._blocks:
            x = block(x)
        x = self._swish(self._bn1(self._conv_head(x)))
        x = self._avg_pooling(x).view(bs, -1)
        return self._fc(x)


class Memory(nn.Module):
    def __init__(self, N, M):
        super().__init__()
        self.N, self.M = N, M
        stdev = 1 / (math.sqrt(N + M))
        self.register_buffer("mem_bias", torch.empty(N, M).uniform_(-stdev, stdev))

    def reset(self, batch_size):
        self.batch_size = batch_size
        self.memory = self.mem_bias.clone().repeat(batch_size, 1, 1)

    def size(self):
        return self.N, self.M

    def read(self, w):
        return torch.matmul(w.unsqueeze(1), self.memory).squeeze(1)

    def write(self, w, e, a):
        erase = torch.matmul(w.unsqueeze(-1), e.unsqueeze(1))
        add = torch.matmul(w.unsqueeze(-1), a.unsqueeze(1))
        self.memory = self.memory * (1 - erase) + add

    def address(self, k, beta, g, s, gamma, w_prev):
        k = k.view(self.batch_size, 1, -1)
        wc = F.softmax(beta * F.cosine_similarity(self.memory + 1e-16, k + 1e-16, dim=-1), dim=1)
        wg = g * wc + (1 - g) * w_prev
        result = torch.zeros(wg.size()).to(wg)
        for b in range(self.batch_size):
            t = torch.cat([wg[b, -1:], wg[b], wg[b, :1]])
            result[b] = F.conv1d(t.view(1, 1, -1), s[b].view(1, 1, -1)).view(-1)
        w = result**gamma
        return torch.div(w, torch.sum(w, dim=1).view(-1, 1) + 1e-16)


class NTMHead(nn.Module):
    def __init__(self, memory, controller_size, writes):
        super().__init__()
        self.memory = memory
        _, self.M = memory.size()
        self.lengths = [self.M, 1, 1, 3, 1] + ([self.M, self.M] if writes else [])
        self.writes = writes
        self.fc = nn.Linear(controller_size, sum(self.lengths))
        nn.init.xavier_uniform_(self.fc.weight, gain=1.4)
        nn.init.normal_(self.fc.bias, std=0.01)

    def forward(self, embeddings, w_prev):
        o = torch.split(self.fc(embeddings), self.lengths, dim=1)
        k, beta, g, s, gamma = o[:5]
        w = self.memory.address(
            k, F.softplus(beta), torch.sigmoid(g), F.softmax(s, 1), 1 + F.softplus(gamma), w_prev
        )
        if self.writes:
            self.memory.write(w, torch.sigmoid(o[5]), o[6])
            return w
        return self.memory.read(w), w


class NTM(nn.Module):
    """A neural Turing machine that copies (Graves et al. 2014); loudinthecloud's layout."""

    def __init__(self, width=4, controller_size=12, N=6, M=5):
        super().__init__()
        self.memory = Memory(N, M)
        self.controller = nn.LSTMCell(width + 1 + M, controller_size)
        self.h0 = nn.Parameter(torch.randn(1, controller_size) * 0.05)
        self.c0 = nn.Parameter(torch.randn(1, controller_size) * 0.05)
        self.heads = nn.ModuleList(
            [
                NTMHead(self.memory, controller_size, False),
                NTMHead(self.memory, controller_size, True),
            ]
        )
        self.register_buffer("init_r", torch.randn(1, M) * 0.01)
        self.fc = nn.Linear(controller_size + M, width)

    def step(self, x, state):
        r, (h, c), ws = state
        h, c = self.controller(torch.cat([x, r], dim=1), (h, c))
        new = []
        for head, w in zip(self.heads, ws, strict=True):
            if head.writes:
                w = head(h, w)
            else:
                r, w = head(h, w)
            new.append(w)
        return torch.sigmoid(self.fc(torch.cat([h, r], dim=1))), (r, (h, c), new)

    def forward(self, seq):
        T, B, W = seq.size(1), seq.size(0), seq.size(2)
        self.memory.reset(B)
        state = (
            self.init_r.repeat(B, 1),
            (self.h0.repeat(B, 1), self.c0.repeat(B, 1)),
            [torch.zeros(B, self.memory.N).to(seq) for _ in self.heads],
        )
        for t in range(T):
            _, state = self.step(F.pad(seq[:, t], (0, 1)), state)
        end = torch.zeros(B, W + 1).to(seq)
        end[:, -1] = 1
        out = []
        for t in range(T):
            o, state = self.step(end if t == 0 else torch.zeros_like(end), state)
            out.append(o)
        return torch.stack(out, 1)


def copies():
    return {"seq": torch.randint(0, 2, (BATCH, 4, 4)).float()}


def copied(out, batch):
    loss = F.binary_cross_entropy(out, batch["seq"], reduction="sum")
    return loss, count(batch["seq"].numel())


class PointerAttention(nn.Module):
    def __init__(self, input_dim, hidden_dim):
        super().__init__()
        self.input_linear = nn.Linear(input_dim, hidden_dim)
        self.context_linear = nn.Conv1d(input_dim, hidden_dim, 1, 1)
        self.V = nn.Parameter(torch.empty(hidden_dim).uniform_(-1, 1))
        self._inf = float("-inf")

    def forward(self, input, context, mask):
        inp = self.input_linear(input).unsqueeze(2).expand(-1, -1, context.size(1))
        ctx = self.context_linear(context.permute(0, 2, 1))
        V = self.V.unsqueeze(0).expand(context.size(0), -1).unsqueeze(1)
        att = torch.bmm(V, torch.tanh(inp + ctx)).squeeze(1)
        att = att.masked_fill(~mask, self._inf)
        alpha = F.softmax(att, dim=1)
        return torch.bmm(ctx, alpha.unsqueeze(2)).squeeze(2), alpha


class PointerDecoder(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.hidden_dim = hidden
        self.input_to_hidden = nn.Linear(d, 4 * hidden)
        self.hidden_to_hidden = nn.Linear(hidden, 4 * hidden)
        self.hidden_out = nn.Linear(hidden * 2, hidden)
        self.att = PointerAttention(hidden, hidden)

    def forward(self, embedded, decoder_input, hidden, context):
        n, m = embedded.size(0), embedded.size(1)
        mask = torch.ones(n, m, dtype=torch.bool, device=embedded.device)
        runner = torch.arange(m, device=embedded.device).unsqueeze(0).expand(n, -1)
        outputs, pointers = [], []
        h, c = hidden
        for _ in range(m):
            gates = self.input_to_hidden(decoder_input) + self.hidden_to_hidden(h)
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h_t = torch.sigmoid(o) * torch.tanh(c)
            hidden_t, alpha = self.att(h_t, context, mask)
            h = torch.tanh(self.hidden_out(torch.cat((hidden_t, h_t), 1)))
            _, indices = (alpha * mask).max(1)
            one_hot = runner == indices.unsqueeze(1)
            mask = mask & ~one_hot
            decoder_input = embedded[one_hot].view(n, -1)
            outputs.append(alpha)
            pointers.append(indices)
        return torch.stack(outputs, 1), torch.stack(pointers, 1)


class PointerNet(nn.Module):
    """Tours of points by pointing at them (Vinyals et al. 2015)."""

    def __init__(self, d=8, hidden=8):
        super().__init__()
        self.embedding = nn.Linear(2, d)
        self.encoder = nn.LSTM(d, hidden, batch_first=True)
        self.decoder = PointerDecoder(d, hidden)
        self.decoder_input0 = nn.Parameter(torch.empty(d).uniform_(-1, 1))

    def forward(self, inputs):
        x = self.embedding(inputs)
        context, (h, c) = self.encoder(x)
        start = self.decoder_input0.unsqueeze(0).expand(inputs.size(0), -1)
        return self.decoder(x, start, (h[-1], c[-1]), context)


def tours():
    order = torch.stack([torch.randperm(5) for _ in range(BATCH)])
    return {"inputs": torch.randn(BATCH, 5, 2), "tour": order}


def pointed(out, batch):
    probs, _ = out
    logs = (probs + 1e-3).log()  # a point of the tour may be masked already
    return -logs.gather(2, batch["tour"].unsqueeze(2)).sum(), count(batch["tour"].numel())


class DeepFM(nn.Module):
    """Factorization machine beside a tower (Guo et al. 2017), as DeepCTR writes it: features by
    name."""

    def __init__(self, sparse=None, dense=("price", "age"), dim=4, hidden=(16, 8)):
        super().__init__()
        sparse = sparse or {"user": 30, "item": 40, "city": 9}
        self.sparse, self.dense = list(sparse), list(dense)

        def table(width):
            return nn.ModuleDict(
                {k: nn.Embedding(v, width, sparse=False) for k, v in sparse.items()}
            )

        self.embedding_dict, self.linear_dict = table(dim), table(1)
        for t in [*self.embedding_dict.values(), *self.linear_dict.values()]:
            nn.init.normal_(t.weight, mean=0, std=0.1)
        self.linear_dense = nn.Parameter(torch.randn(len(dense), 1) * 0.1)
        units = [len(sparse) * dim + len(dense), *hidden]
        self.dnn = nn.ModuleList([nn.Linear(units[i], units[i + 1]) for i in range(len(units) - 1)])
        self.bn = nn.ModuleList([nn.BatchNorm1d(n) for n in hidden])
        self.dnn_linear = nn.Linear(hidden[-1], 1, bias=False)
        self.bias = nn.Parameter(torch.zeros((1,)))

    def forward(self, user, item, city, price, age):
        ids = {"user": user, "item": item, "city": city}
        embs = [self.embedding_dict[k](ids[k].unsqueeze(1)) for k in self.sparse]
        dense = torch.stack([price, age], dim=-1)
        logit = torch.cat([self.linear_dict[k](ids[k]) for k in self.sparse], -1).sum(-1, True)
        logit = logit + dense.matmul(self.linear_dense)
        fm = torch.cat(embs, dim=1)
        square_of_sum = torch.pow(torch.sum(fm, dim=1, keepdim=True), 2)
        sum_of_square = torch.sum(fm * fm, dim=1, keepdim=True)
        logit = logit + 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2)
        deep = torch.cat([torch.flatten(fm, start_dim=1), dense], dim=-1)
        for fc, bn in zip(self.dnn, self.bn, strict=True):
            deep = F.relu(bn(fc(deep)))
        logit = logit + self.dnn_linear(deep)
        return (logit + self.bias).squeeze(-1)


def clicks():
    return {
        "user": torch.randint(30, (BATCH,)),
        "item": torch.randint(40, (BATCH,)),
        "city": torch.randint(9, (BATCH,)),
        "price": torch.rand(BATCH),
        "age": torch.rand(BATCH),
        "label": torch.randint(0, 2, (BATCH,)).float(),
    }


def clicked(out, batch):
    y = batch["label"]
    return F.binary_cross_entropy_with_logits(out, y, reduction="sum"), count(len(y))


class SAGEConv(nn.Module):
    def __init__(self, in_feats, out_feats, aggregator="mean"):
        super().__init__()
        self.aggregator = aggregator
        self.fc_self = nn.Linear(in_feats, out_feats, bias=False)
        self.fc_neigh = nn.Linear(in_feats, out_feats, bias=False)
        if aggregator == "pool":
            self.fc_pool = nn.Linear(in_feats, in_feats)
        self.bias = nn.Parameter(torch.zeros(out_feats))

    def forward(self, h_self, h_neigh, mask):
        mask = mask.unsqueeze(-1)
        if self.aggregator == "mean":
            agg = (h_neigh * mask).sum(-2) / mask.sum(-2).clamp(min=1)
        else:
            pooled = F.relu(self.fc_pool(h_neigh)).masked_fill(mask == 0, 0.0)
            agg = pooled.max(dim=-2).values
        return self.fc_self(h_self) + self.fc_neigh(agg) + self.bias


class GraphSAGE(nn.Module):
    """Sampled neighbours of two hops, padded with node 0 (Hamilton et al. 2017)."""

    def __init__(self, num_nodes=50, feats=6, hidden=8, classes=4):
        super().__init__()
        self.register_buffer("features", torch.randn(num_nodes, feats))
        self.convs = nn.ModuleList(
            [SAGEConv(feats, hidden, "mean"), SAGEConv(hidden, classes, "pool")]
        )

    def forward(self, seeds, hop1, hop2):
        x0, x1, x2 = (self.features[n] for n in (seeds, hop1, hop2))
        m1, m2 = (hop1 > 0).to(x0.dtype), (hop2 > 0).to(x0.dtype)
        hs = [x0, x1, x2]
        masks = [m1, m2]
        for layer, conv in enumerate(self.convs):
            nxt = []
            for hop in range(len(self.convs) - layer):
                h = conv(hs[hop], hs[hop + 1], masks[hop])
                if layer != len(self.convs) - 1:
                    h = F.normalize(F.relu(h), p=2, dim=-1)
                nxt.append(h)
            hs = nxt
        return hs[0]


def neighbours():
    return {
        "seeds": torch.randint(1, 50, (BATCH,)),
        "hop1": torch.randint(0, 50, (BATCH, 4)),
        "hop2": torch.randint(0, 50, (BATCH, 4, 3)),
        "label": torch.randint(4, (BATCH,)),
    }


class DeepONet(nn.Module):
    """Branch and trunk (Lu et al. 2021), by DeepXDE's FNNs."""

    class FNN(nn.Module):
        def __init__(self, layer_sizes, activation):
            super().__init__()
            self.activation = activation
            self.linears = torch.nn.ModuleList()
            for i in range(1, len(layer_sizes)):
                self.linears.append(nn.Linear(layer_sizes[i - 1], layer_sizes[i]))
                nn.init.xavier_normal_(self.linears[-1].weight)
                nn.init.zeros_(self.linears[-1].bias)

        def forward(self, inputs):
            x = inputs
            for linear in self.linears[:-1]:
                x = self.activation(linear(x))
            return self.linears[-1](x)

    def __init__(self, sensors=10, p=12, num_outputs=2):
        super().__init__()
        self.num_outputs, self.p = num_outputs, p
        self.branch = DeepONet.FNN([sensors, 16, p * num_outputs], torch.tanh)
        self.trunk = DeepONet.FNN([2, 16, p * num_outputs], torch.sin)
        self.b = nn.ParameterList([nn.Parameter(torch.tensor(0.0)) for _ in range(num_outputs)])

    def forward(self, u, y):
        x_func, x_loc = self.branch(u), torch.tanh(self.trunk(y))
        xs = []
        for i in range(self.num_outputs):
            f = x_func[:, i * self.p : (i + 1) * self.p]
            loc = x_loc[..., i * self.p : (i + 1) * self.p]
            xs.append(torch.einsum("bp,bnp->bn", f, loc) + self.b[i])
        return torch.stack(xs, dim=-1)


def operators():
    u, y = torch.randn(BATCH, 10), torch.rand(BATCH, 7, 2)
    return {"u": u, "y": y, "target": torch.randn(BATCH, 7, 2)}


class SimSiam(nn.Module):
    """Two views and a stopped gradient (Chen & He 2021)."""

    def __init__(self, dim=16, pred_dim=6):
        super().__init__()
        self.encoder = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
                bn1=nn.BatchNorm2d(8),
                relu=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
                bn2=nn.BatchNorm2d(12),
                relu2=nn.ReLU(inplace=True),
                pool=nn.AdaptiveAvgPool2d(1),
                flat=nn.Flatten(),
                fc=nn.Linear(12, dim),
            )
        )
        prev_dim = self.encoder.fc.weight.shape[1]
        self.encoder.fc = nn.Sequential(
            nn.Linear(prev_dim, prev_dim, bias=False),
            nn.BatchNorm1d(prev_dim),
            nn.ReLU(inplace=True),
            self.encoder.fc,
            nn.BatchNorm1d(dim, affine=False),
        )
        self.encoder.fc[3].bias.requires_grad = False
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False),
            nn.BatchNorm1d(pred_dim),
            nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim),
        )

    def forward(self, x1, x2):
        z1 = self.encoder(x1)
        z2 = self.encoder(x2)
        p1 = self.predictor(z1)
        p2 = self.predictor(z2)
        return p1, p2, z1.detach(), z2.detach()


def views():
    x = torch.randn(BATCH, 3, 8, 8)
    return {"x1": x + 0.1 * torch.randn_like(x), "x2": x.flip(-1)}


def negative_cosine(out, batch):
    p1, p2, z1, z2 = out
    sim = nn.CosineSimilarity(dim=1)
    return -(sim(p1, z2).sum() + sim(p2, z1).sum()) * 0.5, count(len(p1))


class GatedLinearUnit(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, d * 2)

    def forward(self, x):
        return F.glu(self.fc(x), dim=-1)


class GatedResidualNetwork(nn.Module):
    def __init__(self, d_in, d, d_out=None, context=None):
        super().__init__()
        d_out = d_out or d
        self.skip = nn.Linear(d_in, d_out) if d_in != d_out else None
        self.fc1 = nn.Linear(d_in, d)
        self.context = nn.Linear(context, d, bias=False) if context else None
        self.fc2 = nn.Linear(d, d_out)
        self.gate, self.norm = GatedLinearUnit(d_out), nn.LayerNorm(d_out)

    def forward(self, x, context=None):
        residual = x if self.skip is None else self.skip(x)
        h = self.fc1(x)
        if context is not None:
            c = self.context(context)
            h = h + (c.unsqueeze(1) if h.dim() == 3 else c)
        h = self.fc2(F.elu(h))
        return self.norm(self.gate(h) + residual)


class VariableSelection(nn.Module):
    def __init__(self, names, d, context=None):
        super().__init__()
        self.names = names
        self.prescalers = nn.ModuleDict({n: nn.Linear(1, d) for n in names})
        self.single_variable_grns = nn.ModuleDict({n: GatedResidualNetwork(d, d) for n in names})
        self.flattened_grn = GatedResidualNetwork(d * len(names), d, len(names), context)

    def forward(self, x, context=None):
        embedded = {n: self.prescalers[n](x[..., i : i + 1]) for i, n in enumerate(self.names)}
        var = torch.stack([self.single_variable_grns[n](e) for n, e in embedded.items()], -1)
        flat = torch.cat(list(embedded.values()), dim=-1)
        weights = self.flattened_grn(flat, context).softmax(-1).unsqueeze(-2)
        return (var * weights).sum(-1), weights


class InterpretableAttention(nn.Module):
    """Heads share their values, and their outputs are averaged."""

    def __init__(self, n_head, d):
        super().__init__()
        self.n_head, self.d_head = n_head, d // n_head
        self.v_layer = nn.Linear(d, self.d_head)
        self.q_layers = nn.ModuleList([nn.Linear(d, self.d_head) for _ in range(n_head)])
        self.k_layers = nn.ModuleList([nn.Linear(d, self.d_head) for _ in range(n_head)])
        self.w_h = nn.Linear(self.d_head, d, bias=False)

    def forward(self, q, k, v, mask=None):
        heads, attns = [], []
        vs = self.v_layer(v)
        for i in range(self.n_head):
            a = torch.bmm(self.q_layers[i](q), self.k_layers[i](k).permute(0, 2, 1))
            a = a / self.d_head**0.5
            if mask is not None:
                a = a.masked_fill(mask, -1e9)
            a = a.softmax(-1)
            heads.append(torch.bmm(a, vs))
            attns.append(a)
        head = torch.stack(heads, dim=2) if self.n_head > 1 else heads[0]
        outputs = torch.mean(head, dim=2) if self.n_head > 1 else head
        return self.w_h(outputs), torch.stack(attns, dim=2)


class TemporalFusionTransformer(nn.Module):
    """Forecasts of quantiles (Lim et al. 2021), as pytorch-forecasting writes it."""

    def __init__(self, d=8, heads=2, quantiles=(0.1, 0.5, 0.9), encoder=6, decoder=3):
        super().__init__()
        self.encoder_length, self.decoder_length = encoder, decoder
        self.static_embedding = nn.Embedding(7, d)
        self.encoder_selection = VariableSelection(["sales", "price", "weekday"], d, d)
        self.decoder_selection = VariableSelection(["price", "weekday"], d, d)
        self.static_context = nn.ModuleDict(
            {k: GatedResidualNetwork(d, d) for k in ("select", "hidden", "cell", "enrich")}
        )
        self.lstm_encoder = nn.LSTM(d, d, batch_first=True)
        self.lstm_decoder = nn.LSTM(d, d, batch_first=True)
        self.post_lstm_gate, self.post_lstm_norm = GatedLinearUnit(d), nn.LayerNorm(d)
        self.enrichment = GatedResidualNetwork(d, d, context=d)
        self.attention = InterpretableAttention(heads, d)
        self.post_attn_gate, self.post_attn_norm = GatedLinearUnit(d), nn.LayerNorm(d)
        self.pos_wise_ff = GatedResidualNetwork(d, d)
        self.output_layer = nn.Linear(d, len(quantiles))

    def mask(self, device):
        n, m = self.encoder_length, self.decoder_length
        attend = torch.arange(m, device=device)[:, None] < torch.arange(m, device=device)[None]
        return torch.cat([torch.zeros(m, n, dtype=torch.bool, device=device), attend], 1)[None]

    def forward(self, store, past, future):
        static = self.static_embedding(store)
        ctx = {k: grn(static) for k, grn in self.static_context.items()}
        enc, _ = self.encoder_selection(past, ctx["select"])
        dec, _ = self.decoder_selection(future, ctx["select"])
        state = (ctx["hidden"].unsqueeze(0), ctx["cell"].unsqueeze(0))
        e, state = self.lstm_encoder(enc, state)
        o, _ = self.lstm_decoder(dec, state)
        lstm = torch.cat([e, o], 1)
        lstm = self.post_lstm_norm(self.post_lstm_gate(lstm) + torch.cat([enc, dec], 1))
        x = self.enrichment(lstm, ctx["enrich"])
        a, weights = self.attention(x[:, self.encoder_length :], x, x, self.mask(x.device))
        a = self.post_attn_norm(self.post_attn_gate(a) + x[:, self.encoder_length :])
        return {"prediction": self.output_layer(self.pos_wise_ff(a)), "attention": weights}


def sales():
    return {
        "store": torch.randint(7, (BATCH,)),
        "past": torch.randn(BATCH, 6, 3),
        "future": torch.randn(BATCH, 3, 2),
        "target": torch.randn(BATCH, 3),
    }


def quantile_loss(out, batch, quantiles=(0.1, 0.5, 0.9)):
    errors = batch["target"].unsqueeze(-1) - out["prediction"]
    q = torch.tensor(quantiles, device=errors.device, dtype=errors.dtype)
    return torch.maximum((q - 1) * errors, q * errors).sum(), count(errors.numel())


class ConvLSTMCell(nn.Module):
    def __init__(self, input_dim, hidden_dim, kernel_size, bias):
        super().__init__()
        self.input_dim, self.hidden_dim = input_dim, hidden_dim
        self.conv = nn.Conv2d(
            in_channels=input_dim + hidden_dim,
            out_channels=4 * hidden_dim,
            kernel_size=kernel_size,
            padding=(kernel_size[0] // 2, kernel_size[1] // 2),
            bias=bias,
        )

    def forward(self, input_tensor, cur_state):
        h_cur, c_cur = cur_state
        combined = torch.cat([input_tensor, h_cur], dim=1)
        combined_conv = self.conv(combined)
        cc_i, cc_f, cc_o, cc_g = torch.split(combined_conv, self.hidden_dim, dim=1)
        i, f, o, g = cc_i.sigmoid(), cc_f.sigmoid(), cc_o.sigmoid(), cc_g.tanh()
        c_next = f * c_cur + i * g
        return o * torch.tanh(c_next), c_next

    def init_hidden(self, batch_size, image_size):
        height, width = image_size
        zeros = partial(torch.zeros, batch_size, self.hidden_dim, height, width)
        return zeros(device=self.conv.weight.device), zeros(device=self.conv.weight.device)


class ConvLSTM(nn.Module):
    """Next frames (Shi et al. 2015), after ndrplz's."""

    def __init__(self, input_dim=1, hidden_dim=(6, 4), kernel_size=((3, 3), (3, 3))):
        super().__init__()
        self.num_layers = len(hidden_dim)
        dims = [input_dim, *hidden_dim]
        self.cell_list = nn.ModuleList(
            [
                ConvLSTMCell(dims[i], hidden_dim[i], kernel_size[i], bias=True)
                for i in range(self.num_layers)
            ]
        )
        self.head = nn.Conv2d(hidden_dim[-1], input_dim, 1)

    def forward(self, frames, hidden_state=None):
        b, _, _, h, w = frames.size()
        if hidden_state is not None:
            raise NotImplementedError()
        hidden_state = [cell.init_hidden(b, (h, w)) for cell in self.cell_list]
        seq_len = frames.size(1)
        cur_layer_input = frames
        for layer_idx in range(self.num_layers):
            h, c = hidden_state[layer_idx]
            output_inner = []
            for t in range(seq_len):
                h, c = self.cell_list[layer_idx](cur_layer_input[:, t, :, :, :], [h, c])
                output_inner.append(h)
            cur_layer_input = torch.stack(output_inner, dim=1)
        return self.head(cur_layer_input.flatten(0, 1)).view_as(frames)


def clips():
    x = torch.randn(BATCH, 5, 1, 6, 6)
    return {"frames": x[:, :-1].contiguous(), "target": x[:, 1:].contiguous()}


class DETR(nn.Module):
    """Boxes as a set, with a loss at each layer of the decoder (Carion et al. 2020)."""

    def __init__(self, num_classes=4, num_queries=5, d=16, heads=2, layers=2):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, d, 3, 2, 1), nn.ReLU()
        )
        self.input_proj = nn.Conv2d(d, d, kernel_size=1)
        self.row_embed = nn.Parameter(torch.rand(10, d // 2))
        self.col_embed = nn.Parameter(torch.rand(10, d // 2))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0), 1
        )
        self.decoder_layers = nn.ModuleList(
            [nn.TransformerDecoderLayer(d, heads, 2 * d, dropout=0.0) for _ in range(layers)]
        )
        self.decoder_norm = nn.LayerNorm(d)
        self.query_embed = nn.Embedding(num_queries, d)
        self.class_embed = nn.Linear(d, num_classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))

    def forward(self, samples):
        src = self.input_proj(self.backbone(samples))
        bs, _, h, w = src.shape
        pos = torch.cat(
            [
                self.col_embed[:w].unsqueeze(0).repeat(h, 1, 1),
                self.row_embed[:h].unsqueeze(1).repeat(1, w, 1),
            ],
            dim=-1,
        )
        pos = pos.flatten(0, 1).unsqueeze(1)
        memory = self.encoder(pos + 0.1 * src.flatten(2).permute(2, 0, 1))
        tgt = self.query_embed.weight.unsqueeze(1).repeat(1, bs, 1)
        hs = []
        for layer in self.decoder_layers:
            tgt = layer(tgt, memory)
            hs.append(self.decoder_norm(tgt))
        hs = torch.stack(hs).transpose(1, 2)
        outputs_class = self.class_embed(hs)
        outputs_coord = self.bbox_embed(hs).sigmoid()
        out = {"pred_logits": outputs_class[-1], "pred_boxes": outputs_coord[-1]}
        out["aux_outputs"] = [
            {"pred_logits": a, "pred_boxes": b}
            for a, b in zip(outputs_class[:-1], outputs_coord[:-1], strict=True)
        ]
        return out


def scenes():
    classes = torch.randint(4, (BATCH, 2))
    classes[::3, 1] = -1  # one box only
    return {
        "samples": torch.randn(BATCH, 3, 12, 12),
        "classes": classes,
        "boxes": torch.rand(BATCH, 2, 4),
    }


@torch.no_grad()
def hungarian(logits, boxes, classes, targets):
    """The cheapest assignment of queries to boxes, found by trying all."""
    cost = torch.cdist(boxes, targets, p=1) - logits.softmax(-1)[:, classes]
    best = min(
        itertools.permutations(range(len(boxes)), len(targets)),
        key=lambda p: sum(float(cost[q, j]) for j, q in enumerate(p)),
    )
    return torch.tensor(best, device=logits.device)


def set_loss(out, batch):
    total, boxes = 0.0, 0
    for one in [out, *out["aux_outputs"]]:
        for i, classes in enumerate(batch["classes"]):
            valid = classes >= 0
            cls, targets = classes[valid], batch["boxes"][i][valid]
            src = hungarian(one["pred_logits"][i], one["pred_boxes"][i], cls, targets)
            labels = torch.full((one["pred_logits"].shape[1],), 4, device=cls.device)
            labels[src] = cls
            weight = torch.ones(5).to(one["pred_logits"])
            weight[-1] = 0.1
            total = total + F.cross_entropy(one["pred_logits"][i], labels, weight, reduction="sum")
            total = total + 5 * F.l1_loss(one["pred_boxes"][i][src], targets, reduction="sum")
            boxes += len(cls)
    return total, count(boxes)


class MultiScaleRetention(nn.Module):
    def __init__(self, embed_dim, value_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = value_dim // num_heads
        self.key_dim = embed_dim // num_heads
        self.scaling = self.key_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.g_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.out_proj = nn.Linear(value_dim, embed_dim, bias=False)
        self.group_norm = nn.RMSNorm(self.head_dim, eps=1e-6, elementwise_affine=False)

    @staticmethod
    def theta_shift(x, sin, cos):
        x1, x2 = x[..., ::2], x[..., 1::2]
        rotated = torch.stack((-x2, x1), dim=-1).flatten(-2)
        return (x * cos) + (rotated * sin)

    def forward(self, x, rel_pos):
        bsz, tgt_len, _ = x.size()
        (sin, cos), inner_mask = rel_pos
        q, k, v, g = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.g_proj(x)
        k = k * self.scaling
        q = q.view(bsz, tgt_len, self.num_heads, self.key_dim).transpose(1, 2)
        k = k.view(bsz, tgt_len, self.num_heads, self.key_dim).transpose(1, 2)
        vr = v.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        qr, kr = self.theta_shift(q, sin, cos), self.theta_shift(k, sin, cos)
        qk_mat = (qr @ kr.transpose(-1, -2)) * inner_mask
        qk_mat = qk_mat / qk_mat.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1, max=5e4)
        output = torch.matmul(qk_mat, vr).transpose(1, 2)
        output = self.group_norm(output).reshape(bsz, tgt_len, self.head_dim * self.num_heads)
        return self.out_proj(F.silu(g) * output)


class RetNetRelPos(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, d // heads // 2))
        angle = angle.unsqueeze(-1).repeat(1, 2).flatten()
        decay = torch.log(1 - 2 ** (-1 - torch.arange(heads, dtype=torch.float)))
        self.register_buffer("angle", angle)
        self.register_buffer("decay", decay)

    def forward(self, slen):
        index = torch.arange(slen).to(self.decay)
        sin = torch.sin(index[:, None] * self.angle[None, :])
        cos = torch.cos(index[:, None] * self.angle[None, :])
        mask = torch.tril(torch.ones(slen, slen).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.exp(mask * self.decay[:, None, None])
        mask = torch.nan_to_num(mask)
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        return (sin, cos), mask


class RetNetLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.retention = MultiScaleRetention(d, 2 * d, heads)
        self.retention_layer_norm, self.final_layer_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.ffn = nn.ModuleDict(
            {
                "fc1": nn.Linear(d, 2 * d, bias=False),
                "gate": nn.Linear(d, 2 * d, bias=False),
                "fc2": nn.Linear(2 * d, d, bias=False),
            }
        )

    def forward(self, x, rel_pos):
        x = x + self.retention(self.retention_layer_norm(x), rel_pos)
        y = self.final_layer_norm(x)
        return x + self.ffn["fc2"](F.silu(self.ffn["gate"](y)) * self.ffn["fc1"](y))


class RetNet(nn.Module):
    """Retention in its parallel form (Sun et al. 2023), as torchscale writes it."""

    def __init__(self, d=16, heads=2, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, d)
        self.retnet_rel_pos = RetNetRelPos(d, heads)
        self.layers = nn.ModuleList([RetNetLayer(d, heads) for _ in range(layers)])
        self.layer_norm = nn.RMSNorm(d)
        self.output_projection = nn.Linear(d, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        rel_pos = self.retnet_rel_pos(input_ids.size(1))
        for layer in self.layers:
            x = layer(x, rel_pos)
        return self.output_projection(self.layer_norm(x))


def conv_bn(inp, oup, k=3, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inp, oup, k, stride, k // 2, groups=groups, bias=False),
        nn.BatchNorm2d(oup),
        nn.SiLU(),
    )


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class PatchAttention(nn.Module):
    """Over x of shape (b, p, n, d): pixels of one place in all patches attend to one another."""

    def __init__(self, dim, heads=2, dim_head=4):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(0.0))

    def forward(self, x):
        b, p, n, _ = x.shape
        q, k, v = (
            t.reshape(b, p, n, self.heads, -1).permute(0, 1, 3, 2, 4)
            for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        out = torch.matmul(attn, v).permute(0, 1, 3, 2, 4).reshape(b, p, n, -1)
        return self.to_out(out)


class MobileViTBlock(nn.Module):
    def __init__(self, dim, depth, channel, patch=(2, 2)):
        super().__init__()
        self.ph, self.pw = patch
        self.conv1, self.conv2 = conv_bn(channel, channel), conv_bn(channel, dim, 1)
        self.transformer = nn.ModuleList([])
        for _ in range(depth):
            ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            self.transformer.append(
                nn.ModuleList([PreNorm(dim, PatchAttention(dim)), PreNorm(dim, ff)])
            )
        self.conv3, self.conv4 = conv_bn(dim, channel, 1), conv_bn(2 * channel, channel)

    def forward(self, x):
        y = x.clone()
        x = self.conv2(self.conv1(x))
        b, d, h, w = x.shape
        nh, nw = h // self.ph, w // self.pw
        x = x.view(b, d, nh, self.ph, nw, self.pw).permute(0, 3, 5, 2, 4, 1)
        x = x.reshape(b, self.ph * self.pw, nh * nw, d)
        for attn, ff in self.transformer:
            x = attn(x) + x
            x = ff(x) + x
        x = x.view(b, self.ph, self.pw, nh, nw, d).permute(0, 5, 3, 1, 4, 2).reshape(b, d, h, w)
        x = self.conv3(x)
        return self.conv4(torch.cat((x, y), 1))


class MobileViT(nn.Module):
    """Convolutions around attention between patches (Mehta & Rastegari 2022)."""

    def __init__(self, num_classes=5):
        super().__init__()
        self.stem = conv_bn(3, 8, stride=2)
        self.mv2 = nn.ModuleList([conv_bn(8, 8, groups=8), conv_bn(8, 10, stride=1)])
        self.mvit = nn.ModuleList([MobileViTBlock(12, 1, 10), MobileViTBlock(12, 2, 10)])
        self.to_logits = nn.Sequential(
            conv_bn(10, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)
        )

    def forward(self, image):
        x = self.stem(image)
        for conv in self.mv2:
            x = conv(x)
        for block in self.mvit:
            x = block(x)
        return self.to_logits(x)


class FFTBlock(nn.Module):
    def __init__(self, d, heads, inner, kernel=3):
        super().__init__()
        self.n_head, self.d_k = heads, d // heads
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(d, heads * self.d_k) for _ in range(3))
        self.fc, self.layer_norm = nn.Linear(heads * self.d_k, d), nn.LayerNorm(d)
        self.w_1 = nn.Conv1d(d, inner, kernel, padding=kernel // 2)
        self.w_2 = nn.Conv1d(inner, d, 1)
        self.ff_norm = nn.LayerNorm(d)

    def forward(self, x, mask, slf_attn_mask):
        n, t, _ = x.shape

        def split(y):  # heads first, in the batch
            y = y.view(n, t, self.n_head, self.d_k)
            return y.permute(2, 0, 1, 3).contiguous().view(-1, t, self.d_k)

        q, k, v = split(self.w_qs(x)), split(self.w_ks(x)), split(self.w_vs(x))
        attn = torch.bmm(q, k.transpose(1, 2)) / self.d_k**0.5
        attn = attn.masked_fill(slf_attn_mask.repeat(self.n_head, 1, 1), -1e9).softmax(2)
        out = torch.bmm(attn, v).view(self.n_head, n, t, self.d_k)
        out = out.permute(1, 2, 0, 3).contiguous().view(n, t, -1)
        x = self.layer_norm(self.fc(out) + x).masked_fill(mask.unsqueeze(-1), 0)
        y = self.w_2(F.relu(self.w_1(x.transpose(1, 2)))).transpose(1, 2)
        return self.ff_norm(y + x).masked_fill(mask.unsqueeze(-1), 0)


class VariancePredictor(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv_layer = nn.Sequential(
            OrderedDict(
                [
                    ("conv1d_1", nn.Conv1d(d, d, 3, padding=1)),
                    ("relu_1", nn.ReLU()),
                    ("conv1d_2", nn.Conv1d(d, d, 3, padding=1)),
                    ("relu_2", nn.ReLU()),
                ]
            )
        )
        self.linear_layer = nn.Linear(d, 1)

    def forward(self, x, mask):
        out = self.conv_layer(x.transpose(1, 2)).transpose(1, 2)
        return self.linear_layer(out).squeeze(-1).masked_fill(mask, 0.0)


class FastSpeech2(nn.Module):
    """Phonemes, repeated for as many frames as each lasts (Ren et al. 2021); ming024's layout."""

    def __init__(self, phonemes=20, d=8, heads=2, mels=6, frames=12):
        super().__init__()
        self.max_frames = frames
        self.src_word_emb = nn.Embedding(phonemes, d, padding_idx=0)
        self.register_buffer("position_enc", self.sinusoid(32, d))
        self.encoder = nn.ModuleList([FFTBlock(d, heads, 2 * d) for _ in range(2)])
        self.duration_predictor, self.pitch_predictor = VariancePredictor(d), VariancePredictor(d)
        self.pitch_bins = nn.Parameter(torch.linspace(-2, 2, 7), requires_grad=False)
        self.pitch_embedding = nn.Embedding(8, d)
        self.decoder = nn.ModuleList([FFTBlock(d, heads, 2 * d) for _ in range(2)])
        self.mel_linear = nn.Linear(d, mels)

    @staticmethod
    def sinusoid(n, d):
        position = torch.arange(n)[:, None] / 10000 ** (2 * (torch.arange(d) // 2) / d)
        position[:, 0::2], position[:, 1::2] = position[:, 0::2].sin(), position[:, 1::2].cos()
        return position.unsqueeze(0)

    def length_regulate(self, x, duration):
        output = []
        for batch, expand in zip(x, duration, strict=True):
            out = [
                vec.expand(int(size.item()), -1) for vec, size in zip(batch, expand, strict=True)
            ]
            output.append(torch.cat(out, 0))
        return torch.stack([F.pad(o, (0, 0, 0, self.max_frames - o.size(0))) for o in output])

    def forward(self, texts, durations, pitches):
        src_mask = texts.eq(0)
        x = self.src_word_emb(texts) + self.position_enc[:, : texts.size(1)]
        for layer in self.encoder:
            x = layer(x, src_mask, src_mask.unsqueeze(1).expand(-1, texts.size(1), -1))
        log_d = self.duration_predictor(x, src_mask)
        pitch = self.pitch_predictor(x, src_mask)
        x = x + self.pitch_embedding(torch.bucketize(pitches, self.pitch_bins))
        x = self.length_regulate(x, durations)
        n = self.max_frames
        mel_mask = torch.arange(n, device=x.device)[None] >= durations.sum(1, keepdim=True)
        x = x + self.position_enc[:, :n]
        for layer in self.decoder:
            x = layer(x, mel_mask, mel_mask.unsqueeze(1).expand(-1, n, -1))
        return self.mel_linear(x), pitch, log_d, src_mask, mel_mask


def utterances():
    texts = torch.randint(1, 20, (BATCH, 5))
    texts[::2, 4:] = 0
    durations = torch.randint(1, 3, (BATCH, 5)) * (texts > 0)
    return {
        "texts": texts,
        "durations": durations,
        "pitches": torch.randn(BATCH, 5),
        "mels": torch.randn(BATCH, 12, 6),
    }


def fast_speech_loss(out, batch):
    mel, pitch, log_d, src_mask, mel_mask = out
    keep, frames = ~src_mask, ~mel_mask
    target = torch.log(batch["durations"].to(log_d.dtype) + 1)
    loss = F.mse_loss(log_d[keep], target[keep], reduction="sum")
    loss = loss + F.mse_loss(pitch[keep], batch["pitches"][keep], reduction="sum")
    loss = loss + F.l1_loss(mel[frames], batch["mels"][frames], reduction="sum")
    return loss, frames.sum()


class CorrBlock:
    def __init__(self, fmap1, fmap2, num_levels=2, radius=1):
        self.num_levels, self.radius = num_levels, radius
        self.corr_pyramid = []
        batch, dim, ht, wd = fmap1.shape
        corr = torch.matmul(fmap1.view(batch, dim, -1).transpose(1, 2), fmap2.view(batch, dim, -1))
        corr = corr.view(batch, ht, wd, 1, ht, wd) / dim**0.5
        corr = corr.reshape(batch * ht * wd, 1, ht, wd)
        self.corr_pyramid.append(corr)
        for _ in range(num_levels - 1):
            corr = F.avg_pool2d(corr, 2, stride=2)
            self.corr_pyramid.append(corr)

    def __call__(self, coords):
        r = self.radius
        coords = coords.permute(0, 2, 3, 1)
        batch, h1, w1, _ = coords.shape
        out_pyramid = []
        for i in range(self.num_levels):
            corr = self.corr_pyramid[i]
            d = torch.linspace(-r, r, 2 * r + 1, device=coords.device)
            delta = torch.stack(torch.meshgrid(d, d, indexing="ij"), dim=-1)
            centroid = coords.reshape(batch * h1 * w1, 1, 1, 2) / 2**i
            at = centroid + delta.view(1, 2 * r + 1, 2 * r + 1, 2).to(coords.dtype)
            h, w = corr.shape[-2:]
            x, y = at.split([1, 1], dim=-1)
            grid = torch.cat([2 * x / (w - 1) - 1, 2 * y / (h - 1) - 1], dim=-1)
            corr = F.grid_sample(corr, grid, align_corners=True)
            out_pyramid.append(corr.view(batch, h1, w1, -1))
        return torch.cat(out_pyramid, dim=-1).permute(0, 3, 1, 2).contiguous()


class SepConvGRU(nn.Module):
    def __init__(self, hidden_dim, input_dim):
        super().__init__()
        self.convz1 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convr1 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convq1 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convz2 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (5, 1), padding=(2, 0))
        self.convr2 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (5, 1), padding=(2, 0))
        self.convq2 = nn.Conv2d(hidden_dim + input_dim, hidden_dim, (5, 1), padding=(2, 0))

    def forward(self, h, x):
        for convz, convr, convq in (
            (self.convz1, self.convr1, self.convq1),
            (self.convz2, self.convr2, self.convq2),
        ):
            hx = torch.cat([h, x], dim=1)
            z, r = torch.sigmoid(convz(hx)), torch.sigmoid(convr(hx))
            q = torch.tanh(convq(torch.cat([r * h, x], dim=1)))
            h = (1 - z) * h + z * q
        return h


class RAFT(nn.Module):
    """Optical flow by repeated updates from a volume of correlations (Teed & Deng 2020)."""

    def __init__(self, hidden_dim=6, context_dim=4, iters=3):
        super().__init__()
        self.hidden_dim, self.context_dim, self.iters = hidden_dim, context_dim, iters

        def encoder(out, norm):
            return nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), norm(8), nn.ReLU(inplace=True), nn.Conv2d(8, out, 1)
            )

        self.fnet = encoder(8, nn.InstanceNorm2d)
        self.cnet = encoder(hidden_dim + context_dim, nn.BatchNorm2d)
        self.convc1, self.convf1 = nn.Conv2d(18, 8, 1), nn.Conv2d(2, 4, 3, padding=1)
        self.conv = nn.Conv2d(12, 8 - 2, 3, padding=1)
        self.gru = SepConvGRU(hidden_dim, 8 + context_dim)
        self.flow_head = nn.Sequential(
            nn.Conv2d(hidden_dim, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)
        )

    @staticmethod
    def coords_grid(batch, ht, wd, device):
        coords = torch.meshgrid(
            torch.arange(ht, device=device), torch.arange(wd, device=device), indexing="ij"
        )
        coords = torch.stack(coords[::-1], dim=0).float()
        return coords[None].repeat(batch, 1, 1, 1)

    def forward(self, image1, image2, test_mode=False):
        fmap1, fmap2 = self.fnet(torch.cat([image1, image2], dim=0)).chunk(2, dim=0)
        corr_fn = CorrBlock(fmap1.float(), fmap2.float())
        net, inp = torch.split(self.cnet(image1), [self.hidden_dim, self.context_dim], dim=1)
        net, inp = torch.tanh(net), torch.relu(inp)
        N, _, H, W = fmap1.shape
        coords0 = self.coords_grid(N, H, W, image1.device)
        coords1 = self.coords_grid(N, H, W, image1.device)
        flow_predictions = []
        for _ in range(self.iters):
            coords1 = coords1.detach()
            corr = corr_fn(coords1)
            flow = coords1 - coords0
            cor, flo = F.relu(self.convc1(corr)), F.relu(self.convf1(flow))
            motion = torch.cat([F.relu(self.conv(torch.cat([cor, flo], dim=1))), flow], dim=1)
            net = self.gru(net, torch.cat([inp, motion], dim=1))
            coords1 = coords1 + self.flow_head(net)
            up = 2 * F.interpolate(coords1 - coords0, scale_factor=2, mode="bilinear")
            flow_predictions.append(up)
        if test_mode:
            return coords1 - coords0, flow_predictions[-1]
        return flow_predictions


def frame_pairs():
    return {
        "image1": torch.randn(BATCH, 3, 12, 12),
        "image2": torch.randn(BATCH, 3, 12, 12),
        "flow": torch.randn(BATCH, 2, 12, 12),
        "valid": (torch.rand(BATCH, 12, 12) > 0.2).float(),
    }


def sequence_loss(flow_preds, batch, gamma=0.8, max_flow=400):
    flow_gt, valid = batch["flow"], batch["valid"]
    mag = torch.sum(flow_gt**2, dim=1).sqrt()
    valid = (valid >= 0.5) & (mag < max_flow)
    flow_loss = 0.0
    for i, pred in enumerate(flow_preds):
        weight = gamma ** (len(flow_preds) - i - 1)
        flow_loss += weight * (valid[:, None] * (pred - flow_gt).abs()).sum()
    return flow_loss, valid.sum()


class CausalBlock(nn.Module):
    def __init__(self, h_dim, max_T, n_heads, drop_p):
        super().__init__()
        self.n_heads = n_heads
        self.q_net, self.k_net = nn.Linear(h_dim, h_dim), nn.Linear(h_dim, h_dim)
        self.v_net, self.proj_net = nn.Linear(h_dim, h_dim), nn.Linear(h_dim, h_dim)
        self.att_drop, self.proj_drop = nn.Dropout(drop_p), nn.Dropout(drop_p)
        mask = torch.tril(torch.ones((max_T, max_T))).view(1, 1, max_T, max_T)
        self.register_buffer("mask", mask)
        self.mlp = nn.Sequential(
            nn.Linear(h_dim, 4 * h_dim), nn.GELU(), nn.Linear(4 * h_dim, h_dim), nn.Dropout(drop_p)
        )
        self.ln1, self.ln2 = nn.LayerNorm(h_dim), nn.LayerNorm(h_dim)

    def attention(self, x):
        B, T, C = x.shape
        N, D = self.n_heads, C // self.n_heads
        q = self.q_net(x).view(B, T, N, D).transpose(1, 2)
        k = self.k_net(x).view(B, T, N, D).transpose(1, 2)
        v = self.v_net(x).view(B, T, N, D).transpose(1, 2)
        weights = q @ k.transpose(2, 3) / math.sqrt(D)
        weights = weights.masked_fill(self.mask[..., :T, :T] == 0, float("-inf"))
        attention = self.att_drop(F.softmax(weights, dim=-1) @ v)
        attention = attention.transpose(1, 2).contiguous().view(B, T, N * D)
        return self.proj_drop(self.proj_net(attention))

    def forward(self, x):
        x = self.ln1(x + self.attention(x))
        return self.ln2(x + self.mlp(x))


class DecisionTransformer(nn.Module):
    """Returns, states and actions in turn (Chen et al. 2021), as nikhilbarhate99 writes it."""

    def __init__(self, state_dim=5, act_dim=2, n_blocks=2, h_dim=16, T=4, n_heads=2, drop_p=0.1):
        super().__init__()
        self.state_dim, self.act_dim, self.h_dim = state_dim, act_dim, h_dim
        self.transformer = nn.Sequential(
            *[CausalBlock(h_dim, 3 * T, n_heads, drop_p) for _ in range(n_blocks)]
        )
        self.embed_ln = nn.LayerNorm(h_dim)
        self.embed_timestep = nn.Embedding(50, h_dim)
        self.embed_rtg = torch.nn.Linear(1, h_dim)
        self.embed_state = torch.nn.Linear(state_dim, h_dim)
        self.embed_action = torch.nn.Linear(act_dim, h_dim)
        self.predict_rtg = torch.nn.Linear(h_dim, 1)
        self.predict_state = torch.nn.Linear(h_dim, state_dim)
        self.predict_action = nn.Sequential(nn.Linear(h_dim, act_dim), nn.Tanh())

    def forward(self, timesteps, states, actions, returns_to_go):
        B, T, _ = states.shape
        time = self.embed_timestep(timesteps)
        s, a = self.embed_state(states) + time, self.embed_action(actions) + time
        r = self.embed_rtg(returns_to_go) + time
        h = torch.stack((r, s, a), dim=1).permute(0, 2, 1, 3).reshape(B, 3 * T, self.h_dim)
        h = self.transformer(self.embed_ln(h))
        h = h.reshape(B, T, 3, self.h_dim).permute(0, 2, 1, 3)
        return self.predict_state(h[:, 2]), self.predict_action(h[:, 1]), self.predict_rtg(h[:, 2])


def trajectories():
    mask = torch.ones(BATCH, 4)
    mask[1::3, 2:] = 0
    return {
        "timesteps": torch.randint(0, 46, (BATCH, 1)) + torch.arange(4),
        "states": torch.randn(BATCH, 4, 5),
        "actions": torch.randn(BATCH, 4, 2).tanh(),
        "returns_to_go": torch.randn(BATCH, 4, 1),
        "traj_mask": mask,
    }


def action_loss(out, batch):
    _, action_preds, _ = out
    keep = batch["traj_mask"].view(-1) > 0
    preds, target = action_preds.view(-1, 2)[keep], batch["actions"].view(-1, 2)[keep]
    return F.mse_loss(preds, target, reduction="sum"), count(target.numel())


VISITORS: dict[str, Subject] = {
    "convnext": Subject(ConvNeXt, photos, classification),
    "efficient-net": Subject(EfficientNet, photos, classification),
    "turing-machine": Subject(NTM, copies, copied),
    "pointer-net": Subject(PointerNet, tours, pointed),
    "deep-fm": Subject(DeepFM, clicks, clicked),
    "graph-sage": Subject(GraphSAGE, neighbours, classification),
    "deep-o-net": Subject(DeepONet, operators, mse),
    "sim-siam": Subject(SimSiam, views, negative_cosine),
    "temporal-fusion": Subject(TemporalFusionTransformer, sales, quantile_loss),
    "conv-lstm": Subject(ConvLSTM, clips, mse),
    "detr": Subject(DETR, scenes, set_loss),
    "retnet": Subject(RetNet, tokens, next_token),
    "mobile-vit": Subject(MobileViT, photos, classification),
    "fast-speech": Subject(FastSpeech2, utterances, fast_speech_loss),
    "raft": Subject(RAFT, frame_pairs, sequence_loss),
    "decision-transformer": Subject(DecisionTransformer, trajectories, action_loss),
}
