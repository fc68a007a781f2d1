"""Small models and layouts that together run most of what verify can see, and what each runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import weft
from tests.cases import LENGTH, SUBJECTS, VOCAB, Subject, tokens
from tests.staged import STAGED
from tests.verification.contrastive import TwoTowers, clip, pairs
from tests.verification.nets_with_definitions import CASES
from tests.verification.nets_with_quirks import QUIRKS
from weft.losses import causal_lm
from weft.models import decoder
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.reference import run_reference

STEPS = 2
MODELS: dict[str, Subject] = {
    **SUBJECTS,
    **{f"deep-{name}": STAGED[name] for name in ("decoder", "tied", "llama", "t5", "convnet")},
    **{name: CASES[name] for name in ("attention", "squares", "experts", "capacity", "aligned")},
    "recurrent": QUIRKS["recurrent"],
    "contrastive": Subject(TwoTowers, pairs, clip),
    "selective": Subject(
        partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, dropout=0.1),
        tokens,
        causal_lm,
        (("accumulate", 2), ("recompute", "selective")),
    ),
}
PAIRS: tuple[tuple[str, str], ...] = (
    ("decoder", "dp2"),
    ("decoder", "fsdp2"),
    ("decoder", "tp2"),
    ("decoder", "pp2"),
    ("decoder", "cp2"),
    ("decoder", "tp2+sequence"),
    ("decoder", "fsdp2+zero1"),
    ("decoder", "fsdp2+zero2"),
    ("even", "tp2"),
    ("tied", "tp2"),
    ("tied", "pp2"),
    ("fused", "tp2+sequence"),
    ("dropout", "tp2"),
    ("dropout", "cp2"),
    ("recomputed", "fsdp2"),
    ("recomputed", "pp2"),
    ("selective", "tp2"),
    ("selective", "cp2"),
    ("clipped", "fsdp2"),
    ("clipped", "tp2"),
    ("clipped", "pp2"),
    ("convnet", "dp2"),
    ("experts", "ep2"),
    ("experts", "dp2"),
    ("capacity", "ep2"),
    ("capacity", "cp2"),
    ("capacity", "tp2+sequence"),
    ("attention", "dp2"),
    ("squares", "dp2"),
    ("aligned", "cp2"),
    ("recurrent", "pp2"),
    ("contrastive", "dp2"),
    ("contrastive", "pp2+gpipe"),
    ("deep-llama", "tp2"),
    ("deep-llama", "pp2+zb-h1"),
    ("deep-t5", "pp2"),
    ("deep-tied", "pp2+interleaved"),
    ("deep-convnet", "pp2"),
    ("deep-decoder", "pp2+pipedream"),
    ("deep-decoder", "pp2+dualpipev"),
    ("decoder", "dp2.tp2"),
    ("decoder", "fsdp2.tp2"),
    ("decoder", "dp2.fsdp2"),
    ("dropout", "pp2.tp2+sequence"),
    ("experts", "dp2.ep2"),
    ("decoder", "cp2.tp2"),
)
Line = tuple[str, int]  # module, number


@dataclass(frozen=True)
class Outcome:
    """`says`: what verify says against a layout, "" if nothing. `numbers`: losses and the squares
    of the last state, which the layout has too. `ran`: the plan, and the collectives of a step."""

    says: str
    numbers: tuple[float, ...]
    ran: str


def verified(model: str, layout: str) -> Outcome:
    """Both sides in this process group: every rank makes the reference by itself."""
    case = MODELS[model].case()
    with_delays = "pipedream" in layout
    alone: Any = run_delayed(case, layout, STEPS) if with_delays else run_reference(case, STEPS)
    result = check_layout(case, layout, alone)
    found = result.first or result.problem or result.stray or "numbers"
    squares = (float(t.double().square().sum()) for t in alone.final.values())
    ran = f"{case.lay(case.model(), layout)} {sorted(result.comms_seen.items())}"
    return Outcome("" if result.passed else found, (*alone.losses, *squares), ran)


def lines_of(model: str, layout: str) -> set[Line]:
    """The lines of weft that it runs."""
    found: set[tuple[str, int]] = set()
    inside = str(Path(weft.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(inside):
            return None
        found.add((name, frame.f_lineno))
        return note

    sys.settrace(note)
    try:
        verified(model, layout)
    finally:
        sys.settrace(None)
    modules = {m.__file__: n for n, m in list(sys.modules.items()) if n.startswith("weft.")}
    return {(modules[file], line) for file, line in found if file in modules}
