"""Labels of the runs in a plot: their memories and other settings that differ between them.

Runs whose configurations differ only in seeds, names and keys that affect no figure get the same label. `draw_lines`
draws them as one line: the mean, with error bars of half the range, as in the tables of `dist-mem reproduce`.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.config.memory_blocks import PER_BLOCK
from dist_mem.config.sources import read_saved
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import write_bytes

NAMES = {
    "none": "no memory",
    "causal": "no memory, causal attention",
    "transformer_xl": "Transformer-XL",
    "lamemo": "LaMemo",
    "compressive": "Compressive Transformer",
    "infinite": "infinity-former",
}
SEEDS = ("train.seed", "data.seed")
NO_FIGURE = {
    *("name", "run_dir", "resume", "train.micro_batch_size", "train.threads"),
    *("data.cache", "data.prefetch", "data.stage", "data.stage_dir"),
}
NO_FIGURE_BLOCKS = ("checkpoint.", "deepspeed.", "eval.", "launch.", "tracking.", "watchdog.")
MAX_DIFFERENCES = 3  # most keys in a label
_LEGEND_ROW = 0.165  # inches, at the legend's font size
_COLORS = 10  # of matplotlib, before the first comes again
_STYLES = (("-", "o"), ("--", "s"), (":", "^"))  # line and marker of the first ten labels, of the next ten, and so on


class Line(NamedTuple):
    """The figures of one run; lines of equal labels are drawn as one."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


def settings_of(config: Path) -> dict[str, Any]:
    """Return the keys of a run's config.yaml that affect its figures, except seeds."""
    keys = dict(_flat(read_saved(config), ""))
    if "memory.kind" not in keys:
        raise UnusableError(f"{config} is damaged (it has no memory.kind): copy that of a checkpoint of the run")
    return {
        key: value
        for key, value in keys.items()
        if key not in SEEDS and key not in NO_FIGURE and not key.startswith(NO_FIGURE_BLOCKS)
    }


def _flat(block: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def labels_of(names: Sequence[str], configs: Sequence[Path | None]) -> list[str]:
    """Return a label for each run; runs that differ only in their seeds get the same label.

    Args:
        names: names of the runs; the label of a run with a unique configuration contains its name.
        configs: config.yaml of each run; None: it does not exist, and the name is the label.
    """
    settings = [None if config is None else settings_of(config) for config in configs]
    labels = []
    for name, mine in zip(names, settings, strict=True):
        if mine is None:
            labels.append(name)
            continue
        alike = [other for other in settings if other is not None and memory_name(other) == memory_name(mine)]
        differing = sorted({key for other in alike for key in mine.keys() | other if mine.get(key) != other.get(key)})
        shown = differing if len(differing) <= MAX_DIFFERENCES else []
        parts = [memory_name(mine), *(f"{key.rpartition('.')[2]} {mine.get(key)}" for key in shown)]
        seeds = [other for other, found in zip(names, settings, strict=True) if found == mine]
        if len(seeds) == 1 or len(differing) > MAX_DIFFERENCES:
            parts[-1] += f" ({seeds[0]})"
        labels.append(", ".join(parts))
    return labels


def memory_name(settings: Mapping[str, Any], block: str = "memory") -> str:
    """Return the memory of a run by the name in its paper: "infinity-former over Transformer-XL".

    Of a run with a memory for each block: "none, 8: Infini-attention".
    """
    kind = str(settings[f"{block}.kind"])
    if kind == PER_BLOCK:
        names = [key.split(".")[1] for key in settings if re.fullmatch(r"memory\.\w+\.kind", key)]
        return ", ".join(f"{name}: {memory_name(settings, f'{block}.{name}')}" for name in names)
    under = f"{block}.over"
    over = settings.get(f"{under}.kind", "none")
    return NAMES.get(kind, kind) if over == "none" else f"{NAMES.get(kind, kind)} over {memory_name(settings, under)}"


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw a line per label; for several runs the mean with error bars of half the range, noted in the legend."""
    for index, label in enumerate(dict.fromkeys(line.label for line in lines)):
        linestyle, marker = _STYLES[index // _COLORS % len(_STYLES)]
        runs = [line for line in lines if line.label == label]
        found: dict[float, list[float]] = {}
        for run in runs:
            for x, y in zip(run.xs, run.ys, strict=True):
                found.setdefault(x, []).append(y)
        xs = sorted(found)
        means = [statistics.fmean(found[x]) for x in xs]
        text = label if len(runs) == 1 else f"{label}: mean of {len(runs)} runs, bars: half the range"
        (drawn,) = axes.plot(xs, means, linestyle=linestyle, marker=marker, markersize=4, label=text)
        if len(runs) > 1:
            halves = [(max(found[x]) - min(found[x])) / 2 for x in xs]
            axes.errorbar(xs, means, yerr=halves, fmt="none", ecolor=drawn.get_color(), capsize=3)


def add_legend(figure: Any) -> None:
    """Add a legend below the axes of a figure with constrained layout; inside, long labels would hide the lines."""
    legend = figure.legend(loc="outside lower center", fontsize=8)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * len(legend.get_texts()))


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the suffix of its file, PNG without one."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", dpi=150)
    write_bytes(path, content.getvalue())
