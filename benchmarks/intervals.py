"""How often a table's 95 % intervals contain the truth: simulated, for 2 to 30 seeds, equal and unequal variances.

    python benchmarks/intervals.py               # two minutes of one core
    python benchmarks/intervals.py --draws 500   # rougher
    python benchmarks/intervals.py --cells docs/results/arena --difference 0.02   # how many seeds a difference needs

A value of a document with one seed is the sum of the document (the same for all models), of the model's seed, of the
model on that document, and of the rest, all normal, with the standard deviations (nats per word) of the arena's cells
in docs/results. The first of eight models is compared with each of the others; none is better. "By seed": a seed does
something to all models alike too, and they are compared seed by seed. "Late" draws the seeds from an exponential
distribution instead: most agree, and some begin to copy late. Columns are the mean over the seven comparisons, and the
worst of them. The numbers, beside those of the bootstrap before, are in
docs/log/2026-11-28-intervals-that-cover-and-what-they-leave-of-the-arena.md.

`--cells` reads the finished runs of a study, whose first column is a perplexity or bits per byte, and prints by row how
far seeds lie apart, and with how many seeds each an interval excludes equality in 80 of 100 tables if two rows differ
by `--difference`: in bits per byte, or as a share of the perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dist_mem.evaluation.intervals import difference, paired_difference, pooled_variance

NUM_DOCUMENTS = 32
SEEDS = (2, 3, 5, 10, 30)


class Case(NamedTuple):
    """The standard deviations of a table's models."""

    seeds: Sequence[float]  # of each model from seed to seed; the first is compared with the others
    documents: float = 0.012  # of a model on a document
    rest: float = 0.01
    is_late: bool = False
    shared: float = 0.0  # of what a seed does to all models alike; with it, they are compared seed by seed


CASES = {
    "equal": Case([0.014] * 8),
    "equal, documents hardly differ": Case([0.014] * 8, documents=0.005, rest=0.006),
    "two models, equal": Case([0.014] * 2),
    "two models, 1 to 2": Case([0.0136, 0.0283]),
    "two models, 13 to 1": Case([0.014, 0.0011], documents=0.005, rest=0.006),
    "1 to 2": Case([0.014] + [0.0283] * 7),
    "half of them a quarter": Case([0.014] * 4 + [0.0035] * 4),
    "one of a thirteenth": Case([0.014] * 7 + [0.0011]),
    "one of ten times": Case([0.014] * 7 + [0.14]),
    "those of ten rows of the arena": Case(
        [0.0136, 0.0283, 0.0068, 0.0026, 0.0011, 0.0076, 0.21, 0.0427, 0.0299, 0.31]
    ),
    "equal, by seed": Case([0.014] * 8, shared=0.05),
    "half of them a quarter, by seed": Case([0.014] * 4 + [0.0035] * 4, shared=0.05),
    "late, equal": Case([0.014] * 8, is_late=True),
    "late, one of ten times": Case([0.014] * 7 + [0.14], is_late=True),
}


def coverage(case: Case, num_seeds: int, draws: int) -> NDArray[np.float64]:
    """Return for each model but the first the share of intervals that contain 0, the truth: (models - 1,)."""
    generator = np.random.default_rng(0)
    counts = np.full(NUM_DOCUMENTS, 4000.0)
    contained = np.zeros(len(case.seeds) - 1)
    for _ in range(draws):
        values = [each * counts for each in _drawn(case, num_seeds, generator)]
        pooled = pooled_variance([each.sum(axis=1) / counts.sum() for each in values])
        for place, other in enumerate(values[1:]):
            pair = values[0], other, counts
            low, high, _ = paired_difference(*pair) if case.shared else difference(*pair, pooled)
            contained[place] += low <= 0 <= high
    return contained / draws


def _drawn(case: Case, num_seeds: int, generator: np.random.Generator) -> list[NDArray[np.float64]]:
    """Return the values of every model: (seeds, documents) each."""
    documents = generator.normal(0.0, 0.2, NUM_DOCUMENTS)
    shared = generator.normal(0.0, 1.0, num_seeds) * case.shared if case.shared else np.zeros(num_seeds)
    values = []
    for deviation in case.seeds:
        unit = generator.exponential(1.0, num_seeds) - 1 if case.is_late else generator.normal(0.0, 1.0, num_seeds)
        own = generator.normal(0.0, case.documents, NUM_DOCUMENTS)
        rest = generator.normal(0.0, case.rest, (num_seeds, NUM_DOCUMENTS))
        values.append(documents + own + (shared + deviation * unit)[:, None] + rest)
    return values


def print_coverage(draws: int) -> None:
    print(f"{'standard deviations of seeds':<34}" + "".join(f"{f'{count} seeds':>16}" for count in SEEDS))
    for name, case in CASES.items():
        found = [coverage(case, count, draws) for count in SEEDS]
        cells = [f"{each.mean():.1%}" + (f" ({each.min():.1%})" if len(each) > 1 else "") for each in found]
        print(f"{name:<34}" + "".join(f"{text:>16}" for text in cells), flush=True)


def print_seeds(folder: Path, difference: float) -> None:
    """Print how far the seeds of every row lie apart, and how many a difference needs."""
    rows: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        name, result = next(iter(json.loads(path.read_text())["results"].items()))
        value = float(result["value"])
        rows.setdefault(path.stem.rpartition("-seed")[0], []).append(math.log(value) if "perplexity" in name else value)
    rows = {row: values for row, values in rows.items() if len(values) > 1}
    for row, values in rows.items():
        print(f"{row:<34}{len(values):>3} seeds, standard deviation {statistics.stdev(values):.4f}")
    if not rows:
        sys.exit(f"error: {folder} has no row with two seeds; give the --cells of a study")
    deviation = math.sqrt(statistics.fmean(statistics.variance(values) for values in rows.values()))
    print(f"mean variance: standard deviation {deviation:.4f}")
    for of_documents in (0.0, 0.1 * difference, 0.2 * difference):
        needed = seeds_needed(deviation, of_documents, difference)
        print(
            f"{difference:g} with a standard error of {of_documents:g} due to the documents: {needed} seeds of each row"
        )


def seeds_needed(deviation: float, of_documents: float, difference: float, power: float = 0.8) -> int | None:
    """Return the least number of seeds of each of two rows; None: ten thousand are not enough.

    Args:
        deviation: from seed to seed, of both.  of_documents: standard error of the difference due to the documents.
        power: the share of tables whose interval excludes equality.
    """
    for count in range(2, 10_000):
        error = math.hypot(deviation * math.sqrt(2 / count), of_documents)
        freedom = 2 * (count - 1)
        if stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, difference / error) >= power:
            return count
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="of every case (default: 2000)")
    parser.add_argument("--cells", type=Path, metavar="FOLDER", help="finished runs of a study")
    parser.add_argument("--difference", type=float, default=0.02, help="between two rows (default: 0.02)")
    given = parser.parse_args()
    if given.cells is None:
        print_coverage(given.draws)
    else:
        print_seeds(given.cells, given.difference)


if __name__ == "__main__":
    main()
