"""Tables of the report page: the evaluations of every run, and their settings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.config.check import flatten
from dist_mem.config.sources import read_saved
from dist_mem.errors import UnusableError
from dist_mem.evaluation.memory_gain import counterpart, is_without_memory, memory_gain
from dist_mem.evaluation.report import TABLE_ROWS, Report, accuracy, perplexity, read_report, recall_bands, shown
from dist_mem.inspection.aggregates import Aggregates
from dist_mem.inspection.page.markup import Markup, element, joined, table
from dist_mem.runtime.files import checked_inside

_OTHER_COMMANDS = ("dialogue-", "inspect-")  # whose files in RUN/evaluations are no reports of `dist-mem evaluate`


class Evaluation(NamedTuple):
    """A report of `dist-mem evaluate`."""

    run: str  # label
    path: Path
    step: int
    report: Report


def find_evaluations(run_dir: Path, label: str) -> list[Evaluation]:
    """Return the reports of a run, by split, protocol and step. Raises UnusableError for a file that is no report."""
    paths = sorted((run_dir / "evaluations").glob("*-step-*.json"), key=lambda path: path.stem)
    found = []
    for path in (path for path in paths if not path.name.startswith(_OTHER_COMMANDS)):
        step = re.fullmatch(r".+?-step-(\d{1,18})(-.+)?", path.stem)
        if step is None:
            raise UnusableError(
                f"{path} is no report of `dist-mem evaluate`, which end in -step-STEP.json: move it away"
            )
        found.append(Evaluation(label, path, int(step[1]), read_report(checked_inside(run_dir, path))))
    return found


def evaluation_tables(evaluations: Sequence[Evaluation]) -> Markup:
    """Return the tables of all reports: figures, recall by distance, and documents, folded."""
    if not evaluations:
        hint = "No evaluation yet. Run: "
        return element("p", hint, element("code", "dist-mem evaluate RUN --split test"), class_="empty")
    return joined([_figures(evaluations), _recall(evaluations), *map(_documents, evaluations)])


def _figures(evaluations: Sequence[Evaluation]) -> Markup:
    header = ["run", "split", "step", "tokens", "word ppl", "token ppl", "bits/byte", "accuracy", "memory gain (nats)"]
    rows = [
        [
            entry.run,
            _protocol(entry),
            f"{entry.step:,}",
            f"{entry.report.num_scored:,}",
            shown(entry.report.word_perplexity),
            shown(entry.report.token_perplexity),
            shown(entry.report.bits_per_byte, ".4f"),
            shown(entry.report.accuracy, ".2%"),
            _gain(entry),
        ]
        for entry in evaluations
    ]
    return table("All tokens", header, rows, num_text=2)


def _protocol(entry: Evaluation) -> str:
    """Return split and tag of a report, as "test" or "test, without-memory"."""
    split, _, rest = entry.path.stem.partition("-step-")
    return ", ".join(part for part in (split, rest.partition("-")[2]) if part)


def _gain(entry: Evaluation) -> str:
    """Return the gain of the memory in nats per token; empty for a report without memory."""
    if is_without_memory(entry.path):
        return ""
    other = counterpart(entry.path)
    if not other.exists():
        return "not measured"
    without = read_report(checked_inside(other.parent.parent, other))
    return f"{memory_gain(entry.report, without).nats:.4f}"


def _recall(evaluations: Sequence[Evaluation]) -> Markup:
    """Return the perplexity of recall tokens by distance, over the bands of the run that reaches farthest."""
    known = [entry for entry in evaluations if entry.report.recall]
    if not known:
        return Markup()
    widest = max((entry.report for entry in known), key=lambda report: report.seg_len + report.mem_len)
    bands = list(recall_bands(widest.seg_len, widest.mem_len).values())
    rows = []
    for entry in known:
        values = [shown(entry.report.recall_perplexity(band)) for band in bands]
        rows.append([entry.run, _protocol(entry), f"{entry.step:,}", *values])
    caption = "Perplexity of recall tokens, by the distance in tokens to the passage that they refer to"
    return table(caption, ["run", "split", "step", *map(str, bands)], rows, num_text=2)


def _documents(entry: Evaluation) -> Markup:
    """Return the first documents of a report, folded."""
    documents = entry.report.documents
    rows = [
        [
            document.id,
            document.title,
            f"{document.num_scored:,}",
            shown(perplexity(document.nll, document.words)),
            shown(perplexity(document.nll, document.num_scored)),
            shown(accuracy(document.hits, document.num_scored), ".2%"),
        ]
        for document in documents[:TABLE_ROWS]
    ]
    name = f"Documents of {entry.run}, {_protocol(entry)}, step {entry.step:,}"
    more = len(documents) - TABLE_ROWS
    note = element("p", f"and {more} more, in {entry.path.with_suffix('.csv').name}") if more > 0 else ""
    found = table(name, ["document", "title", "tokens", "word ppl", "token ppl", "accuracy"], rows, num_text=2)
    return element("details", element("summary", name), found, note)


def gain_tables(found: Aggregates) -> Markup:
    """Return which words gain from the memory: the largest gains, and groups of words."""
    top = [[each.word.text, each.word.kind, _token(each.word.first), f"{each.gain:+.3f}"] for each in found.top]
    parts = [table("Largest gains", ["word", "class", "token", "nats"], top, num_text=2)]
    for name, groups in (
        ("By class of word", found.by_class),
        ("Names, by tokens since their last mention", found.by_distance),
        ("By position in the book", found.by_position),
    ):
        rows = [
            [group.label, f"{group.num_words:,}", f"{group.gain:+.1f}", shown(group.mean, "+.3f")] for group in groups
        ]
        parts.append(table(name, ["", "words", "nats", "nats per word"], rows))
    share = found.share_of_names
    note = f"{found.names_in_top} of the {len(found.top)} largest gains are names."
    note += "" if math.isnan(share) else f" All names together have {share:.0%} of the total gain."
    return joined([element("p", note), element("div", *parts, class_="tables")])


def _token(position: int) -> Markup:
    """Return a link to a token of the book."""
    return element("a", f"{position:,}", href=f"#token-{position}")


def settings_table(run_dirs: Sequence[Path], labels: Sequence[str]) -> Markup:
    """Return every key of every run's config.yaml; those that differ between runs come first.

    Interpolations stay as they are written, so that no value of the environment enters the page.
    """
    settings = [_settings(run_dir) for run_dir in run_dirs]
    keys = list(dict.fromkeys(key for found in settings for key in found))
    rows = {key: [found.get(key, "") for found in settings] for key in keys}
    differing = [[key, *row] for key, row in rows.items() if len(set(row)) > 1]
    equal = [[key, *row[:1]] for key, row in rows.items() if len(set(row)) == 1]
    parts = []
    if differing:
        parts.append(table("Settings that differ", ["key", *labels], differing, num_text=1 + len(labels)))
    name = "Settings of all runs" if len(labels) > 1 else f"Settings of {labels[0]}"
    summary = element("summary", f"{name}: {len(equal)} keys")
    parts.append(element("details", summary, table(name, ["key", "value"], equal, num_text=2)))
    return joined(parts)


def _settings(run_dir: Path) -> dict[str, str]:
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UnusableError(f"{path} is missing; give the directory of a run")
    return {
        key: "null" if value is None else str(value)
        for key, value in flatten(read_saved(checked_inside(run_dir, path))).items()
    }
