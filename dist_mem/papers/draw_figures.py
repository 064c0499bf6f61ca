"""The figure command: draw a figure of the papers from trained runs.

    dist-mem figure infinite.fig7 runs/infinite
    dist-mem figure lamemo.fig1 runs/txl runs/lamemo --format svg
    dist-mem figure --list

RUN/figures/ of the first run gets NAME-SPLIT-step-STEP.png (or .svg), the plotted numbers as .csv, and the caption as
.md. All are added to that run in MLflow, unless -o names a folder outside the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dist_mem.errors import UnusableError
from dist_mem.evaluation.job import StopCheck, data_tag, find_checkpoint_together, run_on_ranks, track
from dist_mem.evaluation.plot import labels_of
from dist_mem.evaluation.plotting.drawn_figure import write_figure
from dist_mem.evaluation.plotting.style import use_style
from dist_mem.evaluation.protocol import tag_of
from dist_mem.evaluation.report_names import ReportName, join_parts, names_of
from dist_mem.papers.figures import ELSEWHERE, figure_named, figures
from dist_mem.papers.figures.parts.source import FigureSettings, FigureSource
from dist_mem.runtime.distributed import World
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import label_lines


def describe_figures() -> str:
    """Return all figures for a terminal: name, runs and title."""
    drawn = [(name, f"{figure.title}; from {figure.runs}") for name, figure in figures().items()]
    return "\n".join(label_lines([*drawn, *ELSEWHERE.items()]))


def run(
    name: str,
    paths: Sequence[Path],
    settings: FigureSettings,
    *,
    checkpoint: int | None = None,
    folder: Path | None = None,
    form: str = "png",
    early: StopSignal | None = None,
) -> int:
    """Run the command on one process and return its exit code.

    Args:
        checkpoint: step; None: the newest that verifies.
        folder: None: RUN/figures.
        form: png | svg.
        early: as in `evaluate.run`.

    Raises:
        UnusableError: there is no such figure, or a run lacks what it shows.
    """
    figure = figure_named(name)
    if not figure.least_runs <= len(paths) <= figure.most_runs:
        raise UnusableError(f"{name} is made from {figure.runs}, but {len(paths)} runs are given")

    def work(world: World, check: StopCheck) -> None:
        found = [find_checkpoint_together(path, checkpoint, world) for path in paths]
        labels = labels_of(names_of(paths), [one.directory / "config.yaml" for one in found])
        sources = [FigureSource(one, label, settings, world, check) for one, label in zip(found, labels, strict=True)]
        first, run_dir = sources[0], found[0].run_dir
        data = data_tag(first.checkpoint, first.config.data, first.split)
        tag = join_parts(data, tag_of(first.config), settings.document or "")
        target = folder or run_dir / "figures"
        stem = str(ReportName(first.split, found[0].manifest["step"], tag, name))
        with hold_file(target / stem), use_style():
            drawn = figure.draw(name, sources)
            files = write_figure(drawn, target, stem, form=form)
        print(drawn.caption)
        if target.resolve().is_relative_to(run_dir.resolve()):
            kept = [run_dir / path.resolve().relative_to(run_dir.resolve()) for path in files]
            track(found[0], first.config.tracking, {}, kept, settings.overrides)
        else:
            print(f"written: {', '.join(str(path) for path in files)}")

    return run_on_ranks(work, settings.overrides, early, alone="figure")
