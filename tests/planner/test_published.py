"""The contract of benchmarks/published: any file of runs is priced row by row, and what is not
covered is named."""

from __future__ import annotations

import csv
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"

GPT = {
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "seq_len": 1024,
    "n_accel": 8,
    "gbs": 64,
    "mbs": 4,
    "recompute": "none",
}
ZERO3 = {
    "layers": 96,
    "hidden": 12288,
    "heads": 96,
    "seq_len": 1024,
    "n_accel": 128,
    "gbs": 128,
    "mbs": 1,
    "framework": "DeepSpeed ZeRO-3",
    "zero_stage": 3,
    "recompute": "full",
}


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, str]], str]:
    """Row -> its line, and what was said of rows without one."""
    rows: dict[str, dict[str, Any]] = {
        "plain": GPT,
        "tp": {**GPT, "tp": 4},
        "tp and pp": {**GPT, "tp": 2, "pp": 2, "dp": 2},
        "too large": {**GPT, "layers": 96, "hidden": 12288, "heads": 96},
        "not said": {**GPT, "layers": 24, "mbs": 16, "gbs": 128, "recompute": ""},
        "said": {**GPT, "layers": 24, "mbs": 16, "gbs": 128, "recompute": "none"},
        "zero3": ZERO3,
        "zero3 away": {**ZERO3, "offload": "optimizer"},
        "zero3 large": {**ZERO3, "mbs": 128, "gbs": 128 * 128},
        "zero3 large here": {**ZERO3, "mbs": 128, "gbs": 128 * 128, "offload": "none"},
        "tpu": {**GPT, "accelerator": "TPU v3"},
        "uneven": {**GPT, "tp": 3, "dp": 2},
        "no size": {**GPT, "hidden": "wide"},
        "unknown": {**GPT, "layers": ""},
        "nothing": {**GPT, "mbs": 0},
        "words": {
            **GPT,
            "dtype": "bfloat16",
            "schedule": "ZB-H1",
            "pp": 2,
            "tp": 2,
            "zero_stage": "1 (distributed)",
        },
        "its own 1F1B": {
            **GPT,
            "dtype": "bf16",
            "schedule": "1F1B",
            "pp": 2,
            "tp": 2,
            "zero_stage": 1,
        },
        "no dtype": {**GPT, "dtype": "posit8"},
        "no schedule": {**GPT, "schedule": "wavefront", "pp": 2},
        "no chunks": {**GPT, "schedule": "gpipe", "pp": 2, "vp": 2},
        "no recompute": {**GPT, "recompute": "sometimes"},
        "no level": {**GPT, "zero_stage": 10},
        "no, in words": {
            **GPT,
            "recompute": "No",
            "zero_stage": "none",
            "dtype": "float16",
            "offload": "-",
        },
        "interleaved": {
            **GPT,
            "schedule": "interleaved-1F1B",
            "pp": 2,
            "tp": 2,
            "zero_stage": 1,
            "dtype": "bf16",
        },
        "yes, in words": {
            **GPT,
            "sp": "true",
            "tp": 2,
            "gated_mlp": "1",
            "tied_emb": "No",
            "compile": "False",
        },
        "Y": {
            **GPT,
            "sp": "Y(reduce-scatter mode)",
            "tp": 2,
            "gated_mlp": "Y",
            "tied_emb": "N",
            "compile": "N",
        },
        "perhaps": {**GPT, "sp": "perhaps"},
        "no flash": {**GPT, "attn_kernel": "no flash"},
        "flash": {**GPT, "attn_kernel": "SDPA flash"},
        "small card": {**GPT, "accelerator": "A100-40GB", "layers": 20, "mbs": 8},
        "large card": {**GPT, "accelerator": "A100-80GB", "layers": 20, "mbs": 8},
        "smaller yet": {
            **GPT,
            "accelerator": "A100-SXM4-80GB",
            "accel_mem_gb": 16,
            "layers": 20,
            "mbs": 8,
        },
        "other card": {**GPT, "accelerator": "H200 PCIe"},
        "no NVLink": {**GPT, "accelerator": "V100-32GB", "intra_link": "PCIe 3"},
        "PCIe": {**GPT, "accelerator": "A100-80GB", "intra_link": "PCIe 4", "tp": 4},
        "in bytes": {**GPT, "n_accel": 16, "inter_link": "25 GB/s per GPU"},
        "in bits": {**GPT, "n_accel": 16, "inter_link": "8x200Gb/s"},
        "slower": {**GPT, "n_accel": 16, "inter_link": "100 Gbps"},
        "no rate": {**GPT, "n_accel": 16, "inter_link": "HDR"},
        "other software": {**GPT, "framework": "Loom 3"},
        "odd batch": {**GPT, "gbs": 66},
        "few heads": {**GPT, "tp": 8, "heads": 4},
        "few layers": {**GPT, "pp": 8, "layers": 2},
        "few experts": {**GPT, "n_experts": 4, "top_k": 2, "moe_ffn": 1024, "ep": 8},
        "how many experts": {**GPT, "n_experts": 8, "ep": 8},
        "experts": {**GPT, "n_experts": 8, "top_k": 2, "ep": 8, "ffn": 4096},
    }
    folder = tmp_path_factory.mktemp("published")
    names = ["row_id", *dict.fromkeys(name for row in rows.values() for name in row)]
    with (folder / "runs.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, names, restval="")
        lines.writeheader()
        lines.writerows({"row_id": name, **row} for name, row in rows.items())
    command = [
        sys.executable,
        FOLDER / "run.py",
        "--runs",
        folder / "runs.csv",
        "--out",
        folder / "out.csv",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (folder / "out.csv").open() as file:
        return {line["row_id"]: line for line in csv.DictReader(file)}, done.stderr


def test_each_covered_row_has_a_line(priced: tuple[dict[str, dict[str, str]], str]) -> None:
    found, said = priced
    names = ["row_id", "predicted_iter_time_s", "predicted_peak_mem_gib", "fits"]
    names += ["iter_time_s_low", "iter_time_s_high"]
    assert all(list(line) == names for line in found.values())
    for line in found.values():
        low, step, high = (float(line[name]) for name in (names[4], names[1], names[5]))
        assert low < step < high
    assert len(found) == 29
    for name, why in (
        ("tpu", "no sheet of TPU v3"),
        ("uneven", "8 accelerators are not dp2 x tp3 x cp1 x pp1"),
        ("no size", "'wide' is no number"),
        ("unknown", "layers is not known"),
        ("nothing", "mbs = 0 is no size"),
        ("no dtype", "dtype = 'posit8' has no price"),
        ("no schedule", "schedule = 'wavefront' has no price"),
        ("no chunks", "vp = 2 is not what gpipe has: 1"),
        ("no recompute", "recompute = 'sometimes' has no price"),
        ("no level", "zero_stage = '10' has no price"),
        ("perhaps", "sp = 'perhaps' has no price"),
        ("other card", "no sheet of H200 PCIe over PCIe"),
        ("no NVLink", "no sheet of V100-32GB over PCIe"),
        ("few heads", "4 heads do not divide over tp8"),
        ("few layers", "2 layers are too few for 8 stages"),
        ("few experts", "4 experts do not divide over ep8"),
        ("how many experts", "top_k is not known"),
    ):
        assert name not in found and any(
            line.startswith(f"{name} is not covered") and why in line for line in said.splitlines()
        )
    times = {name: float(line["predicted_iter_time_s"]) for name, line in found.items()}
    assert times["plain"] < times["tp"] and times["plain"] < times["too large"]
    assert times["words"] < times["its own 1F1B"] > times["interleaved"]  # whose bubble is larger
    assert times["no, in words"] == times["plain"]
    peaks = {name: float(line["predicted_peak_mem_gib"]) for name, line in found.items()}
    assert peaks["tp"] < peaks["plain"] < 80 < peaks["too large"]
    assert found["plain"]["fits"] == "Y" and found["too large"]["fits"] == "N"


def test_measured_rows_move_those_of_their_source(tmp_path: Path) -> None:
    """A source whose machine is half as fast; another one stays as it is."""
    columns = ["source_id", "row_id", *GPT, "tp", "d_iter_time_s"]

    def predicted(given: str | None) -> dict[str, dict[str, str]]:
        rows = [(source, f"{source} {tp}", tp) for source in ("slow", "other") for tp in (1, 2, 4)]
        with (tmp_path / "runs.csv").open("w", newline="") as file:
            lines = csv.DictWriter(file, columns)
            lines.writeheader()
            for source, name, tp in rows:
                lines.writerow({**GPT, "source_id": source, "row_id": name, "tp": tp})
        command = [sys.executable, FOLDER / "run.py", "--runs", tmp_path / "runs.csv"]
        command += ["--out", tmp_path / "out.csv"]
        if given is not None:
            with (tmp_path / "given.csv").open("w", newline="") as file:
                lines = csv.DictWriter(file, columns)
                lines.writeheader()
                row = {**GPT, "source_id": "slow", "row_id": "slow 1", "tp": 1}
                lines.writerow({**row, "d_iter_time_s": given})
            command += ["--measured", tmp_path / "given.csv"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        with (tmp_path / "out.csv").open() as file:
            return {line["row_id"]: line for line in csv.DictReader(file)}

    def seconds(line: dict[str, str], name: str = "predicted_iter_time_s") -> float:
        return float(line[name])

    before = predicted(None)
    after = predicted(str(2 * seconds(before["slow 1"])))
    assert seconds(after["slow 1"]) == pytest.approx(2 * seconds(before["slow 1"]), rel=0.1)
    assert seconds(after["slow 2"]) > 1.5 * seconds(before["slow 2"])
    assert after["other 2"] == before["other 2"]
    wide = [
        seconds(one["slow 2"], "iter_time_s_high") / seconds(one["slow 2"], "iter_time_s_low")
        for one in (before, after)
    ]
    assert wide[1] < wide[0]
    with pytest.raises(RuntimeError, match="no row has seconds of a step"):
        predicted("")


def test_what_a_row_says_in_other_words(priced: tuple[dict[str, dict[str, str]], str]) -> None:
    found, said = priced
    times = {name: float(line["predicted_iter_time_s"]) for name, line in found.items()}
    assert times["yes, in words"] == times["Y"] != times["plain"]
    assert times["no flash"] == times["plain"] != times["flash"]  # which Megatron's era had without
    assert [found[name]["fits"] for name in ("small card", "large card", "smaller yet")] == [
        "N",
        "Y",
        "N",
    ]
    assert (
        times["small card"] > times["large card"] == times["smaller yet"]
    )  # its memory is slower, too
    assert (
        times["in bytes"] == times["in bits"] == times["no rate"] < times["slower"]
        and times["PCIe"] > times["tp"]
    )
    assert times["odd batch"] == times["other software"] == times["plain"]
    assert (
        "1 rows: inter_link 'HDR' names no rate: priced with InfiniBand HDR, 8 x 200 Gb/s a node"
        in said
    )
    assert "1 rows: framework 'Loom 3' is priced as megatron" in said
    assert "1 rows: gbs 66 is no multiple of dp x mbs: priced as 64" in said


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("rows")


def text(row: dict[str, Any]) -> dict[str, str]:
    return {"row_id": "one", **{name: str(value) for name, value in row.items()}}


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ({"accelerator": "H200"}, ("h200", 1.01 * 139.8)),
        ({"accelerator": "A100-SXM4-40"}, ("a100-40", 40)),
        ({"accelerator": "A100", "accel_mem_gb": 64}, ("a100", 64)),
        ({"accelerator": "GB200 NVL 72"}, ("gb200", 1.01 * 184)),
        ({"accelerator": "H100-SXM5-96GB(HBM2e 2.4TB/s, 500W cap)"}, ("h100", 96)),
        ({"accelerator": "A100", "intra_link": "NVLink3 (host PCIe 4)"}, ("a100", 1.01 * 79.1)),
        ({"accelerator": "A100 80GB PCIe"}, ("a100-pcie", 80)),
        ({"accelerator": "H100-PCIe", "accel_mem_gb": 80}, ("h100-pcie", 80)),
        ({"accelerator": "H20"}, ("h20", 1.01 * 95.2)),
        ({"accelerator": "L40S", "intra_link": "PCIe 4"}, ("l40s", 1.01 * 44.4)),
        ({"accelerator": "RTX 4090 PCIe"}, ("rtx-4090", 1.01 * 23.6)),
        ({"accelerator": "TPU v4"}, ("tpu-v4", 1.01 * 30.75)),
    ],
)
def test_the_card_of_a_row(rows: Any, cell: dict[str, Any], found: tuple[str, float]) -> None:
    sheet = rows.hardware(text({**GPT, **cell}))
    assert (sheet.name, sheet.device.memory_gib) == (found[0], pytest.approx(found[1]))


def test_what_xla_lays_out_is_cut_over_the_axis_of_the_model(rows: Any) -> None:
    row = {**GPT, "accelerator": "TPU v4", "tp": 4, "zero_stage": 3, "dtype": "bf16", "sp": "N"}
    jax, other = (
        rows.case(text({**row, "framework": name})) for name in ("T5X/JAX", "PyTorch FSDP")
    )
    assert jax.setting.era == "compiled" and other.setting.era == "eager"
    assert ["tp4+sequence" in str(one.layout) for one in (jax, other)] == [True, False]


def test_what_software_does_op_by_op(rows: Any) -> None:
    """Aleph Alpha's gives all logits to each rank of tp; norms are fused where a row says so."""
    base = text({**GPT, "gated_mlp": "Y", "dtype": "bf16"})
    mine = {**base, "framework": "AA-Scaling", "attn_kernel": "torch", "notes": "RMS kernel=N"}
    assert rows.case(base).setting.eager == ()
    found = rows.case(mine).setting
    assert found.eager == ("norms", "elementwise", "softmax", "loss")
    assert found.practice.gathers_logits and not found.practice.scatters
    assert found.practice.sums_whole and found.practice.reduce_bytes == 4
    first = {**mine, "attn_kernel": "flash_attentionv1.0.8", "notes": "RMS kernel=Y"}
    found = rows.case(first).setting
    assert found.eager == ("elementwise", "loss")
    assert (found.flash, found.flash_version) == (True, 1)
    second = {**first, "attn_kernel": "flash_attention2"}
    assert rows.case(second).setting.flash_version == 2
    triton = {**base, "framework": "Composer FSDP", "attn_kernel": "flash(triton)"}
    assert rows.case(triton).setting.flash_version == 1  # llm-foundry's copy of the first one


@pytest.mark.parametrize("level", ["1", "3"])
def test_internevo_is_one_software_at_each_level_of_zero(rows: Any, level: str) -> None:
    row = text({**GPT, "dtype": "bf16", "framework": "InternEvo", "zero_stage": level})
    found = rows.case(row).setting
    assert (found.era, found.practice.step_bytes, found.practice.overlaps) == ("megatron", 14, True)
    assert found.practice.sums_whole and found.practice.awaits_weights


def test_torchs_ddp_overlaps_and_deepspeed_sums_bf16_whole(rows: Any) -> None:
    base = {**GPT, "dtype": "bf16", "framework": "Megatron-LM"}
    others = ({}, {"notes": "DDP-impl=torch"}, {"framework": "Megatron-DeepSpeed"})
    found = [rows.case(text({**base, **other})).setting.practice for other in others]
    assert [one.overlaps for one in found] == [False, True, False]
    assert [one.sums_whole for one in found] == [False, False, True]


def test_links_of_a_row(rows: Any) -> None:
    inner = [
        rows.hardware(text({**GPT, "accelerator": name})).tiers[0].bps
        for name in ("H100", "H800", "A800")
    ]
    assert inner == [450e9, 200e9, 200e9]
    rates = {
        "8x200Gb/s HDR IB": 25e9,
        "8 × 200Gb/s": 25e9,
        "200 GBit/s per GPU": 25e9,
        "25 Gbyte/s per device": 25e9,
        "25GBps per GPU": 25e9,
        "1.6 Tbps RoCE": 25e9,
        "400Gb/s per node": 6.25e9,
        "4x100Gb RoCE": 6.25e9,
        "HDR": None,
        "NVLink of 80GB cards": None,
    }
    assert {link: rows.network({"inter_link": link}, 8) for link in rates} == rates


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ({"tp": 8, "kv_heads": 6}, "6 key heads do not divide over tp8"),
        ({"hidden": 2050}, "hidden 2050 is no multiple of the heads"),
        (
            {"n_experts": 16, "top_k": 2, "moe_ffn": 64, "ep": 16},
            "the 8 ranks of a stage do not divide by ep16",
        ),
        ({"kv_heads": 3, "tp": 1}, "16 heads do not divide over 3 key heads"),
        ({"n_experts": 8, "top_k": 9, "moe_ffn": 64}, "there are no 9 of 8 experts"),
        ({"ep": 8}, "ep8 has no experts"),
        ({"shard_group": 5, "zero_stage": 3}, "dp8 is not parted into groups of 5"),
        ({"offload": "banana"}, "offload = 'banana' has no price"),
        ({"accelerator": "H100 NVL"}, "no sheet of H100 NVL"),
    ],
)
def test_what_no_software_could_lay(rows: Any, cell: dict[str, Any], says: str) -> None:
    rows.case(text(GPT))
    with pytest.raises(rows.Uncovered, match=says):
        rows.case(text({**GPT, **cell}))
    rows.case(
        text({**GPT, "layers": 2, "pp": 4, "tp": 2})
    )  # what stands before and behind the layers are stages


