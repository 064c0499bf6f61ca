"""Output of `dist-mem generate`, for one run or several with the same prompt: tables, text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_mem.generation.generate import Sampling
from dist_mem.generation.text import SIZES, Repetition, measure
from dist_mem.runtime import markdown
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.terminal import table

FORMAT_VERSION = 1
PROMPT_CHARS = 2000  # characters of the prompt's end that a file contains


@dataclass(frozen=True)
class Continuation:
    """The texts that one run generated from the prompt."""

    run: str
    checkpoint: str
    step: int
    memory: str  # its kind and the kind of the memory below
    seg_len: int  # T, tokens
    mem_len: int  # M, tokens; 0: no short-term memory
    prompt_tokens: int
    num_tokens: list[int]  # per text
    seconds: float  # to generate all texts, without reading the prompt
    texts: list[str]
    stopped: bool  # by Ctrl-C or a closed pipe
    memory_file: str | None = None  # whose text the prompt continues; None: the prompt begins a document

    @property
    def title(self) -> str:
        """The run and its settings, in one line."""
        return f"{self.run} ({self.memory}, T {self.seg_len}, M {self.mem_len}, step {self.step})"

    @property
    def pace(self) -> str:
        """The number of tokens and the speed of generation."""
        tokens = sum(self.num_tokens)
        return f"{tokens:,} tokens, {tokens / self.seconds:.1f} per second" if tokens else "no tokens"


def _format_share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _repetition_table(continuations: Sequence[Continuation]) -> list[list[str]]:
    """Return the table of repetition: a heading, then a row per run."""
    heading = ["run", *(f"rep-{size}" for size in SIZES), *(f"distinct-{size}" for size in SIZES)]
    rows = [heading]
    for continuation in continuations:
        repetition = measure(continuation.texts)
        values = [table[size] for table in repetition for size in SIZES]
        rows.append([continuation.run, *map(_format_share, values)])
    return rows


def to_table(continuations: Sequence[Continuation]) -> str:
    """Return the repetition of every run as a table for a terminal."""
    return "\n".join(table(_repetition_table(continuations)))


def to_text(continuations: Sequence[Continuation]) -> str:
    """Return all texts, each under a heading if there are several."""
    if len(continuations) == len(continuations[0].texts) == 1:
        return continuations[0].texts[0]
    parts = [
        f"== {heading(continuation, number)}\n{text}\n"
        for continuation in continuations
        for number, text in enumerate(continuation.texts)
    ]
    return "\n".join(parts)


def heading(continuation: Continuation, number: int) -> str:
    """Return the title of the run, with the number of the text if it has several."""
    count = len(continuation.texts)
    return continuation.title + (f", text {number + 1} of {count}" if count > 1 else "")


def to_markdown(continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> str:
    """Return a Markdown page: the settings, the repetition, the end of the prompt and all texts."""
    head, *rows = _repetition_table(continuations)
    parts = [f"# The same prompt, continued\n\n{_settings(sampling)}\n\n" + "\n".join(markdown.table(head, rows))]
    parts.append(f"## The prompt{_cut_remark(prompt)}\n\n{_fence(prompt[-PROMPT_CHARS:])}")
    for continuation in continuations:
        for number, text in enumerate(continuation.texts):
            parts.append(f"## {heading(continuation, number)}\n\n{_fence(text)}")
    return "\n\n".join(parts) + "\n"


def _settings(sampling: Sampling) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asdict(sampling).items())


def _cut_remark(prompt: str) -> str:
    return f": the last {PROMPT_CHARS:,} of {len(prompt):,} characters" if len(prompt) > PROMPT_CHARS else ""


def _fence(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def to_json(continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> str:
    """Return all settings, measures and texts as JSON."""
    described = [
        asdict(continuation) | _measures_by_name(measure(continuation.texts)) for continuation in continuations
    ]
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sampling": asdict(sampling),
        "prompt": {"characters": len(prompt), "end": prompt[-PROMPT_CHARS:]},
        "continuations": described,
    }
    return json_text(content, indent=1, ensure_ascii=False) + "\n"


def _measures_by_name(repetition: Repetition) -> dict[str, float | None]:
    """Return the measures by name: rep-1, ..., distinct-4."""
    tables = repetition._asdict().items()
    return {f"{name}-{size}": value for name, table in tables for size, value in table.items()}


def write(path: Path, continuations: Sequence[Continuation], prompt: str, sampling: Sampling) -> None:
    """Write a file: .json and .md contain everything, any other suffix only the texts."""
    if path.suffix == ".json":
        write_text(path, to_json(continuations, prompt, sampling))
    elif path.suffix == ".md":
        write_text(path, to_markdown(continuations, prompt, sampling))
    else:
        write_text(path, to_text(continuations))
