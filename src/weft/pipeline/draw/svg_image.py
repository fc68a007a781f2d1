"""A standalone SVG image: its ground, its name for those who do not see it, and lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def svg_image(width: float, height: float, body: Iterable[str], title: str, said: str = "") -> str:
    """One standalone image, on white, so that it is read on a dark page too.

    Args:
        width: in pixels.
        height: in pixels.
        body: elements.
        title: the name that a screen reader says.
        said: what is to be seen, in words.
    """
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">',
        f"<title>{escape(title)}</title>",
        *([f"<desc>{escape(said)}</desc>"] if said else []),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def svg_text(x: float, y: float, content: str, style: str = "") -> str:
    """A line of text.

    Args:
        x: of its start, unless `style` has another text-anchor.
        y: of its baseline.
        content: is escaped.
        style: further attributes, as in `fill="#555555"`.
    """
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(content)}</text>'
