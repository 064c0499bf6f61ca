"""The picture of recall by distance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dist_mem.evaluation.plot import MIN_TOKENS, distance_bins, plot_recall, recall_curve
from dist_mem.evaluation.scores import DocumentScore, RecallScore, Report
from tests.support.messages import refused


def report(recall: list[RecallScore]) -> Report:
    return Report(
        split="test",
        data_fingerprint="",
        tokenizer_fingerprint="",
        max_document_len=None,
        seg_len=64,
        mem_len=192,
        num_words=10,
        documents=[DocumentScore("1", "One", 20.0, 10, 10, 50)],
        recall=recall,
    )


def test_bins_hold_every_distance_once() -> None:
    bins = distance_bins([report([RecallScore(1, 1.0, 1), RecallScore(1000, 1.0, 1)])])
    for distance in range(1, 1001):
        assert sum(band.low < distance <= (band.high or 0) for band in bins) == 1


def test_curve_is_the_perplexity_in_each_bin_with_enough_tokens() -> None:
    known = report([RecallScore(100, MIN_TOKENS * math.log(7.0), MIN_TOKENS), RecallScore(500, 1.0, MIN_TOKENS - 1)])
    middles, values = recall_curve(known, distance_bins([known]))
    assert values == [pytest.approx(7.0)]
    assert 64 < middles[0] < 128


def test_picture_is_written_and_needs_recall_tokens(tmp_path: Path) -> None:
    known = report([RecallScore(100, 300.0, 100)])
    plot_recall([("none", known), ("other", replace(known, mem_len=0))], tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"
    with refused(ValueError):
        plot_recall([("none", report([]))], tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def test_the_accuracy_has_a_curve_and_a_picture_where_it_is_known(tmp_path: Path) -> None:
    known, old = (report([RecallScore(100, 300.0, 100, hits)]) for hits in (25, None))
    assert recall_curve(known, distance_bins([known]), accuracy=True)[1] == [0.25]
    assert recall_curve(old, distance_bins([known]), accuracy=True) == ([], [])
    plot_recall([("known", known), ("old", old)], tmp_path / "recall.png", accuracy=True)
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"
    with refused(ValueError):
        plot_recall([("old", old)], tmp_path / "old.png", accuracy=True)


def test_too_few_recall_tokens_to_draw_are_reported(tmp_path: Path) -> None:
    few = report([RecallScore(100, 30.0, MIN_TOKENS - 1)])
    with pytest.raises(ValueError, match=f"fewer than {MIN_TOKENS} recall tokens at every distance"):
        plot_recall([("few", few)], tmp_path / "few.png")
    assert not (tmp_path / "few.png").exists()


def test_a_loss_too_large_for_a_float_leaves_no_picture_undrawn(tmp_path: Path) -> None:
    known, huge = report([RecallScore(100, 300.0, 100)]), report([RecallScore(100, 1e6, 100)])
    plot_recall([("known", known), ("huge", huge)], tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"
