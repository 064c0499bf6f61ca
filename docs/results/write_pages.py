"""Write the numbers of the result pages, and of README, from the cells beside this file.

    python docs/results/write_pages.py          # after new cells
    python docs/results/write_pages.py --check  # exit code 1 if a page is not up to date, and what differs

Between `<!-- table NAME -->` and `<!-- end -->` stands the table of that name in `TABLES`; between
`<!-- KIND FAMILY: WHAT -->` and `<!---->` a number in a sentence: `gain` is the 95 % interval of `A / B`, `mean` that
of row `A` with its standard deviation over seeds, `seeds` its values, seed by seed, `right` the share of recalled words
of `A, BAND`, `rights` that of each seed, `updates` how many the budget gives it, `begins` from which one each seed
copies, `better` in how many seeds of all memories state `A` is better than state `B`, `tokens` which share of `A`'s
tokens takes `B` to its loss.
A gain of a perplexity is a ratio, and one of a share percentage points.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from dist_mem.config import load_config
from dist_mem.evaluation.intervals import SETTLED, Interval, find_settled
from dist_mem.evaluation.scores import Band, Report, report_from
from dist_mem.runtime.markdown import table_row as line
from dist_mem.studies.budget import Costs, fit_budget
from dist_mem.studies.results import SHARES, compared_metric, gains_of_rows, with_spread
from dist_mem.studies.study import load_study

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent.parent
PAGES = (
    RESULTS / "arena.md",
    RESULTS / "state_passing.md",
    RESULTS / "long_context.md",
    ROOT / "README.md",
    ROOT / "docs" / "explanation" / "claims.md",
)
PERPLEXITY, NEAR, FAR = COLUMNS = ("perplexity", "recall 65 to 256", "recall beyond 256")
BANDS = {
    "1 to 64": Band(0, 64),
    "65 to 128": Band(64, 128),
    "129 to 192": Band(128, 192),
    "193 to 256": Band(192, 256),
    "beyond": Band(256, None),
}
COPIES = 1.7  # loss below which a model copies
VOCABULARIES = {
    "pg19": 4000,
    "recipes_pg19": 4000,
    "mqar_long": 64,
    "gradient_depth": 64,
    "long_context": 64,
    "pretrained": 2000,
    "state_passing": 4000,
}  # pieces; of the others, that of the sample library
SAMPLE = 1280
MEAN_OF = 10  # logged losses
XL = "Transformer-XL"


class Cell(NamedTuple):
    """One finished run."""

    path: Path
    seed: int
    body: Mapping[str, Any]

    def report(self, column: str) -> Report:
        return report_from(self.body["reports"][self.body["results"][column]["report"]], self.path)

    def value(self, column: str) -> float:
        return float(self.body["results"][column]["value"])

    @property
    def begins(self) -> str:
        """The first logged update whose loss shows that the model copies."""
        return next((str(step) for step, loss, *_ in self.body["curve"] if loss < COPIES), "never")

    def progress(self) -> list[tuple[int, float]]:
        """Return (update, bits per byte on validation) of the evaluations of a training, (update, loss) if it had none.

        A loss is the mean of the last `MEAN_OF` that were logged: each is of other text.
        """
        if self.body.get("evaluations"):
            return [(step, score) for step, score in self.body["evaluations"]]
        steps, losses = zip(*((step, loss) for step, loss, *_ in self.body["curve"]), strict=True)
        return [(steps[i], fmean(losses[i - MEAN_OF + 1 : i + 1])) for i in range(MEAN_OF - 1, len(steps))]


class Source:
    """A study, and the finished cells of its rows, of the seeds that its file names."""

    def __init__(self, name: str, folder: str = "") -> None:
        self.study = load_study(str(ROOT / "configs" / "arena" / f"{name}.yaml"))
        self.folder, self.vocabulary = RESULTS / (folder or name), VOCABULARIES.get(name, SAMPLE)

    def cells(self, row: str) -> list[Cell]:
        paths = {seed: self.folder / f"{row}-seed{seed}.json" for seed in self.study.seeds}
        return [Cell(path, seed, json.loads(path.read_text())) for seed, path in paths.items() if path.exists()]

    @cache  # noqa: B019  # a handful of objects, which live as long as the program
    def costs(self, row: str) -> Costs:
        """Return what a row takes within the budget; without one, its bytes count."""
        words, budget = [*self.study.train, *self.study.trained_rows[row]], self.study.budget or {"tokens": 1e9}
        return fit_budget(row, words, budget, self.study.fit, load_config, self.vocabulary)[1]


Place = tuple[Source, str]  # where a row of a table stands: a study, and its name there


class Results:
    """The rows of a table that have finished cells, the best first, and how they compare, as one family."""

    def __init__(self, places: Mapping[str, Place], pairs: Iterable[tuple[str, str]]) -> None:
        """Read the cells; of every pair, the second row is compared with the first."""
        found = {row: source.cells(name) for row, (source, name) in places.items()}
        self.places = {row: places[row] for row, cells in found.items() if cells}
        self.column, self._shape = next(iter(next(iter(places.values()))[0].study.columns.items()))
        self.metric = compared_metric(self._shape)
        means = {row: fmean(cell.value(self.column) for cell in found[row]) for row in self.places}
        self.rows = {row: found[row] for row in sorted(means, key=lambda row: means[row])}
        self.pairs = [pair for pair in pairs if self.rows.keys() >= {*pair}]

    @cached_property
    def reports(self) -> dict[str, dict[int, Report]]:
        return {row: {cell.seed: cell.report(self.column) for cell in cells} for row, cells in self.rows.items()}

    @cached_property
    def gains(self) -> dict[tuple[str, str], str]:
        """The intervals of the family, with the mark of those that stand after correction."""
        found: dict[str, Interval | str] = {}
        for first in dict.fromkeys(first for first, _ in self.pairs):
            others = {row: scored for row, scored in self.reports.items() if row != first}  # their variance is pooled
            is_paired = self.places[first][0].study.paired
            of_all = gains_of_rows({first: self.reports[first], **others}, self._shape, paired=is_paired)
            found |= {f"{first} / {row}": of_all[row] for one, row in self.pairs if one == first}
        marked = find_settled({name: found[name] for name in self.compared.values()})
        return {
            pair: self._shown(found[" / ".join(pair)], self.compared[frozenset(pair)] in marked) for pair in self.pairs
        }

    @property
    def compared(self) -> dict[frozenset[str], str]:
        """The comparisons of the family by their rows: one each, also where both ratios are shown."""
        return {frozenset(pair): " / ".join(pair) for pair in self.pairs}

    def _shown(self, interval: Interval | str, is_settled: bool) -> str:
        if isinstance(interval, str):
            return f"none ({interval})"
        if self.metric not in SHARES:
            return interval.text(is_settled=is_settled)
        points = interval._replace(low=100 * interval.low, high=100 * interval.high)
        return points.text(is_settled=is_settled, form="z.0f")

    def costs(self, row: str) -> Costs:
        source, name = self.places[row]
        return source.costs(name)

    def mean(self, row: str, column: str = "", seeds: Sequence[int] = ()) -> str:
        cells = [cell for cell in self.rows[row] if not seeds or cell.seed in seeds]
        values = [cell.value(column or self.column) for cell in cells]
        return with_spread(fmean(values), stdev(values)) if len(values) > 1 else f"{values[0]:.4g}"

    def best(self, column: str) -> str:
        """Return the row with the lowest mean of a column."""
        return min(self.rows, key=lambda row: fmean(cell.value(column) for cell in self.rows[row]))

    def right(self, row: str, band: str, cells: Sequence[Cell] = ()) -> str:
        shares = (cell.report(PERPLEXITY).recall_accuracy(BANDS[band]) for cell in cells or self.rows[row])
        return f"{fmean(shares):.0%}"


HEADLINE = (XL, "XL then none")  # rows that the others of the headline are compared with
NO_CONVOLUTION, CONVOLUTION, TEXT = "DeltaNet without convolution", "XL with convolution", "XL with DeltaNet's text"
CONTROLS = [
    ("DeltaNet without convolution", "DeltaNet"),
    (XL, NO_CONVOLUTION),
    (XL, CONVOLUTION),
    (CONVOLUTION, "DeltaNet"),
    (TEXT, "DeltaNet"),
    (XL, TEXT),
]


STATES, EMPTY = "state_passing", "empty"
REACH, FARTHEST = "long_context", "DeltaNet"  # and the row that others are compared with
ADDED = "pretrained"
RECIPES, BOOKS = "recipes", "recipes_pg19"
RULES = {"": "AdamW, cosine", "Muon": "Muon, cosine", "WSD": "AdamW, WSD"}  # what follows "with" in a row's name
DEPTH, WHOLE = "gradient_depth", 16  # segments of a document, which mqar_long.yaml has in a gradient
STATE_PAIRS = ((EMPTY, "passed"), (EMPTY, "carried"), ("passed", "carried"))


@cache
def results(name: str) -> Results:
    """Return the results of a family by its name in the pages."""
    if name == "controls":
        headline, convolution = Source("headline"), Source("convolution")
        places = {row: (headline, row) for row in (XL, "DeltaNet")}
        places |= {row: (convolution, row) for row in (CONVOLUTION, NO_CONVOLUTION)}
        return Results(places | {TEXT: (Source("equal_text"), XL)}, CONTROLS)
    if name == STATES:
        source = Source(STATES)
        memories = [row.removesuffix(f" {EMPTY}") for row in source.study.rows if row.endswith(f" {EMPTY}")]
        pairs = [(f"{memory} {one}", f"{memory} {other}") for memory in memories for one, other in STATE_PAIRS]
        return Results({row: (source, row) for row in source.study.rows}, pairs)
    if name == DEPTH:
        source, whole = Source(DEPTH), Source("mqar_long")
        places = {row: (source, row) for row in source.study.rows}
        deepest = {row: f"{row.rpartition(' ')[0]} {WHOLE}" for row in places}
        places |= {
            row: (whole, memory) for row in deepest.values() if (memory := row.rpartition(" ")[0]) in whole.study.rows
        }
        return Results(places, [(row, other) for row, other in deepest.items() if row != other])
    source = Source("second_edition" if name == "arena" else name, name)
    rows = firsts = others = list(source.study.rows)
    if name in {RECIPES, BOOKS}:
        pairs = [(memory, row) for row in rows if (memory := row.partition(" with ")[0]) != row]
        return Results({row: (source, row) for row in rows}, pairs)
    if name in {*LONG, REACH}:
        others = [FARTHEST if name == REACH else LEADER]
    else:
        firsts = {"headline": list(HEADLINE), ADDED: rows[:1]}.get(name, [XL])
    pairs = [(first, other) for first in firsts for other in others if first != other]
    return Results({row: (source, row) for row in rows}, pairs)


def table_of(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heading)} |", line(["---"] * len(heading)), *(line(row) for row in rows)]


def bold_best(found: Results, row: str, column: str) -> str:
    text = found.mean(row, column)
    return f"**{text}**" if row == found.best(column) else text


def arena() -> list[str]:
    found = results("arena")
    heading = ["memory", *COLUMNS, f"{XL} / row", "bytes per lane", "copies from"]
    return table_of(
        heading,
        (
            [
                row,
                *(bold_best(found, row, column) for column in (PERPLEXITY, NEAR)),
                found.mean(row, FAR),  # where no model recalls: the best is chance
                found.gains.get((XL, row), ""),
                f"{found.costs(row).state_bytes:,}",
                ", ".join(cell.begins for cell in cells),
            ]
            for row, cells in found.rows.items()
        ),
    )


def costs() -> list[str]:
    """What every row takes."""
    found = results("arena")
    heading = ["memory", "parameters", "updates", "tokens", "products, 10<sup>13</sup> FLOPs", "all", "seconds"]
    measured = json.loads((RESULTS / "arena" / "rows.json").read_text())
    return table_of(
        heading,
        (
            [
                row,
                f"{each.parameters:,}",
                f"{each.steps:,}",
                f"{each.tokens / 1e6:.2f} M",
                f"{(each.flops or 0) / 1e13:.3f}",
                f"{(each.all_flops or 0) / 1e13:.3f}",
                f"{measured[row]['training_seconds']:.0f}",
            ]
            for row, each in ((row, found.costs(row)) for row in found.rows)
        ),
    )


def headline() -> list[str]:
    found = results("headline")
    heading = ["memory", "seeds", *COLUMNS, *(f"{first} / row" for first in HEADLINE), "bytes per lane"]
    return table_of(
        heading,
        (
            [
                row,
                str(len(cells)),
                *(found.mean(row, column) for column in COLUMNS),
                *(found.gains.get((first, row), "") for first in HEADLINE),
                f"{found.costs(row).state_bytes:,}",
            ]
            for row, cells in found.rows.items()
        ),
    )


def controls() -> list[str]:
    """What the convolution and the text are worth: rows of three studies."""
    found = results("controls")
    rows = []
    for row, cells in found.rows.items():
        with_others = [f"{first}: {text}" for (first, other), text in found.gains.items() if other == row]
        each = found.costs(row)
        sizes = [f"{each.steps:,}", f"{each.tokens / 1e6:.2f} M"]
        rows.append(
            [row, str(len(cells)), *(found.mean(row, column) for column in COLUMNS), *sizes, "; ".join(with_others)]
        )
    return table_of(["memory", "seeds", *COLUMNS, "updates", "tokens", "divided by the row"], rows)


def equal_seconds() -> list[str]:
    """README's rows with the seconds of DeltaNet, and what the same seeds have at equal FLOPs."""
    found, headline = results("equal_seconds"), results("headline")
    rows = []
    for row, cells in found.rows.items():
        steps = cells[0].body["definition"]["train.steps"]
        before = headline.mean(row, seeds=[cell.seed for cell in cells]) if row in headline.rows else ""
        values = [*(found.mean(row, column) for column in COLUMNS), found.gains.get((XL, row), ""), before]
        rows.append([row, str(len(cells)), f"{steps:,}", *values])
    return table_of(["memory", "seeds", "updates", *COLUMNS, f"{XL} / row", "perplexity at equal FLOPs"], rows)


