"""The pictures of recall by distance and of the accuracy of answers by depth; their lines and legends."""

import io
import itertools
import math
import re
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text

from dist_mem.config import Config, change_config, save_config
from dist_mem.config.check import block_of
from dist_mem.config.keys import DATA, RESULT, keys_of
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.evaluation.depth import answer_depth, depth_bins, depths_to_csv, plot_depth
from dist_mem.evaluation.plot import (
    MIN_TOKENS,
    Line,
    add_legend,
    distance_bins,
    draw_lines,
    labels_of,
    plot_recall,
    reaches,
    recall_curve,
    spread_out,
)
from dist_mem.evaluation.plotting.picture import make_drawable
from dist_mem.evaluation.plotting.style import new_picture, use_style
from dist_mem.evaluation.scores import DocumentScore, RecallScore, Report
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.scored_library import make_config


def report(recall: list[RecallScore]) -> Report:
    return Report("test", "", "", None, 64, 192, 10, [DocumentScore("1", "One", 20.0, 10, 10, 50)], recall)


def test_bins_hold_every_distance_once() -> None:
    bins = distance_bins([report([RecallScore(1, 1.0, 1), RecallScore(1000, 1.0, 1)])])
    for distance in range(1, 1001):
        assert sum(band.low < distance <= (band.high or 0) for band in bins) == 1


def test_curve_is_the_perplexity_in_each_bin_with_enough_tokens() -> None:
    known = report([RecallScore(100, MIN_TOKENS * math.log(7.0), MIN_TOKENS), RecallScore(500, 1.0, MIN_TOKENS - 1)])
    middles, values = recall_curve(known, distance_bins([known]))
    assert values == [pytest.approx(7.0)]
    assert 64 < middles[0] < 128


def test_a_picture_is_drawn_of_whatever_can_be_drawn_and_of_nothing_else(tmp_path: Path) -> None:
    """Also where a loss is too large for a float, or the hits of one report are not known."""
    known, old, huge = (report([RecallScore(100, nll, 100, hits)]) for nll, hits in ((300, 25), (300, None), (1e6, 25)))
    assert recall_curve(known, distance_bins([known]), accuracy=True)[1] == [0.25]
    assert recall_curve(old, distance_bins([known]), accuracy=True) == ([], [])
    path = tmp_path / "recall.png"
    for other, accuracy in ((replace(known, mem_len=0), False), (old, True), (huge, False)):
        plot_recall([("known", known), ("other", other)], path, accuracy=accuracy)
        assert path.read_bytes()[:4] == b"\x89PNG"
        path.unlink()
    few = report([RecallScore(100, 30.0, MIN_TOKENS - 1)])
    none_at_all = [
        (report([]), False, "no recall tokens"),
        (few, False, "at every distance: "),
        (old, True, "accuracy"),
    ]
    for nothing, accuracy, named in none_at_all:
        with refused(ValueError, named):
            plot_recall([("nothing", nothing)], path, accuracy=accuracy)
        assert not path.exists()


def answered(*answers: tuple[float | None, int]) -> Report:
    documents = [
        DocumentScore(str(place), "", 1.0, 2, 1, 2, hits, depth) for place, (depth, hits) in enumerate(answers)
    ]
    return Report("test", "d", "t", None, 32, 32, None, documents, [])


def document(name: str, recall: dict[int, int], masked: list[int] | None) -> TokenizedDocument:
    distances = np.zeros(100, dtype=np.int32)
    for place, distance in recall.items():
        distances[place] = distance
    mask = None if masked is None else np.isin(np.arange(100), masked)
    return TokenizedDocument(name, "", None, 1, 100, np.full(100, 65, dtype=np.uint16), mask, distances)


def test_the_depth_of_an_answer_is_its_referents_place_before_it(tmp_path: Path) -> None:
    documents = [
        document("one", {80: 60, 81: 60}, [80, 81]),
        document("two", {80: 60, 90: 60}, [80, 90]),
        document("more", {80: 60}, [80, 81]),
        document("book", {80: 60}, None),
    ]
    fingerprint = BytesTokenizer().fingerprint
    index = write_split(documents, tmp_path / "test", name="x", split="test", tokenizer_fingerprint=fingerprint)
    found = {entry.id: answer_depth(index, place, 100) for place, entry in enumerate(index.documents)}
    assert found.pop("one") == 1 - 60 / 80
    assert all(math.isnan(depth) for depth in found.values())
    assert math.isnan(answer_depth(index, 0, 70))  # its answer is cut off


