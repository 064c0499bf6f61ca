"""What memory changed for every token of one document, and where each layer looked.

    reading = read_document(trained, document)
    reading.gain.nansum()  # nats

Shape letters: N tokens of the document.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.documents import Document
from dist_mem.data.plan import segment_starts
from dist_mem.errors import UnusableError
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.inspection.aggregates import WordGain, word_gains
from dist_mem.inspection.attended_passages import AttendedPassages, attend_nowhere, memory_rows, put_looked
from dist_mem.inspection.walk import always, losses_in_windows, losses_of, put_losses, walk
from dist_mem.inspection.words import words_of
from dist_mem.memory.base import named_tensors
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.runtime.progress import Progress

TOP = 3  # passages kept per token, layer and kind of rows


class DocumentReading(NamedTuple):
    """One document, read with memory and without; every tensor has a row per token of the document.

    Losses are float32, in nats, and nan where a token is not scored.
    """

    document: Document
    pieces: list[str]  # the text that every token completes
    nll: Tensor  # (N,)
    without: Tensor  # (N,) with the memory emptied before every segment, as `dist-mem evaluate --without-memory`
    windowed: Tensor  # (N,) without memory, but with half a segment of text before every token (`losses_in_windows`)
    emptied: Tensor | None  # (N,) with the memory emptied once, at `empty_at`; None: not asked for
    other: Tensor | None  # (N,) of the other model; None: there is none
    other_windowed: Tensor | None  # (N,) the same as `windowed`; None: the other model has a memory, or there is none
    layers: tuple[Mapping[str, AttendedPassages], ...]  # by kind of rows, but `segment`; empty: none is read

    @property
    def gain(self) -> Tensor:
        """What memory gained per token over `windowed`, (N,) float64; nan where a token is not scored."""
        return self.windowed.double() - self.nll.double()

    @property
    def compared_losses(self) -> Tensor | None:
        """The losses of the other model that single tokens are compared with."""
        return self.other if self.other_windowed is None else self.other_windowed

    def words(self) -> list[WordGain]:
        """Return what memory gained per word, in nats, for the words all of whose tokens are scored, in order."""
        return word_gains(words_of(self.pieces), self.gain)


def text_document(trained: TrainedModel, text: str) -> Document:
    """Return a text as a document.

    Raises:
        UnusableError: the text is empty.
    """
    tokens = trained.tokenizer.encode(text)
    if not len(tokens):
        raise UnusableError("the text has no tokens: there is nothing to read")
    return Document(0, tokens, scored=None, recall=None)


def check_same_tokens(trained: TrainedModel, other: TrainedModel) -> None:
    """Raise UnusableError unless two models have the same tokenizer."""
    first, second = (model.tokenizer.fingerprint for model in (trained, other))
    if first != second:
        raise UnusableError(
            f"{other.checkpoint.run_dir} has the tokenizer {second[:12]}, but {trained.checkpoint.run_dir} has "
            f"{first[:12]}: their tokens differ; give two runs that were trained on the same data"
        )


def read_document(
    trained: TrainedModel, document: Document, *, other: TrainedModel | None = None, empty_at: int | None = None
) -> DocumentReading:
    """Read a document with memory and without, and with the memory of another model.

    Args:
        empty_at: position; the memory is also emptied once, before the first segment that begins there or later.

    Raises:
        UnusableError: the models have different tokenizers, or no segment begins at `empty_at` or later.
    """
    if other is not None:
        check_same_tokens(trained, other)
    place = None if empty_at is None else first_border(trained, document, empty_at)
    passes = 2.5 + (other is not None) + (empty_at is not None)  # but the windows of another model without memory
    with Progress(int(passes * len(document.tokens)), "reading") as progress:
        nll, layers = _read_with_memory(trained, document, progress)
        without = losses_of(trained, document, progress, always)
        windowed = losses_in_windows(trained, document, without, progress) if has_memory(trained) else without
        emptied = None
        if place is not None:
            emptied = losses_of(trained, document, progress, lambda begin: begin == place)
        theirs = in_windows = None
        if other is not None:
            theirs = losses_of(other, document, progress)
            in_windows = None if has_memory(other) else losses_in_windows(other, document, theirs, progress)
    pieces = pieces_of(trained, document.tokens)
    return DocumentReading(document, pieces, nll, without, windowed, emptied, theirs, in_windows, layers)


def has_memory(trained: TrainedModel) -> bool:
    """Return whether a model carries anything from segment to segment but token types, which derive from the text."""
    return bool(named_tensors(init_state(trained, [0])._replace(types=())))


def first_border(trained: TrainedModel, document: Document, position: int) -> int:
    """Return the position where the first segment begins that begins at `position` or later.

    Raises:
        UnusableError: none does.
    """
    length, train = len(document.tokens), trained.config
    starts = segment_starts(length, seg_len=train.train.seg_len, cut=train.data.cut)
    later = starts[starts >= position]
    if position < 0 or not len(later):
        raise UnusableError(
            f"--empty-at {position}: no segment of the document begins there or later; give a position of 0 to "
            f"{starts[-1]}"
        )
    return int(later[0])


def _read_with_memory(
    trained: TrainedModel, document: Document, progress: Progress
) -> tuple[Tensor, tuple[dict[str, AttendedPassages], ...]]:
    """Return the losses, and where each layer looked."""
    num_tokens = len(document.tokens)
    losses = torch.full((num_tokens,), torch.nan)
    layers: tuple[dict[str, AttendedPassages], ...] = tuple({} for _ in trained.model.memories())
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document):
            put_losses(losses, step, step.output.nll[0])
            for looked, layer in zip(layers, inspector.layers, strict=True):
                for kind, rows in memory_rows(layer).items():
                    put_looked(looked.setdefault(kind, attend_nowhere(num_tokens, TOP)), step, rows)
            if step.is_kept:
                inspector.commit()
            progress.add(step.num_inputs)
    return losses, layers


def pieces_of(trained: TrainedModel, tokens: np.ndarray) -> list[str]:
    """Return the text that every token completes, as the report page shows it: together they are the whole text.

    A character of several tokens is that of the last; bytes without the rest of their character become U+FFFD.
    """
    decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), trained.tokenizer.pieces
    last = len(tokens) - 1
    return [decoder.decode(pieces[token], place == last) for place, token in enumerate(tokens.tolist())]
