"""Data sheets: those that come with weft are sane, and a file that is none is refused by the key
that is wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import weft.planner.cost.hardware
from weft.core.errors import ConfigError
from weft.core.toml import dump_toml
from weft.planner.cost.hardware import Cluster, Hardware, parse_sheet, read_sheet, sheet_names

# Dense peaks (TFLOP/s) and TB/s of the makers' data sheets; GiB as torch and tensorflow report them
# of such cards.
SHEETS: dict[str, tuple[dict[str, float], float, float]] = {
    "v100": ({"fp16": 125, "fp32": 15.7, "fp64": 7.8}, 31.7, 0.9),
    "a100-40": ({"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}, 39.4, 1.555),
    "a100": ({"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}, 79.1, 2.039),
    "a100-pcie": ({"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}, 79.1, 1.935),
    "h100": (
        {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
        79.1,
        3.35,
    ),
    "h200": (
        {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
        139.8,
        4.8,
    ),
    "b200": (
        {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75, "fp64": 37},
        178.3,
        8.0,
    ),
    "gb200": (
        {"fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80, "fp64": 40},
        184,
        8.0,
    ),
    "b300": (
        {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75, "fp64": 1.2},
        268.6,
        7.7,
    ),
    "gb300": (
        {"fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80, "fp64": 1.3},
        277.5,
        8.0,
    ),
    "gh200": (
        {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
        95.2,
        4.0,
    ),
    "gh200-144": (
        {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
        142.8,
        4.9,
    ),
    "h100-pcie": ({"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}, 79.1, 2.0),
    "h20": ({"fp8": 296, "bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}, 95.2, 4.0),
    "l40s": ({"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}, 44.4, 0.864),
    "rtx-4090": ({"fp8": 330, "bf16": 165, "fp16": 165, "tf32": 82.6, "fp32": 82.6}, 23.6, 1.008),
    "mi300x": (
        {"fp8": 2614, "bf16": 1307, "fp16": 1307, "tf32": 653, "fp32": 163, "fp64": 163},
        191.7,
        5.3,
    ),
    "mi325x": (
        {"fp8": 2614, "bf16": 1307, "fp16": 1307, "tf32": 653, "fp32": 163, "fp64": 163},
        255.7,
        6.0,
    ),
    "tpu-v4": ({"bf16": 275}, 30.75, 1.2),
    "tpu-v5e": ({"bf16": 197}, 15.75, 0.819),
}
KEPT = {
    "l40s": 0.92,
    "tpu-v4": 0.96,
}  # of what is sold: what error correction and its runtime leave
RIGHT = """
name = "x"
title = "X"
source = "a data sheet"
kind = "cuda"

[device]
memory_gib = 80.0
memory_bps = 2e12
host_bps = 25e9
flops = { bf16 = 312e12, fp32 = 20e12 }

[[tiers]]
name = "inner"
devices = 8
bps = 300e9
latency_s = 1e-5

[[tiers]]
name = "outer"
devices = 0
bps = 25e9
latency_s = 1e-5

