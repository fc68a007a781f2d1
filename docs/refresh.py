"""Runs the commands of the pages, and puts what they print where the pages show it.

    python docs/refresh.py                     # all pages
    python docs/refresh.py docs/planner.md     # some

A fenced block whose lines begin with a program (`weft`, `python`, ...) is a list of commands. In a
block with `$ `, the lines after a command are what it prints; else the next block is, if it follows
at once. It may show a part of that; a line `...` stands for lines between. A comment
`# exit code 2` says how a command ends. A block of code that begins with `# NAME.py` or
`# NAME.toml` is that file. Another block of Python on a page of systems/ is a script, which is run.

A page's commands run one after the other in one folder, which has the examples, the page's files,
and a small run file in the place of the reader's own `run.toml`. tests/docs/test_pages.py runs all
of them in small, and compares what they print.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    "weft",
    "python",
    "torchrun",
    "mpirun",
    "srun",
    "pip",
    "mkdocs",
    "tensorboard",
    "./quickstart.sh",
    "./test.sh",
    "source",
    "export",
    "sbatch",
    "kubectl",
    "ray",
    "openssl",
    "cat",
    "ls",
    "head",
    "cd",
    "mkdir",
]

# Commands that are only parsed, and why.
NOT_RUN = {
    r"^(pip (install|wheel)|source) ": "changes the environment, or downloads torch",
    r"^\./(quickstart|test)\.sh|^python (docs|benchmarks)/|^mkdocs|^tensorboard": "takes minutes",
    r"^weft calibrate": "measures the machine for minutes, or reads the reader's own runs",
    r"^(sbatch|kubectl|scancel|srun) ": "needs a cluster",
    r" --nodes \S+ --rdzv |^torchrun --nnodes 2 ": "needs several hosts",
    r"^weft launch ray ": "needs Ray",
    r" --folder /data": "needs a folder at the root",
    r"^python tensorflow_0\.py": "needs TensorFlow",
    r" models/": "needs a model from a hub",
}
# Commands whose output a page shows as it was once, and why.
NOT_SHOWN = {
    r"^weft doctor": "tells facts of one machine, and its address",
    r"\brun\.toml": "is about the reader's own run",
    r"^python start_up_1\.py": "tells what this torch is built with",
}
# The same output each time, but for the seconds that a search takes; the same but for numbers, and
# for what rounding is largest in. Of other commands, the speed of a machine is in the output.
EXACT = r"^weft (plan|simulate|draw) "
ALIKE = r"^weft (verify|checkpoint) |^python \w+_\d+\.py"

# What makes a training of examples/ small, of keys that its run file has and the command does not
# set; and options of scripts.
SMALL_KEYS = {
    "train.steps": 12,
    "train.warmup": 2,
    "train.eval_every": 6,
    "train.eval_batches": 1,
    "train.sample_tokens": 4,
    "checkpoint.every": 6,
}
SMALL_OPTIONS = {"--steps": 2, "--teacher-steps": 2, "--samples": 128}

OWN_RUN = """
[model]
build = "weft.models:decoder"
dim = 32
heads = 4
layers = 2
seq_len = 16
[data]
build = "weft.data:stdlib"
seq_len = 16
max_bytes = 100000
[layout]
axes = "dp2"
[train]
batch = 32
steps = 4
threads = 1
[optimizer]
lr = 1e-3
[checkpoint]
every = 2
"""


@dataclass
class Command:
    """A command that a page shows."""

    text: str  # without comment; lines joined
    exit_code: int = 0
    output: tuple[int, int] | None = None  # the lines of the page that show what it prints

    def listed(self, table: dict[str, str]) -> str:
        """The reason that a table gives for this command, or nothing."""
        return next((why for pattern, why in table.items() if re.search(pattern, self.text)), "")


@dataclass
class NamedFile:
    """A file that a page shows."""

    name: str
    text: str


# ---- reading a page ------------------------------------------------------------------------------


def read(page: Path) -> list[Command | NamedFile]:
    """The commands and files of a page, in its order."""
    found: list[Command | NamedFile] = []
    before: Command | None = None  # a block's only command, whose output may follow
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type != "fence" or token.map is None:
            before = None if token.level == 0 else before
            continue
        start, end = token.map[0] + 1, token.map[1] - 1
        name = re.match(r"# ([\w/]+\.(?:py|toml|jsonl))\b", token.content)
        commands = block_commands(token.content, start) if token.info in ("", "console") else []
        if token.info in ("python", "toml", "json") and name:
            found.append(NamedFile(name[1], token.content))
        elif token.info == "python" and page.parent.name == "systems":
            script = f"{page.name.partition('.')[0]}_{len(found)}.py"
            commands = [Command(f"python {script}")]
            found.append(NamedFile(script, token.content))
        elif not commands and before and token.info in ("", "text"):
            before.output = (start, end)
        for command in commands:  # `weft simulate ...` goes on as the page's last `weft simulate`
            start, dots, rest = command.text.partition(" ... ")
            earlier = [c.text for c in found if isinstance(c, Command) and c.text.startswith(start)]
            if dots and earlier:
                command.text = f"{earlier[-1]} {rest}"
            found.append(command)
        before = commands[0] if len(commands) == 1 and not commands[0].output else None
    return found


def block_commands(block: str, start: int) -> list[Command]:
    """The commands of a block that has some; `start` is the line of the page where it begins."""
    lines = block.splitlines()
    console = block.startswith("$ ")
    found: list[Command] = []
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1].rstrip() + " " + lines[at].strip()
        at += 1
        if console and not line.startswith("$ "):
            previous = found[-1]
            begin = previous.output[0] if previous.output else start + first
            previous.output = (begin, start + at)
            continue
        code, _, comment = line.removeprefix("$ ").partition(" #")
        text = code.strip().removeprefix(".venv/bin/")
        if not text or text.startswith("#"):
            continue
        if text.split()[0] not in PROGRAMS or re.match(r"weft: |weft tells ", text):
            return []
        ends = re.search(r"exit code (\d+)", comment)
        found.append(Command(text, int(ends[1]) if ends else 0))
    return found


# ---- running -------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Fill the folder in which a page's commands run."""
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    for name in ("run.toml", "RUN.toml"):
        (folder / name).write_text(OWN_RUN, encoding="utf-8")


