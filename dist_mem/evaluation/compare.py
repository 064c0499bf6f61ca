"""Compare evaluations of several runs: word-level perplexity, recall perplexity by distance, gain of the memory.

Token perplexity replaces word-level perplexity if words are not known (blocks). Bits per byte, with differences instead
of ratios, replace both where a perplexity of words is above 10,000, which models have that hardly know a word yet, and
where tokenizers differ; then there is no accuracy, no recall and no gain per token either. All of it is decided over
all runs, so that their order decides only which one the others are compared with.

    dist-mem compare runs/none runs/transformer_xl

All runs share the same bands of distance: those of the run whose segment and short-term memory together reach farthest.
A model without memory cannot see the tokens before its segment, so the middle band shows whether a memory works. The
gain of one run over another includes the effect of different weights; `memory_gain` measures the gain of a run's memory
alone, and requires an evaluation of the run without memory. Its interval is that of a bootstrap over documents. Runs
that differ only in their seeds are compared once more together, by intervals over seeds and documents.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.checkpoint.manifest import run_of
from dist_mem.config.check import nearest
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.evaluation.intervals import Interval, about_settled, compare_over_seeds, find_settled, intervals
from dist_mem.evaluation.memory_gain import MemoryGain, memory_gain
from dist_mem.evaluation.plot import labels_of, plot_recall
from dist_mem.evaluation.report_names import (
    WITHOUT_MEMORY,
    counterpart,
    is_without_memory,
    list_reports,
    names_of,
    tag_in,
    without_data,
)
from dist_mem.evaluation.scores import (
    MEASURES,
    Band,
    Report,
    format_metric,
    measure_of,
    read_report,
    recall_bands,
    same_text,
    same_tokenizer,
)
from dist_mem.runtime.figures import is_figure
from dist_mem.runtime.files import is_missing, is_wrong_path
from dist_mem.runtime.terminal import table

_PREFERRED = ("test", "validation")
_IN_TOKENS = "the tokenizers differ, so what is measured in tokens is left out: accuracy, recall, gain of the memory"


class ComparedRun(NamedTuple):
    """A run in the comparison."""

    name: str
    report: Report
    without_memory: Report | None = None  # report of the same checkpoint and protocol without memory
    config: Path | None = None  # config.yaml of the run; None: the report is not in a run directory
    tag: str = ""  # of the report's name: its data and protocol


class ComparisonRow(NamedTuple):
    """The metrics of one run, and its gain over the first one: a ratio of perplexities or a difference of bits."""

    name: str
    value: float  # of `measure_of` all runs
    gain: float
    interval: Interval | str | None  # of `gain`; why there is none; None: first run
    accuracy: float  # nan if it is not known, or of other tokens than those of the other runs
    memory: MemoryGain | None  # of its memory; None if it has not been evaluated without, or of other tokens
    recall: dict[Band, tuple[float, float]]  # perplexity and gain


def find_reports(paths: Sequence[Path], split: str | None) -> list[ComparedRun]:
    """Return the newest report of a split in each run directory, all of one protocol; a path may also be a report.

    Args:
        split: None: test if every run has it, else validation.

    Raises:
        ValueError: a path is missing, a run has no report of the split, or the runs have no protocol in common; the
            message explains how to get a report.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such run directory or report")
        if path.resolve().parent.name == "checkpoints" and (run := run_of(path.resolve())) != path:
            raise ValueError(
                f"{path} is a checkpoint, whose evaluations are in {run}: give that, or one of its reports"
            )
        if path.suffix == ".json" and split is not None and (said := read_report(path).split) != split:
            raise ValueError(f"{path} is a report of {said}, but --split is {split}: leave one of them out")
    wanted = [split] if split else _PREFERRED
    found = {name: {path: _newest(path, name) for path in paths} for name in wanted}
    chosen = max(wanted, key=lambda name: sum(map(bool, found[name].values())))  # the first one on a tie
    missing = [path for path, reports in found[chosen].items() if not reports]
    if missing:
        raise ValueError("; ".join(f"{path}: no evaluation of {chosen}{_remedy(path, chosen)}" for path in missing))
    of_runs = {path: reports for path, reports in found[chosen].items() if path.suffix != ".json"}
    taken = _of_one_protocol(of_runs)
    given = list(found[chosen])
    return [_read_entry(name, taken.get(path, path)) for name, path in zip(names_of(given), given, strict=True)]


