"""REPORT.md as one HTML page: figures inside, tables that sort, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

TEMPLATE = Path(__file__).with_name("page.html")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(tokens: Sequence[Token]) -> None:
    """Give each heading its anchor."""
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", slug(content.content))


def page(text: str, pictures: Mapping[str, str]) -> str:
    """The page.

    Args:
        text: Markdown with images figures/NAME.svg.
        pictures: SVG text by name.

    Raises:
        KeyError: an image that is not among the pictures.
    """
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = markdown.parse(text)
    _anchors(tokens)
    body = markdown.renderer.render(tokens, markdown.options, {})

    def embed(match: re.Match[str]) -> str:
        data = base64.b64encode(pictures[match[1]].encode()).decode()
        return f'src="data:image/svg+xml;base64,{data}"'

    body = re.sub(r'src="figures/([\w-]+)\.svg"', embed, body)
    # Links to files of the repository lead nowhere from a page that stands alone.
    body = re.sub(r'<a href="(?!#|https?:)[^"]*">(.*?)</a>', r"\1", body)
    body = re.sub(r"<!--.*?-->\n?", "", body)
    body = re.sub(r"(<p><img [^>]*></p>)", r'<div class="wide">\1</div>', body)
    body = re.sub(r"<td([^>]*)>([^<]{0,28})</td>", r"<td class=short\1>\2</td>", body)
    body = body.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return TEMPLATE.read_text().replace("{body}", body)