def test_each_answer_counts_in_one_of_ten_bins() -> None:
    assert depth_bins(answered((None, 2), (None, 1))) == []
    found = depth_bins(answered((0.0, 2), (0.05, 1), (0.1, 2), (1.0, 0), (None, 2)))
    assert [each.num_answers for each in found] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert [found[number].accuracy for number in (0, 1, 9)] == [3 / 4, 1.0, 0.0]
    assert math.isnan(found[5].accuracy)


def test_depths_are_written_as_lines_and_a_picture(tmp_path: Path) -> None:
    known = answered((0.25, 2), (0.27, 1))
    lines = depths_to_csv([("none", known), ("none", replace(known, documents=[]))]).splitlines()
    assert lines == ["label,low,high,num_answers,accuracy", "none,0.2,0.3,2,0.75"]
    plot_depth([("none", known), ("xl", known)], tmp_path / "depth.png")
    assert (tmp_path / "depth.png").read_bytes()[:4] == b"\x89PNG"


def test_the_reach_is_that_of_most_runs_with_a_memory() -> None:
    none, long = replace(report([]), mem_len=0), replace(report([]), mem_len=1024)
    assert reaches([none, none, none, long, report([]), report([])]) == [(64, "T"), (256, "T + M")]
    assert reaches([none]) == [(64, "T")]


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.5))
def test_labels_lie_in_order_apart_and_near_their_points(wanted: list[float], step: float) -> None:
    wanted.sort()
    places = spread_out(wanted, step)
    assert all(after - before >= step * 0.999 for before, after in itertools.pairwise(places))
    assert sum(places) == pytest.approx(sum(wanted))
    if all(after - before >= step for before, after in itertools.pairwise(wanted)):
        assert places == pytest.approx(wanted)


INFINITE: dict[str, Any] = {"kind": "infinite", "num_basis": 8, "over": {"kind": "transformer_xl", "mem_len": 16}}
LINEAR, STICKY = ({"memory": {**INFINITE, "sampling": sampling}} for sampling in ("linear", "sticky"))
SEED_1 = {"train": {"seed": 1, "threads": 1}, "eval": {"batch_size": 3}}
SEED_2 = {"train": {"seed": 2, "threads": 2}, "data": {"seed": 5}}
MUCH = {"train": {"steps": 3, "global_batch_size": 2}, "model": {"d_inner": 8, "num_heads": 1}}


@pytest.mark.parametrize(
    "runs",
    [
        {
            "s_none": ({"memory": {"kind": "none"}}, "no memory (s_none)"),
            "s_txl": ({}, "Transformer-XL (s_txl)"),
            "s_ilin": (LINEAR, "infinity-former over Transformer-XL, sampling linear (s_ilin)"),
            "s_ist": (STICKY, "infinity-former over Transformer-XL, sampling sticky (s_ist)"),
            "s_own": ({"memory": {"kind": "averages.py:Averages"}}, "averages.py:Averages (s_own)"),
            "alone.json": (None, "alone.json"),
        },
        {
            "a1": (SEED_1, "Transformer-XL, steps 10"),
            "a2": (SEED_2, "Transformer-XL, steps 10"),
            "longer": ({"train": {"steps": 11}}, "Transformer-XL, steps 11 (longer)"),
        },
        {"a1": (SEED_1, "Transformer-XL"), "a2": (SEED_2, "Transformer-XL")},
        {"one": ({}, "Transformer-XL (one)"), "two": (MUCH, "Transformer-XL (two)")},
    ],
    ids=["memories", "lengths and seeds", "seeds", "much"],
)
def test_runs_are_called_by_their_memories_and_what_else_differs(tmp_path: Path, runs: dict[str, Any]) -> None:
    """The legend said `s_txl`, `s_ilin`. Where too much differs, runs are told apart by name alone."""
    configs: list[Path | None] = []
    for name, (blocks, _) in runs.items():
        configs.append(None if blocks is None else tmp_path / f"{name}.yaml")
        if blocks is not None:
            config = make_config(name=name, **{key: part for key, part in blocks.items() if key != "memory"})
            memory = blocks.get("memory", INFINITE["over"])
            save_config(change_config(config, {"memory": memory}), tmp_path / f"{name}.yaml")
    assert labels_of(list(runs), configs) == [label for _, label in runs.values()]
    assert len(set(labels_of(["a step", "another"], configs[:1] * 2))) == 2, "of one run, they are no two seeds"


