"""What `weft doctor` prints: a line for each finding, and at the end what will work."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from weft.core import translate

from . import checks
from .checks import DoctorRequest, HostReport
from .findings import Finding, Host, State, worst

STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "wrong": "bold red"}
STATE_WIDTH, NAME_WIDTH = 7, 15  # of the longest words, and two spaces
INDENT = " " * (STATE_WIDTH + NAME_WIDTH)
WIDTH = 120  # where no terminal says another


def report_doctor(asked: DoctorRequest, as_json: bool) -> bool:
    """Look, print what was found, and say whether nothing is wrong. Of several hosts the first
    prints it for all."""
    out = Console(quiet=as_json)
    out = out if out.is_terminal else Console(width=WIDTH, quiet=as_json)
    looked = checks.check_with_others(asked) if asked.hosts else _check_this_host(asked, out)
    if as_json:
        print(report_json(looked))
    elif looked.place is not None and looked.place.number > 0:
        number, count, first = looked.place.number, looked.place.count, looked.place.first
        _say(out, f"host {number} of {count}; {first}, host 0, prints what all hosts found")
    else:
        print_findings(
            out,
            finding_rows(looked) if asked.hosts else [("", finding) for finding in looked.between],
        )
        _say(out, "\n".join(["", *verdict(looked.hosts, looked.between)]))
    return looked.passed


def _check_this_host(asked: DoctorRequest, out: Console) -> HostReport:
    """Findings are printed as they come."""
    found = []
    for finding in checks.check_host(asked):
        found.append(finding)
        print_findings(out, [("", finding)])
    host = checks.report_alone(found)
    return HostReport([host], checks.compare_findings(asked, [host]))


def _say(out: Console, lines: str) -> None:
    out.print(translate(lines), markup=False, highlight=False, soft_wrap=True)


def print_findings(out: Console, findings: Iterable[tuple[str, Finding]]) -> None:
    """A few lines for each: its state, its name, and where what was found; then what follows from
    it."""
    for where, finding in findings:
        found, advice = translate(finding.found), translate(finding.advice)
        said = [f"{where}: {found}" if where else found, advice]
        wide = max(40, out.width - len(INDENT))
        lines = [
            line for each in said for line in textwrap.wrap(each, wide, break_on_hyphens=False)
        ]
        row = Text(f"{finding.state:<{STATE_WIDTH}}", STYLES[finding.state])
        row.append(f"{finding.name:<{NAME_WIDTH}}", "default")
        row.append(f"\n{INDENT}".join(lines), "default")
        out.print(row, soft_wrap=True)


def finding_rows(looked: HostReport) -> list[tuple[str, Finding]]:
    """Check by check, what each host found; once where they found the same. Then what is between
    them."""
    found: list[tuple[str, Finding]] = []
    names = dict.fromkeys(finding.name for host in looked.hosts for finding in host.findings)
    for name in names:
        same: dict[tuple[str, str, str], tuple[list[str], Finding]] = {}
        for host in looked.hosts:
            for finding in host.findings:
                if finding.name == name:
                    key = finding.state, finding.found, finding.advice
                    same.setdefault(key, ([], finding))[0].append(host.name)
        for where, finding in same.values():
            everywhere = len(where) == len(looked.hosts)
            found.append(
                (
                    ("" if len(looked.hosts) == 1 else "all") if everywhere else ", ".join(where),
                    finding,
                )
            )
    return [*found, *(("", finding) for finding in looked.between)]


def verdict(hosts: Sequence[Host], between: Sequence[Finding]) -> list[str]:
    """What will work, in a few lines; the last says what is wrong."""
    found = {finding.name: finding for finding in between}
    together = worst(finding for finding in between if finding.name != "layout") != "wrong"
    where = "" if together else "on each host by itself: "
    lines = [where + _ranks(hosts if together else hosts[:1]), _precision(hosts)]
    if len(hosts) > 1 and together:
        lines.append(f"runs over these {len(hosts)} hosts, elastic ones too")
    if "layout" in found and worst([found["layout"]]) != "wrong":
        lines.append(f"this run: {found['layout'].found}")
    lines += _checkpoints(hosts, found)
    wrong = [
        f"{finding.name} of {host.name}" if len(hosts) > 1 else finding.name
        for host in hosts
        for finding in host.findings
        if finding.state == "wrong"
    ]
    wrong += [finding.name for finding in between if finding.state == "wrong"]
    return [*lines, f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong"]


def _ranks(hosts: Sequence[Host]) -> str:
    gpus = min(len(host.facts("gpus").get("gpus", ())) for host in hosts) * len(hosts)
    if gpus:
        return f"layouts of up to {gpus} ranks, a GPU each, over NCCL"
    cores = min(host.facts("cores").get("usable", 1) for host in hosts) * len(hosts)
    return (
        f"layouts of up to {cores} ranks at full speed, a core each, over gloo; of more to check"
        " numbers"
    )


def _precision(hosts: Sequence[Host]) -> str:
    gpus = [gpu for host in hosts for gpu in host.facts("gpus").get("gpus", ())]
    fast = [{"fp16", *(["bf16"] if gpu["bf16"] else [])} for gpu in gpus]
    fast = fast or [set(host.facts("cores").get("fast", ())) for host in hosts]
    slow = [dtype for dtype in ("bf16", "fp16") if not all(dtype in each for each in fast)]
    quick = [dtype for dtype in ("fp32", "fp64", "bf16", "fp16") if dtype not in slow]
    return ", ".join(quick) + (
        f"; {' and '.join(slow)} emulated, no faster than fp32" if slow else ""
    )


def _checkpoints(hosts: Sequence[Host], found: dict[str, Finding]) -> list[str]:
    folders = [
        finding for host in hosts for finding in host.findings if finding.name in ("folder", "room")
    ]
    folders += [found[name] for name in ("shared folder",) if name in found]
    if not folders or worst(folders) == "wrong":
        return ["no checkpoints there yet"] if folders else []
    room = min((host.facts("room")["fit"] for host in hosts if host.facts("room")), default=None)
    return ["checkpoints" + (f", room for {room:,}" if room is not None else "")]


def report_json(looked: HostReport) -> str:
    """One object: findings of each host and between them, the verdict, and whether nothing is
    wrong."""
    found = {
        "hosts": [host.plain() for host in looked.hosts],
        "between": [asdict(finding) for finding in looked.between],
        "verdict": verdict(looked.hosts, looked.between),
        "passed": looked.passed,
    }
    return json.dumps(found, indent=2)