def small(command: Command, folder: Path) -> str:
    """The command's text, so that it takes seconds."""
    words = shlex.split(command.text)
    added: list[str] = []
    if words[:2] == ["weft", "train"] and words[2].startswith("examples/"):
        run = tomllib.loads((folder / words[2]).read_text(encoding="utf-8"))
        for key, value in SMALL_KEYS.items():
            table, name = key.split(".")
            if name in run.get(table, {}) and f"{key}=" not in command.text:
                added += ["--set", f"{key}={value}"]
    elif words[0] == "python" and words[1].startswith("examples/"):
        script = (folder / words[1]).read_text(encoding="utf-8")
        for option, value in SMALL_OPTIONS.items():
            if f'"{option}"' in script and option not in words:
                added += [option, str(value)]
    return " ".join([command.text, *map(shlex.quote, added)])


def run(text: str, folder: Path, timeout: float) -> tuple[int, str]:
    """Run a command as a shell does: its exit code, and what it prints."""
    exports = folder / "exports"
    if text.startswith("export "):  # for the commands after it
        with exports.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    elif exports.exists():
        text = f". ./exports; {text}"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "120",
        "LANGUAGE": "en",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


# ---- what a page shows ---------------------------------------------------------------------------


def as_shown(shown: list[str], output: str, command: Command) -> list[str]:
    """The lines of an output that the page shows: one after the other, or, where it has a line
    `...`, with others between; the whole output where these are not in it."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    alike = [comparable(line, command) for line in lines]
    found, at, part = list[str](), 0, list[str]()
    for line in [*shown, "..."]:
        if line.strip() != "...":
            part.append(comparable(line, command))
            continue
        places = range(at, len(lines) - len(part) + 1)
        place = next((at for at in places if alike[at : at + len(part)] == part), None)
        if place is None:
            return lines
        at = place + len(part)
        found += [*lines[place:at], line]
        part = []
    return found[:-1]


def comparable(line: str, command: Command) -> str:
    """A line without what differs from run to run."""
    if re.search(EXACT, command.text):
        return re.sub(r"^(search .*) [\d.]+ s$", r"\1", line.rstrip())
    alike = re.sub(r"(worst of all) .*", r"\1", line)
    return re.sub(r"\d[\d.,]*(e[-+]\d+)?|\s+", " ", alike).rstrip()


def main() -> int:
    """Run the commands of pages, and write what they print."""
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for page in named or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if page.name.endswith((".zh.md", ".zh-CN.md")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            refresh(page, Path(folder))
    return 0


def refresh(page: Path, folder: Path) -> None:
    """Write the outputs of a page's commands into it, and into its translation."""
    prepare(folder)
    items = read(page)
    if not any(isinstance(item, Command) and item.output for item in items):
        return
    printed: list[list[str] | None] = []
    for item in items:
        if isinstance(item, NamedFile):
            (folder / item.name).write_text(item.text, encoding="utf-8")
            continue
        printed.append(None)
        if item.listed(NOT_RUN):
            continue
        code, output = run(item.text, folder, 3600)
        if code != item.exit_code:
            raise SystemExit(f"{page}: {item.text} ends with exit code {code}:\n{output}")
        if item.output and not item.listed(NOT_SHOWN):
            shown = page.read_text(encoding="utf-8").splitlines()[slice(*item.output)]
            printed[-1] = as_shown(shown, output, item)
    endings = {".md": (".zh.md", ".zh-CN.md")}
    for target in [page, *(page.with_suffix(end) for end in endings[".md"])]:
        if target.exists():
            write(target, printed)


def write(page: Path, printed: list[list[str] | None]) -> None:
    """Put outputs where the page shows them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    commands = [item for item in read(page) if isinstance(item, Command)]
    for command, output in reversed([*zip(commands, printed)]):
        if not command.output or output is None:
            continue
        shown, now = (
            [comparable(line, command) for line in text]
            for text in (lines[slice(*command.output)], output)
        )
        if shown != now or not re.search(f"{EXACT}|{ALIKE}", command.text):
            print(f"{page.relative_to(ROOT)}: {command.text}")
            lines[slice(*command.output)] = output
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
