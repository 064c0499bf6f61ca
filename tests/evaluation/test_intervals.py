"""Intervals of gains: how wide seeds and documents make them, how often they contain the truth, and how many settle."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dist_mem.evaluation.intervals import MIN_DOCUMENTS, Interval, holm, intervals, paired_intervals
from dist_mem.evaluation.scores import METRICS, DocumentScore, Report
from tests.support.paths import ROOT
from tests.support.saved_reports import of_losses

PERPLEXITY = "word_perplexity"


def of_hits(*hits: int | None) -> Report:
    documents = [DocumentScore(str(place), "", 1.0, 4, 1, 4, each) for place, each in enumerate(hits)]
    return replace(of_losses(), documents=documents)


def gain(metric: str, first: Sequence[Report], other: Sequence[Report]) -> Interval:
    found = intervals(metric, first, {"other": other})["other"]
    assert isinstance(found, Interval), found
    return found


def test_a_gain_that_all_documents_share_has_no_width_however_they_differ() -> None:
    first, other = [500.0, 100.0, 900.0] * 3, [400.0, 0.0, 800.0] * 3
    assert gain(PERPLEXITY, [of_losses(*first)], [of_losses(*other)])[:2] == pytest.approx((math.e, math.e))
    official = [replace(of_losses(*losses), num_words=450) for losses in (first, other)]  # the documents have 900
    assert gain(PERPLEXITY, official[:1], official[1:])[:2] == pytest.approx((math.e**2, math.e**2))
    by_tokens = gain(PERPLEXITY, [of_losses(*first, words=None)], [of_losses(*other, words=None)])
    assert by_tokens[:2] == pytest.approx((math.exp(0.5), math.exp(0.5)))
    in_bits = 100 / 600 / math.log(2)
    assert gain("bits_per_byte", [of_losses(*first)], [of_losses(*other)])[:2] == pytest.approx((in_bits, in_bits))
    assert gain("accuracy", [of_hits(*[1, 2, 3] * 3)], [of_hits(*[2, 3, 4] * 3)])[:2] == (0.25, 0.25)


@pytest.mark.parametrize("seeds", [(1, 1), (2, 2), (2, 5), (10, 3), (30, 30)])
@pytest.mark.parametrize("share", [0.05, 1.0, 20.0])  # of the seeds' deviation, of that of the documents
def test_the_interval_is_as_wide_as_seeds_and_documents_make_it(seeds: tuple[int, int], share: float) -> None:
    generator = np.random.default_rng(1)
    documents = generator.normal(10.0, 20.0, 100)
    offsets = [generator.normal(0.0, 5.0 * share, count) for count in seeds]
    first = [of_losses(*(300.0 + documents + seed)) for seed in offsets[0]]
    other = [of_losses(*([300.0 + seed] * 100)) for seed in offsets[1]]
    found = gain(PERPLEXITY, first, other)
    assert found == gain(PERPLEXITY, first, other)
    middle = documents.mean() + offsets[0].mean() - offsets[1].mean()
    of_documents = documents.var(ddof=1) / 100
    if seeds == (1, 1):
        assert not found.over_seeds
        half = 1.96 * math.sqrt(of_documents)
    else:
        assert found.over_seeds
        samples = [each / 100 for each in offsets]
        if stats.bartlett(*samples).pvalue >= 0.5:
            freedom = sum(seeds) - 2
            common = sum(each.var(ddof=1) * (len(each) - 1) for each in offsets) / freedom
            of_seeds = common * sum(1 / count for count in seeds)
        else:
            welch = stats.ttest_ind(*offsets, equal_var=False)
            freedom, of_seeds = welch.df, sum(each.var(ddof=1) / len(each) for each in offsets)
        total = of_seeds + of_documents
        quantile = (of_seeds * stats.t.ppf(0.975, freedom) + of_documents * stats.t.ppf(0.975, 99)) / total
        half = quantile * math.sqrt(total)
    low, high = (100 * math.log(bound) for bound in found[:2])
    tolerance = 0.1 * half if seeds == (1, 1) else 1e-6
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=tolerance)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=4), min_size=2, max_size=5), st.integers(0, 2**32 - 1)
)
def test_an_interval_excludes_equality_where_its_p_value_is_below_five_per_cent(
    tables: list[list[float]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    models = [[of_losses(*(300 + shift + generator.normal(0.0, 9.0, 12))) for shift in shifts] for shifts in tables]
    found = intervals(PERPLEXITY, models[0], {str(place): model for place, model in enumerate(models) if place})
    for interval in found.values():
        assert isinstance(interval, Interval)
        excludes = not interval.low <= 1 <= interval.high
        margin = 0.002 if not interval.over_seeds else 1e-6  # draws: quantiles lie between two of them
        assert (interval.p_value < 0.05 + margin) if excludes else (interval.p_value > 0.05 - margin)


def test_models_compared_by_seed_have_the_width_of_their_differences_in_the_seeds_that_both_have() -> None:
    generator = np.random.default_rng(1)
    documents, seeds = generator.normal(300.0, 20.0, 50), generator.normal(0.0, 50.0, 6)
    gained = 20.0 + generator.normal(0.0, 2.0, 6)
    of_documents = generator.normal(0.0, 8.0, 50)
    first = {place: of_losses(*(documents + seeds[place])) for place in range(5)}
    other = {place: of_losses(*(documents + of_documents + seeds[place] - gained[place])) for place in (5, 3, 1, 2)}
    found = paired_intervals(PERPLEXITY, first, {"other": other, "stranger": {5: other[5]}, "alone": {3: other[3]}})
    assert found["stranger"] == "no seed that both have"
    assert isinstance(found["alone"], Interval) and not found["alone"].over_seeds
    differences = [first[seed].nll / 5000 - other[seed].nll / 5000 for seed in (1, 2, 3)]
    parts = np.var(differences, ddof=1) / 3, of_documents.var(ddof=1) / 50 / 100**2
    quantile = (parts[0] * stats.t.ppf(0.975, 2) + parts[1] * stats.t.ppf(0.975, 49)) / sum(parts)
    half, middle = quantile * math.sqrt(sum(parts)), np.mean(differences)
    both = found["other"]
    assert isinstance(both, Interval) and both.over_seeds
    assert [math.log(bound) for bound in both[:2]] == pytest.approx([middle - half, middle + half])


def test_one_seed_says_nothing_of_others() -> None:
    """A model of one seed has the interval of the documents, however far the seeds of the other lie apart."""
    documents = np.arange(20.0)
    alone = of_losses(*(300.0 + 2 * documents))
    apart = [of_losses(*(250.0 + documents + shift)) for shift in (-90.0, 90.0)]
    for found in (gain(PERPLEXITY, [alone], apart), gain(PERPLEXITY, apart, [alone])):
        assert not found.over_seeds
    middle = of_losses(*(250.0 + documents))
    assert gain(PERPLEXITY, [alone], apart)[:2] == pytest.approx(gain(PERPLEXITY, [alone], [middle])[:2])


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_there_is_an_interval_of_at_least_eight_documents_with_words(count: int, num_seeds: int) -> None:
    def is_known(metric: str, first: Report, other: Report) -> bool:
        return isinstance(intervals(metric, [first] * num_seeds, {"": [other] * num_seeds})[""], Interval)

    first, other = of_losses(*[500.0] * count), of_losses(*[400.0] * count)
    hits = of_hits(*[1] * count), of_hits(*[2] * count)
    pairs = {name: hits if name in ("accuracy", "whole_answers") else (first, other) for name in METRICS}
    assert {is_known(name, *pair) for name, pair in pairs.items()} == {count >= MIN_DOCUMENTS}
    if count == MIN_DOCUMENTS:
        empty = replace(first.documents[0], nll=0.0, words=0)
        assert not is_known(PERPLEXITY, replace(first, documents=[*first.documents[1:], empty]), other)


def test_the_interval_of_a_perplexity_per_token_is_of_tokens() -> None:
    first, other = of_losses(*range(500, 509)), of_losses(*range(400, 409))
    found = gain("token_perplexity", [first], [other])
    assert found.low == pytest.approx(first.token_perplexity / other.token_perplexity) == pytest.approx(found.high)
    some = [
        replace(each, documents=[*each.documents[1:], replace(each.documents[0], words=None)])
        for each in (first, other)
    ]
    assert gain(PERPLEXITY, some[:1], some[1:]) == gain("token_perplexity", some[:1], some[1:]), (
        "words and tokens add up"
    )


def test_what_is_not_known_has_no_interval() -> None:
    infinite, finite = of_losses(*[math.inf] * 9), of_losses(*[2.0] * 9)
    found = intervals(PERPLEXITY, [finite] * 2, {"a": [infinite] * 2, "b": [finite] * 2})
    assert found["a"] == "a loss is not finite" and isinstance(found["b"], Interval)
    unknown = intervals("accuracy", [of_hits(None, *[1] * 8)], {"": [of_hits(*[2] * 9)]})
    assert isinstance(unknown[""], str)


def test_whole_answers_are_counted_by_document() -> None:
    some, every = of_hits(*[3] * 50, *[4] * 50), of_hits(*[4] * 100)
    low, high = gain("whole_answers", [some], [every])[:2]
    assert (low, high) == (pytest.approx(0.5 - 1.96 * 0.05, abs=0.02), pytest.approx(0.5 + 1.96 * 0.05, abs=0.02))
    assert gain("whole_answers", [every], [some])[:2] == (-high, -low)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_holm_keeps_the_order_and_corrects_the_smallest_for_all(p_values: list[float]) -> None:
    found = holm({str(place): value for place, value in enumerate(p_values)})
    pairs = sorted((value, found[str(place)]) for place, value in enumerate(p_values))
    assert pairs[0][1] == pytest.approx(min(1.0, len(p_values) * pairs[0][0]))
    assert [corrected for _, corrected in pairs] == sorted(corrected for _, corrected in pairs)
    assert all(value <= corrected <= 1 for value, corrected in pairs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
@pytest.mark.parametrize(
    "name",
    [
        "equal",
        "two models, 1 to 2",
        "half of them a quarter",
        "those of ten rows of the arena",
        "half of them a quarter, by seed",
    ],
)
def test_95_of_100_intervals_contain_the_truth(monkeypatch: pytest.MonkeyPatch, name: str, num_seeds: int) -> None:
    """Simulated, over the comparisons of a table; that with percentiles of a bootstrap 84 of 100 did was found late."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    simulation = importlib.import_module("intervals")
    case = simulation.CASES[name]
    draws = 1500 // (len(case.seeds) - 1) + 300
    assert 0.93 <= simulation.coverage(case, num_seeds, draws).mean() <= 0.97
