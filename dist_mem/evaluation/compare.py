"""Evaluations of several runs side by side: word-level perplexity, and recall perplexity by distance.

Where words are not known (blocks), token perplexity stands in their place.

    dist-mem compare runs/none runs/transformer_xl

Bands of distance are the same for all: those of the run whose segment and short-term memory together reach farthest. A
model without memory cannot know what stands before its segment, so a memory that works shows in the middle band.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.errors import EXIT_DONE, EXIT_FAILED
from dist_mem.evaluation.plot import plot_recall
from dist_mem.evaluation.report import Band, Report, read_report, recall_bands, same_text, shown

_PREFERRED = ("test", "validation")


class Entry(NamedTuple):
    """One run in the comparison."""

    name: str
    report: Report


class Row(NamedTuple):
    """One run's figures, each with how many times lower it is than the first run's."""

    name: str
    perplexity: float  # word-level; of tokens where words are not known
    gain: float  # first run's / this one's
    accuracy: float  # nan where it is not known
    recall: dict[Band, tuple[float, float]]  # perplexity and gain


def find_reports(paths: Sequence[Path], split: str | None) -> list[Entry]:
    """The newest report of a split in each run directory, all of one protocol; a path may also be a report itself.

    Args:
        split: None: test if every run has it, else validation.

    Raises:
        ValueError: a run has no report of the split, or they have no protocol in common; says how to get one.
    """
    for wanted in [split] if split else _PREFERRED:
        found = {path: _newest(path, wanted) for path in paths}
        missing = [path for path, reports in found.items() if not reports]
        if not missing:
            tag = _common_tag({path: reports for path, reports in found.items() if path.suffix != ".json"})
            return [
                Entry(path.resolve().name.removesuffix(".json"), read_report(reports.get(tag, path)))
                for path, reports in found.items()
            ]
    raise ValueError(f"{missing[0]}: no evaluation of {wanted}; run: dist-mem evaluate {missing[0]} --split {wanted}")


def _newest(path: Path, split: str) -> dict[str, Path]:
    """The newest report of each protocol, by its tag (`protocol.tag_of`): "" as trained."""
    if path.suffix == ".json":
        return {"": path}
    reports = sorted((path / "evaluations").glob(f"{split}-step-*.json"))  # steps are padded with zeros
    return {report.stem.removeprefix(f"{split}-step-").partition("-")[2]: report for report in reports}


def _common_tag(found: Mapping[Path, Mapping[str, Path]]) -> str:
    """As trained where every run has that, else the one other protocol that all have."""
    common = set.intersection(*(set(reports) for reports in found.values())) if found else {""}
    if "" in common or len(common) == 1:
        return "" if "" in common else common.pop()
    told = [
        f"{path.name} {' and '.join(f'by {tag}' if tag else 'as trained' for tag in sorted(reports))}"
        for path, reports in found.items()
    ]
    raise ValueError(f"{', '.join(told)}: evaluate them alike, or give the report files themselves")


def compare(reports: Sequence[Entry]) -> list[Row]:
    """The figures of every run over common bands; bands without recall tokens are left out.

    Raises:
        ValueError: the reports are not of the same text, or differ in tokenizer where tokens are compared.
    """
    first = reports[0].report
    _check_text(reports)
    by_words = first.num_words is not None
    others = [report for _, report in reports if report.tokenizer_fingerprint != first.tokenizer_fingerprint]
    if others and (not by_words or any(report.recall for report in others)):
        what = "recall distances are" if by_words else "where words are not known, perplexity is"
        raise ValueError(f"{what} in tokens, but the runs have different tokenizers: they do not compare")
    widest = max((report for _, report in reports), key=lambda report: report.seg_len + report.mem_len)
    bands = [band for band in recall_bands(widest.seg_len, widest.mem_len).values() if first.recall_in(band)[1] > 0]
    values = [report.word_perplexity if by_words else report.token_perplexity for _, report in reports]
    return [
        Row(
            name,
            value,
            values[0] / value,
            report.accuracy,
            {
                band: (report.recall_perplexity(band), first.recall_perplexity(band) / report.recall_perplexity(band))
                for band in bands
            },
        )
        for (name, report), value in zip(reports, values, strict=True)
    ]


def _check_text(reports: Sequence[Entry]) -> None:
    in_blocks = [name for name, report in reports if report.num_words is None]
    if 0 < len(in_blocks) < len(reports):
        raise ValueError(
            f"{', '.join(in_blocks)}: scored in blocks (eval.blocks), the others not; evaluate all with "
            "eval.blocks=false, and give the report files"
        )
    if not same_text([report for _, report in reports]):
        names = ", ".join(name for name, _ in reports)
        raise ValueError(f"{names}: these evaluations do not score the same documents; evaluate all on one data.path")


def to_table(entries: Sequence[Entry], rows: Sequence[Row]) -> str:
    """The comparison for a terminal."""
    first = entries[0].report
    bands = list(rows[0].recall)
    columns = [["run", *(row.name for row in rows)]]
    title = "token ppl" if first.num_words is None else "word ppl"
    columns.append([title, *(_cell(row.perplexity, row.gain) for row in rows)])
    if not all(math.isnan(row.accuracy) for row in rows):
        columns.append(["accuracy", *(shown(row.accuracy, ".2%") for row in rows)])
    for band in bands:
        columns.append([f"recall {band}", *(_cell(*row.recall[band]) for row in rows)])
    padded = [[f"{text:<{max(map(len, column))}}" for text in column] for column in columns]
    lines = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
    heading = f"split {first.split}, {len(first.documents)} documents, {first.num_scored:,} tokens"
    if bands:
        counts = ", ".join(f"{band} {first.recall_in(band)[1]:,}" for band in bands)
        heading += f"; recall tokens by distance to the referent: {counts}"
    return "\n".join([heading, *lines])


def _cell(value: float, gain: float) -> str:
    if not 0 < gain < math.inf or abs(gain - 1) < 0.005:
        return shown(value)
    return f"{shown(value)} ({gain:.2f}x lower)" if gain > 1 else f"{shown(value)} ({1 / gain:.2f}x higher)"


def run(paths: Sequence[Path], *, split: str | None = None, picture: Path | None = None) -> int:
    """The command; `picture` is a file to draw the recall curves into. Returns the exit code of the process."""
    try:
        entries = find_reports(paths, split)
        print(to_table(entries, compare(entries)))
        if picture is not None:
            plot_recall(entries, picture)
            print(f"written: {picture}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE
