"""The pictures of recall by distance, and of the accuracy of answers by depth."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.evaluation.depth import answer_depth, depth_bins, depths_to_csv, plot_depth
from dist_mem.evaluation.plot import MIN_TOKENS, distance_bins, plot_recall, reaches, recall_curve, spread_out
from dist_mem.evaluation.scores import DocumentScore, RecallScore, Report
from tests.support.messages import refused


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
    for nothing, accuracy in ((report([]), False), (few, False), (old, True)):
        with refused(ValueError):
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
