"""`weft verify --deep` resumes a run in its own precision, and sees what a checkpoint lacks of
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.core.run_config import PrecisionConfig
from weft.verification.coverage import coverage
from weft.verification.run_proofs import Proof
from weft.verification.training_check import precision_proof
from weft.verification.training_definition import define_training
from weft.verification.verified_settings import deep_precision
from weft.verification.verify_run import deep_case

FP16, FP64 = PrecisionConfig(compute="fp16"), PrecisionConfig(compute="fp64")
SAID = "resumed at 4: "


def resumed(folder: Path, precision: PrecisionConfig, layout: str, *mutants: Mutant) -> Proof:
    path = folder / "run.toml"
    path.write_text(TRAINED.replace("skip = 5.0\n", ""))
    (defined,) = define_training(*deep_case(load_run(path)))
    with mutated(*mutants):
        return precision_proof(defined, layout, folder, precision)


@pytest.mark.parametrize(("compute", "layout"), [("fp16", "dp2"), ("bf16", "fsdp2")])
def test_a_run_goes_on_in_its_precision(tmp_path: Path, compute: str, layout: str) -> None:
    table = PrecisionConfig.model_validate({"compute": compute})
    assert resumed(tmp_path, table, layout) == Proof(f"in {compute}", f"{SAID}bit for bit")


def test_a_loss_scale_that_is_forgotten_is_seen(tmp_path: Path) -> None:
    change = 'float(scalars["loss_scale"])', "2.0**12"
    forgets = Mutant("weft.engine.grad_update", "GradUpdate.load_scalars", *change)
    proof = resumed(tmp_path, FP16, "dp2", forgets)
    assert not proof.equal and "Error" not in proof.shown, proof


def test_the_table_says_so(tmp_path: Path) -> None:
    def table(precision: str, sync: str = "") -> list[str]:
        path = tmp_path / "run.toml"
        path.write_text(f"{TRAINED}[precision]\n{precision}\n{sync}")
        run = load_run(path)
        assert deep_precision(run.precision) == (None if "8" in precision else run.precision)
        return [f"{row.how}: {row.what}" for row in coverage(run, 3, FP64, "")]

    held = "with --deep: resuming bit for bit in bf16, on the same layout"
    assert held in table('compute = "bf16"')
    served = '[sync]\nname = "parameter_server"\nservers = 1\nstaleness = 2\n'
    assert held not in table('compute = "bf16"', served)
    float8 = table('compute = "bf16"\nfloat8 = "rowwise"')
    assert "not checked: resuming in float8, which needs GPUs" in float8
