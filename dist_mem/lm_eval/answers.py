"""The answers of a command that has not ended, one line each, so that the same command goes on where it stopped.

    RUN/evaluations/lm_eval/TASKS-step-STEP.answers.jsonl

The first line says of which model and settings the answers are; a file of another is begun again. It is JSON, since a
run folder may be somebody else's, whose pickles would run as a program. A line that was cut off ends the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import open_regular, read_regular, write_text


class AnswerLog:
    """The answers to requests of the harness, by what is asked. As a context it closes its file."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """
        Args:
            path: the file; it may be there, of a command that was stopped.
            settings: what the answers depend on, of JSON's types.

        Raises:
            OSError: it cannot be opened or written.
        """
        self.path = path
        head = json_text(settings)
        lines = [head, *_complete_lines(path, head)]
        self.found: dict[str, Any] = dict(map(json.loads, lines[1:]))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))
        self._file = open_regular(path, "ab")

    def add(self, key: str, answer: Any) -> None:
        """Write an answer, of JSON's types; a later command of the same settings finds it."""
        self.found[key] = answer
        self._file.write((json_text([key, answer]) + "\n").encode())
        self._file.flush()

    def remove(self) -> None:
        """Remove the file: all is reported."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def request_key(kind: str, *asked: Any) -> str:
    """Return the key of a request: a digest of its type and its arguments, of JSON's types."""
    return hashlib.sha256(json_text([kind, *asked]).encode()).hexdigest()


def _complete_lines(path: Path, head: str) -> list[str]:
    """Return the lines after the first of a file that begins with `head`, up to one that is no answer."""
    try:
        first, *rest = read_regular(path).decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    kept: list[str] = []
    if first == head:
        for line in rest:
            answer = None
            with suppress(RecursionError, ValueError):
                answer = json.loads(line)
            if not (isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], str)):
                break
            kept.append(line)
    return kept