def equal_bytes() -> list[str]:
    found = results("equal_bytes")
    heading = ["memory", "seeds", *COLUMNS, f"{XL} / row", *(f"right, {band}" for band in BANDS)]
    return table_of(
        heading,
        (
            [
                row,
                str(len(cells)),
                *(bold_best(found, row, column) for column in COLUMNS),
                found.gains.get((XL, row), ""),
                *(found.right(row, band) for band in BANDS),
            ]
            for row, cells in found.rows.items()
        ),
    )


def shares() -> list[str]:
    found = results("arena")
    return table_of(["memory", *BANDS], ([row, *(found.right(row, band) for band in BANDS)] for row in found.rows))


MATRICES = ("DeltaNet", "Gated DeltaNet then XL", "GLA", "RetNet", "Kimi Delta Attention", "Gated DeltaNet")


def by_seed() -> list[str]:
    """The shares of each seed, of the rows with a matrix in the first block."""
    found = results("arena")
    return table_of(
        ["memory", *BANDS],
        (
            [row, *(", ".join(found.right(row, band, [cell]) for cell in cells) for band in BANDS)]
            for row, cells in found.rows.items()
            if row in MATRICES
        ),
    )


def rate_of(definition: Mapping[str, Any]) -> float:
    """Return the rate that is tried: Muon's, or the only one."""
    rule = "optimizer.muon.lr" if definition.get("optimizer.kind") == "muon" else "optimizer.lr"
    return float(definition[rule])


