"""What the program says when it refuses something: tests/messages.txt, which `make messages` writes anew.

A test asks for the type of the error, its exit code, and what the message must name: a key, a value, a file. The whole
text is in that file, under the name of the test, where a review reads it; it says nothing else than before unless
somebody has committed what has changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import RunError, run_error
from dist_mem.runtime.environment import node_name
from tests.support.budget import function_of
from tests.support.paths import ROOT

FILE = ROOT / "tests" / "messages.txt"
VARIABLE = "DIST_MEM_REWRITE_MESSAGES"  # set by --rewrite-messages: nothing is compared
HEADER = "# Written by `make messages`: what the program says in these tests, with the error's type and exit code."
_VARYING = [  # what no two runs have in common
    (re.compile(r"usage: .*\n(?=.+\Z)", re.DOTALL), ""),  # lines of argparse are as wide as the terminal
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (re.compile(r"(?:/private)?/tmp/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s:,;()'\"]+"), "<tmp>"),
    (re.compile(r"(127\.0\.0\.1:|\[::1\]:|localhost:|127-0-0-1-|'127\.0\.0\.1', )\d+"), r"\1<port>"),
    (re.compile(r"\b[0-9a-f]{12,}\b"), "<hash>"),
    (re.compile(r"process \d{3,} on [\w.-]+"), "process <id> on <host>"),
    (re.compile(rf"(node |those of |can |rendezvous +){re.escape(node_name())}\b"), r"\1<host>"),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "<date>"),
    (re.compile(r" {2,}"), "  "),  # columns, as wide as the longest name
    (re.compile(r"tfevents\.\d+"), "tfevents.<time>"),
]
_LINE = re.compile(r"(?<=\.yaml):\d+(?=: )")  # in a file that a test writes; tests/config/test_documents.py checks it
_heard: dict[str, set[str]] = {}


def on_one_line(text: str) -> str:
    """Return a message as the file has it."""
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return text.strip().replace("\n", "\\n")


def read(path: Path = FILE) -> dict[str, set[str]]:
    """Return the messages by test function."""
    found: dict[str, set[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("tests/"):
            texts = found.setdefault(line, set())
        elif line.startswith("    "):
            texts.add(line.strip())
    return found


known = cache(read)


def said(text: str, *named: object) -> None:
    """Assert that a text names all these, and that it is one of the messages that are known of this test."""
    text = _LINE.sub("", text)
    for each in named:
        assert str(each) in text, f"{each} is not named in: {text}"
    name = function_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
    line = on_one_line(text)
    _heard.setdefault(name, set()).add(line)
    if VARIABLE not in os.environ:
        texts = "\n".join(sorted(known().get(name, ()))) or "nothing"
        assert line in known().get(name, ()), f"{line}\n--- tests/messages.txt has (make messages):\n{texts}"


def said_line(code: int, printed: str, *named: object) -> None:
    """Assert the same of the one line that names all these, of what a program prints that ends with this code."""
    lines = {line for line in _LINE.sub("", printed).splitlines() if all(str(each) in line for each in named)}
    assert len(lines) == 1, f"{len(lines)} lines name {named} in: {printed}"
    said(f"exit code {code}: {lines.pop()}")


def described(error: BaseException) -> str:
    """Return type, exit code and text of an error, as the file has them."""
    code = ""
    if isinstance(error, RunError | ValueError | OSError):
        code = f", exit code {run_error(error).exit_code}"
    return f"{type(error).__name__}{code}: {error}"


@contextmanager
def refused(error: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error, whose message names all these."""
    with pytest.raises(error) as caught:
        yield caught
    said(described(caught.value), *named)


def heard() -> dict[str, list[str]]:
    """Return what this process has heard, for the process that writes the file."""
    return {name: sorted(texts) for name, texts in _heard.items()}


def rewrite(messages: Iterable[Mapping[str, Iterable[str]]], partly_run: Collection[str], path: Path = FILE) -> None:
    """Replace the messages of the test functions that were run; those of which only some variants were keep theirs."""
    found = read(path)
    together: dict[str, set[str]] = {}
    for each in messages:
        for name, texts in each.items():
            together.setdefault(name, set(found.get(name, ()) if name in partly_run else ())).update(texts)
    found |= together
    blocks = ["\n".join([name, *(f"    {text}" for text in sorted(found[name]))]) for name in sorted(found)]
    path.write_text("\n\n".join([HEADER, *blocks]) + "\n", encoding="utf-8")