[eras.eager]
matmul = 0.8
"""


def test_every_sheet_is_known_here() -> None:
    assert set(sheet_names()) == set(SHEETS)


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_is_its_makers(name: str) -> None:
    sheet = Cluster.parse(f"{name}x64").hardware
    flops, gib, terabytes = SHEETS[name]
    assert sheet.name == name and sheet.source and sheet.title
    assert {dtype: sheet.device.flops[dtype] / 1e12 for dtype in flops} == pytest.approx(
        flops, rel=0.01
    )
    sold = re.search(r"(\d+) GB", sheet.title)
    assert sold is not None and sheet.device.memory_gib == gib
    assert KEPT.get(name, 0.98) < gib / int(sold[1]) < 1
    assert sheet.device.memory_bps / 1e12 == pytest.approx(terabytes, rel=0.05)
    assert sheet.tiers[-1].devices == 0 and len(sheet.tiers) == 2
    rates = [sheet.device.memory_bps, *(tier.bps for tier in sheet.tiers)]
    assert rates == sorted(rates, reverse=True) and sheet.device.host_bps < sheet.device.memory_bps
    order = [
        sheet.device.flops[d]
        for d in ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
        if d in sheet.device.flops
    ]
    assert order == sorted(order, reverse=True)
    assert all(1e-7 < tier.latency_s < 1e-3 for tier in sheet.tiers)


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_reads_back_what_is_written(name: str) -> None:
    sheet = Cluster.parse(f"{name}x8").hardware
    assert parse_sheet(dump_toml(sheet), "again") == sheet


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("a100-80", "a100"),
        ("A100-80GB", "a100"),
        ("a100-40gb", "a100-40"),
        ("a100-pcie-80", "a100-pcie"),
        ("h200-141", "h200"),
        ("l40s-48", "l40s"),
    ],
)
def test_a_card_is_named_by_its_memory_too(name: str, sheet: str) -> None:
    assert Cluster.parse(f"{name}x8") == Cluster.parse(f"{sheet}x8")


def test_a_card_with_another_memory_is_refused_with_those_that_there_are() -> None:
    said = (
        r"'a100-64': no hardware file describes a100 with 64 GB. Use a100 \(79.1 GiB\),"
        r" a100-40 \(39.4 GiB\), a100-pcie"
    )
    with pytest.raises(ConfigError, match=said):
        Cluster.parse("a100-64x8")
    with pytest.raises(ConfigError, match="there is no such sheet"):
        Cluster.parse("b400-80x8")


def test_an_era_is_like_that_of_another_sheet_but_for_what_it_states() -> None:
    other = Cluster.parse("h100x8").hardware.eras["eager"]
    made = parse_sheet(
        RIGHT.replace("matmul = 0.8", 'like = "h100"\nmemory = 0.25'), "x.toml"
    ).eras["eager"]
    assert other.memory != 0.25 and made == other.model_copy(update={"memory": 0.25})
    a100, megatron = (
        Cluster.parse(f"{name}x8").hardware.eras["megatron"] for name in ("a100", "h200")
    )
    assert a100.layers and megatron == a100.model_copy(
        update={"layers": ()}
    )  # runs on A100 told of them
    assert (
        Cluster.parse("gb200x8").hardware.eras == Cluster.parse("b200x8").hardware.eras
    )  # which are like h100's


@pytest.mark.parametrize(
    ("like", "problem", "fix"),
    [
        ('"h10"', "there is no such sheet", 'Did you mean "h100"'),
        ('"H100"', "there is no such sheet", 'Did you mean "h100"'),
        ('"local"', "there is no such sheet", "h100"),
        ("3", "there is no such sheet", "h100"),
        ('"tpu-v4"', "that hardware file has no era eager", "it has compiled"),
    ],
)
def test_what_no_era_can_be_like(like: str, problem: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_sheet(RIGHT.replace("matmul = 0.8", f"like = {like}"), "x.toml")
    assert refused.value.field == "eras.eager.like" and fix.lower() in str(refused.value).lower()
    assert "x.toml" in str(refused.value)


def test_clusters() -> None:
    cluster = Cluster.parse(" h100x65 ")
    assert (str(cluster), cluster.devices, cluster.nodes, cluster.hardware.node) == (
        "h100x65",
        65,
        9,
        8,
    )


@pytest.mark.parametrize(
    ("old", "new", "field", "value", "words"),
    [
        (
            "memory_bps = 2e12",
            "memory_bsp = 2e12",
            "device.memory_bsp",
            2e12,
            'Did you mean "memory_bps"',
        ),
        ("memory_bps = 2e12", 'memory_bps = "2e12"', "device.memory_bps", "2e12", "Write a number"),
        ("memory_bps = 2e12", "memory_bps = true", "device.memory_bps", True, "number"),
        ("memory_bps = 2e12", "memory_bps = -1.0", "device.memory_bps", -1.0, "greater than 0"),
        ("memory_bps = 2e12", "memory_bps = 0", "device.memory_bps", 0, "greater than 0"),
        ("memory_bps = 2e12", "memory_bps = nan", "device.memory_bps", None, "finite"),
        ("memory_bps = 2e12", "memory_bps = inf", "device.memory_bps", float("inf"), "finite"),
        ("memory_bps = 2e12", "", "device.memory_bps", None, "is missing"),
        ("fp32 = 20e12", "fp32 = -20e12", "device.flops", None, "greater than 0"),
        ("{ bf16 = 312e12, fp32 = 20e12 }", "{}", "device.flops", {}, "at least 1"),
        ("devices = 8", "devices = 8.5", "tiers", None, "whole number"),
        ("devices = 8", "devices = -8", "tiers", None, "greater than or equal to 0"),
        ("devices = 8", "devices = 0", "tiers", "outer", "List inner ones first"),
        ("devices = 0", "devices = 8", "tiers", "outer", "connects no more devices than inner"),
        ("matmul = 0.8", "matmul = 0", "eras.eager.matmul", 0, "greater than 0"),
        ("matmul = 0.8", "matmull = 0.8", "eras.eager.matmull", 0.8, 'Did you mean "matmul"'),
        ("matmul = 0.8", "hidden = 1.5", "eras.eager.hidden", 1.5, "less than or equal to 1"),
        ("matmul = 0.8", "launch_s = inf", "eras.eager.launch_s", float("inf"), "finite"),
        ('name = "x"\n', "name = 3\n", "name", 3, "text in quotes"),
        ('name = "x"\n', 'name = ""\n', "name", "", "Write a name"),
        ('kind = "cuda"', "", "kind", None, "is missing"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, field: str, value: Any, words: str) -> None:
    assert old in RIGHT and isinstance(parse_sheet(RIGHT, "x.toml"), Hardware)
    with pytest.raises(ConfigError) as refused:
        parse_sheet(RIGHT.replace(old, new, 1), "x.toml")
    assert refused.value.field.startswith(field), str(refused.value)
    if value is not None:
        assert refused.value.value == value
    assert words in str(refused.value)
    assert refused.value.fix


def test_no_tiers_and_no_eras() -> None:
    head, _, _ = RIGHT.partition("[[tiers]]")
    for text, field in (
        (head.replace("[device]", "tiers = []\n[device]"), "eras"),
        (head + "[eras.eager]\n", "tiers"),
    ):
        with pytest.raises(ConfigError) as refused:
            parse_sheet(text, "x.toml")
        assert refused.value.field == field
    with pytest.raises(ConfigError, match=r"Write \[\[tiers\]\]"):
        parse_sheet("tiers = []\n" + head + "[eras.eager]\n", "x.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100", "h100x64"),
        ("h10x64", "h100"),
        ("x64", "no such sheet"),
        ("", "h100x64"),
        ("h100x0", "is not a number"),
        ("h100x-1", "is not a number"),
        ("h100x1e3", "is not a number"),
        ("h100x9999999999", "is not a number"),
        ("none.toml", "cannot be read"),
        ("../h100x4", "no such sheet"),
    ],
)
def test_clusters_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Cluster.parse(text)
    assert (
        refused.value.value is not None and str(refused.value.value) in text and refused.value.fix
    )


def test_no_more_devices_than_networks_join() -> None:
    alone = parse_sheet(RIGHT.replace("devices = 0", "devices = 64"), "here")
    assert Cluster.of(alone, 64).devices == 64
    with pytest.raises(ConfigError, match="its networks connect at most 64 devices"):
        Cluster.of(alone, 65)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(RIGHT, encoding="utf-8")
    assert (Cluster.parse(str(file)).devices, Cluster.parse(f"{file}x24").nodes) == (8, 3)
    for data in (b"\xff\xfe", b"name = [", b"a = " + b"[" * 20000):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"my\.toml"):
            read_sheet(file)


def test_what_a_sheet_has_not() -> None:
    sheet = parse_sheet(RIGHT, "x.toml")
    with pytest.raises(ConfigError, match="bf16, fp32"):
        sheet.peak("fp8")
    with pytest.raises(ConfigError, match="eager"):
        sheet.era("eagre")
    assert sheet.peak("bf16") == 312e12 and sheet.era("eager").matmul == 0.8


def test_sheets_say_only_what_differs() -> None:
    for name in sheet_names():
        text = (
            Path(weft.planner.cost.hardware.__file__)
            .parents[1]
            .joinpath("hardware", f"{name}.toml")
            .read_text(encoding="utf-8")
        )
        assert tomllib.loads(text)["name"] == name