def _read_entry(name: str, path: Path) -> ComparedRun:
    """Read the report at `path`, and the one without memory if it exists."""
    other = None if is_without_memory(path) else counterpart(path)
    without_memory = read_report(other) if other is not None and not is_missing(other) else None
    config = path.parent.parent / "config.yaml"
    return ComparedRun(name, read_report(path), without_memory, None if is_missing(config) else config, tag_in(path))


def _remedy(path: Path, split: str) -> str:
    """Return how to get an evaluation of the split, or the evaluated split that was probably meant."""
    evaluated = sorted({name.split for name in list_reports(path).values() if not name.tag.endswith(WITHOUT_MEMORY)})
    if close := nearest(split, evaluated):
        return f", but of {' and '.join(evaluated)}; did you mean {close}?"
    return f"; run: dist-mem evaluate {path} --split {split}"


def _newest(path: Path, split: str) -> dict[str, Path]:
    """Return the newest report of each protocol and data by its tag, except those without memory."""
    if path.suffix == ".json":
        return {"": path}
    return {
        name.tag: report
        for report, name in list_reports(path).items()  # the newest one last
        if name.split == split and not is_without_memory(report)
    }


def _of_one_protocol(found: Mapping[Path, Mapping[str, Path]]) -> dict[Path, Path]:
    """Return the reports with the tag "" (as trained) if every run has it, else with the only other common tag.

    Without one, runs may have the same protocol on data that only some of them were trained on.
    """
    for reports in (found, {path: _by_protocol(tags) for path, tags in found.items()}):
        common = set.intersection(*map(set, reports.values())) if reports else set()
        if "" in common or len(common) == 1:
            tag = "" if "" in common else common.pop()
            return {path: tags[tag] for path, tags in reports.items()}
    if not found:
        return {}
    protocols = [
        f"{path.name} {' and '.join(f'by {tag}' if tag else 'as trained' for tag in sorted(reports))}"
        for path, reports in found.items()
    ]
    raise ValueError(f"{', '.join(protocols)}: evaluate them with the same protocol, or give the report files")


def _by_protocol(reports: Mapping[str, Path]) -> dict[str, Path]:
    """Return the reports by the tag of their protocol alone, without that of other data; those of the own go first."""
    own, others = dict[str, Path](), dict[str, Path]()
    for tag, path in reports.items():
        protocol = without_data(tag, read_report(path).data_fingerprint)
        (own if protocol == tag else others)[protocol] = path
    return others | own


def compare(entries: Sequence[ComparedRun]) -> list[ComparisonRow]:
    """Return the metrics of every run over common bands; bands without recall tokens are omitted.

    Raises:
        ValueError: the reports score different texts.
    """
    _check_text(entries)
    reports = [entry.report for entry in entries]
    name, by_tokens, first = measure_of(reports), same_tokenizer(reports), reports[0]
    widest = max(reports, key=lambda report: report.seg_len + report.mem_len)
    bands = [band for band in recall_bands(widest.seg_len, widest.mem_len).values() if _has_recall(reports, band)]
    found = intervals(name, [first], {str(number): [report] for number, report in enumerate(reports) if number})
    return [
        ComparisonRow(
            entry.name,
            getattr(entry.report, name),
            _gain(name, first, entry.report),
            found.get(str(number)),
            entry.report.accuracy if by_tokens else math.nan,
            memory_gain(entry.report, entry.without_memory) if entry.without_memory and by_tokens else None,
            {
                band: (recall, first.recall_perplexity(band) / recall)
                for band in bands
                for recall in [entry.report.recall_perplexity(band)]
            },
        )
        for number, entry in enumerate(entries)
    ]