def trials(found: Results, folder: str) -> dict[str, dict[float, list[Cell]]]:
    """Return the trials of every row in a folder of results: rate -> its cells."""
    tried: dict[str, dict[float, list[Cell]]] = {row: {} for row in found.rows}
    for path in sorted((RESULTS / folder / "tuning").glob("*.json")):
        body = json.loads(path.read_text())
        row = path.stem.partition(" lr ")[0]
        if row in tried:
            rate = rate_of(body["definition"])
            tried[row].setdefault(rate, []).append(Cell(path, body["definition"]["train.seed"], body))
    return tried


def best_rate(tried: Mapping[float, Sequence[Cell]]) -> float:
    """Return the rate of the best mean, of those that were tried with most seeds."""
    most = max(map(len, tried.values()))
    return min(
        (rate for rate in tried if len(tried[rate]) == most),
        key=lambda rate: fmean(cell.value("tuned") for cell in tried[rate]),
    )


def rates() -> list[str]:
    tried = trials(results("arena"), "arena")
    grid = sorted({rate for of_row in tried.values() for rate in of_row})
    rows = []
    for row, of_row in tried.items():
        texts = {rate: f"{cell.value('tuned'):.3f} ({cell.begins})" for rate, (cell, *_) in of_row.items()}
        texts[best_rate(of_row)] = f"**{texts[best_rate(of_row)]}**"
        rows.append([row, *(texts.get(rate, "") for rate in grid)])
    return table_of(["memory", *map(str, grid)], rows)