def test_words_of_a_row(rows: Any) -> None:
    said = {
        "Y": True,
        "yes": True,
        "n": False,
        "N/A": None,
        "n/a (not stated)": None,
        "-": False,
        "?": None,
        "": None,
        "0": False,
    }
    assert {word: rows.flag({"compile": word}, "compile") for word in said} == said
    kernels = {
        "flash (no dropout)": True,
        "no-flash": False,
        "unfused (flash off)": False,
        "eager": False,
        "non fused": False,
        "cuDNN/TE": None,
    }
    assert {word: rows.fused_attention({"attn_kernel": word}) for word in kernels} == kernels
    titan = {**GPT, "framework": "torchtitan", "zero_stage": 3, "dtype": "bf16"}
    eras = [
        rows.case(text({**titan, "compile": word})).setting.era for word in ("N", "Y", "N/A", "")
    ]
    assert eras == ["eager", "compiled", "compiled", "compiled"]
    assert [rows.dims(text({**GPT, "tied_emb": word})).tied for word in ("N", "Y", "")] == [
        False,
        True,
        True,
    ]
    routed = {**GPT, "n_experts": 8, "top_k": 2}
    assert (
        rows.dims(text({**routed, "ffn": 64})).moe_ffn
        == 64
        == rows.dims(text({**routed, "moe_ffn": 64})).moe_ffn
    )
    assert not rows.case(text({**GPT, "framework": "TransformerEngine"})).notes
    assert rows.case(text({**GPT, "gbs": "", "grad_accum": 3})).batch == 3 * 8 * 4
    assert "grad_accum 3 is not" in rows.case(text({**GPT, "grad_accum": 3})).notes[0]


