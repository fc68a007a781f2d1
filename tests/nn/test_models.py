from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import weft.nn.models
from weft.nn.models import convnet, decoder
from weft.nn.models.decoder import rotary_table, rotate

SMALL = {"vocab": 37, "dim": 32, "layers": 2, "heads": 4, "seq_len": 16}


def build(**options):
    torch.manual_seed(0)
    return decoder(**{**SMALL, **options}).double()


def ids(length=12):
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(1))


def test_a_model_is_a_file_that_a_user_could_have_written():
    for path in Path(weft.nn.models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
                inside = (2, "attention_masks"), (2, "moe_routing"), (1, "moe")
                outside = "__future__", "collections", "typing", "torch"
                root = (node.module or "").split(".")[0]
                assert (node.level, node.module) in inside or (not node.level and root in outside)
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] == "torch" for alias in node.names)


@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied": True}, {"hidden": 48}]
)
def test_logits_depend_on_the_past_only(options):
    model, tokens = build(**options), ids()
    logits = model(tokens)
    assert logits.shape == (2, 12, 37) and logits.dtype == torch.float64
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 37
    difference = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert (difference[:6] == 0).all() and (difference[6:] > 1e-9).all()


def test_every_parameter_takes_part():
    model = build(kv_heads=2)
    F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_grouped_attention_is_attention_with_repeated_heads():
    grouped, full = build(kv_heads=2), build()
    state = grouped.state_dict()
    for name in state:
        if name.endswith(
            ("wk.weight", "wv.weight")
        ):  # heads are rows of 8; each kv head serves two neighbours
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(ids()), full(ids()), rtol=1e-12, atol=1e-14)


def test_attention_works_on_a_part_of_its_heads():
    """Tensor parallelism gives each rank some heads: outputs of the parts then add up to the
    whole."""
    attention, x = build(kv_heads=2).blocks[0].attention, torch.randn(2, 5, 32, dtype=torch.float64)
    table = rotary_table(5, attention.head_dim, 1e4, x)
    whole, weights = attention(x, table), {n: p.detach() for n, p in attention.named_parameters()}
    parts = []
    for rank in range(2):
        local = {n: p.chunk(2, dim=1 if n == "wo.weight" else 0)[rank] for n, p in weights.items()}
        parts.append(torch.func.functional_call(attention, local, (x, table)))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-14)


def test_rotary_embedding_knows_only_distances():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 9, 8)
    table = rotary_table(9, 8, 100.0, q)
    scores = (rotate(q, table) @ rotate(k, table).mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-12, atol=1e-13)
    assert (scores[0, 0] - scores[0, 1]).abs() > 1e-3
    torch.testing.assert_close(rotate(q, table).norm(dim=-1), q.norm(dim=-1))
    assert rotate(q.bfloat16(), table).dtype == torch.bfloat16


def test_tied_weights_are_one_parameter():
    tied, untied = build(tied=True), build()
    assert tied.head.weight is tied.embedding.weight
    assert (
        sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        == 37 * 32
    )


def test_initialisation():
    def values(seed, **options):
        torch.manual_seed(seed)
        return decoder(dim=64, layers=8, vocab=300, **options).state_dict()

    first, again, other = values(3), values(3), values(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    for name, weight in first.items():
        if "norm" in name:
            assert (weight == 1).all()
        else:
            std = 0.02 / 4 if "attention.wo" in name or "mlp.down" in name else 0.02
            assert abs(weight.std().item() / std - 1) < 0.1, name
    assert not any("rope" in name or "cos" in name for name in first)


@pytest.mark.parametrize("tied", [False, True])
def test_equal_to_the_llama_of_transformers(tied):
    transformers = pytest.importorskip("transformers")
    model = build(kv_heads=2, hidden=48, tied=tied)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
    )
    llama = transformers.LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # weights of size 0.02 would hide much
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)
    ours = {
        "blocks.": "model.layers.",
        ".attention.w": ".self_attn.",
        ".attention_norm.": ".input_layernorm.",
        ".mlp_norm.": ".post_attention_layernorm.",
        "embedding.": "model.embed_tokens.",
        "head.": "lm_head.",
        "mlp.gate.": "mlp.gate_proj.",
        "mlp.up.": "mlp.up_proj.",
        "mlp.down.": "mlp.down_proj.",
        **{f"self_attn.{w}.": f"self_attn.{w}_proj." for w in "qkvo"},
    }
    state = {}
    for name, tensor in model.state_dict().items():
        for old, new in ours.items():
            name = name.replace(old, new)
        state["model.norm.weight" if name == "norm.weight" else name] = tensor
    llama.load_state_dict(state)
    # transformers keeps its rotary table in float32.
    torch.testing.assert_close(model(ids()), llama(ids()).logits, rtol=1e-5, atol=1e-5)


def test_dropout_stands_on_every_branch_and_the_embedding():
    model, tokens = build(dropout=0.5), ids()
    for block in model.blocks:
        block.dropout.p = 1.0
    model.dropout.p = 0.0
    assert torch.equal(model(tokens), model.head(model.norm(model.embedding(tokens))))
    model.dropout.p = 1.0
    assert (model(tokens) == 0).all()


def test_dropout_acts_in_training_only():
    model = build(dropout=0.5)
    plain = build()
    assert not torch.equal(model(ids()), plain(ids()))
    torch.testing.assert_close(model.eval()(ids()), plain(ids()), rtol=0, atol=0)


def test_what_cannot_be_built_or_fed():
    with pytest.raises(ValueError, match=r"dim = 36 must be a multiple of 2 \* heads = 8"):
        build(dim=36)
    with pytest.raises(ValueError, match="heads = 4 must be a multiple of kv_heads = 3"):
        build(kv_heads=3)
    with pytest.raises(ValueError, match="17 tokens are more than seq_len = 16"):
        build()(ids(17))


def test_decoder_learns():
    model, tokens = build(), ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("in_channels", [1, 3, 4])
def test_convnet(in_channels):
    torch.manual_seed(0)
    model = convnet(channels=4, classes=5, in_channels=in_channels).double()
    x = torch.randn(6, in_channels, 16, 12, dtype=torch.float64)
    logits = model(x)
    assert logits.shape == (6, 5)
    # Batch norm: in training the samples see each other, in evaluation they do not.
    alone = model.eval()(x[:2])
    torch.testing.assert_close(model(x)[:2], alone)
    model.train()
    assert (model(x[:2]) - logits[:2]).abs().max() > 1e-3
    assert [stage[0].stride[0] for stage in model.stages] == [1, 2, 2]
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
