"""Evaluate runs over a range of lengths: how far a memory reaches beyond the length it was trained with.

    dist-mem evaluate runs/txl --also runs/lamemo --split test eval.seg_len=64 --sweep mem_len=64,128,192,256

is figure 5 of LaMemo (Ji et al. 2022: T = 64, M = 64 m for m = 1..10). It writes RUN/evaluations/sweep-SPLIT-LENGTH.csv
and .png of the first run, with a row per run and length, and no reports. Both files are rewritten after each row, so an
interrupted sweep keeps its measured rows; the next call measures all rows again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dist_mem.block import model_spec
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.job import (
    StopCheck,
    data_tag,
    find_checkpoint_on_rank0,
    hold_on_rank0,
    run_on_ranks,
    use_threads,
    write_on_rank0,
)
from dist_mem.evaluation.plot import Line, add_legend, draw_lines, labels_of, save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.protocol import Protocol, for_evaluation, lengths_named, protocol_of, tag_of
from dist_mem.evaluation.report_names import FOLDER, join_parts, names_of
from dist_mem.evaluation.scores import MEASURES, Report, format_metric, measure_of
from dist_mem.evaluation.trained_model import Checkpoint, read_settings
from dist_mem.model import MemoryLM
from dist_mem.runtime import markdown
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.distributed import World, decide_on_rank0
from dist_mem.runtime.files import write_text
from dist_mem.runtime.signals import StopSignal

KEYS = ("mem_len", "seg_len", "clamp_len")  # of `eval`
METRICS = tuple(MEASURES)


class Sweep(NamedTuple):
    """A length and its values."""

    key: str  # of `eval`
    values: list[int]


class SweepRow(NamedTuple):
    """One evaluation of a sweep."""

    run: str
    step: int
    protocol: Protocol
    report: Report

    @property
    def metrics(self) -> list[float]:
        """Those of METRICS; nan: no figure."""
        return [getattr(self.report, metric) for metric in METRICS]


def parse_sweep(text: str) -> Sweep:
    """Parse `mem_len=64,128`.

    Raises:
        ValueError: the length is not in KEYS, or a value is not a number of tokens.
    """
    name, _, listed = text.removeprefix("eval.").partition("=")
    if name not in KEYS:
        raise ValueError(f"--sweep {text}: {name!r} must be one of {', '.join(KEYS)}, as in mem_len=64,128,192")
    values = listed.split(",")
    if not all(value.isdecimal() for value in values):
        raise ValueError(f"--sweep {text}: give numbers of tokens after the equals sign, as {name}=64,128,192")
    if 0 in map(int, values):
        without = "; --without-memory, without --sweep, evaluates without the memory" if name == "mem_len" else ""
        raise ValueError(f"--sweep {text}: a length is 0, but must be at least 1{without}")
    return Sweep(name, [int(value) for value in values])


def run(
    paths: Sequence[Path],
    sweep: str,
    *,
    split: str | None = None,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    early: StopSignal | None = None,
) -> int:
    """Run the command and return the exit code of the process.

    Args:
        overrides: `key=value` for all evaluations.
        early: as in `evaluate.run`.

    Raises:
        UnusableError: a checkpoint, the data, an override or a length is invalid.
    """

    def work(world: World, check: StopCheck) -> None:
        parsed = parse_sweep(sweep)
        found = [find_checkpoint_on_rank0(path, checkpoint, world) for path in paths]
        for one in found:  # fail before spending hours on the valid lengths
            check_lengths(one, parsed, overrides)
        own = read_settings(found[0].directory, overrides, reads_data=True)
        scored = split or own.eval.split
        data = decide_on_rank0(lambda: data_tag(found[0], own.data, scored))
        stem = found[0].run_dir / FOLDER / join_parts("sweep", scored, parsed.key, data, tag_of(own))
        rows: list[SweepRow] = []
        names = names_of(paths)
        labels = dict(zip(names, labels_of(names, [one.directory / "config.yaml" for one in found]), strict=True))
        num_rows = len(found) * len(parsed.values)
        with hold_on_rank0(stem):
            for (one, name), value in itertools.product(zip(found, names, strict=True), parsed.values):
                if world.rank == 0:
                    row = f"row {len(rows) + 1} of {num_rows}: {name}, eval.{parsed.key}={value}"
                    print(row, file=sys.stderr, flush=True)
                settings = [*overrides, f"eval.{parsed.key}={value}"]
                rows.append(evaluate_row(one, name, settings, split=split, world=world, check=check))
                write_on_rank0(lambda: write_table(rows, parsed, stem, labels), world, "writing the table")
        if world.rank == 0:
            print(to_markdown(rows))
            print(f"written: {', '.join(str(path) for path in files_of(stem))}")

    return run_on_ranks(work, overrides, early)


def check_lengths(checkpoint: Checkpoint, sweep: Sweep, overrides: Sequence[str]) -> None:
    """Raise ValueError if the checkpoint's memory does not allow one of the lengths."""
    for value in sweep.values:
        config = for_evaluation(read_settings(checkpoint.directory, [*overrides, f"eval.{sweep.key}={value}"]))
        adaptive = config.model.adaptive
        vocab_size = 1 + max(adaptive.cutoffs if adaptive else [0])  # any will do
        with lengths_named(config.eval), torch.device("meta"):
            MemoryLM(model_spec(config, vocab_size))


