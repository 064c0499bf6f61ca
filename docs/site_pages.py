"""Written pages of the site: commands from the parser, the Python API through mkdocstrings, a report of the example."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import griffe

import dist_mem
from dist_mem.cli.parser import build_parser

DOCTEST = re.compile(r"(?:^ *>>> .*\n?(?:^ *\S.*\n?)*)+", re.MULTILINE)


def commands_page() -> str:
    """Return the help of every command as a page."""
    os.environ["COLUMNS"] = "100"  # the help is as wide as the terminal
    parser, commands = build_parser()
    parts = [f"# Commands\n\n```text\n{parser.format_help()}```\n"]
    for name, command in commands.items():
        parts += [f"## {name}\n\n```text\n{command.format_help()}```\n"]
        actions = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        for sub_name, sub in (pair for action in actions for pair in action.choices.items()):
            parts += [f"### {name} {sub_name}\n\n```text\n{sub.format_help()}```\n"]
    return "\n".join(parts)


def python_page() -> str:
    """Return the page on which mkdocstrings describes every public name."""
    return "# Python\n\n" + "\n".join(f"::: dist_mem.{name}\n" for name in dist_mem.__all__)


@cache
def example_report() -> str:
    """Return the page that `dist-mem report --example` writes."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "dist_mem", "report", "--example", "--out", str(page)]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True)
        return page.read_text(encoding="utf-8")


class Doctests(griffe.Extension):
    """Show the examples of docstrings as code: Markdown takes `>>>` for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence the examples of one docstring."""
        if text := obj.docstring:
            text.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text.value)
