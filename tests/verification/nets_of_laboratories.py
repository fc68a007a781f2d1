"""Nets as laboratories publish them: forecasts by autocorrelation, equations in the loss, learners
that learn inside of a forward, codecs, two players, searches of an architecture, tuples of vectors.
"""

# as their authors write them: without annotations, with one-letter names
from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import BATCH, VOCAB, Subject, tokens
from weft.nn.losses import classification


def count(n):
    return torch.tensor(float(n))


# ---- segmentation --------------------------------------------------------------------------------


class VGGBlock(nn.Module):
    def __init__(self, in_channels, middle_channels, out_channels):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, middle_channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(middle_channels)
        self.conv2 = nn.Conv2d(middle_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)))


class NestedUNet(nn.Module):
    """UNet++ with deep supervision (Zhou et al. 2018), in 4uiiurz1's names."""

    def __init__(self, num_classes=1, input_channels=3, deep_supervision=True):
        super().__init__()
        nb_filter = [4, 6, 8, 10, 12]
        self.deep_supervision = deep_supervision
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

        self.conv0_0 = VGGBlock(input_channels, nb_filter[0], nb_filter[0])
        self.conv1_0 = VGGBlock(nb_filter[0], nb_filter[1], nb_filter[1])
        self.conv2_0 = VGGBlock(nb_filter[1], nb_filter[2], nb_filter[2])
        self.conv3_0 = VGGBlock(nb_filter[2], nb_filter[3], nb_filter[3])
        self.conv4_0 = VGGBlock(nb_filter[3], nb_filter[4], nb_filter[4])
        self.conv0_1 = VGGBlock(nb_filter[0] + nb_filter[1], nb_filter[0], nb_filter[0])
        self.conv1_1 = VGGBlock(nb_filter[1] + nb_filter[2], nb_filter[1], nb_filter[1])
        self.conv2_1 = VGGBlock(nb_filter[2] + nb_filter[3], nb_filter[2], nb_filter[2])
        self.conv3_1 = VGGBlock(nb_filter[3] + nb_filter[4], nb_filter[3], nb_filter[3])
        self.conv0_2 = VGGBlock(nb_filter[0] * 2 + nb_filter[1], nb_filter[0], nb_filter[0])
        self.conv1_2 = VGGBlock(nb_filter[1] * 2 + nb_filter[2], nb_filter[1], nb_filter[1])
        self.conv2_2 = VGGBlock(nb_filter[2] * 2 + nb_filter[3], nb_filter[2], nb_filter[2])
        self.conv0_3 = VGGBlock(nb_filter[0] * 3 + nb_filter[1], nb_filter[0], nb_filter[0])
        self.conv1_3 = VGGBlock(nb_filter[1] * 3 + nb_filter[2], nb_filter[1], nb_filter[1])
        self.conv0_4 = VGGBlock(nb_filter[0] * 4 + nb_filter[1], nb_filter[0], nb_filter[0])
        if self.deep_supervision:
            self.final1 = nn.Conv2d(nb_filter[0], num_classes, kernel_size=1)
            self.final2 = nn.Conv2d(nb_filter[0], num_classes, kernel_size=1)
            self.final3 = nn.Conv2d(nb_filter[0], num_classes, kernel_size=1)
            self.final4 = nn.Conv2d(nb_filter[0], num_classes, kernel_size=1)
        else:
            self.final = nn.Conv2d(nb_filter[0], num_classes, kernel_size=1)

    def forward(self, input):
        x0_0 = self.conv0_0(input)
        x1_0 = self.conv1_0(self.pool(x0_0))
        x0_1 = self.conv0_1(torch.cat([x0_0, self.up(x1_0)], 1))

        x2_0 = self.conv2_0(self.pool(x1_0))
        x1_1 = self.conv1_1(torch.cat([x1_0, self.up(x2_0)], 1))
        x0_2 = self.conv0_2(torch.cat([x0_0, x0_1, self.up(x1_1)], 1))

        x3_0 = self.conv3_0(self.pool(x2_0))
        x2_1 = self.conv2_1(torch.cat([x2_0, self.up(x3_0)], 1))
        x1_2 = self.conv1_2(torch.cat([x1_0, x1_1, self.up(x2_1)], 1))
        x0_3 = self.conv0_3(torch.cat([x0_0, x0_1, x0_2, self.up(x1_2)], 1))

        x4_0 = self.conv4_0(self.pool(x3_0))
        x3_1 = self.conv3_1(torch.cat([x3_0, self.up(x4_0)], 1))
        x2_2 = self.conv2_2(torch.cat([x2_0, x2_1, self.up(x3_1)], 1))
        x1_3 = self.conv1_3(torch.cat([x1_0, x1_1, x1_2, self.up(x2_2)], 1))
        x0_4 = self.conv0_4(torch.cat([x0_0, x0_1, x0_2, x0_3, self.up(x1_3)], 1))

        if self.deep_supervision:
            output1 = self.final1(x0_1)
            output2 = self.final2(x0_2)
            output3 = self.final3(x0_3)
            output4 = self.final4(x0_4)
            return [output1, output2, output3, output4]
        return self.final(x0_4)


def cells():
    return {"input": torch.rand(BATCH, 3, 16, 16), "mask": (torch.rand(BATCH, 1, 16, 16) > 0.7) * 1}


def bce_dice(outputs, batch):
    target = batch["mask"].to(outputs[0].dtype)
    num, loss = target.size(0), 0
    for output in outputs:
        bce = F.binary_cross_entropy_with_logits(output, target, reduction="none")
        input, wanted = torch.sigmoid(output).view(num, -1), target.view(num, -1)
        both = (input * wanted).sum(1)
        dice = (2.0 * both + 1e-5) / (input.sum(1) + wanted.sum(1) + 1e-5)
        loss = loss + (0.5 * bce.view(num, -1).mean(1) + 1 - dice).sum()
    return loss / len(outputs), count(num)


# ---- equations -----------------------------------------------------------------------------------


class DNN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.depth = len(layers) - 1
        self.activation = nn.Tanh
        layer_list = []
        for i in range(self.depth - 1):
            layer_list.append((f"layer_{i}", nn.Linear(layers[i], layers[i + 1])))
            layer_list.append((f"activation_{i}", self.activation()))
        layer_list.append((f"layer_{self.depth - 1}", nn.Linear(layers[-2], layers[-1])))
        self.layers = nn.Sequential(OrderedDict(layer_list))

    def forward(self, x):
        return self.layers(x)


class BurgersPINN(nn.Module):
    """Physics-informed discovery of Burgers' equation (Raissi et al. 2019)."""

    def __init__(self, layers=(2, 10, 10, 10, 1), lb=(-1.0, 0.0), ub=(1.0, 1.0)):
        super().__init__()
        self.register_buffer("lb", torch.tensor(lb))
        self.register_buffer("ub", torch.tensor(ub))
        self.lambda_1 = nn.Parameter(torch.tensor([0.0]))
        self.lambda_2 = nn.Parameter(torch.tensor([-6.0]))
        self.dnn = DNN(layers)

    def net_u(self, x, t):
        X = torch.cat([x, t], dim=1)
        return self.dnn(2.0 * (X - self.lb) / (self.ub - self.lb) - 1.0)

    def net_f(self, x, t):
        lambda_1 = self.lambda_1
        lambda_2 = torch.exp(self.lambda_2)
        u = self.net_u(x, t)
        u_t = torch.autograd.grad(
            u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True
        )[0]
        u_x = torch.autograd.grad(
            u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True
        )[0]
        u_xx = torch.autograd.grad(
            u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True
        )[0]
        return u_t + lambda_1 * u * u_x - lambda_2 * u_xx

    def forward(self, X):
        x = X[:, 0:1].clone().requires_grad_(True)
        t = X[:, 1:2].clone().requires_grad_(True)
        u_pred = self.net_u(x, t)
        f_pred = self.net_f(x, t)
        return u_pred, f_pred


