"""Answers of `dist-mem` in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    """Result of a command."""

    code: int  # exit code; negative: the signal that killed it
    text: str  # standard output and standard error
    left: list[str]  # files and folders that it created


Asked = Callable[[Sequence[str]], Answer]
