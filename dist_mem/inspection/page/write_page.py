"""The report command: one self-contained HTML file about a book as one or two runs read it.

    dist-mem report runs/demo runs/demo_none --book 900000
    dist-mem report runs/demo --text book.txt -o book.html

The first run reads the book with memory, without, and without each passage in its memory, if that can forget one; a
second run reads it too. The page is added to the first run in MLflow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_mem.data.plan import segment_starts
from dist_mem.errors import run_error
from dist_mem.evaluation.job import StopCheck, find_checkpoint_together, run_on_ranks, use_threads
from dist_mem.evaluation.report_names import names_of
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel
from dist_mem.generation.text import read_file
from dist_mem.inspection.aggregates import aggregate
from dist_mem.inspection.counterfactual import cannot_forget, remove_passages
from dist_mem.inspection.page.assemble import assemble
from dist_mem.inspection.page.book import PageBook, encode_book
from dist_mem.inspection.page.cards import cards
from dist_mem.inspection.page.markup import element, join_pieces
from dist_mem.inspection.page.tables import find_evaluations, gain_tables, summary_table
from dist_mem.inspection.reading import read_document
from dist_mem.inspection.request import InspectionRequest, open_other, open_subject, settings_of
from dist_mem.inspection.words import words_of
from dist_mem.runtime.distributed import World
from dist_mem.runtime.files import write_text
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.signals import StopSignal
from dist_mem.tracking.mlflow.sync import log_to_run, read_tracking

PAGE_NAME = "report.html"
_LEAD = (
    "How a language model read a book, word by word. The memory of what it has read helped it to predict the words in "
    "blue, and misled it at those in orange."
)
ROOM = 9_000_000  # bytes of the page's book; the details of tokens are cut to fit


def run(asked: InspectionRequest, *, out: Path | None, early: StopSignal | None = None) -> int:
    """Run the command; return the exit code of the process.

    Args:
        asked: the page's runs and book; without `passages` the book is not read without each of them.
        out: the file to write; None: report.html in the first run, also for a checkpoint of it.
        early: as in `evaluate.run`.

    Raises:
        UnusableError: a run, the document, the text or an override cannot be used.
    """

    def work(world: World, check: StopCheck) -> None:
        text = None if asked.text is None else read_file(asked.text, "--text")
        runs = [asked.run, *filter(None, [asked.against])]
        labels = names_of(runs)
        found = [find_checkpoint_together(path, None, world) for path in runs]
        target = out or found[0].run_dir / PAGE_NAME
        _check_writable(target)  # what is wrong is said before a model reads for hours
        evaluations = [
            entry for each, label in zip(found, labels, strict=True) for entry in find_evaluations(each.run_dir, label)
        ]
        summary = summary_table(evaluations)
        trained, book = _book(asked, found, labels, text, world, check)
        has_summary = bool(evaluations) or not trained.checkpoint.is_export  # a hint, of what an export cannot have
        page = assemble(
            f"{book.title}, read by {' and '.join(labels)}",
            join_pieces([element("p", _LEAD), cards(trained, book, evaluations), *([summary] if has_summary else [])]),
            encode_book(book, room=ROOM),
            gain_tables(aggregate(words_of(book.reading.pieces), book.reading.gain)),
            footer=f"Made by dist-mem report {' '.join(labels)}. This file needs no network.",
        )
        _publish(page, target, found[0].run_dir, asked)

    return run_on_ranks(work, asked.overrides, early, alone="report")


def _check_writable(target: Path) -> None:
    """Raise the RunError of a file that cannot be written, found by a lock that is made beside it."""
    try:
        with hold_file(target):
            pass
    except OSError as error:
        text = f"{target} cannot be written ({error.strerror}): give -o FILE in another folder"
        raise run_error(error, text) from error


def _book(
    asked: InspectionRequest,
    checkpoints: Sequence[Checkpoint],
    labels: Sequence[str],
    text: str | None,
    world: World,
    check: StopCheck,
) -> tuple[TrainedModel, PageBook]:
    """Read the book with the first run, whose model is returned too, and with the second if there is one."""
    found = checkpoints[0]
    config = settings_of(asked, found)
    use_threads(config.train)
    trained, document, title, _, num_words = open_subject(asked, found, world, text)
    other = open_other(asked, checkpoints[1], world) if asked.against else None
    for model in (trained, other):
        if model is not None:
            model.model.register_forward_pre_hook(check)
    not_removed = cannot_forget(trained) if asked.passages else None
    if not_removed is not None:
        print(f"the page will have no removals of passages: {not_removed}", file=sys.stderr)
    reading = read_document(trained, document, other=other)
    return trained, PageBook(
        title if asked.text is None else asked.text.name,  # not its path: the page may be sent to others
        labels[0],
        trained.tokenizer.pieces,
        reading,
        remove_passages(trained, document, most=asked.passages) if asked.passages and not_removed is None else None,
        segment_starts(len(document.tokens), seg_len=trained.config.train.seg_len, cut=config.data.cut),
        num_words,
        labels[1] if other is not None else None,
        not_removed,
    )


def _publish(page: str, path: Path, run_dir: Path, asked: InspectionRequest) -> None:
    """Write the page, and add it to the first run in MLflow, if it is in its directory and the run is tracked."""
    write_text(path, page)
    print(f"written: {path} ({len(page.encode()) / 1e6:.1f} MB)")
    run_dir = run_dir.resolve()
    tracking = read_tracking(run_dir, [text for text in asked.overrides if text.startswith("tracking.")])
    if not tracking.mlflow:
        return
    if not path.resolve().is_relative_to(run_dir):
        print(f"not added to the run in MLflow, because {path} is outside of {run_dir}", file=sys.stderr)
        return
    complaint = log_to_run(
        tracking, run_dir=run_dir, step=0, metrics={}, files=[path.resolve()], overrides=asked.overrides
    )
    if complaint:
        print(complaint, file=sys.stderr)