def shocks():
    x = torch.rand(BATCH, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    return {"X": x, "u": -torch.sin(math.pi * x[:, :1])}


def physics(out, batch):
    u_pred, f_pred = out
    loss = torch.sum((batch["u"] - u_pred) ** 2) + torch.sum(f_pred**2)
    return loss, count(len(u_pred))


# ---- recommendation ------------------------------------------------------------------------------


class Dice(nn.Module):
    def __init__(self, num_features, dim=2):
        super().__init__()
        self.bn = nn.BatchNorm1d(num_features, eps=1e-8, affine=False)
        self.dim = dim
        self.alpha = nn.Parameter(
            torch.zeros(num_features, 1) if dim == 3 else torch.zeros(num_features)
        )

    def forward(self, x):
        if self.dim == 3:
            x = torch.transpose(x, 1, 2)
            x_p = torch.sigmoid(self.bn(x))
            out = self.alpha * (1 - x_p) * x + x_p * x
            return torch.transpose(out, 1, 2)
        x_p = torch.sigmoid(self.bn(x))
        return self.alpha * (1 - x_p) * x + x_p * x


class LocalActivationUnit(nn.Module):
    def __init__(self, hidden_size, embedding_dim):
        super().__init__()
        layers = []
        sizes = [4 * embedding_dim, *hidden_size]
        for i in range(len(sizes) - 1):
            layers += [nn.Linear(sizes[i], sizes[i + 1]), Dice(sizes[i + 1], dim=3)]
        self.fc1 = nn.Sequential(*layers)
        self.fc2 = nn.Linear(sizes[-1], 1)

    def forward(self, query, user_behavior):
        user_behavior_len = user_behavior.size(1)
        queries = query.expand(-1, user_behavior_len, -1)
        attention_input = torch.cat(
            [queries, user_behavior, queries - user_behavior, queries * user_behavior], dim=-1
        )
        return self.fc2(self.fc1(attention_input))


class DeepInterestNetwork(nn.Module):
    """Clicks by what a user did before (Zhou et al. 2018), with Dice and ragged histories."""

    def __init__(self, n_items=23, n_cates=7, n_users=11, dim=6):
        super().__init__()
        self.user_emb_w = nn.Embedding(n_users, dim)
        self.item_emb_w = nn.Embedding(n_items, dim // 2)
        self.cate_emb_w = nn.Embedding(n_cates, dim // 2)
        self.register_buffer("cate_list", torch.arange(n_items) % n_cates)
        self.item_b = nn.Parameter(torch.zeros(n_items))
        self.attn = LocalActivationUnit([10, 6], dim)
        self.fc_layer = nn.Sequential()
        for i, (a, b) in enumerate([(3 * dim, 12), (12, 8)]):
            self.fc_layer.add_module(f"fc{i}", nn.Linear(a, b))
            self.fc_layer.add_module(f"dice{i}", Dice(b))
        self.out = nn.Linear(8, 1)

    def item(self, i):
        return torch.cat([self.item_emb_w(i), self.cate_emb_w(self.cate_list[i])], dim=-1)

    def forward(self, u, i, hist_i, sl):
        i_emb, h_emb, i_b = self.item(i), self.item(hist_i), self.item_b[i]
        mask = torch.arange(hist_i.size(1), device=sl.device)[None, :] < sl[:, None]
        scores = self.attn(i_emb.unsqueeze(1), h_emb).transpose(1, 2)
        paddings = torch.ones_like(scores) * (-(2**32) + 1)
        scores = torch.where(mask.unsqueeze(1), scores, paddings)
        scores = F.softmax(scores / h_emb.size(-1) ** 0.5, dim=-1)
        hist = torch.matmul(scores, h_emb).squeeze(1)
        din = torch.cat([self.user_emb_w(u), hist, i_emb], dim=-1)
        return i_b + self.out(self.fc_layer(din)).squeeze(-1)


def histories():
    return {
        "u": torch.randint(11, (BATCH,)),
        "i": torch.randint(23, (BATCH,)),
        "hist_i": torch.randint(23, (BATCH, 5)),
        "sl": torch.randint(1, 6, (BATCH,)),
        "y": torch.randint(2, (BATCH,)),
    }


def click(logits, batch):
    loss = F.binary_cross_entropy_with_logits(logits, batch["y"].to(logits.dtype), reduction="sum")
    return loss, count(len(logits))


# ---- time series ---------------------------------------------------------------------------------


class moving_avg(nn.Module):
    def __init__(self, kernel_size, stride):
        super().__init__()
        self.kernel_size = kernel_size
        self.avg = nn.AvgPool1d(kernel_size=kernel_size, stride=stride, padding=0)

    def forward(self, x):
        front = x[:, 0:1, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        end = x[:, -1:, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        x = torch.cat([front, x, end], dim=1)
        x = self.avg(x.permute(0, 2, 1))
        return x.permute(0, 2, 1)


class series_decomp(nn.Module):
    def __init__(self, kernel_size):
        super().__init__()
        self.moving_avg = moving_avg(kernel_size, stride=1)

    def forward(self, x):
        moving_mean = self.moving_avg(x)
        return x - moving_mean, moving_mean


class my_Layernorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layernorm = nn.LayerNorm(channels)

    def forward(self, x):
        x_hat = self.layernorm(x)
        bias = torch.mean(x_hat, dim=1).unsqueeze(1).repeat(1, x.shape[1], 1)
        return x_hat - bias


class AutoCorrelation(nn.Module):
    def __init__(self, mask_flag=True, factor=1, attention_dropout=0.1):
        super().__init__()
        self.factor = factor
        self.mask_flag = mask_flag
        self.dropout = nn.Dropout(attention_dropout)

    def time_delay_agg_training(self, values, corr):
        head, channel, length = values.shape[1], values.shape[2], values.shape[3]
        top_k = int(self.factor * math.log(length))
        mean_value = torch.mean(torch.mean(corr, dim=1), dim=1)
        index = torch.topk(torch.mean(mean_value, dim=0), top_k, dim=-1)[1]
        weights = torch.stack([mean_value[:, index[i]] for i in range(top_k)], dim=-1)
        tmp_corr = torch.softmax(weights, dim=-1)
        delays_agg = torch.zeros_like(values).float()
        for i in range(top_k):
            pattern = torch.roll(values, -int(index[i]), -1)
            delays_agg = delays_agg + pattern * (
                tmp_corr[:, i]
                .unsqueeze(1)
                .unsqueeze(1)
                .unsqueeze(1)
                .repeat(1, head, channel, length)
            )
        return delays_agg

    def time_delay_agg_inference(self, values, corr):
        batch, head, channel, length = values.shape
        init_index = torch.arange(length)[None, None, None, :].repeat(batch, head, channel, 1)
        init_index = init_index.to(values.device)
        top_k = int(self.factor * math.log(length))
        mean_value = torch.mean(torch.mean(corr, dim=1), dim=1)
        weights, delay = torch.topk(mean_value, top_k, dim=-1)
        tmp_corr = torch.softmax(weights, dim=-1)
        tmp_values = values.repeat(1, 1, 1, 2)
        delays_agg = torch.zeros_like(values).float()
        for i in range(top_k):
            at = delay[:, i].view(-1, 1, 1, 1).repeat(1, head, channel, length)
            pattern = torch.gather(tmp_values, dim=-1, index=init_index + at)
            delays_agg = delays_agg + pattern * tmp_corr[:, i].view(-1, 1, 1, 1)
        return delays_agg

    def forward(self, queries, keys, values):
        L, S = queries.shape[1], values.shape[1]
        if L > S:
            zeros = torch.zeros_like(queries[:, : (L - S), :]).float()
            values = torch.cat([values, zeros], dim=1)
            keys = torch.cat([keys, zeros], dim=1)
        else:
            values = values[:, :L, :, :]
            keys = keys[:, :L, :, :]
        q_fft = torch.fft.rfft(queries.permute(0, 2, 3, 1).contiguous(), dim=-1)
        k_fft = torch.fft.rfft(keys.permute(0, 2, 3, 1).contiguous(), dim=-1)
        res = q_fft * torch.conj(k_fft)
        corr = torch.fft.irfft(res, dim=-1)
        agg = self.time_delay_agg_training if self.training else self.time_delay_agg_inference
        V = agg(values.permute(0, 2, 3, 1).contiguous(), corr).permute(0, 3, 1, 2)
        return V.contiguous()


class AutoCorrelationLayer(nn.Module):
    def __init__(self, correlation, d_model, n_heads):
        super().__init__()
        d_keys = d_model // n_heads
        self.inner_correlation = correlation
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model, d_keys * n_heads)
        self.out_projection = nn.Linear(d_keys * n_heads, d_model)
        self.n_heads = n_heads

    def forward(self, queries, keys, values):
        B, L, _ = queries.shape
        _, S, _ = keys.shape
        H = self.n_heads
        queries = self.query_projection(queries).view(B, L, H, -1)
        keys = self.key_projection(keys).view(B, S, H, -1)
        values = self.value_projection(values).view(B, S, H, -1)
        out = self.inner_correlation(queries, keys, values).view(B, L, -1)
        return self.out_projection(out)


class AutoEncoderLayer(nn.Module):
    def __init__(self, attention, d_model, d_ff, moving_avg=5, dropout=0.1):
        super().__init__()
        self.attention = attention
        self.conv1 = nn.Conv1d(in_channels=d_model, out_channels=d_ff, kernel_size=1, bias=False)
        self.conv2 = nn.Conv1d(in_channels=d_ff, out_channels=d_model, kernel_size=1, bias=False)
        self.decomp1 = series_decomp(moving_avg)
        self.decomp2 = series_decomp(moving_avg)
        self.dropout = nn.Dropout(dropout)
        self.activation = F.gelu

    def forward(self, x):
        x = x + self.dropout(self.attention(x, x, x))
        x, _ = self.decomp1(x)
        y = x
        y = self.dropout(self.activation(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        res, _ = self.decomp2(x + y)
        return res


class AutoDecoderLayer(nn.Module):
    def __init__(self, self_attention, cross_attention, d_model, c_out, d_ff, dropout=0.1):
        super().__init__()
        self.self_attention, self.cross_attention = self_attention, cross_attention
        self.conv1 = nn.Conv1d(in_channels=d_model, out_channels=d_ff, kernel_size=1, bias=False)
        self.conv2 = nn.Conv1d(in_channels=d_ff, out_channels=d_model, kernel_size=1, bias=False)
        self.decomp1, self.decomp2, self.decomp3 = (series_decomp(5) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Conv1d(
            d_model, c_out, kernel_size=3, padding=1, padding_mode="circular", bias=False
        )
        self.activation = F.gelu

    def forward(self, x, cross):
        x = x + self.dropout(self.self_attention(x, x, x))
        x, trend1 = self.decomp1(x)
        x = x + self.dropout(self.cross_attention(x, cross, cross))
        x, trend2 = self.decomp2(x)
        y = x
        y = self.dropout(self.activation(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        x, trend3 = self.decomp3(x + y)
        residual_trend = trend1 + trend2 + trend3
        residual_trend = self.projection(residual_trend.permute(0, 2, 1)).transpose(1, 2)
        return x, residual_trend


class DataEmbedding_wo_pos(nn.Module):
    def __init__(self, c_in, d_model, d_time=4, dropout=0.1):
        super().__init__()
        self.value_embedding = nn.Conv1d(
            c_in, d_model, kernel_size=3, padding=1, padding_mode="circular", bias=False
        )
        nn.init.kaiming_normal_(self.value_embedding.weight, mode="fan_in")
        self.temporal_embedding = nn.Linear(d_time, d_model, bias=False)
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, x, x_mark):
        x = self.value_embedding(x.permute(0, 2, 1)).transpose(1, 2)
        return self.dropout(x + self.temporal_embedding(x_mark))


class Autoformer(nn.Module):
    """Decomposition with auto-correlation (Wu et al. 2021); thuml's layout."""

    def __init__(self, c=3, d_model=8, n_heads=2, d_ff=16, pred_len=6, label_len=6, e_layers=2):
        super().__init__()
        self.pred_len, self.label_len = pred_len, label_len
        self.decomp = series_decomp(5)
        self.enc_embedding = DataEmbedding_wo_pos(c, d_model)
        self.dec_embedding = DataEmbedding_wo_pos(c, d_model)

        def attention(mask):
            return AutoCorrelationLayer(AutoCorrelation(mask), d_model, n_heads)

        self.encoder = nn.ModuleList(
            [AutoEncoderLayer(attention(False), d_model, d_ff) for _ in range(e_layers)]
        )
        self.encoder_norm = my_Layernorm(d_model)
        self.decoder = nn.ModuleList(
            [AutoDecoderLayer(attention(True), attention(False), d_model, c, d_ff)]
        )
        self.decoder_norm = my_Layernorm(d_model)
        self.projection = nn.Linear(d_model, c, bias=True)

    def forward(self, x_enc, x_mark_enc, x_mark_dec):
        mean = torch.mean(x_enc, dim=1).unsqueeze(1).repeat(1, self.pred_len, 1)
        zeros = torch.zeros([x_enc.shape[0], self.pred_len, x_enc.shape[2]], device=x_enc.device)
        seasonal_init, trend_init = self.decomp(x_enc)
        trend = torch.cat([trend_init[:, -self.label_len :, :], mean], dim=1)
        seasonal_init = torch.cat([seasonal_init[:, -self.label_len :, :], zeros], dim=1)
        enc_out = self.enc_embedding(x_enc, x_mark_enc)
        for layer in self.encoder:
            enc_out = layer(enc_out)
        enc_out = self.encoder_norm(enc_out)
        x = self.dec_embedding(seasonal_init, x_mark_dec)
        for layer in self.decoder:
            x, residual_trend = layer(x, enc_out)
            trend = trend + residual_trend
        seasonal = self.projection(self.decoder_norm(x))
        return (trend + seasonal)[:, -self.pred_len :, :]


def loads():
    return {
        "x_enc": torch.randn(BATCH, 12, 3),
        "x_mark_enc": torch.randn(BATCH, 12, 4),
        "x_mark_dec": torch.randn(BATCH, 12, 4),
        "y": torch.randn(BATCH, 6, 3),
    }


def forecast_error(out, batch):
    return F.mse_loss(out, batch["y"], reduction="sum"), count(out.numel())


# ---- reinforcement learning ----------------------------------------------------------------------


class AtariNet(nn.Module):
    """The deep agent of IMPALA (Espeholt et al. 2018), after torchbeast."""

    def __init__(self, observation_shape=(3, 8, 8), num_actions=4, use_lstm=True):
        super().__init__()
        self.observation_shape, self.num_actions = observation_shape, num_actions
        self.use_lstm = use_lstm
        self.feat_convs, self.resnet1, self.resnet2 = [], [], []
        input_channels = observation_shape[0]
        for num_ch in [4, 6]:
            feats_convs = []
            feats_convs.append(nn.Conv2d(input_channels, num_ch, 3, stride=1, padding=1))
            feats_convs.append(nn.MaxPool2d(kernel_size=3, stride=2, padding=1))
            self.feat_convs.append(nn.Sequential(*feats_convs))
            input_channels = num_ch
            for i in range(2):
                resnet_block = []
                resnet_block.append(nn.ReLU())
                resnet_block.append(nn.Conv2d(input_channels, num_ch, 3, stride=1, padding=1))
                resnet_block.append(nn.ReLU())
                resnet_block.append(nn.Conv2d(input_channels, num_ch, 3, stride=1, padding=1))
                if i == 0:
                    self.resnet1.append(nn.Sequential(*resnet_block))
                else:
                    self.resnet2.append(nn.Sequential(*resnet_block))
        self.feat_convs = nn.ModuleList(self.feat_convs)
        self.resnet1 = nn.ModuleList(self.resnet1)
        self.resnet2 = nn.ModuleList(self.resnet2)
        self.fc = nn.Linear(6 * 2 * 2, 12)
        core_output_size = self.fc.out_features + num_actions + 1
        if use_lstm:
            self.core = nn.LSTM(core_output_size, core_output_size, 2)
        self.policy = nn.Linear(core_output_size, self.num_actions)
        self.baseline = nn.Linear(core_output_size, 1)

    def initial_state(self, batch_size, like):
        if not self.use_lstm:
            return ()
        return tuple(
            torch.zeros(self.core.num_layers, batch_size, self.core.hidden_size).to(like)
            for _ in range(2)
        )

    def forward(self, frame, reward, done, last_action):
        x = frame.transpose(0, 1)  # Time, batch, ...
        T, B = x.shape[:2]
        x = torch.flatten(x, 0, 1)
        x = x / 255.0
        for i, fconv in enumerate(self.feat_convs):
            x = fconv(x)
            res_input = x
            x = self.resnet1[i](x)
            x += res_input
            res_input = x
            x = self.resnet2[i](x)
            x += res_input
        x = F.relu(x)
        x = x.view(T * B, -1)
        x = F.relu(self.fc(x))
        one_hot_last_action = F.one_hot(last_action.t().reshape(T * B), self.num_actions).to(x)
        clipped_reward = torch.clamp(reward.t(), -1, 1).reshape(T * B, 1)
        core_input = torch.cat([x, clipped_reward, one_hot_last_action], dim=-1)
        if self.use_lstm:
            core_input = core_input.view(T, B, -1)
            core_state = self.initial_state(B, x)
            core_output_list = []
            notdone = (~done.t()).to(x)
            for input, going in zip(core_input.unbind(), notdone.unbind(), strict=True):
                going = going.view(1, -1, 1)
                core_state = tuple(going * s for s in core_state)
                output, core_state = self.core(input.unsqueeze(0), core_state)
                core_output_list.append(output)
            core_output = torch.flatten(torch.cat(core_output_list), 0, 1)
        else:
            core_output = core_input
        policy_logits = self.policy(core_output)
        baseline = self.baseline(core_output)
        if self.training:
            action = torch.multinomial(F.softmax(policy_logits, dim=1), num_samples=1)
        else:
            action = torch.argmax(policy_logits, dim=1)
        policy_logits = policy_logits.view(T, B, self.num_actions)
        baseline = baseline.view(T, B)
        action = action.view(T, B)
        return {
            "policy_logits": policy_logits.transpose(0, 1),
            "baseline": baseline.t(),
            "action": action.t(),
        }


def rollouts():
    return {
        "frame": torch.randint(256, (BATCH, 4, 3, 8, 8)).float(),
        "reward": torch.randn(BATCH, 4) * 2,
        "done": torch.rand(BATCH, 4) > 0.7,
        "last_action": torch.randint(4, (BATCH, 4)),
        "behaviour": torch.randn(BATCH, 4, 4),
        "actions": torch.randint(4, (BATCH, 4)),
    }


def vtrace_loss(out, batch):
    logits, values = out["policy_logits"], out["baseline"]
    taken, discounts = batch["actions"], (~batch["done"]).to(values) * 0.99
    log_policy = F.log_softmax(logits, dim=-1)
    chosen = log_policy.gather(2, taken.unsqueeze(-1)).squeeze(-1)
    behaviour = F.log_softmax(batch["behaviour"], dim=-1)
    with torch.no_grad():
        rhos = torch.exp(chosen - behaviour.gather(2, taken.unsqueeze(-1)).squeeze(-1))
        clipped = torch.clamp(rhos, max=1.0)
        after = torch.cat([values[:, 1:], values[:, -1:]], dim=1)
        deltas = clipped * (batch["reward"] + discounts * after - values)
        acc, result = torch.zeros_like(values[:, 0]), []
        for t in range(values.shape[1] - 1, -1, -1):
            acc = deltas[:, t] + discounts[:, t] * clipped[:, t] * acc
            result.append(acc)
        vs = torch.stack(result[::-1], dim=1) + values
        vs_next = torch.cat([vs[:, 1:], values[:, -1:]], dim=1)
        advantages = clipped * (batch["reward"] + discounts * vs_next - values)
    entropy = (log_policy.exp() * log_policy).sum()
    loss = -(chosen * advantages).sum() + 0.5 * ((vs - values) ** 2).sum() + 0.01 * entropy
    return loss, count(values.numel())


class NoisyLinear(nn.Module):
    def __init__(self, in_features, out_features, std_init=0.5):
        super().__init__()
        self.in_features, self.out_features, self.std_init = in_features, out_features, std_init
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features))
        self.weight_sigma = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("weight_epsilon", torch.empty(out_features, in_features))
        self.bias_mu = nn.Parameter(torch.empty(out_features))
        self.bias_sigma = nn.Parameter(torch.empty(out_features))
        self.register_buffer("bias_epsilon", torch.empty(out_features))
        self.reset_parameters()
        self.reset_noise()

    def reset_parameters(self):
        mu_range = 1 / math.sqrt(self.in_features)
        self.weight_mu.data.uniform_(-mu_range, mu_range)
        self.weight_sigma.data.fill_(self.std_init / math.sqrt(self.in_features))
        self.bias_mu.data.uniform_(-mu_range, mu_range)
        self.bias_sigma.data.fill_(self.std_init / math.sqrt(self.out_features))

    def _scale_noise(self, size):
        x = torch.randn(size, device=self.weight_mu.device)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self):
        epsilon_in = self._scale_noise(self.in_features)
        epsilon_out = self._scale_noise(self.out_features)
        self.weight_epsilon.copy_(epsilon_out.ger(epsilon_in))
        self.bias_epsilon.copy_(epsilon_out)

    def forward(self, input):
        if self.training:
            return F.linear(
                input,
                self.weight_mu + self.weight_sigma * self.weight_epsilon,
                self.bias_mu + self.bias_sigma * self.bias_epsilon,
            )
        return F.linear(input, self.weight_mu, self.bias_mu)


class DQN(nn.Module):
    def __init__(self, action_space, atoms=11, hidden_size=10):
        super().__init__()
        self.atoms, self.action_space = atoms, action_space
        self.convs = nn.Sequential(
            nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()
        )
        self.conv_output_size = 6 * 2 * 2
        self.fc_h_v = NoisyLinear(self.conv_output_size, hidden_size)
        self.fc_h_a = NoisyLinear(self.conv_output_size, hidden_size)
        self.fc_z_v = NoisyLinear(hidden_size, self.atoms)
        self.fc_z_a = NoisyLinear(hidden_size, action_space * self.atoms)

    def forward(self, x, log=False):
        x = self.convs(x)
        x = x.view(-1, self.conv_output_size)
        v = self.fc_z_v(F.relu(self.fc_h_v(x)))
        a = self.fc_z_a(F.relu(self.fc_h_a(x)))
        v, a = v.view(-1, 1, self.atoms), a.view(-1, self.action_space, self.atoms)
        q = v + a - a.mean(1, keepdim=True)
        return F.log_softmax(q, dim=2) if log else F.softmax(q, dim=2)

    def reset_noise(self):
        for name, module in self.named_children():
            if "fc" in name:
                module.reset_noise()


class Rainbow(nn.Module):
    """The update of Kaixhin's Rainbow (Hessel et al. 2018) as a module: noisy, dueling, C51."""

    def __init__(self, action_space=3, atoms=11, Vmin=-3.0, Vmax=3.0, n=3, discount=0.99):
        super().__init__()
        self.atoms, self.Vmin, self.Vmax = atoms, Vmin, Vmax
        self.register_buffer("support", torch.linspace(Vmin, Vmax, atoms))
        self.delta_z = (Vmax - Vmin) / (atoms - 1)
        self.n, self.discount = n, discount
        self.online_net = DQN(action_space, atoms)
        self.target_net = DQN(action_space, atoms)
        self.target_net.load_state_dict(self.online_net.state_dict())
        for param in self.target_net.parameters():
            param.requires_grad = False

    def forward(self, states, actions, returns, next_states, nonterminals):
        batch_size = states.size(0)
        self.online_net.reset_noise()
        log_ps = self.online_net(states, log=True)
        log_ps_a = log_ps[range(batch_size), actions]
        with torch.no_grad():
            pns = self.online_net(next_states)
            dns = self.support.expand_as(pns) * pns
            argmax_indices_ns = dns.sum(2).argmax(1)
            self.target_net.reset_noise()
            pns = self.target_net(next_states)
            pns_a = pns[range(batch_size), argmax_indices_ns]
            Tz = returns.unsqueeze(1) + nonterminals * (
                self.discount**self.n
            ) * self.support.unsqueeze(0)
            Tz = Tz.clamp(min=self.Vmin, max=self.Vmax)
            b = (Tz - self.Vmin) / self.delta_z
            l, u = b.floor().to(torch.int64), b.ceil().to(torch.int64)  # noqa: E741
            l[(u > 0) * (l == u)] -= 1
            u[(l < (self.atoms - 1)) * (l == u)] += 1
            m = states.new_zeros(batch_size, self.atoms)
            offset = (
                torch.linspace(0, ((batch_size - 1) * self.atoms), batch_size)
                .unsqueeze(1)
                .expand(batch_size, self.atoms)
                .to(actions)
            )
            m.view(-1).index_add_(0, (l + offset).view(-1), (pns_a * (u.to(b) - b)).view(-1))
            m.view(-1).index_add_(0, (u + offset).view(-1), (pns_a * (b - l.to(b))).view(-1))
        return -torch.sum(m * log_ps_a, 1)


def replays():
    return {
        "states": torch.rand(BATCH, 4, 8, 8),
        "actions": torch.randint(3, (BATCH,)),
        "returns": torch.randn(BATCH),
        "next_states": torch.rand(BATCH, 4, 8, 8),
        "nonterminals": (torch.rand(BATCH, 1) > 0.2) * 1.0,
        "weights": torch.rand(BATCH) + 0.5,
    }


def weighted(loss, batch):
    return (batch["weights"] * loss).sum(), count(len(loss))


# ---- graphs and molecules ------------------------------------------------------------------------


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim, add_self=False, normalize_embedding=False):
        super().__init__()
        self.add_self, self.normalize_embedding = add_self, normalize_embedding
        self.weight = nn.Parameter(torch.empty(input_dim, output_dim))
        self.bias = nn.Parameter(torch.zeros(output_dim))
        nn.init.xavier_uniform_(self.weight, gain=nn.init.calculate_gain("relu"))

    def forward(self, x, adj):
        y = torch.matmul(adj, x)
        if self.add_self:
            y += x
        y = torch.matmul(y, self.weight)
        y = y + self.bias
        if self.normalize_embedding:
            y = F.normalize(y, p=2, dim=2)
        return y


class SoftPoolingGcnEncoder(nn.Module):
    """Graph classification by differentiable pooling (Ying et al. 2018)."""

    def __init__(self, max_num_nodes=6, input_dim=4, hidden_dim=6, label_dim=5, assign_ratio=0.5):
        super().__init__()
        self.bn = True
        self.act = nn.ReLU()
        self.conv_first, self.conv_block, self.conv_last = self.build_conv_layers(
            input_dim, hidden_dim, hidden_dim
        )
        assign_dim = int(max_num_nodes * assign_ratio)
        self.assign_conv_first, self.assign_conv_block, self.assign_conv_last = (
            self.build_conv_layers(input_dim, hidden_dim, assign_dim)
        )
        self.assign_pred = nn.Linear(hidden_dim * 2 + assign_dim, assign_dim)
        self.conv_first_after_pool, self.conv_block_after_pool, self.conv_last_after_pool = (
            self.build_conv_layers(hidden_dim * 3, hidden_dim, hidden_dim)
        )
        self.pred_model = nn.Sequential(
            nn.Linear(hidden_dim * 6, 10), nn.ReLU(), nn.Linear(10, label_dim)
        )

    def build_conv_layers(self, input_dim, hidden_dim, embedding_dim):
        conv_first = GraphConv(input_dim, hidden_dim, normalize_embedding=True)
        conv_block = nn.ModuleList(
            [GraphConv(hidden_dim, hidden_dim, normalize_embedding=True) for _ in range(1)]
        )
        conv_last = GraphConv(hidden_dim, embedding_dim, normalize_embedding=True)
        return conv_first, conv_block, conv_last

    def construct_mask(self, max_nodes, batch_num_nodes):
        at = torch.arange(max_nodes, device=batch_num_nodes.device)
        return (at[None, :] < batch_num_nodes[:, None]).unsqueeze(2)

    def apply_bn(self, x):
        """Batch normalization of 3D tensor x."""
        bn_module = nn.BatchNorm1d(x.size()[1]).to(x)
        return bn_module(x)

    def gcn_forward(self, x, adj, conv_first, conv_block, conv_last, embedding_mask=None):
        x = conv_first(x, adj)
        x = self.act(x)
        if self.bn:
            x = self.apply_bn(x)
        x_all = [x]
        for conv in conv_block:
            x = conv(x, adj)
            x = self.act(x)
            if self.bn:
                x = self.apply_bn(x)
            x_all.append(x)
        x = conv_last(x, adj)
        x_all.append(x)
        x_tensor = torch.cat(x_all, dim=2)
        if embedding_mask is not None:
            x_tensor = x_tensor * embedding_mask
        return x_tensor

    def forward(self, x, adj, batch_num_nodes):
        embedding_mask = self.construct_mask(x.size(1), batch_num_nodes)
        x_a = x
        embedding_tensor = self.gcn_forward(
            x, adj, self.conv_first, self.conv_block, self.conv_last, embedding_mask
        )
        out_all = [torch.max(embedding_tensor, dim=1)[0]]
        assign = self.gcn_forward(
            x_a,
            adj,
            self.assign_conv_first,
            self.assign_conv_block,
            self.assign_conv_last,
            embedding_mask,
        )
        self.assign_tensor = nn.Softmax(dim=-1)(self.assign_pred(assign))
        self.assign_tensor = self.assign_tensor * embedding_mask
        x = torch.matmul(torch.transpose(self.assign_tensor, 1, 2), embedding_tensor)
        pooled = torch.transpose(self.assign_tensor, 1, 2) @ adj @ self.assign_tensor
        embedding_tensor = self.gcn_forward(
            x,
            pooled,
            self.conv_first_after_pool,
            self.conv_block_after_pool,
            self.conv_last_after_pool,
        )
        out_all.append(torch.max(embedding_tensor, dim=1)[0])
        return self.pred_model(torch.cat(out_all, dim=1)), self.assign_tensor


def graphs():
    adj = (torch.rand(BATCH, 6, 6) > 0.5).float()
    sizes = torch.randint(3, 7, (BATCH,))
    keep = (torch.arange(6)[None] < sizes[:, None]).float()
    return {
        "x": torch.randn(BATCH, 6, 4) * keep[:, :, None],
        "adj": ((adj + adj.mT) / 2) * keep[:, None, :] * keep[:, :, None],
        "batch_num_nodes": sizes,
        "label": torch.randint(5, (BATCH,)),
    }


def pool_loss(out, batch):
    ypred, assign = out
    loss, weight = classification(ypred, batch)
    adj_hat = torch.clamp(assign @ assign.mT, max=1.0)
    adj, eps = batch["adj"], 1e-7
    link = -adj * torch.log(adj_hat + eps) - (1 - adj) * torch.log(1 - adj_hat + eps)
    n = batch["batch_num_nodes"]
    inside = torch.arange(adj.shape[1])[None] < n[:, None]
    link = link * (inside[:, None, :] & inside[:, :, None])
    return loss + (link.sum((1, 2)) / (n * n)).sum(), weight


def tuple_sum(*args):
    return tuple(map(sum, zip(*args, strict=True)))


def tuple_cat(*args, dim=-1):
    dim %= len(args[0][0].shape)
    s_args, v_args = list(zip(*args, strict=True))
    return torch.cat(s_args, dim=dim), torch.cat(v_args, dim=dim)


def tuple_index(x, idx):
    return x[0][idx], x[1][idx]


def _norm_no_nan(x, axis=-1, keepdims=False, eps=1e-8, sqrt=True):
    out = torch.clamp(torch.sum(torch.square(x), axis, keepdims), min=eps)
    return torch.sqrt(out) if sqrt else out


class GVP(nn.Module):
    def __init__(self, in_dims, out_dims, activations=(F.relu, torch.sigmoid), vector_gate=True):
        super().__init__()
        self.si, self.vi = in_dims
        self.so, self.vo = out_dims
        self.vector_gate = vector_gate
        if self.vi:
            self.h_dim = max(self.vi, self.vo)
            self.wh = nn.Linear(self.vi, self.h_dim, bias=False)
            self.ws = nn.Linear(self.h_dim + self.si, self.so)
            if self.vo:
                self.wv = nn.Linear(self.h_dim, self.vo, bias=False)
                if self.vector_gate:
                    self.wsv = nn.Linear(self.so, self.vo)
        else:
            self.ws = nn.Linear(self.si, self.so)
        self.scalar_act, self.vector_act = activations
        self.dummy_param = nn.Parameter(torch.empty(0))

    def forward(self, x):
        if self.vi:
            s, v = x
            v = torch.transpose(v, -1, -2)
            vh = self.wh(v)
            vn = _norm_no_nan(vh, axis=-2)
            s = self.ws(torch.cat([s, vn], -1))
            if self.vo:
                v = self.wv(vh)
                v = torch.transpose(v, -1, -2)
                if self.vector_gate:
                    gate = self.wsv(self.vector_act(s) if self.vector_act else s)
                    v = v * torch.sigmoid(gate).unsqueeze(-1)
                elif self.vector_act:
                    v = v * self.vector_act(_norm_no_nan(v, axis=-1, keepdims=True))
        else:
            s = self.ws(x)
            if self.vo:
                v = torch.zeros(s.shape[0], self.vo, 3, device=self.dummy_param.device)
        if self.scalar_act:
            s = self.scalar_act(s)
        return (s, v) if self.vo else s


class _VDropout(nn.Module):
    def __init__(self, drop_rate):
        super().__init__()
        self.drop_rate = drop_rate
        self.dummy_param = nn.Parameter(torch.empty(0))

    def forward(self, x):
        device = self.dummy_param.device
        if not self.training:
            return x
        mask = torch.bernoulli(
            (1 - self.drop_rate) * torch.ones(x.shape[:-1], device=device)
        ).unsqueeze(-1)
        return mask * x / (1 - self.drop_rate)


class TupleDropout(nn.Module):
    def __init__(self, drop_rate):
        super().__init__()
        self.sdropout = nn.Dropout(drop_rate)
        self.vdropout = _VDropout(drop_rate)

    def forward(self, x):
        if type(x) is torch.Tensor:
            return self.sdropout(x)
        s, v = x
        return self.sdropout(s), self.vdropout(v)


class TupleLayerNorm(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.s, self.v = dims
        self.scalar_norm = nn.LayerNorm(self.s)

    def forward(self, x):
        if not self.v:
            return self.scalar_norm(x)
        s, v = x
        vn = _norm_no_nan(v, axis=-1, keepdims=True, sqrt=False)
        vn = torch.sqrt(torch.mean(vn, dim=-2, keepdim=True))
        return self.scalar_norm(s), v / vn


class GVPConvLayer(nn.Module):
    def __init__(self, node_dims, edge_dims, n_message=2, n_feedforward=2, drop_rate=0.1):
        super().__init__()
        (ns, nv), (es, ev) = node_dims, edge_dims
        module_list = [GVP((2 * ns + es, 2 * nv + ev), node_dims)]
        for _ in range(n_message - 2):
            module_list.append(GVP(node_dims, node_dims))
        module_list.append(GVP(node_dims, node_dims, activations=(None, None)))
        self.message_func = nn.Sequential(*module_list)
        self.norm = nn.ModuleList([TupleLayerNorm(node_dims) for _ in range(2)])
        self.dropout = nn.ModuleList([TupleDropout(drop_rate) for _ in range(2)])
        hid_dims = 4 * ns, 2 * nv
        ff_func = [GVP(node_dims, hid_dims)]
        for _ in range(n_feedforward - 2):
            ff_func.append(GVP(hid_dims, hid_dims))
        ff_func.append(GVP(hid_dims, node_dims, activations=(None, None)))
        self.ff_func = nn.Sequential(*ff_func)

    def propagate(self, edge_index, s, v, edge_attr):
        j, i = edge_index
        message = tuple_cat((s[j], v[j]), edge_attr, (s[i], v[i]))
        ms, mv = self.message_func(message)
        deg = torch.zeros(s.size(0), device=s.device).index_add_(0, i, torch.ones_like(ms[:, 0]))
        deg = deg.clamp(min=1).unsqueeze(-1)
        ds = torch.zeros_like(s).index_add_(0, i, ms) / deg
        dv = torch.zeros_like(v).index_add_(0, i, mv) / deg.unsqueeze(-1)
        return ds, dv

    def forward(self, x, edge_index, edge_attr):
        dh = self.propagate(edge_index, *x, edge_attr)
        x = self.norm[0](tuple_sum(x, self.dropout[0](dh)))
        dh = self.ff_func(x)
        return self.norm[1](tuple_sum(x, self.dropout[1](dh)))


class GVPModel(nn.Module):
    """Proteins by geometric vector perceptrons (Jing et al. 2021): pairs of scalars and vectors."""

    def __init__(self, node_in=(5, 2), node_h=(8, 4), edge_in=(4, 1), edge_h=(4, 1), layers=2):
        super().__init__()
        self.W_v = nn.Sequential(
            GVP(node_in, node_h, activations=(None, None)), TupleLayerNorm(node_h)
        )
        self.W_e = nn.Sequential(
            GVP(edge_in, edge_h, activations=(None, None)), TupleLayerNorm(edge_h)
        )
        self.layers = nn.ModuleList(GVPConvLayer(node_h, edge_h) for _ in range(layers))
        ns, _ = node_h
        self.W_out = nn.Sequential(TupleLayerNorm(node_h), GVP(node_h, (ns, 0)))
        self.dense = nn.Sequential(
            nn.Linear(ns, 2 * ns), nn.ReLU(inplace=True), nn.Dropout(p=0.1), nn.Linear(2 * ns, 1)
        )

    def forward(self, node_s, node_v, edge_index, edge_s, edge_v):
        B, N = node_s.shape[:2]
        shift = torch.arange(B, device=edge_index.device).view(B, 1, 1) * N
        edge_index = (edge_index + shift).permute(1, 0, 2).reshape(2, -1)  # as PyG batches graphs
        h_V = self.W_v((node_s.flatten(0, 1), node_v.flatten(0, 1)))
        h_E = self.W_e((edge_s.flatten(0, 1), edge_v.flatten(0, 1)))
        for layer in self.layers:
            h_V = layer(h_V, edge_index, edge_attr=h_E)
        out = self.W_out(h_V)
        batch = torch.arange(B, device=out.device).repeat_interleave(N)
        total = torch.zeros(B, out.size(1), device=out.device).to(out).index_add_(0, batch, out)
        return self.dense(total / N).squeeze(-1)


def proteins():
    return {
        "node_s": torch.randn(BATCH, 5, 5),
        "node_v": torch.randn(BATCH, 5, 2, 3),
        "edge_index": torch.randint(5, (BATCH, 2, 9)),
        "edge_s": torch.randn(BATCH, 9, 4),
        "edge_v": torch.randn(BATCH, 9, 1, 3),
        "y": torch.randn(BATCH),
    }


def regression(out, batch):
    return F.mse_loss(out, batch["y"], reduction="sum"), count(out.numel())


# ---- learning to learn ---------------------------------------------------------------------------


class MetaSGD(nn.Module):
    """MAML with learned rates (Finn et al. 2017, Li et al. 2017), by torch.func.functional_call."""

    def __init__(self, hidden=10, inner_steps=2, inner_lr=0.05):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.net.add_module("out", nn.Linear(hidden, 1))
        self.inner_steps = inner_steps
        self.lrs = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.full_like(p, inner_lr))
                for name, p in self.net.named_parameters()
            }
        )

    def inner_loop(self, x, y):
        fast_weights = dict(self.net.named_parameters())
        for _ in range(self.inner_steps):
            pred = torch.func.functional_call(self.net, fast_weights, (x,))
            loss = F.mse_loss(pred, y)
            grads = torch.autograd.grad(loss, fast_weights.values(), create_graph=True)
            fast_weights = {
                name: w - self.lrs[name.replace(".", "_")] * g
                for (name, w), g in zip(fast_weights.items(), grads, strict=True)
            }
        return fast_weights

    def forward(self, x_spt, y_spt, x_qry):
        predictions = []
        with torch.enable_grad():
            for i in range(x_spt.size(0)):
                fast_weights = self.inner_loop(x_spt[i], y_spt[i])
                predictions.append(torch.func.functional_call(self.net, fast_weights, (x_qry[i],)))
        return torch.stack(predictions)


def sinusoids():
    amplitude, phase = torch.rand(BATCH, 1, 1) * 4 + 0.1, torch.rand(BATCH, 1, 1) * math.pi
    x_spt, x_qry = torch.rand(BATCH, 5, 1) * 4 - 2, torch.rand(BATCH, 6, 1) * 4 - 2
    return {
        "x_spt": x_spt,
        "y_spt": amplitude * torch.sin(x_spt + phase),
        "x_qry": x_qry,
        "y": amplitude * torch.sin(x_qry + phase),
    }


# ---- audio ---------------------------------------------------------------------------------------


def WNConv1d(*args, **kwargs):
    return nn.utils.weight_norm(nn.Conv1d(*args, **kwargs))


def WNConvTranspose1d(*args, **kwargs):
    return nn.utils.weight_norm(nn.ConvTranspose1d(*args, **kwargs))


def snake(x, alpha):
    shape = x.shape
    x = x.reshape(shape[0], shape[1], -1)
    x = x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)
    return x.reshape(shape)


class Snake1d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return snake(x, self.alpha)


class ResidualUnit(nn.Module):
    def __init__(self, dim=16, dilation=1):
        super().__init__()
        pad = ((7 - 1) * dilation) // 2
        self.block = nn.Sequential(
            Snake1d(dim),
            WNConv1d(dim, dim, kernel_size=7, dilation=dilation, padding=pad),
            Snake1d(dim),
            WNConv1d(dim, dim, kernel_size=1),
        )

    def forward(self, x):
        y = self.block(x)
        pad = (x.shape[-1] - y.shape[-1]) // 2
        if pad > 0:
            x = x[..., pad:-pad]
        return x + y


class EncoderBlock(nn.Module):
    def __init__(self, dim=16, stride=1):
        super().__init__()
        self.block = nn.Sequential(
            ResidualUnit(dim // 2, dilation=1),
            ResidualUnit(dim // 2, dilation=3),
            Snake1d(dim // 2),
            WNConv1d(
                dim // 2, dim, kernel_size=2 * stride, stride=stride, padding=math.ceil(stride / 2)
            ),
        )

    def forward(self, x):
        return self.block(x)


class DecoderBlock(nn.Module):
    def __init__(self, input_dim=16, output_dim=8, stride=1):
        super().__init__()
        self.block = nn.Sequential(
            Snake1d(input_dim),
            WNConvTranspose1d(
                input_dim,
                output_dim,
                kernel_size=2 * stride,
                stride=stride,
                padding=math.ceil(stride / 2),
            ),
            ResidualUnit(output_dim, dilation=1),
            ResidualUnit(output_dim, dilation=3),
        )

    def forward(self, x):
        return self.block(x)


class VectorQuantize(nn.Module):
    def __init__(self, input_dim, codebook_size, codebook_dim):
        super().__init__()
        self.codebook_size, self.codebook_dim = codebook_size, codebook_dim
        self.in_proj = WNConv1d(input_dim, codebook_dim, kernel_size=1)
        self.out_proj = WNConv1d(codebook_dim, input_dim, kernel_size=1)
        self.codebook = nn.Embedding(codebook_size, codebook_dim)

    def forward(self, z):
        z_e = self.in_proj(z)
        z_q, indices = self.decode_latents(z_e)
        commitment_loss = F.mse_loss(z_e, z_q.detach(), reduction="none").mean([1, 2])
        codebook_loss = F.mse_loss(z_q, z_e.detach(), reduction="none").mean([1, 2])
        z_q = z_e + (z_q - z_e).detach()  # straight through
        z_q = self.out_proj(z_q)
        return z_q, commitment_loss, codebook_loss, indices, z_e

    def embed_code(self, embed_id):
        return F.embedding(embed_id, self.codebook.weight)

    def decode_code(self, embed_id):
        return self.embed_code(embed_id).transpose(1, 2)

    def decode_latents(self, latents):
        b, d, t = latents.shape
        encodings = latents.permute(0, 2, 1).reshape(b * t, d)
        codebook = self.codebook.weight
        encodings = F.normalize(encodings)
        codebook = F.normalize(codebook)
        dist = (
            encodings.pow(2).sum(1, keepdim=True)
            - 2 * encodings @ codebook.t()
            + codebook.pow(2).sum(1, keepdim=True).t()
        )
        indices = (-dist).max(1)[1].view(b, t)
        return self.decode_code(indices), indices


class ResidualVectorQuantize(nn.Module):
    def __init__(self, input_dim, n_codebooks=3, codebook_size=8, codebook_dim=4):
        super().__init__()
        self.n_codebooks = n_codebooks
        self.quantizers = nn.ModuleList(
            [VectorQuantize(input_dim, codebook_size, codebook_dim) for _ in range(n_codebooks)]
        )

    def forward(self, z, n_quantizers=None):
        z_q = 0
        residual = z
        commitment_loss = 0
        codebook_loss = 0
        codebook_indices, latents = [], []
        if n_quantizers is None:
            n_quantizers = self.n_codebooks
        for i, quantizer in enumerate(self.quantizers):
            if self.training is False and i >= n_quantizers:
                break
            z_q_i, commitment_loss_i, codebook_loss_i, indices_i, z_e_i = quantizer(residual)
            mask = torch.full((z.shape[0],), fill_value=i, device=z.device) < n_quantizers
            z_q = z_q + z_q_i * mask[:, None, None]
            residual = residual - z_q_i
            commitment_loss += (commitment_loss_i * mask).mean()
            codebook_loss += (codebook_loss_i * mask).mean()
            codebook_indices.append(indices_i)
            latents.append(z_e_i)
        codes = torch.stack(codebook_indices, dim=1)
        return z_q, codes, torch.cat(latents, dim=1), commitment_loss, codebook_loss


class DAC(nn.Module):
    """The Descript audio codec (Kumar et al. 2023)."""

    def __init__(self, encoder_dim=4, encoder_rates=(2, 2), decoder_dim=16, decoder_rates=(2, 2)):
        super().__init__()
        self.hop_length = math.prod(encoder_rates)
        d_model = encoder_dim
        block = [WNConv1d(1, d_model, kernel_size=7, padding=3)]
        for stride in encoder_rates:
            d_model *= 2
            block += [EncoderBlock(d_model, stride=stride)]
        block += [Snake1d(d_model), WNConv1d(d_model, d_model, kernel_size=3, padding=1)]
        self.encoder = nn.Sequential(*block)
        self.quantizer = ResidualVectorQuantize(d_model)
        layers = [WNConv1d(d_model, decoder_dim, kernel_size=7, padding=3)]
        for i, stride in enumerate(decoder_rates):
            input_dim = decoder_dim // 2**i
            output_dim = decoder_dim // 2 ** (i + 1)
            layers += [DecoderBlock(input_dim, output_dim, stride)]
        layers += [
            Snake1d(output_dim),
            WNConv1d(output_dim, 1, kernel_size=7, padding=3),
            nn.Tanh(),
        ]
        self.decoder = nn.Sequential(*layers)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(m):
        if isinstance(m, nn.Conv1d):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.constant_(m.bias, 0)

    def preprocess(self, audio_data):
        length = audio_data.shape[-1]
        right_pad = math.ceil(length / self.hop_length) * self.hop_length - length
        return F.pad(audio_data, (0, right_pad))

    def forward(self, audio_data, n_quantizers=None):
        length = audio_data.shape[-1]
        audio_data = self.preprocess(audio_data)
        z = self.encoder(audio_data)
        z, codes, latents, commitment_loss, codebook_loss = self.quantizer(z, n_quantizers)
        x = self.decoder(z)
        return {
            "audio": x[..., :length],
            "z": z,
            "codes": codes,
            "latents": latents,
            "vq/commitment_loss": commitment_loss,
            "vq/codebook_loss": codebook_loss,
        }


def waveforms():
    return {"audio_data": torch.randn(BATCH, 1, 30).tanh()}


def codec_loss(out, batch):
    x, y = out["audio"].squeeze(1), batch["audio_data"].squeeze(1)
    loss = (x - y).abs().mean(1)
    for n in (8, 16):
        window = torch.hann_window(n, dtype=x.dtype)
        a, b = (torch.stft(s, n, n // 4, window=window, return_complex=True).abs() for s in (x, y))
        loss = loss + (a.clamp(1e-5).log10() - b.clamp(1e-5).log10()).abs().mean((1, 2))
    loss = loss.sum() + len(x) * (0.25 * out["vq/commitment_loss"] + 1.0 * out["vq/codebook_loss"])
    return loss, count(len(x))


# ---- two players ---------------------------------------------------------------------------------


class UnetSkipConnectionBlock(nn.Module):
    def __init__(
        self,
        outer_nc,
        inner_nc,
        input_nc=None,
        submodule=None,
        outermost=False,
        innermost=False,
        norm_layer=nn.BatchNorm2d,
        use_dropout=False,
    ):
        super().__init__()
        self.outermost = outermost
        use_bias = norm_layer == nn.InstanceNorm2d
        if input_nc is None:
            input_nc = outer_nc
        downconv = nn.Conv2d(input_nc, inner_nc, kernel_size=4, stride=2, padding=1, bias=use_bias)
        downrelu = nn.LeakyReLU(0.2, True)
        downnorm = norm_layer(inner_nc)
        uprelu = nn.ReLU(True)
        upnorm = norm_layer(outer_nc)
        if outermost:
            upconv = nn.ConvTranspose2d(inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1)
            model = [downconv, submodule, uprelu, upconv, nn.Tanh()]
        elif innermost:
            upconv = nn.ConvTranspose2d(
                inner_nc, outer_nc, kernel_size=4, stride=2, padding=1, bias=use_bias
            )
            model = [downrelu, downconv, uprelu, upconv, upnorm]
        else:
            upconv = nn.ConvTranspose2d(
                inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1, bias=use_bias
            )
            down = [downrelu, downconv, downnorm]
            up = [uprelu, upconv, upnorm]
            model = [*down, submodule, *up, nn.Dropout(0.5)] if use_dropout else down
            if not use_dropout:
                model = [*down, submodule, *up]
        self.model = nn.Sequential(*model)

    def forward(self, x):
        if self.outermost:
            return self.model(x)
        return torch.cat([x, self.model(x)], 1)


class UnetGenerator(nn.Module):
    def __init__(self, input_nc=3, output_nc=3, ngf=4):
        super().__init__()
        block = UnetSkipConnectionBlock(ngf * 4, ngf * 4, innermost=True)
        block = UnetSkipConnectionBlock(ngf * 2, ngf * 4, submodule=block, use_dropout=True)
        block = UnetSkipConnectionBlock(ngf, ngf * 2, submodule=block)
        self.model = UnetSkipConnectionBlock(
            output_nc, ngf, input_nc=input_nc, submodule=block, outermost=True
        )

    def forward(self, input):
        return self.model(input)


class NLayerDiscriminator(nn.Module):
    def __init__(self, input_nc, ndf=4, n_layers=2, norm_layer=nn.BatchNorm2d):
        super().__init__()
        sequence = [nn.Conv2d(input_nc, ndf, kernel_size=4, stride=2, padding=1)]
        sequence.append(nn.LeakyReLU(0.2, True))
        nf_mult = 1
        for n in range(1, n_layers):
            nf_mult_prev, nf_mult = nf_mult, min(2**n, 8)
            sequence += [
                nn.Conv2d(ndf * nf_mult_prev, ndf * nf_mult, 4, stride=2, padding=1, bias=False),
                norm_layer(ndf * nf_mult),
                nn.LeakyReLU(0.2, True),
            ]
        sequence += [nn.Conv2d(ndf * nf_mult, 1, kernel_size=4, stride=1, padding=1)]
        self.model = nn.Sequential(*sequence)

    def forward(self, input):
        return self.model(input)


class Pix2Pix(nn.Module):
    """Image to image with a conditional discriminator (Isola et al. 2017): both losses at once."""

    def __init__(self):
        super().__init__()
        self.netG = UnetGenerator()
        self.netD = NLayerDiscriminator(3 + 3)
        for net in (self.netG, self.netD):
            net.apply(self.init_func)

    @staticmethod
    def init_func(m):
        classname = m.__class__.__name__
        if hasattr(m, "weight") and (classname.find("Conv") != -1):
            nn.init.normal_(m.weight.data, 0.0, 0.2)
            if hasattr(m, "bias") and m.bias is not None:
                nn.init.constant_(m.bias.data, 0.0)
        elif classname.find("BatchNorm2d") != -1:
            nn.init.normal_(m.weight.data, 1.0, 0.02)
            nn.init.constant_(m.bias.data, 0.0)

    def set_requires_grad(self, nets, requires_grad=False):
        if not isinstance(nets, list):
            nets = [nets]
        for net in nets:
            for param in net.parameters():
                param.requires_grad = requires_grad

    def forward(self, real_A, real_B):
        fake_B = self.netG(real_A)
        pred_fake = self.netD(torch.cat((real_A, fake_B), 1).detach())
        pred_real = self.netD(torch.cat((real_A, real_B), 1))
        self.set_requires_grad(self.netD, False)  # D requires no gradients when optimizing G
        pred_gan = self.netD(torch.cat((real_A, fake_B), 1))
        self.set_requires_grad(self.netD, True)
        return {
            "fake_B": fake_B,
            "pred_fake": pred_fake,
            "pred_real": pred_real,
            "pred_gan": pred_gan,
        }


def pairs_of_images():
    return {
        "real_A": torch.randn(BATCH, 3, 16, 16).tanh(),
        "real_B": torch.randn(BATCH, 3, 16, 16).tanh(),
    }


def gan_loss(out, batch):
    def criterion(prediction, real):
        target = torch.full_like(prediction, float(real))
        loss = F.binary_cross_entropy_with_logits(prediction, target, reduction="none")
        return loss.mean((1, 2, 3)).sum()

    loss_D = (criterion(out["pred_fake"], False) + criterion(out["pred_real"], True)) * 0.5
    loss_G = criterion(out["pred_gan"], True)
    loss_G = loss_G + (out["fake_B"] - batch["real_B"]).abs().mean((1, 2, 3)).sum() * 10.0
    return loss_D + loss_G, count(len(out["fake_B"]))


# ---- weather -------------------------------------------------------------------------------------


def drop_path(x, drop_prob=0.0, training=False):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
    random_tensor.floor_()
    return x.div(keep_prob) * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class AFNOMlp(nn.Module):
    def __init__(self, in_features, hidden_features=None, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class AFNO2D(nn.Module):
    def __init__(self, hidden_size, num_blocks=2, sparsity_threshold=0.01, hidden_size_factor=1):
        super().__init__()
        self.num_blocks = num_blocks
        self.block_size = hidden_size // num_blocks
        self.sparsity_threshold = sparsity_threshold
        self.scale = 0.2
        f = hidden_size_factor
        self.w1 = nn.Parameter(
            self.scale * torch.randn(2, num_blocks, self.block_size, self.block_size * f)
        )
        self.b1 = nn.Parameter(self.scale * torch.randn(2, num_blocks, self.block_size * f))
        self.w2 = nn.Parameter(
            self.scale * torch.randn(2, num_blocks, self.block_size * f, self.block_size)
        )
        self.b2 = nn.Parameter(self.scale * torch.randn(2, num_blocks, self.block_size))

    def forward(self, x):
        bias = x
        dtype = x.dtype
        x = x.float()
        B, H, W, C = x.shape
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        x = x.reshape(B, H, W // 2 + 1, self.num_blocks, self.block_size)
        o2_real = torch.zeros(x.shape, device=x.device)
        o2_imag = torch.zeros(x.shape, device=x.device)
        kept = (H // 2 + 1) - 1
        rows = slice(0, H), slice(None, kept)
        at = (slice(None), *rows)
        o1_real = F.relu(
            torch.einsum("...bi,bio->...bo", x[at].real, self.w1[0])
            - torch.einsum("...bi,bio->...bo", x[at].imag, self.w1[1])
            + self.b1[0]
        )
        o1_imag = F.relu(
            torch.einsum("...bi,bio->...bo", x[at].imag, self.w1[0])
            + torch.einsum("...bi,bio->...bo", x[at].real, self.w1[1])
            + self.b1[1]
        )
        o2_real[at] = (
            torch.einsum("...bi,bio->...bo", o1_real, self.w2[0])
            - torch.einsum("...bi,bio->...bo", o1_imag, self.w2[1])
            + self.b2[0]
        )
        o2_imag[at] = (
            torch.einsum("...bi,bio->...bo", o1_imag, self.w2[0])
            + torch.einsum("...bi,bio->...bo", o1_real, self.w2[1])
            + self.b2[1]
        )
        x = torch.stack([o2_real, o2_imag], dim=-1)
        x = F.softshrink(x, lambd=self.sparsity_threshold)
        x = torch.view_as_complex(x)
        x = x.reshape(B, H, W // 2 + 1, C)
        x = torch.fft.irfft2(x, s=(H, W), dim=(1, 2), norm="ortho")
        x = x.type(dtype)
        return x + bias


class AFNOBlock(nn.Module):
    def __init__(self, dim, mlp_ratio=2.0, drop=0.1, drop_path=0.1, norm_layer=nn.LayerNorm):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.filter = AFNO2D(dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = AFNOMlp(dim, int(dim * mlp_ratio), drop=drop)
        self.double_skip = True

    def forward(self, x):
        residual = x
        x = self.norm1(x)
        x = self.filter(x)
        if self.double_skip:
            x = x + residual
            residual = x
        x = self.norm2(x)
        x = self.mlp(x)
        x = self.drop_path(x)
        return x + residual


class AFNONet(nn.Module):
    """FourCastNet (Pathak et al. 2022): adaptive Fourier neural operators on patches."""

    def __init__(self, img_size=8, patch_size=2, in_chans=3, out_chans=3, embed_dim=8, depth=2):
        super().__init__()
        self.patch_size, self.out_chans = patch_size, out_chans
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.h = self.w = img_size // patch_size
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.h * self.w, embed_dim))
        self.pos_drop = nn.Dropout(p=0.1)
        dpr = [x.item() for x in torch.linspace(0, 0.2, depth)]
        self.blocks = nn.ModuleList(
            [AFNOBlock(embed_dim, drop_path=dpr[i], norm_layer=norm_layer) for i in range(depth)]
        )
        self.norm = norm_layer(embed_dim)
        self.head = nn.Linear(embed_dim, out_chans * patch_size * patch_size, bias=False)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward_features(self, x):
        B = x.shape[0]
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = x + self.pos_embed
        x = self.pos_drop(x)
        x = x.reshape(B, self.h, self.w, -1)
        for blk in self.blocks:
            x = blk(x)
        return x

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        b, h, w, _ = x.shape
        p = self.patch_size
        x = x.view(b, h, w, p, p, self.out_chans)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(b, self.out_chans, h * p, w * p)


def weather():
    return {"x": torch.randn(BATCH, 3, 8, 8), "y": torch.randn(BATCH, 3, 8, 8)}


def latitude_weighted(out, batch):
    lat = torch.linspace(-1.4, 1.4, out.shape[2], dtype=out.dtype, device=out.device)
    weight = torch.cos(lat) / torch.cos(lat).mean()
    loss = ((out - batch["y"]) ** 2 * weight.view(1, 1, -1, 1)).mean((1, 2, 3))
    return loss.sum(), count(len(out))


# ---- detection -----------------------------------------------------------------------------------


class SeparableConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels=None, norm=True, activation=False):
        super().__init__()
        if out_channels is None:
            out_channels = in_channels
        self.depthwise_conv = nn.Conv2d(
            in_channels, in_channels, kernel_size=3, padding=1, groups=in_channels, bias=False
        )
        self.pointwise_conv = nn.Conv2d(in_channels, out_channels, kernel_size=1)
        self.norm = norm
        if self.norm:
            self.bn = nn.BatchNorm2d(num_features=out_channels, momentum=0.01, eps=1e-3)
        self.activation = activation
        if self.activation:
            self.swish = nn.SiLU()

    def forward(self, x):
        x = self.depthwise_conv(x)
        x = self.pointwise_conv(x)
        if self.norm:
            x = self.bn(x)
        if self.activation:
            x = self.swish(x)
        return x


class BiFPN(nn.Module):
    def __init__(self, num_channels, conv_channels, first_time=False, epsilon=1e-4):
        super().__init__()
        self.epsilon, self.first_time = epsilon, first_time
        self.conv4_up = SeparableConvBlock(num_channels)
        self.conv3_up = SeparableConvBlock(num_channels)
        self.conv4_down = SeparableConvBlock(num_channels)
        self.conv5_down = SeparableConvBlock(num_channels)
        self.p4_upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.p3_upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.p4_downsample = nn.MaxPool2d(3, 2, padding=1)
        self.p5_downsample = nn.MaxPool2d(3, 2, padding=1)
        self.swish = nn.SiLU()
        if self.first_time:
            for level, channels in zip((5, 4, 3), conv_channels[::-1], strict=True):
                setattr(
                    self,
                    f"p{level}_down_channel",
                    nn.Sequential(
                        nn.Conv2d(channels, num_channels, 1),
                        nn.BatchNorm2d(num_channels, momentum=0.01, eps=1e-3),
                    ),
                )
        self.p4_w1 = nn.Parameter(torch.ones(2, dtype=torch.float32), requires_grad=True)
        self.p4_w1_relu = nn.ReLU()
        self.p3_w1 = nn.Parameter(torch.ones(2, dtype=torch.float32), requires_grad=True)
        self.p3_w1_relu = nn.ReLU()
        self.p4_w2 = nn.Parameter(torch.ones(3, dtype=torch.float32), requires_grad=True)
        self.p4_w2_relu = nn.ReLU()
        self.p5_w2 = nn.Parameter(torch.ones(2, dtype=torch.float32), requires_grad=True)
        self.p5_w2_relu = nn.ReLU()

    def _normalized(self, w):
        return w / (torch.sum(w, dim=0) + self.epsilon)

    def forward(self, inputs):
        p3, p4, p5 = inputs
        if self.first_time:
            p3_in = self.p3_down_channel(p3)
            p4_in = self.p4_down_channel(p4)
            p5_in = self.p5_down_channel(p5)
        else:
            p3_in, p4_in, p5_in = p3, p4, p5
        weight = self._normalized(self.p4_w1_relu(self.p4_w1))
        p4_up = self.conv4_up(self.swish(weight[0] * p4_in + weight[1] * self.p4_upsample(p5_in)))
        weight = self._normalized(self.p3_w1_relu(self.p3_w1))
        p3_out = self.conv3_up(self.swish(weight[0] * p3_in + weight[1] * self.p3_upsample(p4_up)))
        weight = self._normalized(self.p4_w2_relu(self.p4_w2))
        p4_out = self.conv4_down(
            self.swish(
                weight[0] * p4_in + weight[1] * p4_up + weight[2] * self.p4_downsample(p3_out)
            )
        )
        weight = self._normalized(self.p5_w2_relu(self.p5_w2))
        p5_out = self.conv5_down(
            self.swish(weight[0] * p5_in + weight[1] * self.p5_downsample(p4_out))
        )
        return p3_out, p4_out, p5_out


class Head(nn.Module):
    """One tower of convolutions for all levels, with batch norms for each."""

    def __init__(self, in_channels, num_anchors, outputs, num_layers, pyramid_levels=3):
        super().__init__()
        self.num_layers, self.outputs = num_layers, outputs
        self.conv_list = nn.ModuleList(
            [SeparableConvBlock(in_channels, in_channels, norm=False) for _ in range(num_layers)]
        )
        self.bn_list = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.BatchNorm2d(in_channels, momentum=0.01, eps=1e-3)
                        for _ in range(num_layers)
                    ]
                )
                for _ in range(pyramid_levels)
            ]
        )
        self.header = SeparableConvBlock(in_channels, num_anchors * outputs, norm=False)
        self.swish = nn.SiLU()

    def forward(self, inputs):
        feats = []
        for feat, bn_list in zip(inputs, self.bn_list, strict=True):
            for _i, bn, conv in zip(range(self.num_layers), bn_list, self.conv_list, strict=True):
                feat = conv(feat)
                feat = bn(feat)
                feat = self.swish(feat)
            feat = self.header(feat)
            feat = feat.permute(0, 2, 3, 1)
            feats.append(feat.contiguous().view(feat.shape[0], -1, self.outputs))
        return torch.cat(feats, dim=1)


class EfficientDet(nn.Module):
    """Detection with weighted pyramids (Tan et al. 2020), after zylo117's repository."""

    def __init__(self, num_classes=3, channels=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.SiLU())
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU())
            for a, b in ((6, 8), (8, 10), (10, 12))
        )
        self.bifpn = nn.Sequential(
            *[BiFPN(channels, [8, 10, 12], first_time=_ == 0) for _ in range(2)]
        )
        self.regressor = Head(channels, 2, 4, num_layers=2)
        self.classifier = Head(channels, 2, num_classes, num_layers=2)

    def anchors(self, size):
        boxes = []
        for stride in (4, 8, 16):
            at = torch.arange(stride / 2, size, stride)
            yv, xv = torch.meshgrid(at, at, indexing="ij")
            for_level = []
            for scale in (1.0, 1.5):
                half = stride * scale / 2
                box = torch.stack([yv - half, xv - half, yv + half, xv + half], dim=-1)
                for_level.append(box.reshape(-1, 1, 4))
            boxes.append(torch.cat(for_level, dim=1).reshape(-1, 4))
        return torch.cat(boxes).unsqueeze(0)

    def forward(self, imgs):
        x = self.stem(imgs)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        features = self.bifpn(tuple(features))
        regression = self.regressor(features)
        classification = self.classifier(features).sigmoid()
        anchors = self.anchors(imgs.shape[2]).to(regression)
        return regression, classification, anchors


def detections():
    annotations = torch.full((BATCH, 3, 5), -1.0)
    for i in range(BATCH):
        for j in range(i % 3 + 1):
            corner, size = torch.rand(2) * 8, torch.rand(2) * 6 + 2
            annotations[i, j, :4] = torch.cat([corner, corner + size])
            annotations[i, j, 4] = j
    return {"imgs": torch.randn(BATCH, 3, 16, 16), "annotations": annotations}


def overlaps(a, b):
    ih = (torch.min(a[:, None, 2], b[:, 2]) - torch.max(a[:, None, 0], b[:, 0])).clamp(min=0)
    iw = (torch.min(a[:, None, 3], b[:, 3]) - torch.max(a[:, None, 1], b[:, 1])).clamp(min=0)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    ua = ((a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])).unsqueeze(1) + area - iw * ih
    return iw * ih / ua.clamp(min=1e-8)


def focal_loss(out, batch, alpha=0.25, gamma=2.0):
    regressions, classifications, anchors = out
    anchor, total = anchors[0], 0
    heights, widths = anchor[:, 2] - anchor[:, 0], anchor[:, 3] - anchor[:, 1]
    for j in range(len(regressions)):
        scores = torch.clamp(classifications[j], 1e-4, 1.0 - 1e-4)
        boxes = batch["annotations"][j]
        boxes = boxes[boxes[:, 4] != -1]
        iou_max, iou_argmax = torch.max(overlaps(anchor, boxes), dim=1)
        targets = torch.ones_like(scores) * -1
        targets[torch.lt(iou_max, 0.2), :] = 0
        positive = torch.ge(iou_max, 0.3)
        assigned = boxes[iou_argmax]
        targets[positive, :] = 0
        targets[positive, assigned[positive, 4].long()] = 1
        alphas = torch.where(torch.eq(targets, 1.0), alpha, 1.0 - alpha)
        weight = torch.where(torch.eq(targets, 1.0), 1.0 - scores, scores)
        bce = -(targets * torch.log(scores) + (1.0 - targets) * torch.log(1.0 - scores))
        cls = alphas * torch.pow(weight, gamma) * bce
        cls = torch.where(torch.ne(targets, -1.0), cls, torch.zeros_like(cls))
        total = total + cls.sum() / torch.clamp(positive.sum(), min=1.0)
        if positive.sum() > 0:
            assigned = assigned[positive]
            gh, gw = assigned[:, 2] - assigned[:, 0], assigned[:, 3] - assigned[:, 1]
            dy = (assigned[:, 0] + gh / 2 - anchor[positive, 0] - heights[positive] / 2) / heights[
                positive
            ]
            dx = (assigned[:, 1] + gw / 2 - anchor[positive, 1] - widths[positive] / 2) / widths[
                positive
            ]
            dh = torch.log(gh.clamp(min=1) / heights[positive])
            dw = torch.log(gw.clamp(min=1) / widths[positive])
            diff = torch.abs(torch.stack((dy, dx, dh, dw)).t() - regressions[j, positive, :])
            loss = torch.where(diff <= 1.0 / 9.0, 0.5 * 9.0 * diff**2, diff - 0.5 / 9.0)
            total = total + loss.mean()
    return total, count(len(regressions))


# ---- language ------------------------------------------------------------------------------------


class Highway(nn.Module):
    def __init__(self, input_size):
        super().__init__()
        self.fc1 = nn.Linear(input_size, input_size, bias=True)
        self.fc2 = nn.Linear(input_size, input_size, bias=True)
        self.fc1.bias.data.fill_(-2)

    def forward(self, x):
        t = torch.sigmoid(self.fc1(x))
        return torch.mul(t, F.relu(self.fc2(x))) + torch.mul(1 - t, x)


class CharLM(nn.Module):
    """Character-aware language model (Kim et al. 2016), with an adaptive softmax."""

    def __init__(self, n_chars=19, char_dim=4, kernels=((1, 3), (2, 4), (3, 5)), hidden=10):
        super().__init__()
        self.char_embed = nn.Embedding(n_chars, char_dim, padding_idx=0)
        self.kernels = kernels
        for i, (width, out_channel) in enumerate(kernels):
            setattr(
                self,
                f"conv_{i}",
                nn.Conv2d(1, out_channel, kernel_size=(char_dim, width), bias=True),
            )
        self.highway_input_dim = sum(y for x, y in kernels)
        self.batch_norm = nn.BatchNorm1d(self.highway_input_dim, affine=False)
        self.highway1 = Highway(self.highway_input_dim)
        self.highway2 = Highway(self.highway_input_dim)
        self.lstm = nn.LSTM(self.highway_input_dim, hidden, num_layers=2, batch_first=True)
        self.adaptive_softmax = nn.AdaptiveLogSoftmaxWithLoss(
            hidden, 40, cutoffs=[10, 24], div_value=2.0
        )

    def get_conv(self, i):
        return getattr(self, f"conv_{i}")

    def conv_layers(self, x):
        chosen_list = []
        for i in range(len(self.kernels)):
            feature_map = torch.tanh(self.get_conv(i)(x))
            chosen = torch.max(feature_map, 3)[0]
            chosen = chosen.squeeze()
            chosen_list.append(chosen)
        return torch.cat(chosen_list, 1)

    def forward(self, x, target):
        lstm_batch_size = x.size(0)
        lstm_seq_len = x.size(1)
        x = x.contiguous().view(-1, x.size(2))
        x = self.char_embed(x)
        x = torch.transpose(x.view(x.size(0), 1, x.size(1), -1), 2, 3)
        x = self.conv_layers(x)
        x = self.batch_norm(x)
        x = self.highway1(x)
        x = self.highway2(x)
        x = x.contiguous().view(lstm_batch_size, lstm_seq_len, -1)
        x, _ = self.lstm(x)
        return self.adaptive_softmax(x.contiguous().view(-1, x.size(2)), target.view(-1))


def spelled():
    x = torch.randint(1, 19, (BATCH, 5, 6))
    x[:, :, 4:] *= torch.rand(BATCH, 5, 2) > 0.5
    return {"x": x, "target": torch.randint(40, (BATCH, 5))}


def spelled_loss(out, batch):
    return -out.output.sum(), count(out.output.numel())


class DPFP(nn.Module):
    def __init__(self, nu=1):
        super().__init__()
        self.nu = nu

    def forward(self, x):
        x = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
        rolled = torch.cat([x.roll(shifts=j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
        return torch.cat([x] * self.nu, dim=-1) * rolled


class FastWeightLayer(nn.Module):
    """The delta rule (Schlag et al. 2021): a slow net programs the weights of a fast one."""

    def __init__(self, num_head, dim_head, in_dim, dropout=0.1):
        super().__init__()
        self.num_head, self.dim_head = num_head, dim_head
        self.layer_norm = nn.LayerNorm(in_dim)
        self.slow_net = nn.Linear(in_dim, num_head * (3 * dim_head + 1), bias=False)
        self.proj = DPFP()
        self.out_linear = nn.Linear(num_head * dim_head, in_dim, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        bsz, slen, _ = x.size()
        out = self.layer_norm(x)
        qkvb = self.slow_net(out)
        qkvb = qkvb.view(bsz, slen, self.num_head, 3 * self.dim_head + 1)
        head_q, head_k, head_v, head_beta = torch.split(qkvb, (self.dim_head,) * 3 + (1,), -1)
        head_beta = torch.sigmoid(head_beta)
        head_q, head_k = self.proj(head_q), self.proj(head_k)
        head_k = head_k / (head_k.sum(-1, keepdim=True) + 1e-5)
        head_q = head_q / (head_q.sum(-1, keepdim=True) + 1e-5)
        W = torch.zeros(
            bsz, self.num_head, head_k.size(-1), self.dim_head, dtype=x.dtype, device=x.device
        )
        outs = []
        for t in range(slen):
            q, k, v, b = head_q[:, t], head_k[:, t], head_v[:, t], head_beta[:, t]
            v_old = torch.einsum("bhij,bhi->bhj", W, k)
            W = W + torch.einsum("bhi,bhj->bhij", k, b * (v - v_old))
            outs.append(torch.einsum("bhij,bhi->bhj", W, q))
        out = torch.stack(outs, dim=1).reshape(bsz, slen, self.num_head * self.dim_head)
        return x + self.drop(self.out_linear(out))


class TransformerFFlayers(nn.Module):
    def __init__(self, ff_dim, res_dim, dropout):
        super().__init__()
        self.layer_norm = nn.LayerNorm(res_dim)
        self.ff_layers = nn.Sequential(
            nn.Linear(res_dim, ff_dim),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(ff_dim, res_dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.ff_layers(self.layer_norm(x)) + x


@dataclass
class LMOutput:
    logits: torch.Tensor
    hidden_states: tuple | None = None
    loss: torch.Tensor | None = None


class FastWeightLM(nn.Module):
    """A language model of fast weight programmers, whose hooks watch the norms of its layers."""

    def __init__(self, vocab=VOCAB, dim=16, heads=2, layers=2, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.scale = nn.Parameter(torch.tensor(float(dim) ** 0.5))
        stack = []
        for _ in range(layers):
            stack.append(FastWeightLayer(heads, dim // heads, dim, dropout))
            stack.append(TransformerFFlayers(2 * dim, dim, dropout))
        self.layers = nn.Sequential(*stack)
        self.final_norm = nn.LayerNorm(dim)
        self.out_layer = nn.Linear(dim, vocab)
        self.activation_norms = {}
        for name, layer in self.layers.named_children():
            layer.register_forward_hook(partial(self._watch, name))
        self.reset_parameters()

    def _watch(self, name, module, args, output):
        self.activation_norms[name] = output.detach().norm(dim=-1).mean()

    def reset_parameters(self):
        for _, param in self.named_parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)

    def forward(self, input_ids, labels=None, output_hidden_states=True):
        out = self.embedding(input_ids) * self.scale
        hidden = [out]
        for layer in self.layers:
            out = layer(out)
            hidden.append(out)
        logits = self.out_layer(self.final_norm(out))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return LMOutput(logits, tuple(hidden) if output_hidden_states else None, loss)


def language_loss(out, batch):
    labels = batch["labels"][:, 1:].flatten()
    logits = out.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (
        labels != -100
    ).sum()


# ---- search of an architecture -------------------------------------------------------------------


OPS = {
    "none": lambda C, stride, affine: Zero(stride),
    "max_pool_3x3": lambda C, stride, affine: nn.MaxPool2d(3, stride=stride, padding=1),
    "skip_connect": lambda C, stride, affine: (
        Identity() if stride == 1 else FactorizedReduce(C, C, affine=affine)
    ),
    "sep_conv_3x3": lambda C, stride, affine: SepConv(C, C, 3, stride, 1, affine=affine),
    "dil_conv_3x3": lambda C, stride, affine: DilConv(C, C, 3, stride, 2, 2, affine=affine),
}


class ReLUConvBN(nn.Module):
    def __init__(self, C_in, C_out, kernel_size, stride, padding, affine=True):
        super().__init__()
        self.op = nn.Sequential(
            nn.ReLU(inplace=False),
            nn.Conv2d(C_in, C_out, kernel_size, stride=stride, padding=padding, bias=False),
            nn.BatchNorm2d(C_out, affine=affine),
        )

    def forward(self, x):
        return self.op(x)


class DilConv(nn.Module):
    def __init__(self, C_in, C_out, kernel_size, stride, padding, dilation, affine=True):
        super().__init__()
        self.op = nn.Sequential(
            nn.ReLU(inplace=False),
            nn.Conv2d(
                C_in,
                C_in,
                kernel_size=kernel_size,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=C_in,
                bias=False,
            ),
            nn.Conv2d(C_in, C_out, kernel_size=1, padding=0, bias=False),
            nn.BatchNorm2d(C_out, affine=affine),
        )

    def forward(self, x):
        return self.op(x)


class SepConv(nn.Module):
    def __init__(self, C_in, C_out, kernel_size, stride, padding, affine=True):
        super().__init__()
        k, p = kernel_size, padding
        self.op = nn.Sequential(
            nn.ReLU(inplace=False),
            nn.Conv2d(C_in, C_in, k, stride=stride, padding=p, groups=C_in, bias=False),
            nn.Conv2d(C_in, C_in, kernel_size=1, padding=0, bias=False),
            nn.BatchNorm2d(C_in, affine=affine),
            nn.ReLU(inplace=False),
            nn.Conv2d(C_in, C_in, k, stride=1, padding=p, groups=C_in, bias=False),
            nn.Conv2d(C_in, C_out, kernel_size=1, padding=0, bias=False),
            nn.BatchNorm2d(C_out, affine=affine),
        )

    def forward(self, x):
        return self.op(x)


class Identity(nn.Module):
    def forward(self, x):
        return x


class Zero(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.stride = stride

    def forward(self, x):
        if self.stride == 1:
            return x.mul(0.0)
        return x[:, :, :: self.stride, :: self.stride].mul(0.0)


class FactorizedReduce(nn.Module):
    def __init__(self, C_in, C_out, affine=True):
        super().__init__()
        assert C_out % 2 == 0
        self.relu = nn.ReLU(inplace=False)
        self.conv_1 = nn.Conv2d(C_in, C_out // 2, 1, stride=2, padding=0, bias=False)
        self.conv_2 = nn.Conv2d(C_in, C_out // 2, 1, stride=2, padding=0, bias=False)
        self.bn = nn.BatchNorm2d(C_out, affine=affine)

    def forward(self, x):
        x = self.relu(x)
        out = torch.cat([self.conv_1(x), self.conv_2(x[:, :, 1:, 1:])], dim=1)
        return self.bn(out)


class MixedOp(nn.Module):
    def __init__(self, C, stride):
        super().__init__()
        self._ops = nn.ModuleList()
        for primitive in OPS:
            op = OPS[primitive](C, stride, False)
            if "pool" in primitive:
                op = nn.Sequential(op, nn.BatchNorm2d(C, affine=False))
            self._ops.append(op)

    def forward(self, x, weights):
        return sum(w * op(x) for w, op in zip(weights, self._ops, strict=True))


class Cell(nn.Module):
    def __init__(self, steps, multiplier, C_prev_prev, C_prev, C, reduction, reduction_prev):
        super().__init__()
        self.reduction = reduction
        if reduction_prev:
            self.preprocess0 = FactorizedReduce(C_prev_prev, C, affine=False)
        else:
            self.preprocess0 = ReLUConvBN(C_prev_prev, C, 1, 1, 0, affine=False)
        self.preprocess1 = ReLUConvBN(C_prev, C, 1, 1, 0, affine=False)
        self._steps, self._multiplier = steps, multiplier
        self._ops = nn.ModuleList()
        self._bns = nn.ModuleList()
        for i in range(self._steps):
            for j in range(2 + i):
                stride = 2 if reduction and j < 2 else 1
                op = MixedOp(C, stride)
                self._ops.append(op)

    def forward(self, s0, s1, weights):
        s0 = self.preprocess0(s0)
        s1 = self.preprocess1(s1)
        states = [s0, s1]
        offset = 0
        for _ in range(self._steps):
            s = sum(self._ops[offset + j](h, weights[offset + j]) for j, h in enumerate(states))
            offset += len(states)
            states.append(s)
        return torch.cat(states[-self._multiplier :], dim=1)


class SearchNetwork(nn.Module):
    """DARTS while it searches (Liu et al. 2019): all operations, weighted by two shared tables."""

    def __init__(self, C=4, num_classes=5, layers=3, steps=2, multiplier=2, stem_multiplier=2):
        super().__init__()
        self._layers, self._steps, self._multiplier = layers, steps, multiplier
        C_curr = stem_multiplier * C
        self.stem = nn.Sequential(
            nn.Conv2d(3, C_curr, 3, padding=1, bias=False), nn.BatchNorm2d(C_curr)
        )
        C_prev_prev, C_prev, C_curr = C_curr, C_curr, C
        self.cells = nn.ModuleList()
        reduction_prev = False
        for i in range(layers):
            if i in [layers // 3, 2 * layers // 3]:
                C_curr *= 2
                reduction = True
            else:
                reduction = False
            cell = Cell(steps, multiplier, C_prev_prev, C_prev, C_curr, reduction, reduction_prev)
            reduction_prev = reduction
            self.cells += [cell]
            C_prev_prev, C_prev = C_prev, multiplier * C_curr
        self.global_pooling = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(C_prev, num_classes)
        self._initialize_alphas()

    def _initialize_alphas(self):
        k = sum(1 for i in range(self._steps) for n in range(2 + i))
        num_ops = len(OPS)
        self.alphas_normal = nn.Parameter(1e-1 * torch.randn(k, num_ops))
        self.alphas_reduce = nn.Parameter(1e-1 * torch.randn(k, num_ops))
        self._arch_parameters = [self.alphas_normal, self.alphas_reduce]

    def arch_parameters(self):
        return self._arch_parameters

    def forward(self, image):
        s0 = s1 = self.stem(image)
        for _i, cell in enumerate(self.cells):
            if cell.reduction:
                weights = F.softmax(self.alphas_reduce, dim=-1)
            else:
                weights = F.softmax(self.alphas_normal, dim=-1)
            s0, s1 = s1, cell(s0, s1, weights)
        out = self.global_pooling(s1)
        return self.classifier(out.view(out.size(0), -1))


def photos():
    return {"image": torch.randn(BATCH, 3, 8, 8), "label": torch.randint(5, (BATCH,))}


# ---- processes -----------------------------------------------------------------------------------


class DeterministicEncoder(nn.Module):
    def __init__(self, x_dim, y_dim, hidden_dim, n_layers=2, heads=2):
        super().__init__()
        layers = [nn.Linear(x_dim + y_dim, hidden_dim), nn.ReLU()]
        for _ in range(n_layers - 1):
            layers += [nn.Linear(hidden_dim, hidden_dim), nn.ReLU()]
        layers.append(nn.Linear(hidden_dim, hidden_dim))
        self.mlp = nn.Sequential(*layers)
        self._W_k = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(heads)])
        self._W_v = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(heads)])
        self._W_q = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(heads)])
        self._W = nn.Linear(heads * hidden_dim, hidden_dim)
        self.k_proj, self.q_proj = nn.Linear(x_dim, hidden_dim), nn.Linear(x_dim, hidden_dim)
        self.n_heads = heads

    def forward(self, context_x, context_y, target_x):
        v = self.mlp(torch.cat([context_x, context_y], dim=-1))
        k, q = self.k_proj(context_x), self.q_proj(target_x)
        outs = []
        for i in range(self.n_heads):
            k_, v_, q_ = self._W_k[i](k), self._W_v[i](v), self._W_q[i](q)
            weights = torch.softmax(torch.einsum("bik,bjk->bij", q_, k_) / k.shape[-1] ** 0.5, -1)
            outs.append(torch.einsum("bij,bjk->bik", weights, v_))
        outs = torch.stack(outs, dim=-1)
        outs = outs.view(outs.shape[0], outs.shape[1], -1)
        return self._W(outs)


class LatentEncoder(nn.Module):
    def __init__(self, x_dim, y_dim, hidden_dim, latent_dim, min_std=0.01):
        super().__init__()
        self._encoder = nn.Sequential(
            nn.Linear(x_dim + y_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)
        )
        self._penultimate_layer = nn.Linear(hidden_dim, hidden_dim)
        self._mean = nn.Linear(hidden_dim, latent_dim)
        self._log_var = nn.Linear(hidden_dim, latent_dim)
        self.min_std = min_std

    def forward(self, x, y):
        encoded = self._encoder(torch.cat([x, y], dim=-1))
        mean_repr = torch.relu(self._penultimate_layer(encoded.mean(dim=1)))
        mean = self._mean(mean_repr)
        sigma = self.min_std + (1 - self.min_std) * torch.sigmoid(self._log_var(mean_repr) * 0.5)
        return torch.distributions.Normal(mean, sigma)


class NeuralProcess(nn.Module):
    """Attentive neural process (Kim et al. 2019), after wassname's repository."""

    def __init__(self, x_dim=1, y_dim=1, hidden_dim=8, latent_dim=6):
        super().__init__()
        self._latent_encoder = LatentEncoder(x_dim, y_dim, hidden_dim, latent_dim)
        self._deterministic_encoder = DeterministicEncoder(x_dim, y_dim, hidden_dim)
        self._target_transform = nn.Linear(x_dim, hidden_dim)
        self._decoder = nn.Sequential(
            nn.Linear(2 * hidden_dim + latent_dim, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()
        )
        self._mean, self._std = nn.Linear(12, y_dim), nn.Linear(12, y_dim)

    def forward(self, context_x, context_y, target_x, target_y=None):
        num_targets = target_x.size(1)
        dist_prior = self._latent_encoder(context_x, context_y)
        if target_y is not None:
            dist_post = self._latent_encoder(target_x, target_y)
            z = dist_post.rsample() if self.training else dist_post.loc
        else:
            z = dist_prior.loc
        z = z.unsqueeze(1).repeat(1, num_targets, 1)
        r = self._deterministic_encoder(context_x, context_y, target_x)
        hidden = self._decoder(torch.cat([r, z, self._target_transform(target_x)], dim=-1))
        sigma = 0.1 + 0.9 * F.softplus(self._std(hidden))
        dist = torch.distributions.Normal(self._mean(hidden), sigma)
        if target_y is None:
            return dist.rsample(), None, None
        log_p = dist.log_prob(target_y).mean(-1)
        kl = torch.distributions.kl_divergence(dist_post, dist_prior).mean(-1)
        return dist.loc, log_p, kl


def functions():
    x, phase = torch.rand(BATCH, 9, 1) * 4 - 2, torch.rand(BATCH, 1, 1) * 3
    y = torch.sin(2 * x + phase)
    return {
        "context_x": x[:, :4],
        "context_y": y[:, :4],
        "target_x": x,
        "target_y": y,
    }


def evidence(out, batch):
    _, log_p, kl = out
    return (kl[:, None] - log_p).mean(1).sum(), count(len(kl))


# their samples meet in training: one chooses its delays by the mean of the batch, the other makes a
# batch norm in its forward
AUTOFORMER = Subject(Autoformer, loads, forecast_error, plan=())
DIFF_POOL = Subject(SoftPoolingGcnEncoder, graphs, pool_loss, plan=())
LABORATORIES: dict[str, Subject] = {
    "unet-plus-plus": Subject(NestedUNet, cells, bce_dice),
    "burgers": Subject(BurgersPINN, shocks, physics),
    "deep-interest": Subject(DeepInterestNetwork, histories, click),
    "impala": Subject(AtariNet, rollouts, vtrace_loss),
    "rainbow": Subject(Rainbow, replays, weighted),
    "vector-perceptrons": Subject(GVPModel, proteins, regression),
    "meta-sgd": Subject(MetaSGD, sinusoids, forecast_error),
    "audio-codec": Subject(DAC, waveforms, codec_loss),
    "pix-to-pix": Subject(Pix2Pix, pairs_of_images, gan_loss),
    "weather": Subject(AFNONet, weather, latitude_weighted),
    "efficient-det": Subject(EfficientDet, detections, focal_loss),
    "char-words": Subject(CharLM, spelled, spelled_loss),
    "fast-weights": Subject(FastWeightLM, tokens, language_loss),
    "darts": Subject(SearchNetwork, photos, classification),
    "neural-process": Subject(NeuralProcess, functions, evidence),
}
