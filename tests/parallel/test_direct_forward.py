"""Which models call `forward` of their modules: hooks then run in front of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from torch import nn

from weft.parallel.direct_forward import call_forwards_with_hooks

CLASS = """
from torch import nn

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "hooked"),
    [
        ("return self.inner.forward(x)", True),
        ("return self.inner . forward (x)", True),
        ("return (self.inner.\n            forward(x))", True),
        ("return (self.inner\n            .forward(x))", True),
        ("y = '#'; return self.inner.forward(x)", True),
        ("return self.inner(x)  # not self.inner.forward(x)", False),
        ("# self.inner.forward(x)\n        return self.inner(x)", False),
        ("'''self.inner.forward(x)'''\n        return self.inner(x)", False),
        ("return nn.Linear.forward(self.inner, x)", False),
        ("return self.inner(x)", False),
    ],
)
def test_calls_of_forward(tmp_path: Path, body: str, hooked: bool) -> None:
    file = tmp_path / "outer.py"
    file.write_text(CLASS.format(body=body))
    spec = importlib.util.spec_from_file_location("outer_of_a_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where inspect looks for it
        spec.loader.exec_module(module)
        model: nn.Module = module.Outer()
        call_forwards_with_hooks(model)
    assert hasattr(model.inner.forward, "inside") == hooked