def evaluate_row(
    checkpoint: Checkpoint,
    name: str,
    overrides: Sequence[str],
    *,
    split: str | None,
    world: World,
    check: StopCheck,
) -> SweepRow:
    """Evaluate a checkpoint and return its row; collective, every rank calls it."""
    config = read_settings(checkpoint.directory, overrides, reads_data=True)
    use_threads(config.train)
    report = evaluate_checkpoint(checkpoint, config, split=split or config.eval.split, world=world, check=check)
    row = SweepRow(name, checkpoint.manifest["step"], protocol_of(config), report)
    if world.rank == 0:
        metric = measure_of([report])
        value = format_metric(getattr(report, metric), MEASURES[metric].form)
        print(f"{name}, {row.protocol}: {metric.replace('_', ' ')} {value}", flush=True)
    return row


def files_of(stem: Path) -> list[Path]:
    """Return the paths of the table and its plot."""
    return [stem.with_name(f"{stem.name}{ending}") for ending in (".csv", ".png")]


def write_table(rows: Sequence[SweepRow], sweep: Sweep, stem: Path, labels: Mapping[str, str]) -> None:
    """Write the table and its plot; `labels` maps each run to its label in the plot."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    table, picture = files_of(stem)
    write_text(table, to_csv(rows))
    plot_sweep(rows, sweep, picture, labels)


def to_markdown(rows: Sequence[SweepRow]) -> str:
    """Return the table for a terminal or a page."""
    with_clamp = len({row.protocol.clamp_len for row in rows}) > 1
    heading = ["run", "step", "T", "M", *(["clamp"] if with_clamp else []), "tokens", "word ppl", "token ppl"]
    lines = []
    for row in rows:
        word, token, bits = row.metrics
        lengths = [row.protocol.seg_len, row.protocol.mem_len, *([row.protocol.clamp_len] if with_clamp else [])]
        metrics = f"{row.report.num_scored:,}", format_metric(word), format_metric(token), format_metric(bits, ".4f")
        lines.append([row.run, str(row.step), *map(str, lengths), *metrics])
    rest = "; ".join(sorted({str(row.protocol).split(", ", 2)[2] for row in rows}))
    table = markdown.table([*heading, "bits/byte"], lines)
    return "\n".join([*table, "", f"split {rows[0].report.split}; {rest}"])


def to_csv(rows: Sequence[SweepRow]) -> str:
    """Return a CSV with one line per row, including the whole protocol."""
    lines: list[list[object]] = [["run", "step", "split", *Protocol._fields, "num_scored", *METRICS]]
    for row in rows:
        lines.append([row.run, row.step, row.report.split, *row.protocol, row.report.num_scored, *row.metrics])
    return csv_text(lines)


@in_style
def plot_sweep(rows: Sequence[SweepRow], sweep: Sweep, path: Path, labels: Mapping[str, str]) -> None:
    """Plot what the rows are compared by (`measure_of`) by length, with a line per label (`draw_lines`)."""
    metric = measure_of([row.report for row in rows])
    figure, axes = new_picture(3.6)
    add_grid(axes)
    lines = []
    for name in dict.fromkeys(row.run for row in rows):
        points = [row for row in rows if row.run == name]
        lengths = [getattr(row.protocol, sweep.key) for row in points]
        lines.append(Line(labels[name], lengths, [getattr(row.report, metric) for row in points]))
    draw_lines(axes, lines)
    axes.set_xlabel(f"{sweep.key} (tokens)")
    axes.set_ylabel(MEASURES[metric].title)
    axes.set_title(f"split {rows[0].report.split}")
    add_legend(figure)
    save_picture(figure, path)