LONG = {"mqar_long": "answers", "passkey_long": "whole answers", "babilong_long": "whole answers"}
FAR_BANDS = ("up to 64 back", "65 to 512", "beyond 512")
LEADER = "Gated DeltaNet"  # of the tasks a thousand tokens back


def right_by_distance(found: Results, row: str, column: str) -> list[str]:
    """Return the shares of right answers of each seed: of all, and by how far back they are."""
    return [", ".join(f"{cell.value(each):.0%}" for cell in found.rows[row]) for each in (column, *FAR_BANDS)]


def far_back(task: str) -> Iterator[list[str]]:
    """Yield the rows of a task, the best first."""
    found = results(task)
    for row in reversed(found.rows):
        values = right_by_distance(found, row, LONG[task])
        yield [row, f"{found.costs(row).state_bytes:,}", *values, found.gains.get((row, LEADER), "")]


def depths() -> list[str]:
    """What a memory recalls, trained with gradients through so many segments."""
    found = results(DEPTH)
    rows = []
    for row in sorted(found.rows, key=lambda row: (row.rpartition(" ")[0], int(row.rpartition(" ")[2]))):
        memory, _, depth = row.rpartition(" ")
        gain = found.gains.get((row, f"{memory} {WHOLE}"), "")
        rows.append([memory, depth, *right_by_distance(found, row, "answers"), gain])
    heading = ["memory", "segments in a gradient", "all answers", "1 to 64 back", *FAR_BANDS[1:], f"{WHOLE} - row"]
    return table_of(heading, rows)


