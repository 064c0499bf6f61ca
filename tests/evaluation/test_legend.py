"""Legends of pictures: memories by their names, seeds of one configuration as one line with bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from dist_mem.config import save_config
from dist_mem.evaluation.plot import Line, add_legend, draw_lines, labels_of
from tests.support.scored_library import make_config

TXL = {"kind": "transformer_xl", "mem_len": 16}
INFINITE: dict[str, Any] = {"kind": "infinite", "num_basis": 8, "over": TXL}


def write_config(folder: Path, name: str, memory: dict[str, Any], **blocks: Any) -> Path:
    config = make_config(name=name, **blocks)
    config.memory = OmegaConf.create(memory)
    (folder / name).mkdir()
    save_config(config, folder / name / "config.yaml")
    return folder / name / "config.yaml"


def test_runs_are_called_by_their_memories_and_what_else_differs(tmp_path: Path) -> None:
    """The legend said `s_txl`, `s_ilin`."""
    runs = {
        "s_none": {"kind": "none"},
        "s_txl": TXL,
        "s_ilin": {**INFINITE, "sampling": "linear"},
        "s_ist": {**INFINITE, "sampling": "sticky"},
        "s_own": {"kind": "averages.py:Averages"},
    }
    configs = [write_config(tmp_path, name, memory) for name, memory in runs.items()]
    assert labels_of([*runs, "alone.json"], [*configs, None]) == [
        "no memory (s_none)",
        "Transformer-XL (s_txl)",
        "infinity-former over Transformer-XL, sampling linear (s_ilin)",
        "infinity-former over Transformer-XL, sampling sticky (s_ist)",
        "averages.py:Averages (s_own)",
        "alone.json",
    ]


def test_seeds_of_one_configuration_have_one_label(tmp_path: Path) -> None:
    names = ["a1", "a2", "longer"]
    configs = [
        write_config(tmp_path, "a1", TXL, train={"seed": 1, "threads": 1}, eval={"batch_size": 3}),
        write_config(tmp_path, "a2", TXL, train={"seed": 2, "threads": 2}, data={"seed": 5}),
        write_config(tmp_path, "longer", TXL, train={"steps": 11}),
    ]
    assert labels_of(names, configs) == [*["Transformer-XL, steps 10"] * 2, "Transformer-XL, steps 11 (longer)"]
    assert labels_of(names[:2], configs[:2]) == ["Transformer-XL"] * 2


def test_runs_that_differ_in_much_are_reported_apart_by_name(tmp_path: Path) -> None:
    other = {"train": {"steps": 3, "global_batch_size": 2}, "model": {"d_inner": 8, "num_heads": 1}}
    configs = [write_config(tmp_path, "one", TXL), write_config(tmp_path, "two", TXL, **other)]
    assert labels_of(["one", "two"], configs) == ["Transformer-XL (one)", "Transformer-XL (two)"]


def test_lines_of_one_label_are_their_mean_with_bars_of_half_the_range() -> None:
    axes = Figure().subplots()
    values = {"a": [4.0, 2.0], "b": [9.0, 9.0]}
    draw_lines(
        axes, [*(Line(label, [32, 64], found) for label, found in values.items()), Line("a", [64, 32], [3.0, 8.0])]
    )
    assert axes.get_legend_handles_labels()[1] == ["a: mean of 2 runs, bars: half the range", "b"]
    first, _ = (line for line in axes.get_lines() if line.get_marker() == "o")
    assert first.get_xydata().tolist() == [[32.0, 6.0], [64.0, 2.5]]
    (bars,) = axes.collections
    ends = [segment.tolist() for segment in bars.get_segments()]
    assert ends == [[[32.0, 4.0], [32.0, 8.0]], [[64.0, 2.0], [64.0, 3.0]]]


def test_no_two_lines_look_alike() -> None:
    """The eleventh had the colour of the first, and its line and marker."""
    axes = Figure().subplots()
    draw_lines(axes, [Line(str(number), [32, 64], [4.0, 2.0]) for number in range(13)])
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
    assert len(looks) == 13


def test_the_legend_lies_below_the_axes_and_takes_no_room_from_them() -> None:
    boxes = []
    for num_lines in (1, 12):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        draw_lines(
            axes, [Line(f"a long name of a memory and its options, {n}", [1, 2], [n, n]) for n in range(num_lines)]
        )
        add_legend(figure)
        figure.draw_without_rendering()
        below = figure.legends[0].get_window_extent()
        assert not below.overlaps(axes.get_tightbbox())
        assert figure.bbox.contains(below.x0, below.y0)
        boxes.append(axes.get_window_extent().height)
    assert boxes[1] > 0.95 * boxes[0]
