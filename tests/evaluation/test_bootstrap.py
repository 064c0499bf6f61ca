"""The interval of a gain: documents drawn with replacement, the same for both models, and seeds, each model its own.

And the lines of runs that differ only in their seeds.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dist_mem.evaluation import compare
from dist_mem.evaluation.bootstrap import MIN_DOCUMENTS, accuracy_interval, gain_interval, no_gain_interval
from dist_mem.evaluation.compare import Entry, seed_lines, to_table
from dist_mem.evaluation.scores import DocumentScore, Report, write_report


def report(*nlls: float, words: int | None = 100) -> Report:
    documents = [DocumentScore(str(place), "", nll, 200, words, 600) for place, nll in enumerate(nlls)]
    return Report("test", "d", "t", None, 32, 32, None, documents, [])


def test_a_gain_that_all_documents_share_has_no_width_however_they_differ() -> None:
    first, other = [500.0, 100.0, 900.0] * 3, [400.0, 0.0, 800.0] * 3
    found = gain_interval([report(*first)], [report(*other)])
    assert found == pytest.approx((math.e, math.e))
    by_tokens = gain_interval([report(*first, words=None)], [report(*other, words=None)])
    assert by_tokens == pytest.approx((math.exp(0.5), math.exp(0.5)))


def test_the_interval_is_that_of_the_mean_for_many_documents() -> None:
    gains = np.random.default_rng(1).normal(10.0, 20.0, 100)
    low, high = gain_interval([report(*(300.0 + gains))], [report(*[300.0] * 100)]) or (0.0, 0.0)
    error = 1.96 * gains.std() / 10 / 100  # nats per word
    assert math.log(low) == pytest.approx(gains.mean() / 100 - error, abs=0.1 * error)
    assert math.log(high) == pytest.approx(gains.mean() / 100 + error, abs=0.1 * error)
    assert gain_interval([report(*(300.0 + gains))], [report(*[300.0] * 100)]) == (low, high)


@pytest.mark.parametrize("count", [5, 10, 30])
def test_the_interval_is_as_wide_as_seeds_and_documents_make_it(count: int) -> None:
    """The variance of the mean over seeds is added to that of the mean over documents."""
    generator = np.random.default_rng(1)
    documents = generator.normal(10.0, 20.0, 100)
    seeds = generator.normal(0.0, 5.0, count)
    seeds -= seeds.mean()
    first = [report(*(300.0 + documents + seed)) for seed in seeds]
    low, high = gain_interval(first, [report(*[300.0] * 100)]) or (0.0, 0.0)
    deviation = math.hypot(documents.std() / 10, seeds.std(ddof=1) / math.sqrt(count))
    assert math.log(low) == pytest.approx(documents.mean() / 100 - 1.96 * deviation / 100, abs=0.2 * deviation / 100)
    assert math.log(high) == pytest.approx(documents.mean() / 100 + 1.96 * deviation / 100, abs=0.2 * deviation / 100)


@pytest.mark.parametrize("shifts", [(0.0, 90.0), (0.0, 30.0, 90.0), (-60.0, 0.0, 60.0)])
def test_an_interval_over_few_seeds_reaches_from_the_worst_to_the_best(shifts: tuple[float, ...]) -> None:
    seeds = [report(*(300.0 + shift + place for place in range(50))) for shift in shifts]
    other = report(*(200.0 + place for place in range(50)))
    low, high = gain_interval(seeds, [other]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((math.exp(1 + min(shifts) / 100), math.exp(1 + max(shifts) / 100)))
    low, high = gain_interval([other], seeds) or (0.0, 0.0)
    assert (low, high) == pytest.approx((math.exp(-1 - max(shifts) / 100), math.exp(-1 - min(shifts) / 100)))


def test_seeds_that_agree_leave_the_interval_of_the_documents() -> None:
    first, other = report(*[500.0, 100.0, 900.0] * 3), report(*[400.0, 20.0, 800.0] * 3)
    assert gain_interval([first] * 3, [other] * 2) == pytest.approx(gain_interval([first], [other]))
    hits = scored(*[1, 2, 3] * 3), scored(*[2, 2, 4] * 3)
    alone, together = (accuracy_interval([hits[0]] * count, [hits[1]] * count) for count in (1, 3))
    assert together == pytest.approx(alone)


@pytest.mark.parametrize("count", range(1, 12))
def test_there_is_an_interval_of_at_least_eight_documents_with_words(count: int) -> None:
    first, other = report(*[500.0] * count), report(*[400.0] * count)
    reason = no_gain_interval([first], [other])
    assert (gain_interval([first], [other]) is None) == (reason is not None) == (count < MIN_DOCUMENTS)
    assert (accuracy_interval([scored(*[1] * count)], [scored(*[2] * count)]) is None) == (count < MIN_DOCUMENTS)
    if count == MIN_DOCUMENTS:
        empty = replace(first.documents[0], nll=0.0, words=0)
        assert gain_interval([replace(first, documents=[*first.documents[1:], empty])], [other]) is None


def test_a_missing_interval_has_a_reason() -> None:
    assert no_gain_interval([report(1.0, 2.0)], [report(1.0, 2.0)]) == "2 documents; a bootstrap needs at least 8"
    assert no_gain_interval([report(*[math.inf] * 9)], [report(*[2.0] * 9)]) == "a loss is not finite"
    entries = [Entry("one", report(100.0, 200.0)), Entry("two", report(80.0, 200.0))]
    table = to_table(entries, compare.compare(entries))
    assert "one / two: 1.051 (no interval: 2 documents; a bootstrap needs at least 8)" in table
    labels, reports = ["a", "a", "b"], [report(1.0, 2.0), report(1.0, 2.5), report(1.0, 3.0)]
    assert "none (2 documents; a bootstrap needs at least 8)" in "\n".join(seed_lines(labels, reports))


def scored(*hits: int | None) -> Report:
    documents = [DocumentScore(str(place), "", 1.0, 4, 1, 4, each) for place, each in enumerate(hits)]
    return replace(report(), documents=documents)


def test_the_interval_of_an_accuracy_is_that_of_the_difference() -> None:
    assert accuracy_interval([scored(*[1, 2, 3] * 3)], [scored(*[2, 3, 4] * 3)]) == (0.25, 0.25)
    seeds = [scored(*[1, 2] * 4), scored(*[3, 4] * 4)]
    low, high = accuracy_interval(seeds, [scored(*[2, 3] * 4)]) or (0.0, 0.0)
    assert (low, high) == (-0.25, 0.25), "of either seed"
    some, every = scored(*[3] * 50, *[4] * 50), scored(*[4] * 100)
    low, high = accuracy_interval([some], [every], whole=True) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.5 - 1.96 * 0.05, abs=0.02), pytest.approx(0.5 + 1.96 * 0.05, abs=0.02))
    assert accuracy_interval([every], [some], whole=True) == (-high, -low)
    assert accuracy_interval([scored(None, *[1] * 8)], [scored(*[2] * 9)]) is None


def test_runs_of_one_label_are_one_line_with_their_spread() -> None:
    reports = [report(*losses * 3) for losses in ([500.0, 100.0, 900.0], [400.0, 0.0, 800.0], [380.0, 20.0, 800.0])]
    assert seed_lines(["a", "b", "c"], reports) == []
    head, *rows = seed_lines(["a", "b", "b"], reports)[2:]
    assert head.split("  ")[0] == "seeds together"
    first, other = (row.split() for row in rows)
    assert first == ["a", "1", "12.18", "n/a"]
    assert other[:5] == ["b", "2", "7.39", "±", "0.00"]  # exp((500 - 100) / 200) = exp(1200 / 600) = 7.39 of both
    low, _, high = other[-3:]  # of 9 documents with gains of 1.1, 0.9 and 1 nats
    assert math.exp(0.9) < float(low) < math.e < float(high) < math.exp(1.1)


def test_compare_groups_runs_by_their_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind, seed in (("none", "none", 0), ("xl0", "transformer_xl", 0), ("xl1", "transformer_xl", 1)):
        write_report(
            report(*[500.0, 100.0] * 4), tmp_path / name / "evaluations", "test-step-00000007", metadata={"step": 7}
        )
        config = f"name: {name}\nmemory: {{kind: {kind}}}\ntrain: {{seed: {seed}}}\ndata: {{seed: {seed}}}\n"
        (tmp_path / name / "config.yaml").write_text(config, encoding="utf-8")
    assert compare.run([tmp_path / name for name in ("none", "xl0", "xl1")]) == 0
    assert re.search(r"\nTransformer-XL +2 +4\.48 ± 0\.00 +n/a +1\.000 to 1\.000\n", capsys.readouterr().out)
    assert compare.run([tmp_path / name for name in ("none", "xl0")]) == 0
    assert "seeds together" not in capsys.readouterr().out
