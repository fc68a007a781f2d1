"""Run folders as `weft train` leaves them, with everything that a report shows; and a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_overlap import step as profiled
from weft.core import Action
from weft.pipeline import Timeline, perfetto

HOSTILE = "</script><img src=x onerror=alert(1)>"

RUN = """output = "runs/mine"
[model]
build = "weft.models:decoder"
dim = 16
[layout]
axes = "pp2.dp2"
[train]
batch = 8
steps = 40
"""


def line_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 / step + 1.0,
        "lr": 0.01,
        "grad_norm": 1.0 / step,
        "tokens_per_s": 800.0 + step,
        "step_s": 0.25,
        "data_wait_s": 0.01,
        "memory_bytes": 400_000_000 + step,
        "sync_exposed_s": 0.02,
        "sync_hidden_s": 0.01,
        "replicas": 2,
        "tokens_per_expert": {"blocks.0.experts": [30, 50, 20, 28], HOSTILE: [1, 2, 3, 4]},
        "busiest_expert": 1.6,
        "dropped_share": 0.1,
    }


def events() -> list[dict[str, Any]]:
    return [
        {"time": 1_700_000_000.0, "event": "started", "step": 0, "text": "pp2.dp2, 4 processes",
         "rows": {"model": "1.25M parameters, fp32", "device": "CPU"}},
        {"time": 1_700_000_010.0, "event": "died", "step": 10, "text": "rank 1: killed by SIGKILL"},
        {"time": 1_700_000_012.0, "event": "resumed", "step": 10, "text": "pp2.dp2, 4 processes"},
        {"time": 1_700_000_030.0, "event": "warning", "step": 20, "text": HOSTILE},
        {"time": 1_700_000_060.0, "event": "finished", "step": 40, "text": ""},
    ]  # fmt: skip


def ranks() -> dict[str, Any]:
    return {
        "layout": "pp2.dp2",
        "step": 40,
        "parts": {"embedding": 100, "blocks.0": 200, "blocks.1": 200, "head": 100},
        "holdings": [{"embedding": 100, "blocks.0": 200}, {"blocks.1": 200, "head": 100}],
        "ranks": [
            {
                "rank": rank,
                "host": "node1",
                "stages": [rank // 2],
                "parameters": 300,
                "weights_bytes": 1200,
                "gradients_bytes": 1200,
                "state_bytes": 2400,
                "before_bytes": 5000,
                "peak_bytes": 30_000 + rank,
                "stage_wait_s": 0.03,
                "holding": rank // 2,
            }
            for rank in range(4)
        ],
        "collectives": [
            {"kind": "all_reduce", "axis": "dp", "count": 3, "bytes": 1248, "sent_bytes": 1248.0},
            {"kind": "send", "axis": "pp", "count": 8, "bytes": 9000, "sent_bytes": 9000.0},
        ],
    }


def timeline(scale: float) -> Timeline:
    cells = [("F", 0.0), ("F", 1.0), ("B", 3.0), ("B", 5.0)]
    lanes = []
    for stage in range(2):
        spans: list[tuple[Any, float, float]] = [
            (Action(kind, stage, i % 2), scale * (at + stage), scale * (at + stage + 1))  # type: ignore[arg-type]
            for i, (kind, at) in enumerate(cells)
        ]
        lanes.append([*spans, ("recv-wait", 0.0, scale * stage)])
    return Timeline.of(lanes)


def make_run(folder: Path, name: str = "mine", **files: str | None) -> Path:
    """A run folder; `files` replaces the text of a file (its name without what follows the dot), or
    leaves it out."""
    lines = [line_of(step) for step in range(1, 41)]
    lines += [{"step": step, "val_loss": 4.0 / step + 1.5, "val_acc": 0.5} for step in (20, 40)]
    memory = {"weights": 1200.0, "gradients": 1200.0, "optimizer": 2400.0, "activations": 9000.0}
    found: dict[str, str | None] = {
        "run.toml": RUN,
        "plan.txt": "layout pp2.dp2: 4 ranks\n",
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "events.jsonl": "".join(json.dumps(line) + "\n" for line in events()),
        "ranks.json": json.dumps(ranks()),
        "prediction.json": json.dumps(
            {
                "memory": memory,
                "traffic": {"dp": 1248.0, "pp": 8000.0, "tp": 0.0},
                "step_s": 0.2,
                "time": {"forward": 0.1, "dp exposed": 0.04, "bubble": 0.06},
                "by": "this machine",
            }
        ),
        "verify.json": json.dumps(
            {
                "layouts": [
                    {
                        "layout": "pp2.dp2",
                        "passed": True,
                        "loss_rel_err": 2e-16,
                        "grad_rel_err": 3e-14,
                        "param_rel_err": 9e-15,
                        "worst": "gradient of " + HOSTILE,
                        "comms_predicted": [
                            {"kind": "all_reduce", "axis": "dp", "count": 3, "bytes": 1248}
                        ],
                        "comms_seen": [
                            {"kind": "all_reduce", "axis": "dp", "count": 3, "bytes": 1248}
                        ],
                    }
                ],
                "settings": {"model": {"build": "weft.models:decoder", "dim": 32}},
            }
        ),
        "profile.json": json.dumps({"traceEvents": [*profiled(0, 0, 7), *profiled(1, 0, 7)]}),
        "trace.json": perfetto([("predicted", timeline(1.0)), ("measured", timeline(1.2))]),
    }
    made = folder / name
    made.mkdir(parents=True)
    for file, content in found.items():
        content = files.get(file.partition(".")[0], content)
        if content is not None:
            (made / file).write_text(content, encoding="utf-8")
    return made


CHROMIUM, DRIVER = (
    next((found for name in names if (found := shutil.which(name))), None)
    for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browser(
    profile: Path, language: str = "en-US", width: int = 1280, dark: bool = False
) -> Iterator[Any]:
    """A real Chromium with an empty profile; the test is skipped where none is installed."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--lang={language}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"intl.accept_languages": language})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        phone = width < 500
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone},
        )
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [look]})
        yield driver
    finally:
        driver.quit()