def test_what_a_row_leaves_open_is_so_that_it_fits(
    priced: tuple[dict[str, dict[str, str]], str],
) -> None:
    found, _ = priced
    peaks = {name: float(line["predicted_peak_mem_gib"]) for name, line in found.items()}
    assert found["said"]["fits"] == "N" and found["not said"]["fits"] == "Y"
    assert peaks["not said"] < 0.5 * peaks["said"]
    # states of the optimizer and gradients, 14 bytes a parameter
    params = 96 * 12 * 12288**2
    assert peaks["zero3"] - peaks["zero3 away"] == pytest.approx(
        14 * params / 128 / 2**30, rel=0.02
    )
    assert found["zero3 large here"]["fits"] == "N" and found["zero3 large"]["fits"] == "Y"
    inputs = 94 * 128 * 1024 * 12288 * 2  # of all but two layers
    less = peaks["zero3 large here"] - peaks["zero3 large"] - (peaks["zero3"] - peaks["zero3 away"])
    assert less == pytest.approx(inputs / 2**30, rel=0.01)


def test_what_is_known_of_a_source_that_nobody_fitted(rows: Any) -> None:
    """Kernels as they were measured; of matmuls the share of the card's best that other fits found;
    all else the median of theirs."""
    unseen, fit = importlib.import_module("unseen"), importlib.import_module("fit")
    here = fit.FITS["h100-eager"]
    found = unseen.prior("llm_foundry", here)
    assert not set(unseen.OF_KERNELS) & set(found)
    others = [
        other
        for other in fit.FITS.values()
        if "llm_foundry" not in other.sources and "matmul" in other.free
    ]
    shares = [unseen.shipped(other).matmul / unseen.best(other) for other in others]
    assert min(shares) < found["matmul"] / unseen.best(here) < max(shares)
    assert unseen.best(here) < unseen.best(fit.FITS["a100-eager"])
    # attention on H100 is that of FlashAttention-2, and cuDNN's under Megatron-Core
    assert here.start.attention < fit.FITS["h100-core"].start.attention


