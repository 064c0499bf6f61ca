"""The intervals of a table: by how much models differ, with other seeds and other documents of the same kind.

With several seeds of both models an interval is that of Student's t. Its variance is that of the means over the seeds
(two parts, one of each model), plus that of the documents, the same ones for both (one part). With 2 to 10 seeds the
variance of few seeds is hardly known, which the quantile of t makes up for, and percentiles of a bootstrap do not:

- If Bartlett's test does not object to equal variances over all models of the table, the seeds' variance is the
  pooled one, with the degrees of freedom of all. It objects below p = 0.5: of few seeds it sees little, and a
  preliminary test at 0.05 would pool what differs (Bancroft 1964).
- Else each model has its own, with Welch's degrees of freedom (Welch 1947).
- The quantile is the mean of the seeds' and the documents' ones, weighted by their variances (Cochran and Cox 1957):
  degrees of freedom of the sum, after Satterthwaite, make it too short where few seeds agree by chance.

Models whose trainings with one seed have much in common, as the same first updates, are compared seed by seed: what a
seed does to both is no part of the variance, which is that of the differences, with S - 1 degrees of freedom.

tests/evaluation/test_intervals.py simulates the coverage. With one seed of either model, the interval is that of
the documents alone, and says so: they are drawn with replacement, the same ones for both models, because a document
that is hard is hard for both (paired bootstrap; Koehn 2004). Where a table compares several models with one, Holm's
correction says which of its intervals would exclude equality by chance in at most 5 % of such tables (Holm 1979).

Shape letters: S seeds, N documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import stdtrit

from dist_mem.evaluation.scores import DocumentScore, Report, total_words
from dist_mem.runtime.figures import exponential
from dist_mem.runtime.terminal import count_noun

Array = NDArray[np.float64]
BySeed = Mapping[int, Report]  # the reports of a model, by the seed of its training

MIN_DOCUMENTS = 8  # with 8, a bootstrap at 95 % covers about 90 %; with 2, the draws are only three different ones
LEVEL = 0.05  # of Holm's correction, and what an interval leaves out
SETTLED = "†"  # at an interval of several: it excludes equality also after that correction
_POOLED_FROM = 0.5  # p of Bartlett's test
_LEAST_P = 1e-12
_DRAWS = 10_000  # resamples of documents
_DRAWS_AT_ONCE = 1_000_000  # documents drawn in one array: 8 MB, and a few such arrays
_SEED = 0  # the same reports give the same interval
_TAIL = 100 * LEVEL / 2  # percent on either side


class Bounds(NamedTuple):
    """A 95 % interval of a difference."""

    low: float
    high: float
    p_value: float  # two-sided: the share of equals that would differ as much, or more


def resample(gains: Array, counts: Array) -> Bounds:
    """Return the interval of sum(gains) / sum(counts) over documents, (N,) each, by bootstrap."""
    generator = np.random.default_rng(_SEED)
    means = []
    left = _DRAWS
    while left:
        rows = min(left, max(1, _DRAWS_AT_ONCE // len(counts)))
        drawn = generator.integers(len(counts), size=(rows, len(counts)))
        means.append(gains[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
        left -= rows
    found = np.concatenate(means)
    low, high = np.percentile(found, [_TAIL, 100 - _TAIL])
    beyond = min((found <= 0).sum(), (found >= 0).sum())
    return Bounds(float(low), float(high), min(1.0, 2 * (int(beyond) + 1) / (_DRAWS + 1)))


class Interval(NamedTuple):
    """The 95 % interval of a gain: a ratio of perplexities, or a difference of another metric."""

    low: float
    high: float
    p_value: float  # two-sided: the share of equals that would differ as much, or more
    over_seeds: bool  # False: over documents only, since one of the models has one seed

    def bounds(self, form: str = ".3f") -> str:
        return f"{self.low:{form}} to {self.high:{form}}"

    def text(self, *, is_settled: bool = False, form: str = ".3f") -> str:
        """Return "1.037 to 1.151 †", or "1.037 to 1.151 (documents only)".

        Args:
            is_settled: it stands after correction, see `find_settled`.  form: of a bound.
        """
        notes = (SETTLED if is_settled else "", "" if self.over_seeds else "(documents only)")
        return " ".join(filter(None, (self.bounds(form), *notes)))


@dataclass(frozen=True)
class _Metric:
    """How a metric is made of documents, and how two models' differences of it are shown."""

    value: Callable[[DocumentScore], float]  # nan: not known
    count: Callable[[DocumentScore], float]  # what the sum of the values is divided by; 0: the document has no share
    show: Callable[[float], float]
    sign: float  # -1: a lower value is better


