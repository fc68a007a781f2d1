"""What refusals advise, followed: the layout is then equal to one device.

What the user writes under [roles] is taken from the text of the refusal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Subject, reference, seeded, tokens
from tests.verification import nets_advised as advised
from tests.verification.nets import NETS, FrozenBackbone, Lazy, MadeLater, features, mse
from tests.verification.nets_advised import of_family
from tests.verification.nets_of_architectures import ARCHITECTURES
from tests.verification.nets_of_families import FAMILIES
from tests.verification.nets_of_github import GITHUB
from tests.verification.nets_of_papers import PAPERS
from tests.verification.nets_of_practice import PRACTICE
from tests.verification.nets_of_repositories import REPOSITORIES
from tests.verification.nets_with_quirks import QUIRKS
from weft.core.errors import Refusal
from weft.engine import Engine
from weft.losses import cross_entropy, next_token, positionwise
from weft.models import decoder
from weft.parallel import DATA_AXES
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult

NET = NETS | PAPERS | QUIRKS | FAMILIES

Follow = Callable[[Subject, str], Subject]  # the model, and what a refusal says -> the model after


@dataclass(frozen=True)
class Advice:
    """`says`: what the refusal of this layout says to do, a pattern. `then`: by layout what the
    user does to run on it."""

    subject: Subject
    layout: str
    says: str
    then: Mapping[str, Follow]


def result(pool: Any, subject: Subject, layout: str) -> LayoutResult:
    case = subject.case()
    case.lay(seeded(subject.build), layout)
    # what one device has nothing of, and cannot be hashed
    plain = tuple((key, value) for key, value in subject.plan if key not in ("roles", "cut"))
    whole, world = reference(replace(subject, plan=plain)), weft.Layout.parse(layout).world
    found: LayoutResult = pool.run(check_layout, case, layout, whole, world=world, timeout=120)[0]
    # weft verify says what differs; training refuses it, and refuses nothing that is equal
    pool.run(first_step, case, layout, world=world, timeout=120)
    return found


def first_step(case: Case, layout: str) -> None:
    """The first step of training, which tries before whether the layout changes what is computed.
    Raises Refusal."""
    model = case.model()
    plan = case.lay(model, layout)
    how = {"optimizer": case.optimizer, "loss": case.loss, "inputs": case.inputs}
    sample = {key: value[:2] for key, value in case.whole_batch_of(0).items()}
    engine = Engine(model, plan, seed=case.seed, device="cpu", sample=sample, **how)
    with case.mode():
        engine.step(case.batch_of(0, engine.mesh.index(*DATA_AXES), plan.data_size))


# ---- what users do -------------------------------------------------------------------------------


def as_it_is(subject: Subject, text: str) -> Subject:
    return subject


def built_by(build: Callable[[], nn.Module]) -> Follow:
    return lambda subject, text: replace(subject, build=build)


def planned(**arguments: Any) -> Follow:
    return lambda subject, text: replace(subject, plan=(*subject.plan, *arguments.items()))


def written(subject: Subject, text: str) -> Subject:
    """With the lines of [roles] that the refusal gives."""
    lines = dict(re.findall(r'"([^"]+)" = "(\w+)"', text))
    assert lines, text
    plan = {**dict(subject.plan)}
    return replace(
        subject, plan=tuple({**plan, "roles": {**plan.get("roles", {}), **lines}}.items())
    )


def written_instead(subject: Subject, text: str) -> Subject:
    """With the lines of [roles] that the refusal gives, and no others."""
    plan = {key: value for key, value in subject.plan if key != "roles"}
    return written(replace(subject, plan=tuple(plan.items())), text)


def on(*layouts: str) -> dict[str, Follow]:
    return dict.fromkeys(layouts, as_it_is)


def unmarked(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return cross_entropy(output, batch["labels"])


@positionwise
def marked(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return cross_entropy(output, batch["labels"])


def token_net(build: Callable[[], nn.Module], **plan: Any) -> Subject:
    return Subject(build, tokens, next_token, tuple({"accumulate": 2, **plan}.items()))


def by_mask(by: str) -> Callable[[], nn.Module]:
    return partial(advised.Blocks, partial(advised.Attention, by))


def by_kind(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return partial(advised.Blocks, kind)


once = partial(advised.ran_once, data=features)
LAYERS = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)

ADVICE: dict[str, Advice] = {
    # of what a model is
    "lazy": Advice(
        NET["lazy"],
        "dp2",
        "Run the model once on a batch in the function that builds it",
        dict.fromkeys(("dp2", "pp2"), built_by(partial(once, Lazy))),
    ),
    "made-later": Advice(
        NET["made-later"],
        "pp2",
        "Make it in __init__, or run the model once in the function that builds it",
        dict.fromkeys(("fsdp2", "pp2", "tp2"), built_by(partial(once, MadeLater))),
    ),
    "frozen": Advice(
        NET["frozen"],
        "dp2",
        "Set requires_grad on those that are to be trained",
        {"dp2": built_by(FrozenBackbone)},
    ),
    "takes-dict": Advice(
        NET["takes-dict"],
        "dp2",
        "Rename that entry of the dataset or parameter of forward; known: target, x",
        {"dp2": built_by(advised.TakesEntry)},
    ),
    # of what its forward changes and draws
    "running-mean": Advice(
        NET["running-mean"],
        "dp2",
        r"Change it outside of the forward, keep .* or use a layout of tp or pp alone\.$",
        {
            **on("tp2", "pp2"),
            "dp2": built_by(advised.BatchNormed),
            "fsdp2": built_by(advised.TakesEntry),
        },
    ),
    "clamped": Advice(NET["clamped"], "fsdp2", "leave fsdp out of the layout", on("dp2", "pp2")),
    "carried": Advice(
        Subject(partial(advised.Carries, "after"), features, mse),
        "fsdp2",
        r"blocks\.1 makes a tensor after .* Return that tensor too, or make it before what",
        {
            "fsdp2": built_by(partial(advised.Carries, "before")),
            "fsdp2.tp1": built_by(partial(advised.Carries, "returned")),
            **on("dp2"),
        },
    ),
    "ghost-norm": Advice(
        GITHUB["tabnet"],
        "dp2",
        "accumulate = 1: .* Set it to 2, where .* normalizes a microbatch at once",
        {"dp2": planned(accumulate=2), **on("pp2")},
    ),
    "lstm-dropout": Advice(
        NET["lstm-dropout"],
        "dp2",
        "drop out by nn.Dropout: between layers",
        dict.fromkeys(("dp2", "pp2"), built_by(advised.DropsBetween)),
    ),
    "other-dropout": Advice(
        Subject(partial(advised.DropsFeatures, True), features, mse),
        "dp2",
        "Use nn.Dropout",
        {"dp2": built_by(partial(advised.DropsFeatures, False))},
    ),
    "noise-of-rows": Advice(
        Subject(partial(advised.Noise, 2), features, mse),
        "dp2",
        "of an activation, as by torch.rand_like, or take another number of samples for each rank",
        {
            "fsdp2": built_by(partial(advised.Noise, 0)),
            "dp2": lambda subject, text: replace(subject, plan=(("accumulate", 1),)),
        },
    ),
    "layer-drop": Advice(
        token_net(partial(advised.DropsLayers, 0.01)),
        "dp2",
        "what runs depends on them. .* set to zero the chance .*, as layerdrop in the config",
        dict.fromkeys(
            ("dp2", "fsdp2", "tp2", "pp2", "cp2"), built_by(partial(advised.DropsLayers, 0.0))
        ),
    ),
    "jitter": Advice(
        Subject(partial(advised.Jitters, 1e-6), features, mse),
        "dp2",
        "by Python's or numpy's generator, which",
        dict.fromkeys(("dp2", "tp2"), built_by(partial(advised.Jitters, 0.0))),
    ),
    "checkpointed": Advice(
        token_net(partial(advised.Checkpointed, True)),
        "dp2",
        'Leave that out and set train.recompute = "full"',
        {
            "dp2": lambda subject, text: planned(recompute="full")(
                replace(subject, build=partial(advised.Checkpointed, False)), text
            )
        },
    ),
    # tp
    "nothing-to-cut": Advice(NET["unet"], "tp3", r"Use dp or fsdp\.$", on("dp2", "fsdp2")),
    "changes-weights": Advice(ARCHITECTURES["pixel-cnn"], "tp3", r"Use dp\.$", on("dp2", "pp2")),
    "guessed": Advice(
        PRACTICE["schnet"], "tp2", r'Leave it whole: write "interactions', {"tp2": written}
    ),
    "max-norm": Advice(
        NET["max-norm"],
        "tp2",
        r'^roles\.embedding = .*Declare it "whole" in \[roles\]',
        {"tp2": planned(roles={"embedding": "whole"})},
    ),
    "hamiltonian": Advice(NET["hamiltonian"], "tp2", "Use dp or fsdp", on("dp2", "fsdp2")),
    "second-gradient": Advice(
        token_net(
            advised.Conditioned, roles={"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
        ),
        "tp2",
        r'Write "blocks\.\*\.mlp" = "whole" under \[roles\], and no line .*, or use dp or fsdp',
        {"tp2": written_instead, **on("fsdp2")},
    ),
    "byol": Advice(
        NET["byol"],
        "fsdp2",
        "Change it outside of the forward",
        {"fsdp2": built_by(advised.UpdatedOutside)},
    ),
    # pp
    "siamese": Advice(NET["siamese"], "pp2", "Use dp or fsdp", on("dp2", "fsdp2")),
    "root-experts": Advice(
        NET["root-experts"],
        "pp2",
        "Read it inside of a module that is not cut",
        {
            "pp2": lambda subject, text: planned(cut=("head",))(
                replace(subject, build=advised.ReadsInside), text
            )
        },
    ),
    "loop-experts": Advice(
        NET["loop-experts"],
        "pp2",
        "[cC]ut before it is made",  # the tokens decide which of two refusals it is
        {"pp2": planned(cut=("gate",))},
    ),
    # cp
    "positionwise": Advice(
        replace(token_net(LAYERS), loss=unmarked),
        "cp2",
        "Mark it with @weft.losses.positionwise if it is one, or use weft.losses.next_token",
        {
            "cp2": lambda subject, text: replace(subject, loss=marked),
            "cp2+gather": lambda subject, text: replace(subject, loss=next_token),
        },
    ),
    "own-mask": Advice(
        token_net(by_mask("own")),
        "ulysses2",
        r"Use cp\+ring or cp\+gather in place of",
        {
            **on("cp2", "cp2+gather"),
            "ulysses2": built_by(by_mask("causal")),
        },
    ),
    # ep
    "experts": Advice(
        NET["all-tokens"],
        "ep2",
        "Use dp, fsdp or pp: ep takes modules with num_experts, called with .tokens, experts, weig",
        {**on("dp2", "fsdp2", "pp2"), "ep2": built_by(partial(LAYERS, experts=4, hidden=24))},
    ),
}

NO_EXPERTS = "is not taken for experts:"
OF_FAMILIES: dict[str, Advice] = {
    "big_bird": Advice(
        of_family("big_bird"),
        "tp2",
        "Make it in __init__, or run the model once in the function that builds it",
        dict.fromkeys(("tp2", "dp2", "pp2"), built_by(advised.big_bird)),
    ),
    "resnet": Advice(
        of_family("resnet", "image-classification"),
        "tp2",
        r"Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "levit": Advice(  # a batch norm stands after each linear
        of_family("levit", "image-classification"),
        "tp2",
        r"in this model: in its .* stay separate .* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "vit": Advice(
        of_family("vit", "image-classification"),
        "cp2",
        r"have no sequence, .*pixel_values \[2, 3, 32, 32\].* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "bert": Advice(
        of_family("bert", "sequence-classification"),
        "cp2",
        r"whole samples \(labels \[2\]: no target for each of 16 positions\).* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "ibert": Advice(
        of_family("ibert", "masked-lm"),
        "tp2",
        r"Use dp or fsdp, after changing outside of the forward what .* \(.*x_min, x_max",
        dict.fromkeys(("dp2", "fsdp2"), built_by(advised.ibert)),
    ),
    "ibert-state": Advice(  # tp finds nothing to cut in it, and stages would share its buffers
        of_family("ibert", "masked-lm"),
        "dp2",
        r"Change it outside of the forward or keep statistics in nn\.BatchNorm\.$",
        dict.fromkeys(("dp2", "fsdp2"), built_by(advised.ibert)),
    ),
    "doge": Advice(
        of_family("doge"), "cp2", "Use dp or fsdp, or write .* under", {"cp2": written, **on("dp2")}
    ),
    "xlm": Advice(
        of_family("xlm"),
        "cp2",
        'Declare them "whole_sequence" under .* or use dp or fsdp',
        {"cp2": planned(roles={"transformer.attentions.*": "whole_sequence"}), **on("fsdp2")},
    ),
    "llava": Advice(
        of_family("llava", "image-text-to-text"),
        "cp2",
        r"attention of \[.*\], which is not \[samples.* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    **{
        name: Advice(
            of_family(name, "image-text-to-text"),
            "cp2",
            r"splitting the sequence .* Use dp or fsdp, or let",
            on("dp2", "fsdp2"),
        )
        for name in ("paligemma", "gemma3")
    },
    "convbert": Advice(
        of_family("convbert", "masked-lm"),
        "cp2",
        "Write .* under .roles., or use dp or fsdp",
        {"cp2": written, **on("dp2", "fsdp2")},
    ),
    "mobilebert": Advice(
        of_family("mobilebert", "masked-lm"),
        "cp2",
        "Use dp or fsdp, or let .*; or, if that module mixes positions, write .* under",
        {"cp2": written, **on("dp2", "fsdp2")},
    ),
    "longformer": Advice(
        of_family("longformer", "masked-lm"),
        "cp2",
        r"does not run on a part of the positions: .* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "prophetnet": Advice(
        of_family("prophetnet"),
        "cp2",
        r"does not run with what else enters it, .* Use dp or fsdp\.$",
        on("dp2", "fsdp2"),
    ),
    "switch_transformers-dropout": Advice(
        of_family("switch_transformers", "seq2seq-lm"),
        "dp2",
        "Put it outside of that module, or set it to 0",
        dict.fromkeys(
            ("dp2", "fsdp2", "pp2"), built_by(partial(advised.without_dropout, "seq2seq-lm"))
        ),
    ),
    **{
        f"{name}-experts": Advice(
            of_family(name),
            "ep2",
            f"no experts in this model{why}\\. Use dp, fsdp or pp: ep",
            on("dp2", "fsdp2", "pp2"),
        )
        for name, why in {
            "dbrx": f": .*experts {NO_EXPERTS} its part mlp holds weights, and not .*",
            "doge": "",
            "jetmoe": f": .*input_linear {NO_EXPERTS} its forward does not take .tokens.*",
            "llama4": f": .*experts {NO_EXPERTS} its forward does not take .tokens.*",
            "llama4_text": f": .*experts {NO_EXPERTS} its forward does not take .tokens.*",
            "longcat_flash": f": .*experts {NO_EXPERTS} it has no attribute num_experts",
        }.items()
    },
    "switch_transformers-experts": Advice(
        of_family("switch_transformers", "seq2seq-lm"),
        "ep2",
        f"experts {NO_EXPERTS} its part expert_0 holds weights.* Use dp, fsdp or pp: ep",
        dict.fromkeys(
            ("dp2", "fsdp2", "pp2"), built_by(partial(advised.without_dropout, "seq2seq-lm"))
        ),
    ),
    "moss": Advice(
        of_family("moss_transcribe_diarize"),
        "pp2",
        "use_cache = False, in model.config and in the configurations inside of it",
        {"pp2": built_by(partial(advised.without_cache, "moss_transcribe_diarize"))},
    ),
}


def follow(pool: Any, one: Advice) -> None:
    with pytest.raises(Refusal) as found:
        result(pool, one.subject, one.layout)
    assert re.search(one.says, str(found.value)), found.value
    for layout, does in one.then.items():  # all lines of [roles] are named at once
        after = result(pool, does(one.subject, str(found.value)), layout)
        assert after.passed, (layout, after)


@pytest.mark.grid(ci=4)
@pytest.mark.parametrize("name", ADVICE)
def test_followed(pool: Any, name: str) -> None:
    follow(pool, ADVICE[name])


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_followed_in_a_family(pool: Any, name: str) -> None:
    pytest.importorskip("transformers")
    follow(pool, OF_FAMILIES[name])


ALIKE = {"dp": "dp2", "fsdp": "fsdp2", "tp": "tp2", "pp": "pp2"}
# family -> why layouts that a refusal names are refused too: with advice of their own
SECOND = {
    "reformer": "draw after the shape of an activation",
    "ibert masked-lm": "outside of the forward|give each use its own buffer",
    "switch_transformers seq2seq-lm": "put it outside of that module, or set it to 0",
}


def layouts_named(why: str) -> list[str]:
    """The layouts that a refusal says to use instead, as they are."""
    named = (
        r"[Uu]se (?:a layout of )?((?:dp|fsdp|tp|pp)(?:(?:, | or )(?:dp|fsdp|tp|pp))*)\b(.{0,7})"
    )
    found = [(words, after) for words, after in re.findall(named, why)]
    return [
        ALIKE[word]
        for words, after in found
        if not after.startswith((", after", " without"))
        for word in re.findall(r"\w+", words.replace(" or ", " "))
    ]


def test_the_table_keeps_what_its_refusals_say() -> None:
    """Each layout that a refusal of benchmarks/families says to use is equal there."""
    path = Path(__file__).parents[2] / "benchmarks/families/results/families.json"
    cells = {(c["family"], c["layout"]): c for c in json.loads(path.read_text())["cells"]}
    advised = [
        (family, layout, named)
        for (family, layout), cell in cells.items()
        if cell["state"] == "refused"
        for named in layouts_named(cell["why"])
    ]
    assert len(advised) > 100
    for family, layout, named in advised:
        other = cells[family, named]
        second = SECOND.get(family)
        if second is None:
            assert other["state"] == "equal", (family, layout, named)
        else:
            follow = re.search(second, other["why"], re.IGNORECASE)
            assert other["state"] == "equal" or follow, (family, named)


DIVIDED = {  # families that were refused by mistake, or with advice that could not be followed
    "inkling_text": ("causal-lm", "ep2"),  # an expert for all tokens that takes more than them
    "gemma4_text": ("causal-lm", "ep2"),
    "whisper": ("causal-lm", "cp2"),  # between a rank's two stretches no document begins
    "moss_transcribe_diarize": ("causal-lm", "cp2"),
    "zaya": ("causal-lm", "cp2"),  # whole sequences leave a part of it by heads
    # biases and masks of positions, for all of them
    **dict.fromkeys(("t5", "t5gemma", "m2m_100"), ("seq2seq-lm", "cp2")),
    **dict.fromkeys(("layoutlm", "mpnet"), ("masked-lm", "cp2")),
    **dict.fromkeys(("git", "mpt"), ("causal-lm", "cp2")),
    "longt5": ("seq2seq-lm", "tp2"),  # biases of positions have gradients; blocks before heads
    "ctrl": ("causal-lm", "pp2"),  # assigns a buffer anew
    "mobilebert": ("masked-lm", "tp2"),  # its values are of another tensor than queries and keys
    "bloom": ("causal-lm", "cp2"),  # what else enters whole attentions is of positions too
    "openai-gpt": ("causal-lm", "cp2"),
    "roformer": ("causal-lm", "cp2"),
    "led": ("seq2seq-lm", "tp2"),  # reads an element before an attention that does not run in part
    "apertus": ("causal-lm", "cp2"),  # a forward that models call by itself, run again without end
    "gemma2": ("causal-lm", "cp2"),  # the trial gave its blocks a mask without its rule
}


LEFT_WHOLE: dict[str, tuple[Subject, str]] = {  # what tp leaves whole, or divides, without advice
    "fixed-width": (token_net(by_kind(advised.FixedWidth)), "blocks.*.proj"),
    "reads-element": (token_net(advised.ReadsElement), "blocks.*.proj"),
    "second-gradient": (token_net(advised.Conditioned), "blocks.*.mlp.down"),
    "of-two": (token_net(by_kind(advised.OfTwoBlock)), ""),
}


@pytest.mark.grid(ci=6)
@pytest.mark.parametrize("name", LEFT_WHOLE)
def test_one_module_is_no_reason_to_refuse(pool: Any, name: str) -> None:
    subject, whole = LEFT_WHOLE[name]
    found = result(pool, subject, "tp2")
    assert found.passed, found
    plan = subject.case().lay(seeded(subject.build), "tp2")
    cut = {p.name for step in plan.steps for p in step.params if p.cut is not None}
    assert "head.weight" in cut
    if whole:
        assert any("left whole" in note for note in plan.notes)
        assert whole.replace("*", "0") + ".weight" not in cut
    else:
        assert "blocks.1.attention.out_proj.weight" in cut


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("name", DIVIDED)
def test_a_family_needs_no_advice(pool: Any, name: str) -> None:
    pytest.importorskip("transformers")
    task, layout = DIVIDED[name]
    found = result(pool, of_family(name, task), layout)
    assert found.passed, found


def test_roles_are_declared_where_no_sample_shows_them(pool: Any) -> None:
    subject = Subject(advised.OddNames, features, mse)
    with pytest.raises(
        Refusal, match=r'or declare a column and the row .* = "column" and'
    ) as found:
        weft.plan(subject.build(), "tp2", batch=8, loss=mse)
    column, row = re.findall(r'"([^"]+)" = "(?:column|row)"', str(found.value))
    roles = {column.replace("blocks.*.up", "alpha"): "column"}
    roles |= {row.replace("blocks.*.down", "beta"): "row"}
    plan = weft.plan(subject.build(), "tp2", batch=8, loss=mse, roles=roles)
    assert {p.name for step in plan.steps for p in step.params} >= {"alpha.weight", "beta.weight"}
    after = result(pool, planned(roles=roles)(subject, ""), "tp2")
    assert after.passed, after


@pytest.mark.parametrize("net", [advised.ColumnAlone, advised.NormedBetween])
def test_no_roles_are_advised_where_the_forward_shows_none(net: type[nn.Module]) -> None:
    subject = Subject(net, features, mse)
    with pytest.raises(Refusal, match=r"in this model: in its .* stay separate .* or fsdp\.$"):
        subject.case().lay(subject.build(), "tp3")  # which divides no features
    with pytest.raises(Refusal, match="declare a column and the row"):  # there might be some
        weft.plan(subject.build(), "tp2", batch=8, loss=mse)


@pytest.mark.parametrize("name", ["gat", "s4d"])
def test_no_roles_are_advised_past_indices_and_spectra(name: str) -> None:
    subject = REPOSITORIES[name]
    with pytest.raises(Refusal, match=r"in this model: in its .* stay separate .* or fsdp\.$"):
        subject.case().lay(subject.build(), "tp7")  # which divides no features
