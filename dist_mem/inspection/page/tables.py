"""Tables of the report page: the runs' newest evaluations, and the words that gain from the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.evaluation.memory_gain import memory_gain
from dist_mem.evaluation.report_names import ReportName, counterpart, is_without_memory, list_reports
from dist_mem.evaluation.scores import Report, read_report
from dist_mem.inspection.aggregates import Aggregates
from dist_mem.inspection.page.markup import Markup, digits, element, join_pieces, table


class EvaluationReport(NamedTuple):
    """A report of `dist-mem evaluate`."""

    run: str  # label
    path: Path
    name: ReportName
    report: Report


def find_evaluations(run_dir: Path, label: str) -> list[EvaluationReport]:
    """Return the reports of a run, by split, step and protocol. Raises UnusableError for a file that is no report."""
    found = list_reports(run_dir).items()
    return [EvaluationReport(label, path, name, read_report(path, inside=run_dir)) for path, name in found]


def newest_by_protocol(evaluations: Sequence[EvaluationReport]) -> dict[tuple[str, str], EvaluationReport]:
    """Return the newest report with memory of every run (label) and protocol, as "test" or "test, mem_len-64"."""
    found = [entry for entry in evaluations if not is_without_memory(entry.path)]
    return {(entry.run, ", ".join(filter(None, (entry.name.split, entry.name.tag)))): entry for entry in found}


def summary_table(evaluations: Sequence[EvaluationReport]) -> Markup:
    """Return metrics of the newest report of every run and protocol; the memory's gain only where it was measured."""
    newest = newest_by_protocol(evaluations)
    if not newest:
        hint = "No evaluation yet. Run: "
        return element("p", hint, element("code", "dist-mem evaluate RUN --split test"), class_="empty")
    header = ["run", "split", "step", "word perplexity", "bits per byte", "accuracy"]
    rows = [
        [
            run,
            protocol,
            f"{entry.name.step:,}",
            digits(entry.report.word_perplexity),
            digits(entry.report.bits_per_byte),
            "n/a" if math.isnan(entry.report.accuracy) else f"{entry.report.accuracy:.1%}",
        ]
        for (run, protocol), entry in newest.items()
    ]
    gains = [_gain(entry) for entry in newest.values()]
    if any(gains):
        header.append("gain over an emptied memory (nats per token)")
        rows = [[*row, gain or "not measured"] for row, gain in zip(rows, gains, strict=True)]
    return table("Newest evaluations", header, rows, num_text=2)


def _gain(entry: EvaluationReport) -> str | None:
    """Return the gain of the memory in nats per token; None if the run was not also evaluated without it."""
    other = counterpart(entry.path)
    if not other.exists():
        return None
    without = read_report(other, inside=other.parent.parent)
    return digits(memory_gain(entry.report, without).nats)


def gain_tables(found: Aggregates) -> Markup:
    """Return which words gain from the memory: the largest gains, and groups of words."""
    top = [[each.word.text, each.word.kind, _token(each.word.first), digits(each.gain, "+")] for each in found.top]
    parts = [table("Largest gains", ["word", "class", "token", "nats"], top, num_text=2)]
    for name, groups in (
        ("By class of word", found.by_class),
        ("Names, by tokens since their last mention", found.by_distance),
        ("By position in the book", found.by_position),
    ):
        rows = [
            [group.label, f"{group.num_words:,}", digits(group.gain, "+"), digits(group.mean, "+")] for group in groups
        ]
        parts.append(table(name, ["", "words", "nats", "nats per word"], rows))
    if not found.top:
        return element("p", "This text has no words, so none gains.")
    share = found.share_of_names
    note = f"{found.names_in_top} of the {len(found.top)} largest gains are names."
    note += "" if math.isnan(share) else f" All names together have {share:.0%} of the total gain."
    return join_pieces([element("p", note), element("div", *parts, class_="tables")])


def _token(position: int) -> Markup:
    """Return a link to a token of the book."""
    return element("a", f"{position:,}", href=f"#t={position}")