def intervals(
    metric: str, first: Sequence[Report], others: Mapping[str, Sequence[Report]]
) -> dict[str, Interval | str]:
    """Return the interval of the gain of every model over the first, or why there is none.

    Args:
        metric: one of `scores.METRICS`. Of a perplexity, per word or else per token, the gain is the first's divided by
            the other's; of bits per byte, how many fewer the other has; of a share, how much larger the other's is.
        first, others: of each model a report for every seed; all score the same documents.
    """
    table = _read_table(metric, [first, *others.values()])
    before, *rest = table.values
    pooled = pooled_variance([table.means(each) for each in table.values]) if len(table.counts) else None
    find = partial(difference, pooled=pooled)
    return {name: table.compare(before, after, find) for name, after in zip(others, rest, strict=True)}


def paired_intervals(metric: str, first: BySeed, others: Mapping[str, BySeed]) -> dict[str, Interval | str]:
    """Return the same as `intervals`, of models that are compared seed by seed, with the seeds that both have."""
    shown: dict[str, Interval | str] = {}
    for name, other in others.items():
        seeds = sorted(first.keys() & other.keys())
        if seeds:
            table = _read_table(metric, [[each[seed] for seed in seeds] for each in (first, other)])
            before, after = table.values
            shown[name] = table.compare(before, after, paired_difference)
        else:
            shown[name] = "no seed that both have"
    return shown


class _Table(NamedTuple):
    """A metric of all models of a table."""

    metric: _Metric
    counts: Array  # (N,)
    values: list[Array]  # of every model, (S, N)

    def means(self, values: Array) -> Array:
        """Return the means over documents, (S,)."""
        return np.asarray(values.sum(axis=1) / self.counts.sum())

    def compare(self, before: Array, after: Array, find: Callable[[Array, Array, Array], Bounds]) -> Interval | str:
        """Return the interval of the gain of a model over another, or why there is none."""
        if problem := _problem(before, after):
            return problem
        low, high, p_value = find(before, after, self.counts)
        several = min(len(before), len(after)) > 1
        return Interval(self.metric.show(low), self.metric.show(high), p_value, over_seeds=several)


def _read_table(metric: str, models: Sequence[Sequence[Report]]) -> _Table:
    first, found = models[0][0], _metric(metric, models[0][0])
    counts = np.array([found.count(document) for document in first.documents], dtype=np.float64)
    if metric == "word_perplexity" and first.num_words is not None:
        counts *= first.num_words / counts.sum()  # an official count differs from that of the documents
    known = counts > 0
    values = [
        found.sign * np.array([[found.value(document) for document in each.documents] for each in reports])[:, known]
        for reports in models
    ]
    return _Table(found, counts[known], values)


class PooledVariance(NamedTuple):
    """The variance that all models of a table have over their seeds."""

    variance: float
    freedom: int  # degrees of


def pooled_variance(means: Sequence[Array]) -> PooledVariance | None:
    """Return the variance that models' means over documents, (S,) each, have in common; None if they have none."""
    several = [each for each in means if len(each) > 1]
    if len(several) < 2 or not all(np.isfinite(each).all() and np.ptp(each) > 0 for each in several):
        return None
    if stats.bartlett(*several).pvalue < _POOLED_FROM:
        return None
    freedom = sum(len(each) - 1 for each in several)
    return PooledVariance(sum((len(each) - 1) * float(each.var(ddof=1)) for each in several) / freedom, freedom)


def difference(before: Array, after: Array, counts: Array, pooled: PooledVariance | None) -> Bounds:
    """Return the interval of sum(after - before) / sum(counts), means over seeds.

    Args:
        before, after: a metric of every document, (S, N); the numbers of seeds may differ.
        counts: what the metrics are divided by, (N,).
        pooled: the variance of a mean over documents from seed to seed, if all models have one; else each has its own.
    """
    if min(len(before), len(after)) < 2:
        return resample(_mean_gains(before, after), counts)
    if pooled is None:
        parts = [float((each.sum(axis=1) / counts.sum()).var(ddof=1)) / len(each) for each in (before, after)]
        of_seeds, weights = sum(parts), zip(parts, (before, after), strict=True)
        spread = sum(part**2 / (len(each) - 1) for part, each in weights)
        freedom = of_seeds**2 / spread if spread else 1.0
    else:
        of_seeds, freedom = pooled.variance * (1 / len(before) + 1 / len(after)), float(pooled.freedom)
    return _student(_mean_gains(before, after), counts, of_seeds, freedom)


