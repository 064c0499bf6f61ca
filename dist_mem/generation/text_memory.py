"""What a model remembers of texts, as a value that can be kept in a file, to continue from it on any machine.

    memory = read_text(trained, book, name="holmes.txt")
    memory.save("holmes.mem")
    scores = score(trained, question, after=Memory.load("holmes.mem").reading_of(trained))

It is one lane (dist_mem/evaluation/memory_file.py). `select(reading, [0] * 5)` continues it in five lanes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from dist_mem.evaluation.kept_memory import content_of, fit
from dist_mem.evaluation.memory_file import MemoryFile, TextRead, read_memory_file, write_memory_file
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.arguments import check_trained, wrong_type
from dist_mem.generation.reading import Reading, read, start, with_open_segment
from dist_mem.runtime.progress import Progress

_SEGMENTS_AT_ONCE = 64  # between two updates of the progress


class Memory:
    """What a model remembers of the texts that it has read; nothing changes it.

    `Model.read` and `Model.score` make it, and the methods of `Model` continue from it. Continuations equal those of a
    model that reads the texts before, on a CPU bit for bit.

    >>> memory = dist_mem.load("runs/demo").read("It was the best of times.", name="tale.txt")
    >>> memory
    Memory(tale.txt: 25 tokens)
    >>> memory.save("tale.mem")
    >>> dist_mem.Memory.load("tale.mem").num_tokens
    25
    """

    def __init__(
        self,
        texts: tuple[TextRead, ...],
        *,
        read: tuple[TrainedModel, Reading] | None = None,
        file: MemoryFile | None = None,
    ) -> None:
        self.texts = texts  # in the order in which they were read, as one document: name, sha256, num_tokens
        self._read, self._file = read, file  # at least one; the other is made when it is needed

    @classmethod
    def load(cls, path: Path | str) -> Memory:
        """Read a memory file, also one of `dist-mem read`; the model that continues from it checks that it fits.

        Raises:
            UnusableError: there is no such file, or it is damaged or no memory file.
            UnfitError: the file cannot be read now.
        """
        file = read_memory_file(Path(path))
        return cls(file.texts, file=file)

    def save(self, path: Path | str) -> None:
        """Write the memory into a file, atomically, for the same model on any machine (docs/howto/memory_files.md).

        Raises:
            UnusableError: the path cannot be written.
        """
        file = self._content()
        write_memory_file(Path(path), file.header, file.tensors)

    @property
    def num_tokens(self) -> int:
        """Number of tokens read."""
        return sum(text.num_tokens for text in self.texts)

    def reading_of(self, trained: TrainedModel) -> Reading:
        """Return the state of reading from which this model continues, one lane.

        Raises:
            UnusableError: another model has read it, or this one with other settings; the message names the fix.
        """
        if self._read is None or self._read[0] is not trained:
            state, inputs = fit(trained, self._content())
            self._read = trained, with_open_segment(state, [inputs], seg_len=trained.config.train.seg_len)
        return self._read[1]

    def _content(self) -> MemoryFile:
        if self._file is None:
            assert self._read is not None
            trained, reading = self._read
            inputs = reading.open_tokens[0, : int(reading.open_len)]
            self._file = content_of(trained, reading.state, inputs, self.texts)
        return self._file

    def __repr__(self) -> str:
        return f"Memory({', '.join(f'{text.name}: {text.num_tokens:,} tokens' for text in self.texts)})"


def begin(trained: TrainedModel, memory: Memory | None) -> Reading:
    """Return the reading that continues a memory, one lane; None: at the start of a document.

    Raises:
        TypeError: it is no Memory.
        UnusableError: the memory is that of another model.
    """
    if memory is None:
        return start(trained)
    if not isinstance(memory, Memory):
        raise wrong_type("memory", memory, "a Memory, as model.read(text) or dist_mem.Memory.load(path)")
    return memory.reading_of(trained)


def remember(
    trained: TrainedModel, reading: Reading, text: str, num_tokens: int, *, name: str, after: Memory | None
) -> Memory:
    """Return the memory of a text that has been read, one lane, after the texts of `after`."""
    new = TextRead(name, hashlib.sha256(text.encode()).hexdigest(), num_tokens)
    return Memory((*(after.texts if after else ()), new), read=(trained, reading))


def read_text(
    trained: TrainedModel, text: str, *, name: str = "text", memory: Memory | None = None, shown: bool = False
) -> Memory:
    """Read a text from its first token, or as the continuation of earlier texts, and return the memory of it.

    Args:
        name: of the text, for messages and `dist-mem memory show`.
        memory: of the earlier texts; None: an empty memory, and BOS.
        shown: print the progress to stderr.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnusableError: the memory is that of another model.
    """
    check_trained(trained)
    for argument, value in (("text", text), ("name", name)):
        if not isinstance(value, str):
            raise wrong_type(argument, value, "a str")
    reading = begin(trained, memory)
    tokens = trained.tokenizer.encode(text)
    step = _SEGMENTS_AT_ONCE * trained.config.train.seg_len
    with Progress(len(tokens), f"reading {name}", shown=shown) as progress:
        for first in range(0, len(tokens), step):
            part = tokens[first : first + step]
            reading = read(trained, reading, [part])
            progress.add(len(part))
    return remember(trained, reading, text, len(tokens), name=name, after=memory)


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
