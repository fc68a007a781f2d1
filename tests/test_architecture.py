"""The laws of tests/house.py: src/weft obeys them, and a breach of each is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weft"

# Counts that may only fall: string constants that name an axis (outside parallel/strategies and
# core/layout.py) and a schedule (outside pipeline/schedules). Whoever lowers one writes the new
# number here.
AXIS_LITERALS = 20
SCHEDULE_LITERALS = 1


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return house.breaches(SOURCE)


@pytest.mark.parametrize("law", [law.__name__ for law in house.LAWS])
def test_the_house_obeys(law: str, found: dict[str, list[str]]) -> None:
    assert found[law] == []


def test_axis_names_stay_in_their_files() -> None:
    seen = house.literals(SOURCE, house.AXES, ("parallel.strategies", "core.layout"))
    assert sum(seen.values()) <= AXIS_LITERALS, seen.most_common()


def test_schedule_names_stay_in_their_folder() -> None:
    from weft.pipeline import schedules

    names = tuple(schedules.registry())
    seen = house.literals(SOURCE, names, ("pipeline.schedules",))
    assert sum(seen.values()) <= SCHEDULE_LITERALS, seen.most_common()


def test_the_page_shows_the_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, begin, rest = page.partition("<!-- packages:begin -->")
    figure, end, _ = rest.partition("<!-- packages:end -->")
    assert begin and end, (
        "docs/architecture.md has no block between packages:begin and packages:end"
    )
    shown = [line.split()[0] for line in figure.splitlines() if line.split() and "`" not in line]
    assert shown == list(reversed(house.ORDER))


# ---- a breach is named ---------------------------------------------------------------------------

SOUND = {
    "__init__.py": "",
    "__init__.pyi": "from .core import Layout as Layout",
    "core/__init__.py": '"""The nouns. Open layout.py first."""',
    "core/__init__.pyi": "from .layout import Layout as Layout\nfrom .plan import Plan as Plan",
    "core/errors.py": "def late():\n    import torch",
    "core/layout.py": "from .errors import late\n\n\nclass Layout: ...",
    "core/plan.py": "import torch\nfrom .layout import Layout\n\n\nclass Plan: ...",
    "parallel/__init__.py": '"""Axes. Open strategies/data.py first."""',
    "parallel/__init__.pyi": "from .mesh import Mesh as Mesh",
    "parallel/mesh.py": "from weft.core import Layout\n\n\nclass Mesh: ...",
    "parallel/strategies/__init__.py": "",
    "parallel/strategies/data.py": "from weft.core import Plan",
    "parallel/strategies/tensor.py": "from weft.core import Plan",
    "engine/__init__.py": '"""One step. Open step.py first."""',
    "engine/__init__.pyi": "from .step import Engine as Engine",
    "engine/step.py": "from weft.parallel import Mesh\n\n\nclass Engine: ...",
    "planner/__init__.py": '"""Costs. Open cost.py first."""',
    "planner/__init__.pyi": "from .cost import price as price",
    "planner/cost.py": 'def price(a, b, c, d):\n    """Args: all four."""',
    "verification/__init__.py": '"""Proof. Open run.py first."""',
    "verification/__init__.pyi": "from .run import verify as verify",
    "verification/run.py": "from weft.engine import Engine\n\n\ndef verify():\n    ...\n    'no'",
    "_torch/__init__.py": "",
    "_torch/autograd.py": "from torch._C import x",
}


def broken(root: Path, changed: dict[str, str]) -> dict[str, list[str]]:
    """What is said of the sound package with these files changed."""
    for name, text in {**SOUND, **changed}.items():
        path = root / "weft" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.breaches(root / "weft")


def test_a_sound_house_passes(tmp_path: Path) -> None:
    said = broken(tmp_path, {"verification/run.py": 'def verify():\n    """No."""'})
    assert {law: lines for law, lines in said.items() if lines} == {}


BREACHES = [
    ("known_packages", {"planet.py": ""}, "weft.planet is in no package of ORDER"),
    (
        "imports_go_down",
        {"core/errors.py": "from weft.parallel import Mesh"},
        "weft.core.errors, line 1, imports weft.parallel.mesh: upward, from core to parallel",
    ),
    (
        "imports_go_down",
        {"core/errors.py": "def f():\n    from weft.engine import Engine"},
        "weft.core.errors, line 2, imports weft.engine.step: upward",
    ),
    ("imports_go_down", {"engine/step.py": "import weft"}, "upward, from engine to the door"),
    (
        "imports_go_down",
        {"planner/cost.py": "from weft.verification import verify"},
        "planner and verification do not know each other",
    ),
    (
        "no_cycle",
        {"core/errors.py": "from .plan import Plan"},
        "cycle: weft.core.errors -> weft.core.plan -> weft.core.layout -> weft.core.errors",
    ),
    (
        "packages_meet_at_faces",
        {"engine/step.py": "from weft.parallel.mesh import Mesh"},
        "weft.engine.step, line 1, reaches past the face of parallel",
    ),
    (
        "packages_meet_at_faces",
        {"engine/step.py": "from weft.parallel import Ring"},
        "takes Ring, which is not in parallel/__init__.pyi",
    ),
    ("faces_are_faces", {"core/__init__.py": ""}, "weft.core has no docstring"),
    (
        "faces_are_faces",
        {"core/__init__.py": '"""A."""\ndef f(): ...'},
        "weft.core defines something",
    ),
    (
        "faces_are_faces",
        {"core/__init__.pyi": "from .plan import errors as errors"},
        "exports errors, the name of a file of core",
    ),
    (
        "strategies_know_nouns_only",
        {"parallel/strategies/data.py": "from .tensor import steps"},
        "weft.parallel.strategies.tensor: strategies do not import one another",
    ),
    (
        "strategies_know_nouns_only",
        {"parallel/strategies/data.py": "from ..mesh import Mesh"},
        "weft.parallel.mesh: a strategy knows core",
    ),
    (
        "strategies_know_nouns_only",
        {"parallel/mesh.py": "from .strategies import data"},
        "weft.parallel.mesh, line 1, names weft.parallel.strategies.data",
    ),
    (
        "no_torch_where_it_is_slow",
        {"core/layout.py": "from .plan import Plan"},
        "importing weft.core.layout imports torch: weft.core.layout -> weft.core.plan -> torch",
    ),
    (
        "private_torch_in_one_place",
        {"engine/step.py": "import torch\ntorch._C._autograd.x()"},
        "weft.engine.step, line 2, uses torch._C._autograd.x",
    ),
    (
        "private_torch_in_one_place",
        {"engine/step.py": "from torch.overrides import _get_current_function_mode"},
        "uses torch.overrides._get_current_function_mode",
    ),
    (
        "private_torch_in_one_place",
        {"engine/step.py": "def f(m):\n    m._compiled_call_impl = 1"},
        "weft.engine.step, line 2, uses _compiled_call_impl",
    ),
    ("nothing_is_too_large", {"core/errors.py": "\n" * 501}, "weft.core.errors has 501 lines"),
    (
        "nothing_is_too_large",
        {"core/errors.py": "class Large:\n" + "    x = 1\n" * 300},
        "weft.core.errors.Large has 301 lines",
    ),
    (
        "nothing_is_too_large",
        {"core/errors.py": f"def f({', '.join(f'a{n}' for n in range(13))}): ..."},
        "weft.core.errors.f takes 13 arguments",
    ),
    (
        "a_class_name_means_one_thing",
        {"core/errors.py": "class Plan: ..."},
        "class Plan is defined in weft.core.errors and in weft.core.plan",
    ),
    ("no_state_in_modules", {"core/errors.py": "seen = []"}, "weft.core.errors, line 1: state"),
    ("no_state_in_modules", {"core/errors.py": "def f():\n    global x"}, "line 2: global x"),
    (
        "exported_functions_say_their_arguments",
        {"planner/cost.py": 'def price(a, b, c, d):\n    """A price."""'},
        "planner exports price, whose 4 arguments have no Args: section",
    ),
    (
        "exported_functions_say_their_arguments",
        {"planner/cost.py": "def price(a): ..."},
        "planner exports price, which has no docstring",
    ),
]


@pytest.mark.parametrize(
    ("law", "changed", "expected"), BREACHES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_breach_is_named(
    tmp_path: Path, law: str, changed: dict[str, str], expected: str
) -> None:
    assert [line for line in broken(tmp_path, changed)[law] if expected in line]


def test_every_law_has_a_breach() -> None:
    assert {law for law, _, _ in BREACHES} == {law.__name__ for law in house.LAWS}