def test_equal_steps_share_their_rank(rows: Any) -> None:
    run = importlib.import_module("run")
    assert run._ranks([3.0, 1.0, 1.0, 2.0]).tolist() == [4.0, 1.5, 1.5, 3.0]
    assert run._spearman([1, 1, 2], [5, 6, 7]) == run._spearman([1, 1, 2], [6, 5, 7]) < 1


def test_a_fit_writes_what_an_era_has_beyond_the_one_that_it_is_like(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = importlib.import_module("fit")
    folder = tmp_path / "hardware"
    shutil.copytree(fit.SHEETS, folder)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    for sheet in ("b200", "mi300x"):  # what kernels tell of them comes back
        path = folder / f"{sheet}.toml"
        path.write_text(
            re.sub(r"^(matmul|eight|attention)\w* = .*\n", "", path.read_text(), flags=re.MULTILINE)
        )
    monkeypatch.setattr(fit, "SHEETS", folder)
    monkeypatch.setattr(sys, "argv", ["fit.py", "none of the fits"])
    assert fit.main() == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    fit.put(
        folder / "h200.toml",
        "eras.eager",
        fit.basis("h100", "eager").model_copy(update={"memory": 0.25}),
    )
    assert (
        '[eras.eager]\nlike = "h100"\nmemory = 0.25\n\n[eras.compiled]'
        in (folder / "h200.toml").read_text()
    )
