"""Models as people write them (`nets*.py`), on every axis: equal to one device, or refused before
the first update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import weft
from tests.cases import Subject, reference, seeded
from tests.verification.nets import NETS as FIRST
from tests.verification.nets_in_place import IN_PLACE
from tests.verification.nets_of_architectures import ARCHITECTURES
from tests.verification.nets_of_edges import EDGES
from tests.verification.nets_of_families import FAMILIES
from tests.verification.nets_of_github import GITHUB, NYSTROM
from tests.verification.nets_of_laboratories import AUTOFORMER, DIFF_POOL, LABORATORIES
from tests.verification.nets_of_layers_in_parts import LAYERS_IN_PARTS
from tests.verification.nets_of_papers import PAPERS
from tests.verification.nets_of_practice import PRACTICE, SAINT_NET, TIMES_NET
from tests.verification.nets_of_public_code import PUBLIC_CODE
from tests.verification.nets_of_repositories import REPOSITORIES
from tests.verification.nets_of_research import RESEARCH
from tests.verification.nets_of_the_web import WEB
from tests.verification.nets_of_tutorials import TUTORIALS
from tests.verification.nets_of_visitors import VISITORS
from tests.verification.nets_that_recompute import THAT_RECOMPUTE
from tests.verification.nets_with_gradients import WITH_GRADIENTS
from tests.verification.nets_with_quirks import QUIRKS
from weft.core.errors import Refusal
from weft.verification.compare import check_layout
from weft.verification.mixing import mixed_samples

NETS = FIRST | PAPERS | QUIRKS | FAMILIES | TUTORIALS | REPOSITORIES | ARCHITECTURES | EDGES | WEB
NETS |= LAYERS_IN_PARTS | PUBLIC_CODE | GITHUB | PRACTICE | VISITORS | LABORATORIES
NETS |= WITH_GRADIENTS | RESEARCH | IN_PLACE | THAT_RECOMPUTE
LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "dp2.tp2")
TP = ("tp2", "dp2.tp2")
SAMPLES = ("dp2", "fsdp2", "dp2.tp2")  # ranks have other samples
NOTHING_TO_CUT = (  # weights in no linear or convolution, or that something else reads
    "zero-experts",  # the tokens decide whether gradients come to its gates
    "multi-period",
    "kan",
    "bayes",
    "dino",
    "flow-matching",
    "audio-codec",
)
REFUSED: dict[tuple[str, str], str] = {
    **{(name, at): "finds no attention" for name in NOTHING_TO_CUT for at in TP},
    # which of the two, the tokens of the sample decide
    (
        "loop-experts",
        "pp2",
    ): "is sent between stages, and was int64|follows from elements of another",
    ("max-norm", "dp2"): "embedding.weight is changed by the model's forward, and ranks",
    ("max-norm", "fsdp2"): "embedding.weight is changed by the model's forward, and fsdp",
    **{("max-norm", at): "need the whole table" for at in TP},
    **{("running-mean", at): "mean is changed by the model's forward, and" for at in SAMPLES},
    **{("reassigned", at): "mean is changed by the model's forward, and" for at in SAMPLES},
    ("clamped", "fsdp2"): "first.weight is changed by the model's forward, and fsdp",
    **{
        (f"{kind}-dropout", at): "draws random numbers by a function of torch"
        for kind in ("lstm", "gru")
        for at in LAYOUTS
    },
    ("siamese", "pp2"): "the model has only one module at which",
    ("pixel-cnn", "fsdp2"): "net.0.weight is changed by the model's forward, and fsdp",
    ("byol", "fsdp2"): "target.0.weight is changed by the model's forward, and fsdp",
    **{("glow", at): "flows.0.* is changed by the model's forward, and" for at in SAMPLES},
    ("glow", "dp2"): "flows.0.initialized is changed by the model's forward, as",
    ("glow", "dp2.tp2"): "flows.0.initialized is changed by the model's forward, as",
    ("root-experts", "pp2"): "into Python: `if rows.any",
    **{("meta-sgd", at): "does not run: The size of tensor a" for at in TP},  # rates per weight
    ("burgers", "pp2"): "the model has only one module at which",
    ("meta-sgd", "pp2"): "the model has only one module at which",
    ("neural-process", "pp2"): "Give the distribution validate_args=False",
    ("rainbow", "pp2"): "the forward of another microbatch has changed in place since",
    **{
        (name, "pp2"): "asks for a gradient through modules of several stages"
        for name in ("hamiltonian", "kdv", "forces")
    },
    ("preactivated", "fsdp2"): "blocks.0 changes in place what enters it",
    ("checkpointed-gradient", "pp2"): "the forward took another path",
    ("critic", "pp2"): "the model has only one module at which",
    ("stochastic-depth", "pp2"): "into Python",
    **{("lazy", at): "no shape before the first forward" for at in LAYOUTS},
    **{("made-later", at): "is made by the first forward" for at in LAYOUTS},
    **{("frozen", at): "none of its parameters is trainable" for at in LAYOUTS},
    ("checkpointed-conv", "pp2"): "backward changes it again, and a pipeline runs backward",
    **{("checkpointed-reentrant", at): "Pass use_reentrant=False" for at in LAYOUTS},
    **{("checkpointed-twice", at): "is inside of another one under it" for at in LAYOUTS},
    **{("dropped-edges", at): "its shape follows from the data, as of edges" for at in LAYOUTS},
    **{("checkpointed-hooks", at): "with hooks of saved tensors inside" for at in LAYOUTS},
    **{("trimmed", at): "its shape follows from the data, as of edges" for at in LAYOUTS},
    ("transformer-xl", "pp2"): "the model has only one module at which",
    ("chosen-rows", "pp2"): "is sent between stages, and was float64.* with gradient before",
    ("implicit", "pp2"): "is another stage.s, and .* does not run without it",
    ("task-hyper", "pp2"): "is another stage.s, and .* does not run without it",
    ("swish", "pp2"): "made by something that is no PyTorch function",
    ("packed", "pp2"): r"packed = pack_padded_sequence.* and was int64",
    **{
        ("scripted", at): "is compiled by torch.jit, so weft can neither add hooks"
        for at in LAYOUTS
    },
    **{("sparse-graph", at): "is a sparse tensor" for at in LAYOUTS},
    **{("tabnet", at): "normalizes the 8 samples .* Set it to 2" for at in SAMPLES},
    ("tree-lstm", "pp2"): "the forward took another path",
    ("nerf", "pp2"): "the model has only one module at which",
    ("spiking", "pp2"): "the model has only one module at which",
    ("deep-speech", "pp2"): "its shape, asked for at .*, follows from elements of another stage",
    **{("dino", at): "center is changed by the model's forward, and ranks" for at in SAMPLES[:2]},
    ("dino", "pp2"): "the weight teacher.* is changed by the forward, and stages 0 and 1 use it",
    # what the averages begin as shows no change before the first update
    ("sac", "fsdp2"): "qf1_target.0.weight is changed by the model's forward, and fsdp drops",
    ("sac", "pp2"): r"reads `normal = torch.distributions.Normal.* into Python",
    **{("schnet", at): r'Leave it whole: write "interactions' for at in TP},
    ("turing-machine", "pp2"): "the model has only one module at which",
    **{("takes-dict", at): "is called with batch, and a sample holds x, target" for at in LAYOUTS},
}


def result(pool: Any, name: str, layout: str) -> Any:
    case, world = NETS[name].case(), weft.Layout.parse(layout).world
    case.lay(seeded(NETS[name].build), layout)
    return pool.run(check_layout, case, layout, reference(NETS[name]), world=world, timeout=60)[0]


@pytest.mark.grid(24, ci=24)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETS)
def test_equal_or_refused(pool: Any, name: str, layout: str) -> None:
    reason = REFUSED.get((name, layout))
    if reason is not None:
        with pytest.raises(Refusal, match=reason):
            result(pool, name, layout)
        return
    found = result(pool, name, layout)
    assert found.passed, found


@pytest.mark.parametrize(
    ("net", "module"),
    [
        pytest.param(NYSTROM, "layers.0.0.fn.to_out", id="nystrom"),  # by a small amount
        pytest.param(TIMES_NET, "model.0", id="times-net"),
        pytest.param(SAINT_NET, "layers.0.4.W_out", id="saint"),
        pytest.param(DIFF_POOL, "conv_block.0", id="diff-pool"),
        # in training alone
        pytest.param(AUTOFORMER, "encoder.0.attention.inner_correlation", id="autoformer"),
    ],
)
def test_a_mixing_of_samples_is_refused(net: Subject, module: str) -> None:
    found = mixed_samples(net.case(), "dp")
    assert found is not None
    assert f"the output of {module} for a sample depends on the other" in str(found)


@pytest.mark.parametrize(
    ("net", "layout"),
    [
        pytest.param(TIMES_NET, "pp2", id="times-net"),
        pytest.param(SAINT_NET, "tp2", id="saint"),
        pytest.param(AUTOFORMER, "tp2", id="autoformer"),
        pytest.param(DIFF_POOL, "tp2", id="diff-pool"),
    ],
)
def test_samples_mix_where_nothing_divides_them(pool: Any, net: Subject, layout: str) -> None:
    found = pool.run(check_layout, net.case(), layout, reference(net), world=2, timeout=60)[0]
    assert found.passed, found


@pytest.mark.parametrize("name", ["dlrm", "capsules"])
def test_stages_part_no_chain_that_ranks_divide(pool: Any, name: str) -> None:
    found = result(pool, name, "pp2.tp2")
    assert found.passed, found


@pytest.mark.parametrize(("name", "layout"), [("forces", "tp2"), ("critic", "fsdp2.tp2")])
def test_gradients_that_the_forward_asks_for_recompute(pool: Any, name: str, layout: str) -> None:
    net = replace(NETS[name], plan=(("accumulate", 4), ("recompute", "full")))
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, net.case(), layout, reference(net), world=world, timeout=60)[0]
    assert found.passed, found


@pytest.mark.parametrize("layout", ["pp2.fsdp2", "pp2.fsdp2+zero2"])
def test_a_stage_asks_for_a_gradient(pool: Any, layout: str) -> None:
    found = result(pool, "readout", layout)
    assert found.passed, found


def test_a_shape_of_the_data_is_known_before_a_microbatch_differs(pool: Any) -> None:
    net = replace(NETS["trimmed"], plan=())
    with pytest.raises(Refusal, match="its shape follows from the data"):
        pool.run(check_layout, net.case(), "dp2", reference(net), world=2, timeout=60)


def test_a_stage_reads_weights_that_only_another_one_learns(pool: Any) -> None:
    """Its shards have no gradient of their own, and get that of the other stage."""
    found = result(pool, "flow-matching", "pp2.fsdp2")
    assert found.first is None and found.problem is None
    assert max(found.loss_rel_err, found.grad_rel_err, found.param_rel_err) < 1e-9


@pytest.mark.parametrize("name", ["checkpointed-pairs", "checkpointed-gradient"])
def test_a_checkpoint_changes_no_number(pool: Any, name: str) -> None:
    """Nor in the one-device run, which repeats draws by the same rule."""
    bare = replace(NETS[name], build=partial(NETS[name].build, again=False))
    case = NETS[name].case()
    found = pool.run(check_layout, case, "dp2", reference(bare), world=2, timeout=60)[0]
    assert max(found.loss_rel_err, found.grad_rel_err, found.param_rel_err) < 1e-9, found


@pytest.mark.parametrize("name", ["linears-in-list", "linears-at-root", "attention-at-root"])
def test_stages_begin_between_chains_of_one_module(pool: Any, name: str) -> None:
    found = result(pool, name, "pp2.tp2")
    assert found.passed, found


def test_a_unit_that_keeps_a_tensor_is_not_for_every_stage() -> None:
    net = NETS["gshard"]
    with pytest.raises(Refusal, match=r"moes.0 keeps a tensor .* one unit of sharding"):
        net.case().lay(seeded(net.build), "pp2.fsdp2")


def test_what_needs_all_its_parameters_is_not_advised_to_be_cut() -> None:
    net = NETS["qat"]
    with pytest.raises(Refusal, match=r"needs all its parameters.*Use dp or fsdp\.$"):
        net.case().lay(seeded(net.build), "tp7")  # which divides no features
