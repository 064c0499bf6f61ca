"""The arguments of `dist-mem inspect`, and the model and document that it reads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import Config, DataConfig, EvalConfig
from dist_mem.data.build_record import built_splits
from dist_mem.data.directory import local_dir, open_index, refresh
from dist_mem.data.documents import Document, Documents
from dist_mem.data.mixture import source_names, source_settings
from dist_mem.data.plan import cut_lengths
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError
from dist_mem.evaluation.document_sizes import count_words, text_size
from dist_mem.evaluation.report_names import digest_part
from dist_mem.evaluation.split_layout import Extent
from dist_mem.evaluation.trained_model import (
    Checkpoint,
    TrainedModel,
    open_model,
    read_settings,
    tokenizer_of_checkpoint,
    tokenizer_of_data,
)
from dist_mem.inspection.counterfactual import TokenSpan
from dist_mem.inspection.reading import text_document
from dist_mem.runtime.distributed import World
from dist_mem.runtime.terminal import some


@dataclass(frozen=True)
class InspectionRequest:
    """The settings of an inspection."""

    run: Path  # a run directory, one checkpoint in it, or an export
    against: Path | None = None  # another one, with the same tokenizer
    book: str | None = None  # id of a document; None: a text is given
    text: Path | None = None  # UTF-8 file
    split: str | None = None  # of the book; None: eval.split
    checkpoint: int | None = None  # step of the first run; None: the newest that verifies
    empty_at: int | None = None  # position at which the memory is emptied
    without: TokenSpan | None = None  # tokens to take out of the memory
    passages: int | None = None  # remove every segment in turn, at most so many per segment; None: none
    show: TokenSpan | None = None  # tokens to print; None: those with the largest gains
    with_colour: bool = False
    overrides: tuple[str, ...] = ()


class InspectionSubject(NamedTuple):
    """What is inspected."""

    trained: TrainedModel
    document: Document
    title: str
    name: str  # for names of files
    num_words: int  # as `dist-mem evaluate` counts those of the document


def request_of(options: argparse.Namespace, *, with_colour: bool) -> InspectionRequest:
    """Return the request of a command line.

    Raises:
        UnusableError: more than one other run is given.
    """
    runs = [text for text in options.overrides if is_run(text)]
    if len(runs) > 1:
        raise UnusableError(f"inspect: {options.run} is compared with one run, but {', '.join(runs)} are given")
    return InspectionRequest(
        run=options.run,
        against=Path(runs[0]) if runs else None,
        book=options.book,
        text=options.text,
        split=options.split,
        checkpoint=options.checkpoint,
        empty_at=options.empty_at,
        without=options.without and TokenSpan(*options.without),
        passages=options.passages,
        show=options.show and TokenSpan(*options.show),
        with_colour=with_colour,
        overrides=tuple(text for text in options.overrides if not is_run(text)),
    )


def is_run(text: str) -> bool:
    """Return whether an argument is the path of a run, and no key=value."""
    return "=" not in text or Path(text).is_dir()


def open_subject(request: InspectionRequest, found: Checkpoint, world: World, text: str | None) -> InspectionSubject:
    """Open the model of the first run, and the book, or the document of a text.

    Raises:
        UnusableError, ValueError: the settings, the data or the document are invalid.
    """
    config = settings_of(request, found)
    if request.book is not None:
        split = request.split or config.eval.split
        refresh(config.data, [split])
        trained = open_model(found, config, tokenizer_of_data(found, config.data), world.device)
        document, title, num_words = open_book(config.data, config.eval, split, request.book, trained.tokenizer)
        return InspectionSubject(trained, document, title, f"{split}-{request.book}", num_words)
    assert request.text is not None and text is not None
    trained = open_model(found, config, tokenizer_of_checkpoint(found), world.device)
    document = text_document(trained, text).part(0, config.eval.max_document_len or 2**62)
    name, num_words = f"text-{request.text.stem}_{digest_part(text)}", count_words(document.tokens, trained.tokenizer)
    return InspectionSubject(trained, document, str(request.text), name, num_words)


def settings_of(request: InspectionRequest, found: Checkpoint) -> Config:
    """Return the configuration of a checkpoint for this request: documents are read one by one."""
    overrides = [*request.overrides, "eval.layout=documents"]
    return read_settings(found.directory, overrides, reads_data=request.book is not None)


def open_other(request: InspectionRequest, found: Checkpoint, world: World) -> TrainedModel:
    """Open the model of the other run; it needs no data, because its checkpoint has the tokenizer."""
    config = read_settings(found.directory, request.overrides)
    return open_model(found, config, tokenizer_of_checkpoint(found), world.device)


def open_book(
    data: DataConfig, eval_config: EvalConfig, split: str, book: str, tokenizer: Tokenizer
) -> tuple[Document, str, int]:
    """Return a document of a split by its id, its title, with the source if data.path does not have it, and its words.

    Raises:
        UnusableError: there is none, several sources of a mixture have one, or it is empty.
    """
    index = open_index(data, split)
    ids, source = [entry.id for entry in index.documents], ""
    if book not in ids:
        found = _in_sources(data, split, book)
        if len(found) != 1:
            where = f"{', '.join(found)} have such documents: add data.path=FOLDER of one"
            nowhere = f"{index.split_dir} has no such document; it has {some(ids, 5)}"
            raise UnusableError(f"--book {book}: {where if found else nowhere}")
        ((source, index),) = found.items()
        ids = [entry.id for entry in index.documents]
    number = ids.index(book)
    lengths = cut_lengths(index.documents.num_tokens, eval_config.max_document_len)
    if not lengths[number]:
        raise UnusableError(f"--book {book}: this document of {index.split_dir} has no tokens; give another one")
    title = f"{index.documents[number].title}{f' ({source})' if source else ''}"
    document = Documents(index, lengths, bos_id=tokenizer.bos_id).open(number)
    return document, title, int(text_size(index, number, Extent(lengths), tokenizer).words)


def _in_sources(data: DataConfig, split: str, book: str) -> dict[str, Index]:
    """Return the split of every source of a mixture that has a document of this id, by the source's name."""
    sources = zip(source_names(data), source_settings(data), strict=False) if data.mixture else ()
    opened = {name: open_index(one, split) for name, one in sources if split in built_splits(local_dir(one))}
    return {name: index for name, index in opened.items() if any(entry.id == book for entry in index.documents)}
