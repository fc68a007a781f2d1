"""Cells: what one cell of a row says. An empty one is not known; one that cannot be read is refused
with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Row = Mapping[str, str]


class Uncovered(Exception):
    """Why a row is not priced."""


OFFLOADED = ("optimizer", "param", "activation", "cpu")
DTYPES = ("bf16", "fp16", "fp8", "fp4")
NO = ("n", "no", "none", "0", "false", "f", "off", "-")
YES = ("y", "yes", "1", "true", "t", "on")
UNKNOWN = ("", "?", "n/a", "na", "nan", "unknown")
NOT = ("", *NO)  # what stands for nothing of a kind
LARGEST = 2**40  # of a number in a row: products of several are still exact


def number(row: Row, name: str) -> float | None:
    """None for a cell that is empty, or 0. Raises Uncovered for one that is no size."""
    text = (row.get(name) or "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        raise Uncovered(f"{name} = {text!r} is no number") from None
    if not 0 <= value <= LARGEST:
        raise Uncovered(f"{name} = {text!r} is no size")
    return value or None


def whole(row: Row, name: str, default: int | None = None) -> int:
    """Raises Uncovered for a cell that is empty, or 0, and has no default, and for one that is no
    whole number."""
    value = number(row, name)
    if value is None:
        if default is None:
            raise Uncovered(
                f"{name} = 0 is no size"
                if (row.get(name) or "").strip()
                else f"{name} is not known"
            )
        return default
    if value != int(value):
        raise Uncovered(f"{name} = {value:g} is no whole number")
    return int(value)


def offloads(row: Row) -> tuple[str, ...]:
    """What rests in host memory, as `Practice` names it; of an optimizer gradients too, and where
    no more is said, of it alone. Raises Uncovered."""
    text = (row.get("offload") or "").strip().lower()
    if text in NOT:
        return ()
    if not any(word in text for word in OFFLOADED) and text not in YES:
        raise unpriced(row, "offload", ("none", *OFFLOADED))
    found = [
        name for word, name in (("param", "weights"), ("activation", "activations")) if word in text
    ]
    return (*found, *(("gradients", "optimizer") if "optim" in text or not found else ()))


def flag(row: Row, name: str) -> bool | None:
    """Y or N, in any words for them; None where a cell is empty. Raises Uncovered."""
    text = (row.get(name) or "").strip().lower()
    word = re.match(r"\w*", text)[0]  # type: ignore[index]
    if text in UNKNOWN or text.startswith(("n/a", "n.a")):
        return None
    if word in YES or word in NO or text in NO:
        return word in YES
    raise unpriced(row, name, ("Y", "N"))


def unpriced(row: Row, name: str, words: Iterable[str]) -> Uncovered:
    return Uncovered(f"{name} = {row[name]!r} has no price: it is none of {', '.join(words)}")


def dtype(row: Row) -> str:
    """In lower case. Raises Uncovered for one whose matmuls no sheet knows."""
    text = (row.get("dtype") or "").strip().lower().replace("bfloat", "bf").replace(
        "float", "fp"
    ) or "fp16"
    if not any(word in text for word in DTYPES):
        raise unpriced(row, "dtype", DTYPES)
    return text


def zero(row: Row) -> str:
    """The level of ZeRO: "0" to "3"."""
    text = (row.get("zero_stage") or "").strip().lower()
    match = re.match(r"(?:zero[ -]?)?([0-3])(?![0-9])", text)
    if match is None and text not in NOT and not text.startswith("hsdp"):
        raise unpriced(row, "zero_stage", ("0", "1", "2", "3", "hsdp"))
    return match[1] if match else "0" if text in NOT else "3"


def recomputed(row: Row) -> str:
    """ "none", "full", or what begins with "selective"."""
    text = (row.get("recompute") or "").strip().lower().rstrip("?")
    if text.startswith("selective"):
        return text
    if text in NOT or text.startswith(("full", "yes")):
        return "none" if text in NOT else "full"
    raise unpriced(row, "recompute", ("none", "full", "selective"))


def network(row: Row, node: int) -> float | None:
    """Bytes per second of one device, each way, of a link such as `8x200Gb/s HDR IB`, `4x100Gb`,
    `400Gb/s per node` or `25 GB/s per GPU`; None where no rate is named."""
    text = row.get("inter_link") or ""
    rate = r"(?:(\d+)\s*[xX×]\s*)?(\d+(?:\.\d+)?)\s*([GT])((?i:bytes?)|(?i:bits?)|[bB])"
    match = re.search(rate + r"(?:/s|ps|(?<=b)\b)", text)  # of bits, "per second" may be left out
    if match is None:
        return None
    count, each = int(match[1] or 1), float(match[2]) * (1e12 if match[3] == "T" else 1e9)
    total = count * each / (1 if match[4] == "B" or match[4].lower().startswith("byte") else 8)
    return (
        total if re.search(r"per (gpu|device|accelerator)", text, re.IGNORECASE) else total / node
    )


def memory(row: Row, accelerator: str) -> float | None:
    """GB of an accelerator, by their own cell or by its name, as in A100-40GB."""
    named = re.search(r"(\d+)\s*GB(?!/)|(?<!NVL)-(\d{2,3})$", accelerator.upper())
    return number(row, "accel_mem_gb") or (float(named[1] or named[2]) if named else None)


def fused_attention(row: Row) -> bool | None:
    """Whether attention keeps no scores; None where a row does not say."""
    text = (row.get("attn_kernel") or "").lower()
    words = set(re.findall(r"[a-z]+", text))
    if words & {"unfused", "math", "naive", "eager", "none"} or re.search(
        r"\b(no|not|non|without)[ -]+(flash|fused)", text
    ):
        return False
    return True if "flash" in text else None