def _has_recall(reports: Sequence[Report], band: Band) -> bool:
    return same_tokenizer(reports) and all(report.recall_in(band)[1] > 0 for report in reports)


def _gain(name: str, first: Report, other: Report) -> float:
    before, after = getattr(first, name), getattr(other, name)
    return float(before / after if MEASURES[name].is_ratio else before - after)


def _check_text(reports: Sequence[ComparedRun]) -> None:
    in_blocks = [entry.name for entry in reports if entry.report.num_words is None]
    if 0 < len(in_blocks) < len(reports):
        raise ValueError(
            f"{', '.join(in_blocks)}: scored in blocks (eval.blocks), the others not; evaluate all with "
            "eval.blocks=false, and give the report files"
        )
    if not same_text([entry.report for entry in reports]):
        names = ", ".join(entry.name for entry in reports)
        raise ValueError(
            f"{names}: these evaluations do not score the same documents; evaluate all on one data.path, and give "
            "the report files"
        )


def to_table(entries: Sequence[ComparedRun], rows: Sequence[ComparisonRow]) -> str:
    """Return the comparison for a terminal: a table of all tokens, and one of recall tokens if there are any."""
    first, reports = entries[0].report, [entry.report for entry in entries]
    name = measure_of(reports)
    names = ["run", *(row.name for row in rows)]
    columns = [names, [MEASURES[name].short, *(_main_cell(name, row) for row in rows)]]
    if not all(math.isnan(row.accuracy) for row in rows):
        columns.append(["accuracy", *(format_metric(row.accuracy, ".2%") for row in rows)])
    if any(row.memory for row in rows):
        columns.append(["memory gain", *(_memory_cell(row.memory) for row in rows)])
    tokens = f", {first.num_scored:,} tokens" if same_tokenizer(reports) else ""
    lines = [f"split {first.split}, {len(first.documents)} documents{tokens}", *table(zip(*columns, strict=True))]
    lines += [] if tokens else [_IN_TOKENS]
    lines += _interval_lines(name, len(first.documents), rows)
    if bands := list(rows[0].recall):
        counts = ", ".join(f"{band} {first.recall_in(band)[1]:,}" for band in bands)
        lines += ["", f"perplexity of recall tokens by distance to the referent; tokens: {counts}"]
        by_band = [[str(band), *(_cell(*row.recall[band]) for row in rows)] for band in bands]
        lines += table(zip(names, *by_band, strict=True))
    return "\n".join(lines)


def _interval_lines(name: str, count: int, rows: Sequence[ComparisonRow]) -> list[str]:
    """Return one line per gain, with its interval over `count` documents or the reason why there is none."""
    lines = []
    for row in rows[1:]:
        if isinstance(row.interval, Interval):
            about = f"95 % interval {row.interval.bounds()}, bootstrap over {count} documents"
        else:
            about = f"no interval: {row.interval}"
        sign, unit = ("/", "") if MEASURES[name].is_ratio else ("-", " bits per byte")
        lines.append(f"{rows[0].name} {sign} {row.name}: {format_metric(row.gain, '.3f')}{unit} ({about})")
    return lines


def _main_cell(name: str, row: ComparisonRow) -> str:
    if MEASURES[name].is_ratio:
        return _cell(row.value, row.gain)
    value = format_metric(row.value, MEASURES[name].form)
    if row.interval is None or not is_figure(row.gain):
        return value
    return f"{value} ({abs(row.gain):.3f} {'lower' if row.gain > -0.0005 else 'higher'})"


def _memory_cell(gain: MemoryGain | None) -> str:
    if gain is None:
        return "not measured"
    return f"{gain.nats:.4f} nats per token ({format_metric(gain.ratio)}x)"