def reach() -> list[str]:
    """What a memory recalls in documents of the trained length and longer ones, seed by seed."""
    found = results(REACH)
    lengths = sorted(map(int, found.places[FARTHEST][0].study.columns))
    rows = []
    for row in reversed(found.rows):
        shares = (", ".join(f"{cell.value(str(length)):.0%}" for cell in found.rows[row]) for length in lengths)
        rows.append([row, f"{found.costs(row).state_bytes:,}", *shares, found.gains.get((row, FARTHEST), "")])
    return table_of(["memory", "bytes per lane", *(f"{each:,}" for each in lengths), f"{FARTHEST} - row"], rows)


def added() -> list[str]:
    """What a memory adds to a pretrained model."""
    found = results(ADDED)
    first = next(iter(found.places))
    rows = [[row, str(len(found.rows[row])), found.mean(row), found.gains.get((first, row), "")] for row in found.rows]
    return table_of(["memory", "seeds", "perplexity", f"{first} / row"], rows)


def long_table(task: str) -> Callable[[], list[str]]:
    heading = ["memory", "bytes per lane", f"{'all' if task == 'mqar_long' else 'whole'} answers", "1 to 64 back"]
    return lambda: table_of([*heading, *FAR_BANDS[1:], f"{LEADER} - row"], far_back(task))


