"""What `dist-mem generate` has written, by one run or by several with the same prompt: for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_mem.generation.repetition import SIZES, Repetition, measure
from dist_mem.generation.sampling import Sampling
from dist_mem.runtime.files import write_text

FORMAT_VERSION = 1
PROMPT_CHARS = 2000  # of the end of the prompt, in a file


@dataclass(frozen=True)
class Continuation:
    """What one run made of the prompt."""

    run: str
    checkpoint: str
    step: int
    memory: str  # its kind, and that of the memory below
    seg_len: int  # T, tokens
    mem_len: int  # M, tokens; 0: no short-term memory
    prompt_tokens: int
    num_tokens: list[int]  # of each text
    seconds: float  # to write all texts, together, without reading the prompt
    texts: list[str]
    stopped: bool  # by Ctrl-C, or because nobody read on

    @property
    def title(self) -> str:
        """The run and what it is, in one line."""
        return f"{self.run} ({self.memory}, T {self.seg_len}, M {self.mem_len}, step {self.step})"

    @property
    def pace(self) -> str:
        """How fast it wrote."""
        tokens = sum(self.num_tokens)
        return f"{tokens:,} tokens, {tokens / self.seconds:.1f} a second" if tokens else "no tokens"


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _rows(continuations: Sequence[Continuation]) -> list[list[str]]:
    """The table of repetition: a heading, then a row for each run."""
    heading = ["run", *(f"rep-{size}" for size in SIZES), *(f"distinct-{size}" for size in SIZES)]
    rows = [heading]
    for continuation in continuations:
        repetition = measure(continuation.texts)
        values = [table[size] for table in repetition for size in SIZES]
        rows.append([continuation.run, *map(_shown, values)])
    return rows


def to_table(continuations: Sequence[Continuation]) -> str:
    """Repetition of every run, for a terminal."""
    columns = list(zip(*_rows(continuations), strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = zip(
        *([f"{text:<{width}}" for text in col] for col, width in zip(columns, widths, strict=True)), strict=True
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def to_text(continuations: Sequence[Continuation]) -> str:
    """Every text; under a heading where there are several."""
    if len(continuations) == len(continuations[0].texts) == 1:
        return continuations[0].texts[0]
    parts = [
        f"== {heading(continuation, number)}\n{text}\n"
        for continuation in continuations
        for number, text in enumerate(continuation.texts)
    ]
    return "\n".join(parts)


def heading(continuation: Continuation, number: int) -> str:
    """The run, and which of its texts this is where it has several."""
    count = len(continuation.texts)
    return continuation.title + (f", text {number + 1} of {count}" if count > 1 else "")


def to_markdown(continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> str:
    """A page: how it was made, the repetition, the end of the prompt, every text."""
    rows = [f"| {' | '.join(row)} |" for row in _rows(continuations)]
    rows.insert(1, f"|{'---|' * (len(SIZES) * 2 + 1)}")
    parts = [f"# The same prompt, continued\n\n{_settings(sampling)}\n\n" + "\n".join(rows)]
    parts.append(f"## The prompt{_cut(prompt)}\n\n{_fenced(prompt[-PROMPT_CHARS:])}")
    for continuation in continuations:
        for number, text in enumerate(continuation.texts):
            parts.append(f"## {heading(continuation, number)}\n\n{_fenced(text)}")
    return "\n\n".join(parts) + "\n"


def _settings(sampling: Sampling) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asdict(sampling).items())


def _cut(prompt: str) -> str:
    return f": the last {PROMPT_CHARS:,} of {len(prompt):,} characters" if len(prompt) > PROMPT_CHARS else ""


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def to_json(continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> str:
    """All that is known, for programs."""
    described = [asdict(continuation) | _named(measure(continuation.texts)) for continuation in continuations]
    facts: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sampling": asdict(sampling),
        "prompt": {"characters": len(prompt), "end": prompt[-PROMPT_CHARS:]},
        "continuations": described,
    }
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def _named(repetition: Repetition) -> dict[str, float | None]:
    """rep-1, ..., distinct-4."""
    tables = repetition._asdict().items()
    return {f"{name}-{size}": value for name, table in tables for size, value in table.items()}


def write(path: Path, continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> None:
    """Write a file: .json and .md hold everything, any other name the texts alone."""
    if path.suffix == ".json":
        write_text(path, to_json(continuations, prompt, sampling))
    elif path.suffix == ".md":
        write_text(path, to_markdown(continuations, prompt, sampling))
    else:
        write_text(path, to_text(continuations))