def _hint(entries: Sequence[ComparedRun], split: str) -> str | None:
    """Return how to measure the memory gains that are not known; None if all are known."""
    names = [entry.name for entry in entries if entry.without_memory is None]
    if not names or not same_tokenizer([entry.report for entry in entries]):
        return None
    return f"memory gain not measured: {', '.join(names)}; run: dist-mem evaluate RUN --split {split} --without-memory"


def _cell(value: float, gain: float) -> str:
    if not is_figure(gain) or abs(gain - 1) < 0.005:
        return format_metric(value)
    return (
        f"{format_metric(value)} ({gain:.2f}x lower)"
        if gain > 1
        else f"{format_metric(value)} ({1 / gain:.2f}x higher)"
    )


def run(paths: Sequence[Path], *, split: str | None = None, picture: Path | None = None) -> int:
    """Run the command and return the exit code of the process.

    Args:
        picture: file to draw the recall curves into.

    Raises:
        UnusableError: a path is missing, a run lacks the evaluation, or the evaluations cannot be compared.
    """
    try:
        entries = find_reports(paths, split)
        if picture is not None and not same_tokenizer([entry.report for entry in entries]):
            raise ValueError(f"--plot {picture}: recall is by distance in tokens, and the runs' tokenizers differ")
        names, configs, tags = ([getattr(each, key) for each in entries] for key in ("name", "config", "tag"))
        labels = labels_of(names, configs, tags)
        print("\n".join([to_table(entries, compare(entries)), *seed_lines(labels, [each.report for each in entries])]))
        if hint := _hint(entries, entries[0].report.split):
            print(hint, file=sys.stderr)
        if picture is not None:
            plot_recall([(label, entry.report) for label, entry in zip(labels, entries, strict=True)], picture)
            print(f"written: {picture}")
    except ValueError as error:
        raise UnusableError(str(error)) from error
    except OSError as error:
        if is_wrong_path(error):
            raise UnusableError(f"{error.filename}: {error.strerror}; give another path") from error
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def seed_lines(labels: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """Return a table of the groups of equal labels for a terminal; no lines if no two labels are equal.

    Args:
        labels: as `labels_of` returns them, equal for runs that differ only in seeds.
        reports: one of each run; all score the same documents.
    """
    groups: dict[str, list[Report]] = {}
    for label, report in zip(labels, reports, strict=True):
        groups.setdefault(label, []).append(report)
    if len(groups) == len(labels):
        return []
    first, name = next(iter(groups)), measure_of(reports)
    measure, by_tokens = MEASURES[name], same_tokenizer(reports)
    sign = "/" if measure.is_ratio else "-"
    heading = ["seeds together", "runs", measure.short, *(["accuracy"] if by_tokens else [])]
    rows = [[*heading, f"{first} {sign} it, 95 %"]]
    found = intervals(name, groups[first], {label: group for label, group in groups.items() if label != first})
    family = compare_over_seeds(found)
    marked = find_settled(found) if len(family) > 1 else set[str]()
    for label, group in groups.items():
        spreads = [_mean_and_spread([getattr(each, name) for each in group], measure.form)]
        spreads += [_mean_and_spread([each.accuracy for each in group], ".2%")] if by_tokens else []
        shown_interval = "" if label == first else _format_interval(found[label], is_settled=label in marked)
        rows.append([label, str(len(group)), *spreads, shown_interval])
    about = "means over runs that differ only in their seeds, ± standard deviation; interval over seeds and documents"
    return ["", about, *table(rows), *([about_settled(len(family))] if len(family) > 1 else [])]


def _format_interval(interval: Interval | str, *, is_settled: bool) -> str:
    return f"none ({interval})" if isinstance(interval, str) else interval.text(is_settled=is_settled)


def _mean_and_spread(values: Sequence[float], form: str) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2 or not is_figure(mean):
        return format_metric(mean, form)
    return f"{format_metric(mean, form)} ± {format_metric(statistics.stdev(values), form)}"