def states() -> list[str]:
    """Perplexity by position, of memories trained with empty, passed and carried states."""
    found = results(STATES)
    columns = list(reversed(found.places[next(iter(found.places))][0].study.columns))
    rows = []
    for row in found.places:  # as in the file
        memory = row.rpartition(" ")[0]
        gains = [found.gains.get((f"{memory} {one}", row), "") for one in (EMPTY, "passed")]
        rows.append([row, str(len(found.rows[row])), *(found.mean(row, column) for column in columns), *gains])
    return table_of(["memory and state", "seeds", *columns, "empty / row", "passed / row"], rows)


def share_until(progress: Sequence[tuple[int, float]], end: tuple[int, float]) -> float | None:
    """Return which share of the updates of a run, (its last one, its score), takes another one to its score."""
    before = progress[0]
    for here in progress:
        if here[1] <= end[1]:
            part = (before[1] - end[1]) / (before[1] - here[1]) if here != before else 1.0
            return (before[0] + part * (here[0] - before[0])) / end[0]
        before = here
    return None


def tokens_to_loss(found: Results, first: str, row: str) -> str:
    """Return which share of the tokens of a row another one takes to its last loss, with its 95 % interval over seeds.

    Both have read the same text at the same update: seeds are paired, and Student's interval is that of the logarithms.
    Losses are noisy, so that a run itself has its last one before its end: its tokens are those until then.
    """
    others = {cell.seed: cell.progress() for cell in found.rows[row]}
    pairs = [(others[cell.seed], cell.progress()) for cell in found.rows[first] if cell.seed in others]
    shares = [
        share / (share_until(own, own[-1]) or 1.0)
        for other, own in pairs
        if (share := share_until(other, own[-1])) is not None
    ]
    if len(shares) < len(pairs):
        return f"not reached with {len(pairs) - len(shares)} of {len(pairs)} seeds"
    if len(shares) == 1:
        return f"{shares[0]:.2f}"
    logs = np.log(shares)
    half = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / len(logs) ** 0.5
    low, middle, high = np.exp(logs.mean() + half * np.array([-1, 0, 1]))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def recipes(name: str) -> list[str]:
    """What a rule of the update and a schedule gain over AdamW with a cosine."""
    found = results(name)
    rows = []
    for row in sorted(found.places, key=lambda row: row.partition(" with ")[0], reverse=True):
        memory, _, recipe = row.partition(" with ")
        cells, is_pair = found.rows[row], (memory, row) in found.pairs
        gains = [found.gains[memory, row], tokens_to_loss(found, memory, row)] if is_pair else ["", ""]
        begins = [", ".join(cell.begins for cell in cells)] * (name == RECIPES)
        rows.append([memory, RULES[recipe], str(len(cells)), found.mean(row), *gains, *begins])
    gain = f"{RULES['']} {'/' if name == RECIPES else '-'} row"
    heading = ["memory", "recipe", "seeds", found.column, gain, "tokens to its loss"]
    return table_of([*heading, *["copies from"] * (name == RECIPES)], rows)


def count_better(found: Results, state: str, other: str) -> str:
    """Return in how many pairs of a memory and a seed the mean of one state is below that of another."""
    values = {(row, cell.seed): cell.value(found.column) for row, cells in found.rows.items() for cell in cells}
    pairs = [
        (value, values[beside])
        for (row, seed), value in values.items()
        if row.endswith(f" {state}") and (beside := (row.removesuffix(state) + other, seed)) in values
    ]
    return f"{sum(one < two for one, two in pairs)} of {len(pairs)}"


