"""Errors that name what is wrong. Their whole texts are a report for reading, build/messages.txt of `make messages`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import EXIT_USAGE, RunError, run_error
from tests.support.paths import ROOT

REPORT = "DIST_MEM_MESSAGES"  # the file that texts are appended to, if any
_USAGE = re.compile(r"usage: .*\n(?=.+\Z)", re.DOTALL)  # of argparse: all options are named there
_LINE = re.compile(r"(?<=\.yaml):\d+(?=: )")  # in a file that a test writes; tests/config/test_documents.py checks it
_VARYING = [  # what no two runs have in common
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (re.compile(r"(?:/private)?/tmp/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s:,;()'\"]+"), "<tmp>"),
    (re.compile(r"\b[0-9a-f]{12,}\b"), "<hash>"),
]


def said(text: str, named: object, *more: object) -> None:
    """Assert that a text names all these: keys, values, files."""
    text = _LINE.sub("", _USAGE.sub("", text))
    for each in (named, *more):
        assert str(each) in text, f"{each} is not named in: {text}"
    if path := os.environ.get(REPORT):
        test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].partition(" (")[0]
        for pattern, name in _VARYING:
            text = pattern.sub(name, text)
        line = f"{test}: {text.strip()}".replace("\n", "\\n")
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def said_line(printed: str, named: object, *more: object) -> None:
    """Assert that all lines of a text that name all these are the same one, and that there is one."""
    lines = {line for line in _LINE.sub("", printed).splitlines() if all(str(each) in line for each in (named, *more))}
    assert len(lines) == 1, f"{len(lines)} lines name {(named, *more)} in: {printed}"
    said(lines.pop(), named)


@contextmanager
def refused(error: type[BaseException], named: object, *more: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this class and its exit code, whose message names all these."""
    with pytest.raises(error) as caught:
        yield caught
    said(described(caught.value), named, *more)
    code = error.exit_code if issubclass(error, RunError) else EXIT_USAGE if issubclass(error, ValueError) else None
    if code is not None and isinstance(caught.value, Exception):
        assert run_error(caught.value).exit_code == code, f"not exit code {code}: {described(caught.value)}"


def described(error: BaseException) -> str:
    """Return type, exit code and text of an error."""
    code = f", exit code {run_error(error).exit_code}" if isinstance(error, RunError | ValueError | OSError) else ""
    return f"{type(error).__name__}{code}: {error}"
