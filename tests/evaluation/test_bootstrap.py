"""The interval of a gain is that of documents drawn with replacement, the same for both runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dist_mem.evaluation.bootstrap import accuracy_interval, gain_interval
from dist_mem.evaluation.report import DocumentScore, Report


def report(*nlls: float, words: int | None = 100) -> Report:
    documents = [DocumentScore(str(place), "", nll, 200, words, 600) for place, nll in enumerate(nlls)]
    return Report("test", "d", "t", None, 32, 32, None, documents, [])


def test_a_gain_that_all_documents_share_has_no_width_however_they_differ() -> None:
    found = gain_interval([report(500.0, 100.0, 900.0)], [report(400.0, 0.0, 800.0)])
    assert found == pytest.approx((math.e, math.e))
    by_tokens = gain_interval([report(500.0, 100.0, words=None)], [report(400.0, 0.0, words=None)])
    assert by_tokens == pytest.approx((math.exp(0.5), math.exp(0.5)))


def test_the_interval_is_that_of_the_mean_for_many_documents() -> None:
    gains = np.random.default_rng(1).normal(10.0, 20.0, 100)
    low, high = gain_interval([report(*(300.0 + gains))], [report(*[300.0] * 100)]) or (0.0, 0.0)
    error = 1.96 * gains.std() / 10 / 100  # nats per word
    assert math.log(low) == pytest.approx(gains.mean() / 100 - error, abs=0.1 * error)
    assert math.log(high) == pytest.approx(gains.mean() / 100 + error, abs=0.1 * error)
    assert gain_interval([report(*(300.0 + gains))], [report(*[300.0] * 100)]) == (low, high)


def test_the_losses_of_several_seeds_are_averaged_first() -> None:
    seeds = [report(500.0, 100.0, 900.0), report(520.0, 90.0, 910.0)]
    mean = gain_interval([report(510.0, 95.0, 905.0)], [report(400.0, 0.0, 800.0)])
    assert gain_interval(seeds, [report(400.0, 0.0, 800.0)] * 2) == mean


def test_there_is_no_interval_of_one_document_or_of_infinite_losses() -> None:
    assert gain_interval([report(500.0)], [report(400.0)]) is None
    one, other = report(500.0, math.inf), report(400.0, 3.0)
    assert gain_interval([one], [other]) is None
    empty = replace(one.documents[1], nll=0.0, words=0)
    assert gain_interval([replace(one, documents=[one.documents[0], empty])], [other]) is None


def scored(*hits: int | None) -> Report:
    documents = [DocumentScore(str(place), "", 1.0, 4, 1, 4, each) for place, each in enumerate(hits)]
    return replace(report(), documents=documents)


def test_the_interval_of_an_accuracy_is_that_of_the_difference() -> None:
    assert accuracy_interval([scored(1, 2, 3)], [scored(2, 3, 4)]) == (0.25, 0.25)
    assert accuracy_interval([scored(1, 2), scored(3, 4)], [scored(2, 3), scored(2, 3)]) == (0.0, 0.0)  # of the mean
    first, other = scored(*[3] * 50, *[4] * 50), scored(*[4] * 100)
    low, high = accuracy_interval([first], [other], whole=True) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.5 - 1.96 * 0.05, abs=0.02), pytest.approx(0.5 + 1.96 * 0.05, abs=0.02))
    reverse = accuracy_interval([other], [first], whole=True)
    assert reverse == (-high, -low)
    assert accuracy_interval([scored(1, None)], [scored(1, 2)]) is None
    assert accuracy_interval([scored(1)], [scored(2)]) is None
