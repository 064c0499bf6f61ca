"""Read a text once and keep its memory in a file, to continue from it at any time, on any machine.

    memory = read_text(trained, book, name="holmes.txt")
    save_memory(trained, memory, "holmes.mem")
    memory = load_memory(trained, "holmes.mem")
    scores = score(trained, question, after=memory.reading)

The file contains one lane (dist_mem/evaluation/memory_file.py). `select(memory.reading, [0] * 5)` continues it in five
lanes. Scores and generated texts equal those of a model that reads the text before, on a CPU bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_mem.evaluation.kept_memory import KeptMemory, fit, write_kept
from dist_mem.evaluation.memory_file import TextRead, read_memory_file
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.arguments import check_trained, wrong_type
from dist_mem.generation.reading import Reading, check_reading, read, start, with_open_segment
from dist_mem.runtime.progress import Progress
from dist_mem.runtime.terminal import counted

_SEGMENTS_AT_ONCE = 64  # between two updates of the progress


class TextMemory(NamedTuple):
    """What a model remembers of the texts that it has read."""

    reading: Reading  # one lane, after the texts, to score or generate what follows
    texts: tuple[TextRead, ...]  # in the order in which they were read, as one document

    @property
    def num_tokens(self) -> int:
        """Number of tokens read."""
        return sum(text.num_tokens for text in self.texts)


def read_text(
    trained: TrainedModel, text: str, *, name: str = "text", after: TextMemory | None = None, shown: bool = False
) -> TextMemory:
    """Read a text from its first token, or as the continuation of earlier texts, and return the memory of it.

    Args:
        name: of the text, for messages and `dist-mem memory show`.
        after: the memory of the earlier texts; None: an empty memory, and BOS.
        shown: print the progress to stderr.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_trained(trained)
    for argument, value in (("text", text), ("name", name)):
        if not isinstance(value, str):
            raise wrong_type(argument, value, "a str")
    reading = start(trained) if after is None else _one_lane(trained, after, "after").reading
    tokens = trained.tokenizer.encode(text)
    step = _SEGMENTS_AT_ONCE * trained.config.train.seg_len
    with Progress(len(tokens), f"reading {name}", shown=shown) as progress:
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            reading = read(trained, reading, [part])
            progress.add(len(part))
    new = TextRead(name, hashlib.sha256(text.encode()).hexdigest(), len(tokens))
    return TextMemory(reading, (*(after.texts if after else ()), new))


def save_memory(trained: TrainedModel, memory: TextMemory, path: Path | str) -> None:
    """Write a memory of this model into a file, atomically.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnusableError: the path cannot be written.
    """
    check_trained(trained)
    reading = _one_lane(trained, memory, "memory").reading
    kept = KeptMemory(reading.state, reading.open_tokens[0, : int(reading.open_len)], memory.texts)
    write_kept(trained, kept, Path(path))


def load_memory(trained: TrainedModel, path: Path | str) -> TextMemory:
    """Read the memory in a file, which this model must have read: its checkpoint, a copy, or an export of it.

    Raises:
        UnusableError: there is no such file, it is damaged or no memory file, or another model or the same model with
            other settings has read it; the message names the difference and the fix.
        UnfitError: the file cannot be read now.
    """
    check_trained(trained)
    kept = fit(trained, read_memory_file(Path(path)))
    reading = with_open_segment(kept.state, [kept.inputs], seg_len=trained.config.train.seg_len)
    return TextMemory(reading, kept.texts)


def open_to_generate(path: Path, overrides: Sequence[str], step: int | None) -> TrainedModel:
    """Load a model for a command that reads or generates text in one process, on a GPU if there is one.

    Raises:
        ValueError: as `load_model`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_model(path, *overrides, step=step, device=device)
    if trained.config.train.threads:
        torch.set_num_threads(trained.config.train.threads)
    return trained


def _one_lane(trained: TrainedModel, memory: Any, name: str) -> TextMemory:
    """Return the argument `name` if it is the memory of one lane of this model."""
    if not isinstance(memory, TextMemory):
        raise wrong_type(name, memory, "a TextMemory, as read_text or load_memory returns it")
    lanes = len(check_reading(trained, memory.reading, f"{name}.reading").open_len)
    if lanes != 1:
        raise ValueError(f"{name}.reading has {counted(lanes, 'lane')}, but a memory file contains one lane")
    return memory
