"""The report page as text: the template files of this folder, filled with sections, data, style and script.

Nothing in the page leads to a network: style, script and data are in the file, and its content security
policy allows no other. Only this script runs, which the policy names by its hash, whatever a text contains.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from dist_mem.inspection.page.markup import Markup, element, join_pieces
from dist_mem.runtime.figures import json_text

_STYLES = ("page.css", "book.css")
_SCRIPTS = ("book_data.js", "details.js", "book_view.js", "page.js")  # in their order of use


class Section(NamedTuple):
    """A part of the page with a heading, linked at the top."""

    name: str
    content: Markup


def assemble(title: str, summary: Markup, book: dict[str, Any], words: Markup, *, footer: str) -> str:
    """Return the page; `book`: as `book.encode_book` returns it."""
    parts = [Section("Summary", summary), Section("Book", Markup(_file("book.html"))), Section("Words", words)]
    style, script = "".join(map(_file, _STYLES)), "".join(map(_file, _SCRIPTS))
    return Template(_file("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        title=join_pieces([title]),
        style=style,
        script=script,
        sections=join_pieces(element("a", part.name, href=f"#{_anchor(part)}") for part in parts),
        content=join_pieces(
            element("section", element("h2", part.name), part.content, id=_anchor(part)) for part in parts
        ),
        footer=join_pieces([footer]),
        data=_data(book),
    )


def _file(name: str) -> str:
    return (resources.files("dist_mem.inspection.page") / name).read_text(encoding="utf-8")


def _anchor(section: Section) -> str:
    return section.name.lower()


def _hash(content: str) -> str:
    """Return the source of an inline element for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _data(book: dict[str, Any]) -> str:
    """Return the book as a block of JSON, in which no text can end the block."""
    text = json_text(book, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="book-data">{text}</script>'
