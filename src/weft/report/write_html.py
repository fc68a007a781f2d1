"""Writes a page as one HTML file that reads nothing else: styles, scripts, texts and data within.

The data is JSON in an element that no browser runs; `page.js` puts it into the page as text, never
as HTML, and the file's security policy lets no other script run and nothing be loaded. So a name in
a run folder that looks like HTML is shown as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from string import Template
from typing import Any

from weft.core import ConfigError, __version__, replace_file

from .texts import load_texts

HERE = Path(__file__).parent


def page_html(page: dict[str, Any]) -> str:
    """The whole file."""
    scripts = [_read("echarts.min.js"), _read("page.js")]
    style = _read("page.css")
    held = page | {"texts": load_texts(), "version": __version__}
    return Template(_read("page.html")).substitute(
        policy="; ".join(
            [
                "default-src 'none'",
                "script-src " + " ".join(map(_hash, scripts)),
                f"style-src-elem {_hash(style)}",
                "style-src-attr 'unsafe-inline'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        style=style,
        data=json.dumps(held, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        .replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e"),
        charts=scripts[0],
        page=scripts[1],
    )


def write_html(path: Path, page: dict[str, Any]) -> int:
    """Write the file; returns its bytes. Raises ConfigError."""
    if path.suffix != ".html":
        raise ConfigError("--out", str(path), "is not an HTML file", "name a .html")
    content = page_html(page).encode("utf-8", errors="replace")
    try:
        replace_file(path, content)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--out", str(path), problem, "name another file") from None
    return len(content)


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