def test_a_label_names_one_of_the_runs_whatever_their_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        save_config(make_config(name=name, **MUCH), tmp_path / f"{name}.yaml")
    save_config(make_config(name="other"), tmp_path / "other.yaml")
    found = []
    for names in itertools.permutations(("b", "a", "other")):
        labels = labels_of(names, [tmp_path / f"{name}.yaml" for name in names])
        found.append(dict(zip(names, labels, strict=True)))
    assert all(labels == found[0] for labels in found)


HOSTILE = ["a$$b", "p_$\\alpha$_q", "$", "日本の本", "\U0001f9e0 $x^2$", "a\nb"]


def drawn_texts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that gets every text of the pictures that are saved from now on."""
    texts: set[str] = set()
    save = Figure.savefig

    def noted(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        texts.update(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))
        assert not any(text.get_parse_math() for text in figure.findobj(Text) if isinstance(text, Text))

    monkeypatch.setattr(Figure, "savefig", noted)
    return texts


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_picture_shows_names_as_they_are_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`$` began a formula, and a letter that the font lacks was a box and a warning."""
    texts = drawn_texts(monkeypatch)
    known = replace(report([RecallScore(100, 300.0, 100, 25)]), split=name)
    shown = make_drawable(name)
    assert len(shown) == len(name)
    assert shown.replace("\ufffd", "") == "".join(letter for letter in name if letter not in "日本の\U0001f9e0")
    plot_recall([(name, known)], tmp_path / "recall.png")
    assert {shown, f"split {shown}, 1 documents"} <= texts
    texts.clear()
    plot_depth([(name, answered((0.25, 2)))], tmp_path / "depth.png")
    assert shown in texts


def test_every_picture_shows_texts_as_they_are_written() -> None:
    """A figure that is made elsewhere would read formulas again."""
    makers = re.compile(r"(from|import) matplotlib\.(figure|pyplot)|import pyplot")
    found = [
        str(path.relative_to(ROOT))
        for folder in ("dist_mem", "docs", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if makers.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["dist_mem/evaluation/plotting/picture.py"]


def test_log_scales_have_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib writes their powers as formulas."""
    texts = drawn_texts(monkeypatch)
    for high in (1e5, 3.0):
        with use_style():
            figure, axes = new_picture(3.0)
            axes.plot([1, 2], [0.7, high])
            axes.set_yscale("log")
            figure.savefig(io.BytesIO())
    assert "1000" in texts
    assert not any("$" in text for text in texts)


def test_a_key_that_changes_no_result_makes_no_other_model_of_a_seed(tmp_path: Path) -> None:
    """Of three seeds, one with `preflight=false`, the comparison showed an interval of a model with itself."""
    plain, other = tmp_path / "plain.yaml", tmp_path / "other.yaml"
    save_config(make_config(train={"seed": 0}), plain)
    tree = yaml.safe_load(plain.read_text(encoding="utf-8"))
    for name, key in keys_of(Config).items():
        assert key.metadata.affects is not None, name
        if block_of(key.schema) is None and key.metadata.affects not in RESULT | DATA and name != "deepspeed":
            *blocks, last = name.split(".")
            reduce(getitem, blocks, tree)[last] = "another value"
    tree["deepspeed"] = {"zero_optimization": {"stage": 3}}
    other.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert len(set(labels_of(["a", "b"], [plain, other]))) == 1
    tree["train"]["steps"] = 7
    other.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert len(set(labels_of(["a", "b"], [plain, other]))) == 2


def test_lines_of_one_label_are_their_mean_with_bars_of_half_the_range() -> None:
    axes = Figure().subplots()
    values = {"a": [4.0, 2.0], "b": [9.0, 9.0]}
    draw_lines(
        axes, [*(Line(label, [32, 64], found) for label, found in values.items()), Line("a", [64, 32], [3.0, 8.0])]
    )
    assert axes.get_legend_handles_labels()[1] == ["a: mean of 2 runs, bars: half the range", "b"]
    first, _ = (line for line in axes.get_lines() if line.get_marker() == "o")
    assert np.asarray(first.get_xydata()).tolist() == [[32.0, 6.0], [64.0, 2.5]]
    bars: Any = axes.collections[0]
    assert len(axes.collections) == 1
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
        around = axes.get_tightbbox()
        assert around is not None and not below.overlaps(around)
        assert figure.bbox.contains(below.x0, below.y0)
        boxes.append(axes.get_window_extent().height)
    assert boxes[1] > 0.95 * boxes[0]
