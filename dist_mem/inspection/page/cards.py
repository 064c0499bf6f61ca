"""The cards on top of the report page: the model, what it has read, and what its memory is worth, at a glance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dist_mem.config.memory_blocks import describe_memory
from dist_mem.evaluation.protocol import short_term_len
from dist_mem.evaluation.scores import perplexity, same_text
from dist_mem.evaluation.trained_model import TrainedModel, name_data_of, tokens_read_by
from dist_mem.inspection.page.book import PageBook
from dist_mem.inspection.page.markup import Markup, digits, element, short_count
from dist_mem.inspection.page.tables import EvaluationReport, newest_by_protocol


class Card(NamedTuple):
    """A name, the figure in large type, and a line below it."""

    name: str
    value: str
    note: str


def cards(trained: TrainedModel, book: PageBook, evaluations: Sequence[EvaluationReport]) -> Markup:
    """Return the cards; `trained`: the model that read the book."""
    found = [*_of_model(trained), _perplexities(book, evaluations), _gain(book)]
    made = [
        element("li", element("span", card.name), element("strong", card.value), element("span", card.note))
        for card in found
    ]
    return element("ul", *made, class_="cards")


def _of_model(trained: TrainedModel) -> Iterator[Card]:
    mem_len, seg_len = short_term_len(trained.config.memory), trained.config.train.seg_len
    remembered = f"M = {mem_len:,}, " if mem_len else ""
    yield Card("memory", describe_memory(trained.config.memory), f"{remembered}segments of T = {seg_len:,} tokens")
    model, number = trained.config.model, sum(parameter.numel() for parameter in trained.model.parameters())
    yield Card("parameters", short_count(number), f"{model.num_layers} layers of width {model.d_model}")
    num_tokens, names = tokens_read_by(trained.checkpoint), name_data_of(trained.checkpoint)
    read = [] if num_tokens is None else [f"{short_count(num_tokens)} tokens"]
    data = [] if names is None else [f"data {names}"]
    figures = [*read, f"{trained.checkpoint.manifest['step']:,} steps", *data]
    yield Card("training", figures[0], ", ".join(figures[1:]))


def _perplexities(book: PageBook, evaluations: Sequence[EvaluationReport]) -> Card:
    """Return two perplexities: of both runs on a split whose text both have read, or else of the book."""
    newest = {key: entry.report for key, entry in newest_by_protocol(evaluations).items()}
    both = [name for run, name in newest if run == book.run and (book.other, name) in newest]
    both = [name for name in both if same_text([newest[run, name] for run in (book.run, book.other or "")])]
    if both and book.other is not None:
        name = "test" if "test" in both else both[0]
        first, second = (newest[run, name].word_perplexity for run in (book.run, book.other))
        title, runs = f"word perplexity, split {name}", f"{book.run} against {book.other}"
    else:
        count, unit = _words(book)
        against = book.reading.windowed if book.reading.compared_losses is None else book.reading.compared_losses
        first, second = (perplexity(_sum(losses), count) for losses in (book.reading.nll, against))
        title, runs = f"{unit} perplexity of this book", f"with memory against {book.other or 'without'}"
    return Card(title, f"{digits(first)} against {digits(second)}", f"{runs}: ratio {digits(second / first)}")


def _words(book: PageBook) -> tuple[int, str]:
    """Return the number of words of a book that is scored from its first word to its last, else that of its tokens."""
    is_scored = ~book.reading.nll.isnan()
    if bool(is_scored.all()):
        return book.num_words, "word"
    return int(is_scored.sum()), "token"


def _gain(book: PageBook) -> Card:
    nll, windowed, emptied = (_sum(part) for part in (book.reading.nll, book.reading.windowed, book.reading.without))
    note = f"less loss in this book than without memory; {digits(emptied - nll)} less than if emptied at every segment"
    return Card("the memory saves", f"{digits(windowed - nll)} nats", note)


def _sum(losses: Tensor) -> float:
    return math.fsum(losses[~losses.isnan()].tolist())
