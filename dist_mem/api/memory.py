"""What a model remembers of texts, as a value that can be kept in a file."""

from __future__ import annotations

from pathlib import Path

from dist_mem.evaluation.kept_memory import KeptMemory, content_of, fit, save_content
from dist_mem.evaluation.memory_file import MemoryFile, TextRead, read_memory_file
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.reading import Reading, with_open_segment


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
        save_content(Path(path), file.header, file.tensors)

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
            kept = fit(trained, self._content())
            reading = with_open_segment(kept.state, [kept.inputs], seg_len=trained.config.train.seg_len)
            self._read = trained, reading
        return self._read[1]

    def _content(self) -> MemoryFile:
        if self._file is None:
            assert self._read is not None
            trained, reading = self._read
            inputs = reading.open_tokens[0, : int(reading.open_len)]
            content = content_of(trained, KeptMemory(reading.state, inputs, self.texts))
            self._file = MemoryFile(Path("the memory"), *content)
        return self._file

    def __repr__(self) -> str:
        return f"Memory({', '.join(f'{text.name}: {text.num_tokens:,} tokens' for text in self.texts)})"