README_ROWS = {
    "none": ("none", "0"),
    XL: ("Transformer-XL, M = 128", "128"),
    "compressive": ("Compressive Transformer", "384"),
    "infinity-former as published": ("∞-former, as published", "the whole book"),
    "XL then Gated DeltaNet": ("Transformer-XL, then Gated DeltaNet", "the whole book"),
    "DeltaNet": ("DeltaNet", "the whole book"),
}


def readme() -> list[str]:
    found = results("arena")
    heading = ["memory", "reach, tokens", "bytes per lane", "perplexity", "1 to 64 back", *list(BANDS)[1:]]
    return table_of(
        heading,
        (
            [*names, f"{found.costs(row).state_bytes:,}", found.mean(row), *(found.right(row, band) for band in BANDS)]
            for row, names in README_ROWS.items()
        ),
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    "arena": arena,
    "costs": costs,
    "headline": headline,
    "controls": controls,
    "equal seconds": equal_seconds,
    "equal bytes": equal_bytes,
    "shares": shares,
    "shares by seed": by_seed,
    "rates": rates,
    "readme": readme,
    "state passing": states,
    "gradient depth": depths,
    "long context": reach,
    "pretrained": added,
    "recipes": lambda: recipes(RECIPES),
    "recipes on books": lambda: recipes(BOOKS),
    **{task: long_table(task) for task in LONG},
}
FAMILIES = {  # table -> the family of its intervals
    **{name: name for name in ("arena", "headline", "controls", RECIPES, *LONG)},
    "equal seconds": "equal_seconds",
    "equal bytes": "equal_bytes",
    "state passing": STATES,
    "gradient depth": DEPTH,
    "long context": REACH,
    "pretrained": ADDED,
    "recipes on books": BOOKS,
}
_TABLE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end -->)", re.S)
_VALUE = re.compile(
    r"(<!-- (gain|mean|seeds|rights?|updates|begins|better|tokens) ([^:>]+): ([^>]+?) -->).*?(<!---->)", re.S
)  # a family that is none fails


def value(kind: str, family: str, what: str) -> str:
    """Return a number of a sentence."""
    found = results(family)
    if kind == "gain":
        first, _, row = what.partition(" / ")
        return found.gains[first, row].removesuffix(f" {SETTLED}")
    if kind == "mean":
        return found.mean(what)
    if kind == "seeds":
        form = ".0%" if found.metric in SHARES else ".1f"
        return ", ".join(f"{cell.value(found.column):{form}}" for cell in found.rows[what])
    if kind == "updates":
        return f"{found.costs(what).steps:,}"
    if kind == "tokens":
        return tokens_to_loss(found, *what.split(" / "))
    if kind == "better":
        return count_better(found, *what.split(" / "))
    if kind == "begins":
        return ", ".join(cell.begins for cell in found.rows[what])
    row, _, band = what.rpartition(", ")
    if kind == "rights":
        return ", ".join(found.right(row, band, [cell]) for cell in found.rows[row])
    return found.right(row, band)


def table_text(name: str) -> str:
    """Return a table, and below it for how many comparisons its intervals are corrected, and whether any stands."""
    lines = TABLES[name]()
    if family := FAMILIES.get(name):
        number = len(results(family).compared)
        correction = f"Holm's correction for {number} comparison{'s' * (number != 1)}"
        stands = any(SETTLED in line for line in lines)
        lines += [
            "",
            f"*{f'{SETTLED} excludes equality also' if stands else 'None excludes equality'} after {correction}.*",
        ]
    return "".join(f"{each}\n" for each in lines)


def written(text: str) -> str:
    """Return a page with its tables and values as the cells have them."""
    text = _TABLE.sub(lambda match: match[1] + table_text(match[2]) + match[3], text)
    return _VALUE.sub(lambda match: match[1] + value(match[2], match[3], " ".join(match[4].split())) + match[5], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = False
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = written(old)
        stale |= new != old
        if check:
            name = str(page.relative_to(ROOT))
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "cells", n=0))
        else:
            page.write_text(new, encoding="utf-8")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
