"""The report command: one self-contained HTML file about one or several runs.

    dist-mem report runs/demo
    dist-mem report runs/demo runs/demo_none --book 900000
    dist-mem report runs/demo --text book.txt -o book.html

Without a book, only files of the runs are read. With one, the first run reads it with memory, without, and without each
passage in its memory; a second run reads it too. The page is added to the first run in MLflow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from dist_mem.config.sources import read_overrides
from dist_mem.data.directory import open_index, refresh
from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import cut_lengths, segment_starts
from dist_mem.errors import EXIT_DONE, UnusableError, run_error
from dist_mem.evaluation.evaluate import use_threads
from dist_mem.evaluation.sweep import names_of
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.inspection.counterfactual import remove_passages
from dist_mem.inspection.page.assemble import Section, assembled
from dist_mem.inspection.page.book import Book, encoded
from dist_mem.inspection.page.curves import charts
from dist_mem.inspection.page.pictures import pictures
from dist_mem.inspection.page.tables import evaluation_tables, find_evaluations, settings_table
from dist_mem.inspection.reading import read_document, text_document
from dist_mem.runtime.files import write_text
from dist_mem.tracking.sync import log_to_run, read_config
from dist_mem.tracking.tracker import METRICS_FILE, read_points

PAGE_NAME = "report.html"
ROOM = 9_000_000  # bytes of the page's book; the details of tokens are cut to fit


class Asked(NamedTuple):
    """The book that the page shows."""

    book: str | None  # id of a document; None: a text
    text: Path | None  # a UTF-8 file; None: no text
    split: str | None  # of the document; None: eval.split
    removes: bool  # passages are removed, one at a time


def run(runs: Sequence[Path], asked: Asked, *, out: Path | None, overrides: Sequence[str] = ()) -> int:
    """Run the command; return the exit code of the process.

    Args:
        out: the file to write; None: report.html in the first run.
        overrides: `key=value` of the keys in `trained_model.OVERRIDABLE`.

    Raises:
        UnusableError: a run, the document, the text or an override cannot be used.
    """
    try:
        page = report(runs, asked, overrides=overrides)
        path = out or runs[0] / PAGE_NAME
        write_text(path, page)
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    _attach(path, runs[0], overrides)
    return EXIT_DONE


def report(runs: Sequence[Path], asked: Asked, *, overrides: Sequence[str] = ()) -> str:
    """Return the page. Raises as `run`, and OSError or ValueError for a file of a run that cannot be read."""
    labels = names_of(runs)
    settings = settings_table(runs, labels)  # first: it finds out which directories are none of a run
    evaluations = [entry for path, label in zip(runs, labels, strict=True) for entry in find_evaluations(path, label)]
    sections = [
        Section("Curves", charts([read_points(path / METRICS_FILE) for path in runs], labels)),
        Section("Evaluations", evaluation_tables(evaluations)),
        Section("Figures", pictures(runs, labels)),
        Section("Settings", settings),
    ]
    book = None
    if asked.book is not None or asked.text is not None:
        book = encoded(_book(runs, labels, asked, overrides), room=ROOM)
    footer = f"Made by dist-mem report {' '.join(labels)}. This file needs no network."
    return assembled(", ".join(labels), [part for part in sections if part.content], footer=footer, book=book)


def _book(runs: Sequence[Path], labels: Sequence[str], asked: Asked, overrides: Sequence[str]) -> Book:
    """Read the book with the first run, and with the second if there is one."""
    models = [load_model(path, *overrides) for path in runs[:2]]
    trained = models[0]
    use_threads(trained.config)
    document, title = _document(trained, asked)
    reading = read_document(trained, document, other=models[1] if len(models) > 1 else None)
    removed = remove_passages(trained, document) if asked.removes else None
    train, cut = trained.config.train, trained.config.data.cut
    borders = segment_starts(len(document.tokens), seg_len=train.seg_len, cut=cut)
    other = labels[1] if len(models) > 1 else None
    return Book(title, labels[0], trained.tokenizer.pieces, reading, removed, borders, other)


def _document(trained: TrainedModel, asked: Asked) -> tuple[Document, str]:
    """Return the document that is asked for, and its title."""
    if asked.text is not None:
        return text_document(trained, asked.text.read_text(encoding="utf-8")), asked.text.name
    config = trained.config
    split = asked.split or config.eval.split
    refresh(config.data, [split])
    index = open_index(config.data, split)
    ids = [entry.id for entry in index.documents]
    if asked.book not in ids:
        raise UnusableError(f"--book {asked.book}: {index.split_dir} has no such document; it has {', '.join(ids[:8])}")
    number = ids.index(asked.book)
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], config.eval.max_document_len)
    document = Documents(index, lengths, bos_id=trained.tokenizer.bos_id).open(number)
    return document, index.documents[number].title


def _attach(path: Path, run_dir: Path, overrides: Sequence[str]) -> None:
    """Add the page to the run in MLflow, if it is in the run directory and the run is tracked."""
    given: Any = OmegaConf.create(read_overrides([text for text in overrides if text.startswith("tracking.")]))
    config = read_config(run_dir, given)
    if not config.tracking.mlflow:
        return
    if not path.resolve().is_relative_to(run_dir.resolve()):
        print(f"not added to the run in MLflow, because {path} is outside of {run_dir}", file=sys.stderr)
        return
    complaint = log_to_run(
        config, run_dir=run_dir.resolve(), step=0, metrics={}, files=[path.resolve()], overrides=overrides
    )
    if complaint:
        print(complaint, file=sys.stderr)