def paired_difference(before: Array, after: Array, counts: Array) -> Bounds:
    """Return the interval of the same as `difference`, whose seeds are the same ones, in the same order."""
    if len(before) < 2:
        return resample(_mean_gains(before, after), counts)
    by_seed = (after - before).sum(axis=1) / counts.sum()
    return _student(_mean_gains(before, after), counts, float(by_seed.var(ddof=1)) / len(by_seed), len(by_seed) - 1)


def _mean_gains(before: Array, after: Array) -> Array:
    """Return the gain of every document, (N,): a difference of means over seeds."""
    return np.asarray(after.mean(axis=0) - before.mean(axis=0))


def _student(gains: Array, counts: Array, of_seeds: float, freedom: float) -> Bounds:
    """Return the interval of sum(gains) / sum(counts).

    Args:
        gains, counts: of every document, (N,).
        of_seeds, freedom: the variance of the seeds' mean, and its degrees of freedom.
    """
    gain, others = float(gains.sum() / counts.sum()), len(counts) - 1
    rest = gains - gain * counts
    of_documents = float((rest**2).sum() / counts.sum() ** 2 * len(counts) / others)
    error = math.sqrt(of_seeds + of_documents)
    if not error:
        return Bounds(gain, gain, 0.0 if gain else 1.0)
    share = of_seeds / error**2

    def quantile(tail: float) -> float:
        of_both = stdtrit(np.array([freedom, others]), 1 - tail / 2)
        return float(share * of_both[0] + (1 - share) * of_both[1])

    half = quantile(LEVEL) * error
    low, high = math.log(_LEAST_P), 0.0
    while high - low > 1e-6:  # the tail whose quantile is the gain found: bisection
        middle = (low + high) / 2
        low, high = (low, middle) if quantile(math.exp(middle)) < abs(gain) / error else (middle, high)
    return Bounds(gain - half, gain + half, math.exp(low))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values of a family of comparisons, corrected for their number (Holm 1979)."""
    corrected, largest = dict[str, float](), 0.0
    for place, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p_value * (len(p_values) - place)))
        corrected[name] = largest
    return corrected


def compare_over_seeds(found: Mapping[str, Interval | str]) -> dict[str, float]:
    """Return the p-values of a family of comparisons: those over seeds, since another seed may reverse the others."""
    return {name: each.p_value for name, each in found.items() if isinstance(each, Interval) and each.over_seeds}


def find_settled(found: Mapping[str, Interval | str]) -> set[str]:
    """Return the models whose gain excludes equality after Holm's correction for all comparisons over seeds."""
    return {name for name, p_value in holm(compare_over_seeds(found)).items() if p_value < LEVEL}


def about_settled(comparisons: int) -> str:
    """Return what `SETTLED` at an interval means."""
    return f"{SETTLED} excludes equality also after correction for {comparisons} comparisons (Holm)"


def _problem(before: Array, after: Array) -> str | None:
    """Return why there is no interval of metrics of documents, (S, N) each; None if there is one."""
    num_documents = before.shape[1]
    if num_documents < MIN_DOCUMENTS:
        return f"{count_noun(num_documents, 'document')}; an interval needs at least {MIN_DOCUMENTS}"
    return None if np.isfinite(before).all() and np.isfinite(after).all() else "a loss is not finite"


def _metric(name: str, report: Report) -> _Metric:
    if name == "accuracy":
        return _Metric(_hits, lambda each: each.num_scored, float, 1.0)
    if name == "whole_answers":
        return _Metric(
            lambda each: math.nan if each.hits is None else float(each.hits == each.num_scored),
            lambda each: float(each.num_scored > 0),
            float,
            1.0,
        )
    if name == "bits_per_byte":
        return _Metric(lambda each: each.nll, lambda each: each.bytes, lambda nats: nats / math.log(2), -1.0)
    by_words = name == "word_perplexity" and total_words(report.documents) is not None
    count: Callable[[DocumentScore], float] = (
        (lambda each: each.words or 0) if by_words else (lambda each: each.num_scored)
    )
    return _Metric(lambda each: each.nll, count, exponential, -1.0)


def _hits(document: DocumentScore) -> float:
    return math.nan if document.hits is None else float(document.hits)
