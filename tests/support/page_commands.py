"""Extract the commands and programs of a page, in order: from `sh` and `python` blocks, and from indented blocks.

A block `output` shows what the last command before it prints.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

PLACES = ("*.md", "docs/**/*.md", "shards/*.md", "launch/*.md")
PAGES = sorted(path for place in PLACES for path in ROOT.glob(place))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAMS = "dist-mem|python3?|torchrun|deepspeed|srun|sbatch|make|launch/local.sh|pip|mlflow|git|cd|apt-get|bash"
# In an indented block, a docstring or a comment; the program may be in .venv/bin and follow environment variables.
COMMAND = re.compile(rf"^(?:#   | {{4}})((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) .*)$", re.MULTILINE)
LOOP = re.compile(r"^for .*?^done.*?$", re.MULTILINE | re.DOTALL)


class Item(NamedTuple):
    """A command or program that a page shows."""

    text: str
    is_python: bool = False
    output: str | None = None  # that the page shows after it


def items_of(page: Path) -> Iterator[Item]:
    """Yield every command and every Python program of a Markdown page; successive Python blocks are one program."""
    program = ""
    for item in _pieces_of(page):
        if item.is_python:
            program += item.text
        if program and (item.output is not None or not item.is_python):
            yield Item(program, is_python=True, output=item.output if item.is_python else None)
            program = ""
        if not item.is_python:
            yield item
    if program:
        yield Item(program, is_python=True)


def _pieces_of(page: Path) -> list[Item]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    start, found = 0, list[Item]()
    for fence in FENCE.finditer(text):
        found += [Item(command) for command in COMMAND.findall(text[start : fence.start()])]
        language, block = fence.groups()
        if language == "sh":
            found += [Item(command) for command in commands_in(block)]
        elif language == "python":
            found.append(Item(block, is_python=True))
        elif language == "output":
            found[-1] = found[-1]._replace(output=textwrap.dedent(block))
        start = fence.end()
    return found + [Item(command) for command in COMMAND.findall(text[start:])]


def commands_in(block: str) -> Iterator[str]:
    """Yield the commands of a shell script, each a line or a loop."""
    start = 0
    for loop in LOOP.finditer(block):
        yield from _lines(block[start : loop.start()])
        yield loop[0]
        start = loop.end()
    yield from _lines(block[start:])


def _lines(block: str) -> Iterator[str]:
    return (line.strip() for line in block.splitlines() if not re.match(r" *(#|$)", line))


def commands_of(path: Path) -> Iterator[str]:
    """Yield every command of a page, of a program's docstring, or of a configuration's comments."""
    if path.suffix == ".md":
        yield from (item.text for item in items_of(path) if not item.is_python)
    else:
        yield from COMMAND.findall(path.read_text(encoding="utf-8").replace("\\\n", " "))


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
